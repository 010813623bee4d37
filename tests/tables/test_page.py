"""Tests of the page's text.

The page contains all numbers and texts, loads nothing, and escapes all texts.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from itertools import pairwise

import pytest

from fedexp.tables.report import layout, texts
from fedexp.tables.report.page import Links, breakable, page
from fedexp.tables.report.pictures import pictures
from fedexp.tables.report.report import Cell, Method, Origin, Picture
from tests.tables.reports import HOSTILE, cell, report


class Reader(HTMLParser):
    """A parser that records elements, texts of table rows, and unclosed elements."""

    VOID = ("meta", "input", "br", "wbr", "link", "path", "use", "rect")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.rows: dict[str, list[list[str]]] = {"wide": [], "long": [], "claims": [], "means": []}
        self.bold: list[str] = []
        self.text: list[str] = []
        self._table = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "table":
            self._table = dict(attrs)["class"] or ""
        if tag == "tr":
            self.rows[self._table].append([])
        if tag in ("td", "th") and self._table:
            self.rows[self._table][-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes something else"
        if tag == "table":
            self._table = ""

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.text.append(data)
        if self._table and {"td", "th"} & set(self.open):
            self.rows[self._table][-1][-1] += data.strip("\n")
        if self.open and self.open[-1] == "b" and self._table:
            self.bold.append(data)


@pytest.fixture(scope="module")
def whole() -> str:
    sample = report()
    return page(replace(sample, pictures=pictures(sample)))


def test_every_number_of_every_cell_is_on_it(whole: str) -> None:
    read = Reader(whole)
    head, *lines = read.rows["long"]
    assert head == [
        "clients", "beta", "Method", "Paper, %", "Our runs, %", "sd", "n", "Δ", "95 % interval", "Verdict", "Why",
        "By seed", "Runs",
    ]  # fmt: skip
    assert len(lines) == len(report().cells)
    assert lines[0] == [
        "5", "0.01", "Average", "20.97", "21.42", "1.01", "3", "+0.45", "−3.10 to +4.00", "✓ reproduced", "",
        "0: 22.50, 1: 21.25, 2: 20.50", "1 runruns/fedavg-mnist-0a/1b",
    ]  # fmt: skip
    assert lines[1][3:11] == [
        "28.835", "37.44", "1.88", "2", "+8.61", "−13.19 to +30.41", "? undecided",
        "the difference is +8.61, 95 % interval -13.2 to +30.4; 6 seeds would settle "
        "itfailed: OSError: disk full",
    ]  # fmt: skip
    assert lines[3][3:8] == ["64.94 ± 1.50", "66.12", "–", "1", "+1.19"]
    assert lines[3][8:11] == ["–", "? undecided", "one seed"]
    assert lines[4][4:8] == ["nan", "nan", "2", "nan"]
    assert lines[6][4:8] == ["inf", "–", "1", "+inf"]
    assert lines[4][10] == "a run's number is NaNequals Average by construction"
    assert lines[5][8:10] == ["−12.21 to −12.21", "↓‡ different (lower)"]
    assert lines[7][3:10] == ["–", "19.50", "–", "1", "–", "–", "· no reference"]
    assert lines[8][4:10] == ["–", "–", "0", "–", "–", "○ not run"]
    assert lines[9][10].endswith("reduced: 2 of 10 epochs")


def test_the_table_has_the_papers_rows_and_columns(whole: str) -> None:
    head, *rows, foot = Reader(whole).rows["wide"]
    assert [h.split("paper |")[0] for h in head] == [
        "clients, beta",
        # The proposed method comes first, so that it is seen without scrolling.
        "Oursma_echo",
        "Averagefedavg",
        "OT †ot",
        "Spearman ρ(methods)",
    ]
    assert [row[0] for row in rows] == [
        f"clients {c}beta {b}" for c in (5, 10) for b in (0.01, 0.5)
    ]
    assert [row[-1] for row in rows] == ["1.00 (3)", "0.50 (3)", "– (1)", "–"]
    assert rows[0][2].startswith(
        "paper 20.97|, our runs 21.42 ± 1.01 (3)✓ reproduced difference +0.45"
    )
    assert rows[2][1] == "no cell"
    assert foot == ["reproduced", "1 of 3", "1 of 3", "0 of 1", "mean 0.75"]


def test_bold_is_the_best_of_its_row_among_the_papers_and_among_ours(whole: str) -> None:
    # In row 2, our values 66.125 and 66.13 are printed as 66.12 and 66.13. NaN is never
    # the best value. Infinity in row 3 is not the best either, and a single value has
    # nothing to beat.
    assert Reader(whole).bold == ["80.31", "80.00", "78.34", "66.13", "81.80", "81.92"]


@pytest.mark.parametrize(
    ("values", "higher", "expected"),
    [
        ((1.0, 2.0, 3.0), True, {"c"}),
        ((1.0, 2.0, 3.0), False, {"a"}),
        ((2.001, 2.004, 1.0), True, {"a", "b"}),  # Both are printed as 2.00.
        ((math.nan, 2.0, 3.0), False, {"b"}),
        ((math.inf, 2.0, 3.0), True, {"c"}),
        ((None, 2.0, None), True, set()),
    ],
)
def test_best(values: tuple[float | None, ...], higher: bool, expected: set[str]) -> None:
    assert layout.best(zip("abc", values, strict=True), 2, higher=higher) == expected


def test_nothing_is_loaded_and_no_script_but_its_own_may_run(whole: str) -> None:
    read = Reader(whole)
    for tag, attributes in read.elements:
        for name in (
            "src",
            "srcset",
            "href",
            "xlink:href",
            "action",
            "data",
            "poster",
            "formaction",
        ):
            assert (attributes.get(name) or "#").startswith("#"), (tag, attributes)
        assert not any(name.startswith("on") for name in attributes), (tag, attributes)
    assert not re.search(r"@import|url\((?!#)|fetch\(|XMLHttpRequest|WebSocket|localStorage", whole)
    assert not {tag for tag, _ in read.elements} & {
        "link",
        "iframe",
        "object",
        "embed",
        "img",
        "base",
    }
    policy = next(
        a["content"]
        for t, a in read.elements
        if t == "meta" and a.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy is not None
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-")


def test_its_structure_is_sound(whole: str) -> None:
    read = Reader(whole)
    assert read.open == []
    ids = [a["id"] for _, a in read.elements if "id" in a]
    assert len(ids) == len(set(ids))
    targets = {
        str(a[name])
        for _, a in read.elements
        for name in ("popovertarget", "aria-labelledby")
        if name in a
    }
    targets |= {str(a["href"])[1:] for t, a in read.elements if t == "a"}
    assert targets <= set(ids)
    assert all("scope" in a for t, a in read.elements if t == "th")
    levels = [int(t[1]) for t, _ in read.elements if re.fullmatch(r"h[1-6]", t)]
    assert levels[0] == 1
    assert all(below - above <= 1 for above, below in pairwise(levels))


def test_pooled_numbers_are_a_part_of_its_own() -> None:
    cells = [replace(c, last_10=((-2.0, 1.0),) * c.n) for c in report().cells]
    text = page(report(cells=tuple(cells), summaries=()))
    test_its_structure_is_sound(text)
    head, *rows = Reader(text).rows["means"]
    assert head == ["clients", "beta", "Average", "OT †", "Ours (ma_echo)"] and len(rows) == 4
    assert rows[0] == [
        "5",
        "0.01",
        "−0.50 ± 1.64 (3 x 2)",
        "−0.50 ± 1.73 (2 x 2)",
        "−0.50 ± 1.73 (2 x 2)",
    ]
    assert rows[3][2] == ""
    assert 'href="#pooled"' in text and 'href="#pooled"' not in page(report())


def test_texts_are_never_markup() -> None:
    hostile = report(
        name=HOSTILE, paper=HOSTILE, source=HOSTILE, title=HOSTILE, metric=HOSTILE, unit=HOSTILE, keys=(HOSTILE,),
        methods=(Method(HOSTILE, HOSTILE + "!"),), command=HOSTILE, warnings=(HOSTILE,), variant="reduced",
        facts=((HOSTILE, HOSTILE),), assumptions=((HOSTILE, HOSTILE),), agreement=(),
        cells=(cell({HOSTILE: HOSTILE}, HOSTILE, 1.0, 2.0, reason=HOSTILE, runs=(HOSTILE,), failed=(HOSTILE,), reduced=HOSTILE),),
        pictures=(Picture(HOSTILE, HOSTILE, "<svg></svg>", b""),),
    )  # fmt: skip
    read = Reader(page(hostile))
    assert read.open == []
    assert [tag for tag, _ in read.elements].count("script") == 1
    assert "".join(read.text).count(HOSTILE) >= 20


def test_long_keys_break_between_their_names() -> None:
    assert breakable("trainer.momentum_from=normalised <b>") == (
        "trainer.<wbr>momentum_from=<wbr>normalised &lt;b&gt;"
    )
    # Sentences and numbers do not break at their dots.
    assert breakable("a. b = 0.5") == "a. b = 0.5"


def test_a_smaller_form_says_so_before_any_number() -> None:
    assert 'role="note"' not in page(report())
    for variant, words in (
        ("reduced", "smaller than the paper's. Their numbers are not compared"),
        ("smoke", "do not compare their numbers with published ones"),
    ):
        text = unescape(page(report(variant=variant)))
        assert 0 < text.index(words) < text.index("20.97")
        assert "<li>2 of 10 epochs</li>" in text


def test_the_headline_stands_above_all_else() -> None:
    text = page(report(variant="reduced"))
    headline = re.search(r'<ul class="headline".*?</ul>', text)
    assert headline is not None
    claimed = text.index('class="claimed"')
    assert text.index("<h1>") < claimed < headline.start() < text.index('role="note"')
    lines = re.findall(r"<li>(.*?)</li>", text[claimed : headline.start()])
    # The page lists the paper's claims, with the contradicted ones first.
    assert [re.sub(r"\s+", " ", re.sub("<.*?>", "", line)) for line in lines] == [
        "✗ contradicted gains with clients", "? undecided holds on CNNs", "✓ supported is better than OT",
    ]  # fmt: skip
    said = re.sub(r"<.*?>", "", headline[0].replace("</li>", "; "))
    assert said == "".join(f"{what}: {counted}; " for what, counted in texts.headline(report()))


def test_a_cell_says_its_interval_and_reason_when_opened() -> None:
    boxes = re.findall(r"<div popover.*?</div>", page(report()), flags=re.DOTALL)
    boxes = [next(b for b in boxes if f'id="{_anchor(c)}-more"' in b) for c in report().cells]
    assert len(boxes) == len(report().cells)
    said = [re.sub(r"<.*?>", " ", box) for box in boxes]
    assert "95 % interval of the difference −13.19 to +30.41" in re.sub(r"\s+", " ", said[1])
    assert "6 seeds would settle it" in said[1]
    assert "several runs gave exactly the same number" in said[5]
    assert "equals Average by construction" in said[4]
    assert not any("deterministic" in text.lower() for text in said[:5])


def _anchor(of: Cell) -> str:
    return "-".join(
        ["cell", *(str(part) for pair in of.conditions.items() for part in pair), of.method]
    )


def test_a_cell_leads_to_its_runs_files_and_to_the_command_of_each_seed() -> None:
    made = [
        Origin(f"runs/a/{seed}", f"fedexp-table run t --seeds {seed}", "c0ffee", "5911", "4f4ac65")
        for seed in (0, 1)
    ]
    cells = (
        cell(
            {"beta": 0.1}, "m", 50.0, 49.0, 51.5, origins=tuple(made), runs=("runs/a/0", "runs/a/1")
        ),
    )
    links = Links(
        {"runs/a/0": {"folder": "../runs/a/0", "config": "../runs/a/0/config.yaml"}}, ("runs.csv",)
    )
    text = page(report(keys=("beta",), cells=cells, agreement=()), links)
    first, second = re.findall(r"<li><span class=\"pair\">.*?</li>", text, flags=re.DOTALL)
    assert re.findall('href="(.*?)"', first) == ["../runs/a/0", "../runs/a/0/config.yaml"]
    # A run without a folder has no link.
    assert not re.findall("href", second) and "<code>runs/a/1</code>" in second
    for line, seed, value, difference in (
        (first, 0, "49.00", "−1.00"),
        (second, 1, "51.50", "+1.50"),
    ):
        for part in (
            f"seed {seed}",
            value,
            f"Δ {difference}",
            f"<code>fedexp-table run t --seeds {seed}</code>",
            "4f4ac65",
        ):
            assert part in line
    whole = page(
        report(keys=("beta",), cells=cells),
        Links(configs={"c0ffee": {"a": {"b": 1}, "c": None}, "d": {"c": None}}),
    )
    assert (
        'href="#config-c0ffee"' in whole
        and 'id="config-c0ffee"' in whole
        and 'id="config-d"' in whole
    )
    assert re.findall("<pre.*?><code>(.*?)</code>", whole, flags=re.DOTALL)[-3:] == [
        "c: null",
        "a.b: 1",
        "",
    ]
    parts = (
        ("t/acc_of_class_0", 50.0),
        ("t/acc_of_class_1", 60.0),
        ("v/clients/acc_mean", 7.0),
        ("v/clients/acc_worst_10", 1.0),
    )
    shown = page(report(keys=("beta",), cells=(replace(cells[0], parts=parts),), agreement=()))
    assert (
        "<dt>t/acc by class</dt><dd>0: 50.00, 1: 60.00</dd><dt>v/clients/acc</dt><dd>mean: "
        "7.00, worst 10 %: 1.00</dd>" in shown
    )
    assert (
        'id="cell-beta-0.1-m"' in text
        and 'href="#cell-beta-0.1-m"' in text
        and 'href="runs.csv"' in text
    )


def test_a_claim_opens_to_its_rows(whole: str) -> None:
    head, *lines = Reader(whole).rows["claims"]
    assert head == ["State", "Claim", "It says", "Why", "In print", "Row by row"]
    assert [line[0] for line in lines] == [
        "✓ supported",
        "✗ contradicted",
        "? undecided",
        "✓ supported",
    ]
    assert lines[1][-1] == "1 rowall rows: no, −14.6, 0 of 3 pairs in favour; in print no"
    assert lines[2][-1] == ""
    assert lines[3][1] == "seedsour own expectation"
    means = Reader(whole).rows["means"]
    assert means[1] == ["Average", "−1.20", "−3.00 to +0.50", "2 seeds, 3 rows"]


def test_a_column_with_its_own_tolerance_says_so() -> None:
    one, two, three = report().methods
    whole = "".join(Reader(page(report(methods=(one, replace(two, tolerance=10.0), three)))).text)
    assert "within the tolerance, 5 percentage points (OT † 10)." in whole


def test_the_same_report_gives_the_same_bytes(whole: str) -> None:
    again = report()
    drawn = pictures(again)
    assert page(replace(again, pictures=drawn)) == whole
    assert [p.png for p in drawn] == [p.png for p in pictures(report())]


def test_a_difference_that_prints_as_nothing_has_no_sign() -> None:
    cells = tuple(cell({}, f"m{i}", 50.0, value) for i, value in enumerate((49.999, 50.001, 49.99)))
    read = Reader(page(report(keys=(), cells=cells, agreement=())))
    assert [row[5] for row in read.rows["long"][1:]] == ["0.00", "0.00", "−0.01"]


def test_numbers_out_of_all_bounds_are_written() -> None:
    cells = (
        cell({}, "a", 1e300, 1e300, -1e300),
        cell({}, "b", math.nan, math.nan),
        cell({}, "c", -math.inf, math.inf, -math.inf),
    )
    wild = report(unit="loss", keys=(), cells=cells, agreement=())
    lines = Reader(page(replace(wild, pictures=pictures(wild)))).rows["long"][1:]
    assert [line[1:4] for line in lines] == [
        ["1.000e+300", "0", "1.414e+300"],
        ["nan", "nan", "–"],
        ["−inf", "nan", "nan"],
    ]


def test_an_empty_report_is_a_page() -> None:
    empty = report(
        cells=(), methods=(), keys=(), agreement=(), warnings=(), facts=(), assumptions=()
    )
    read = Reader(page(replace(empty, pictures=pictures(empty))))
    assert read.open == []
    assert not {"figure", "dl"} & {tag for tag, _ in read.elements}


@pytest.mark.parametrize("conditions", [0, 1, 4])
@pytest.mark.parametrize("methods", [1, 12])
def test_any_number_of_conditions_and_methods(conditions: int, methods: int) -> None:
    keys = tuple(f"key{i}" for i in range(conditions))
    columns = tuple(Method(f"m{i}", f"M{i}") for i in range(methods))
    cells = tuple(cell(dict.fromkeys(keys, "x"), m.key, None, 1.0) for m in columns)
    demo = report(keys=keys, methods=columns, cells=cells, agreement=())
    read = Reader(page(replace(demo, pictures=pictures(demo))))
    assert [len(row) for row in read.rows["wide"]] == [methods + bool(conditions)] * 2
    # The report has no values of the paper.
    assert "paper" not in "".join(read.rows["wide"][0] + read.rows["wide"][1])
    assert [len(row) for row in read.rows["long"]] == [conditions + 11] * (methods + 1)


@pytest.mark.parametrize(
    ("unit", "paper", "expected"),
    [
        ("percent", (80.31, 28.835), 2),
        ("fraction", (0.8031, 0.5), 4),
        ("s", (0.003, 565.24), 3),
        ("parameters", (318010.0, 784.0), 0),
        ("loss", (), None),
        ("loss", (math.nan,), None),
    ],
)
def test_numbers_have_as_many_decimals_as_the_paper_prints(
    unit: str, paper: tuple[float, ...], expected: int | None
) -> None:
    cells = tuple(cell({}, f"m{i}", value) for i, value in enumerate(paper)) or (
        cell({}, "m", None),
    )
    assert layout.places(report(unit=unit, keys=(), cells=cells)) == expected


@pytest.mark.parametrize(
    ("value", "places", "text"),
    [
        (28.835, 2, "28.835"),
        (80.3, 2, "80.30"),
        (math.nan, 2, "nan"),
        (2e9, 2, "2.000e+09"),
        (0.123456, None, "0.123456"),
    ],
)
def test_the_papers_numbers_keep_their_digits(value: float, places: int | None, text: str) -> None:
    assert layout.published(value, places) == text
