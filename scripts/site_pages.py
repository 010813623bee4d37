"""Hooks of mkdocs, which add generated pages and notebooks, and typeset formulas.

``mkdocs.yml`` names this file. mkdocs calls the functions whose names begin with
``on_``.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from functools import cache
from html import unescape
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page as SitePage
from nbconvert import MarkdownExporter

from fedexp.commands import data, runs, table, tune
from fedexp.commands.help import help_text
from fedexp.config.folders import conf_dir
from fedexp.site import (
    api_reference,
    build,
    command_reference,
    config_reference,
    leaderboards,
    methods,
    records,
    results,
)
from fedexp.site.page import Page
from fedexp.tables.report.picture_sizes import width_of_png

RECORDS = conf_dir().parent / "scripts" / "results"
FORMULAS = Path("methods/formulas")
# Size in points of the smallest text in the pictures of notebooks. These pictures have
# matplotlib's default font sizes.
NOTEBOOK_FONT = 10
log = logging.getLogger("mkdocs.site_pages")

# HTML that pymdownx.arithmatex generates from $...$ and $$...$$.
_FORMULA = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\\(?P<mark>[(\[])(?P<tex>.*?)\\[)\]]</(?P=tag)>',
    re.DOTALL,
)


@cache
def _results() -> dict[str, list[records.Result]]:
    return records.read(RECORDS)


@cache
def _leaderboards() -> list[leaderboards.Shown]:
    return leaderboards.read(RECORDS)


@cache
def _pages(docs: Path) -> list[Page]:
    """Return all generated pages.

    Args:
        docs: Folder of the handwritten pages. It contains the formulas of the methods.
    """
    formulas = {path.stem: path.read_text() for path in (docs / FORMULAS).glob("*.md")}
    commands = (data, runs, table, tune)
    parsers = {one.prog: one for one in (command.parser() for command in commands)}
    return [
        *methods.pages(results.mentions(_results()), _results(), formulas),
        *results.pages(_results()),
        *leaderboards.pages(_leaderboards(), with_methods=True),
        *config_reference.pages(),
        *command_reference.pages(help_text(conf_dir()), parsers),
        *api_reference.pages(),
        *results.benchmarks(RECORDS),
    ]


def on_config(config: MkDocsConfig) -> None:
    """Replace each folder in the navigation by the generated pages in it."""
    pages = _pages(Path(config.docs_dir))
    config.nav = list(_expanded(config.nav or [], pages))

    folder = Path(config.docs_dir) / FORMULAS
    for name in methods.formula_names():
        if not (folder / f"{name}.md").is_file():
            log.warning("docs/%s/%s.md, a formula for methods/, does not exist", FORMULAS, name)


def _expanded(nav: list[Any], pages: list[Page]) -> Iterator[Any]:
    """Yield the entries of a navigation. Each folder is replaced by its pages."""
    for entry in nav:
        if isinstance(entry, str) and entry.endswith("/"):
            yield from build.navigation(
                [page for page in pages if page.path.startswith(entry)], entry.count("/")
            )
        elif isinstance(entry, dict):
            [(title, inside)] = entry.items()
            listed = inside if isinstance(inside, list) else [inside]
            made = list(_expanded(listed, pages))
            yield {title: inside if made == [inside] else made}
        else:
            yield entry


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the generated pages, their pictures, and the notebooks as pages."""

    def add(path: str, content: str | bytes) -> None:
        files.append(File.generated(config, path, content=content))

    for page in _pages(Path(config.docs_dir)):
        add(page.path, page.text)
    pictures = [*results.files_of(_results()), *leaderboards.files_of(_leaderboards())]
    for path, content in [*build.assets(), *pictures]:
        add(path, content)
    for picture in RECORDS.glob("*.png"):
        add(f"benchmarks/{picture.name}", picture.read_bytes())

    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        text, outputs = notebook(Path(file.abs_src_path or ""))
        add(f"{file.src_uri.removesuffix('.ipynb')}.md", text)
        for name, content in outputs.items():
            add(f"{file.src_uri.rpartition('/')[0]}/{name}", content)


def notebook(path: Path) -> tuple[str, dict[str, bytes]]:
    """Return a notebook as Markdown, and its pictures by name."""
    text, resources = MarkdownExporter().from_filename(
        str(path), {"unique_key": path.stem, "output_files_dir": f"{path.stem}_files"}
    )
    pictures: dict[str, bytes] = resources["outputs"]
    for name, png in pictures.items():
        size = f'{{data-font="{NOTEBOOK_FONT}" data-width="{width_of_png(png):g}"}}'
        text = text.replace(f"![png]({name})", f"![The picture that the code draws]({name}){size}")
    return text, pictures


def on_page_content(html: str, page: SitePage, **_: Any) -> str:
    """Replace the formulas of a page by MathML."""

    def typeset(match: re.Match[str]) -> str:
        block = match["mark"] == "["
        tex = unescape(match["tex"]).strip()
        mathml, unknown = mathml_of(tex, block=block)
        if unknown:
            log.warning("%s: latex2mathml does not know %s", page.file.src_uri, ", ".join(unknown))
        return f'<div class="formula" tabindex="0">{mathml}</div>' if block else mathml

    return _FORMULA.sub(typeset, html)


def mathml_of(tex: str, *, block: bool) -> tuple[str, list[str]]:
    """Return a formula as MathML, and the TeX commands that could not be converted."""
    mathml = convert(tex, display="block" if block else "inline")
    return mathml, re.findall(r"\\[A-Za-z]+", mathml)
