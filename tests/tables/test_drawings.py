"""Tests of figures of curves.

The runs are made up, or of the smoke variant of a table.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedexp.commands.table import run_command
from fedexp.config.compose import compose
from fedexp.core.build import build
from fedexp.core.errors import ConfigError, StorageError
from fedexp.core.resolved_config import ResolvedConfig
from fedexp.running.experiment import load_data
from fedexp.storage.run_folder import trace_rows
from fedexp.tables.cells import Job
from fedexp.tables.drawing import Drawing, DrawnRun
from fedexp.tables.drawings.class_counts import split_class_counts
from fedexp.tables.drawings.panels import deviation, mean
from fedexp.tables.load import load_table, table_names
from fedexp.tables.lookup import CellRun, read_value
from tests.tables.test_schema import TINY, table

ITERATIONS = {
    "_target_": "fedexp.tables.drawings.iterations.Iterations",
    "title": "t",
    "curves": ["ours"],
    "lines": ["average"],
    "panels": ["init"],
    "heading": "{init}-init",
}


def run(
    tmp_path: Path, method: str, seed: int, init: str, trace: Any = None, **more: Any
) -> DrawnRun:
    folder = tmp_path / f"{method}-{seed}-{init}"
    (folder / "trace").mkdir(parents=True, exist_ok=True)
    if trace is not None:
        (folder / "trace" / "1.json").write_text(json.dumps(trace))
    result = {"headline": {"value": 0.1 * (seed + 1)}}
    return DrawnRun(
        {"init": init, **more}, method, method.capitalize(), seed, folder, ResolvedConfig(), result
    )


def rows(*values: float, step: int = 1) -> list[dict[str, Any]]:
    """Return rows of a trace.

    V is better by 0.1 for one client and worse by 0.1 for another.
    """
    return [
        {"iteration": step * t, "mean_v/acc": v, "V/acc": [v - 0.1, v + 0.1]}
        for t, v in enumerate(values)
    ]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """Record what is drawn on the panels, by the name of the method of `Axes`.

    The arguments are recorded: x and y of ``plot``, y of ``axhline``, and x, low and
    high of ``fill_between``, the titles, the names of the x axes and the scales.
    """
    from matplotlib.axes import Axes

    seen: dict[str, list[Any]] = {
        "plot": [],
        "axhline": [],
        "fill_between": [],
        "set_title": [],
        "set_xlabel": [],
        "set_yscale": [],
    }
    for name, kept in seen.items():
        original = getattr(Axes, name)

        def spy(
            self: Any, *values: Any, _original: Any = original, _kept: list[Any] = kept, **look: Any
        ) -> Any:
            _kept.append(tuple(list(v) if isinstance(v, list | tuple) else v for v in values))
            return _original(self, *values, **look)

        monkeypatch.setattr(Axes, name, spy)
    return seen


def draw(runs: list[DrawnRun], **changes: Any) -> Any:
    node = {key: value for key, value in {**ITERATIONS, **changes}.items() if value is not None}
    return build(Drawing, node, "drawings[0]").draw(runs)  # type: ignore[type-abstract]


def test_seeds_become_mean_and_band_methods_without_iterations_lines_and_rows_panels(
    tmp_path: Path, drawn: dict[str, list[Any]]
) -> None:
    runs = [run(tmp_path, "ours", seed, "diff", rows(0.2 + 0.2 * seed, 0.5)) for seed in (0, 1)]
    runs += [run(tmp_path, "average", seed, "diff") for seed in (0, 1)]
    runs += [run(tmp_path, "ours", 0, "same", rows(0.3, 0.6)), run(tmp_path, "other", 0, "same")]
    (picture,) = draw(runs)
    assert (picture.name, picture.title) == ("iterations", "t") and picture.svg and picture.png
    assert [t for (t,) in drawn["set_title"]] == ["diff-init", "same-init"]
    (x, y), (x_same, y_same) = drawn["plot"]
    assert (x, x_same) == ([0, 1], [0, 1])
    assert y == pytest.approx([30, 50]) and y_same == pytest.approx([30, 60])
    ((level,),) = drawn["axhline"]
    assert level == pytest.approx(15)
    # A method with a single run has no band.
    ((band_x, low, high),) = drawn["fill_between"]
    half = 20 / math.sqrt(2)
    assert (
        band_x == [0, 1]
        and low == pytest.approx([30 - half, 50])
        and high == pytest.approx([30 + half, 50])
    )


def test_each_client_is_thin_beside_their_mean(tmp_path: Path, drawn: dict[str, list[Any]]) -> None:
    runs = [run(tmp_path, "ours", 0, "diff", rows(0.2, 0.5, step=10))]
    draw(runs, series="V/acc", panels=["method"], heading=None)
    assert [x for x, _ in map(lambda p: (list(p[0]), p[1]), drawn["plot"])] == [[0, 10]] * 3
    curves = [list(y) for _, y in drawn["plot"]]
    assert np.allclose(curves, [[10, 40], [30, 60], [20, 50]])
    assert drawn["set_title"] == [("method Ours",)]
    drawn["plot"].clear()
    draw(runs, axis="record")
    assert drawn["plot"][0][0] == [0, 1]
    draw(runs, called="server epoch")
    assert drawn["set_xlabel"] == [("iteration",), ("recorded point",), ("server epoch",)]


def test_a_run_that_several_rows_read_is_drawn_once(
    tmp_path: Path, drawn: dict[str, list[Any]]
) -> None:
    runs = [run(tmp_path, "ours", 0, "diff", rows(0.2, 0.5), iteration=t) for t in range(3)]
    draw(runs)
    assert len(drawn["plot"]) == 1 and not drawn["fill_between"]


def test_nothing_is_drawn_without_curves(tmp_path: Path) -> None:
    assert draw([]) == ()
    assert draw([run(tmp_path, "average", 0, "diff")]) == ()


@pytest.mark.parametrize(("changes", "said"), [
    ({"curves": []}, "at least one method"),
    ({"curves": ["ours"], "lines": ["ours"]}, "either one of"),
    ({"curves": ["average"], "lines": []}, "no trace of round 1"),
    ({"series": "mean_v/ac"}, "did you mean 'mean_v/acc'"),
    ({"panels": ["int"], "heading": None}, "did you mean 'init'"),
    ({"heading": "{beta}"}, "cannot be filled in"),
    ({"axis": "steps"}, "iteration | record"),
])  # fmt: skip
def test_mistakes_in_a_drawing_are_told(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    runs = [run(tmp_path, "ours", 0, "diff", rows(0.2, 0.5)), run(tmp_path, "average", 0, "diff")]
    with pytest.raises(ConfigError) as error:
        draw(runs, **changes)
    assert said in str(error.value)


def test_rounds(tmp_path: Path, drawn: dict[str, list[Any]]) -> None:
    one = run(tmp_path, "ours", 0, "diff")
    lines = [
        {"round": 1, "test/global/acc": 0.2, "x": 1},
        {"round": 2, "x": 1},
        {"round": 3, "test/global/acc": 0.5},
    ]
    (one.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    changes = {"_target_": "fedexp.tables.drawings.rounds.Rounds"}
    draw([one], **changes)
    assert drawn["plot"] == [([1, 3], pytest.approx([20, 50]))] and not drawn["set_yscale"]
    draw([one], logarithmic=True, **changes)
    assert drawn["set_yscale"] == [("log",)]
    with pytest.raises(ConfigError, match="no metric 'test/global/ac'"):
        draw([one], metric="test/global/ac", **changes)


def test_mean_and_deviation_are_over_what_all_curves_have() -> None:
    curves = [{0.0: 1.0, 1.0: 2.0, 2.0: 5.0}, {0.0: 3.0, 1.0: math.nan, 3.0: 5.0}]
    assert mean(curves) == {0.0: 2.0}
    assert deviation(curves) == {0.0: pytest.approx(math.sqrt(2))}
    assert deviation(curves[:1]) == {0.0: 0.0, 1.0: 0.0, 2.0: 0.0}


def test_a_cell_reads_a_traced_iteration(tmp_path: Path) -> None:
    folder = run(tmp_path, "ours", 0, "diff", rows(0.2, 0.5, step=10)).folder
    found = CellRun(Job(0, {}, (), ()), folder, result={"headline": {"value": 0.9}})
    assert read_value(found, "trace.1.10.mean_v/acc") == 0.5
    assert read_value(found, "trace.1.0.V/acc.1") == pytest.approx(0.3)
    assert read_value(found, "headline.value") == 0.9
    for path, said in (
        ("trace.1.5.mean_v/acc", "trace/1.json has no '5.mean_v/acc'"),
        ("trace.2.0.mean_v/acc", "round 2 was not traced"),
        ("trace.1.0.V/acc", "not a number"),
    ):
        with pytest.raises(ConfigError) as error:
            read_value(found, path)
        assert said in str(error.value)


def test_conditions_in_a_values_path_must_be_keys(tmp_path: Path) -> None:
    table(tmp_path, headline={"value": "trace.1.{clients}.mean_v/acc"})
    for column in (0, None):
        changes: dict[str, Any] = {"headline": {"value": "trace.1.{client}.mean_v/acc"}}
        if column is not None:
            methods = [
                {**TINY["methods"][0], "value": "trace.1.{client}.W/acc"},
                *TINY["methods"][1:],
            ]
            changes = {"methods": methods}
        with pytest.raises(ConfigError, match="did you mean 'clients'"):
            table(tmp_path, **changes)
    with pytest.raises(ConfigError, match="cannot be filled in"):
        table(tmp_path, headline={"value": "trace.{clients"})


@pytest.mark.parametrize("name", list(table_names()))
def test_a_tables_drawings_are_of_its_own_columns_and_conditions(name: str) -> None:
    made = load_table(name)
    for number, node in enumerate(made.drawings):
        drawing = build(Drawing, node, f"drawings[{number}]")  # type: ignore[type-abstract]
        assert {*getattr(drawing, "curves", ()), *getattr(drawing, "lines", ())} <= set(
            made.columns
        )
        assert set(getattr(drawing, "panels", ())) <= {*made.conditions, "method"}


def test_a_figure_from_nothing_to_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    quick = ["model.hidden=[8]", "local.epochs=1", "threads=1"]
    assert run_command(["run", "ma_echo/log", "--smoke", *quick]) == 0
    # The overrides make the model even smaller, so that the variant is partial.
    folder = Path("outputs/tables/ma_echo/log-smoke-partial")
    text = (folder / "report.md").read_text()
    (traced,) = [path for path in Path().glob("outputs/runs/ma_echo-*/*/trace/1.json")]
    values = {row["iteration"]: 100 * row["mean_v/acc"] for row in trace_rows(traced)}
    lines = {
        line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("| ")
    }
    for step in (1, 10, 60):
        assert f"{values[step]:.2f} (1)" in lines[str(step)]
    assert "Log of the released code, our run" in (folder / "report.html").read_text()


def test_class_counts_are_those_of_the_split_that_the_run_had(tmp_path: Path) -> None:
    options = [
        "dataset=digits",
        "partition=shards",
        "partition.shards=2",
        "clients=6",
        f"output_root={tmp_path}",
    ]
    config = compose(options)
    data = load_data(config)
    made = run(tmp_path, "ours", 0, "same")
    made = replace(made, config=config, result={"partition": {"sha256": data.partition.sha256}})
    table = split_class_counts(made)
    for client in range(6):
        own = [int(data.train.y[at]) for at in data.partition.of(client)]
        assert [own.count(k) for k in range(10)] == table[client].tolist()
    assert table.sum() == len(data.train)
    again = replace(made, seed=1, method="average")
    [picture] = build(  # type: ignore[type-abstract]
        Drawing,
        {"_target_": "fedexp.tables.drawings.class_counts.ClassCountsDrawing", "title": "t"},
        "drawings[0]",
    ).draw([again, made])
    assert (
        "seed 0" in picture.svg and "seed 1" not in picture.svg and str(table.max()) in picture.svg
    )
    with pytest.raises(StorageError, match="split that is sampled now"):
        split_class_counts(replace(made, config=compose([*options, "seed_data=7"])))
