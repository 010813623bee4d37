"""Functions that launch the jobs of a sweep through Hydra, and execute one job.

A sweep is a grid of overrides, or a list with the overrides of each job.
"""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.errors import CompactHydraException

from fedexp.commands.errors import JOB_ERROR, print_error
from fedexp.commands.joblib_files import mark_joblib_files
from fedexp.core.errors import FedexpError
from fedexp.storage.stored_run import resume_condition
from fedexp.tracking.numbers import number_text
from fedexp.tracking.outlet import lasting_output, visible

if TYPE_CHECKING:
    from fedexp.core.resolved_config import ResolvedConfig
    from fedexp.running.check import CheckedJob
    from fedexp.running.experiment import Experiment


def run_sweep(
    name: str,
    jobs: int,
    launch: Callable[[], int],
    *,
    title: str | None = None,
    objective_path: str = "",
) -> int:
    """Set the environment variables that the jobs of a sweep share, and call `launch`.

    Args:
        name: Name of the sweep, which Hydra's folder of the sweep has, too.
        jobs: Number of jobs.
        launch: Function that runs the jobs and returns an exit code.
        title: Readable name of the sweep, for trackers. None: `name`.
        objective_path: Path in ``result.json`` of the number that a job returns and
            shows. If empty, a job returns and shows the headline.

    Returns:
        The exit code of `launch`. If a signal interrupted it, the exit code is 128 plus
        the number of the signal.
    """
    from fedexp.data.cache import sources_stay
    from fedexp.running.execute import Interrupted, interrupt_on_sigterm

    os.environ |= {
        "FEDEXP_SWEEP": name,
        "FEDEXP_GROUP": name if title is None else title,
        "FEDEXP_SWEEP_JOBS": str(jobs),
        "FEDEXP_LAUNCHER_PID": str(os.getpid()),
        "FEDEXP_OBJECTIVE": objective_path,
    }
    # With hydra/launcher=ray, Ray must not send usage statistics.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

    with interrupt_on_sigterm(), sources_stay(), mark_joblib_files():
        try:
            return launch()
        except KeyboardInterrupt:
            return 130
        except Interrupted as stop:
            return stop.exit_code


class JobFailedError(CompactHydraException):
    """A job of a sweep failed, and its error was printed and stored already."""


def multirun(jobs: Sequence[Sequence[str]], overrides: Sequence[str]) -> int:
    """Run `jobs` as Hydra's multirun would, through the chosen launcher.

    A failed job is recorded in its run folder and does not stop the other jobs.

    Args:
        jobs: Overrides of each job.
        overrides: Overrides of the sweep itself (``hydra/launcher=...``,
            ``output_root=...``).

    Returns:
        The exit code.
    """
    from fedexp.config.hydra_composition import use_hydra
    from fedexp.config.hydra_private import compose_for_multirun, multirun_launcher
    from fedexp.config.sweep_expansion import check_launcher

    with use_hydra(list(overrides)):
        config = compose_for_multirun(overrides)
        check_launcher(config)
        try:
            with multirun_launcher(config, sweep_job) as launch:
                _report_dead_worker(lambda: launch(jobs))
        except SystemExit as stop:
            # This exception comes from a job in this process that received SIGTERM.
            return stop.code if isinstance(stop.code, int) else JOB_ERROR

    return 0


def run_hydra(arguments: list[str]) -> int:
    """Run Hydra's own command line.

    Hydra parses the arguments, answers its own flags and runs sweeps through its
    launchers.

    Returns:
        The exit code.
    """
    import hydra

    from fedexp.config.folders import conf_dir
    from fedexp.config.hydra_private import quiet_failures

    sys.argv = [sys.argv[0], *arguments]
    try:
        with quiet_failures(JobFailedError, _report_dead_worker):
            hydra.main(config_path=str(conf_dir()), config_name="config", version_base="1.3")(
                sweep_job
            )()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else JOB_ERROR

    return 0


def _report_dead_worker(work: Callable[[], Any]) -> Any:
    """Call `work`, and report a worker process of the launcher that died.

    The sweep ends with exit code 1 in three cases: a worker process died, a folder
    cannot be written, or a job failed. For a failed job, no message is printed here,
    because the job printed its error.
    """
    from fedexp.storage.files import refused

    try:
        return work()
    except JobFailedError:
        if os.environ.get("HYDRA_FULL_ERROR"):
            raise
        raise SystemExit(JOB_ERROR) from None
    except BrokenProcessPool as error:
        how = ", ".join(sorted(set(re.findall(r"SIG[A-Z]+", str(error)))))
        print(
            f"error: a worker process died{f' ({how})' if how else ''}, as when memory runs out. "
            "The sweep ends.\n"
            "  do: repeat the same command, with a smaller hydra.launcher.n_jobs "
            "if memory ran out",
            file=sys.stderr,
        )
        raise SystemExit(JOB_ERROR) from None
    except OSError as error:
        if (described := refused(error)) is None:
            raise
        print_error(described)
        raise SystemExit(JOB_ERROR) from None


def execute_job(job: CheckedJob, what: str) -> dict[str, Any] | int:
    """Execute one job in this process.

    Args:
        job: Checked job.
        what: Name of the job in the message on how to resume it, such as "this run".

    Returns:
        The result. If the job was interrupted or failed, the exit code instead. The
        reason is then printed.
    """
    from fedexp.running.execute import Interrupted, execute

    try:
        return execute(job.config, experiment=job.experiment)
    except (KeyboardInterrupt, Interrupted) as error:
        condition = resume_condition(job.config.values)
        print(f"interrupted: the same command{condition} resumes {what}", file=sys.stderr)
        return int(getattr(error, "exit_code", 130))
    except FedexpError as error:
        print_error(error)
        return JOB_ERROR


@lasting_output()
def print_failure(label: str, error: object) -> None:
    """Print that a job of a sweep failed, and the reason."""
    print(visible(f"FAILED {label}\n{error}"), file=sys.stderr, flush=True)


def sweep_job(config: Any) -> float:
    """Execute one job of a sweep.

    Hydra's launchers call this function, in this process or in a worker process.

    Returns:
        The number that the sweep optimises (`run_sweep`). If the sweep optimises none,
        the value of the headline metric.
    """
    from hydra.core.hydra_config import HydraConfig

    from fedexp.config.compose import resolve
    from fedexp.config.search_path import register
    from fedexp.running.execute import Interrupted, execute
    from fedexp.runtime.resources import available_cores, concurrent_jobs, take_gpu

    register()
    hydra_config = HydraConfig.get()

    overrides = list(hydra_config.overrides.task)
    jobs = int(os.environ.get("FEDEXP_SWEEP_JOBS", "1"))
    concurrent = concurrent_jobs(hydra_config.launcher, jobs, available_cores())
    os.environ["FEDEXP_CONCURRENT_JOBS"] = str(concurrent)

    resolved = resolve(
        config, hydra_config.runtime.choices, [*hydra_config.overrides.hydra, *overrides]
    )

    if (launcher := _launcher_pid()) is not None:
        _end_with_launcher(launcher)
    if concurrent > 1 and resolved["device"] in ("auto", "cuda"):
        take_gpu(hydra_config.job.num)

    job = f"job {hydra_config.job.num}"
    label = f"{job}: {' '.join(overrides)}"
    _record_job(hydra_config.job.num, resolved)
    print(label, flush=True)

    try:
        with _JOB_RUNNING:
            result = execute(
                resolved,
                experiment=_checked_experiment(hydra_config.job.num, resolved),
                group=os.environ.get("FEDEXP_GROUP"),
                name=job if concurrent > 1 else "",
                progress_metric=_objective()[1],
            )
    except Interrupted as stop:
        raise SystemExit(stop.exit_code) from None
    except FedexpError as error:
        print_failure(label, error)
        raise JobFailedError(str(error).splitlines()[0]) from (
            error if os.environ.get("HYDRA_FULL_ERROR") else None
        )
    except Exception as error:
        # All other exceptions are bugs. They are reported at once. The traceback is
        # written to ``error.txt``, and is printed at the end of the sweep.
        print_failure(label, f"{type(error).__name__}: {error}")
        raise

    metric, value = _returned(result)
    print(f"done   {label}: {metric} {number_text(value)}", flush=True)
    return value


def _objective() -> tuple[str, str]:
    """Split the path of `run_sweep` into a key of ``result.json`` and a metric."""
    place, _, metric = os.environ.get("FEDEXP_OBJECTIVE", "").partition(".")
    return place, metric


def _returned(result: Mapping[str, Any]) -> tuple[str, float]:
    """Return the metric and the number that a job of a sweep returns."""
    place, metric = _objective()
    # The test runs of a tuning hold out no samples.
    if metric in (result.get(place) or {}):
        return metric, float(result[place][metric])
    headline = result["headline"]
    return headline["metric"], float(headline["value"])


# Checked jobs of the sweep that this process launches. The index is the job's number.
_CHECKED_JOBS: list[CheckedJob] = []


@contextlib.contextmanager
def checked_jobs(jobs: Sequence[CheckedJob]) -> Iterator[None]:
    """Provide the checked jobs of a sweep inside the `with` block.

    Jobs that run in this process use their experiments and need not build them again.
    """
    _CHECKED_JOBS[:] = jobs
    try:
        yield
    finally:
        _CHECKED_JOBS.clear()


@contextlib.contextmanager
def recorded_jobs() -> Iterator[Callable[[], list[tuple[int, dict[str, Any]]]]]:
    """Record the jobs of a sweep, in this process and in the launcher's processes.

    Yields:
        A function that returns the number and the config (`ResolvedConfig.to_stored`)
        of each job, in the order of the numbers.
    """
    with tempfile.TemporaryDirectory(prefix="fedexp-sweep-") as folder:
        path = Path(folder) / "jobs.jsonl"
        os.environ["FEDEXP_SWEEP_RECORD"] = str(path)

        def read() -> list[tuple[int, dict[str, Any]]]:
            lines = path.read_text().splitlines() if path.exists() else []
            rows = [json.loads(line) for line in lines]
            return sorted(((int(job), config) for job, config in rows), key=lambda row: row[0])

        try:
            yield read
        finally:
            del os.environ["FEDEXP_SWEEP_RECORD"]


def _record_job(number: int, config: ResolvedConfig) -> None:
    path = os.environ.get("FEDEXP_SWEEP_RECORD")
    if path is None:
        return
    # A launcher may run jobs on another machine, which does not have the folder.
    with contextlib.suppress(OSError), Path(path).open("a") as file:
        file.write(json.dumps([number, config.to_stored()]) + "\n")


def _checked_experiment(number: int, config: ResolvedConfig) -> Experiment | None:
    """Return the experiment that was built to check a job.

    The result is None in a worker process of a launcher. It is also None if the checked
    job of this number has another config. This happens with sweepers other than Hydra's
    basic one.
    """
    if number >= len(_CHECKED_JOBS):
        return None
    checked = _CHECKED_JOBS[number].config
    same = checked.values == config.values and checked.choices == config.choices
    return _CHECKED_JOBS[number].experiment if same else None


# Lock that is held while a job is executed.
_JOB_RUNNING = threading.Lock()
_POLL_SECONDS = 0.5


def _launcher_pid() -> int | None:
    """Return the process ID of the process that launched the sweep.

    The result is None if this process is not a worker on the launcher's machine.
    """
    # joblib's workers are made by `multiprocessing`, which knows their parent even
    # after the parent has ended.
    parent = multiprocessing.parent_process()
    pid = os.getppid() if parent is None else parent.pid
    return pid if os.environ.get("FEDEXP_LAUNCHER_PID") == str(pid) else None


def _end_with_launcher(launcher: int) -> None:
    """End this worker process as soon as the process that launched the sweep has ended.

    Otherwise the worker process would execute the other jobs in its queue, and then
    stay idle for minutes. A run that is interrupted in this way can be resumed.
    """
    if os.getppid() != launcher:
        os._exit(128 + signal.SIGTERM)
    _watch(launcher)


@functools.cache
def _watch(launcher: int) -> None:
    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(_POLL_SECONDS)
        # The signal ends this process between jobs, and interrupts a running job.
        os.kill(os.getpid(), signal.SIGTERM)
        with _JOB_RUNNING:
            os._exit(128 + signal.SIGTERM)

    threading.Thread(target=watch, name="fedexp-parent", daemon=True).start()
