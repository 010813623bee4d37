"""A report as a LaTeX table (booktabs): the paper's number above ours."""

from __future__ import annotations

from collections.abc import Iterator

from fedexp.tables.report import layout, texts
from fedexp.tables.report.report import Report

_SPECIAL = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "±": r"$\pm$", "†": r"\dag{}", "‡": r"\ddag{}", "✓": r"$\surd$", "↑": r"$\uparrow$", "↓": r"$\downarrow$",
    "≈": r"$\approx$", "○": r"$\circ$", "·": r"$\cdot$", "≠": r"$\neq$",
}  # fmt: skip


def latex(report: Report) -> str:
    """A ``table`` environment that needs the package booktabs; best of its row in bold."""
    return "\n".join(_lines(report)) + "\n"


def escape(text: str) -> str:
    """Text with LaTeX's special characters and ours, which its fonts lack, made plain."""
    return "".join(_SPECIAL.get(character, character) for character in text)


def _lines(report: Report) -> Iterator[str]:
    keys, methods = report.keys, report.methods
    reference = layout.referenced(report)
    yield from (f"% {what}: {said}" for what, said in texts.headline(report))
    yield "% needs \\usepackage{booktabs}"
    for warning in report.warnings:
        yield f"% {warning}"
    yield from (f"% left out: {part}" for part in report.left_out)
    yield r"\begin{table}"
    yield r"\centering"
    yield rf"\caption{{{' '.join(_caption(report, reference))}}}"
    yield rf"\label{{tab:{report.name.replace('/', '-').replace('_', '-')}}}"
    yield rf"\begin{{tabular}}{{{'r' * len(keys)}l{'r' * len(methods)}}}"
    yield r"\toprule"
    yield _row([*map(escape, keys), "", *(escape(layout.head(method)) for method in methods)])
    yield r"\midrule"
    for row, entries in texts.shown(report):
        paper = [_bold(e.paper, e.best_paper) if e else "" for e in entries]
        ours = [f"{_bold(e.ours, e.best_ours)} {escape(texts.mark(e.cell))}" if e else "" for e in entries]
        place = list(map(escape, texts.conditions(row, report)))
        if reference:
            yield _row([*place, "paper", *paper])
        yield _row([*([""] * len(keys) if reference else place), "ours", *ours])
    yield r"\bottomrule"
    yield r"\end{tabular}"
    yield r"\end{table}"


def _caption(report: Report, reference: bool) -> Iterator[str]:
    yield f"{escape(report.title)} ({escape(report.source)}, {report.form} form; {escape(layout.unit(report))})."
    yield texts.sentence("; ".join(escape(f"{what}: {said}") for what, said in texts.headline(report)))
    yield rf"{'First line: paper; second: ours, mean' if reference else 'Mean'} $\pm$ sd ($n$);"
    yield ", ".join(escape(f"{mark} {word}") for word, mark in texts.marks(report).items()) + "."
    yield from (f"{escape(note)}." for note in texts.footnotes(report))


def _bold(text: str, best: bool) -> str:
    text = escape(text) or "--"
    return rf"\textbf{{{text}}}" if best else text


def _row(cells: list[str]) -> str:
    return " & ".join(cells) + r" \\"
