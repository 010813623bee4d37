"""A report as one HTML file that opens from disk and loads no other files.

It is readable on paper, on a phone, and in a light or dark theme.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from fedexp.tables.grouping import grouped
from fedexp.tables.report import layout, texts
from fedexp.tables.report.configs import lines, parted
from fedexp.tables.report.report import ClaimResult, ClaimState, Method, Picture, Report
from fedexp.tables.report.shown_cells import ShownRow, shown_cells, shown_rows

if TYPE_CHECKING:
    from jinja2 import Environment, Template

_SVG_ID = re.compile(r'(\bid="|href="#|url\(#)')
# Number of claims in the page's head. A phone's first screen has no room for more.
_SEEN_FIRST = 5
# States of claims, in the order in which the page's head lists them.
_URGENT: tuple[ClaimState, ...] = (
    "contradicted",
    "not supported in reduced form",
    "undecided",
    "superseded settings: no verdict",
    "supported in reduced form",
    "supported",
)


@dataclass(frozen=True)
class Links:
    """The relative links of a page.

    Args:
        runs: For the folder of each run, the links to the run's files by name. The link
            named ``folder`` leads to the folder itself.
        files: Files beside the page.
        configs: Resolved configs by their hashes. The page shows the configs.
    """

    runs: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    files: Sequence[str] = ()
    configs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def page(report: Report, links: Links = Links()) -> str:
    """Return the page as text. The same report and links give the same bytes.

    Args:
        report: The report. Pictures that use ``currentColor`` follow the theme. Other
            pictures get a white background.
        links: Links of the page.
    """
    script, style = (_file(f"page.{ending}") for ending in ("js", "css"))
    rows = shown_rows(report)
    heads = layout.by_role(report)

    return _template().render(
        report=report,
        script=script,
        style=style,
        policy=_policy(script),
        links=links,
        rows=rows,
        columns=heads,
        cells=shown_cells(report),
        blocks=_block_starts(report, rows),
        ranked=any(shown.row.agreement for shown in rows),
        totals=_totals(report, heads),
        headline=texts.headline(report),
        claims=_claims_first(report),
        smaller=list(dict.fromkeys(cell.reduced for cell in report.cells if cell.reduced)),
        variant=texts.variant_note(report).split(":", 1),
        key=_key(report),
        unit=layout.unit(report),
        points=layout.difference_unit(report.unit),
        referenced=layout.has_reference(report),
        marks=texts.verdict_marks(report),
        names=layout.marked_labels(report),
        values=_values(report),
        facts=texts.facts(report),
        hashes=texts.hashes(report),
        configs=parted(links.configs),
        pictures=[
            (picture, _inline(picture, f"p{at}-")) for at, picture in enumerate(report.pictures)
        ],
    )


@functools.cache
def _template() -> Template:
    environment = template_environment(_file)
    environment.globals |= {"sortable": sortable, "lines": lines}
    return environment.get_template("page.html")


def template_environment(load: Callable[[str], str]) -> Environment:
    """Return an environment for templates of reports.

    Args:
        load: Reads a template by its name.
    """
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    environment = Environment(
        autoescape=True,
        loader=FunctionLoader(load),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "minus": layout.minus,
        "condition": layout.label,
        "breakable": breakable,
    }
    environment.globals |= {"texts": texts, "layout": layout}
    return environment


def breakable(text: str) -> Any:
    """Return a text as HTML with places for line breaks between names.

    Without these places, browsers break a long text such as
    ``trainer.momentum_from=normalised`` behind any letter.
    """
    from markupsafe import Markup

    return Markup(re.sub(r"(?<=\w)([.=/])(?=[a-zA-Z_])", r"\1<wbr>", escape(text)))


@functools.cache
def _file(name: str) -> str:
    return files("fedexp.tables.report").joinpath(name).read_text(encoding="utf-8")


def _policy(script: str) -> str:
    """Return a content security policy that forbids loading files and other scripts.

    It protects the page from anything that a label or a picture may contain.
    """
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # Drawings may contain images as data.
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def _claims_first(report: Report) -> tuple[list[ClaimResult], list[ClaimResult]]:
    """Return the paper's first claims for the page's head, and its other claims.

    The other claims are folded on the page. All claims are in the order of `_URGENT`.
    """
    ordered = sorted(report.paper_claims, key=lambda claim: _URGENT.index(claim.state))
    return ordered[:_SEEN_FIRST], ordered[_SEEN_FIRST:]


def _key(report: Report) -> list[str]:
    """Explain in sentences how to read a cell."""
    better = "higher" if report.higher_is_better else "lower"
    first = (
        f"{report.metric.replace('_', ' ').capitalize()} in {layout.unit(report)}, "
        f"{better} is better."
    )
    notes = [f"{note}." for note in texts.footnotes(report)]
    last = "Point at a cell or press it for its seeds, runs, reason and command."
    if not layout.has_reference(report):
        spread = "Each cell: mean ± sample standard deviation (number of seeds)."
        return [first, spread, "Bold: best of its row.", *notes, last]
    allowed = texts.tolerance_note(report)
    judged = (
        f"Reproduced: the 90 % interval of the difference is within the tolerance, {allowed}. "
        "Different: the 95 % interval is beyond it. Close: the means of at least three runs "
        "differ by no more, and the 95 % interval is at most four tolerances wide. Undecided: "
        "none of these."
    )
    ranks = "ρ: Spearman's rank correlation of the methods' order in the row with the paper's."

    return [
        first,
        "Each cell: the paper | mean ± sample standard deviation of our runs (number of seeds).",
        "Below: the verdict, and our mean minus the paper's number.",
        *([judged] if allowed else []),
        "Bold: best of its row, once among the paper's numbers and once among ours.",
        *([ranks] if texts.has_agreement(report) else []),
        *notes,
        last,
    ]


# --- the tables


def _block_starts(report: Report, rows: Sequence[ShownRow]) -> list[bool]:
    """Return, for each row, whether its first condition differs from the row above."""
    firsts = [next(iter(shown.row.conditions.values()), None) for shown in rows]
    return [
        len(report.keys) > 1 and (at == 0 or first != firsts[at - 1])
        for at, first in enumerate(firsts)
    ]


def _totals(report: Report, heads: Sequence[Method]) -> list[str]:
    """Return for every column how many of its judged cells are reproduced.

    Only cells that are counted in the report's headline are used. The list is empty if
    none of them has been judged.
    """
    judged = layout.judged_cells(report)
    if not report.keys or not judged:
        return []
    reproduced = grouped((cell.method, cell.verdict == "reproduced") for cell in judged)
    columns = [reproduced.get(method.key, []) for method in heads]
    return [f"{sum(column)} of {len(column)}" if column else "–" for column in columns]


def _values(report: Report) -> list[tuple[str, list[str]]]:
    """Return the values of every key in the table's order."""
    pairs = [
        (key, layout.label(cell.conditions.get(key)))
        for key in report.keys
        for cell in report.cells
    ]
    return list(grouped(dict.fromkeys(pairs)).items())


def sortable(value: object) -> str | None:
    """Return the sort key of a value in a column of numbers.

    The key is empty for a missing value or NaN. Such values are always sorted last. The
    result is None for a value that is not a number, such as a text.
    """
    if value is None:
        return ""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return "" if math.isnan(value) else repr(value).replace("inf", "Infinity")


# --- pictures


def _inline(picture: Picture, prefix: str) -> Any:
    """Return a picture as an element of the page.

    The XML prolog and the metadata are removed. A prefix makes the ids unique on the
    page. A label for screen readers is added.
    """
    from markupsafe import Markup

    start = picture.svg.index("<svg")
    svg = re.sub(r"<metadata>.*?</metadata>", "", picture.svg[start:], flags=re.DOTALL)
    svg = _SVG_ID.sub(rf"\g<1>{prefix}", svg)
    return Markup(
        svg.replace("<svg", f'<svg role="img" aria-label="{escape(picture.title)}"', 1).strip()
    )
