"""Functions that check all jobs of a sweep before the first job starts.

A job is one run of the sweep, given by its overrides of the config.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fedexp.config.compose import compose
from fedexp.config.messages import key_of_file_error
from fedexp.core import user_code
from fedexp.core.build import build
from fedexp.core.errors import ConfigError, FedexpError
from fedexp.core.paths import user_path
from fedexp.core.resolved_config import ResolvedConfig
from fedexp.runtime.resources import num_threads_of_run
from fedexp.storage.run_folder import RunFolder, read_result_and_status
from fedexp.tracking.logger import Logger

# These modules import torch, which takes seconds. Functions below import them when
# needed, so that a misspelled key is reported before torch is imported.
if TYPE_CHECKING:
    from fedexp.data.dataset import Arrays
    from fedexp.data.partition import Partitioner
    from fedexp.running.experiment import Experiment

# A notice is printed if drawing a split takes more than this number of seconds.
_NOTICE_AFTER_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class CheckedJob:
    """The config of a job, and the experiment that was built from it.

    Args:
        config: Resolved config.
        experiment: Checked experiment.
    """

    config: ResolvedConfig
    experiment: Experiment

    @classmethod
    def of(cls, config: ResolvedConfig) -> CheckedJob:
        """Build and check all objects that a resolved config names.

        Raises:
            FedexpError: An object cannot be built, or a check fails.
        """
        from fedexp.running.experiment import Experiment

        try:
            experiment = Experiment.of(config)
        except ConfigError as error:
            named = key_of_file_error(error, config)
            if named is None:
                raise
            raise named from error
        _check_output_root(user_path(experiment.config.output_root, "output_root").absolute())
        num_threads_of_run(experiment.config.threads)  # refuses an unknown number of threads
        build(Logger, config["logger"], "logger").check()  # type: ignore[type-abstract]
        return cls(config, experiment)


def _check_output_root(root: Path) -> None:
    """Refuse a folder for results if a file is in its place or in a parent's place."""
    try:
        first = next(path for path in (root, *root.parents) if path.exists())
    except OSError:  # The run folder reports this error.
        return
    if not first.is_dir():
        raise ConfigError(
            "the results cannot be stored below a file",
            where="output_root",
            expected="a folder, which is created if it is absent",
            got=f"the file {first}",
            do="set output_root to a writable folder",
        )


def check_jobs(jobs: list[list[str]]) -> list[CheckedJob]:
    """Compose and check the configs of all jobs before the first job starts.

    Args:
        jobs: Overrides of each job.

    Raises:
        FedexpError: A job is invalid. The error names the job if there are several.
    """
    names = [
        job_name(number, overrides) if len(jobs) > 1 else ""
        for number, overrides in enumerate(jobs)
    ]
    configs, jobs_checked = [], []
    for name, overrides in zip(names, jobs, strict=True):
        with name_job_in_errors(name):
            configs.append(compose(overrides))
    for name, config in zip(names, configs, strict=True):
        with name_job_in_errors(name):
            jobs_checked.append(CheckedJob.of(config))

    return jobs_checked


def check_splits(jobs: Iterable[tuple[str, Experiment]]) -> None:
    """Draw the splits of all jobs before the first job starts.

    A split assigns the training samples to clients. If it cannot be drawn, the error is
    thus raised early. A job is skipped if files of its data sets are absent.

    Args:
        jobs: Pairs of a job's name, for messages, and its experiment.

    Raises:
        FedexpError: A split cannot be drawn.
    """
    checked_splits: set[tuple[object, ...]] = set()
    # Data sets are large, so only those of the latest job stay in memory.
    loaded: dict[tuple[object, ...], Arrays] = {}
    for name, experiment in jobs:
        with name_job_in_errors(name):
            root = user_path(experiment.config.data_root, "data_root")
            other = experiment.proxy.dataset
            sets = {
                (root, *one.recipe()): one for one in (experiment.dataset, other) if one is not None
            }
            key = (*sets, repr(experiment.division))
            if key in checked_splits or not all(
                file.exists() for one in sets.values() for file in one.expected_files(root)
            ):
                continue

            checked_splits.add(key)
            loaded = {
                key: loaded.get(key) or one.load(root, download=False) for key, one in sets.items()
            }
            arrays = [*loaded.values()]
            with _notice_if_slow(
                f"drawing the split{f' of {name}' if name else ''}", experiment.partitioner
            ):
                experiment.division.parts(experiment.dataset, arrays[0], arrays[-1])


@contextmanager
def _notice_if_slow(what: str, partitioner: Partitioner) -> Iterator[None]:
    """Print a notice if the code in the `with` block takes more than 3 s.

    Args:
        what: Description of the code's work, for the notice.
        partitioner: Partitioner that draws the split. If it has a time limit, the
            notice mentions the limit.
    """
    from fedexp.data.partitions.bounded import BoundedPartitioner

    if isinstance(partitioner, BoundedPartitioner):
        what += (
            f" repeatedly, for at most {partitioner.max_seconds:g} s of computing "
            f"per {partitioner.limited} (partition.max_seconds)"
        )
    timer = threading.Timer(_NOTICE_AFTER_SECONDS, lambda: print(what, file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def check_split(job: CheckedJob) -> None:
    """Draw the split of a single job, unless the job's stored result is reused.

    If the split cannot be drawn, the error occurs before any file is written.
    """
    if not read_result_and_status(RunFolder.of(job.config))[0] or not job.config["reuse"]:
        check_splits([("", job.experiment)])


def job_name(number: int, overrides: Sequence[str]) -> str:
    """Return the name of a job in messages."""
    return f"job {number} ({' '.join(overrides)})"


@contextmanager
def name_job_in_errors(job: str) -> Iterator[None]:
    """Add the name of a job to errors that are raised in the `with` block.

    Exceptions from the user's own code are converted to `FedexpError`.

    Args:
        job: Name of the job. If it is empty, no name is added. It is empty if there is
            only one job.
    """
    try:
        yield
    except Exception as error:
        described = error if isinstance(error, FedexpError) else user_code.user_code_error(error)
        if described is None:
            raise
        if job:
            described.facts["where"] = f"{job}: {described.facts.get('where') or 'config'}"
        raise described from (error if described is not error else error.__cause__)
