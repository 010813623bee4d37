"""Tests of a table's file: what is refused, and which cells and jobs follow from it."""

from __future__ import annotations

import itertools
import math
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedexp.config.compose import compose
from fedexp.config.folders import conf_dir
from fedexp.core.errors import ConfigError
from fedexp.running.experiment import Experiment
from fedexp.tables.cells import (
    check_rows_differ,
    command,
    launch_order,
    parse_only,
    planned_cells,
    planned_rows,
)
from fedexp.tables.load import load_table, read_table, table_names
from fedexp.tables.lookup import find
from fedexp.tables.paths import check_path
from fedexp.tables.schema import Table

TINY: dict[str, Any] = {
    "title": "t",
    "paper": "p",
    "source": "Table 1",
    "metric": "test accuracy",
    "unit": "percent",
    "higher_is_better": True,
    "keys": ["clients", "start"],
    "methods": [
        {"key": "local", "label": "Local acc", "overrides": ["method=local"]},
        {"key": "ensemble", "label": "Ens.", "overrides": ["method=ensemble"]},
        {"key": "dense", "label": "DENSE", "overrides": None, "why": "not here"},
    ],
    "conditions": {
        "clients": "clients={clients}",
        "start": {"diff": ["init=different"], "same": ["init=same"]},
        "beta": ["partition.alpha={beta}", "partition.on_small=allow"],
    },
    "grids": [
        {"clients": [2, 3], "start": ["diff", "same"], "beta": 0.5},
        {"clients": 4, "start": "same", "beta": [1, 2]},
    ],
    "seeds": [0, 1],
    "headline": {"value": "headline.value", "scale": 100},
    "tolerance": {"within": 5, "why": "the splits are not the paper's"},
    "reference": [{"clients": 2, "start": "diff", "method": "local", "value": 24.5, "sd": 1}],
}

CLAIM: dict[str, Any] = {
    "id": "c",
    "where": "text",
    "says": "s",
    "test": "above",
    "a": ["ensemble"],
    "b": ["local"],
}


GRID: dict[str, Any] = {"over": "step", "points": [0.5, 1], "overrides": ["local.lr={point}"]}


def gridded(**changes: Any) -> list[dict[str, Any]]:
    """Return the methods. The first one has a grid."""
    return [TINY["methods"][0] | {"grid": GRID | changes}, *TINY["methods"][1:]]


def table(tmp_path: Path, **changes: Any) -> Table:
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(TINY | changes, sort_keys=False))
    return read_table(path, "my/tiny")


@pytest.mark.parametrize(("changes", "said"), [
    ({"titel": "x"}, ["unknown key 'titel'", "did you mean 'title'?", "tiny.yaml"]),
    ({"keys": ["client"]}, ["unknown key 'client'", "did you mean 'clients'?", "keys"]),
    ({"grids": [{"clients": 2, "start": "diff", "bta": 1}]}, ["unknown key 'bta'", "did you mean 'beta'?", "grids[0]"]),
    ({"grids": [{"clients": 2, "start": "diff"}]}, ["grids[0]", "no value of beta"]),
    ({"grids": []}, ["grids: give at least one grid"]),
    ({"smoke": {"what": "w", "grids": []}}, ["smoke.grids: give at least one grid"]),
    ({"grids": [{"clients": 2, "start": "diff", "beta": []}]}, ["grids[0].beta: give at least one value"]),
    ({"headline": {"pooled_round": "last_10.test/acc"}}, ["unknown key", "did you mean 'pooled_rounds'?", "headline"]),
    ({"headline": {"pooled_rounds": "last10.test/acc"}}, ["did you mean 'last_10.test/acc'?", "headline.pooled_rounds"]),
    ({"headline": {"pooled_rounds": "std_last_10.test/global/acc"}}, ["did you mean 'last_10.test/global/acc'?"]),
    ({"headline": {"pooled_rounds": "last_10.test/global/acc.0"}}, ["not a list", "did you mean 'last_10.test/global/acc'?"]),
    ({"headline": {"pooled_rounds": "last_10"}}, ["use one of: last_10.<metric>", "headline.pooled_rounds"]),
    ({"headline": {"pooled_rounds": "last_10.test/{strt}/acc"}}, ["did you mean 'start'?", "headline.pooled_rounds"]),
    ({"methods": [{"key": "a", "label": "A", "overrides": None}]}, ["'why'"]),
    ({"methods": [{"key": "a", "label": "A", "override": []}]}, ["unknown key 'override'", "did you mean 'overrides'?"]),
    ({"methods": [TINY["methods"][0]] * 2}, ["keys must differ"]),
    ({"seeds": []}, ["seeds"]),
    ({"seeds": [1, 1]}, ["seeds"]),
    ({"smoke": {"what": "w", "seeds": [0, 0]}}, ["seeds", "smoke"]),
    ({"tolerance": {"within": -5, "why": "w"}}, ["tolerance.within must not be negative"]),
    ({"tolerance": {"within": 5}}, ["tolerance.why"]),
    ({"paper_runs": 0}, ["paper_runs must be positive"]),
    ({"methods": [TINY["methods"][0] | {"role": "propsed"}]}, ["'propsed'", "did you mean 'proposed'?"]),
    ({"methods": [TINY["methods"][0], TINY["methods"][1] | {"reads": "local"}]}, ["role 'ours'"]),
    ({"methods": [TINY["methods"][0], TINY["methods"][1] | {"reads": "locl", "role": "ours"}]}, ["did you mean 'local'?"]),
    ({"methods": [TINY["methods"][0], TINY["methods"][1] | {"equals": {"column": "locl"}}]}, ["did you mean 'local'?"]),
    ({"methods": [TINY["methods"][0], TINY["methods"][1] | {"equals": {"column": "local", "where": {"beta": 1}}}]},
     ["unknown key 'beta'", "equals.where"]),
    ({"methods": [TINY["methods"][0], TINY["methods"][1] | {"equals": {"column": "local", "where": {"start": "sme"}}}]},
     ["value 'sme'", "did you mean 'same'?", "methods.ensemble.equals.where.start"]),
    ({"methods": [TINY["methods"][0] | {"equals": {"column": "ensemble"}}, TINY["methods"][1] | {"equals": {"column": "local"}}]},
     ["'ensemble' equals another column itself", "methods.local.equals.column"]),
    ({"claims": [CLAIM | {"a": ["locl"]}]}, ["'locl'", "did you mean 'local'?", "claims.c"]),
    ({"claims": [CLAIM | {"only": {"beta": 0.5}}]}, ["unknown key 'beta'", "claims.c.only"]),
    ({"claims": [CLAIM | {"only": {"start": "dif"}}]}, ["value 'dif'", "did you mean 'diff'?", "claims.c.only.start"]),
    ({"claims": [CLAIM | {"rows": 6}]}, ["claim c must hold in 6 rows, and it is about 5 rows", "claims.c.rows"]),
    ({"claims": [CLAIM | {"rows": 3, "only": {"clients": 2}}]}, ["must hold in 3 rows, and it is about 2 rows"]),
    ({"claims": [CLAIM, CLAIM]}, ["ids must differ"]),
    ({"claims": [CLAIM | {"a": []}]}, ["a names no column"]),
    ({"claims": [CLAIM | {"b": []}]}, ["b goes with every test except trend"]),
    ({"claims": [CLAIM | {"x": 1}]}, ["x goes with test=within"]),
    ({"claims": [CLAIM | {"than": 0.5}]}, ["unless than replaces it"]),
    ({"claims": [CLAIM | {"test": "within", "x": 1, "b": [], "than": 0.5}]}, ["than goes with test=above"]),
    ({"methods": gridded(pionts=[1])}, ["unknown key 'pionts'", "did you mean 'points'?", "methods[0].grid"]),
    ({"methods": gridded(points=[])}, ["points: give at least one, each once"]),
    ({"methods": gridded(points=[1, "1"])}, ["points: give at least one, each once"]),
    ({"methods": gridded(overrides=["local.lr={piont}"])}, ["did you mean 'point'?", "methods.local.grid.overrides"]),
    ({"methods": gridded(by="metrics.{clents}")}, ["did you mean 'clients'?", "methods.local.grid.by"]),
    ({"methods": gridded(overrides=[])}, ["its points look the same", "methods.local.grid"]),
    ({"methods": gridded(best="lowest")}, ["the lowest of its numbers is the worst one"]),
    ({"methods": gridded(), "claims": [CLAIM | {"test": "sooner", "curve": "x", "target": {"value": 1}}]}, ["needs its curve"]),
    ({"smoke": {"what": "w", "points": [[1]]}}, ["smoke.points[0]", "wrong type"]),
    ({"claims": [CLAIM | {"test": "within", "x": 0}]}, ["x must be positive"]),
    ({"claims": [CLAIM | {"test": "within", "x": 1, "any_of": "a"}]}, ["any_of goes with test=above and sooner"]),
    ({"claims": [CLAIM | {"test": "trend", "b": []}]}, ["test=trend needs along"]),
    ({"claims": [CLAIM | {"test": "trend", "b": [], "along": ["clients", "strt"]}]}, ["did you mean 'start'?", "along"]),
    ({"claims": [CLAIM | {"test": "sooner"}]}, ["test=sooner needs curve and target"]),
    ({"claims": [CLAIM | {"test": "sooner", "curve": "x", "target": {}}]}, ["give a share or a value"]),
    ({"claims": [CLAIM | {"direction": "down"}]}, ["direction goes with test=trend, got test=above"]),
    ({"claims": [CLAIM | {"slack": 1}]}, ["slack goes with test=trend"]),
    ({"claims": [CLAIM | {"along": "clients"}]}, ["along goes with test=trend"]),
    ({"claims": [CLAIM | {"curve": "test/global/acc"}]}, ["curve goes with test=sooner"]),
    ({"claims": [CLAIM | {"axis": "round"}]}, ["axis goes with test=sooner"]),
    ({"claims": [CLAIM | {"target": {"value": 1}}]}, ["target goes with test=sooner"]),
    ({"claims": [CLAIM | {"test": "within", "x": 1, "by": 2}]}, ["by goes with test=above, got test=within"]),
    ({"claims": [CLAIM | {"test": "within"}]}, ["test=within needs x"]),
    ({"claims": [CLAIM | {"a": ["local"]}]}, ["column 'local' is named 2 times in a and b"]),
    ({"claims": [CLAIM | {"b": ["local", "local"]}]}, ["column 'local' is named 2 times in a and b"]),
    ({"claims": [CLAIM | {"rows": 0}]}, ["rows must be positive"]),
    ({"claims": [CLAIM | {"tests": "above"}]}, ["did you mean 'test'?"]),
    ({"given": {"model.pretrained": {"clientz": 2}}}, ["did you mean 'clients'?", "given.model.pretrained"]),
    ({"tolerance": {"within": "five", "why": "w"}}, ["'tolerance.within'", "a number"]),
    ({"reference": [{"clients": 2, "start": "diff", "method": "locl", "value": 1}]}, ["'locl'", "did you mean 'local'?"]),
    ({"smoke": {"what": "w", "grids": [{"clients": 2}]}}, ["smoke.grids[0]", "no value of"]),
    ({"smoke": {"overrides": []}}, ["smoke.what"]),
    ({"reduced": {"what": "w", "superseded": {"why": "w", "methods": ["locl"]}}},
     ["'locl'", "did you mean 'local'?", "reduced.superseded.methods"]),
    ({"rules": [{"where": {"methd": "a"}, "overrides": []}]}, ["'methd'", "did you mean 'method'?"]),
    ({"smoke": {"what": "w", "rules": [{"where": {"methd": "a"}, "overrides": []}]}}, ["'methd'", "smoke.rules[0].where"]),
    ({"rules": [{"where": {"method": "locl"}, "overrides": []}]}, ["value 'locl'", "did you mean 'local'?"]),
    ({"rules": [{"where": {"start": ["same", "dif"]}, "overrides": []}]}, ["value 'dif'", "did you mean 'diff'?"]),
    ({"rules": [{"where": {"clients": 5}, "overrides": []}]}, ["unknown value '5'", "rules[0].where.clients"]),
    ({"reference": [{"clients": 2, "method": "local", "value": 1}]}, ["reference", "has no start"]),
    ({"reference": [TINY["reference"][0] | {"value": "50 %"}]}, ["value must be a number, got '50 %'"]),
    ({"reference": [TINY["reference"][0] | {"value": True}]}, ["value must be a number, got True"]),
    ({"reference": [TINY["reference"][0] | {"sd": "n/a"}]}, ["sd must be a number"]),
    ({"reference": [TINY["reference"][0] | {"clients": [2, 3]}]}, ["has several values of clients"]),
    ({"reference": [TINY["reference"][0] | {"value": float("nan")}]}, ["value must be a number, got nan"]),
    ({"reference": [TINY["reference"][0] | {"sd": float("nan")}]}, ["sd must be a number, got nan"]),
    ({"reference": [TINY["reference"][0] | {"sd": -1}]}, ["sd must not be negative, got -1"]),
    ({"reference": [TINY["reference"][0] | {"clients": "2"}]}, ["unknown value '2'", "reference.clients", "write the number: 2, not '2'"]),
    ({"reference": [TINY["reference"][0] | {"clients": 6}]}, ["unknown value '6'", "reference.clients", "did you mean 4?"]),
    ({"reference": [TINY["reference"][0] | {"start": "dif"}]}, ["unknown value 'dif'", "did you mean 'diff'?"]),
    ({"keys": ["clients", "start", "clients"]}, ["keys: name each condition once"]),
    ({"reference": TINY["reference"] * 2}, ["two rows of local 2 diff"]),
    ({"grids": [{"clients": [[2, 3]], "start": "diff", "beta": 1}]}, ["'grids[0].clients' has the wrong type", "[2, 3]"]),
    ({"grids": [{"clients": [[2, 3]], "start": "diff", "beta": 1}, *TINY["grids"]]}, ["'grids[0].clients' has the wrong type"]),
    ({"grids": [{"clients": {"2": "x"}, "start": "diff", "beta": 1}]}, ["'grids[0].clients' has the wrong type"]),
    ({"smoke": {"what": "w", "grids": [{"clients": 2, "start": "diff", "beta": [[1]]}]}}, ["smoke.grids[0].beta", "wrong type"]),
    ({"conditions": TINY["conditions"] | {"beta": 0.5}},
     ["an override of 'beta' must be a text", "conditions.beta", "key={beta}", "0.5"]),
    ({"conditions": TINY["conditions"] | {"beta": ["partition.alpha={beta}", 2]}}, ["an override of 'beta' must be a text"]),
    ({"conditions": TINY["conditions"] | {"beta": ["partition.alpha={beta}", None]}}, ["an override of 'beta' must be a text"]),
    ({"conditions": TINY["conditions"] | {"start": {"diff": 1, "same": []}}}, ["an override of 'start' must be a text"]),
    ({"smoke": {"what": "w", "conditions": {"beta": [["x"]]}}}, ["must be a text", "smoke.conditions.beta"]),
])  # fmt: skip
def test_mistakes_in_a_table_are_told_with_the_nearest_name(
    tmp_path: Path, changes: dict[str, Any], said: list[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        table(tmp_path, **changes)
    for words in said:
        assert words in str(error.value), str(error.value)


@pytest.mark.parametrize(("changes", "said"), [
    ({"conditions": TINY["conditions"] | {"beta": "partition.alpha={bta}"}}, "cannot be filled in"),
    ({"conditions": TINY["conditions"] | {"start": {"diff": []}}}, "value 'same' of 'start' has no overrides"),
])  # fmt: skip
def test_conditions_that_cannot_become_overrides_are_refused(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        planned_cells(table(tmp_path, **changes))


def test_rows_with_the_same_runs_are_refused(tmp_path: Path) -> None:
    """The placeholder is missing, so the rows of 2 and 3 clients have the same runs."""
    forgotten = {"conditions": TINY["conditions"] | {"clients": "clients=5"}}
    with pytest.raises(ConfigError) as error:
        check_rows_differ(table(tmp_path, **forgotten), "full")
    for words in (
        "column 'local' has the same runs in two rows",
        "clients=2 start=diff and clients=3 start=diff",
        "write the placeholder {clients} into conditions.clients",
    ):
        assert words in str(error.value)

    # Rows may share runs if they read different numbers.
    path = {"value": "per_client.test/local/acc.{clients}"}
    check_rows_differ(table(tmp_path, **forgotten, headline=path), "full")
    # One column may have the same runs in all rows.
    rule = {"where": {"method": "local"}, "overrides": ["clients=5"]}
    check_rows_differ(table(tmp_path, rules=[rule]), "full")


@pytest.mark.parametrize("name", list(table_names()))
def test_no_two_rows_of_a_table_have_the_same_runs(name: str) -> None:
    made = load_table(name)
    for variant in ("full", "reduced", "smoke"):
        if variant == "full" or made.smaller(variant) is not None:  # type: ignore[arg-type]
            check_rows_differ(made, variant)  # type: ignore[arg-type]


def test_unknown_tables_and_forms_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'demo/digits'\?"):
        load_table("demo/digit")
    with pytest.raises(ConfigError, match=r"did you mean 'ma_echo/table6_params'\?"):
        load_table("table6_params")
    with pytest.raises(ConfigError, match="has no smoke variant"):
        planned_cells(table(tmp_path), "smoke")


def test_grids_become_cells_and_what_is_no_key_is_pooled(tmp_path: Path) -> None:
    cells = planned_cells(table(tmp_path))
    rows = [(2, "diff"), (2, "same"), (3, "diff"), (3, "same"), (4, "same")]
    expected = [
        ({"clients": c, "start": s}, m) for c, s in rows for m in ("local", "ensemble", "dense")
    ]
    assert [(cell.conditions, cell.method) for cell in cells] == expected
    assert [len(cell.jobs) for cell in cells] == [2, 2, 0] * 4 + [4, 4, 0]
    assert cells[0].jobs[1].overrides == (
        "clients=2", "init=different", "partition.alpha=0.5", "partition.on_small=allow", "method=local", "seed=1",
    )  # fmt: skip
    assert [(job.pooled, job.seed) for job in cells[-3].jobs] == [
        ({"beta": 1}, 0), ({"beta": 1}, 1), ({"beta": 2}, 0), ({"beta": 2}, 1),
    ]  # fmt: skip


def test_rules_and_forms_come_last_and_users_overrides_after_them(tmp_path: Path) -> None:
    rules = [{"where": {"method": "local", "clients": [2, 3]}, "overrides": ["local.lr=0.5"]}]
    smoke = {
        "what": "less",
        "overrides": ["local.epochs=1", "local.lr=2"],
        "rules": [{"where": {"method": "local"}, "overrides": ["local.lr=0.1"]}],
        "seeds": [7],
        "conditions": {"clients": "clients=2"},
        "grids": [{"clients": 9, "start": "same", "beta": 3}],
    }
    made = table(tmp_path, rules=rules, smoke=smoke)
    full = planned_cells(made, extra=["local.epochs=3", "init=same"])
    assert (
        "local.lr=0.5" in full[0].jobs[0].overrides
        and "local.lr=0.5" not in full[1].jobs[0].overrides
    )
    first = full[0].jobs[0]
    assert first.overrides[-2:] == ("seed=0", "local.epochs=3")
    assert (
        "init=same" in first.overrides and "init=different" in first.declared
    )  # If two overrides set the same key, the later one counts.
    (local, ensemble, _) = planned_cells(made, "smoke")
    assert local.conditions == {"clients": 9, "start": "same"}
    assert local.jobs[0].overrides == (
        "clients=2", "init=same", "partition.alpha=3", "partition.on_small=allow", "method=local",
        "local.epochs=1", "local.lr=0.1", "seed=7",
    )  # fmt: skip
    assert "local.lr=2" in ensemble.jobs[0].overrides


def test_a_run_is_altered_by_what_changes_its_identity_alone(tmp_path: Path) -> None:
    default = compose([])["clients"]

    def altered(*extra: str, **changes: Any) -> set[bool]:
        made = table(tmp_path, seeds=[0], methods=TINY["methods"][:1], **changes)
        found = find(planned_cells(made, extra=extra))
        return {run.altered for run in found.values()}

    assert altered() == altered("output_root=elsewhere", "engine=serial") == {False}
    # The default is not the table's value.
    assert altered(f"clients={default}") == {True}
    # One run is used for three rows, two of which have other clients.
    assert altered("clients=3") == {True}
    assert altered("model.hidden=[3]") == {True} and altered(
        "model.hidden=[3]", given={"model.hidden": {}}
    ) == {False}
    # The table has no such cell.
    assert altered("model.hidden=[3]", given={"model.hidden": {"clients": 4, "start": "diff"}}) == {
        False
    }
    assert altered("++model.hidden=[3]") == altered("++seed=3") == {True}


def test_every_point_of_a_grid_is_a_job(tmp_path: Path) -> None:
    """Points with overrides are separate runs.

    Points of a run that holds all are the same run.
    """
    made = table(
        tmp_path,
        methods=gridded(),
        smoke={"what": "less", "points": [2], "overrides": ["local.lr=3"]},
    )
    cell, *_ = planned_cells(made)
    assert [(job.seed, job.point) for job in cell.jobs] == [
        (0, "0.5"),
        (0, "1"),
        (1, "0.5"),
        (1, "1"),
    ]
    assert cell.jobs[1].overrides[-3:] == ("method=local", "local.lr=1", "seed=0")
    (job, _) = planned_cells(made, "smoke")[0].jobs
    # The overrides of a variant come last.
    assert job.point == "2" and "local.lr=3" in job.overrides
    at_once = gridded(overrides=[])
    at_once[0]["value"] = "trace.1.lam={point}.fused/acc"
    cell, *_ = planned_cells(table(tmp_path, methods=at_once), seeds=[0])
    assert len(cell.jobs) == 2 and len({job.overrides for job in cell.jobs}) == 1


def test_a_grid_that_test_data_choose_from_is_an_oracle(tmp_path: Path) -> None:
    marks = {}
    for by in (
        None,
        "metrics.test/global/acc",
        "metrics.val/global/acc",
        "trace.1.lam={point}.fused/val/acc",
    ):
        made = table(tmp_path, methods=gridded(by=by))
        marks[by] = made.columns["local"].method.oracle
    assert list(map(bool, marks.values())) == [True, True, False, False]
    assert marks[None] == "the best step of a grid in every trial"


def test_only_restricts_cells_and_names_what_it_does_not_know(tmp_path: Path) -> None:
    made = table(tmp_path)
    cells = planned_cells(made, only=parse_only(made, ["clients=2,4", "method=local"]), seeds=[3])
    assert [(c.conditions["clients"], c.method) for c in cells] == [
        (2, "local"),
        (2, "local"),
        (4, "local"),
    ]
    assert [job.seed for job in cells[0].jobs] == [3]
    for clause, said in (
        ("clientz=2", "did you mean 'clients'"),
        ("start=sme", "did you mean 'same'"),
        ("x", "key=value"),
    ):
        with pytest.raises(ConfigError, match=said):
            parse_only(made, [clause])
    small = replace(
        made,
        grids=tuple({**grid, "clients": 1e-05} for grid in made.grids),
        smoke=None,
        reduced=None,
    )
    clauses = shlex.split(command(small, "full", [], {"clients": 1e-05}, "local", 3))
    assert parse_only(small, clauses[clauses.index("--only") + 1 : -2])["clients"] == [1e-05]
    with pytest.raises(ConfigError, match="no cell of the table fits"):
        planned_cells(made, only=parse_only(made, ["clients=4", "start=diff"]))


@pytest.mark.parametrize(
    "value",
    [
        *("0-4,5", "{", "@x", "2", "null", "2020-13-01", 'a "b", c', 'a,b", "c', "a]", ""),
        *(None, True, 1e-5, math.inf),
    ],
)
def test_command_of_a_cell_reads_back_the_value_of_a_condition(value: Any, tmp_path: Path) -> None:
    made = table(tmp_path)
    made = replace(made, grids=tuple({**grid, "start": value} for grid in made.grids))
    clauses = shlex.split(command(made, "full", [], {"start": value}, "local", 3))
    assert parse_only(made, clauses[clauses.index("--only") + 1 : -2])["start"] == [value]


@pytest.mark.parametrize("text", ["[2,4]", "[2]", "{a}", "{a: 2}", "@x", '"2', "2020-13-01"])
def test_only_refuses_a_value_that_is_not_a_scalar(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_only(table(tmp_path), [f"clients={text}"])
    message = str(refused.value)
    assert f"no cell has clients={text}" in message and "write clients=2,3" in message


def test_jobs_that_share_clients_are_neighbours_and_each_runs_once(tmp_path: Path) -> None:
    both = [
        {
            "key": "m1",
            "label": "M1",
            "overrides": ["method=local"],
            "value": "per_client.test/local/acc.0",
        },
        {
            "key": "m2",
            "label": "M2",
            "overrides": ["method=local"],
            "value": "per_client.test/local/acc.1",
        },
        TINY["methods"][1],
    ]
    order = launch_order(planned_cells(table(tmp_path, methods=both, reference=[])))
    # There are 4 + 2 rows, 2 seeds and 2 methods, because M1 and M2 have the same
    # runs.
    assert len(order) == 24
    shared = [tuple(o for o in job.overrides if not o.startswith("method=")) for job in order]
    assert shared[::2] == shared[1::2] and len(set(shared)) == 12


def test_a_reading_of_ours_is_held_against_the_column_that_it_reads(tmp_path: Path) -> None:
    plain = {
        "key": "plain",
        "label": "Plain",
        "overrides": ["method=local"],
        "role": "ours",
        "reads": "local",
    }
    made = table(tmp_path, methods=[*TINY["methods"], plain])
    assert made.printed({"clients": 2, "start": "diff"}, "plain") == (24.5, 1.0)
    assert made.printed({"clients": 2, "start": "diff"}, "ensemble") == (None, None)


def test_a_claim_may_go_along_one_condition_or_several(tmp_path: Path) -> None:
    trend = CLAIM | {"test": "trend", "b": []}
    for along, keys in (("clients", ("clients",)), (["clients", "start"], ("clients", "start"))):
        (claim,) = table(tmp_path, claims=[trend | {"along": along}]).claims
        assert claim.keys_along == keys
    (claim,) = table(tmp_path, claims=[CLAIM]).claims
    assert claim.keys_along == () and claim.rows == "all"


def test_reference_is_looked_up_by_the_row(tmp_path: Path) -> None:
    made = table(tmp_path)
    assert made.printed({"clients": 2, "start": "diff"}, "local") == (24.5, 1.0)
    assert made.printed({"clients": 2, "start": "same"}, "local") == (None, None)


@pytest.mark.parametrize(("one", "other"), [
    ("table1", "table1_time"), ("table6", "table6_params"), ("fig8", "fig8_local"),
])  # fmt: skip
def test_two_readings_of_one_sweep_are_of_the_same_runs(one: str, other: str) -> None:
    tables = [load_table(f"ma_echo/{name}") for name in (one, other)]
    shared = tables[0].columns.keys() & tables[1].columns.keys()
    made = [
        {
            job.overrides
            for planned in planned_cells(t)
            if planned.method in shared
            for job in planned.jobs
        }
        for t in tables
    ]
    assert made[0] == made[1] and len(shared) == len(tables[1].columns)


@pytest.mark.parametrize(("one", "other"), [
    ("fedmrur/table2", "fedmrur/table3"), ("fedcda/fig2a", "fedcda/fig2a_time"), ("fedcda/fig2c", "fedcda/fig2c_spread"),
])  # fmt: skip
def test_readings_of_one_sweep_are_of_all_its_runs(one: str, other: str) -> None:
    for variant in ("full", "reduced"):
        made = [
            {
                job.overrides
                for planned in planned_cells(load_table(n), variant)
                for job in planned.jobs
            }
            for n in (one, other)
        ]  # type: ignore[arg-type]
        assert made[0] == made[1]


@pytest.mark.parametrize(("one", "other"), [
    ("table2", "fig1"), ("table2", "fig2"), ("table2", "fig2_width"), ("table3", "fig2b"),
])  # fmt: skip
def test_figures_are_of_their_tables_runs(one: str, other: str) -> None:
    whole, part = (
        {frozenset(j.overrides) for s in planned_cells(load_table(f"nafi/{n}")) for j in s.jobs}
        for n in (one, other)
    )
    assert part < whole


def test_the_logged_split_is_that_of_all_seeds() -> None:
    cells = planned_cells(load_table("ma_echo/log"), only={"method": ["fedavg"]})
    configs = [compose(list(job.overrides)) for job in cells[0].jobs]
    assert [(c["seed"], c["seed_data"]) for c in configs] == [(0, 1), (1, 1), (2, 1)]


@pytest.mark.parametrize(
    "name", [name for name in table_names() if load_table(name).headline.pooled_rounds]
)
def test_what_is_pooled_is_measured_in_every_column(name: str) -> None:
    made = load_table(name)
    assert made.headline.pooled_rounds is not None
    firsts = {
        planned.method: planned.jobs[0] for planned in planned_cells(made, "smoke") if planned.jobs
    }
    for job in firsts.values():
        check_path(
            made.headline.pooled_rounds,
            Experiment.of(compose(list(job.overrides))),
            "headline.pooled_rounds",
        )


def _without_value(override: str) -> str:
    """Return the key of an override. For a group, the chosen option stays."""
    key = override.partition("=")[0]
    return override if (conf_dir() / key.lstrip("+~")).is_dir() else key


def _decisive(names: tuple[str, ...]) -> frozenset[tuple[str, ...]]:
    """Return each name alone, and each key with choices of groups that define it."""
    choices = [name for name in names if "=" in name]
    pairs = itertools.product(set(names) - set(choices), choices)
    return frozenset((name,) for name in names) | {
        (key, choice)
        for key, choice in pairs
        if choice.lstrip("+~").partition("=")[0] in _deciding(key.lstrip("+~").partition(".")[0])
    }


def _deciding(group: str) -> tuple[str, ...]:
    """Return the groups that decide whether a key of `group` exists.

    A method chooses the options of three other groups.
    """
    by_method = group in ("trainer", "aggregator", "server_optimizer")
    return (group, "experiment", *(["method"] if by_method else []))


@pytest.mark.parametrize("name", list(table_names()))
def test_every_table_loads_and_its_keys_exist(name: str) -> None:
    made = load_table(name)
    assert set(made.columns) <= set(made.plot_styles), (
        "conf/table/<paper>/_plot_styles.yaml says how each column is drawn"
    )
    jobs: dict[frozenset[tuple[str, ...]], tuple[str, ...]] = {}
    for variant in ("full", "reduced", "smoke"):
        if variant == "full" or made.smaller(variant) is not None:  # type: ignore[arg-type]
            cells = planned_cells(made, variant, seeds=[0])  # type: ignore[arg-type]
            rows = dict.fromkeys(tuple(cell.conditions.items()) for cell in cells)
            assert planned_rows(made, variant) == [dict(row) for row in rows]  # type: ignore[arg-type]
            jobs |= {
                _decisive(tuple(map(_without_value, job.overrides))): job.overrides
                for job in launch_order(cells)
            }
    left = set[tuple[str, ...]]().union(*jobs)
    # Compose only a few jobs that together cover everything, because composing one job
    # takes a fifth of a second.
    while left:
        most = max(jobs, key=lambda has: len(has & left))
        assert compose(list(jobs[most]))["seed"] == 0
        left -= most
    if made.published:
        rows = {tuple(cell.conditions.values()) for cell in planned_cells(made)}
        printed = {tuple(row[key] for key in made.keys) for row in made.reference}
        assert printed == rows, "a printed row is not run, or the other way round"
        own = [column.key for column in made.methods if column.role == "ours"]
        assert len([cell for cell in planned_cells(made) if cell.method not in own]) == len(
            made.reference
        )
        assert not any(row["method"] in own for row in made.reference)
    assert made.paper == "none" or any(column.role == "proposed" for column in made.methods)
    trained = [column for column in made.methods if "proxy.source=test" in (column.overrides or ())]
    assert all(column.oracle for column in trained), "test data train a column that is not marked"
    about = {name for claim in made.claims for name in (*claim.a, *claim.b)}
    assert made.paper == "none" or about, "a paper's table without a claim"


def test_only_takes_a_method_for_the_columns_that_run_it(tmp_path: Path) -> None:
    methods = [
        {"key": "mine", "label": "A", "overrides": ["method=average"]},
        {"key": "tuned", "label": "B", "overrides": ["method=average", "local.lr=1"]},
        {"key": "local", "label": "C", "overrides": ["method=local"]},
    ]
    made = table(tmp_path, methods=methods, claims=[])
    assert parse_only(made, ["method=average"]) == {"method": ["mine", "tuned"]}
    assert parse_only(made, ["method=mine,local"]) == {"method": ["mine", "local"]}
    with pytest.raises(ConfigError, match="did you mean 'average'"):
        parse_only(made, ["method=averge"])
