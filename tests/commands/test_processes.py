"""Tests of runs as processes.

Runs are killed, interrupted, started three times at once, and distributed by Hydra's
launchers.

Most processes are forked from a process that has made all imports
(`tests.fork_server`). `start` starts an interpreter, as a user does. It is used once
for each way to end. It is also used for all workers of joblib, because they do not
start in a forked process.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fedexp.commands import joblib_files
from fedexp.commands.launching import run_sweep
from fedexp.config.compose import compose
from fedexp.running.execute import Interrupted, execute, interrupt_on_sigterm
from fedexp.storage.checkpoint import Checkpoint
from fedexp.storage.files import read_json, write_json
from tests.fork_server import Forked, fedexp_command
from tests.killing import kill

ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
SCAFFOLD = [
    "method=scaffold",
    "rounds=24",
    "clients_per_round=5",
    "checkpoint.every=1",
    "threads=1",
    "memo.enabled=false",
]
SWEEP = ["-m", "method=fedavg,fedprox", "rounds=2", "clients=4"]


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "fedexp", *arguments]
    return subprocess.Popen(
        command, cwd=folder, env=ENV, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def fork(folder: Path, *arguments: str) -> Forked:
    """Start the same command in a forked process, which has all imports."""
    return fedexp_command(folder, *arguments)


def finish(process: subprocess.Popen[str] | Forked, code: int = 0) -> str:
    out, err = process.communicate(timeout=240)
    assert process.returncode == code, f"{process.returncode}\n{out}\n{err}"
    return out + err


def run_folder(folder: Path) -> Path:
    (path,) = [p.parent for p in folder.glob("outputs/runs/*/*/status.json")]
    return path


def hashes(folder: Path) -> dict[str, str]:
    names = ("metrics.jsonl", "model.safetensors", "partition.safetensors")
    return {
        name: hashlib.sha256((run_folder(folder) / name).read_bytes()).hexdigest() for name in names
    }


def wait_for_rounds(folder: Path, rounds: int) -> None:
    """Wait until `rounds` rows are on disk."""
    deadline = time.monotonic() + 120
    while (
        sum(p.read_bytes().count(b"\n") for p in folder.glob("outputs/runs/*/*/metrics.jsonl"))
        < rounds
    ):
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("straight")
    finish(start(folder, *SCAFFOLD))
    return hashes(folder)


@pytest.mark.parametrize(("begin", "moment"), [(fork, 0), (fork, 1), (start, 7)])
def test_kill_9_and_resume_gives_the_same_bytes(
    tmp_path: Path, straight: dict[str, str], begin: Callable[..., Any], moment: int
) -> None:
    process = begin(tmp_path, *SCAFFOLD)
    if moment:
        wait_for_rounds(tmp_path, moment)
    else:
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    out = finish(fork(tmp_path, *SCAFFOLD))
    assert moment <= 1 or "resuming after round" in out
    assert hashes(tmp_path) == straight


@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_interruption_is_marked_and_resumable(
    tmp_path: Path, straight: dict[str, str], signum: int, code: int
) -> None:
    process = fork(tmp_path, *SCAFFOLD)
    wait_for_rounds(tmp_path, 3)
    process.send_signal(signum)
    told = finish(process, code)
    assert "interrupted" in told and "Traceback" not in told
    status = json.loads((run_folder(tmp_path) / "status.json").read_text())
    assert status["status"] == "interrupted"
    finish(fork(tmp_path, *SCAFFOLD))
    assert hashes(tmp_path) == straight


def test_interruption_saves_what_is_done(tmp_path: Path) -> None:
    # With the default interval, no checkpoint is due yet
    run = ["rounds=3000", "clients=4", "memo.enabled=false"]
    process = fork(tmp_path, *run)
    wait_for_rounds(tmp_path, 20)
    process.send_signal(signal.SIGINT)
    finish(process, 130)
    step = json.loads((run_folder(tmp_path) / "checkpoint" / "manifest.json").read_text())["step"]
    assert step >= 20
    again = fork(tmp_path, *run)
    wait_for_rounds(tmp_path, step + 1)
    again.send_signal(signal.SIGTERM)
    assert f"resuming after round {step} of 3000" in finish(again, 143)


@pytest.fixture
def _hears_hangups() -> Iterator[None]:
    """Let this process receive SIGHUP, even if the tests run under ``nohup``."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("_hears_hangups")
def test_closed_terminal_saves_every_finished_step_even_if_it_signals_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save = Checkpoint.save

    def save_under_signals(*arguments: Any) -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        save(*arguments)

    def end(grids: Any, folder: Path, step: int) -> None:
        if step == 2:
            monkeypatch.setattr(Checkpoint, "save", save_under_signals)
            os.kill(os.getpid(), signal.SIGHUP)

    monkeypatch.setattr("fedexp.running.execute.draw_pictures", end)
    before = signal.getsignal(signal.SIGHUP)
    with pytest.raises(Interrupted):
        execute(compose(["rounds=3", "clients=2", "checkpoint.every=off"]), say=None)
    assert signal.getsignal(signal.SIGHUP) == before
    assert read_json(run_folder(tmp_path) / "status.json")["status"] == "interrupted"
    assert read_json(run_folder(tmp_path) / "checkpoint" / "manifest.json")["step"] == 1


@pytest.mark.usefixtures("_hears_hangups")
@pytest.mark.parametrize(
    ("signum", "raised"),
    [
        (signal.SIGINT, KeyboardInterrupt),
        (signal.SIGTERM, Interrupted),
        (signal.SIGHUP, Interrupted),
    ],
)
def test_a_signal_during_a_destructor_is_not_lost(
    signum: int, raised: type[BaseException], capfd: pytest.CaptureFixture[str]
) -> None:
    class Signals:
        def __del__(self) -> None:
            os.kill(os.getpid(), signum)

    before = sys.unraisablehook
    with pytest.raises(raised), interrupt_on_sigterm():
        held = Signals()
        del held
        time.sleep(30)
    assert sys.unraisablehook is before
    assert capfd.readouterr().err == ""


def test_run_that_ignores_the_end_of_the_terminal_goes_on() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interrupt_on_sigterm():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def processes_in(folder: Path) -> list[int]:
    """Return the processes whose working directory is `folder`."""
    here = []
    for cwd in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):
            if cwd.readlink() == folder:
                here.append(int(cwd.parent.name))
    return here


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_the_end_of_a_parallel_sweep_leaves_nobody_training_or_beginning(
    tmp_path: Path, signum: int
) -> None:
    shared = shared_memory()
    sweep = [
        "-m",
        "seed=0,1,2,3",
        "rounds=100000",
        "clients=4",
        "hydra/launcher=joblib",
        "hydra.launcher.n_jobs=2",
    ]
    process = start(tmp_path, *sweep)
    wait_for_rounds(tmp_path, 20)
    process.send_signal(signum)
    process.communicate(timeout=60)
    assert process.returncode == (143 if signum == signal.SIGTERM else -signal.SIGKILL)
    deadline = time.monotonic() + 60
    while processes_in(tmp_path):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    states = [
        json.loads(path.read_text())["status"]
        for path in tmp_path.glob("outputs/runs/*/*/status.json")
    ]
    assert len(states) <= 2 and (signum == signal.SIGTERM or set(states) == {"interrupted"}), states
    left = shared_memory() - shared
    # Files of other tests that run in parallel disappear while this test waits
    while left & shared_memory():
        assert time.monotonic() < deadline, left & shared_memory()
        time.sleep(0.05)


def test_next_sweep_deletes_what_joblib_left_in_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    shared, here = tmp_path / "shm", str(Path("/proc/self/ns/pid").readlink())
    monkeypatch.setattr(joblib_files, "SHARED_MEMORY", shared)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    marks = tmp_path / f"fedexp-{os.getuid()}"
    dead, alive, elsewhere = process.pid, os.getppid(), process.pid * 1000
    for folder in (shared, marks):
        folder.mkdir()
    for pid, namespace in ((dead, here), (alive, here), (elsewhere, "pid:[1]")):
        (marks / str(pid)).write_text(namespace)
    gone = [shared / f"sem.loky-{dead}-ab", shared / f"joblib_memmapping_folder_{dead}_ab_cd"]
    kept = [
        *(shared / f"sem.loky-{pid}-ab" for pid in (alive, elsewhere, f"{dead}0", dead + 1)),
        shared / f"joblib_memmapping_folder_{alive}_ab_cd",
        shared / f"other-{dead}-ab",
    ]
    for path in (*gone, *kept):
        path.mkdir()

    assert run_sweep("s", 1, lambda: int((marks / str(os.getpid())).exists())) == 1
    assert not any(path.exists() for path in gone) and all(path.exists() for path in kept)
    assert {path.name for path in marks.iterdir()} == {str(alive), str(elsewhere)}


def test_folder_of_marks_of_another_user_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("fedexp.commands.joblib_files._is_own", lambda path: False)
    with joblib_files.mark_joblib_files():
        assert not list((tmp_path / f"fedexp-{os.getuid()}").iterdir())


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def test_a_joblib_worker_that_is_killed_is_told_and_its_job_failed(tmp_path: Path) -> None:
    sweep = [
        "-m",
        "seed=0,1",
        "rounds=100000",
        "clients=4",
        "hydra/launcher=joblib",
        "hydra.launcher.n_jobs=2",
    ]
    process = start(tmp_path, *sweep)
    wait_for_rounds(tmp_path, 2)
    owners = [
        json.loads(path.read_text()) for path in tmp_path.glob("outputs/runs/*/*/status.json")
    ]
    kill(owners[0]["pid"])
    told = finish(process, 1)
    assert (
        "a worker process died (SIGKILL)" in told
        and "Traceback" not in told
        and "running" not in told
    ), told
    assert "its process died" in told


@pytest.mark.parametrize(("engine", "noted"), [("serial", True), ("auto", False)])
def test_resume_keeps_the_numerics_of_the_first_launch(
    engine: str, noted: bool, tmp_path: Path, straight: dict[str, str]
) -> None:
    """With `auto`, two processes of one thread each use both threads."""
    process = fork(tmp_path, *SCAFFOLD)
    wait_for_rounds(tmp_path, 3)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    out = finish(fork(tmp_path, *SCAFFOLD, "threads=2", f"engine={engine}"))
    assert ("resuming with the numerics of the first launch" in out) is noted
    assert hashes(tmp_path) == straight


def test_changed_split_is_refused_on_resume(tmp_path: Path) -> None:
    process = fork(tmp_path, *SCAFFOLD)
    wait_for_rounds(tmp_path, 3)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    stored = run_folder(tmp_path) / "data.json"
    write_json(stored, read_json(stored) | {"data": "0"}, seal=True)
    assert "not those that this run began with" in finish(fork(tmp_path, *SCAFFOLD), 1)


def test_three_launches_in_the_same_second(tmp_path: Path) -> None:
    processes = [fork(tmp_path, "rounds=60", "clients=4") for _ in range(3)]
    told = [finish(process) for process in processes]
    assert json.loads((run_folder(tmp_path) / "result.json").read_text())["attempts"] == 1
    rounds = [
        json.loads(x)["round"]
        for x in (run_folder(tmp_path) / "metrics.jsonl").read_text().splitlines()
    ]
    assert rounds == list(range(1, 61))
    assert sum("already done" in text for text in told) == 2


def test_on_running_fail(tmp_path: Path) -> None:
    first = fork(tmp_path, "rounds=5000", "clients=4")
    wait_for_rounds(tmp_path, 1)
    assert "already being executed" in finish(
        fork(tmp_path, "rounds=5000", "clients=4", "on_running=fail"), 1
    )
    first.send_signal(signal.SIGTERM)
    finish(first, 143)


@pytest.fixture(scope="module")
def serial_sweep(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Return the folder of the same jobs, run one after another with `threads`."""

    @functools.cache
    def of(threads: int) -> Path:
        folder = tmp_path_factory.mktemp("serial")
        finish(fork(folder, *SWEEP, f"threads={threads}"))
        return folder

    return of


@pytest.mark.parametrize("launcher", [
    ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"],
    ["hydra/launcher=submitit_local", "hydra.launcher.timeout_min=5"],
], ids=["joblib", "submitit"])  # fmt: skip
def test_launchers_run_skip_and_report(
    tmp_path: Path, serial_sweep: Callable[[int], Path], launcher: list[str]
) -> None:
    assert "2 done" in finish(start(tmp_path, *SWEEP, *launcher))
    results = {p: p.read_bytes() for p in tmp_path.glob("outputs/runs/*/*/result.json")}
    assert len(results) == 2
    # The launcher of the stored runs does not matter
    assert "2 jobs - 2 done, 0 to run" in finish(fork(tmp_path, *SWEEP))
    assert {p: p.read_bytes() for p in results} == results
    for path, stored in results.items():
        twin = serial_sweep(json.loads(stored)["numerics"]["threads"]) / path.relative_to(tmp_path)
        assert (twin.parent / "metrics.jsonl").read_bytes() == (
            path.parent / "metrics.jsonl"
        ).read_bytes()


def test_a_launchers_failing_job_is_told(tmp_path: Path) -> None:
    sweep = [
        "-m",
        "local.lr=1e30,0.1",
        "rounds=2",
        "clients=4",
        "hydra/launcher=joblib",
        "hydra.launcher.n_jobs=2",
    ]
    told = finish(start(tmp_path, *sweep), 1)
    assert "1 done, 1 failed" in told and "returned NaN or infinity" in told


def test_ctrl_c_in_a_sweep_stops_it_and_it_resumes(tmp_path: Path) -> None:
    sweep = ["-m", "seed=0,1", "rounds=60", "clients=4", "checkpoint.every=5"]
    process = start(tmp_path, *sweep)
    wait_for_rounds(tmp_path, 10)
    process.send_signal(signal.SIGINT)
    told = finish(process, 130)
    assert "1 interrupted, 1 queued" in told
    assert "interrupted: the same command continues from here" in told
    assert "2 done" in finish(fork(tmp_path, *sweep))


def test_logger_that_hangs_or_raises_cannot_stop_a_run(tmp_path: Path) -> None:
    (tmp_path / "badloggers.py").write_text(
        "import time\nfrom dataclasses import dataclass\nfrom fedexp.tracking.local import "
        "LocalLogger\n\n\n"
        "@dataclass\nclass Raises(LocalLogger):\n    def log(self, row):\n        raise "
        "OSError('disk full')\n\n\n"
        "@dataclass\nclass Hangs(LocalLogger):\n    def open(self, run, history):\n        "
        "time.sleep(3600)\n"
    )
    for begin, name, said in (
        (fork, "Raises", "OSError: disk full"),
        (start, "Hangs", "took longer than 0.2 s"),
    ):
        out = finish(
            begin(
                tmp_path,
                f"logger._target_=badloggers.{name}",
                "+logger.timeout=0.2",
                "rounds=3",
                "reuse=false",
            )
        )
        assert "switched off" in out and said in out and out.count("switched off") == 1
        assert (
            len(
                (next(tmp_path.glob("outputs/runs/*/????????/metrics.jsonl")))
                .read_text()
                .splitlines()
            )
            == 3
        )
    strict = finish(
        fork(
            tmp_path,
            "logger._target_=badloggers.Raises",
            "+logger.strict=true",
            "rounds=200",
            "reuse=false",
        ),
        1,
    )
    assert "logger Raises failed" in strict
