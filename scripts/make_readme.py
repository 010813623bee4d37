"""Write the generated tables and the counts of methods in README.md.

    python scripts/make_readme.py [--check]

Two tables are between markers. They show how the current code judges the numbers and
claims of the committed records, and what each method needs and sends. Another table has
a row on what the leaderboards found. With ``--check``, nothing is written, and the exit
code is 1 if README.md is out of date.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from make_claim_states import reports

from fedexp.site import leaderboards, methods, traffic
from fedexp.tables.load import load_table, table_names
from fedexp.tables.report import layout
from fedexp.tables.report.report import Report
from fedexp.tables.schema import Table

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
RECORDS = "scripts/results"
# Verdicts in the order of the table. Only cells for which the paper has a number count.
VERDICTS = ("reproduced", "close", "different", "undecided")
# Preset of the method that each paper proposes.
PROPOSED = {
    "fedcda": "fedcda",
    "fedmrur": "fedmrur",
    "fedsyn": "dense",
    "ma_echo": "ma_echo",
    "nafi": "nafi",
}
# Beginning of the row of README.md on leaderboards.
EQUAL_TUNING = "| They are compared with equal tuning. |"
VENUES = "AAAI|AISTATS|CVPR|ICCV|ICLR|ICML|MLSys|NeurIPS|NIPS|Neural Networks"
CLAIM_STATES = ("supported", "contradicted", "undecided")


@cache
def committed_reports() -> tuple[Report, ...]:
    """Return the reports of all committed records."""
    return tuple(reports())


def reproduced() -> str:
    """Return a summary of the reproduced numbers, and a table with a row per paper."""
    found: dict[str, list[Report]] = {}
    for report in committed_reports():
        if report.paper == "none":
            continue
        found.setdefault(report.name.partition("/")[0], []).append(report)
    tables: dict[str, list[Table]] = {}
    for name in table_names():
        table = load_table(name)
        if table.paper != "none":
            tables.setdefault(name.partition("/")[0], []).append(table)
    presets = {method.name: method for method in methods.presets()}

    rows = []
    all_cells, all_claims = Counter[str](), Counter[str]()
    compared_papers = []
    for paper, committed in found.items():
        # A record may have only runs that the table no longer asks for.
        own = [one for one in committed if any(cell.mean is not None for cell in one.cells)]
        full = [report for report in own if report.variant in ("full", "partial")]
        compared = {report.name for report in full}
        only_reduced = {report.name for report in own} - compared
        not_run = len(tables[paper]) - len(compared) - len(only_reduced)
        # A folder may have tables of other papers. Their numbers are not this paper's.
        cited = Counter(report.paper for report in own).most_common(1)[0][0]
        judged = [report for report in full if report.paper == cited]
        cells = Counter(cell.verdict for report in judged for cell in layout.judged_cells(report))
        claims = Counter(claim.state for report in judged for claim in report.paper_claims)
        all_cells += cells
        all_claims += claims
        hours = max(cost.hours for table in tables[paper] for cost in table.cost.values())
        title = cited.partition(",")[0]
        if cells:
            compared_papers.append(title)
        proposed = PROPOSED[paper]
        rows.append(
            [
                f"[{title}]({_link(methods.reference(presets[proposed]))}), `{proposed}`",
                str(len(tables[paper])),
                str(len(compared)),
                str(len(only_reduced)),
                str(not_run),
                _counts(cells, VERDICTS),
                _counts(claims, CLAIM_STATES),
                f"{hours:.1f} h",
                f"[reports]({RECORDS}/{paper})",
            ]
        )
    rows.sort(key=lambda row: (-int(row[2]), -int(row[3]), row[0]))
    head = ["paper, `method=`", "built-in tables", "full or partial", "reduced", "not run"]
    more = ["numbers compared with print", "paper's claims", "slowest table", "results"]
    summary = (
        f"Tables of {' and '.join(compared_papers)} were run at the scale of the papers. "
        f"{all_cells.total()} numbers were compared ({_counts(all_cells, VERDICTS)}), and "
        f"{all_claims.total()} claims were tested ({_counts(all_claims, CLAIM_STATES)}). The other "
        "papers' own tables were only run at a reduced scale. They are not compared (-)."
    )
    return "\n".join(textwrap.wrap(summary, 100)) + "\n\n" + _table([*head, *more], rows)


def found_by_leaderboards() -> str:
    """Return the row of a table with what each leaderboard found that was run."""
    parts = [
        "Each method tries equally many points of its hyper-parameters on held-out samples, and is "
        "then run with other seeds."
    ]
    for one in leaderboards.read(ROOT / RECORDS):
        if one.board is not None:
            anchor = f"the-leaderboard-of-{one.page.replace('_', '-')}"
            found = leaderboards.finding(one.board, with_numbers=False)
            edges = leaderboards.edge_note(one.board, one.chosen)
            link = f"([explanation](docs/findings.md#{anchor}))"
            parts.append(" ".join(filter(None, [f"*{one.table.title}*: {found}", edges, link])))
    parts.append(f"[Numbers]({RECORDS}/leaderboard.csv)")
    return f"{EQUAL_TUNING} {'<br>'.join(parts)} |"


def _counts(counted: Counter[str], names: Iterable[str]) -> str:
    return ", ".join(f"{counted[name]} {name}" for name in names if counted[name]) or "-"


def listed_methods() -> str:
    """Return the table of methods.

    If several presets have parts of the same classes, only the preset with the shortest
    name has a row. The others are its variants.
    """
    rows = []
    for method in methods.presets():
        variants = [one.name for one in methods.presets() if one.classes == method.classes]
        if method.name != min(variants, key=len):
            continue
        reference = methods.reference(method)
        counted = traffic.first_step(method.experiment)
        rows.append(
            [
                f"`{method.name}`",
                *_paper(reference),
                method.kind.partition(":")[0],
                ", ".join(methods.needs(method, counted)) or "-",
                _sent(method, counted),
                ", ".join(f"`{name}`" for name in variants if name != method.name) or "-",
            ]
        )
    rows.sort(key=lambda row: row[3])
    head = ["`method=`", "paper", "venue", "kind", "needs", "sent to the server", "variants"]
    return _table(head, rows)


def counted_claims() -> str:
    """Count the tests of claims by their states."""
    states = ("supported", "contradicted", "undecided", "not supported in reduced form")
    superseded = "superseded settings: no verdict"
    counts = Counter(claim.state for report in committed_reports() for claim in report.claims)
    if others := set(counts) - {*states, superseded}:
        raise ValueError(f"the sentence on claims lacks these states: {', '.join(others)}")

    supported, contradicted, undecided, not_supported = (counts[state] for state in states)
    return (
        f"{counts.total()} tests of claims. {supported} are supported, {contradicted} contradicted "
        f"and {undecided} undecided. {not_supported} are not supported in reduced runs. "
        f"{counts[superseded]} are superseded"
    )


def counted_methods() -> str:
    """Count the methods, the baselines and the variants."""
    presets = methods.presets()
    kinds = {method.classes: method.kind for method in presets}
    baselines = Counter(kinds.values())["Baselines"]
    return (
        f"{len(kinds) - baselines} methods, {baselines} baselines and "
        f"{len(presets) - len(kinds)} variants"
    )


def _link(reference: str) -> str:
    """Return the web address in a reference."""
    link = re.search(r"https://\S+", reference)
    if link is None:
        raise ValueError(f"a method's Reference has no link: {reference}")
    return link[0]


def _paper(reference: str) -> tuple[str, str]:
    """Return a reference's authors as a link to the paper, and its venue."""
    if not reference:
        return "-", "-"
    text = " ".join(reference.split())
    authors = re.match(r'(?:"\w+" of )?([A-Z]\w+)(?: & ([A-Z]\w+),)?', text)
    venue = re.search(rf"({VENUES}) (\d{{4}})", text) or re.search(r"()\b(20\d\d)\b", text)
    if authors is None or venue is None:
        raise ValueError(f"a method's Reference has no authors or no year: {text}")
    name = f"{authors[1]} & {authors[2]}" if authors[2] else f"{authors[1]} et al."
    return f"[{name}]({_link(text)})", f"{venue[1] or 'arXiv'} {venue[2]}"


def _sent(method: methods.Method, counted: traffic.Counted) -> str:
    """Return what a client sends in the first round."""
    if not method.experiment.aggregator.communicates:
        return "nothing"
    return ", ".join(["model", *(f"`{name}`" for name in counted.up)])


def _table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(
        f"| {' | '.join(cell or ' ' for cell in row)} |"
        for row in [head, ["---"] * len(head), *rows]
    )


def written(text: str) -> str:
    """Return the text of README.md with new generated parts and counts."""
    for name, make in (("reproduced", reproduced), ("methods", listed_methods)):
        begin, end = f"<!-- begin: {name} -->\n", f"<!-- end: {name} -->\n"
        before, rest = text.split(begin)
        after = rest.split(end)[1]
        text = f"{before}{begin}\n{make()}\n\n{end}{after}"

    sentences = {
        rf"{re.escape(EQUAL_TUNING)}.*": found_by_leaderboards,
        r"\d+ tests of claims\..* in reduced runs\. \d+ are superseded": counted_claims,
        r"\d+ methods, \d+ baselines and \d+ variants": counted_methods,
    }
    for pattern, make in sentences.items():
        new = make()
        text, count = re.subn(pattern, lambda _, new=new: new, text)
        if count != 1:
            raise ValueError(f"README.md has {count} places that match {pattern}, not one")
    return text


def main() -> int:
    """Write README.md, or check it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()

    old = README.read_text()
    new = written(old)
    if new == old:
        return 0
    if options.check:
        print("README.md is stale: run python scripts/make_readme.py", file=sys.stderr)
        return 1
    README.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
