"""A report as LaTeX tables (booktabs) that fit into the width of the text.

In each row, the paper's numbers are above ours. Decimal points are aligned.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from fedexp.tables.report import layout, texts
from fedexp.tables.report.report import Method, Report
from fedexp.tables.report.shown_cells import ShownCell, shown_rows

# Number of digits that fit into a line. In the document class article, a line is 345 pt
# wide, and a digit in \footnotesize is 4.25 pt wide. Some space is left over.
WIDTH = 78
# Number of lines on a page, without the caption.
_LINES = 44
# Space between columns, in widths of a digit: 2 \tabcolsep of 6 pt each.
_GAP = 3
_SPECIAL = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "†": r"\dag{}",
    "‡": r"\ddag{}",
    "✓": r"$\surd$",
    "↑": r"$\uparrow$",
    "↓": r"$\downarrow$",
    "≈": r"$\approx$",
    "○": r"$\circ$",
    "·": r"$\cdot$",
    "≠": r"$\neq$",
}


def latex(report: Report) -> str:
    """Return ``table`` environments that need the package booktabs.

    The best number of a row is in bold. Columns that do not fit beside each other form
    blocks below each other. Rows that do not fit on a page continue in another table.
    The label ends with the variant, so one document can contain several variants.
    """
    return "\n".join(_document(report)) + "\n"


def escape(text: str) -> str:
    """Replace LaTeX's special characters, and signs that its fonts do not have."""
    return "".join(_SPECIAL.get(character, character) for character in text)


@dataclass(frozen=True)
class _Number:
    """A number in three parts, which are three columns of the LaTeX table.

    Args:
        whole: Text before the decimal point.
        rest: Text from the decimal point on.
        beside: Text after the number.
        best: Whether the number is the best of its row.
    """

    whole: str
    rest: str = ""
    beside: str = ""
    best: bool = False

    @property
    def tex(self) -> str:
        parts = [escape(self.whole), escape(self.rest)]
        return " & ".join(
            [
                *(rf"\textbf{{{part}}}" if self.best and part else part for part in parts),
                escape(self.beside),
            ]
        )


def _split_number(text: str, beside: str, best: bool) -> _Number:
    first, _, more = text.partition(" ")
    whole, point, rest = first.partition(".")
    return _Number(whole or "--", point + rest, " ".join(filter(None, [more, beside])), best)


# A line of a table: the conditions, ``paper`` or ``ours``, and one number per method
# (None if the table has no such cell).
_Line = tuple[list[str], str, list[_Number | None]]


def _document(report: Report) -> Iterator[str]:
    yield from (f"% {subject}: {outcome}" for subject, outcome in texts.headline(report))
    yield "% needs \\usepackage{booktabs}"
    yield from (f"% {warning}" for warning in report.warnings)
    yield from (f"% left out: {part}" for part in report.left_out)

    for at, blocks in enumerate(_pages(report)):
        yield r"\begin{table}"
        yield r"\centering\footnotesize"

        if at == 0:
            yield rf"\caption{{{' '.join(_caption(report))}}}"
            yield rf"\label{{tab:{re.sub('[/_]', '-', report.name)}-{report.variant}}}"
        else:
            yield (
                rf"\caption{{{escape(report.title)} ({escape(report.source)}, "
                rf"{report.variant} variant), continued.}}"
            )

        for number, (methods, lines) in enumerate(blocks):
            yield from [r"\\[1ex]"] if number else []
            yield from _tabular(report, methods, lines)
        yield r"\end{table}"


def _tabular(report: Report, methods: Sequence[int], lines: Sequence[_Line]) -> Iterator[str]:
    yield rf"\begin{{tabular}}{{{'r' * len(report.keys)}l{'r@{}l@{ }l' * len(methods)}}}"
    yield r"\toprule"
    widths = _widths(report, lines)
    heads = [
        rf"\multicolumn{{3}}{{l}}{{{_column_head(report.methods[at], widths[at])}}}"
        for at in methods
    ]
    yield table_row([*map(escape, report.keys), "", *heads])
    yield r"\midrule"

    for place, who, numbers in lines:
        found = [numbers[at] for at in methods]
        yield table_row(
            [
                *map(escape, place),
                who,
                *(" & & " if number is None else number.tex for number in found),
            ]
        )

    yield r"\bottomrule"
    yield r"\end{tabular}"


def _column_head(method: Method, width: int) -> str:
    """Return a method's label, broken into lines that fit the column's width."""
    sign = layout.ORACLE if method.oracle else ""
    lines = textwrap.wrap(method.label, max(width, 8)) or [""]
    lines[-1] += sign
    parts = [escape(line) for line in lines]
    broken = r" \\ ".join(parts)
    return parts[0] if len(parts) == 1 else rf"\shortstack[l]{{{broken}}}"


def _pages(report: Report) -> Iterator[list[tuple[list[int], list[_Line]]]]:
    """Yield pages, each with one or more blocks.

    A block has the columns that fit beside each other into the width of the text. A
    page has as many blocks as fit below each other. Long blocks are cut between rows.
    """
    lines = _all_lines(report)
    a_row = 2 if layout.has_reference(report) else 1
    length = _LINES // a_row * a_row
    blocks = [
        (methods, lines[start : start + length])
        for methods in _fitting(report, lines)
        for start in range(0, max(len(lines), 1), length)
    ]
    page: list[tuple[list[int], list[_Line]]] = []
    for block in blocks:
        if page and sum(len(own) + 3 for _, own in page) + len(block[1]) > _LINES:
            yield page
            page = []
        page.append(block)

    yield page


def _fitting(report: Report, lines: Sequence[_Line]) -> list[list[int]]:
    """Return blocks of column numbers that fit into the width of the text.

    A column that is too wide on its own has a separate block.
    """
    keys = [
        max([len(key), *(len(place[at]) for place, _, _ in lines)])
        for at, key in enumerate(report.keys)
    ]
    left = WIDTH - sum(key + _GAP for key in keys) - len("paper") - _GAP
    widths = _widths(report, lines)
    blocks: list[list[int]] = [[]]
    for at, width in enumerate(widths):
        if blocks[-1] and sum(widths[i] + _GAP for i in blocks[-1]) + width > left:
            blocks.append([])
        blocks[-1].append(at)
    return blocks


def _widths(report: Report, lines: Sequence[_Line]) -> list[int]:
    """Return the widths of columns in digits.

    A column is wide enough for the longest word of its label. It is also wide enough
    for the three parts of its numbers side by side.
    """
    found = []
    for at, method in enumerate(report.methods):
        own = [numbers[at] for _, _, numbers in lines]
        parts = [(len(n.whole), len(n.rest), len(n.beside)) for n in own if n is not None]
        words = [
            len(word) + len(layout.ORACLE) * bool(method.oracle) for word in method.label.split()
        ]
        numbers = sum(map(max, zip(*parts, strict=True))) + 1 if parts else 0
        found.append(max([numbers, *words]))
    return found


def _all_lines(report: Report) -> list[_Line]:
    reference, same = layout.has_reference(report), _same_n(report)
    lines: list[_Line] = []
    for row in shown_rows(report):
        place = row.conditions
        cells = [row.first(method.key) for method in report.methods]

        if reference:
            lines.append(
                (
                    place,
                    "paper",
                    [
                        None if c is None else _split_number(c.published, "", c.best_paper)
                        for c in cells
                    ],
                )
            )
            place = [""] * len(report.keys)

        lines.append((place, "ours", [None if c is None else _ours(c, same) for c in cells]))

    return lines


def _ours(shown: ShownCell, same: int | None) -> _Number:
    text = shown.measured if same is None else shown.measured.removesuffix(f" ({same})")
    return _split_number(text, shown.mark, shown.best_ours)


def _same_n(report: Report) -> int | None:
    """Return the number of runs behind each mean, None if it varies."""
    counts = {cell.n for cell in report.cells if cell.n}
    return counts.pop() if len(counts) == 1 else None


def _caption(report: Report) -> Iterator[str]:
    reference, same = layout.has_reference(report), _same_n(report)
    yield (
        f"{escape(report.title)} ({escape(report.source)}, {report.variant} variant; "
        f"{escape(layout.unit(report))})."
    )
    yield texts.sentence(
        "; ".join(escape(f"{subject}: {outcome}") for subject, outcome in texts.headline(report))
    )
    runs = "($n$)" if same is None else f"($n = {same}$)"
    yield rf"{'First line: paper; second: ours, mean' if reference else 'Mean'} $\pm$ sd {runs};"
    yield (
        ", ".join(escape(f"{mark} {word}") for word, mark in texts.verdict_marks(report).items())
        + "."
    )
    yield from (f"{escape(note)}." for note in texts.footnotes(report))


def table_row(cells: Iterable[str]) -> str:
    """Return a row of a table, whose cells are LaTeX."""
    row = " & ".join(cells)
    # After a line break, LaTeX would read these characters as an argument of the break.
    guard = "{}" if row.startswith(("[", "*")) else ""
    return rf"{guard}{row} \\"
