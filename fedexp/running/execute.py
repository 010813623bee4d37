"""Execution of one run: lock, resume, train, evaluate and record."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from fedexp import __version__
from fedexp.config.keys import StateMemory
from fedexp.core import user_code
from fedexp.core.build import build
from fedexp.core.data import FederatedData
from fedexp.core.device import free_device_memory, is_untested
from fedexp.core.engine import Engine
from fedexp.core.env import Env
from fedexp.core.errors import FedexpError, StorageError
from fedexp.core.outcome import Outcome
from fedexp.core.phases import phase
from fedexp.core.resolved_config import ResolvedConfig
from fedexp.core.runner import Snapshot, env_of, next_jobs
from fedexp.data.partition import contains_partition, save_partition
from fedexp.engines.stored_models import FromStoredModels
from fedexp.evaluation.evaluate import Evaluator
from fedexp.running.costs import Meter, costs, read_timing
from fedexp.running.experiment import Experiment
from fedexp.running.peak_memory import peak_memory, reset_peak
from fedexp.running.profile import PROFILE, NamedEngine, profiled
from fedexp.running.remarks import remarks
from fedexp.running.result_data import check_result_data
from fedexp.running.run_engine import RunEngine, first_numerics
from fedexp.running.steps import RecordedStep, has_reached_target, steps
from fedexp.running.stored_models import check_clients
from fedexp.running.summary import summarise
from fedexp.runtime.allocator import keep_freed_memory
from fedexp.runtime.numerics import use_numerics
from fedexp.storage.checkpoint import Checkpoint
from fedexp.storage.environment import environment
from fedexp.storage.files import read_json, refused, write_json, write_text
from fedexp.storage.model_folder import Clients, digests, save_outcome
from fedexp.storage.run_folder import Journal, RunFolder, trace_rows
from fedexp.storage.sources import store_sources
from fedexp.storage.tensors import check_storable, load_tree, save_sealed
from fedexp.tracking.curve import draw_curve
from fedexp.tracking.feed import Feed
from fedexp.tracking.logger import Logger, RunInfo, title
from fedexp.tracking.outlet import lasting_output, visible
from fedexp.tracking.pictures import draw_pictures
from fedexp.tracking.progress import Progress, named


class Interrupted(BaseException):
    """An interruption by SIGTERM or SIGHUP that leaves the run resumable.

    Attributes:
        exit_code: Exit code of the process, 128 plus the number of the signal.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.exit_code = 128 + signum


@lasting_output()
def execute(
    config: ResolvedConfig,
    *,
    experiment: Experiment | None = None,
    group: str | None = None,
    name: str = "",
    say: Callable[[str], None] | None = print,
    progress_metric: str = "",
) -> dict[str, Any]:
    """Run a resolved config, resume it, or return its stored result.

    Args:
        config: Config as `fedexp.config.compose.compose` returns it.
        experiment: Experiment that was already built from `config`. If None, it is
            built when the run is executed.
        group: Name of the sweep that the run belongs to. Trackers receive it.
        name: Prefix of every shown line. It distinguishes runs that show lines at the
            same time. Empty for no prefix.
        say: Function that shows a note to the user. If None, no notes and no progress
            are shown.
        progress_metric: Metric that the progress shows. The headline metric is shown
            instead if the run does not measure it.

    Returns:
        The content of ``result.json``.

    Raises:
        FedexpError: The run cannot be executed, or it failed.
    """
    began = time.perf_counter()
    folder = RunFolder.of(config)
    folder_seconds = time.perf_counter() - began
    note = _Notes(folder.path / "run.log", say, name)
    announce = note.show

    try:
        folder.acquire(config["on_running"], announce)
    except StorageError:
        # A folder that cannot be locked may still contain the result. One example is a
        # read-only folder.
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
        with interrupt_on_sigterm():
            return _Run(
                config, experiment, folder, group, note, {"setup": folder_seconds}, progress_metric
            ).execute()
    finally:
        folder.release()


def _reusable(config: ResolvedConfig, folder: RunFolder) -> dict[str, Any] | None:
    """Return the stored result of a folder, or None if the run must be executed."""
    if not config["reuse"] or (stored := folder.result()) is None:
        return None
    check_result_data([(config, stored)])
    # The folder may have been moved since the result was written.
    return {**stored, "folder": str(folder.path)}


class _Notes:
    """The messages of a run to the user, which are also written to the run's log.

    Args:
        log: Log file of the run.
        say: Function that shows a line. If None, nothing is shown.
        name: Prefix of every line.
    """

    def __init__(self, log: Path, say: Callable[[str], None] | None, name: str = "") -> None:
        self._log, self._say, self.name = log, say or (lambda text: None), name
        self.shown = say is not None

    def show(self, text: str) -> None:
        """Show a note without writing it to the log.

        Before this process has locked the folder, another process may be writing the
        log.
        """
        self._say(visible(named(self.name, text)))

    def __call__(self, text: str) -> None:
        self.show(text)
        # The note was shown already, so an error in writing the log is ignored.
        with contextlib.suppress(OSError), self._log.open("a") as log:
            log.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {text}\n")

    @contextlib.contextmanager
    def shown_by(self, say: Callable[[str], None]) -> Iterator[None]:
        """Show notes with the function `say` inside the `with` block.

        A progress bar passes its own function, which shows a note without breaking the
        bar.
        """
        before, self._say = self._say, say
        try:
            yield
        finally:
            self._say = before


@dataclass(eq=False)
class _Run:
    """One execution of a run whose folder is locked.

    Args:
        resolved: Resolved config.
        experiment: Experiment that was already built from `resolved`, or None.
        folder: Folder of the run.
        group: Sweep that the run belongs to.
        note: Callable that shows a message and writes it to the log.
        seconds: Seconds that were spent outside of steps, by phase.
        progress_metric: Metric that the progress shows. The headline metric is shown
            instead if the run does not measure it.

    Attributes:
        reached: Facts for ``status.json``: the number of finished rounds (``round``)
            and of all rounds (``rounds``). It is empty before the first step.
    """

    resolved: ResolvedConfig
    experiment: Experiment | None
    folder: RunFolder
    group: str | None
    note: _Notes
    seconds: dict[str, float]
    progress_metric: str
    reached: dict[str, int] = field(default_factory=dict, init=False)

    def execute(self) -> dict[str, Any]:
        """Execute the run and record in its folder how it ended.

        Returns:
            The content of ``result.json``.
        """
        attempt = self.folder.attempt + 1
        try:
            self.folder.set_status("running", attempt=attempt)
            return self._execute(attempt)
        except (KeyboardInterrupt, Interrupted):
            if not self._mark_done_if_finished():
                self.folder.set_ended("interrupted", **self.reached)
            raise
        except BaseException as error:
            trace = f"the traceback is in {self.folder.path / 'error.txt'}"
            described = (
                refused(error, self.folder.path) or user_code.user_code_error(error, trace) or error
            )
            text = (
                str(described)
                if isinstance(described, FedexpError)
                else f"{type(described).__name__}: {described}"
            )

            # If ``error.txt`` cannot be written, for example because the disk is full,
            # the error is recorded only in the status.
            with contextlib.suppress(OSError):
                write_text(
                    self.folder.path / "error.txt", "".join(traceback.format_exception(error))
                )

            if not self._mark_done_if_finished():
                self.folder.set_ended(
                    "failed", error=text.splitlines()[0] if text else type(described).__name__
                )
            if described is error:
                raise
            raise described from error

    def _mark_done_if_finished(self) -> bool:
        """Mark the run as done if its result was written before it was stopped.

        If the mark cannot be written, for example because the disk is full, the result
        alone says that the run is done.

        Returns:
            Whether there is a result.
        """
        try:
            if self.folder.result() is None:
                return False
        except StorageError:  # the result is damaged
            return False
        with contextlib.suppress(OSError):
            self.folder.set_done()
        return True

    def _execute(self, attempt: int) -> dict[str, Any]:
        """Set up, execute the remaining steps and write the result."""
        began = time.perf_counter()
        path = self.folder.path
        (path / "error.txt").unlink(missing_ok=True)
        write_text(path / "config.yaml", _config_text(self.resolved))
        store_sources(self.resolved.values, path)
        experiment = self.experiment or Experiment.of(self.resolved)
        for remark in remarks(experiment):
            self.note(remark)
        numerics = first_numerics(experiment.config, experiment.engine, self.folder, self.note)
        device = torch.device(numerics.device)
        write_json(path / "environment.json", environment(device))
        if is_untested(device):
            self.note(f"fedexp has never been tested on {device.type}: check results on a CPU")
        keep_freed_memory()

        with contextlib.ExitStack() as stack:
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(numerics.threads)
            stack.enter_context(use_numerics(numerics))
            reset_peak(device)
            data = self._load(experiment, device)
            env = experiment.env(data, device)
            checkpoint = Checkpoint(path, device, _memory_gb(experiment.config.state, device))
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
            engine = RunEngine(experiment, self.resolved, self.folder, numerics, self.note)
            stack.callback(engine.close)
            feed = self._feed(journal)
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
        """Load the data and prepare them for the trained networks.

        The split is stored in the run folder. A resumed run must have the same data and
        split as the first launch.
        """
        data = experiment.load(device)
        facts = {
            "partition": data.partition.sha256,
            "data": data.fingerprint,
            "proxy": data.proxy_fingerprint,
        }
        stored = self.folder.once("data.json", facts)

        if stored != facts:
            raise StorageError(
                "the data or their split are not those that this run began with",
                where=str(self.folder.path / "data.json"),
                expected=stored,
                got=facts,
                do="restore the data in data_root, or start again with reuse=false",
            )

        path = self.folder.path / "partition.safetensors"
        if path.exists() and not contains_partition(path, data.partition, data.pool_sha256):
            self.note(f"{path.name} is damaged: it is written again")
            path.unlink()
        if not path.exists():
            save_partition(data.partition, path, data.pool_sha256)
        return experiment.prepare(data, self.note)

    def _check_stored_models(
        self, experiment: Experiment, env: Env, data: FederatedData, snapshot: Snapshot
    ) -> None:
        """Check before the first step that every participant has a stored model."""
        if experiment.stored_models is None or snapshot.step:
            return
        planned = next_jobs(experiment.aggregator, env, snapshot)
        jobs = [job for job in planned if not job.drops_out]
        for note in check_clients(experiment.stored_models, jobs, data):
            self.note(note)

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
        """Execute, record and checkpoint the steps that follow `snapshot`.

        Returns:
            The last snapshot.
        """
        config = experiment.config
        if has_reached_target(experiment, journal.rows):
            return snapshot
        resumed_env = env_of(experiment.aggregator, env, snapshot)
        if snapshot.step:
            within = f", step {resumed_env.step}" if resumed_env.step else ""
            self.note(f"resuming after round {resumed_env.round}{within} of {env.rounds}")
        every, unit = config.checkpoint.parsed()
        saver, meter = _Saver(checkpoint, journal, snapshot), Meter(engine)
        engine.save_steps = saver.save

        with contextlib.ExitStack() as stack:
            progress = stack.enter_context(
                Progress(
                    title(self.resolved),
                    env.rounds,
                    resumed_env.round,
                    self.note.shown,
                    self.note.name,
                )
            )

            stack.enter_context(self.note.shown_by(progress.note))
            wanted = self.progress_metric
            metric = wanted if wanted in experiment.metric_names else experiment.headline
            trainer: Engine = (
                engine
                if experiment.stored_models is None
                else FromStoredModels(engine, experiment.stored_models)
            )

            if config.profile:
                stack.enter_context(
                    profiled(self.folder.path / "trace.json.gz", env.device, self.note)
                )
                trainer = NamedEngine(trainer)

            try:
                for step in steps(experiment, env, data, trainer, snapshot, progress.client):
                    snapshot = step.after
                    facts: dict[str, Any] = meter.step(int(step.row.get("local_steps", 0)))
                    began = time.perf_counter()

                    with phase("log"):
                        self._store_trace(step)
                        if step.ends_round:
                            grids = experiment.aggregator.pictures(
                                snapshot.state, env.at(step.row["round"] - 1, step.within)
                            )
                            draw_pictures(grids, self.folder.path, snapshot.step)
                        journal.append(step.row)
                        saver.note(step)
                        done = step.row["round"] if step.ends_round else step.row["round"] - 1
                        self.reached = {"round": done, "rounds": env.rounds}
                        feed.log(step.row)
                        progress.step(step.row, metric, None if step.ends_round else step.within)

                    logged = time.perf_counter()
                    if step.ends_run or saver.since_last_save(unit) >= every:
                        with phase("checkpoint"):
                            if every < math.inf:
                                saver.save()
                            self.folder.set_status("running", **self.reached)
                        facts["peak_memory"] = peak_memory(env.device)

                    saved = time.perf_counter()
                    choosing = engine.choosing_seconds()
                    self.seconds["setup"] += choosing
                    seconds = {**step.seconds, "train": step.seconds["train"] - choosing}
                    seconds |= {"log": logged - began, "checkpoint": saved - logged}
                    journal.time(step.row["round"], snapshot.step, seconds, **facts)
            except (KeyboardInterrupt, Interrupted):
                saver.save()
                raise

        return snapshot

    def _store_trace(self, step: RecordedStep) -> None:
        """Store the trace of a step in the files of its round.

        The values of an iteration replace stored values of the same iteration. A step
        that is executed again after a crash therefore produces the same files.
        """
        folder, name = self.folder.path / "trace", str(step.row["round"])
        if step.traced.rows:
            path = folder / f"{name}.json"
            rows = {row["iteration"]: row for row in [*trace_rows(path), *step.traced.rows]}
            write_json(path, {"rows": list(rows.values())}, seal=True)

        if step.traced.weights:
            path = folder / f"{name}.safetensors"
            earlier = load_tree(path, torch.device("cpu"))[0] if path.exists() else {}
            save_sealed(path, {**earlier, **step.traced.weights})

    def _finish(
        self,
        experiment: Experiment,
        data: FederatedData,
        journal: Journal,
        engine: RunEngine,
        outcome: Outcome,
    ) -> dict[str, Any]:
        """Write the final models and ``result.json``, and then the status ``done``."""
        began = time.perf_counter()
        path = self.folder.path
        config = experiment.config
        paths = sorted((path / "trace").glob("*.json"), key=lambda path: int(path.stem))
        traced = [{"round": int(path.stem), **row} for path in paths for row in trace_rows(path)]
        summary = summarise(journal.rows, experiment, traced)
        # `data` may contain features instead of images. The normalisation of the images
        # is therefore taken from the data set.
        images = experiment.dataset
        clients = Clients.of(outcome, config.clients, data, images.mean, images.std)
        if experiment.stored_models is not None and clients is not None:
            clients = experiment.stored_models.described(clients, data)
        save_outcome(outcome, clients, path)
        stored = time.perf_counter()
        self.seconds["log"] = stored - began
        if journal.rows:
            draw_curve(journal.rows, path / "curve.png", title(self.resolved))
        self.seconds["curve"] = time.perf_counter() - stored
        peak = peak_memory(torch.device(engine.numerics.device))
        timing, lost = read_timing(path / "timing.jsonl")
        if lost:
            self.note(f"timing.jsonl is damaged: the result lacks the costs of {lost} rows")
        result = {
            "status": "done",
            "fedexp_version": __version__,
            "method": config.method,
            "choices": self.resolved.choices,
            "overrides": self.resolved.overrides,
            **summary,
            **costs(timing, self.seconds, peak),
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
            "config_sha256": hashlib.sha256(_config_text(self.resolved).encode()).hexdigest(),
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
            result["per_client"] = Evaluator(experiment.task, config.eval.batch_size).each(
                outcome, data.test, "test"
            )
        if (profile := read_json(path / PROFILE)) is not None:
            result["profile"] = profile
        write_json(path / "result.json", result, seal=True)
        self.folder.set_done()

        return result

    def _feed(self, journal: Journal) -> Feed:
        feed = Feed(
            build(Logger, self.resolved["logger"], "logger"),  # type: ignore[type-abstract]
            warn=self.note,
        )
        feed.open(
            RunInfo.of(
                self.resolved,
                self.folder.hashes,
                self.folder.path,
                self.group,
                resumed=bool(journal.rows),
            ),
            list(journal.rows),
        )
        return feed


def _memory_gb(state: StateMemory, device: torch.device) -> float:
    """Return the GB that client states and stored models may occupy on the device."""
    if state.memory_gb != "auto":
        return state.memory_gb
    free = free_device_memory(device)
    return 1.0 if free is None else free / 4e9


def _config_text(config: ResolvedConfig) -> str:
    """Return the text of ``config.yaml``."""
    return str(OmegaConf.to_yaml(OmegaConf.create(config.to_stored())))


class _Saver:
    """A writer of checkpoints that remembers the latest recorded step.

    Args:
        checkpoint: Checkpoint of the run.
        journal: Journal of the run.
        snapshot: Snapshot that the run starts from.
    """

    def __init__(self, checkpoint: Checkpoint, journal: Journal, snapshot: Snapshot) -> None:
        self._checkpoint, self._journal = checkpoint, journal
        self._pending: tuple[Snapshot, tuple[int, str]] | None = None
        self._saved_step, self._saved_at = snapshot.step, time.monotonic()
        self._is_checked = False

    def note(self, step: RecordedStep) -> None:
        """Remember a step whose row is in the journal, for the next save.

        Raises:
            StorageError: The state of the process's first step cannot be stored.
                Without this check, it would be found only at the first save.
        """
        if not self._is_checked:
            check_storable(step.after.state)
            self._is_checked = True
        self._pending = step.after, self._journal.mark

    def since_last_save(self, unit: str) -> float:
        """Return the number of steps, or of seconds, since the last save."""
        if unit == "seconds":
            return time.monotonic() - self._saved_at
        return self._pending[0].step - self._saved_step if self._pending else 0

    def save(self) -> None:
        if self._pending is None:
            return
        snapshot, mark = self._pending
        self._journal.sync()
        # The run's client states are stored in the checkpoint's own `client_states`, so
        # no changed clients need to be copied.
        self._checkpoint.save(snapshot, set(), mark)
        self._pending = None
        self._saved_step, self._saved_at = snapshot.step, time.monotonic()


@contextlib.contextmanager
def interrupt_on_sigterm() -> Iterator[None]:
    """Raise `Interrupted` on SIGTERM or SIGHUP inside the `with` block.

    SIGHUP is sent when the terminal is closed. If it was ignored before (``nohup``), it
    stays ignored. Ctrl-C raises KeyboardInterrupt, inside and outside the block. In a
    thread other than the main thread, nothing is changed.

    Python ignores an exception that a signal handler raises inside a destructor or the
    callback of a weak reference. The signal is then sent again, so that it is not lost.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(signum: int, frame: object) -> None:
        # A closed terminal may send SIGHUP twice. The second signal must not interrupt
        # the saving of the run.
        if signum == signal.SIGHUP:
            signal.signal(signum, signal.SIG_IGN)
        raise Interrupted(signum)

    def send_again(unraisable: sys.UnraisableHookArgs) -> None:
        match unraisable.exc_value:
            case Interrupted() as error:
                signum = error.exit_code - 128
                signal.signal(signum, interrupt)
            case KeyboardInterrupt():
                signum = signal.SIGINT
            case _:
                previous_hook(unraisable)
                return
        # Python ignores exceptions inside this hook. The signal is therefore sent again
        # a moment later, and its handler raises the exception outside the hook.
        threading.Timer(0.01, os.kill, (os.getpid(), signum)).start()

    previous_hook = sys.unraisablehook
    sys.unraisablehook = send_again
    previous = {
        signum: signal.signal(signum, interrupt)
        for signum in (signal.SIGTERM, signal.SIGHUP)
        if signum == signal.SIGTERM or signal.getsignal(signum) != signal.SIG_IGN
    }
    try:
        yield
    finally:
        sys.unraisablehook = previous_hook
        for signum, handler in previous.items():
            signal.signal(signum, handler)
