"""Trackers have every round once, also after a run that was interrupted and resumed."""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedexp.config.compose import compose
from fedexp.core.build import build
from fedexp.core.errors import ConfigError
from fedexp.tracking.feed import Feed
from fedexp.tracking.logger import Logger, RunInfo
from fedexp.tracking.tensorboard import TensorBoard
from fedexp.tracking.wandb import Wandb, flat_config
from tests.fork_server import Forked


@pytest.fixture(autouse=True)
def _another_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget that W&B's server was not reached, as in the first job of a new sweep."""
    monkeypatch.setattr("fedexp.tracking.wandb._unreached", {})


ROWS: list[dict[str, Any]] = [
    {"round": n, "step": n, "train/loss": 1 / n}
    | ({"test/global/acc": n / 10} if n % 2 == 0 else {})
    for n in range(1, 6)
]
RESULT = {
    "status": "done",
    "headline": {"metric": "test/global/acc", "rule": "last", "value": 0.4},
    "best": {"test/global/acc": 0.4},
    "oracle/test/global/acc": 0.4,
    "rounds": 5,
    "rounds_to_target": None,
    "seconds": {"total": 1.5},
    "bytes": {"up": 10, "down": 20},
    "hashes": {"config": "c", "code": "d"},
    "partition": {"sha256": "5"},
}
CONFIG = {
    "method": "fedavg",
    "seed": 3,
    "clients": 10,
    "dataset": {"_target_": "d.D"},
    "partition": {"alpha": 0.5},
    "choices": {"method": "fedavg", "dataset": "digits"},
}


def info(
    folder: Path, *, resumed: bool = False, name: str = "method=fedavg seed=3", id: str = "abc123"
) -> RunInfo:
    return RunInfo(id, name, "sweep-1", CONFIG, folder, ("fedavg", "digits"), resumed)


def interrupted_and_resumed(kind: type[Logger], folder: Path) -> None:
    """Log a run in two attempts.

    Three rounds were logged, and the checkpoint has two. The second attempt logs the
    rest.
    """
    first = kind()
    first.open(info(folder), [])
    for row in ROWS[:3]:
        first.log(row)
    first.close("interrupted", None)
    second = kind()
    second.open(info(folder, resumed=True), ROWS[:2])
    for row in ROWS[2:]:
        second.log(row)
    second.close("done", RESULT)


@pytest.mark.parametrize("name", ["wandb", "tensorboard", "local"])
def test_every_yaml_builds_its_logger_and_refuses_what_it_does_not_know(name: str) -> None:
    node = compose([f"logger={name}"])["logger"]
    logger = build(Logger, node, "logger")
    assert (
        type(logger).__name__.lower().removesuffix("logger") == name
        and not logger.strict
        and logger.timeout == 60
    )
    with pytest.raises(ConfigError, match="unknown key 'proyect'"):
        build(Logger, node | {"proyect": "x"}, "logger")


def test_wandb_mode_is_offline_unless_asked() -> None:
    assert build(Wandb, compose(["logger=wandb"])["logger"], "logger").mode == "offline"
    assert (
        build(Wandb, compose(["logger=wandb", "logger.mode=online"])["logger"], "logger").mode
        == "online"
    )
    with pytest.raises(ConfigError, match="did you mean 'online'"):
        build(Wandb, {"mode": "onlin"}, "logger")


# ---------------------------------------------------------------- W&B


def records(path: Path) -> Iterator[Any]:
    """Return the records of a .wandb file.

    The file has 7 magic bytes, then LevelDB's log format: blocks of 32 KiB and headers
    of 7 bytes.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, whole = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        whole += data[position + 7 : position + 7 + length]
        position += 7 + length
        # The chunk is a whole record or the last part of one
        if kind in (1, 4):
            record = Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


def items(pairs: Any) -> dict[str, Any]:
    return {"/".join(pair.nested_key) or pair.key: json.loads(pair.value_json) for pair in pairs}


def parts(folder: Path) -> list[Path]:
    return sorted((folder / "wandb").glob("offline-run-*/*.wandb"))


@pytest.fixture(scope="module")
def wandb_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Start a W&B service without the user's settings, and end it after the module."""
    names = {key: value for key, value in os.environ.items() if key.startswith("WANDB_")}
    os.environ["WANDB_CONFIG_DIR"] = str(tmp_path_factory.mktemp("wandb"))
    yield
    import wandb

    wandb.teardown()
    for key in [key for key in os.environ if key.startswith("WANDB_")]:
        del os.environ[key]
    os.environ.update(names)


@pytest.mark.usefixtures("wandb_home")
def test_wandb_offline_holds_every_round_once_after_a_resume(tmp_path: Path) -> None:
    interrupted_and_resumed(Wandb, tmp_path)
    # The last file contains the earlier attempts, so a sync does not repeat rounds
    (path,) = parts(tmp_path)
    found = list(records(path))
    rows = [items(r.history.item) for r in found if r.WhichOneof("record_type") == "history"]
    assert [{k: v for k, v in row.items() if not k.startswith("_")} for row in rows] == ROWS
    assert [row["_step"] for row in rows] == [row["round"] for row in ROWS]
    (run,) = [r.run for r in found if r.WhichOneof("record_type") == "run"]
    assert (run.run_id, run.run_group, run.job_type, run.project) == (
        "abc123",
        "sweep-1",
        "fedavg",
        "fedexp",
    )
    assert run.display_name == "method=fedavg seed=3" and list(run.tags) == ["fedavg", "digits"]
    config = items(run.config.update)
    assert {key: config[key] for key in ("method", "dataset", "alpha", "clients", "seed")} == {
        "method": "fedavg", "dataset": "digits", "alpha": 0.5, "clients": 10, "seed": 3,
    }  # fmt: skip
    assert config["partition"] == {"alpha": 0.5} and config["dataset_config"] == {"_target_": "d.D"}
    metrics = [r.metric for r in found if r.WhichOneof("record_type") == "metric"]
    assert [(metric.glob_name, metric.step_metric) for metric in metrics] == [
        ("*", "step"),
        ("test/*", "round"),
        ("val/*", "round"),
    ]
    summary: dict[str, Any] = {}
    for record in found:
        if record.WhichOneof("record_type") == "summary":
            summary |= items(record.summary.update)
    assert (
        summary["headline/value"] == 0.4
        and summary["headline/rule"] == "last"
        and summary["status"] == "done"
    )
    assert summary["oracle/test/global/acc"] == 0.4 and summary["partition/sha256"] == "5"
    assert "rounds_to_target" not in summary
    kinds = {r.WhichOneof("record_type") for r in found}
    # System statistics, console output and machine data are not recorded
    assert not kinds & {"stats", "output", "output_raw", "environment"}


@pytest.mark.usefixtures("wandb_home")
@pytest.mark.parametrize(("status", "code"), [("done", 0), ("failed", 1), ("interrupted", 130)])
def test_wandb_shows_how_a_run_ended_and_jobs_do_not_merge(
    tmp_path: Path, status: str, code: int
) -> None:
    other = Wandb()
    # This run is still open, like a run that hangs
    other.open(info(tmp_path / "other", id="other", name="x" * 300), [])
    logger = Wandb(project="p")
    logger.open(info(tmp_path / "mine"), [])
    logger.log(ROWS[0])
    logger.close(status, None)
    other.close("done", None)
    (path,) = parts(tmp_path / "mine")
    found = list(records(path))
    assert [r.exit.exit_code for r in found if r.WhichOneof("record_type") == "exit"] == [code]
    assert [r.run.run_id for r in found if r.WhichOneof("record_type") == "run"] == ["abc123"]
    assert not any(
        r.WhichOneof("record_type") == "history" for r in records(parts(tmp_path / "other")[0])
    )


class FakeRun:
    """A replacement for a run on a server that has some rounds already."""

    def __init__(self, has: int) -> None:
        self.resumed, self.summary, self.rows, self.code = (
            has > 0,
            {"step": has} if has else {},
            [],
            None,
        )
        self.settings = type("Settings", (), {"sync_dir": "none"})
        self.url = "https://wandb.test/run"

    def define_metric(self, name: str, step_metric: str) -> None: ...

    def log(self, row: dict[str, Any], step: int, commit: bool) -> None:
        assert step == row["step"] and commit
        self.rows.append(row)

    def finish(self, exit_code: int) -> None:
        self.code = exit_code


@pytest.mark.parametrize("has", [0, 1, 2, 3])
def test_wandb_online_sends_what_the_server_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has: int
) -> None:  # fmt: skip
    import wandb

    run, asked = FakeRun(has), []
    monkeypatch.setattr(wandb, "setup", lambda settings: None)
    monkeypatch.setattr(wandb, "login", lambda prompt, verify: True)
    monkeypatch.setattr(wandb, "init", lambda **given: asked.append(given) or run)
    said: list[str] = []
    logger = Wandb(mode="online", entity="team")
    logger.note = said.append
    logger.open(info(tmp_path, resumed=True), ROWS[:2])
    for row in ROWS[2:]:
        logger.log(row)
    logger.close("done", RESULT)
    assert [row["round"] for row in run.rows] == list(range(has + 1, 6)) and run.code == 0
    assert said == ["W&B: https://wandb.test/run"]
    (given,) = asked
    assert (given["mode"], given["entity"], given["id"], given["resume"]) == (
        "online",
        "team",
        "abc123",
        "allow",
    )


def test_wandb_tells_that_it_keeps_an_earlier_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    run = FakeRun(3)
    monkeypatch.setattr(wandb, "setup", lambda settings: None)
    monkeypatch.setattr(wandb, "login", lambda prompt, verify: True)
    monkeypatch.setattr(wandb, "init", lambda **given: run)
    said: list[str] = []
    logger = Wandb(mode="online")
    logger.note = said.append
    logger.open(info(tmp_path, resumed=False), [])
    logger.log(ROWS[0])
    logger.close("done", RESULT)
    assert not run.rows and "already has 3 steps under this run ID" in said[-1]
    # `fedexp-runs export` gives all rows of the run at once.
    said.clear()
    logger.open(info(tmp_path, resumed=False), ROWS[:3])
    logger.close("done", RESULT)
    assert said == ["W&B: https://wandb.test/run"]


@pytest.mark.usefixtures("wandb_home")
@pytest.mark.parametrize("account", [True, False])
def test_wandb_goes_on_offline_where_the_server_is_not_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, account: bool
) -> None:
    """The test uses the real W&B.

    Its service keeps the ID of the run that did not start. In a terminal it would ask
    for a key.
    """
    import wandb

    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    # A new service reads the environment that is set below
    wandb.teardown()
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    if account:
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    else:
        monkeypatch.delenv("WANDB_API_KEY", raising=False)
    said: list[str] = []
    logger = Wandb(mode="online", timeout=2.0)
    logger.note = said.append
    logger.open(info(tmp_path), ROWS[:1])
    logger.close("done", None)
    (warning,) = said
    assert "Continuing offline" in warning and f"wandb sync {tmp_path}" in warning
    assert ("no W&B account" in warning) is not account
    (path,) = parts(tmp_path)
    assert [r.run.run_id for r in records(path) if r.WhichOneof("record_type") == "run"] == [
        "abc123"
    ]
    with pytest.raises(wandb.errors.Error):
        Wandb(mode="online", strict=True, timeout=2.0).open(info(tmp_path), [])
    wandb.teardown()


def test_wandb_tries_an_unreachable_server_once_a_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    def init(**given: Any) -> FakeRun:
        tried.append(given["mode"])
        if given["mode"] == "online":
            raise wandb.errors.CommError("no route")
        return FakeRun(0)

    tried: list[str] = []
    said: list[str] = []
    monkeypatch.setattr(wandb, "setup", lambda settings: None)
    monkeypatch.setattr(wandb, "login", lambda prompt, verify: True)
    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.setattr("fedexp.tracking.wandb._unreached", {})
    for group in ("sweep-1", "sweep-1", "sweep-2", None, None):
        logger = Wandb(mode="online")
        logger.note = said.append
        logger.open(replace(info(tmp_path), group=group), [])
        logger.close("done", None)
    assert tried == ["online", "offline", "offline", *["online", "offline"] * 3]
    assert len(said) == 5 and all("(no route). Continuing offline" in text for text in said)


def frozen_service(late: bool) -> None:
    """Stop the W&B service of a run after the first round.

    Then do what Python does at its end, including W&B's exit hook.

    Args:
        late: Whether W&B notices the lost connection before the exit hooks run, while
            the feed's thread has not ended W&B yet. This happens on a busy machine.
    """
    import wandb

    logger, warnings = Wandb(), []
    feed = Feed(logger, warnings.append)
    feed.open(info(Path.cwd()), ROWS[:1])
    while not logger._sent:
        time.sleep(0.01)
    connection = wandb.sdk.wandb_setup.singleton()._connection
    service = connection._proc._process
    service.send_signal(signal.SIGSTOP)
    logger.timeout = 0.2
    if late:
        wandb.teardown = lambda: None
    for row in ROWS[1:]:
        feed.log(row)
    feed.close("done", None)
    if late:
        assert hasattr(connection._client, "_broken_exc")  # W&B may have set it already
        connection._client._broken_exc = ConnectionResetError("Connection lost")
    atexit._run_exitfuncs()
    print(len(warnings), service.wait(), flush=True)


@pytest.mark.parametrize("late", [False, True])
def test_a_frozen_wandb_lets_the_process_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    process = Forked(tmp_path, frozen_service, late)
    out, err = process.communicate(timeout=100)
    assert (process.returncode, out) == (0, "1 -9\n"), err
    assert "Traceback" not in err


@pytest.mark.usefixtures("wandb_home")
def test_wandb_leaves_other_runs_of_the_process_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To go on offline, a logger ends W&B's service, which would end an open run.

    In this case the logger stops logging instead.
    """
    import wandb

    other = Wandb()
    other.open(info(tmp_path / "other", id="other"), [])
    monkeypatch.setattr(wandb, "login", lambda prompt, verify: False)
    with pytest.raises(wandb.errors.UsageError, match="no W&B account"):
        Wandb(mode="online").open(info(tmp_path / "mine"), [])
    other.log(ROWS[0])
    other.close("done", None)
    found = list(records(parts(tmp_path / "other")[0]))
    assert any(r.WhichOneof("record_type") == "exit" for r in found)


def test_flat_config_of_a_composed_job_is_plain_json() -> None:
    flat = flat_config(compose(["method=scaffold", "partition=iid", "seed=4"]).to_stored())
    assert (flat["method"], flat["dataset"], flat["alpha"], flat["seed"]) == (
        "scaffold",
        "digits",
        None,
        4,
    )
    assert json.loads(json.dumps(flat)) == flat


# ---------------------------------------------------------------- TensorBoard and CSV


def test_tensorboard_holds_every_round_once_after_a_resume(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    interrupted_and_resumed(TensorBoard, tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard"), purge_orphaned_data=False).Reload()
    for name in ("train/loss", "test/global/acc"):
        expected = [(row["round"], row[name]) for row in ROWS if name in row]
        assert [(e.step, e.value) for e in events.Scalars(name)] == [
            (n, pytest.approx(v)) for n, v in expected
        ]
    assert set(events.Tags()["scalars"]) == {"train/loss", "test/global/acc"}
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1


def test_absent_tensorboard_is_refused_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    from fedexp.core.errors import ConfigError
    from fedexp.tracking.tensorboard import TensorBoard

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"fedexp\[tensorboard\]"):
        TensorBoard().check()
