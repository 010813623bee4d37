"""What the index of tables may keep: nothing that a file outside fedexp's own config decides."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from fedexp.config.compose import compose
from fedexp.storage.files import write_json
from fedexp.storage.run_folder import RunFolder
from fedexp.tables.index import Index, _is_lasting
from fedexp.tables.schema import table_names

MIXED = ["method=local", "clients=2"]


@pytest.mark.parametrize(
    ("overrides", "lasts"),
    [
        (["method=local"], True),
        ([*MIXED, "architectures.clients=[mlp,lenet5]"], True),
        ([*MIXED, "architectures.clients={lenet5: '0', mlp: '1'}"], True),
        ([*MIXED, "architectures.clients=names.yaml"], False),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_lists_of_architectures_last_and_files_do_not(
    overrides: list[str], lasts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("names.yaml").write_text("[mlp, lenet5]\n")
    config = compose(overrides)
    assert _is_lasting(config) is lasts
    Path("conf/experiment").mkdir(parents=True)
    assert _is_lasting(config) is lasts
    # It may be the chosen point
    Path("conf/experiment/mine.yaml").write_text("architectures: {clients: names.yaml}\n")
    assert _is_lasting(config) is (lasts and len(overrides) == 1)


def test_of_a_built_in_table_only_what_may_be_stored_is_composed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    notes: list[str] = []
    composed: list[list[str]] = []

    def counting(overrides: list[str]) -> dict[str, Any]:
        composed.append(overrides)
        return compose(overrides)

    def row() -> dict[str, Any]:
        composed.clear()
        index = Index([], notes.append)
        found = index.row("demo/digits", table_names()["demo/digits"])
        index.save()
        return found

    for module in ("index", "lookup"):
        monkeypatch.setattr(f"fedexp.tables.{module}.compose", counting)
    nothing = row()
    assert (nothing["runs"], nothing["done"], nothing["state"], len(composed)) == (
        20,
        0,
        "missing",
        1,
    )
    wanted = ["experiment=demo/digits", "partition.alpha=0.5", "method=average", "seed=1"]
    config = compose(wanted)
    run = RunFolder.of(config)
    run.path.mkdir(parents=True)
    (run.path / "config.yaml").write_text(
        yaml.safe_dump({"seed": config["seed"], "choices": config.choices})
    )
    done = {"status": "done", "hashes": run.hashes, "seconds": {"total": 2.0}}
    write_json(run.path / "result.json", done)
    assert (row()["done"], row()["seconds"], composed) == (1, 2.0, [])
    assert row()["state"] == "in part" and len(notes) == 1
    (tmp_path / "cache/fedexp").rename(tmp_path / "gone")
    assert row()["done"] == 1
    other = [*wanted[:1], "partition.alpha=0.1", *wanted[2:]]
    assert composed[1:] == [other, wanted]  # what has this method and this seed


def test_a_run_without_its_config_is_looked_at_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = compose(["experiment=demo/digits", "partition.alpha=0.5", "method=average", "seed=1"])
    run = RunFolder.of(config)
    run.path.mkdir(parents=True)

    def done() -> int:
        index = Index([], str)
        found = index.row("demo/digits", table_names()["demo/digits"])["done"]
        index.save()
        return int(found)

    assert done() == 0  # it has begun and written nothing yet
    (run.path / "config.yaml").write_text(
        yaml.safe_dump({"seed": config["seed"], "choices": config.choices})
    )
    write_json(
        run.path / "result.json",
        {"status": "done", "hashes": run.hashes, "seconds": {"total": 2.0}},
    )
    assert done() == 1
