"""The engine of a run.

The engine is chosen when the first jobs arrive. The choice is stored in the run's
numerics, which are the settings besides config and code that affect the bits of
results.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, replace
from functools import cache
from typing import Any

import torch

from fedexp.config.keys import Config
from fedexp.core.build import build
from fedexp.core.data import FederatedData
from fedexp.core.device import check_device
from fedexp.core.engine import Engine, EngineContext, describe, execute
from fedexp.core.jobs import ClientJob, ClientResult
from fedexp.core.numerics import Numerics
from fedexp.core.resolved_config import ResolvedConfig
from fedexp.engines.client_cache import ClientCache
from fedexp.running.experiment import Experiment, choose_numerics
from fedexp.running.peak_memory import is_near_limit, probe_memory
from fedexp.runtime.resources import num_threads_of_run
from fedexp.storage.files import damaged, write_json
from fedexp.storage.identity import training_hash
from fedexp.storage.run_folder import RunFolder

_FILE = "numerics.json"


def first_numerics(
    config: Config, engine: Engine, folder: RunFolder, note: Callable[[str], None]
) -> Numerics:
    """Return the numerics of the run's first launch, which a resume uses again.

    The first launch stores the numerics of the config without an engine. The engine is
    added when it is chosen. The number of threads is then that of each process.

    Args:
        config: Config of the run.
        engine: Engine of the config.
        folder: Folder of the run.
        note: Callback that shows the user a line.
    """
    wanted = choose_numerics(config)
    stored = folder.once(_FILE, asdict(wanted))
    try:
        first = Numerics(**stored)
    except TypeError as error:
        raise damaged(folder.path / _FILE, str(error)) from error

    check_device(first.device, first.dtype)
    resumed = asdict(first)
    if first.engine:
        # An engine that is restored as another one, such as `auto`, asks for no number
        # of threads itself.
        restored = _restored(engine, first, wanted.threads)
        asking = engine if type(engine) is type(restored) else restored
        wanted = replace(wanted, threads=asking.threads_each(wanted.threads))
    asked = {k: v for k, v in asdict(wanted).items() if k != "engine" and v != resumed[k]}
    if asked:
        chosen = {k: resumed[k] for k in asked}
        note(f"resuming with the numerics of the first launch: {chosen} (asked for now: {asked})")

    return first


def _restored(wanted: Engine, first: Numerics, num_threads: int) -> Engine:
    """Return the engine that continues a run.

    Args:
        wanted: Engine of the config.
        first: Numerics of the first launch, with its engine.
        num_threads: Number of threads that all processes share after the resume.
    """
    computing = build(Engine, first.engine, "numerics.engine")  # type: ignore[type-abstract]
    return wanted.restore(computing, first.threads, num_threads)


class RunEngine(Engine):
    """An engine that passes its jobs to an engine that it chooses for the run.

    When the first jobs arrive, it chooses the engine as the config asks and opens it.
    If the client cache (config key ``memo``) is enabled, a `ClientCache` wraps the
    chosen engine.

    Attributes:
        save_steps: Function that saves the steps so far. It is called before the chosen
            engine is stored, because storing the engine changes the numerics.
        numerics: Numerics that are stored in the run's folder. They contain the engine
            after it has been chosen.
        notes: Messages of the engine about its choices and fallbacks in this launch. No
            message is repeated.
        memory_probe: Result of `probe_memory` on the first jobs. None if nothing was
            measured, because the estimate was at most half of the free memory.
    """

    def __init__(
        self,
        experiment: Experiment,
        resolved: ResolvedConfig,
        folder: RunFolder,
        numerics: Numerics,
        note: Callable[[str], None],
    ) -> None:
        self.numerics = numerics
        self.save_steps: Callable[[], None] = lambda: None
        self.memory_probe: dict[str, Any] | None = None
        self._experiment, self._resolved, self._folder = experiment, resolved, folder
        self.notes: list[str] = []

        def once(text: str) -> None:
            self.notes.append(text)
            note(text)

        self._note = cache(once)
        self._engine: Engine | None = None
        self._choosing = 0.0
        self._probed_steps = 0

    def map(
        self, jobs: Sequence[ClientJob], data: FederatedData
    ) -> Generator[ClientResult, None, None]:
        if jobs:
            yield from execute(self._engine_for(jobs, data), jobs, data)

    @property
    def stacked_steps(self) -> int:
        return 0 if self._engine is None else self._engine.stacked_steps - self._probed_steps

    @property
    def cached_steps(self) -> int:
        return 0 if self._engine is None else self._engine.cached_steps

    def choosing_seconds(self) -> float:
        """Return the seconds spent on choosing the engine since the last call.

        They include starting the engine and measuring its memory. The caller subtracts
        them from the training time of the step in which the engine was chosen.
        """
        seconds, self._choosing = self._choosing, 0.0
        return seconds

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()

    def _engine_for(self, jobs: Sequence[ClientJob], data: FederatedData) -> Engine:
        if self._engine is not None:
            return self._engine
        began = time.perf_counter()
        config = self._experiment.config
        # Before the engine is chosen, the numerics contain the number of threads that
        # the first launch gave to the whole run. Afterwards they contain the number of
        # threads per process.
        num_threads = (
            num_threads_of_run(config.threads) if self.numerics.engine else self.numerics.threads
        )
        rounds = config.rounds - jobs[0].round
        # Jobs with stored models do not train. If there are later rounds, which train,
        # the engine is chosen as if these jobs had to train as well.
        if jobs[0].trained:
            jobs = [replace(job, trained=False) for job in jobs] if rounds > 1 else []
        context = EngineContext(jobs, data, rounds, num_threads, self.numerics, self._note)
        engine = self._choose(context)
        # After this assignment, `close` also closes the engine if one of the next steps
        # fails.
        self._engine = engine
        engine.note = self._note
        torch.set_num_threads(self.numerics.threads)
        engine.open(self.numerics, num_threads)

        if jobs and is_near_limit(jobs, data, engine, config.eval.batch_size):
            self.memory_probe = probe_memory(
                jobs, data, engine, self._experiment.task, config.eval.batch_size
            )
            self._note(self.memory_probe["text"])
            self._probed_steps = engine.stacked_steps

        root = self._experiment.client_cache_folder
        if root is not None:
            self._engine = ClientCache(
                engine,
                root,
                config.memo.max_gb,
                self.numerics,
                training_hash(self._resolved.values, self._resolved.contents),
            )
            self._engine.note = self._note

        self._choosing = time.perf_counter() - began
        return self._engine

    def _choose(self, context: EngineContext) -> Engine:
        """Restore the engine in `numerics`, or choose an engine and store it there."""
        wanted, num_threads = self._experiment.engine, context.threads
        if self.numerics.engine:
            return _restored(wanted, self.numerics, num_threads)

        engine = wanted.choose(context)
        self.save_steps()
        self.numerics = replace(
            context.numerics,
            engine=describe(engine.computing),
            threads=engine.threads_each(num_threads),
        )
        write_json(self._folder.path / _FILE, asdict(self.numerics), seal=True)

        return engine
