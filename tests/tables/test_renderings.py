"""Tests of what every rendering of a report contains.

It begins with the headline. It lists the claims, the variant, what has seen test data,
and what is left out.
"""

from __future__ import annotations

import csv
import io
import math
import re
import shutil
import statistics
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any, get_args

import pytest
from rich.console import Console

from fedexp.tables.report import texts
from fedexp.tables.report.csv import inert, to_csv
from fedexp.tables.report.latex import latex
from fedexp.tables.report.markdown import markdown
from fedexp.tables.report.page import page
from fedexp.tables.report.report import Cell, Method, Report, Variant
from fedexp.tables.report.terminal import print_report, print_tables
from fedexp.tables.report.wandb import send_summary
from tests.tables.reports import CLAIMS, cell, report

Rendering = Callable[[Report], str]
CONTRADICTED = "0 of 1 rows: the paper's own numbers do not support it"


def printed(of: Report, width: int = 220) -> str:
    out = Console(width=width, file=io.StringIO(), highlight=False)
    print_report(of, out)
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


def read(of: Report) -> str:
    """Return the text of the page without tags, styles and scripts."""
    body = re.sub(r"<(style|script)>.*?</\1>", "", page(of), flags=re.DOTALL)
    return unescape(re.sub(r"<[^>]*>", " ", body))


long_ones = pytest.mark.parametrize("render", [markdown, read])
all_of_them = pytest.mark.parametrize("render", [printed, markdown, read, latex])


def judged(verdict: str, method: str = "ours", row: int = 0, **more: Any) -> Cell:
    return replace(cell({"row": row}, method, 50.0, 50.0), verdict=verdict, **more)


def mixed(
    *cells: Cell, methods: tuple[Method, ...] = (Method("ours", "New", role="proposed"),)
) -> Report:
    return report(
        keys=("row",), methods=methods, cells=cells, agreement=(), claims=(), summaries=()
    )


def test_the_headline_counts_claims_and_the_papers_cells_by_role() -> None:
    assert texts.headline(report()) == [
        ("claims of the paper", "1 supported, 1 contradicted, 1 undecided"),
        ("and of our own expectations", "1 supported"),
        ("proposed method", "3 cells: 1 reproduced, 1 different (lower), 1 undecided"),
        (
            "baselines",
            "6 cells: 1 reproduced, 3 undecided, 1 not run, 1 not comparable",
        ),
    ]
    assert texts.headline(report(claims=CLAIMS[3:]))[0] == (
        "our own expectations",
        "1 supported",
    )


def test_close_is_never_counted_as_reproduced() -> None:
    close = [judged("close", row=i) for i in range(5)]
    said = dict(texts.headline(mixed(judged("reproduced", row=5), *close)))
    assert said == {"proposed method": "6 cells: 1 reproduced, 5 close"}
    assert texts.headline(mixed(close[0])) == [("proposed method", "1 cell: 1 close")]


@pytest.mark.parametrize("role", ["local", "ours"])
def test_local_models_and_columns_of_ours_have_no_headline(role: Any) -> None:
    assert texts.headline(
        mixed(judged("reproduced"), methods=(Method("ours", "New", role=role),))
    ) == [("cells of the paper", "none; 1 of ours")]


def test_a_column_that_is_another_by_construction_counts_once() -> None:
    methods = (Method("a", "A"), Method("b", "B"))
    cells = (
        judged("reproduced", "a"),
        judged("reproduced", "b", same_as="a"),
        # This cell counts, because the other one is missing.
        judged("undecided", "b", row=1, same_as="a"),
    )
    of = mixed(*cells, methods=methods)
    assert texts.headline(of) == [("baselines", "2 cells: 1 reproduced, 1 undecided")]
    assert "B equals A by construction in 2 rows: counted once" in texts.footnotes(of)


@all_of_them
def test_the_headline_comes_before_every_number(render: Rendering) -> None:
    whole = re.sub(r"[*% ]+", " ", render(report()))
    places = [
        re.search(rf"{what} ?: {re.escape(said)}", whole) for what, said in texts.headline(report())
    ]
    found = [place.start() for place in places if place]
    assert len(found) == 4
    assert found == sorted(found)
    first = re.search(r"20( & )?\.97", whole)  # LaTeX aligns the decimal points.
    assert first is not None and found[-1] < first.start()


@pytest.mark.parametrize("render", [printed, markdown, read])
def test_every_claim_has_its_state_its_reason_and_what_the_paper_prints(render: Rendering) -> None:
    whole = re.sub(r"\s+", " ", render(report()).replace("*", ""))
    for claim in CLAIMS:
        for text in (claim.id, claim.says, claim.reason, texts.claim_source(claim)):
            assert text in whole
    for state in ("✓ supported", "✗ contradicted", "? undecided"):
        assert state in whole
    assert CONTRADICTED in whole
    assert "must hold in every row" in whole
    assert "must hold in most rows" in whole
    assert "must hold in 2 rows" in whole


@long_ones
def test_long_renderings_have_claims_row_by_row_and_what_is_left_out(render: Rendering) -> None:
    whole = render(report()).replace("−", "-")
    assert "clients 5: yes, +41.2, 3 of 3 pairs in favour; in print yes" in whole
    assert "all rows: no, -14.6, 0 of 3 pairs in favour; in print no" in whole
    for part in ("Left out of the paper's", "method=pooled (4 cells)", "panel b"):
        assert part in whole
    assert "Left out" not in render(report(left_out=()))
    assert "Claims" not in render(report(claims=()))


@pytest.mark.parametrize("render", [printed, markdown, read])
def test_a_methods_mean_difference_has_its_interval_seeds_and_rows(render: Rendering) -> None:
    whole = render(report()).replace("−", "-")
    for text in (
        "-1.20",
        "-3.00 to +0.50",
        "2 seeds, 3 rows",
        "Ours (ma_echo)",
        "none for one seed",
        "1 seed, 2 rows",
    ):
        assert text in whole


@all_of_them
def test_what_was_chosen_on_test_data_is_marked(render: Rendering) -> None:
    whole = render(report())
    sign = r"\dag{}" if render is latex else "†"
    assert f"OT {sign}" in whole
    assert f"{sign} has seen test data: OT, best of a grid" in re.sub(r"\s+", " ", whole)
    assert f"Average {sign}" not in whole
    plain = render(report(methods=tuple(replace(m, oracle="") for m in report().methods)))
    assert sign not in plain


@all_of_them
@pytest.mark.parametrize("variant", get_args(Variant))
def test_the_form_is_named_and_no_other(render: Rendering, variant: Any) -> None:
    claims = tuple(replace(claim, scope=f"{variant} form") for claim in CLAIMS)
    sample = report(cells=report().cells[::2][:2], variant=variant, claims=claims)
    said = re.findall(
        r"(?<!the )\b(full|partial|reduced|smoke)\b(?! variant.s)", render(sample).lower()
    )
    assert {*said} == {variant}


@all_of_them
def test_every_verdict_has_its_sign(render: Rendering) -> None:
    signs = {
        "reproduced": ("✓", r"$\surd$"),
        "different (higher)": ("↑", r"$\uparrow$"),
        "different (lower)": ("↓", r"$\downarrow$"),
        "not run": ("○", r"$\circ$"),
        "no reference": ("·", r"$\cdot$"),
        "not comparable": ("≠", r"$\neq$"),
        "close": ("≈", r"$\approx$"),
        "undecided": ("?", "?"),
    }
    for word, (plain, formula) in signs.items():
        sign = formula if render is latex else plain
        verdict, _, direction = word.partition(" (")
        seen = judged(verdict, direction=direction.removesuffix(")") or None)
        whole = re.sub(r"\s+", " ", render(mixed(seen)))
        assert f"{sign} {word}" in whole
        assert whole.count(sign) >= 2  # The sign is in the cell and in the legend.


@all_of_them
def test_runs_that_give_one_and_the_same_number_are_flagged(render: Rendering) -> None:
    assert "deterministic" in render(
        mixed(judged("different", direction="lower", deterministic=True))
    )
    assert "deterministic" not in render(mixed(judged("different", direction="lower")))


@all_of_them
def test_a_target_that_a_run_never_reached_has_no_deviation(render: Rendering) -> None:
    reached, never = (
        cell({"row": 0}, "ours", 50.0, 4.0, 6.0),
        cell({"row": 0}, "ours", 50.0, 4.0, math.inf),
    )
    assert never.sd is None and reached.sd == pytest.approx(math.sqrt(2))
    assert "never reached" in render(mixed(never)) and "never reached" not in render(mixed(reached))
    assert "nan" not in render(mixed(never)).replace("nano", "")


def test_at_80_columns_every_cell_has_a_line_with_all_of_it() -> None:
    lines = printed(report(), 80).splitlines()
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)
    found = [re.sub(r" {2,}", " | ", line.strip()) for line in lines]
    for expected in (
        "clients | beta | method | paper | ours | verdict",
        "5 | 0.01 | Average | 20.97 | 21.42 ± 1.01 (3) | ✓ reproduced",
        "5 | 0.01 | OT † | 28.835 | 37.44 ± 1.88 (2) | ? undecided",
        "5 | 0.5 | Average | 64.94 ± 1.50 | 66.12 (1) | ? undecided",
        "5 | 0.5 | Ours | 78.34 | 66.13 ± 0.00 (2) | ↓‡ different (lower)",
        "10 | 0.5 | Average | 59.75 | ○ not run",
    ):
        assert expected in found
    assert "left out of the paper's table: 2 parts, see the report" in found


def test_where_it_fits_the_terminal_has_the_papers_table_and_differences_go_first() -> None:
    assert "paper above ours (mean ± sd (n), difference)" in printed(report())
    widths = {"80": 80, "whole": 220}
    said = {name: printed(report(claims=(), summaries=()), width) for name, width in widths.items()}
    assert "paper above ours" not in said["80"] and "+0.45" not in said["80"]
    assert "21.42 ± 1.01 (3) +0.45 ✓" in said["whole"]
    for width in range(80, 140):
        text = printed(report(claims=(), summaries=()), width)
        # At this width, the table is shown without differences.
        if "paper above ours (mean ± sd (n));" in text:
            assert "21.42 ± 1.01 (3) ✓" in text and "+0.45" not in text
            break
    else:
        pytest.fail("no width drops the differences alone")


def test_a_narrow_list_of_tables_keeps_name_and_state() -> None:
    row = {
        "table": "ma_echo/table1_time", "paper": "MA-Echo, a long title", "source": "Table 1, time",
        "title": "Time of aggregation", "state": "in part", "cells": 1480, "runs": 2500, "done": 1200,
        "failed": 1, "missing": 1299, "seconds": 7300.0, "cost": {},
        "data": {"mnist": True, "cifar10": False},
    }  # fmt: skip
    for width in (60, 80, 200):
        out = Console(width=width, file=io.StringIO(), highlight=False)
        print_tables([row, {**row, "state": "broken: a table's file is not YAML " * 4}], out)
        assert isinstance(out.file, io.StringIO)
        text = out.file.getvalue()
        assert max(map(len, text.splitlines())) <= width
        assert "in part" in text and "ma_echo/table1_time" in text
        assert "YAML" in text and "…" not in text
        assert ("2.03" in text) == (width == 200)


@pytest.mark.parametrize("width", [60, 120])
def test_the_list_of_files_has_titles_data_and_measured_hours(width: int) -> None:
    measured = {"hours": 0.88, "runs": 3, "hardware": "CPU"}
    row = {
        "table": "a/b", "paper": "P", "source": "s", "title": "Accuracy", "runs": None,
        "seconds": None, "state": None, "cost": {"full": measured, "reduced": measured},
        "data": {"mnist": True, "svhn": False, "mine": None},
    }  # fmt: skip
    out = Console(width=width, file=io.StringIO(), highlight=False)
    print_tables([row], out)
    assert isinstance(out.file, io.StringIO)
    text = out.file.getvalue()
    assert "state" not in text and "Accuracy" in text
    assert {"mnist,", "(absent),", "mine", "(unknown)", "0.88,", "reduced"} <= set(text.split())
    assert ("mnist, svhn (absent), mine (unknown)" in text) == (width == 120)


@pytest.mark.parametrize("width", [30, 80])
def test_long_labels_and_conditions_wrap_and_are_never_cut(width: int) -> None:
    keys = ("an_extremely_long_condition", "another_of_the_same_kind")
    label = "A method of many words and a very long name"
    cells = (cell(dict.fromkeys(keys, "a_value_of_24_characters"), "m", 123.456, 90.0, 140.0),)
    columns = (Method("m", label),)
    whole = printed(
        report(keys=keys, methods=columns, cells=cells, agreement=(), claims=(), warnings=()), width
    )
    lines = whole[whole.index("──") :].splitlines()[1:]
    assert "…" not in whole
    assert max(map(len, lines)) <= width
    for text in (
        "a_value_of_24_characters",
        "123.456",
        "115.00 ± 35.36 (2)",
        "? undecided",
        *label.split(),
    ):
        # The text may be wrapped, but it must be complete.
        assert not Counter(text.replace(" ", "")) - Counter("".join(lines)), text


def test_labels_are_never_markup() -> None:
    whole = printed(
        mixed(
            judged("different", direction="lower"),
            methods=(Method("ours", "[red]A[/red]", role="proposed"),),
        ),
        40,
    )
    assert "[red]A[/red]" in whole


def test_labels_and_conditions_are_neither_html_nor_formulas() -> None:
    method, link = Method("ours", '<img src="x">', role="proposed"), '=HYPERLINK("x")'
    shown = mixed(cell({"row": "<b>1"}, "ours", 50.0), methods=(method,))
    assert not re.search(r"(?<!\\)<(img|b)", markdown(shown))
    line = to_csv(
        mixed(judged("different", direction="lower"), methods=(replace(method, label=link),))
    ).splitlines()[1]
    assert f'"\'{link.replace(chr(34), chr(34) * 2)}"' in line
    for text in ("=1+1", " =1", "\n=1", '"=1', "\t=1", "\uff1d1", "-1+1", "@SUM(1)"):
        assert inert(text) == f"'{text}"
    for text in ("a=b", "1", " 1", "-1", "+1e5", "x\n1"):
        assert inert(text) == text
    assert [inert(text) for text in ("-1.5", "-inf", "+x", "@y", "", 3)] == [
        "-1.5",
        "-inf",
        "'+x",
        "'@y",
        "",
        3,
    ]


def test_csv_has_what_was_judged() -> None:
    lines = list(csv.DictReader(io.StringIO(to_csv(report(variant="partial")))))
    first, far, near = lines[:3]
    assert (first["role"], near["role"], far["oracle"]) == (
        "baseline",
        "proposed",
        "best of a grid",
    )
    assert [float(first[f"interval_{end}"]) for end in ("low", "high")] == pytest.approx(
        [-3.1028, 3.9962], abs=1e-3
    )
    assert [line["direction"] for line in lines[:6]] == ["", "", "", "", "", "lower"]
    assert near["settles"] == "3 seeds would settle it"
    assert (first["deterministic"], lines[5]["deterministic"]) == ("False", "True")
    assert (lines[4]["same_as"], lines[4]["interval_low"]) == ("fedavg", "")
    assert {line["form"] for line in lines} == {"partial"}


def test_latex_has_decimal_points_in_line_a_label_by_form_and_fits_the_text() -> None:
    whole = latex(report(variant="reduced"))
    assert r"\label{tab:ma-echo-table1-reduced}" in whole
    for line in (line for line in whole.splitlines() if re.search(r"& (paper|ours) &", line)):
        parts = [part.strip() for part in line.removesuffix(r" \\").split("&")[3:]]
        assert len(parts) % 3 == 0
        for before, after in zip(parts[::3], parts[1::3], strict=True):
            assert after == "" or re.fullmatch(r"(\\textbf\{)?\.\d+\}?", after), line
            assert "." not in before
    methods = tuple(Method(f"m{i}", f"a method of many words {i}") for i in range(14))
    cells = tuple(
        cell({"beta": 0.1, "n": n}, m.key, 70.11, 70.5, 71.25) for n in range(30) for m in methods
    )
    wide = latex(report(keys=("beta", "n"), methods=methods, cells=cells, agreement=()))
    tabulars = re.findall(r"\\begin\{tabular\}(.*?)\\end\{tabular\}", wide, flags=re.DOTALL)
    held = [len(re.findall("r@", tabular.splitlines()[0])) for tabular in tabulars]
    assert sum(held) == 14 * 2 and max(held) < 5  # 30 rows take two pages
    for tabular in tabulars:
        lines = [line for line in tabular.splitlines() if "& ours &" in line]
        assert len(lines) <= 22
        # In print, a sign is as wide as a letter, and a gap between columns is as wide
        # as three digits.
        for line in lines:
            plain = line.removesuffix(r" \\").replace("&", "")
            printed = re.sub(r"\\textbf|[{}]", "", re.sub(r"\$\\\w+\$", "x", plain))
            assert len(re.sub(r" +", " ", printed)) + 3 * (2 + line.count("&") // 3) <= 81
    assert wide.count(r"\begin{table}") == wide.count("continued.") + 1 == len(tabulars)
    assert "($n = 2$)" in wide and "(2)" not in wide


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="needs a TeX")
def test_latex_compiles_and_nothing_sticks_out(tmp_path: Path) -> None:
    head, foot = r"\documentclass{article}\usepackage{booktabs}\begin{document}", r"\end{document}"
    (tmp_path / "t.tex").write_text(f"{head}\n{latex(report())}\n{foot}\n")
    made = subprocess.run(
        ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "t.tex"],
        check=False,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stdout
    assert "Overfull" not in made.stdout


@long_ones
def test_pooled_numbers_have_a_table_with_the_rows_and_columns_that_have_some(
    render: Rendering,
) -> None:
    assert texts.POOLED not in render(report())
    first, *others = report().cells
    tails = ((20.0, 24.5), (21.0, 20.5), (23.0,))
    text = render(report(cells=(replace(first, last_10=tails), *others)))
    numbers = [value for tail in tails for value in tail]
    shown = f"{statistics.mean(numbers):.2f} ± {statistics.stdev(numbers):.2f} (3 x 1 to 2)"
    assert text.index(texts.POOLED) < text.index(shown)
    after = re.sub(r"[|\s]+", " ", text[text.index(texts.POOLED) :])
    assert re.match(
        rf"{re.escape(texts.POOLED)}\. clients beta Average( :?---:?)* 5 0.01 {re.escape(shown)} ",
        after,
    ), after
    equal = tuple(replace(cell, last_10=((1.0, 2.0),) * cell.n) for cell in report().cells)
    assert "1.50 ± 0.55 (3 x 2)" in render(report(cells=equal))


def test_markdown_folds_hashes_away() -> None:
    facts = (("commit", "4f4ac65"), ("split sha256", "03952cb2, 7ac7f456"), ("of it", "train 3 s"))
    text = markdown(report(facts=facts))
    head, folded = text.split("<details><summary>split sha256</summary>")
    assert "- of it: train 3 s" in head and "03952cb2" not in head
    assert "- split sha256: 03952cb2, 7ac7f456" in folded


def test_wandb_has_the_verdicts_and_the_claims(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedexp.tracking.wandb import Wandb

    opened, logged, summaries, kept = [], [], [], []
    monkeypatch.setattr(Wandb, "open", lambda self, run, history: opened.append(run))
    monkeypatch.setattr(Wandb, "log", lambda self, row: logged.append(row))
    monkeypatch.setattr(Wandb, "close", lambda self, status, result: None)
    monkeypatch.setattr(Wandb, "summarize", lambda self, values: summaries.append(values))
    monkeypatch.setattr(Wandb, "log_artifact", lambda self, *what: kept.append(what))
    (tmp_path / "report.md").touch()
    assert send_summary(report(), {"_target_": "fedexp.tracking.wandb.Wandb"}, "group", tmp_path)
    comparison, claims = logged[0]["comparison"], logged[0]["claims"]
    line = dict(zip(comparison.columns, comparison.data[5], strict=True))
    assert (line["clients"], line["verdict"], line["deterministic"], line["role"]) == (
        "5",
        "different",
        True,
        "proposed",
    )
    assert [dict(zip(claims.columns, row, strict=True))["state"] for row in claims.data] == [
        c.state for c in CLAIMS
    ]
    assert summaries == [
        {"claims/supported": 1, "claims/contradicted": 1, "claims/undecided": 1, "ours/supported": 1, "proposed/reproduced": 1,
         "proposed/different": 1, "proposed/undecided": 1, "baseline/reproduced": 1, "baseline/undecided": 3,
         "baseline/not run": 1, "baseline/not comparable": 1}
    ]  # fmt: skip
    assert kept == [("ma_echo-table1-full", "report", [tmp_path / "report.md"])]
    assert opened[0].config["headline"] == dict(texts.headline(report()))
