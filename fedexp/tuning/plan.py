"""The checks of a search before its first run, and the search that they return."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fedexp.config.compose import compose
from fedexp.core.errors import ConfigError, nearest, suggest
from fedexp.core.paths import user_path
from fedexp.running.check import CheckedJob, check_splits, name_job_in_errors
from fedexp.storage.run_folder import RunFolder
from fedexp.tuning.search_keys import SEARCH_KEYS
from fedexp.tuning.space import Choice, Range, parse_range

if TYPE_CHECKING:
    from fedexp.tuning.objective import Objective
    from fedexp.tuning.study import Search

Sampler = Literal["tpe", "random", "grid"]
SAMPLERS = ("tpe", "random", "grid")
_TRIALS, _NUM_TEST_SEEDS = 20, 5


@dataclass(frozen=True)
class SearchKeys:
    """The values of `SEARCH_KEYS` that the user gave, or their defaults.

    Args:
        trials: Number of trials, or None.
        seeds: Tuning seeds.
        test_seeds: Seeds of the test runs.
        sampler: Rule that chooses the points.
        objective: Metric of held-out data, or ``auto``.
        halving: Factor of successive halving, or None.
        batch: Number of trials that are launched together, or None.
    """

    trials: int | None
    seeds: tuple[int, ...]
    test_seeds: tuple[int, ...]
    sampler: Sampler
    objective: str
    halving: int | None
    batch: int | None

    @classmethod
    def of(cls, given: dict[str, str]) -> SearchKeys:
        """Parse the keys of the search.

        Raises:
            ConfigError: A value is invalid.
        """
        sampler = given.get("sampler", "tpe")
        if sampler not in SAMPLERS:
            raise ConfigError(
                f"there is no sampler '{sampler}'",
                where=f"sampler={sampler}",
                expected=" | ".join(SAMPLERS),
                do=suggest(sampler, SAMPLERS),
            )
        seeds = _seeds("seeds", given.get("seeds", "0"))
        last = max(seeds)
        after = ",".join(str(last + 1 + number) for number in range(_NUM_TEST_SEEDS))
        test_seeds = _seeds("test_seeds", given.get("test_seeds", after))
        if both := sorted({*seeds} & {*test_seeds}):
            raise ConfigError(
                "a seed of the test runs was used for tuning",
                where="test_seeds",
                expected="seeds that are not among seeds",
                got=", ".join(map(str, both)),
                do=f"test_seeds={after}",
            )
        return cls(
            _count("trials", given.get("trials"), 1),
            seeds,
            test_seeds,
            sampler,  # type: ignore[arg-type]
            given.get("objective", "auto"),
            _count("halving", given.get("halving"), 2),
            _count("batch", given.get("batch"), 1),
        )


def _count(key: str, text: str | None, least: int) -> int | None:
    if text is None:
        return None
    if not text.isdecimal() or int(text) < least:
        raise ConfigError(
            f"{key} must be a whole number of at least {least}, got {text}",
            where=f"{key}={text}",
            do=f"{key}={max(least, 3)}",
        )
    return int(text)


def _seeds(key: str, text: str) -> tuple[int, ...]:
    parts = text.strip("[]").split(",")
    if not all(part.isdecimal() for part in parts) or len({*map(int, parts)}) < len(parts):
        raise ConfigError(
            f"'{text}' are not seeds", where=key, expected="whole numbers, each once: 0,1,2"
        )
    return tuple(int(part) for part in parts)


@dataclass(frozen=True)
class SearchPlan:
    """A checked search.

    Args:
        search: Settings of the study.
        trials: Number of trials of the whole study.
        test_seeds: Seeds of the test runs.
        batch: Number of trials that are launched together, or None if the user gave
            none.
        held_out: Description of the held-out data.
        headline: Metric of the test runs.
        name: Readable name of the study.
    """

    search: Search
    trials: int
    test_seeds: tuple[int, ...]
    batch: int | None
    held_out: str
    headline: str
    name: str

    def test_jobs(self, point: Sequence[str]) -> list[tuple[str, ...]]:
        """Return the overrides of each run that tests a point.

        Args:
            point: Values of the tuned keys, as overrides.
        """
        return [(*self.search.fixed, *point, f"seed={seed}") for seed in self.test_seeds]


def plan_search(arguments: Sequence[str]) -> SearchPlan:
    """Check everything that can be wrong before the first run starts.

    Args:
        arguments: Ranges, keys of the search and overrides, without overrides of
            Hydra's own keys except ``hydra.searchpath``.

    Raises:
        FedexpError: The search is invalid.
    """
    given, space, fixed, path = _sort(arguments)
    keys = SearchKeys.of(given)
    trials = _num_trials(keys, space)
    points = _checked_points(space)

    first = _check(path, fixed, points[0], keys.seeds[0], space)
    experiment = first.experiment
    deciding, held_out = _held_out(first, fixed)
    if deciding:
        experiment = _check(path, [*fixed, *deciding], points[0], keys.seeds[0], space).experiment

    # These imports load torch, which takes seconds. A misspelled key is reported
    # earlier.
    from fedexp.tuning.objective import Objective
    from fedexp.tuning.study import Search, require_optuna

    objective = Objective.of(experiment, keys.objective)
    rungs = _rungs(experiment.config.rounds, keys, space)
    jobs = [first]
    for point in points[1:]:
        jobs.append(_check(path, [*fixed, *deciding], point, keys.seeds[0], space))
        _compare_objectives(objective, Objective.of(jobs[-1].experiment, keys.objective), point)
    for rounds in rungs[:-1]:
        _check(path, [*fixed, f"rounds={rounds}", *deciding], points[0], keys.seeds[0], space)
    require_optuna()
    _check_splits(path, [*fixed, *deciding, *points[0]], keys.seeds)
    _check_splits(path, [*fixed, *points[0]], keys.test_seeds)

    name, folder, seed = _place(jobs, keys, space, [*deciding])
    search = Search(
        tuple(fixed),
        deciding,
        tuple(space),
        objective,
        keys.seeds,
        keys.sampler,
        rungs,
        keys.halving or 1,
        folder,
        tuple(path),
        seed,
    )
    return SearchPlan(
        search, trials, keys.test_seeds, keys.batch, held_out, experiment.headline, name
    )


def _sort(
    arguments: Sequence[str],
) -> tuple[dict[str, str], list[Range], list[str], list[str]]:
    """Sort the arguments: keys of the search, ranges, fixed overrides, search path."""
    given: dict[str, str] = {}
    space: list[Range] = []
    fixed: list[str] = []
    path: list[str] = []
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key in SEARCH_KEYS:
            given[key] = value
        elif key == "hydra.searchpath":
            path.append(argument)
        elif key == "seed":
            raise ConfigError(
                "a search gives each run its seed",
                where=argument,
                expected="seeds=0,1 (tuning) and test_seeds=2,3,4",
                do=f"seeds={value}",
            )
        elif (one := parse_range(argument)) is not None:
            space.append(one)
        else:
            fixed.append(argument)

    names = [one.key for one in space]
    twice = [name for name in names if names.count(name) > 1] + [
        one.partition("=")[0] for one in fixed if one.partition("=")[0] in names
    ]
    if twice:
        raise ConfigError(
            f"'{twice[0]}' is set twice", where=twice[0], do="leave out one of the overrides"
        )
    if not space:
        raise ConfigError(
            "no key has a range, so there is nothing to choose",
            where="fedexp-tune",
            expected="a range of at least one key",
            do="add one, with quotes: 'local.lr=log(0.001,1)' or local.lr=0.01,0.1",
        )
    return given, space, fixed, path


def _num_trials(keys: SearchKeys, space: Sequence[Range]) -> int:
    if keys.sampler != "grid":
        return keys.trials or _TRIALS
    size = 1
    for one in space:
        if not isinstance(one, Choice):
            raise ConfigError(
                "a grid needs a list of values",
                where=one.text,
                expected=f"{one.key}=A,B,C",
                do="list the values, or choose sampler=random",
            )
        size *= len(one.values)
    if keys.trials not in (None, size):
        raise ConfigError(
            f"the grid has {size} points",
            where=f"trials={keys.trials}",
            expected=f"trials={size}",
            do="leave trials out, or choose sampler=random",
        )
    return size


def _rungs(rounds: int, keys: SearchKeys, space: Sequence[Range]) -> tuple[int, ...]:
    from fedexp.tuning.study import rungs_of

    if keys.halving and any(one.key == "rounds" for one in space):
        raise ConfigError(
            "successive halving sets the rounds of each trial, so they cannot be searched",
            where="halving",
            expected="one value of rounds",
            do="leave halving out, or set rounds to one number",
        )
    return rungs_of(rounds, keys.halving)


def _compare_objectives(first: Objective, other: Objective, point: Sequence[str]) -> None:
    """Refuse a point that is measured by another number than the first point."""
    if other != first:
        raise ConfigError(
            "the trials are measured by different numbers, so none of them is the best",
            where=" ".join(point),
            expected=first.text,
            got=other.text,
            do="search the values with different metrics separately",
        )


def _checked_points(space: Sequence[Range]) -> list[list[str]]:
    """Return points that contain every checked value of every key.

    The first point has the first value of every key. Every other point differs from it
    in one key.
    """
    base = {one.key: one.checked_values[0] for one in space}
    points = [base]
    points += [base | {one.key: value} for one in space for value in one.checked_values[1:]]
    return [[f"{key}={value}" for key, value in point.items()] for point in points]


def _check(
    path: Sequence[str],
    fixed: Sequence[str],
    point: Sequence[str],
    seed: int,
    space: Sequence[Range],
) -> CheckedJob:
    """Compose and check one run.

    Raises:
        ConfigError: The run is invalid. An error about a range names the range.
    """
    overrides = [*path, *fixed, *point, f"seed={seed}"]
    try:
        return CheckedJob.of(compose(overrides))
    except ConfigError as error:
        where = str(error.facts.get("where") or "")
        key = where.partition("=")[0]
        if error.what.startswith("unknown key") and (near := nearest(key, SEARCH_KEYS)):
            error.facts["to do"] = f"did you mean '{near}'?"
        for one in space:
            if key == one.key:
                value = next(text for text in point if text.partition("=")[0] == one.key)
                error.facts["where"] = f"{one.text} (checked with {value})"
                is_range = not isinstance(one, Choice)
                if is_range and "integer" in str(error.facts.get("expected")):
                    error.facts["to do"] = "write int(LOW,HIGH) or logint(LOW,HIGH)"
        raise


def _held_out(first: CheckedJob, fixed: Sequence[str]) -> tuple[tuple[str, ...], str]:
    """Return the override that holds out samples, if the config holds out none.

    Returns:
        The override, and a description of the held-out data.
    """
    config, experiment = first.config, first.experiment
    if experiment.partitioner.val_fraction:
        share = experiment.partitioner.val_fraction
        return (), f"partition.val_fraction={share} of each client's samples"
    if experiment.config.eval.held_out:
        return (), f"eval.held_out={experiment.config.eval.held_out} training samples"

    if any(one.lstrip("+").partition("=")[0] == "eval.held_out" for one in fixed):
        raise ConfigError(
            "no samples are held out, so nothing can be chosen",
            where="eval.held_out",
            expected="a number of training samples",
            got=config["eval"]["held_out"],
            do="set eval.held_out to 1 or more, or leave it out: a tenth is then held out",
        )
    from fedexp.tuning.objective import num_held_out

    count = num_held_out(experiment)
    return (f"eval.held_out={count}",), (
        f"eval.held_out={count}, a tenth of the training samples, in the runs that decide"
    )


def _check_splits(path: Sequence[str], overrides: Sequence[str], seeds: Sequence[int]) -> None:
    """Draw the splits of all seeds.

    Raises:
        FedexpError: A split cannot be drawn.
    """
    experiments = []
    for seed in seeds:
        with name_job_in_errors(f"seed {seed}"):
            config = compose([*path, *overrides, f"seed={seed}"])
            experiments.append((f"seed {seed}", CheckedJob.of(config).experiment))
    check_splits(experiments)


def _place(
    jobs: Sequence[CheckedJob], keys: SearchKeys, space: Sequence[Range], deciding: Sequence[str]
) -> tuple[str, Path, int]:
    """Return the name, the folder and the sampler's seed of a study.

    They depend on everything that changes values of trials. The folder also depends on
    the code of all checked points. They do not depend on the number of trials, so a
    study can get more trials later.
    """
    first = jobs[0]
    run = RunFolder.of(first.config)
    codes = sorted({RunFolder.of(job.config).hashes["code"] for job in jobs})
    code = codes[0] if len(codes) == 1 else _digest("".join(codes))
    ranges = sorted(one.text for one in space)
    facts = [
        run.hashes["config"],
        ranges,
        deciding,
        keys.seeds,
        keys.sampler,
        keys.objective,
        keys.halving,
    ]
    digest = _digest(repr(facts))

    method, dataset = first.config["method"], first.config.choices.get("dataset", "data")
    words = "-".join([str(method), str(dataset), *(one.key for one in space)])
    plain = re.sub(r"[^\w.-]+", "_", words)[:80]
    name = f"{plain}-{digest}"
    root = user_path(first.config["output_root"], "output_root").resolve()
    return name, root / "tuning" / name / code[:8], int(digest, 16)


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
