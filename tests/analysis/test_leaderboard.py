"""Tests of leaderboards."""

from __future__ import annotations

import csv
import io
import json
import math
import shutil
import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, zip_longest
from pathlib import Path

import pytest
from scipy.stats import ttest_rel

from fedexp.analysis.leaderboard import WORST_TENTH, Leaderboard, leaderboard, to_csv
from fedexp.analysis.leaderboard_picture import front, name_points, picture
from fedexp.core.errors import ConfigError
from fedexp.site import leaderboards
from fedexp.site.leaderboards import Shown, best_values, edge_note, finding, tried
from fedexp.tables import record, sweeps
from fedexp.tables.cells import Job, PlannedCell
from fedexp.tables.load import load_table
from fedexp.tables.record import RunRecord, TableRecord, run_key
from fedexp.tables.report import canvas
from fedexp.tables.schema import Column, Table, Where, fits
from fedexp.tuning.tuned_files import Sweep, Swept, Tuning, load_tuning

RESULTS = Path(__file__).resolve().parents[2] / "scripts" / "results"
ROWS = ({"alpha": 0.1}, {"alpha": 0.5})
# Accuracies of each column: one list per row, one number per seed.
VALUES = {
    "fedavg": ([60.0, 61.0, 62.0], [80.0, 81.0, 82.0]),
    "better": ([63.0, 64.1, 65.0], [83.0, 84.0, 85.0]),
    "mixed": ([66.0, 60.0, 61.0], [79.0, 83.0, 80.0]),
}
# Bytes per round, and the first rounds that reach the target.
BYTES = {"fedavg": 100, "better": 300, "mixed": 100}
REACHED = {"fedavg": [4, 5, 9], "better": [2, 3, 3], "mixed": [8, math.inf, math.inf]}
ROUNDS = 10


def made(
    values: dict[str, Sequence[Sequence[float | None]]],
    *,
    timed: int = 0,
    reached: dict[str, list[float]] = REACHED,
    targets: Sequence[str] = ("0.5",),
    where: dict[str, Where] | None = None,
) -> Leaderboard:
    table = Table(
        title="All methods",
        paper="none",
        source="leaderboard",
        metric="test accuracy",
        unit="percent",
        higher_is_better=True,
        keys=("alpha",),
        methods=tuple(
            Column(key, key.capitalize(), (), where=(where or {}).get(key, {})) for key in values
        ),
        conditions={"alpha": "partition.alpha={alpha}"},
        grids=({"alpha": [0.1, 0.5]},),
        seeds=(0, 1, 2),
        name="leaderboard/small",
    )
    cells, runs = [], {}
    for column, rows in values.items():
        for conditions, numbers in zip(ROWS, rows, strict=True):
            if not fits(table.columns[column].where, conditions, column):
                continue
            jobs = [Job(seed, {}, (), (column, str(seed))) for seed in range(len(numbers))]
            cells.append(PlannedCell(dict(conditions), column, tuple(jobs)))
            for job, number, first in zip_longest(jobs, numbers, reached[column]):
                runs[run_key(table, cells[-1], job)] = RunRecord(
                    dict(conditions),
                    column,
                    job.seed,
                    f"seed={job.seed}",
                    value=number,
                    status="missing" if number is None else "done",
                    run=f"runs/{column}-{conditions['alpha']}-{job.seed}",
                    choice="fedavg",
                    rounds=ROUNDS,
                    bytes_up=ROUNDS * BYTES[column] // 2,
                    bytes_down=ROUNDS * BYTES[column] // 2,
                    phases={"train": 16.0, "probe": 4.0, "aggregate": 5.0, "evaluate": 9.0},
                    parts={WORST_TENTH: 0.4},
                    rounds_to={} if first is None else dict.fromkeys(targets, first),
                )
    found = TableRecord("full", {}, None, [], "", runs)
    table = replace(table, headline=replace(table.headline, scale=100))
    times = {key: run for key, run in runs.items() if run.conditions in ROWS[:timed]}
    return leaderboard(table, cells, found, replace(found, runs=times) if timed else None)


def test_methods_are_sorted_by_rank_and_compared_with_the_first_column() -> None:
    board = made(VALUES)
    assert [entry.column for entry in board.entries] == ["better", "fedavg", "mixed"]
    assert board.reference.column == "fedavg"
    assert board.reference.difference is None

    by_seed = {
        column: [statistics.fmean(pair) for pair in zip(*rows, strict=True)]
        for column, rows in VALUES.items()
    }
    for column, other in (("better", "mixed"), ("mixed", "better")):
        entry = next(entry for entry in board.entries if entry.column == column)
        tests = {name: ttest_rel(by_seed[name], by_seed["fedavg"]) for name in (column, other)}
        low, high = tests[column].confidence_interval()
        mean = statistics.fmean(by_seed[column]) - statistics.fmean(by_seed["fedavg"])
        found = entry.difference
        assert found is not None and found.interval is not None and found.p is not None
        assert found.difference == pytest.approx(mean)
        assert found.interval == pytest.approx((low, high))
        # Holm: the smaller of two p values is doubled.
        smaller = tests[column].pvalue < tests[other].pvalue
        expected = tests[column].pvalue * (2 if smaller else 1)
        assert found.p == pytest.approx(max(expected, 2 * min(t.pvalue for t in tests.values())))


def test_target_is_the_median_and_half_of_the_runs_must_reach_it() -> None:
    board = made(VALUES)
    found = {entry.column: entry.rows[0] for entry in board.entries}
    rounds = {column: row.rounds_to_target for column, row in found.items() if row}
    assert rounds == {"fedavg": 5, "better": 3, "mixed": math.inf}
    sent = {column: row.bytes_to_target for column, row in found.items() if row}
    assert sent == {"fedavg": 500, "better": 900, "mixed": math.inf}


def test_target_that_half_of_the_runs_reach_is_not_reached() -> None:
    values = {column: [row[:2] for row in rows] for column, rows in VALUES.items()}
    board = made(values, reached={"fedavg": [4, 5], "better": [3, math.inf], "mixed": [2, 2]})
    rows = {entry.column: entry.rows[0] for entry in board.entries}
    rounds = {column: row.rounds_to_target for column, row in rows.items() if row}
    assert rounds == {"fedavg": 5, "better": math.inf, "mixed": 2}


def test_numbers_of_a_row_are_in_the_units_of_the_table() -> None:
    row = made(VALUES, timed=2).reference.rows[0]
    assert row is not None
    assert (row.n, row.mean, row.num_bytes) == (3, pytest.approx(61.0), 1000)
    assert row.worst_tenth == pytest.approx(40.0) and row.target == pytest.approx(50.0)
    # A round without its evaluation: (16 + 4 + 5) / 10
    assert (row.round_seconds, row.server_seconds) == (pytest.approx(2.5), pytest.approx(0.5))
    untimed = made(VALUES).reference.rows[0]
    assert untimed is not None and untimed.round_seconds is None


@pytest.mark.parametrize("number", [None, math.inf, math.nan])
def test_method_without_a_number_in_a_row_has_no_rank(number: float | None) -> None:
    board = made(VALUES | {"better": ([63.0, number, 65.0], VALUES["better"][1])})
    last = board.entries[-1]
    assert (last.column, last.aggregate, last.difference) == ("better", None, None)
    assert last.rows[0] is None and last.rows[1] is not None
    assert board.aggregates is not None
    assert {one.column for one in board.aggregates.columns} == {"fedavg", "mixed"}


@pytest.mark.parametrize("done", [[], ["fedavg"]])
def test_rows_without_most_of_the_methods_do_not_count(done: list[str]) -> None:
    values = {
        column: (rows[0], rows[1] if column in done else [None] * 3)
        for column, rows in VALUES.items()
    }
    board = made(values)
    assert board.rows == ROWS[:1] and board.missing == ROWS[1:]
    assert all(entry.aggregate is not None for entry in board.entries)
    assert finding(board).startswith(
        "3 methods were compared in 1 of 2 settings (alpha=0.1) with 3 seeds"
    )
    more = replace(made(VALUES), missing=({"alpha": 5}, {"alpha": 9}))
    assert finding(replace(more, absent=((), (), (), ("Mixed",)))).startswith(
        "3 methods were compared in 2 of 3 settings (all except alpha=5) with 3 seeds"
    )
    shown = Shown(board.table, board, [], {}, None, "command")
    _, page = leaderboards.pages([shown], with_methods=False)
    assert "without results of most methods: <code>alpha=0.5</code>." in page.text
    assert made(VALUES).missing == ()


def test_without_any_run_no_method_has_a_rank() -> None:
    board = made({column: ([None] * 3, [None] * 3) for column in VALUES})
    assert board.rows == () and board.aggregates is None
    assert [entry.aggregate for entry in board.entries] == [None] * 3
    assert board.mean_over_rows(board.reference, "mean") is None
    shown = Shown(board.table, board, [], {}, None, "command")
    _, page = leaderboards.pages([shown], with_methods=False)
    assert "Fewer than two methods have results in all rows that count." in page.text


def test_interval_over_one_row_is_that_of_the_row() -> None:
    values = {column: (rows[0], [None] * 3) for column, rows in VALUES.items()}
    entry = made(values).reference
    row, overall = entry.rows[0], entry.aggregate
    assert row is not None and overall is not None
    mean = overall.mean
    assert (mean.value, mean.low, mean.high) == pytest.approx((row.mean, row.low, row.high))


def test_one_run_has_no_interval() -> None:
    values = {column: [row[:1] for row in rows] for column, rows in VALUES.items()}
    row = made(values, reached={column: [3] for column in VALUES}).reference.rows[0]
    assert row is not None and (row.low, row.high) == (None, None)


def test_one_seed_gives_no_test() -> None:
    values = {column: [row[:1] for row in rows] for column, rows in VALUES.items()}
    text = finding(made(values, reached={column: [3] for column in VALUES}))
    assert "1 seed each" in text and "t-test" not in text


def test_numbers_that_a_run_does_not_have_are_unknown() -> None:
    row = made(VALUES, reached={column: [] for column in VALUES}).reference.rows[0]
    assert row is not None
    assert (row.target, row.rounds_to_target, row.bytes_to_target) == (None, None, None)


def test_several_targets_are_refused() -> None:
    with pytest.raises(ConfigError, match="one target"):
        made(VALUES, targets=("0.5", "0.7"))


def test_csv_has_one_line_per_method_and_row() -> None:
    board = made(VALUES)
    lines = list(csv.DictReader(io.StringIO(to_csv([board]))))
    assert len(lines) == len(VALUES) * len(ROWS)
    (line,) = (one for one in lines if one["method"] == "mixed" and one["row"] == "alpha=0.5")
    assert float(line["mean"]) == pytest.approx(statistics.fmean(VALUES["mixed"][1]))
    assert line["rounds_to_target"] == "inf"
    (one,) = {line["rank"] for line in lines if line["method"] == "better"}
    assert float(one) == 1.0


def test_finding_names_the_methods_that_differ_significantly() -> None:
    text = finding(made(VALUES))
    assert text.startswith("3 methods were compared in 2 settings with 3 seeds each. Better has")
    assert "Better (+3.02, " in text and "is better than Fedavg, and no method is worse" in text
    assert text.endswith("For 1 method, the difference is undecided.")
    assert finding(made(VALUES), with_numbers=False) == (
        "3 methods were compared in 2 settings with 3 seeds each. By a paired t-test over seeds, "
        "adjusted for the number of methods, Better is better than Fedavg, and no method is worse. "
        "For 1 method, the difference is undecided."
    )


def test_finding_names_equal_methods_and_those_with_missing_runs() -> None:
    rows = VALUES["fedavg"]
    lacking = ([60.0, 61.0, None], [80.0, 81.0, 82.0])
    values = {**VALUES, "same": rows, "lacking": lacking}
    numbers = {"reached": {**REACHED, "same": [], "lacking": []}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(BYTES, "same", 100)
        patch.setitem(BYTES, "lacking", 100)
        text = finding(made(values, **numbers))
    assert text.endswith(
        "For 1 method, the difference is undecided. 1 method does not differ from Fedavg in any "
        "of these runs. Not counted, because runs are missing: Lacking."
    )


def test_row_in_which_a_method_cannot_run_is_shown_but_does_not_count() -> None:
    board = made(VALUES, where={"mixed": {"alpha": 0.1}})
    assert board.counted == [0] and board.rows == ROWS
    entries = {entry.column: entry for entry in board.entries}
    assert board.absent == ((), ("Mixed",))
    for column, (first, second) in VALUES.items():
        entry = entries[column]
        assert entry.aggregate is not None
        assert entry.aggregate.mean.value == pytest.approx(statistics.fmean(first))
        assert board.mean_over_rows(entry, "num_bytes") == ROUNDS * BYTES[column]
        row = entry.rows[1]
        if column == "mixed":
            assert row is None
        else:
            assert row is not None and row.mean == pytest.approx(statistics.fmean(second))
    found = entries["better"].difference
    tested = ttest_rel(VALUES["better"][0], VALUES["fedavg"][0]).confidence_interval()
    assert found is not None and found.interval == pytest.approx(tuple(tested))

    shown = Shown(board.table, board, [], {}, picture(board), "command")
    text = leaderboards.pages([shown], with_methods=False)[1].text
    assert "3 methods were compared in 1 setting with 3 seeds each. Better is the best" in text
    assert text.count("worst tenth of the clients") == 2

    lines = csv.DictReader(io.StringIO(to_csv([board])))
    assert {(line["row"], line["counts"]) for line in lines} == {
        ("alpha=0.1", "1"),
        ("alpha=0.5", "0"),
    }
    assert "<code>alpha=0.5</code> does not count" in text
    assert "because Mixed cannot run there" in text
    assert (
        "cannot run there"
        not in leaderboards.pages([replace(shown, board=made(VALUES))], with_methods=False)[1].text
    )


def test_row_that_few_methods_can_run_is_shown() -> None:
    only = {"better": {"alpha": 0.1}, "mixed": {"alpha": 0.1}}
    board = made(VALUES, where=only)
    assert board.missing == () and board.absent == ((), ("Better", "Mixed"))
    # If no row counts, there are no ranks, and the rows have all their columns
    nowhere = made(VALUES, where={"better": {"alpha": 0.1}, "mixed": {"alpha": 0.5}})
    assert nowhere.counted == [] and nowhere.aggregates is None
    assert nowhere.rows_with("worst_tenth") == [0, 1]
    assert finding(nowhere) == "Fewer than two methods have results in all rows that count."


def test_front_has_the_points_that_no_other_beats() -> None:
    points = [(1.0, 5.0, "a"), (2.0, 4.0, "dear"), (2.0, 7.0, "b"), (1.0, 3.0, "poor")]
    points += [(1.0, 5.0, "equal"), (3.0, 7.0, "later")]
    assert [label for *_, label in front(points, higher_is_better=True)] == ["a", "equal", "b"]
    assert [label for *_, label in front(points, higher_is_better=False)] == ["poor"]


@pytest.mark.parametrize("up", [1, -1], ids=["higher is better", "lower is better"])
def test_labels_of_a_picture_overlap_neither_each_other_nor_its_edge(up: int) -> None:
    """Two points are nearly equal, and one label is too long for the left of its point."""
    points = [(6.0, 0.7, "second"), (6.0, 0.7001, "best"), (6.5, 0.9, "long " * 7)]
    points = [(cost, up * number, label) for cost, number, label in points]
    figure = canvas.figure(4.0, 3.0)
    axes = figure.add_subplot()
    axes.plot(*zip(*[point[:2] for point in points], (9.0, up * 0.5), strict=True), "o")
    figure.draw_without_rendering()
    name_points(axes, points, higher_is_better=up > 0)
    labels = {text.get_text().split()[0]: text.get_window_extent() for text in axes.texts}
    assert len(labels) == 3
    assert all(not one.overlaps(two) for one, two in combinations(labels.values(), 2))
    assert up * labels["best"].y0 > up * labels["second"].y0
    left, height = axes.transData.transform(points[1][:2])
    assert up * labels["best"].y0 > up * height and up * labels["best"].y1 > up * height
    assert labels["best"].x1 < left and labels["second"].x1 < left < labels["long"].x0
    for box in labels.values():
        assert axes.bbox.x0 <= box.x0 and box.x1 <= axes.bbox.x1


def test_pages_show_all_methods_and_their_picture() -> None:
    board = made(VALUES, timed=2)
    shown = Shown(board.table, board, [], {"better": ["server data"]}, picture(board), "command")
    first, page = leaderboards.pages([shown], with_methods=False)
    assert finding(board) in first.text and finding(board) in page.text
    for column in VALUES:
        assert column.capitalize() in page.text
    assert "server data" in page.text and "not reached" in page.text
    assert "methods/fedavg.html" not in page.text
    assert 'data-sort="Infinity">not reached' in page.text
    untimed = made(VALUES, reached={column: [] for column in VALUES})
    _, page = leaderboards.pages([replace(shown, board=untimed)], with_methods=True)
    assert "methods/fedavg.html" in page.text
    assert "seconds of a round" not in page.text and "rounds to the target" not in page.text
    names = dict(leaderboards.files_of([shown]))
    assert [*names] == ["leaderboards/small/costs.svg", "leaderboards/small/costs-dark.svg"]


def test_seconds_are_those_of_the_rows_that_were_timed() -> None:
    board = made(VALUES, timed=1)
    assert board.rows_with("round_seconds") == [0]
    assert board.mean_over_rows(board.reference, "round_seconds") == pytest.approx(2.5)
    shown = Shown(board.table, board, [], {}, picture(board), "command")
    _, page = leaderboards.pages([shown], with_methods=False)
    assert "timed only in <code>alpha=0.1</code>" in page.text
    everywhere = replace(shown, board=made(VALUES, timed=2))
    assert "timed only" not in leaderboards.pages([everywhere], with_methods=False)[1].text

    # One method was not timed
    board = made(VALUES, timed=2)
    first = board.entries[0]
    untimed = replace(first, rows=(replace(first.rows[0], round_seconds=None), first.rows[1]))
    board = replace(board, entries=(untimed, *board.entries[1:]))
    assert board.mean_over_rows(untimed, "round_seconds") is None
    assert board.mean_over_rows(board.entries[1], "round_seconds") == pytest.approx(2.5)


def test_best_values_are_marked_at_the_edge_of_what_was_tried() -> None:
    tuning = replace(load_tuning("many_rounds_dirichlet"), where={"alpha": 0.1})
    board = made(VALUES)
    fedprox = replace(board.entries[0], column="fedprox")
    board = replace(board, entries=(fedprox, *board.entries[1:]))
    shown = Shown(board.table, board, [], {}, None, "command")

    def measured(*sweeps: Swept) -> Tuning:
        points = tuple(Sweep(swept.over, swept.points) for swept in sweeps)
        return replace(tuning, sweeps={"fedprox": points}, results={"fedprox": sweeps})

    lr = Swept("local.lr", (0.1, 0.3), (0.5, None), 0.1)
    # FedProx has mu = 0.1, which is better than both points and below them.
    outside = measured(lr, Swept("trainer.mu", (1, 2), (0.4, 0.3), None))
    points = "local.lr: 0.1 (0.5000), 0.3 (failed); trainer.mu: 1 (0.4000), 2 (0.3000)"
    assert tried(outside, "fedprox") == points
    chosen = replace(shown, tunings=[outside]).chosen
    ranges = chosen[0][1]
    best = "local.lr=0.1 (lower edge), trainer.mu=0.1 (lower edge)"
    assert best_values(ranges["fedprox"]) == best
    assert best_values(None) == "not chosen yet"
    assert edge_note(board, chosen).startswith("1 method has a")
    assert edge_note(board, [(replace(outside, where={"alpha": 5}), ranges)]) == ""
    unranked = replace(board, entries=(replace(fedprox, aggregate=None), *board.entries[1:]))
    assert edge_note(unranked, chosen) == ""

    lr = Swept("local.lr", (0.1, 0.2, 0.3), (0.3, 0.5, 0.4), 0.2)
    inside = measured(lr, Swept("trainer.mu", (0.05, 0.2), (0.4, 0.3), None))
    chosen = replace(shown, tunings=[inside]).chosen
    assert best_values(chosen[0][1]["fedprox"]) == "local.lr=0.2, trainer.mu=0.1"
    assert edge_note(board, chosen) == ""
    untuned = replace(inside, results={})
    assert tried(untuned, "fedprox") == "local.lr: 0.1, 0.2, 0.3; trainer.mu: 0.05, 0.2"


def test_ranges_of_one_key_need_no_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeps, "compose", None)
    swept = Swept("local.lr", (0.1, 0.2), (0.5, 0.6), 0.2)
    tuning = replace(
        load_tuning("many_rounds_dirichlet"),
        sweeps={"fedavg": (Sweep(swept.over, swept.points),)},
        results={"fedavg": (swept,)},
    )
    ((space, best),) = sweeps.tried_ranges(tuning, "fedavg")
    assert (space.key, space.values, best) == ("local.lr", ("0.1", "0.2"), "0.2")


def test_a_leaderboard_that_was_not_run_is_listed_with_its_commands() -> None:
    read = leaderboards.read(Path("no records"))
    assert {one.table.name for one in read} == {"leaderboard/many_rounds", "leaderboard/one_shot"}
    (first,) = leaderboards.pages(read, with_methods=True)
    assert "fedexp-table run leaderboard/one_shot" in first.text
    assert "fedexp-tune many_rounds_pathological" in first.text


@pytest.fixture
def committed(tmp_path: Path) -> Path:
    """Copy the committed record of a leaderboard."""
    name = "leaderboard/many_rounds"
    shutil.copytree(RESULTS / name, tmp_path / name)
    return tmp_path


def change_runs(root: Path, **values: str) -> None:
    """Change fields of all runs of FedDyn."""
    path = root / "leaderboard" / "many_rounds" / "runs.csv"
    with path.open(newline="") as file:
        head, *rows = csv.reader(file)
    for row in rows:
        for name, value in values.items():
            if row[head.index("method")] == "feddyn":
                row[head.index(name)] = value
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([head, *rows])


def test_runs_with_other_settings_are_refused(committed: Path) -> None:
    change_runs(committed, altered="True")
    with pytest.raises(ConfigError, match="runs of a leaderboard had other settings") as found:
        leaderboards.read(committed)
    assert "with overrides of a user" in str(found.value)

    change_runs(committed, altered="False")
    path = committed / "leaderboard" / "many_rounds" / "configs.json"
    stored = json.loads(path.read_text())
    assert stored["of all"]["rounds"] == 100
    stored["of all"]["rounds"] = 7
    path.write_text(json.dumps(stored))
    with pytest.raises(ConfigError, match="rounds is 7 and not"):
        leaderboards.read(committed)


def test_page_shows_what_makes_runs_hard_to_compare(committed: Path) -> None:
    def page() -> str:
        read = [one for one in leaderboards.read(committed) if one.board is not None]
        return leaderboards.pages(read, with_methods=False)[1].text

    assert "different data splits" not in page()
    change_runs(committed, split="ffff", data="ffff", rule="best_on_test", fedexp_version="0.1")
    text = page()
    assert "Methods of one row and seed saw different data splits" in text
    assert "Runs have different headline rules: best_on_test, " in text
    assert "was not the same in all runs" in text and "different versions of fedexp" in text


def test_record_of_another_variant_is_refused(tmp_path: Path) -> None:
    table = load_table("leaderboard/one_shot")
    for variant, extra in (("smoke", []), ("full", ["rounds=2"])):
        found = TableRecord(variant, {}, None, extra, "", {})  # type: ignore[arg-type]
        record.write(table, found, tmp_path / "leaderboard" / "one_shot")
        with pytest.raises(ConfigError, match="has all runs, without other overrides"):
            leaderboards.read(tmp_path)
