"""Build the site of the results as HTML with mkdocs-material.

The site can be read from disk or from any server. It contains only results.
``mkdocs.yml`` builds another site, which also contains the documentation.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fedexp.config.folders import conf_dir
from fedexp.core.errors import ConfigError, FedexpError
from fedexp.site import leaderboards, records, results
from fedexp.site.page import Page
from fedexp.storage.files import write_bytes, write_json, write_text

_HOME = (
    "# fedexp\n\nThis site has the [results of papers' tables](results/index.md) and the "
    "[leaderboards](leaderboards/index.md).\n"
)
_ASSETS = ("site.css", "iframe-worker.js", "reachable.js", "sortable.js")


def build(out: Path, folder: Path | None = None) -> Path:
    """Build the site of the results in `folder`.

    The site is written to a temporary folder, which replaces `out` at the end.

    Args:
        out: Folder of the site.
        folder: Folder of records (stored results of tables). If None,
            ``scripts/results`` of the checkout.

    Returns:
        The path of the site's first page.

    Raises:
        ConfigError: mkdocs-material is not installed, there are no results, or `out`
            contains something other than a site.
        FedexpError: A link on a page is broken.
    """
    if find_spec("mkdocs") is None or find_spec("material") is None:
        raise ConfigError(
            "mkdocs-material, which builds the site, is not installed",
            do="pip install 'fedexp[docs]'",
        )

    if (
        out.exists()
        and not (out / "index.html").is_file()
        and (not out.is_dir() or any(out.iterdir()))
    ):
        raise ConfigError(
            "the folder contains something else than a site",
            where=str(out),
            do="give another folder: --out DIR",
        )

    out = out.resolve()
    folder = folder or conf_dir().parent / "scripts" / "results"
    read = records.read(folder)
    boards = leaderboards.read(folder)
    pages = [
        Page("index.md", "Home", _HOME),
        *results.pages(read),
        *leaderboards.pages(boards, with_methods=False),
    ]

    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".site-", dir=out.parent) as scratch:
        docs, made = Path(scratch) / "docs", Path(scratch) / "site"
        for page in pages:
            write_text(docs / page.path, page.text)
        for path, data in [*results.files_of(read), *leaderboards.files_of(boards)]:
            write_bytes(docs / path, data)

        make(pages, docs, made)
        if out.exists():
            shutil.rmtree(out)
        made.rename(out)
    return out / "index.html"


def make(pages: Iterable[Page], docs: Path, out: Path) -> None:
    """Write the pages in `docs` as HTML to `out`.

    Args:
        pages: The pages that the navigation lists.
        docs: Folder that contains the pages.
        out: Folder of the HTML.

    Raises:
        FedexpError: A link on a page is broken.
    """
    # Without this variable, Material prints a warning about a new major version of
    # MkDocs.
    os.environ.setdefault("NO_MKDOCS_2_WARNING", "1")
    from mkdocs.commands.build import build as mkdocs_build
    from mkdocs.config import load_config
    from mkdocs.exceptions import Abort, MkDocsException

    for path, text in assets():
        write_text(docs / path, text)

    source = docs.parent / "mkdocs.yml"
    # mkdocs reads YAML. A JSON file is also valid YAML.
    write_json(source, config(pages, docs, out))

    faults, log = _Faults(), logging.getLogger("mkdocs")
    log.addHandler(faults)
    log.propagate = False
    try:
        mkdocs_build(load_config(str(source)))
    except (Abort, MkDocsException) as error:
        raise FedexpError(
            "the site could not be built", got="\n".join(faults.found) or str(error)
        ) from None
    finally:
        log.removeHandler(faults)
        log.propagate = True


def assets() -> Iterator[tuple[str, str]]:
    """Yield the path and the text of each style and script file of the theme."""
    for name in _ASSETS:
        text = files("fedexp.site").joinpath("assets", name).read_text(encoding="utf-8")
        yield f"assets/{name}", text


def config(pages: Iterable[Page], docs: Path, out: Path) -> dict[str, Any]:
    """Return the config of mkdocs."""
    return {
        "INHERIT": str(files("fedexp.site").joinpath("theme.yml")),
        "docs_dir": str(docs),
        "site_dir": str(out),
        "nav": navigation(pages),
        "strict": True,
    }


def navigation(pages: Iterable[Page], depth: int = 0) -> list[Any]:
    """Return the navigation: the pages in the given order, grouped by folder.

    A folder becomes a section. Its ``index.md`` is the page of the section. A section
    has the title of its first page.

    Args:
        pages: The pages.
        depth: Number of leading folders of each path that do not become sections.
    """
    nav: list[Any] = []
    sections: dict[str, list[Any]] = {}
    for page in pages:
        *folders, name = page.path.split("/")
        here = nav
        for level in range(depth + 1, len(folders) + 1):
            key = "/".join(folders[:level])
            if key not in sections:
                sections[key] = []
                here.append({page.title: sections[key]})
            here = sections[key]
        here.append(page.path if folders and name == "index.md" else {page.title: page.path})
    return nav


class _Faults(logging.Handler):
    """A log handler that collects the warnings of mkdocs."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())
