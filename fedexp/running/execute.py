"""One run, from resolved config to stored result: lock, resume, execute, evaluate, record."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fedexp import __version__
from fedexp.core import user_code
from fedexp.core.build import build
from fedexp.core.data import FederatedData
from fedexp.core.engine import Engine
from fedexp.core.env import Env
from fedexp.core.errors import FedexpError, StorageError
from fedexp.core.outcome import Outcome
from fedexp.core.phases import phase
from fedexp.core.runner import Snapshot, env_of, next_jobs
from fedexp.data.partition import save_partition
from fedexp.engines.stored_models import FromStoredModels
from fedexp.evaluation.evaluate import Evaluator
from fedexp.running.costs import Meter, costs
from fedexp.running.experiment import Experiment, data_content
from fedexp.running.peak_memory import peak_memory, reset_peak
from fedexp.running.profile import PROFILE, Profile
from fedexp.running.remarks import remarks
from fedexp.running.run_engine import RunEngine, first_numerics
from fedexp.running.steps import Recorded, reached, steps
from fedexp.running.stored_models import check_clients
from fedexp.running.summary import summarise
from fedexp.runtime.allocator import keep_freed_memory
from fedexp.runtime.numerics import applied
from fedexp.storage.checkpoint import Checkpoint
from fedexp.storage.environment import environment
from fedexp.storage.files import read_json, read_jsonl, refused, write_json, write_text
from fedexp.storage.model_folder import Clients, digests, save_outcome
from fedexp.storage.run_folder import Journal, RunFolder, trace_rows
from fedexp.storage.sources import keep_sources
from fedexp.storage.tensors import load_tree, remember
from fedexp.tracking.curve import draw_curve
from fedexp.tracking.feed import Feed
from fedexp.tracking.logger import Logger, RunInfo, title
from fedexp.tracking.outlet import lasting_output
from fedexp.tracking.pictures import draw_pictures
from fedexp.tracking.progress import Progress, named


class Interrupted(BaseException):
    """SIGTERM or Ctrl-C; the run is left resumable."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.exit_code = 128 + signum


@lasting_output()
def execute(
    config: Mapping[str, Any],
    *,
    group: str | None = None,
    name: str = "",
    say: Callable[[str], None] | None = print,
) -> dict[str, Any]:
    """Run a resolved config, resume it, or return its stored result.

    Args:
        config: as `fedexp.config.compose.compose` returns it.
        group: the sweep this run belongs to, for trackers.
        name: begins every line that is shown, where other runs show theirs at the same time.
        say: where notes for the user go; None: neither notes nor progress are shown.

    Returns:
        the content of ``result.json``.
    """
    began = time.perf_counter()
    folder = RunFolder.of(config)
    addressed = time.perf_counter() - began
    note = _Notes(folder.path / "run.log", say, name)
    announce = note.show
    try:
        folder.acquire(config["on_running"], announce)
    except StorageError:  # a folder that may only be read, say
        if (stored := _reusable(config, folder)) is None:
            raise
        announce(f"already done: {folder.path}")
        return stored
    try:
        if (stored := _reusable(config, folder)) is not None:
            folder.set_done()
            announce(f"already done: {folder.path}")
            return stored
        if not config["reuse"] and (aside := folder.set_aside()) is not None:
            announce(f"reuse=false: earlier files moved to {aside}")
        with terminable():
            return _Run(config, folder, group, note, {"setup": addressed}).execute()
    finally:
        folder.release()


def _reusable(config: Mapping[str, Any], folder: RunFolder) -> dict[str, Any] | None:
    """The folder's result, if it may stand for the run."""
    if not config["reuse"] or (stored := folder.result()) is None:
        return None
    _check_data(config, stored)
    return {**stored, "folder": str(folder.path)}  # it may have been moved


def _check_data(config: Mapping[str, Any], stored: Mapping[str, Any]) -> None:
    """A stored result stands for the data it was made of; where the config does not pin them, look at those that are there."""
    present = data_content(config)
    if present is None:
        return
    expected = [stored["partition"][name] for name in ("data_sha256", "proxy_sha256")]
    if any(
        sha256 not in (None, its_own) for sha256, its_own in zip(present, expected, strict=True)
    ):
        raise StorageError(
            "the stored result of this config was made of other data",
            where=str(config["data_root"]),
            expected=f"data_sha256 {expected}",
            got=f"data_sha256 {present}",
            do="give the other data another output_root, or run afresh with reuse=false",
        )


class _Notes:
    """What the user is shown besides results; all of it is in the run's log as well.

    Args:
        say: shows a line; None: nothing is shown.
        name: what every line begins with.
    """

    def __init__(self, log: Path, say: Callable[[str], None] | None, name: str = "") -> None:
        self._log, self._say, self.name = log, say or (lambda text: None), name
        self.shown = say is not None

    def show(self, text: str) -> None:
        """Without a line in the log, which may not be ours to write."""
        self._say(named(self.name, text))

    def __call__(self, text: str) -> None:
        self.show(text)
        with contextlib.suppress(OSError), self._log.open("a") as log:  # it was said
            log.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {text}\n")

    @contextlib.contextmanager
    def through(self, say: Callable[[str], None]) -> Iterator[None]:
        """Meanwhile `say` shows them: a progress bar must not be written across."""
        before, self._say = self._say, say
        try:
            yield
        finally:
            self._say = before


@dataclass(eq=False)
class _Run:
    """One execution of a run whose folder is locked.

    Args:
        raw: the resolved config; group: the sweep it belongs to.
        seconds: outside steps, by phase.
    """

    raw: Mapping[str, Any]
    folder: RunFolder
    group: str | None
    note: _Notes
    seconds: dict[str, float]

    def execute(self) -> dict[str, Any]:
        """The content of ``result.json``; the folder's status says how it ended."""
        attempt = self.folder.attempt + 1
        try:
            self.folder.set_status("running", attempt=attempt)
            return self._execute(attempt)
        except (KeyboardInterrupt, Interrupted):
            if self.folder.result() is None:
                self.folder.set_ended("interrupted")
            else:
                self.folder.set_done()
            raise
        except BaseException as error:
            trace = f"the traceback is in {self.folder.path / 'error.txt'}"
            told = refused(error, self.folder.path) or user_code.told(error, trace) or error
            text = str(told) if isinstance(told, FedexpError) else f"{type(told).__name__}: {told}"
            with contextlib.suppress(OSError):  # of a full disk, say: then the status has to do
                write_text(
                    self.folder.path / "error.txt", "".join(traceback.format_exception(error))
                )
            self.folder.set_ended(
                "failed", error=text.splitlines()[0] if text else type(told).__name__
            )
            if told is error:
                raise
            raise told from error

    def _execute(self, attempt: int) -> dict[str, Any]:
        """Set up, go through the steps that are left, write the result."""
        began = time.perf_counter()
        path = self.folder.path
        (path / "error.txt").unlink(missing_ok=True)
        write_text(path / "config.yaml", _yaml(self.raw))
        write_json(path / "environment.json", environment())
        keep_sources(self.raw, path)
        experiment = Experiment.of(self.raw)
        for remark in remarks(experiment):
            self.note(remark)
        numerics = first_numerics(experiment.config, self.folder, self.note)
        keep_freed_memory()
        with contextlib.ExitStack() as stack:
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(numerics.threads)
            stack.enter_context(applied(numerics))
            device = torch.device(numerics.device)
            reset_peak(device)
            data = self._load(experiment, device)
            env = experiment.env(data, device)
            checkpoint = Checkpoint(path, device, experiment.config.state.memory_gb)
            env = replace(env, models=checkpoint.models)
            snapshot, mark = checkpoint.load() or (None, None)
            stack.callback(checkpoint.close)
            journal = stack.enter_context(contextlib.closing(Journal(path, mark, attempt)))
            if snapshot is None:
                with experiment.server_work("the server's first state"):
                    snapshot = Snapshot(
                        0, experiment.aggregator.init(env), checkpoint.client_states
                    )
            self._check_stored_models(experiment, env, data, snapshot)
            engine = RunEngine(experiment, self.raw, self.folder, numerics, self.note)
            stack.callback(engine.close)
            feed = self._feed(experiment, journal)
            self.seconds["setup"] += time.perf_counter() - began
            status, result = "failed", None
            try:
                snapshot = self._steps(
                    experiment, env, data, engine, journal, checkpoint, snapshot, feed
                )
                result = self._finish(
                    experiment, data, journal, engine, experiment.aggregator.outcome(snapshot.state)
                )
                status = "done"
            except (KeyboardInterrupt, Interrupted):
                status = "interrupted"
                raise
            finally:
                feed.close(status, result)
        return result

    def _load(self, experiment: Experiment, device: torch.device) -> FederatedData:
        """What is trained on. The split is an artifact of the run; a resumed run must have the same one."""
        data = experiment.load(device)
        facts = {
            "partition": data.partition.sha256,
            "data": data.fingerprint,
            "proxy": data.proxy_fingerprint,
        }
        stored = self.folder.once("data.json", facts)
        if stored != facts:
            raise StorageError(
                "the data or their split are not those this run began with",
                where=str(self.folder.path / "data.json"),
                expected=stored,
                got=facts,
                do="restore the data under data_root, or start afresh with reuse=false",
            )
        path = self.folder.path / "partition.safetensors"
        if not path.exists():
            save_partition(data.partition, path)
        return experiment.prepare(data, self.note)

    def _check_stored_models(
        self, experiment: Experiment, env: Env, data: FederatedData, snapshot: Snapshot
    ) -> None:
        """Before the first step, every client that takes part in it must have its model."""
        if experiment.stored_models is None or snapshot.step:
            return
        warning = check_clients(
            experiment.stored_models, next_jobs(experiment.aggregator, env, snapshot), data
        )
        if warning:
            self.note(warning)

    def _steps(
        self,
        experiment: Experiment,
        env: Env,
        data: FederatedData,
        engine: RunEngine,
        journal: Journal,
        checkpoint: Checkpoint,
        snapshot: Snapshot,
        feed: Feed,
    ) -> Snapshot:
        """Go through the steps that follow `snapshot`; record and checkpoint each. Returns the last snapshot."""
        config = experiment.config
        if reached(experiment, journal.rows):
            return snapshot
        here = env_of(experiment.aggregator, env, snapshot)
        if snapshot.step:
            within = f", step {here.step}" if here.step else ""
            self.note(f"resuming after round {here.round}{within} of {env.rounds}")
        every, unit = config.checkpoint.parsed()
        saver, meter = _Saver(checkpoint, journal, snapshot), Meter(engine)
        engine.secure = saver.save
        with contextlib.ExitStack() as stack:
            progress = stack.enter_context(
                Progress(title(self.raw), env.rounds, here.round, self.note.shown, self.note.name)
            )
            stack.enter_context(self.note.through(progress.note))
            trainer: Engine = (
                engine
                if experiment.stored_models is None
                else FromStoredModels(engine, experiment.stored_models)
            )
            if config.profile:
                profile = stack.enter_context(
                    Profile(self.folder.path / "trace.json.gz", env.device, self.note)
                )
                trainer = profile.watch(trainer)
            try:
                for step in steps(experiment, env, data, trainer, snapshot, progress.client):
                    snapshot = step.after
                    facts: dict[str, Any] = meter.step(int(step.row.get("local_steps", 0)))
                    began = time.perf_counter()
                    with phase("log"):
                        self._store_trace(step)
                        if step.ends_round:
                            at = env.at(step.row["round"] - 1, step.within)
                            grids = experiment.aggregator.pictures(snapshot.state, at)
                            draw_pictures(grids, self.folder.path, snapshot.step)
                        journal.append(step.row)
                        saver.note(step)
                        feed.log(step.row)
                        progress.step(
                            step.row, experiment.headline, None if step.ends_round else step.within
                        )
                    logged = time.perf_counter()
                    if step.ends_run or saver.waited(unit) >= every:
                        with phase("checkpoint"):
                            if every < math.inf:
                                saver.save()
                            done = step.row["round"] if step.ends_round else step.row["round"] - 1
                            self.folder.set_status("running", round=done, rounds=env.rounds)
                        facts["peak_memory"] = peak_memory(env.device)
                    saved = time.perf_counter()
                    settling = engine.settling_seconds()
                    self.seconds["setup"] += settling
                    seconds = {**step.seconds, "train": step.seconds["train"] - settling}
                    seconds |= {"log": logged - began, "checkpoint": saved - logged}
                    journal.time(step.row["round"], snapshot.step, seconds, **facts)
            except (KeyboardInterrupt, Interrupted):
                saver.save()
                raise
        return snapshot

    def _store_trace(self, step: Recorded) -> None:
        """A file a round, iterations by their number: a step that is executed again after a crash leaves the same files."""
        folder, name = self.folder.path / "trace", str(step.row["round"])
        if step.traced.rows:
            path = folder / f"{name}.json"
            rows = {row["iteration"]: row for row in [*trace_rows(path), *step.traced.rows]}
            write_json(path, {"rows": list(rows.values())}, seal=True)
        if step.traced.weights:
            path = folder / f"{name}.safetensors"
            earlier = load_tree(path, torch.device("cpu"))[0] if path.exists() else {}
            remember(path, {**earlier, **step.traced.weights})

    def _finish(
        self,
        experiment: Experiment,
        data: FederatedData,
        journal: Journal,
        engine: RunEngine,
        outcome: Outcome,
    ) -> dict[str, Any]:
        """Write the outcome and the result; ``done`` is the last thing that happens."""
        began = time.perf_counter()
        path = self.folder.path
        config = experiment.config
        paths = sorted((path / "trace").glob("*.json"), key=lambda path: int(path.stem))
        traced = [{"round": int(path.stem), **row} for path in paths for row in trace_rows(path)]
        summary = summarise(journal.rows, experiment, traced)
        images = experiment.dataset  # `data` may be their features, which are not normalised
        save_outcome(
            outcome, Clients.of(outcome, config.clients, data, images.mean, images.std), path
        )
        if journal.rows:
            draw_curve(journal.rows, path / "curve.png", title(self.raw))
        self.seconds["log"] = time.perf_counter() - began
        peak = peak_memory(torch.device(engine.numerics.device))
        result = {
            "status": "done",
            "fedexp_version": __version__,
            "method": config.method,
            "choices": self.raw["choices"],
            "overrides": self.raw["overrides"],
            **summary,
            **costs(read_jsonl(path / "timing.jsonl"), self.seconds, peak),
            "memory_probe": engine.memory_probe,
            "bytes": {
                k: sum(row.get(f"bytes/{k}", 0) for row in journal.rows) for k in ("up", "down")
            },
            "local_steps": sum(row.get("local_steps", 0) for row in journal.rows),
            "partition": {
                "sha256": data.partition.sha256,
                "clients": data.partition.num_clients,
                "data_sha256": data.fingerprint,
                "proxy_sha256": data.proxy_fingerprint,
                **data.partition.info,
            },
            "test_data_in_training": data.test_data_in_training,
            "metrics_sha256": journal.mark[1],
            "models_sha256": digests(path),
            "hashes": self.folder.hashes,
            "numerics": asdict(engine.numerics),
            "engine_notes": engine.notes,
            "environment": read_json(path / "environment.json"),
            "attempts": self.folder.attempt,
            "folder": str(path),
        }
        if outcome.kind == "local":
            evaluator = Evaluator(experiment.task, config.eval.batch_size)
            result["per_client"] = evaluator.each(outcome, data.test, "test")
        if (profiled := read_json(path / PROFILE)) is not None:
            result["profile"] = profiled
        write_json(path / "result.json", result, seal=True)
        self.folder.set_done()
        return result

    def _feed(self, experiment: Experiment, journal: Journal) -> Feed:
        logger = build(Logger, self.raw["logger"], "logger")  # type: ignore[type-abstract]
        feed = Feed(logger, warn=self.note)
        info = RunInfo.of(
            self.raw, self.folder.hashes, self.folder.path, self.group, resumed=bool(journal.rows)
        )
        feed.open(info, list(journal.rows))
        return feed


def _yaml(config: Mapping[str, Any]) -> str:
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(dict(config)))


class _Saver:
    """What is recorded but not yet in the checkpoint."""

    def __init__(self, checkpoint: Checkpoint, journal: Journal, snapshot: Snapshot) -> None:
        self._checkpoint, self._journal = checkpoint, journal
        self._pending: tuple[Snapshot, tuple[int, str]] | None = None
        self._saved_step, self._saved_at = snapshot.step, time.monotonic()

    def note(self, step: Recorded) -> None:
        """A step whose row is in the journal."""
        self._pending = step.after, self._journal.mark

    def waited(self, unit: str) -> float:
        """Steps or seconds since the last save."""
        if unit == "seconds":
            return time.monotonic() - self._saved_at
        return self._pending[0].step - self._saved_step if self._pending else 0

    def save(self) -> None:
        if self._pending is None:
            return
        snapshot, mark = self._pending
        self._journal.secure()
        self._checkpoint.save(snapshot, set(), mark)  # its client states lie there
        self._pending = None
        self._saved_step, self._saved_at = snapshot.step, time.monotonic()


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Turn SIGTERM into `Interrupted` meanwhile (Ctrl-C already is KeyboardInterrupt)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(signum: int, frame: object) -> None:
        raise Interrupted(signum)

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
