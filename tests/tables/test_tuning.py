"""Second columns: what was chosen on held-out data makes their runs; nothing is made up where nothing was chosen."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import scripts.tune as command
from fedexp.config.compose import compose
from fedexp.core.errors import ConfigError, FedexpError
from fedexp.tables.cells import planned_cells
from fedexp.tables.schema import Table, load_table
from fedexp.tables.tuning import Swept, load_tuning, tuned_files
from tests.tables.test_schema import TINY

TABLE = {**TINY, "methods": TINY["methods"][:2], "reference": [], "tuned": "mine"} | {
    "rules": [
        {
            "where": {"method": "local", "start": "same"},
            "overrides": ["local.lr_decay=0.5", "local.lr=9"],
        }
    ],
    "reduced": {"what": "less", "grids": [{"clients": 2, "start": "same", "beta": 1}]},
}
TUNING: dict[str, Any] = {
    "table": "my/tiny",
    "cell": {"clients": 2, "start": "same", "beta": 1},
    "overrides": ["eval.held_out=50"],
    "seed": 7,
    "by": "metrics.val/global/acc",
    "where": {"start": "same"},
    "sweeps": {"local": {"over": "local.lr", "points": [0.1, 0.2, 0.4]}},
}


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with a table and its tuning; the tuning's file."""
    for folder, content in (("table/my/tiny", TABLE), ("tuned/mine", TUNING)):
        path = tmp_path / "conf" / f"{folder}.yaml"
        path.parent.mkdir(parents=True)
        path.write_text(yaml.safe_dump(content, sort_keys=False))
    monkeypatch.chdir(tmp_path)
    return path


def column(table: Table) -> dict[tuple[Any, ...], tuple[str, ...]]:
    """Overrides of the second column's first runs, by row."""
    cells = [cell for cell in planned_cells(table) if cell.method == "local_tuned"]
    return {
        tuple(cell.conditions.values()): (*cell.jobs[0].overrides,) if cell.jobs else ()
        for cell in cells
    }


def test_a_column_has_what_was_chosen_and_says_so_where_nothing_was(mine: Path) -> None:
    missing = load_table("my/tiny")
    assert column(missing) == {(2, "same"): (), (3, "same"): (), (4, "same"): ()}
    assert "not chosen yet: scripts/tune.py mine local" in missing.columns["local_tuned"].why
    mine.write_text(
        yaml.safe_dump(TUNING | {"results": {"local": {"values": [0.3, 0.6, 0.5], "chosen": 0.2}}})
    )
    table = load_table("my/tiny")
    first = column(table)[2, "same"]
    assert {"method=local", "local.lr=0.2", "local.lr_decay=0.5"} < {
        *first
    }  # the method's own rules are this column's
    assert "local.lr=9" not in first and not any("held_out" in override for override in first)
    own = table.columns["local_tuned"]
    assert own.label == "Local acc, tuned (local.lr=0.2)" and own.role == "ours" and not own.why


@pytest.mark.parametrize(("changes", "said"), [
    ({"results": {"local": {"values": [0.3, 0.6], "chosen": 0.2}}}, "of other points"),
    ({"results": {"local": {"values": [0.3, 0.6, 0.5], "chosen": 0.3}}}, "of other points"),
    ({"by": "metrics.test/global/acc"}, "held-out data has val/"),
    ({"sweeps": {"locl": {"over": "local.lr", "points": [1, 2]}}}, "did you mean 'local'"),
    ({"sweeps": {"local": {"over": "local.lr", "points": [1, 1]}}}, "each once"),
])  # fmt: skip
def test_what_was_chosen_from_other_points_or_on_test_data_is_refused(
    mine: Path, changes: dict[str, Any], said: str
) -> None:
    mine.write_text(yaml.safe_dump(TUNING | changes))
    with pytest.raises(ConfigError, match=said):
        load_table("my/tiny")


def test_the_script_writes_the_best_point(
    mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def run(overrides: tuple[str, ...], say: object) -> SimpleNamespace:
        asked.append({*overrides})
        lr = next(float(o.partition("=")[2]) for o in overrides if o.startswith("local.lr="))
        if lr > 0.3:
            raise FedexpError("client 3 diverged")
        return SimpleNamespace(result={"metrics": {"val/global/acc": 0.5 - abs(lr - 0.2)}})

    monkeypatch.setattr(command.fedexp, "run", run)
    mine.write_text("# by hand\n" + mine.read_text())
    assert (
        command.main(["mine", "rounds=2"]) == 2 and not asked
    )  # a trial does not become the paper's
    assert command.main(["mine", "lcal"]) == 2
    trial = tmp_path / "trial.yaml"
    assert (
        command.main(["mine", "rounds=2", "--out", str(trial)]) == 0
        and "results" not in mine.read_text()
    )
    assert command.main(["mine", "local"]) == command.main(["mine"]) == 0
    assert all(
        {"seed=7", "eval.held_out=50", "init=same", "local.lr_decay=0.5"} < one for one in asked
    )
    text = mine.read_text()
    assert (
        text.startswith("# by hand") and text.count(command.MARK) == 1 and trial.read_text() == text
    )
    assert load_tuning("mine").results["local"] == Swept((0.4, 0.5, None), 0.2)
    assert "local.lr=0.2" in column(load_table("my/tiny"))[2, "same"]


@pytest.mark.parametrize("name", list(tuned_files()))
def test_every_sweep_is_of_keys_that_exist_and_has_the_first_columns_point(name: str) -> None:
    tuning = load_tuning(name)
    assert tuning.seed not in load_table(tuning.table).seeds
    for method, sweep in {
        str(sweep): (method, sweep) for method, sweep in tuning.sweeps.items()
    }.values():
        assert len(sweep.points) == 4
        only = {**{key: [value] for key, value in tuning.cell.items()}, "method": [method]}
        (planned,) = planned_cells(
            load_table(tuning.table), "reduced", only=only, seeds=[tuning.seed]
        )
        node: Any = compose([*planned.jobs[0].overrides])
        for key in sweep.over.split("."):
            node = node[key]
        assert node in sweep.points
        runs = zip(sweep.points, command.overrides_of(tuning, method), strict=True)
        assert all(f"{sweep.over}={point}" in run for point, run in runs)


def test_small_numbers_are_read_back_as_numbers() -> None:
    text = command.text_of("", {"one": Swept((0.5, None), 1e-05)})
    assert yaml.safe_load(text)["results"]["one"] == {"values": [0.5, None], "chosen": 1e-05}
