"""One run, from resolved config to stored result: lock, resume, execute, evaluate, record."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from fedexp.core.build import build
from fedexp.core.data import FederatedData
from fedexp.core.engine import Engine, Trial, describe
from fedexp.core.env import Env
from fedexp.core.errors import FedexpError, StorageError
from fedexp.core.jobs import ClientJob
from fedexp.core.numerics import Numerics
from fedexp.core.outcome import Outcome
from fedexp.core.phases import phase
from fedexp.core.runner import Snapshot, next_jobs
from fedexp.data.partition import save_partition
from fedexp.engines.allocator import keep_freed_memory
from fedexp.engines.choice import ChoiceStore
from fedexp.engines.exactness import applied
from fedexp.engines.memo import Memo
from fedexp.engines.shares import thread_budget
from fedexp.engines.stored_models import FromStoredModels
from fedexp.evaluation.evaluate import Evaluator
from fedexp.running.costs import Meter, costs
from fedexp.running.experiment import Experiment, check_device, choose_numerics
from fedexp.running.peak_memory import peak_memory, probe_memory, reset_peak
from fedexp.running.profile import Profile
from fedexp.running.rounds import Round, reached, rounds
from fedexp.running.summary import summarise
from fedexp.storage.checkpoint import Checkpoint
from fedexp.storage.environment import environment
from fedexp.storage.files import read_json, read_jsonl, write_json, write_text
from fedexp.storage.identity import code_hash, config_hash, training_code_hash
from fedexp.storage.model_folder import Clients, save_outcome
from fedexp.storage.run_folder import Journal, RunFolder, address
from fedexp.storage.tensors import save_tree
from fedexp.tracking.curve import draw_curve
from fedexp.tracking.feed import Feed
from fedexp.tracking.logger import Logger, RunInfo
from fedexp.tracking.progress import Progress


class Interrupted(BaseException):
    """SIGTERM or Ctrl-C; the run is left resumable."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.exit_code = 128 + signum


def execute(
    config: Mapping[str, Any], *, group: str | None = None, say: Callable[[str], None] | None = print
) -> dict[str, Any]:
    """Run a resolved config, resume it, or return its stored result.

    Args:
        config: as `fedexp.config.compose.compose` returns it.
        group: the sweep this run belongs to, for trackers.
        say: where notes for the user go; None: neither notes nor progress are shown.

    Returns:
        the content of ``result.json``.
    """
    began = time.perf_counter()
    shown = say is not None
    say = say or (lambda text: None)
    folder = RunFolder(address(config))
    addressed = time.perf_counter() - began
    own = config["reuse"]
    folder.acquire(config["on_running"], say)
    try:
        if own and (stored := folder.result()) is not None:
            folder.set_done()
            _check_data(config, stored)
            say(f"already done: {folder.path}")
            return {**stored, "folder": str(folder.path)}  # it may have been moved
        if not own and (aside := folder.set_aside()) is not None:
            say(f"reuse=false: earlier files moved to {aside}")
        with terminable():
            return _Run(config, folder, group, say, addressed, shown).execute()
    finally:
        folder.release()


def _check_data(config: Mapping[str, Any], stored: Mapping[str, Any]) -> None:
    """A stored result stands for the data it was made of; where the config does not pin them, look at them."""
    experiment = Experiment.of(config)
    if experiment.dataset.pinned:
        return
    found = experiment.load(torch.device("cpu")).fingerprint
    expected = stored["partition"]["data_sha256"]
    if found != expected:
        raise StorageError(
            "the stored result of this config was made of other data",
            where=str(config["data_root"]),
            expected=f"data_sha256 {expected}",
            got=f"data_sha256 {found}",
            do="give the other data another output_root, or run afresh with reuse=false",
        )


class _Run:
    """The pieces of one execution. Lives only while its folder is locked."""

    def __init__(
        self,
        config: Mapping[str, Any],
        folder: RunFolder,
        group: str | None,
        say: Callable[[str], None],
        setup: float,
        shown: bool,
    ) -> None:
        self.shown = shown  # is progress?
        self.raw, self.folder, self.group, self._say = config, folder, group, say
        self.attempt = folder.attempt + 1
        self.seconds = {"setup": setup}
        self.memory_probe: dict[str, Any] | None = None
        self.profile: Profile | None = None

    def note(self, text: str) -> None:
        """Tell the user and the run's log."""
        self._say(text)
        with (self.folder.path / "run.log").open("a") as log:
            log.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {text}\n")

    def execute(self) -> dict[str, Any]:
        try:
            self.folder.set_status("running", attempt=self.attempt)
            return self._execute()
        except (KeyboardInterrupt, Interrupted):
            if self.folder.result() is None:
                self.folder.set_status("interrupted")
            else:
                self.folder.set_done()
            raise
        except BaseException as error:
            text = str(error) if isinstance(error, FedexpError) else f"{type(error).__name__}: {error}"
            write_text(self.folder.path / "error.txt", "".join(traceback.format_exception(error)))
            self.folder.set_status("failed", error=text.splitlines()[0] if text else type(error).__name__)
            raise

    def _execute(self) -> dict[str, Any]:
        began = time.perf_counter()
        path = self.folder.path
        (path / "error.txt").unlink(missing_ok=True)
        write_text(path / "config.yaml", _yaml(self.raw))
        self.environment = environment()
        write_json(path / "environment.json", self.environment)
        experiment = Experiment.of(self.raw)
        numerics = self._stored_numerics(experiment)
        budget = thread_budget(experiment.config.threads)
        keep_freed_memory()
        with contextlib.ExitStack() as stack:
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(numerics.threads)
            stack.enter_context(applied(numerics))
            device = torch.device(numerics.device)
            reset_peak(device)
            data = self._load(experiment, device)
            env = experiment.env(data, device)
            checkpoint = Checkpoint(path, device, experiment.config.client_state.memory_gb)
            snapshot, offset = checkpoint.load() or (None, 0)
            stack.callback(checkpoint.close)
            journal = Journal(path, offset, self.attempt)
            if snapshot is not None:
                self.note(f"resuming after round {snapshot.step} of {env.rounds}")
            snapshot = snapshot or Snapshot(0, experiment.aggregator.init(env), checkpoint.client_states)
            over = experiment.aggregator.done(snapshot.state, env.at(snapshot.step)) or reached(
                experiment, journal.rows
            )
            jobs = [] if over else self._first_jobs(experiment, env, data, snapshot)
            trial = Trial(jobs, data, env.rounds - snapshot.step, budget, numerics, self.note)
            engine = self._engine(experiment, trial)
            stack.callback(engine.close)
            torch.set_num_threads(self.numerics.threads)
            engine.open(self.numerics, budget)
            if not over:
                self._probe(experiment, trial, engine, snapshot)
            feed = self._feed(experiment, journal)
            self.seconds["setup"] += time.perf_counter() - began
            status = "failed"
            try:
                engine = self._trained_before(experiment, engine)
                outcome = self._loop(experiment, env, data, engine, journal, checkpoint, snapshot, feed)
                result = self._finish(experiment, data, journal, outcome)
                status = "done"
            except (KeyboardInterrupt, Interrupted):
                status = "interrupted"
                raise
            finally:
                journal.close()
                feed.close(status, result if status == "done" else None)
        return result

    def _stored_numerics(self, experiment: Experiment) -> Numerics:
        """Those of the first launch, or, at a first launch, those that the config asks for, the engine still open."""
        wanted = choose_numerics(experiment.config)
        stored = read_json(self.folder.path / "numerics.json")
        if stored is None:
            return wanted
        first = Numerics(**stored)
        check_device(first.device)
        asked = {k: v for k, v in asdict(wanted).items() if k != "engine" and v != stored[k]}
        if asked:
            kept = {k: stored[k] for k in asked}
            self.note(f"resuming with the numerics of the first launch: {kept} (asked for now: {asked})")
        return first

    def _engine(self, experiment: Experiment, trial: Trial) -> Engine:
        """The engine with every choice made; fixes `self.numerics`."""
        wanted, budget = experiment.engine, trial.threads
        if trial.numerics.engine:
            self.numerics = trial.numerics
            computing = build(Engine, self.numerics.engine, "numerics.engine")  # type: ignore[type-abstract]
            return wanted.adopt(computing, self.numerics.threads, budget)
        root = Path(experiment.config.output_root).expanduser().resolve() / "engines"
        engine = ChoiceStore(root, training_code_hash(self.raw), not experiment.config.reuse).settle(wanted, trial)
        numerics = replace(trial.numerics, engine=describe(engine.computing), threads=engine.threads_each(budget))
        self.numerics = Numerics(**self.folder.once("numerics.json", asdict(numerics)))
        return engine

    def _first_jobs(self, experiment: Experiment, env: Env, data: FederatedData, snapshot: Snapshot) -> list[ClientJob]:
        """What an engine may be tried on: the coming step's jobs, none where nothing will be trained."""
        jobs = next_jobs(experiment.aggregator, env, snapshot)
        if experiment.stored_models is None or snapshot.step:
            return jobs
        told = experiment.stored_models.check_clients(jobs, data)
        if told:
            self.note(told)
        return jobs if env.rounds > 1 else []

    def _probe(self, experiment: Experiment, trial: Trial, engine: Engine, snapshot: Snapshot) -> None:
        """Say what the peak of memory will be before the rounds begin."""
        models = experiment.aggregator.outcome(snapshot.state).models
        model = models[0] if models else None
        batch, device = experiment.config.eval.batch_size, torch.device(self.numerics.device)
        probe = probe_memory(list(trial.jobs), trial.data, engine, experiment.task, model, batch, device)
        self.note(probe["text"])
        self.memory_probe = probe

    def _loop(
        self,
        experiment: Experiment,
        env: Env,
        data: FederatedData,
        engine: Engine,
        journal: Journal,
        checkpoint: Checkpoint,
        snapshot: Snapshot,
        feed: Feed,
    ) -> Outcome:
        """Record and checkpoint rounds until none follows."""
        every, unit = experiment.config.checkpoint.parsed()
        saver, meter = _Saver(checkpoint, journal, snapshot), Meter(engine)
        with contextlib.ExitStack() as stack:
            progress = stack.enter_context(Progress(self._title(), env.rounds, snapshot.step, self.shown))
            self._say = progress.note
            ended = reached(experiment, journal.rows)
            if experiment.config.profile and not ended:
                self.profile = stack.enter_context(Profile(self.folder.path / "trace.json.gz", env.device, self.note))
                engine = self.profile.watch(engine)
            following = () if ended else rounds(experiment, env, data, engine, snapshot, progress.client)
            try:
                for round in following:
                    snapshot = round.after
                    facts: dict[str, Any] = meter.round(int(round.row.get("steps", 0)))
                    began = time.perf_counter()
                    with phase("log"):
                        self._store_trace(round)
                        journal.append(round.row)
                        saver.note(round)
                        feed.log(round.row)
                        progress.round(round.row, experiment.headline)
                    logged = time.perf_counter()
                    if round.last or saver.waited(unit) >= every:
                        with phase("checkpoint"):
                            saver.save()
                            self.folder.set_status("running", round=snapshot.step, rounds=env.rounds)
                        facts["peak_memory"] = peak_memory(env.device)
                    saved = time.perf_counter()
                    seconds = {**round.seconds, "log": logged - began, "checkpoint": saved - logged}
                    journal.time(snapshot.step, seconds, **facts)
            except (KeyboardInterrupt, Interrupted):
                saver.save()
                raise
        return experiment.aggregator.outcome(snapshot.state)

    def _finish(
        self, experiment: Experiment, data: FederatedData, journal: Journal, outcome: Outcome
    ) -> dict[str, Any]:
        """Write the outcome and the result; ``done`` is the last thing that happens."""
        began = time.perf_counter()
        path = self.folder.path
        config = experiment.config
        summary = summarise(journal.rows, experiment)
        save_outcome(outcome, Clients.of(outcome, config.clients, data), path)
        if journal.rows:
            draw_curve(journal.rows, path / "curve.png", self._title())
        self.seconds["log"] = time.perf_counter() - began
        peak = peak_memory(torch.device(self.numerics.device))
        result = {
            "status": "done",
            "method": config.method,
            "choices": self.raw["choices"],
            "overrides": self.raw["overrides"],
            **summary,
            **costs(read_jsonl(path / "timing.jsonl"), self.seconds, peak),
            "memory_probe": self.memory_probe,
            "bytes": {k: sum(row.get(f"bytes/{k}", 0) for row in journal.rows) for k in ("up", "down")},
            "steps": sum(row.get("steps", 0) for row in journal.rows),
            "partition": {
                "sha256": data.partition.sha256,
                "clients": data.partition.num_clients,
                "data_sha256": data.fingerprint,
                **data.partition.info,
            },
            "hashes": {"config": config_hash(self.raw), "code": code_hash(self.raw)},
            "numerics": asdict(self.numerics),
            "environment": self.environment,
            "attempts": self.attempt,
            "folder": str(path),
        }
        if outcome.kind == "per_client":
            evaluator = Evaluator(experiment.task, config.eval.batch_size)
            result["per_client"] = evaluator.each(outcome, data.test, "test")
        if self.profile is not None:
            result["profile"] = self.profile.report
        write_json(path / "result.json", result)
        self.folder.set_done()
        return result

    def _load(self, experiment: Experiment, device: torch.device) -> FederatedData:
        """What is trained on; the split is stored with the run."""
        data = experiment.load(device)
        self._store_partition(data)
        return experiment.prepare(data, self.note)

    def _store_partition(self, data: FederatedData) -> None:
        """The split is an artifact of the run; a resumed run must find the same one."""
        facts = {"partition": data.partition.sha256, "data": data.fingerprint}
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

    def _store_trace(self, round: Round) -> None:
        """A file a round, so that a round that is executed again after a crash leaves the same files."""
        folder, name = self.folder.path / "trace", str(round.after.step)
        if round.traced.rows:
            write_json(folder / f"{name}.json", round.traced.rows)
        if round.traced.weights:
            save_tree(folder / f"{name}.safetensors", round.traced.weights, {})

    def _trained_before(self, experiment: Experiment, engine: Engine) -> Engine:
        """The engine behind what need not be trained: models that are given, and the memo."""
        config = experiment.config
        if config.memo.enabled and config.reuse:
            root = Path(config.output_root).expanduser().resolve() / "memo"
            engine = Memo(engine, root, config.memo.max_gb, self.numerics, training_code_hash(self.raw))
        return engine if experiment.stored_models is None else FromStoredModels(engine, experiment.stored_models)

    def _feed(self, experiment: Experiment, journal: Journal) -> Feed:
        logger = build(Logger, self.raw["logger"], "logger")  # type: ignore[type-abstract]
        feed = Feed(logger, warn=self.note)
        choices = self.raw["choices"]
        info = RunInfo(
            id=f"{config_hash(self.raw)[:16]}{code_hash(self.raw)[:8]}",
            name=self._title(),
            group=self.group,
            config={key: value for key, value in self.raw.items() if key != "overrides"},
            folder=self.folder.path,
            tags=tuple(str(choices[key]) for key in ("method", "dataset", "partition", "model") if choices.get(key)),
            resumed=bool(journal.rows),
        )
        feed.open(info, list(journal.rows))
        return feed

    def _title(self) -> str:
        """Short overrides and the seed."""
        shown = [o for o in self.raw["overrides"] if not o.startswith(("output_root", "data_root", "logger", "hydra"))]
        if not any(o.startswith("method=") for o in shown):
            shown.insert(0, f"method={self.raw['method']}")
        if not any(o.startswith("seed=") for o in shown):
            shown.append(f"seed={self.raw['seed']}")
        return " ".join(shown)


def _yaml(config: Mapping[str, Any]) -> str:
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(dict(config)))


class _Saver:
    """What is recorded but not yet in the checkpoint."""

    def __init__(self, checkpoint: Checkpoint, journal: Journal, snapshot: Snapshot) -> None:
        self._checkpoint, self._journal = checkpoint, journal
        self._pending: tuple[Snapshot, int] | None = None
        self._changed: set[int] = set()
        self._saved_step, self._saved_at = snapshot.step, time.monotonic()

    def note(self, round: Round) -> None:
        """A round whose row is in the journal."""
        self._changed |= round.changed
        self._pending = round.after, self._journal.length

    def waited(self, unit: str) -> float:
        """Rounds or seconds since the last save."""
        if unit == "seconds":
            return time.monotonic() - self._saved_at
        return self._pending[0].step - self._saved_step if self._pending else 0

    def save(self) -> None:
        if self._pending is None:
            return
        snapshot, length = self._pending
        self._journal.secure()
        self._checkpoint.save(snapshot, self._changed, length)
        self._pending, self._changed = None, set()
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
