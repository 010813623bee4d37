"""The site as HTML, which mkdocs-material builds from the generators' pages.

The site can be read from disk or from any server.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Iterable
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fedexp.config.folders import conf_dir
from fedexp.core.errors import ConfigError, FedexpError
from fedexp.site import api, config_reference, guides, methods, records, results
from fedexp.site.page import Page
from fedexp.storage.files import write_bytes, write_json, write_text

# Titles of the folders of pages in the navigation.
_SECTIONS = {
    "results": "Papers",
    "guides": "Guides",
    "methods": "Methods",
    "config": "Configuration",
    "api": "API",
    "benchmarks": "Benchmarks",
}
_ASSETS = ("site.css", "iframe-worker.js", "reachable.js")
# Ending of the pictures that benchmarks show.
_PICTURE = ".png"


def build(out: Path, folder: Path | None = None) -> Path:
    """Build the site of the results in `folder`.

    The site is written to a temporary folder, which replaces `out` at the end.

    Args:
        out: Folder of the site.
        folder: Folder of records. None stands for ``scripts/results`` of the checkout.

    Returns:
        The path of its first page.

    Raises:
        ConfigError: mkdocs-material is not installed, this is not a checkout, there are
            no results, or `out` contains something else than a site.
        FedexpError: A link of a page leads nowhere.
    """
    if find_spec("mkdocs") is None or find_spec("material") is None:
        raise ConfigError(
            "mkdocs-material, which builds the site, is not installed",
            do="pip install 'fedexp[site]'",
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
    pages = [
        *results.pages(read),
        *guides.pages(),
        *methods.pages(results.mentions(read)),
        *config_reference.pages(),
        *api.pages(),
        *results.benchmarks(folder),
    ]

    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".site-", dir=out.parent) as scratch:
        docs, made = Path(scratch) / "docs", Path(scratch) / "site"
        for page in pages:
            write_text(docs / page.path, page.text)
        for path, data in results.files_of(read):
            write_bytes(docs / path, data)
        for picture in folder.glob(f"*{_PICTURE}"):
            write_bytes(docs / "benchmarks" / picture.name, picture.read_bytes())

        make(pages, docs, made)
        if out.exists():
            shutil.rmtree(out)
        made.rename(out)
    return out / "index.html"


def make(pages: Iterable[Page], docs: Path, out: Path) -> None:
    """Write the pages in `docs` as HTML to `out`.

    Args:
        pages: The pages, for the navigation.
        docs: Folder that contains the pages.
        out: Folder of the HTML.

    Raises:
        FedexpError: A link of a page leads nowhere.
    """
    # This keeps Material from printing a warning about another major version of MkDocs.
    os.environ.setdefault("NO_MKDOCS_2_WARNING", "1")
    from mkdocs.commands.build import build as mkdocs_build
    from mkdocs.config import load_config
    from mkdocs.exceptions import Abort, MkDocsException

    for name in _ASSETS:
        text = files("fedexp.site").joinpath("assets", name).read_text(encoding="utf-8")
        write_text(docs / "assets" / name, text)

    source = docs.parent / "mkdocs.yml"
    # mkdocs can read the file, because JSON is also YAML.
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


def config(pages: Iterable[Page], docs: Path, out: Path) -> dict[str, Any]:
    """Return the config of mkdocs.

    The site loads nothing from elsewhere: no font and no script.
    """
    return {
        "site_name": "fedexp",
        "docs_dir": str(docs),
        "site_dir": str(out),
        # Links must work from disk.
        "use_directory_urls": False,
        "nav": navigation(pages),
        "strict": True,
        "validation": {
            "nav": {"omitted_files": "warn", "not_found": "warn"},
            "links": {
                "not_found": "warn",
                "anchors": "warn",
                "absolute_links": "warn",
                "unrecognized_links": "warn",
            },
        },
        "theme": {
            "name": "material",
            "font": False,
            "features": [
                "navigation.tabs",
                "navigation.indexes",
                "navigation.prune",
                "navigation.top",
                "content.code.copy",
                "search.highlight",
                "toc.follow",
            ],
            "palette": [
                {
                    "media": "(prefers-color-scheme)",
                    "toggle": {"icon": "material/brightness-auto", "name": "Switch to light"},
                },
                {
                    "media": "(prefers-color-scheme: light)",
                    "scheme": "default",
                    "primary": "indigo",
                    "toggle": {"icon": "material/weather-sunny", "name": "Switch to dark"},
                },
                {
                    "media": "(prefers-color-scheme: dark)",
                    "scheme": "slate",
                    "primary": "indigo",
                    "toggle": {
                        "icon": "material/weather-night",
                        "name": "Switch to the system's colours",
                    },
                },
            ],
        },
        "plugins": ["search", "offline"],
        "extra": {"generator": False, "polyfills": ["assets/iframe-worker.js"]},
        "extra_css": ["assets/site.css"],
        "extra_javascript": ["assets/reachable.js"],
        "markdown_extensions": [
            "tables",
            "attr_list",
            "admonition",
            "md_in_html",
            "pymdownx.superfences",
            "pymdownx.highlight",
            {"toc": {"permalink": True}},
        ],
    }


def navigation(pages: Iterable[Page]) -> list[Any]:
    """Return the navigation, which has the pages in their order, grouped by folder.

    The ``index.md`` of a folder is the page of its section. `_SECTIONS` names the
    sections at the top level. Any other section has the title of its first page.
    """
    nav: list[Any] = []
    sections: dict[str, list[Any]] = {}
    for page in pages:
        *folders, name = page.path.split("/")
        here = nav
        for depth in range(1, len(folders) + 1):
            key = "/".join(folders[:depth])
            if key not in sections:
                sections[key] = []
                here.append({_SECTIONS.get(key, page.title): sections[key]})
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
