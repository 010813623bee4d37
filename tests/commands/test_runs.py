"""Tests of fedexp-runs on folders that the tests write.

They show what it finds, what it prints, and what it never deletes.
"""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from fedexp.commands import runs as runs_cli
from fedexp.commands.runs import run_command
from fedexp.config.compose import compose
from fedexp.core.errors import ConfigError
from fedexp.storage.files import write_json, write_text
from fedexp.storage.identity import code_hash
from fedexp.storage.stored_run import StoredRun, find_run, find_runs, own_code

ESCAPES = "\x1b[31mred\x1b]0;title\x07\x9b2J\r"
CONFIG_HASH, CODE_HASH = "0123abcd", "89abcdef"


def make(root: Path, status: str, *, name: str = f"fedavg-digits-{CONFIG_HASH}", code: str = CODE_HASH,
         value: float = 0.5, minutes: int = 0, config: dict[str, Any] | None = None) -> Path:  # fmt: skip
    """Write a run folder with this status that was last changed `minutes` ago."""
    folder = root / "runs" / name / code
    folder.mkdir(parents=True)
    moment = datetime.datetime.now(datetime.UTC) - datetime.timedelta(minutes=minutes)
    config = config or {"method": "fedavg", "seed": 0, "local": {"lr": 0.05}, "device": "cpu"}
    choices = {"method": "fedavg", "dataset": "digits"}
    write_text(
        folder / "config.yaml", json.dumps(config | {"choices": choices, "overrides": ["seed=0"]})
    )
    facts = {"pid": 1, "host": "h", "attempt": 1, "round": 2, "rounds": 3, "error": None}
    write_json(folder / "status.json", {"status": status, "updated": moment.isoformat(), **facts})
    (folder / "checkpoint" / "tensors").mkdir(parents=True)
    write_text(folder / "checkpoint" / "manifest.json", "{}" * 500)
    if "." not in code:
        (folder / "lock").touch()
    if status == "done":
        headline = {"metric": "test/global/acc", "rule": "last", "value": value}
        result = {
            "status": "done",
            "choices": choices,
            "overrides": ["seed=0"],
            "headline": headline,
            "rounds": 3,
        }
        result |= {
            "partition": {"sha256": "5" * 64},
            "hashes": {"config": "c" * 32, "code": "d" * 32},
            "local_steps": 9,
        }
        write_json(folder / "result.json", result)
    return folder


def listed(root: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert run_command(["list", "--root", str(root), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_json_list_has_null_for_numbers_that_json_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], value: float
) -> None:
    make(tmp_path, "done", value=value)
    (row,) = listed(tmp_path, capsys)
    assert row["headline"] == {"metric": "test/global/acc", "rule": "last", "value": None}


def test_list_is_newest_first_and_tells_stale_from_running(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path, "done", minutes=30)
    make(tmp_path, "done", code=f"{CODE_HASH}.1", minutes=40)
    make(tmp_path, "running", name="scaffold-mnist-00000001", minutes=20)
    alive = make(tmp_path, "running", name="scaffold-mnist-00000002", minutes=10)
    make(tmp_path, "failed", name="fednova-digits-00000003")
    # This folder is not a run
    (tmp_path / "runs" / "notes" / "mine").mkdir(parents=True)
    with FileLock(alive / "lock"):
        rows = listed(tmp_path, capsys)
        assert run_command(["list", "--root", str(tmp_path)]) == 0
    assert [row["status"] for row in rows] == ["failed", "running", "stale", "done", "done"]
    assert [row["set_aside"] for row in rows] == [False, False, False, False, True]
    assert [row["headline"] and row["headline"]["value"] for row in rows] == [
        None,
        None,
        None,
        0.5,
        0.5,
    ]
    assert rows[1]["method"] == "fedavg" and (rows[1]["round"], rows[1]["rounds"]) == (2, 3)
    assert all(row["bytes"] > 1000 for row in rows)
    table = capsys.readouterr().out
    assert (
        "scaffold-mnist-00000001/89abcdef" in table
        and "stale" in table
        and "2/3" in table
        and "5 runs" in table
    )


def test_list_shows_all_rounds_of_a_run_without_a_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make(tmp_path, "failed", config={"method": "fedavg", "rounds": 30})
    facts = {"status": "failed", "pid": 1, "host": "h", "round": 0, "rounds": None}
    write_json(folder / "status.json", facts)
    assert run_command(["list", "--root", str(tmp_path)]) == 0
    assert "0/30" in capsys.readouterr().out


def test_parts_that_are_not_the_methods_own_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make(tmp_path, "done")
    result = json.loads((folder / "result.json").read_text())
    own = {"trainer": "sgd", "aggregator": "mean", "server_optimizer": "sgd"}
    for other in ({}, {"trainer": "scaffold", "aggregator": "fednova"}):
        choices, swapped = own | other, [f"{part}={option}" for part, option in other.items()]
        write_json(
            folder / "result.json",
            result | {"choices": result["choices"] | choices, "overrides": swapped},
        )
        (run,) = listed(tmp_path, capsys)
        assert run["swapped"] == swapped
        assert run_command(["list", "--root", str(tmp_path)]) == 0
        shown = capsys.readouterr().out
        assert " ".join(["fedavg", *swapped]) in shown and all(
            shown.count(part) == 1 for part in swapped
        )


def test_list_without_runs_and_with_damaged_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert listed(tmp_path, capsys) == []
    assert run_command(["list", "--root", str(tmp_path)]) == 0
    folder = make(tmp_path, "done")
    for name in ("status.json", "result.json", "config.yaml"):
        (folder / name).write_text('{"cut')
    (row,) = listed(tmp_path, capsys)
    assert (row["status"], row["method"], row["dataset"]) == ("damaged", "fedavg", "digits")
    assert (
        run_command(["clean", "--failed", "--stale", "--yes", "--root", str(tmp_path)]) == 0
        and folder.exists()
    )
    assert (
        run_command(["clean", "--damaged", "--yes", "--root", str(tmp_path)]) == 0
        and not folder.exists()
    )


def test_a_finished_run_with_a_damaged_status_is_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make(tmp_path, "done")
    (folder / "status.json").write_text('{"cut')
    (row,) = listed(tmp_path, capsys)
    assert row["status"] == "done"
    assert (
        run_command(["clean", "--damaged", "--yes", "--root", str(tmp_path)]) == 0
        and folder.exists()
    )


def test_show_by_path_by_part_and_nearest_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make(tmp_path, "done")
    make(tmp_path, "done", code=f"{CODE_HASH}.1")
    make(tmp_path, "failed", name="scaffold-mnist-00000002")
    for name in (str(folder), str(folder.parent), CONFIG_HASH, "fedavg", "digits"):
        # The name means the run that was not set aside
        assert find_run(tmp_path, name).path == folder.resolve()
    assert find_run(tmp_path, f"{CODE_HASH}.1").path.name == f"{CODE_HASH}.1"
    assert run_command(["show", "digits", "--root", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "test/global/acc 0.5000 (last)" in out and "5" * 64 in out and str(folder) in out
    assert run_command(["show", "scafold-mnist-00000002", "--root", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "did you mean 'scaffold-mnist-00000002/89abcdef'?" in error and "Traceback" not in error
    assert run_command(["show", "a", "--root", str(tmp_path)]) == 2
    assert "matches 3 runs" in capsys.readouterr().err


def test_diff_names_what_differs_and_what_matters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path, "done", value=0.5)
    other = {"method": "fedavg", "seed": 0, "local": {"lr": 0.1, "clip": None}, "device": "cuda"}
    make(tmp_path, "done", name="fedavg-digits-00000002", value=0.75, config=other)
    assert run_command(["diff", CONFIG_HASH, "00000002", "--root", str(tmp_path)]) == 0
    lines = {
        line.split()[0]: line.split()
        for line in capsys.readouterr().out.splitlines()
        if line.strip()
    }
    assert lines["local.lr"] == ["local.lr", "0.05", "0.1"]
    assert lines["local.clip"] == ["local.clip", "-", "null"]
    assert lines["device"][1:5] == ["(no", "effect", "on", "results)"]
    assert "seed" not in lines and "+0.2500" in lines["test/global/acc:"]
    assert list(lines).index("local.lr") < list(lines).index("device")


@pytest.mark.parametrize(
    ("stored", "shown"),
    [([], ["-", "-"]), (["7", "7"], ["7", "the", "same"]), (["7", "8"], ["7", "8"])],
)
def test_diff_compares_the_partitions_of_unfinished_runs(
    stored: list[str], shown: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["fedavg-digits-00000001", "fedavg-digits-00000002"]
    folders = [make(tmp_path, "interrupted", name=name) for name in names]
    for folder, sha256 in zip(folders, stored, strict=False):
        write_json(folder / "data.json", {"partition": sha256})
    assert run_command(["diff", *names, "--root", str(tmp_path)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["partition", "sha256", *shown] in rows
    assert ["numerics", "-", "-"] in rows


@pytest.mark.parametrize("sources", [
    {"modules": {"p": 3}}, {"modules": {"p": {}}}, {"modules": 3}, {"commits": 3}, {"commits": ["abc"]},
])  # fmt: skip
def test_damaged_sources_count_as_no_user_code(sources: dict[str, Any], tmp_path: Path) -> None:
    folder = make(tmp_path, "done", code="00000000", config=compose([]).values)
    write_json(folder / "sources.json", sources)
    assert own_code(folder) == ({}, {})
    assert StoredRun(folder).is_of_other_code()


@pytest.mark.parametrize(("flag", "gone"), [
    ("--failed", {"failed"}), ("--stale", {"stale"}), ("--set-aside", {"aside"}), ("--checkpoints", set()),
])  # fmt: skip
def test_clean_deletes_what_was_named_and_only_when_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str, gone: set[str]
) -> None:
    folders = {
        "done": make(tmp_path, "done"),
        "aside": make(tmp_path, "interrupted", code=f"{CODE_HASH}.1"),
        "failed": make(tmp_path, "failed", name="fedavg-digits-00000001"),
        "stale": make(tmp_path, "running", name="fedavg-digits-00000002"),
        "interrupted": make(tmp_path, "interrupted", name="fedavg-digits-00000003"),
    }
    before = sorted(tmp_path.rglob("*"))
    assert run_command(["clean", "--root", str(tmp_path), flag]) == 0
    assert "would be freed" in capsys.readouterr().out
    assert sorted(tmp_path.rglob("*")) == before
    assert run_command(["clean", "--root", str(tmp_path), flag, "--yes"]) == 0
    assert {name for name, folder in folders.items() if not folder.exists()} == gone
    checkpoints = {name for name, folder in folders.items() if (folder / "checkpoint").exists()}
    assert checkpoints == set(folders) - gone - ({"done"} if flag == "--checkpoints" else set())
    assert not [folder for folder in (tmp_path / "runs").iterdir() if not any(folder.iterdir())]
    assert (folders["done"] / "result.json").exists()


def test_clean_keeps_what_is_being_executed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # These are a failed run that was just launched again, a finished run that is being
    # read and a running run
    folders = [make(tmp_path, status, name=f"fedavg-digits-0000000{n}")
               for n, status in enumerate(["failed", "done", "running"])]  # fmt: skip
    before = sorted(tmp_path.rglob("*"))
    locks = [FileLock(folder / "lock") for folder in folders]
    for lock in locks:
        lock.acquire()
    everything = ["--failed", "--stale", "--checkpoints", "--memo", "--yes"]
    assert run_command(["clean", "--root", str(tmp_path), *everything]) == 0
    assert sorted(tmp_path.rglob("*")) == before
    # The running run is not a candidate for deletion
    assert capsys.readouterr().out.count("being executed") == 2
    for lock in locks:
        lock.release()
    assert run_command(["clean", "--root", str(tmp_path), *everything]) == 0
    assert [folder.exists() for folder in folders] == [False, True, False]


def test_old_code_is_what_today_would_not_reuse(tmp_path: Path) -> None:
    config = compose([])
    now = make(tmp_path, "done", code=code_hash(config.values)[:8], config=config.values)
    old = make(tmp_path, "done", code="00000000", config=config.values)
    elsewhere = make(
        tmp_path, "done", code="00000001", config={"trainer": {"_target_": "plugin_not_here.Mine"}}
    )
    assert run_command(["clean", "--root", str(tmp_path), "--old-code", "--yes"]) == 0
    assert [folder.exists() for folder in (now, old, elsewhere)] == [True, False, True]


@pytest.mark.parametrize("status", ["running", "failed", "interrupted"])
def test_run_with_a_result_is_done_and_is_kept(
    status: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The process died, or the disk was full, before the status was written."""
    folder = make(tmp_path, "done")
    facts = json.loads((folder / "status.json").read_text())
    write_json(folder / "status.json", facts | {"status": status})
    (row,) = listed(tmp_path, capsys)
    assert row["status"] == "done" and row["headline"]["value"] == 0.5
    run_command(["clean", "--failed", "--stale", "--yes", "--root", str(tmp_path)])
    assert folder.exists()


def test_run_whose_plugins_helper_is_not_found_is_not_of_other_code(tmp_path: Path) -> None:
    folder = make(tmp_path, "done", code="00000000", config=compose([]).values)
    facts = {"modules": {"helper_not_here": {"sha256": "0" * 64}}, "commits": {}}
    write_json(folder / "sources.json", facts)
    assert not StoredRun(folder).is_of_other_code()


@pytest.mark.parametrize("content", [b"class Mine(", b"# coding: unknown", b'"\xff"'])
def test_run_whose_plugin_cannot_be_parsed_is_not_of_other_code(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "not_python.py").write_bytes(content)
    config = {"trainer": {"_target_": "not_python.Mine"}}
    folder = make(tmp_path, "done", code="00000000", config=config)
    assert run_command(["clean", "--root", str(tmp_path), "--old-code", "--yes"]) == 0
    assert folder.exists()


def test_whole_name_is_not_ambiguous(tmp_path: Path) -> None:
    for code in (CODE_HASH, f"{CODE_HASH}.1", f"{CODE_HASH}.10"):
        make(tmp_path, "done", code=code)
    name = f"fedavg-digits-{CONFIG_HASH}/{CODE_HASH}.1"
    assert find_run(tmp_path, name).name == name
    with pytest.raises(ConfigError, match="matches 2 runs"):
        find_run(tmp_path, f"{CODE_HASH}.")


@pytest.mark.parametrize("out", ["folder", "file/runs.csv"])
def test_unusable_output_is_told(
    out: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path, "done")
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    path = ["--out", str(tmp_path / out)]
    assert run_command(["export", "--root", str(tmp_path), *path]) in (1, 2)
    assert "use the path of a file" in capsys.readouterr().err


def test_clean_imports_nothing_that_a_stored_config_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "__init__.py").write_text(
        "from pathlib import Path\nPath('imported').touch()\n"
    )
    (tmp_path / "foreign" / "part.py").write_text("")
    folder = make(tmp_path, "done", config={"trainer": {"_target_": "foreign.part.Mine"}})
    assert run_command(["clean", "--root", str(tmp_path), "--old-code", "--yes"]) == 0
    assert not folder.exists() and not (tmp_path / "imported").exists()


def test_clean_memo_keeps_what_belongs_to_running_jobs(tmp_path: Path) -> None:
    (tmp_path / "memo" / "ab").mkdir(parents=True)
    for name in ("ab/abc.safetensors", "ab/.abd.safetensors.1.part", "x.lock"):
        (tmp_path / "memo" / name).write_bytes(b"123")
    assert run_command(["clean", "--root", str(tmp_path), "--memo", "--yes"]) == 0
    left = {path.name for path in (tmp_path / "memo").rglob("*") if path.is_file()}
    assert left == {".abd.safetensors.1.part", "x.lock"}


def test_clean_keeps_links_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"fedavg-digits-0000000{number}" for number in range(3)]
    first, linked, last = (make(tmp_path, "failed", name=name) for name in names)
    elsewhere = linked.rename(tmp_path / "elsewhere")
    linked.symlink_to(elsewhere)
    assert run_command(["clean", "--failed", "--yes", "--root", str(tmp_path)]) == 0
    assert "(a symbolic link)" in capsys.readouterr().out
    assert linked.is_symlink() and elsewhere.exists()
    assert not first.exists() and not last.exists()


@pytest.mark.parametrize("moment", ["weigh", "_delete"])
def test_clean_goes_on_if_another_command_deletes_a_run(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [make(tmp_path, "failed", name=f"fedavg-digits-0000000{n}") for n in range(3)]
    whole = getattr(runs_cli, moment)

    def late(path: Path) -> Any:
        if path == folders[1]:
            raise FileNotFoundError(path)
        return whole(path)

    monkeypatch.setattr(runs_cli, moment, late)
    assert run_command(["clean", "--failed", "--yes", "--root", str(tmp_path)]) == 0
    assert [folder.exists() for folder in folders] == [False, True, False]


def test_clean_of_nothing_is_a_usage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["clean", "--root", str(tmp_path)]) == 2
    assert "--failed" in capsys.readouterr().err


def test_half_deleted_runs_are_no_runs(tmp_path: Path) -> None:
    folder = make(tmp_path, "done")
    folder.rename(folder.with_name(f".{folder.name}.7.deleted"))
    assert find_runs(tmp_path) == []


def test_looking_leaves_no_trace(tmp_path: Path) -> None:
    folder = make(tmp_path, "running")
    (folder / "lock").unlink()
    assert StoredRun(folder).status == "stale"
    assert not (folder / "lock").exists()


def test_starts_without_torch(tmp_path: Path) -> None:
    make(tmp_path, "done")
    code = (
        "import sys; from fedexp.commands.runs import run_command\n"
        "for a in (['list'], ['show', 'fedavg'], ['clean', '--failed']): run_command([*a, "
        f"'--root', {str(tmp_path)!r}])\n"
        "slow = {'torch', 'numpy', 'wandb', 'hydra', 'matplotlib'} & set(sys.modules); "
        "assert not slow, slow"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_console_entry_exits_with_the_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["fedexp-runs", "show", "nothing", "--root", str(tmp_path)])
    with pytest.raises(SystemExit) as stop:
        runs_cli.main()
    assert stop.value.code == 2


def test_stored_control_characters_do_not_reach_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"method": ESCAPES, "seed": 0, "local": {"lr": ESCAPES}, ESCAPES: 1}
    folder = make(tmp_path, "done", config=config, name=f"a\x1b[1m-b-{CONFIG_HASH}")
    result = json.loads((folder / "result.json").read_text())
    result |= {
        "choices": {"method": ESCAPES, "dataset": ESCAPES},
        "overrides": [f"method={ESCAPES}"],
        "headline": result["headline"] | {"metric": ESCAPES},
    }
    write_json(folder / "result.json", result)
    failed = make(tmp_path, "failed", name=f"c\x1b[1m-b-{CONFIG_HASH}", config=config)
    state = json.loads((failed / "status.json").read_text())
    write_json(failed / "status.json", state | {"error": ESCAPES})
    (failed / "config.yaml").write_text("[")

    root = ["--root", str(tmp_path)]
    shown = ""
    for command in (
        ["list"],
        ["list", "--json"],
        ["list", "nothing=1"],
        ["show", str(folder)],
        ["show", str(failed)],
        ["show", f"no{ESCAPES}"],
        ["diff", str(folder), str(folder)],
        ["diff", str(folder), str(failed)],
        ["export"],
        ["table", "rows=local.lr", "cols=method"],
        ["rerun", str(failed)],
        ["clean", "--failed", "--checkpoints"],
    ):
        run_command([*command, *root])
        told = capsys.readouterr()
        text = told.out + told.err
        assert not {character for character in text if not character.isprintable()} - {"\n"}, text
        shown += text
    assert r"\x1b[31mred\x1b]0;title\x07\x9b2J\r" in shown
