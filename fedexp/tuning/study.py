"""A study: trials of hyper-parameters, sampled by Optuna and stored in one file.

A trial is one point of the search, which is trained with every tuning seed. With
successive halving, a trial is trained for a few rounds first. Only the best trials are
trained for more rounds. Each number of rounds is a separate run, which starts from
the first round.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from filelock import FileLock, Timeout

from fedexp.config.compose import compose
from fedexp.core.errors import ConfigError, StorageError
from fedexp.core.resolved_config import ResolvedConfig
from fedexp.storage.files import damaged
from fedexp.storage.run_folder import RunFolder, read_result_and_status
from fedexp.tuning.objective import Objective
from fedexp.tuning.space import Choice, Range

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial

Sampler = Literal["tpe", "random", "grid"]
# A function that runs jobs, given by their overrides, and returns an exit code.
Launch = Callable[[Sequence[Sequence[str]]], int]

_JOURNAL = "journal.log"
_ERROR = "error"  # attribute of a failed trial: the reason
_ROUNDS = "rounds"  # attribute of a trial: the rounds for which it was trained
_BATCH_END = "batch_end"  # attribute of a trial: number of trials after its batch
# Number of trials that TPE samples at random before it learns from them. Optuna's
# default of 10 would leave too few of the usual 20 trials.
_STARTUP = 5
_RUNGS = 3  # largest number of different numbers of rounds


@dataclass(frozen=True)
class Search:
    """The settings of a study.

    Tuning runs choose the best point. Test runs then repeat it with other seeds.

    Args:
        fixed: Overrides of all runs.
        deciding: Overrides of the tuning runs that the test runs do not have.
        space: Ranges of the hyper-parameters.
        objective: Number by which points are compared.
        seeds: Seeds of the tuning runs.
        sampler: Rule that chooses the points.
        rungs: Numbers of rounds for which a trial is trained, ascending. A single
            number means that no trial is stopped early.
        factor: With several `rungs`, one trial in `factor` goes on.
        folder: Folder of the study.
        search_path: The override of ``hydra.searchpath``, if the user gave one.
        seed: Seed of the sampler.
    """

    fixed: tuple[str, ...]
    deciding: tuple[str, ...]
    space: tuple[Range, ...]
    objective: Objective
    seeds: tuple[int, ...]
    sampler: Sampler
    rungs: tuple[int, ...]
    factor: int
    folder: Path
    search_path: tuple[str, ...]
    seed: int

    def job(self, point: Sequence[str], seed: int, rounds: int) -> tuple[str, ...]:
        """Return the overrides of a tuning run."""
        early = (f"rounds={rounds}",) if rounds < self.rungs[-1] else ()
        fixed = [one for one in self.fixed if not (early and one.startswith("rounds="))]
        return (*fixed, *early, *self.deciding, *point, f"seed={seed}")

    @property
    def grid(self) -> list[dict[str, str]]:
        """All points of a search in which every range is a list."""
        lists = [one.values for one in self.space if isinstance(one, Choice)]
        keys = [one.key for one in self.space]
        return [dict(zip(keys, values, strict=True)) for values in product(*lists)]


@dataclass(frozen=True)
class TrialRow:
    """One trial of a study, for a report.

    Args:
        number: Number of the trial, from 0.
        point: Value of every key.
        state: ``done``, ``stopped`` (by successive halving), ``failed`` or
            ``unfinished``.
        value: Mean of the objective over the tuning seeds, after the last rounds that
            the trial was trained for. None if the trial failed.
        rounds: Rounds for which the trial was trained, or None.
        error: Reason of a failure, or None.
    """

    number: int
    point: dict[str, str]
    state: Literal["done", "stopped", "failed", "unfinished"]
    value: float | None
    rounds: int | None
    error: str | None


def rungs_of(rounds: int, factor: int | None) -> tuple[int, ...]:
    """Return the numbers of rounds for which trials are trained.

    Args:
        rounds: Rounds of a whole run.
        factor: Factor between two numbers of rounds. None means no halving.

    Raises:
        ConfigError: The whole run has too few rounds.
    """
    if factor is None:
        return (rounds,)
    shorter = [rounds // factor**power for power in range(1, _RUNGS)]
    rungs = [number for number in reversed(shorter) if number >= 1]
    if not rungs:
        raise ConfigError(
            "the runs are too short for successive halving",
            where="halving",
            expected=f"rounds of at least {factor}",
            got=f"rounds={rounds}",
            do="leave halving out",
        )
    return (*rungs, rounds)


def require_optuna() -> None:
    """Refuse a search if Optuna is not installed.

    Raises:
        ConfigError: Optuna is not installed.
    """
    try:
        import optuna  # noqa: F401
    except ImportError:
        raise ConfigError(
            "a search needs the package optuna, which is not installed",
            where="fedexp-tune",
            do="pip install 'fedexp[tune]'",
        ) from None


@dataclass(frozen=True)
class TuningStudy:
    """A study in a file, which continues where it was interrupted.

    Args:
        search: Settings of the study.
        launch: Function that runs jobs.
        say: Function that shows the user a line.
    """

    search: Search
    launch: Launch
    say: Callable[[str], None]

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the study for this process in a ``with`` block.

        Raises:
            StorageError: Another process works on the study, or its folder cannot be
                made.
        """
        folder = self.search.folder
        lock = FileLock(folder / "lock")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=0)
        except Timeout:
            raise StorageError(
                "another process works on this study",
                where=str(folder),
                do="wait for it, then enter the same command",
            ) from None
        except OSError as error:
            raise StorageError(
                f"the folder of the study cannot be used: {error.strerror or error}",
                where=str(folder),
                do="set output_root to a writable folder",
            ) from error
        try:
            yield
        finally:
            lock.release()

    @cached_property
    def _study(self) -> Study:
        """Optuna's study. Its file is made if it is absent.

        Raises:
            StorageError: The file is damaged.
        """
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        journal = self.search.folder / _JOURNAL
        _check_journal(journal)
        path = str(journal)
        study = optuna.create_study(
            storage=JournalStorage(JournalFileBackend(path, JournalFileOpenLock(path))),
            study_name=self.search.folder.parent.name,
            # Optuna asks this sampler whether a trial that ends has failed.
            sampler=self._sampler(0),
            direction="maximize" if self.search.objective.higher_is_better else "minimize",
            load_if_exists=True,
        )
        if self.search.sampler == "grid":
            for point in self.search.grid:
                study.enqueue_trial(point, skip_if_exists=True)
        return study

    def run(self, trials: int, batch: int) -> int:
        """Run trials until the study has `trials` finished ones.

        Failed and stopped trials count. Trials that an interruption left are finished
        first.

        Args:
            trials: Number of trials of the whole study.
            batch: Number of trials whose runs are launched together.

        Returns:
            The exit code of the first launch that did not return 0. It is 1 if another
            process executes a run of the study, and otherwise 0.
        """
        from optuna import Trial
        from optuna.trial import TrialState

        while True:
            found = self._study.get_trials(deepcopy=False)
            begun = [one for one in found if one.state == TrialState.RUNNING]
            finished = sum(one.state.is_finished() for one in found)
            end = finished + batch
            if begun:
                # The rest of an interrupted batch is finished first. A new trial would
                # be sampled with less knowledge than in an uninterrupted study.
                end = begun[0].user_attrs.get(_BATCH_END, end)
            end = min(end, trials)
            active = [Trial(self._study, one._trial_id) for one in begun]
            active += [self._study.ask() for _ in range(end - finished - len(begun))]
            for trial in active:
                if _BATCH_END not in trial.user_attrs:
                    trial.set_user_attr(_BATCH_END, end)
                self._point(trial)
            if not active:
                return 0
            if code := self._run_batch(active):
                return code

    def _sampler(self, seed: int) -> BaseSampler:
        import warnings

        from optuna.exceptions import ExperimentalWarning
        from optuna.samplers import RandomSampler, TPESampler

        if self.search.sampler == "tpe":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ExperimentalWarning)
                # Without the constant liar, trials of one batch would be alike.
                return TPESampler(
                    seed=seed,
                    n_startup_trials=_STARTUP,
                    constant_liar=True,
                    constraints_func=_constraints,
                )
        return RandomSampler(seed=seed)

    def _point(self, trial: Trial) -> tuple[str, ...]:
        """Return the overrides of a trial, which are sampled if they are not yet.

        The sampler's seed depends only on the numbers of the trial and of the key, so a
        study that continues has the same points as one that was not interrupted.
        """
        for number, one in enumerate(self.search.space):
            if one.key not in trial.params:
                seed = np.random.SeedSequence([self.search.seed, trial.number, number])
                self._study.sampler = self._sampler(int(seed.generate_state(1)[0]))
                one.suggest(trial)
        return tuple(f"{one.key}={one.suggest(trial)}" for one in self.search.space)

    def _run_batch(self, trials: Sequence[Trial]) -> int:
        """Run trials for ascending numbers of rounds, and store their values."""
        search, active = self.search, [*trials]
        for rounds in search.rungs:
            jobs = {
                trial.number: [
                    search.job(self._point(trial), seed, rounds) for seed in search.seeds
                ]
                for trial in active
            }
            if code := self.launch([job for own in jobs.values() for job in own]):
                return code

            if self._say_unfinished(jobs):
                return 1

            measured: list[tuple[Trial, float]] = []
            for trial in active:
                values, error = self._read(jobs[trial.number])
                trial.set_user_attr(_ROUNDS, self._rounds(trial, rounds))
                if error is None:
                    if _ERROR in trial.user_attrs:  # an interrupted attempt failed
                        trial.set_user_attr(_ERROR, None)
                    measured.append((trial, statistics.fmean(values)))
                    continue
                trial.set_user_attr(_ERROR, error)
                # Optuna's TPE ignores trials with the state FAIL. So the trial ends
                # with the worst value, and `_constraints` places it behind all others.
                worst = -math.inf if search.objective.higher_is_better else math.inf
                self._study.tell(trial, worst)
                self.say(f"trial {trial.number}: {self._text(trial)}  failed: {error}")

            if rounds == search.rungs[-1]:
                for trial, value in measured:
                    self._study.tell(trial, value)
                    self.say(f"trial {trial.number}: {self._text(trial)}  {value:.4f}")
                break
            active = self._promoted(measured, rounds)
            if not active:
                break
        return 0

    def _promoted(self, measured: Sequence[tuple[Trial, float]], rounds: int) -> list[Trial]:
        """Store values after some rounds, and return the trials that go on.

        Let n be the number of trials that have reached `rounds` rounds so far. A trial
        goes on if it is among the best n / factor of them, rounded down, and at least
        one. Of equal trials, the earlier one is better. The other trials are stopped.
        This rule is asynchronous successive halving (Li et al. 2020).
        """
        from optuna.trial import TrialState

        for trial, value in measured:
            # After an interruption, the value may have been stored already.
            if rounds not in self._study.trials[trial.number].intermediate_values:
                trial.report(value, rounds)
        sign = -1 if self.search.objective.higher_is_better else 1
        ranked = sorted(
            (sign * one.intermediate_values[rounds], one.number)
            for one in self._study.trials
            if rounds in one.intermediate_values
        )
        best = {number for _, number in ranked[: max(1, len(ranked) // self.search.factor)]}

        promoted = []
        for trial, value in measured:
            if trial.number in best:
                promoted.append(trial)
                continue
            self._study.tell(trial, state=TrialState.PRUNED)
            shown = f"trial {trial.number}: {self._text(trial)}  {value:.4f}"
            self.say(f"{shown} after {rounds} rounds, stopped")
        return promoted

    def _rounds(self, trial: Trial, rounds: int) -> int:
        """Return the rounds of a trial, which may be one of the searched keys."""
        points = dict(one.partition("=")[::2] for one in self._point(trial))
        return int(points.get("rounds", rounds))

    def _text(self, trial: Trial) -> str:
        return " ".join(self._point(trial))

    def _say_unfinished(self, jobs: Mapping[int, Sequence[Sequence[str]]]) -> bool:
        """Report trials with runs that another process executes.

        Such a run says nothing about the point. The trial stays unfinished, and the
        next command tries it again.

        Returns:
            Whether there are such trials.
        """
        running = [
            number for number, own in jobs.items() if any(self._is_running(job) for job in own)
        ]
        for number in running:
            self.say(f"trial {number}: not finished, because another process executes a run of it")
        if running:
            self.say("enter the same command again when the other process has ended")
        return bool(running)

    def _is_running(self, job: Sequence[str]) -> bool:
        run = RunFolder.of(compose([*self.search.search_path, *job]))
        result, state = read_result_and_status(run)
        return not result and state.get("status") == "running"

    def _read(self, jobs: Sequence[Sequence[str]]) -> tuple[list[float], str | None]:
        """Return the objectives of runs, and the reason if one of them failed."""
        values: list[float] = []
        for job in jobs:
            result, reason = read_run(compose([*self.search.search_path, *job]))
            value = None if result is None else self.search.objective.value(result)
            if value is None:
                return [], reason or f"{self.search.objective.metric} is not a finite number"
            values.append(value)
        return values, None

    def rows(self) -> list[TrialRow]:
        """Return all trials that have a point, in their order."""
        keys = {one.key for one in self.search.space}
        return [
            self._row(one)
            for one in self._study.get_trials(deepcopy=False)
            if keys <= one.params.keys()
        ]

    def _row(self, trial: FrozenTrial) -> TrialRow:
        from optuna.trial import FixedTrial

        state: Literal["done", "stopped", "failed", "unfinished"] = "unfinished"
        value = None
        if trial.user_attrs.get(_ERROR):
            state = "failed"
        elif trial.state.name == "COMPLETE":
            state, value = "done", trial.value
        elif trial.state.name == "PRUNED":
            state = "stopped"
            value = trial.intermediate_values[max(trial.intermediate_values)]
        point = {one.key: one.suggest(FixedTrial(trial.params)) for one in self.search.space}
        return TrialRow(
            trial.number,
            point,
            state,
            value,
            trial.user_attrs.get(_ROUNDS),
            trial.user_attrs.get(_ERROR),
        )

    def best(self) -> TrialRow | None:
        """Return the first trial with the best value, or None if none is done."""
        done = [row for row in self.rows() if row.state == "done"]
        sign = 1 if self.search.objective.higher_is_better else -1
        return max(done, key=lambda row: sign * (row.value or 0.0), default=None)


def _check_journal(path: Path) -> None:
    """Check Optuna's file, and cut off an incomplete last line.

    A crash or a full disk can leave such a line. Optuna would append to it, and could
    not read the file afterwards.

    Raises:
        StorageError: A complete line is not a JSON object with an operation of Optuna.
    """
    if not path.exists():
        return
    content = path.read_bytes()
    *lines, rest = content.split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            entry = None
        if not isinstance(entry, dict) or "op_code" not in entry:
            raise damaged(
                path,
                f"line {number} is not an entry of Optuna",
                "restore the file, or move it away (runs with the same points are not trained "
                "again)",
            )
    if rest:
        os.truncate(path, len(content) - len(rest))


def _constraints(trial: FrozenTrial) -> tuple[float]:
    """Return a number above 0 for a failed trial. TPE ranks it behind all others."""
    return (1.0 if trial.user_attrs.get(_ERROR) else 0.0,)


def is_stored(config: ResolvedConfig) -> bool:
    """Return whether a run need not be launched, because its result is reused."""
    return bool(config["reuse"]) and read_run(config)[0] is not None


def read_run(config: ResolvedConfig) -> tuple[dict[str, Any] | None, str | None]:
    """Return the stored result of a run, or None and the reason that there is none."""
    result, state = read_result_and_status(RunFolder.of(config))
    if result:
        return result, None
    error = str(state.get("error") or "its job did not start")
    return None, error.splitlines()[0]
