"""The pages of results and benchmarks.

The results have a first page, one page per paper and one page per table. Each benchmark
has a page.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args

from jinja2 import Environment
from markupsafe import Markup

from fedexp.site.markdown import escaped
from fedexp.site.page import Mention, Page
from fedexp.site.records import Result
from fedexp.tables.report import layout, texts
from fedexp.tables.report.page import template_environment
from fedexp.tables.report.picture_sizes import sizes_of_png, sizes_of_svg
from fedexp.tables.report.report import (
    Cell,
    ClaimResult,
    Conclusion,
    Method,
    Picture,
    Report,
)
from fedexp.tables.report.shown_cells import shown_rows

# For a table with a single row, the first page prints the results of this many columns.
# It names the number of further columns.
_FEW = 6
# If a table has more columns than this, a hint says that it can be scrolled.
_MOST_COLUMNS = 8
# Meanings of the verdicts on numbers, in the order in which they are shown.
VERDICTS: Mapping[str, str] = {
    "reproduced": "The 90 % interval of the difference to the paper is within the tolerance.",
    "close": (
        "The mean of at least three runs differs by at most the tolerance. The 95 % interval is "
        "at most four tolerances wide."
    ),
    "different": "The 95 % interval of the difference to the paper is beyond the tolerance.",
    "undecided": "There are too few runs, or they vary too much, for any of these.",
    "not comparable": "The runs are smaller than the paper's, or differ from them in another way.",
    "no reference": "The paper prints no number here.",
    "not run": "The runs are missing.",
}
# Meanings of the states of a paper's claims.
CLAIMS: Mapping[str, str] = {
    "supported": "In these runs, the claim holds by a paired test over seeds.",
    "contradicted": "In these runs, the claim is shown not to hold, by the same test.",
    "undecided": "Runs are missing or too few, or their differences are too uncertain.",
    "supported in reduced form": "The claim holds in runs that are smaller than the paper's.",
    "not supported in reduced form": "It does not hold in runs that are smaller than the paper's.",
    "superseded settings: no verdict": (
        "The settings of these runs were found not to test the claim. They are to be run again."
    ),
}
# Meanings of the variants of a table.
VARIANTS: Mapping[str, str] = {
    "full": "All cells and runs of the paper's table or figure.",
    "partial": "Some of the paper's cells or runs are missing.",
    "reduced": "Smaller runs than the paper's, for example with fewer rounds or less data.",
    "smoke": "Tiny runs that only show that the code works.",
    "not run": "There are no runs yet.",
}
# Descriptions of the benchmarks' workloads, by the names that the benchmarks' pages
# use.
WORKLOADS: Mapping[str, str] = {
    "W1": "MLP 784-200-10, 1,000 clients with IID data, 20 per round, batches of 20.",
    "W1s": "W1 with 100 clients and 6,000 training images.",
    "W1u": "W1 with unequal clients: Dirichlet(0.1) instead of IID data.",
    "W2": "MLP 784-400-200-100-10, 10 clients with IID data, all in every round, batches of 64.",
    "W3": (
        "CNN with two convolutions, 10,000 training images, 100 clients with IID data, 10 per "
        "round, batches of 10."
    ),
    "W4": "ResNet-18, 400 training images, 10 clients with IID data, batches of 20.",
}
# A subject of a headline is about claims if it ends with one of these texts.
_ABOUT_CLAIMS = ("claims of the paper", "own expectations")
# Names that are recorded instead of a processor's model name if it is not known.
_ARCHITECTURES = ("", "x86_64", "aarch64", "arm64")
_NUMBER = re.compile(r"\d+")
# Colour of the text in pictures for the dark theme.
_DARK = "#e2e4e9"


@dataclass(frozen=True)
class Entry:
    """A table or figure of a paper.

    Args:
        name: ``<paper>/<table>``.
        results: Results of the variants that were run, the fullest variant first. If
            none was run, a single result without runs.
    """

    name: str
    results: Sequence[Result]

    @property
    def main(self) -> Result:
        return self.results[0]

    @property
    def report(self) -> Report:
        return self.main.report

    @property
    def anchor(self) -> str:
        return self.name.replace("/", "-")

    @property
    def claims(self) -> list[ClaimResult]:
        """The paper's own claims."""
        return self.report.paper_claims


@dataclass(frozen=True)
class Paper:
    """A paper with its tables and figures.

    Args:
        key: Name of the paper's folder in ``conf/table``.
        name: Name of the paper's method.
        cited: Full citation.
        entries: Tables, then figures.
    """

    key: str
    name: str
    cited: str
    entries: Sequence[Entry]

    @property
    def own(self) -> list[Entry]:
        """The tables and figures that are from this paper, and not from another one."""
        return [entry for entry in self.entries if entry.report.paper == self.cited]

    @property
    def run(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.main.done]

    @property
    def waiting(self) -> list[Entry]:
        return [entry for entry in self.entries if not entry.main.done]

    def states(self) -> Counter[str]:
        """Count the paper's claims by state.

        Only tables whose fullest variant is ``full`` or ``partial`` count. Claims that
        were tested only on smaller runs do not count.
        """
        return Counter(
            claim.state
            for entry in self.own
            if entry.main.variant in ("full", "partial")
            for claim in entry.claims
        )

    def verdicts(self) -> Counter[str]:
        """Count the paper's own numbers by verdict, in the order of `VERDICTS`.

        Numbers that were not compared, or not run, do not count.
        """
        counts = sum((Counter(dict(cell_counts(entry))) for entry in self.own), Counter())
        judged = ("reproduced", "close", "different", "undecided")
        return Counter({name: counts[name] for name in VERDICTS if counts[name] and name in judged})

    def variants(self) -> Counter[str]:
        """Count the tables and figures by their fullest variant."""
        return Counter(entry.main.variant for entry in self.entries)

    def costs(self) -> dict[str, tuple[str, float]]:
        """Return (hardware, seconds) of each run, by the folder of the run.

        A run that several tables share counts once.
        """
        return {
            run: cost
            for entry in self.entries
            for result in entry.results
            for run, cost in result.costs.items()
        }

    @property
    def rank(self) -> tuple[int, int, str]:
        """A sort key: papers with more full or partial tables come first.

        Papers with equally many such tables are sorted by the number of tables that
        were run, then by name.
        """
        decided = sum(entry.main.variant in ("full", "partial") for entry in self.entries)
        return -decided, -len(self.run), self.name


def papers(results: Mapping[str, Sequence[Result]]) -> list[Paper]:
    """Return the papers in the order of the first page (`Paper.rank`)."""
    grouped: dict[str, list[Entry]] = {}
    for name, own in results.items():
        grouped.setdefault(name.partition("/")[0], []).append(Entry(name, own))
    made = []
    for key, entries in grouped.items():
        entries.sort(key=_order_in_paper)
        cited = Counter(entry.report.paper for entry in entries).most_common(1)[0][0]
        made.append(Paper(key, cited.partition(",")[0], cited, entries))
    return sorted(made, key=lambda paper: paper.rank)


def _order_in_paper(entry: Entry) -> tuple[int, list[int], str]:
    """Return a sort key: tables, figures, then other parts, each by their numbers."""
    source = entry.report.source
    kind = next((at for at, kind in enumerate(("Table", "Fig.")) if source.startswith(kind)), 2)
    return kind, [int(number) for number in _NUMBER.findall(source)[:1]], source


def pages(results: Mapping[str, Sequence[Result]]) -> list[Page]:
    """Return the first page, then every paper's page, followed by its tables' pages."""
    found = papers(results)
    made = [Page("results/index.md", "Results", _rendered("front.md", papers=found))]

    for paper in found:
        text = _rendered("paper.md", paper=paper, notes=_notes(paper.key), assumed=_assumed(paper))
        made.append(Page(f"results/{paper.key}/index.md", paper.name, text))
        for entry in paper.entries:
            title = entry.report.source + ("" if entry.main.done else " (not run)")
            made.append(
                Page(
                    f"results/{entry.name}.md",
                    title,
                    _rendered("table.md", paper=paper, entry=entry),
                )
            )

    return made


def benchmarks(folder: Path) -> list[Page]:
    """Return one page per benchmark, from the Markdown files in `folder`."""
    made = []
    for path in sorted(folder.glob("*.md")):
        text = path.read_text()
        title = path.stem.removeprefix("bench_").replace("_", " ").capitalize()
        if text.startswith("# "):
            title = text.partition("\n")[0].removeprefix("# ")
        else:
            text = f"# {title}\n\n{text}"
        text = _with_workloads(text) + _drawing(path.with_suffix(".png"))
        made.append(Page(f"benchmarks/{path.stem}.md", title, text))
    return made


def _with_workloads(text: str) -> str:
    """Insert explanations of the workloads that a page names, below its title."""
    used = [name for name in WORKLOADS if re.search(rf"\b{name}\b", text)]
    if not used:
        return text
    # The explanations of W1s and W1u name W1, so W1 is explained, too.
    used = [name for name in WORKLOADS if name in used or any(o.startswith(name) for o in used)]
    title, _, rest = text.partition("\n")
    listed = "\n".join(f"- **{name}**: {WORKLOADS[name]}" for name in used)
    return f"{title}\n\nWorkloads, all on Fashion-MNIST:\n\n{listed}\n{rest}"


def _drawing(path: Path) -> str:
    """Return an HTML figure that shows a PNG file, "" if there is no such file."""
    sizes = sizes_of_png(path.read_bytes()) if path.is_file() else None
    if sizes is None:
        return ""
    size = f'data-font="{sizes[0]:g}" data-width="{sizes[1]:g}"'
    return (
        f'\n\n<figure><img class="paper" src="{path.name}" '
        f'alt="The numbers of the table as curves" {size}></figure>'
    )


def files_of(results: Mapping[str, Sequence[Result]]) -> Iterator[tuple[str, bytes]]:
    """Yield the path and content of each file that a table's page uses."""
    for name, own in results.items():
        for result in own if own[0].done else ():
            folder = f"results/{name}/{result.variant}"
            yield f"{folder}/report.html", result.page.encode()
            yield from ((f"{folder}/{file}", data) for file, data in result.files.items())
            for picture in result.report.pictures:
                for ending, data in image_files(picture).items():
                    yield f"{folder}/{picture.name}{ending}", data


def image_files(picture: Picture) -> dict[str, bytes]:
    """Return the files of a picture by their endings.

    If a picture uses the colour of the surrounding text, it has one file for the light
    theme and one for the dark theme. Other pictures have one file.
    """
    if "currentColor" not in picture.svg:
        return {".png": picture.png}
    dark = picture.svg.replace("<svg", f'<svg color="{_DARK}"', 1)
    return {".svg": picture.svg.encode(), "-dark.svg": dark.encode()}


def mentions(results: Mapping[str, Sequence[Result]]) -> dict[str, list[Mention]]:
    """Return the tables that contain our results of a method, for each method."""
    made: dict[str, list[Mention]] = {}
    for name, own in results.items():
        for result in own if own[0].done else ():
            cells: dict[str, list[Cell]] = {}
            for cell in result.report.cells:
                if cell.mean is not None and cell.method in result.methods:
                    cells.setdefault(result.methods[cell.method], []).append(cell)
            label = (
                f"{result.report.paper.partition(',')[0]}, {result.report.source}: "
                f"{result.report.title}"
            )
            for method, mine in cells.items():
                made.setdefault(method, []).append(
                    Mention(
                        label,
                        f"results/{name}.md",
                        f"{_range(mine, result.report)}, {result.variant} variant",
                    )
                )

    return made


def _range(cells: Sequence[Cell], report: Report) -> str:
    places, unit = layout.places(report), layout.unit(report)
    means = sorted(cell.mean for cell in cells if cell.mean is not None)
    if len(cells) == 1:
        spread = texts.spread(cells[0].sd, places)
        return layout.minus(f"{layout.number(means[0], places)}{spread} {unit} (n = {cells[0].n})")
    ends = " to ".join(layout.number(mean, places) for mean in (means[0], means[-1]))
    return layout.minus(f"{len(cells)} numbers, {ends} {unit}")


# --- sentences


def finding(report: Report) -> str:
    """Return the result of a report in one sentence, "" if there is no such sentence.

    - If the report has one row, the sentence has the numbers of this row.
    - If it has several rows and the paper's numbers, the sentence has the mean of the
      proposed method and the mean of the best baseline. Both are means over the rows
      that have a result of the proposed method.
    - If it has several rows but not the paper's numbers, the sentence has the number of
      rows in which the proposed method is ahead of every baseline. Baselines without
      any result are left out. Only rows in which all other baselines have a result
      are counted.
    """
    rows = [row for row in layout.rows(report) if any(cell.mean is not None for cell in row.cells)]
    labels = {method.key: layout.marked_label(method) for method in layout.by_role(report)}

    if len(rows) == 1:
        cells = [cell for key in labels for cell in rows[0].cells_of(key) if cell.mean is not None]
        more = f"; {len(cells) - _FEW} more" if len(cells) > _FEW else ""
        return (
            "; ".join(f"{labels[cell.method]}: {_beside(report, [cell])}" for cell in cells[:_FEW])
            + f"{more}."
        )

    numbers = {
        key: {
            at: row.cells_of(key)[0]
            for at, row in enumerate(rows)
            if row.cells_of(key) and row.cells_of(key)[0].mean is not None
        }
        for key in labels
    }
    ours = [m.key for m in report.methods if m.role == "proposed" and numbers[m.key]]
    rivals = [m.key for m in report.methods if m.role == "baseline" and len(numbers[m.key]) > 1]
    if not ours:
        return ""
    mine, sign = numbers[ours[0]], 1 if report.higher_is_better else -1

    if not layout.has_reference(report):
        others = [m.key for m in report.methods if m.role == "baseline" and numbers[m.key]]
        complete = [at for at in mine if all(at in numbers[m] for m in others)]
        if not others or not complete:
            return ""
        ahead = sum(
            all(_is_better(mine[at], numbers[m][at], sign) for m in others) for at in complete
        )
        return (
            f"{labels[ours[0]]} is ahead of every baseline that was run in {ahead} of "
            f"{texts.count(len(complete), 'row')} in which all of them have results (means)."
        )

    text = (
        f"{labels[ours[0]]} {_beside(report, list(mine.values()))}, mean of "
        f"{texts.count(len(mine), 'row')}"
    )
    fair = [m for m in rivals if numbers[m].keys() >= mine.keys()]
    if not fair:
        return f"{text}."
    best = max(fair, key=lambda m: sign * _mean_over_cells([numbers[m][at] for at in mine]))

    return (
        f"{text}; the best baseline, {labels[best]}, "
        f"{_beside(report, [numbers[best][at] for at in mine])}."
    )


def _mean_over_cells(cells: Sequence[Cell]) -> float:
    return sum(cell.mean for cell in cells if cell.mean is not None) / len(cells)


def _is_better(a: Cell, b: Cell, sign: int) -> bool:
    """Return whether `a` has a better mean than `b`. Both cells must have a mean."""
    assert a.mean is not None and b.mean is not None
    return sign * (a.mean - b.mean) > 0


def _beside(report: Report, cells: Sequence[Cell]) -> str:
    """Return our mean over cells and the paper's, as ``81.03 % (paper 78.20)``.

    For a single cell, the text also contains the standard deviation over seeds.
    """
    places = layout.places(report)
    spread = texts.spread(cells[0].sd, places) if len(cells) == 1 else ""
    paper = [cell.paper for cell in cells if cell.paper is not None]
    theirs = (
        f" (paper {layout.number(sum(paper) / len(paper), places)})"
        if len(paper) == len(cells)
        else ""
    )
    return layout.minus(
        f"{layout.number(_mean_over_cells(cells), places)}{spread}"
        f"\N{NO-BREAK SPACE}{layout.unit(report)}{theirs}"
    )


def claims_sentence(entry: Entry) -> str:
    """Return a sentence that counts a paper's claims by state."""
    if not entry.claims:
        return "The paper claims nothing about it that could be tested."
    return f"{texts.count(len(entry.claims), 'claim')} of the paper: {texts.states(entry.claims)}."


def cell_counts(entry: Entry) -> list[tuple[str, int]]:
    """Return the number of cells with each verdict, for the entry's card on a page.

    Cells of runs that are smaller than the paper's count as ``not comparable``. Cells
    without runs do not count.
    """
    cells = [cell for cells in layout.counted_cells(entry.report).values() for cell in cells]
    counts = Counter(cell.verdict for cell in cells)
    shown = (*get_args(Conclusion), "not comparable")
    return [(verdict, counts[verdict]) for verdict in shown if counts[verdict]]


def headline(report: Report) -> list[tuple[str, str]]:
    """Return pairs (subject, result), first about numbers, then about claims."""
    return sorted(texts.headline(report), key=lambda pair: pair[0].endswith(_ABOUT_CLAIMS))


def cost(costs: Mapping[str, tuple[str, float]]) -> str:
    """Return the hours of all runs by hardware, such as ``2.4 h on AMD EPYC``.

    Args:
        costs: (hardware, seconds) of each run.
    """
    hours: dict[str, float] = {}
    for hardware, seconds in costs.values():
        # If the model name is not known, the platform's architecture is recorded.
        named = hardware not in _ARCHITECTURES
        name = hardware if named else f"{hardware or 'a CPU'} (model not recorded)"
        hours[name] = hours.get(name, 0.0) + seconds / 3600
    longest_first = sorted(hours.items(), key=lambda pair: -pair[1])
    return ", ".join(f"{_hours(own)} h on {name}" for name, own in longest_first)


def _hours(hours: float) -> str:
    if hours < 0.01:
        return "less than 0.01"
    return f"{hours:.0f}" if hours >= 10 else f"{hours:.2g}"


def _notes(key: str) -> str:
    """Return the handwritten notes on differences between a paper and its code."""
    path = files("fedexp.site").joinpath("papers", f"{key}.md")
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _assumed(paper: Paper) -> list[tuple[str, str, list[Entry]]]:
    """Return each assumption once, as (what is assumed, why, tables that assume it)."""
    found: dict[tuple[str, str], list[Entry]] = {}
    for entry in paper.entries:
        for assumption in entry.report.assumptions:
            found.setdefault(assumption, []).append(entry)
    return [(what, why, own) for (what, why), own in found.items()]


# --- templates


def figure(picture: Picture, folder: str) -> str:
    """Return a picture of a report with its title as HTML.

    Args:
        picture: The picture.
        folder: Path of its files, relative to the page.
    """
    macros: Any = _environment().get_template("macros.md").module
    return str(macros.picture(picture, folder))


def _rendered(name: str, **values: Any) -> str:
    return _environment().get_template(name).render(values)


def site_environment() -> Environment:
    """Return a new environment for the templates of the site."""
    folder = files("fedexp.site").joinpath("templates")
    environment = template_environment(
        lambda name: folder.joinpath(name).read_text(encoding="utf-8")
    )
    # Templates escape values for use in HTML blocks. Outside of HTML blocks, the filter
    # `md` escapes text for Markdown.
    environment.filters["md"] = lambda text: Markup(escaped(text))
    return environment


@cache
def _environment() -> Environment:
    environment = site_environment()
    environment.filters["cell_counts"] = cell_counts
    environment.globals |= {
        "finding": finding,
        "claims_sentence": claims_sentence,
        "rows": shown_rows,
        "endings": lambda picture: list(image_files(picture)),
        "sizes": lambda picture: sizes_of_svg(picture.svg),
        "headline": headline,
        "cost": cost,
        "verdict_meanings": VERDICTS,
        "claim_meanings": CLAIMS,
        "variant_meanings": VARIANTS,
        "most_columns": _MOST_COLUMNS,
        "contradicted": lambda entry: [c for c in entry.claims if c.state == "contradicted"],
        "missed": _missed,
        "contradicted_in_print": lambda entry: [c for c in entry.claims if c.contradicted_in_print],
    }
    return environment


def _missed(report: Report) -> list[tuple[Method, int, int]]:
    """Return the columns in which some of our numbers differ from the paper's.

    Returns:
        (column, number of cells with the verdict ``different``, number of judged
        cells).
    """
    cells = list(layout.judged_cells(report))
    judged = Counter(cell.method for cell in cells)
    beyond = Counter(cell.method for cell in cells if cell.verdict == "different")
    return [
        (method, beyond[method.key], judged[method.key])
        for method in report.methods
        if beyond[method.key]
    ]
