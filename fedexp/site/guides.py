"""Guides: sections of README.md and CONTRIBUTING.md, and the files in `guides/`."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fedexp.config.folders import conf_dir
from fedexp.core.errors import ConfigError
from fedexp.site.page import Page

README, CONTRIBUTING = "README.md", "CONTRIBUTING.md"

_LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]*)(#[^)\s]*)?\)")


@dataclass(frozen=True)
class Guide:
    """A guide, which is one page of the site.

    Args:
        name: Name of the page's file.
        title: Title of the page.
        sections: Pairs of a file and a heading, in the order of the page. A file of
            `guides/` is used as a whole, and its heading is given as "".
    """

    name: str
    title: str
    sections: tuple[tuple[str, str], ...]


GUIDES = (
    Guide(
        "first-steps", "First steps", ((README, "Run, sweep, resume"), (README, "What there is"))
    ),
    Guide("results", "Results of runs", ((README, "Results"),)),
    Guide("tables", "Paper tables", ((README, "Paper tables"),)),
    Guide(
        "own-method",
        "A method of your own",
        ((README, "Your own method"), (CONTRIBUTING, "Your own plug-ins")),
    ),
    Guide("own-data", "Data of your own", ((CONTRIBUTING, "A data set, a partition"),)),
    Guide("own-table", "A table of your own", ((CONTRIBUTING, "A table"),)),
    Guide("clusters", "Clusters, launchers, engines", ((README, "Clusters and engines"),)),
    Guide("resuming", "Resuming", (("resuming.md", ""),)),
    Guide(
        "architectures",
        "Clients of several architectures",
        ((README, "Clients of several architectures"),),
    ),
    Guide(
        "given-models",
        "Python, and given models",
        ((README, "From Python, and with models of your own"),),
    ),
    Guide(
        "contributing", "A method for fedexp", ((CONTRIBUTING, "A method"), (CONTRIBUTING, "Style"))
    ),
)

# Pages that replace files as the targets of links.
_PAGES = {"conf/config.yaml": "config/index.md"}


def pages() -> list[Page]:
    """Return the pages of the guides.

    Raises:
        ConfigError: README.md or CONTRIBUTING.md does not exist (in an installed
            package), or has no section with a heading that a guide names.
    """
    root = conf_dir().parent
    sections = {name: sections_of(_read(root / name)) for name in (README, CONTRIBUTING)}
    places = {
        (file, slug(heading)): (f"{guide.name}.md", heading)
        for guide in GUIDES
        for file, heading in guide.sections
        if heading
    }
    return [_page(guide, sections, places) for guide in GUIDES]


def _read(path: Path) -> str:
    if not path.is_file():
        raise ConfigError(
            f"the guides need sections of {path.name}, which does not exist",
            where=str(path),
            do="build the site from a checkout",
        )
    return path.read_text()


def sections_of(text: str) -> dict[str, str]:
    """Return the sections of a Markdown file by their ``##`` headings.

    The headings are not part of the sections.
    """
    found: dict[str, list[str]] = {}
    own: list[str] = []
    fenced = False
    for line in text.splitlines():
        fenced ^= line.startswith("```")
        if line.startswith("## ") and not fenced:
            own = found.setdefault(line.removeprefix("## ").strip(), [])
        else:
            own.append(line)
    return {heading: "\n".join(lines).strip() for heading, lines in found.items()}


def slug(heading: str) -> str:
    """Return a heading's anchor, as GitHub makes it."""
    return re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


def _page(
    guide: Guide,
    sections: Mapping[str, Mapping[str, str]],
    places: Mapping[tuple[str, str], tuple[str, str]],
) -> Page:
    parts = [f"# {guide.title}"]
    for file, heading in guide.sections:
        if not heading:
            parts.append((Path(__file__).parent / "guides" / file).read_text().strip())
            continue
        if heading not in sections[file]:
            raise ConfigError(
                f"a guide needs the section '{heading}' of {file}, which does not exist",
                where="fedexp.site.guides.GUIDES",
                expected=", ".join(sections[file]),
            )
        title = f"## {heading} {{#{slug(heading)}}}" if heading != guide.title else ""
        parts += [title, _relinked(sections[file][heading], file, places)]
    return Page(
        f"guides/{guide.name}.md", guide.title, "\n\n".join(part for part in parts if part) + "\n"
    )


def _relinked(text: str, file: str, places: Mapping[tuple[str, str], tuple[str, str]]) -> str:
    """Replace links to files and headings by links to pages.

    If the target of a link has no page, the link is replaced by its words.
    """

    def made(link: re.Match[str]) -> str:
        words, path, anchor = link[1], link[2], (link[3] or "").removeprefix("#")
        if path.startswith(("http:", "https:")):
            return link[0]
        if path in _PAGES:
            return f"[{words}]({posixpath.relpath(_PAGES[path], 'guides')})"
        if (path or file, anchor) not in places:
            return words
        page, heading = places[path or file, anchor]
        return f"[{heading if words.strip('`') == path else words}]({page}#{anchor})"

    return _LINK.sub(made, text)
