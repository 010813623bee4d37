"""A sweep's jobs through Hydra's launchers: a grid of overrides, or a list of them; and what one job of a sweep does."""

from __future__ import annotations

import functools
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from fedexp.commands.errors import JOB_ERROR, tell
from fedexp.core.errors import FedexpError
from fedexp.tracking.outlet import lasting_output


def run_sweep(group: str, jobs: int, launch: Callable[[], int]) -> int:
    """Call `launch`, which starts `jobs` jobs through Hydra, with what these need to know of each other in the environment.

    Returns:
        its exit code, or that of the signal which interrupted it.
    """
    from fedexp.data.cache import sources_stay
    from fedexp.running.execute import Interrupted, terminable

    os.environ["FEDEXP_SWEEP"] = group
    os.environ["FEDEXP_SWEEP_JOBS"] = str(jobs)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # hydra/launcher=ray must not phone home
    os.environ["FEDEXP_LAUNCHER_PID"] = str(os.getpid())
    with terminable(), sources_stay():
        try:
            return launch()
        except KeyboardInterrupt:
            return 130
        except Interrupted as stop:
            return stop.exit_code


def multirun(jobs: Sequence[Sequence[str]], overrides: Sequence[str]) -> int:
    """Run `jobs` as Hydra's multirun would, through the launcher that `overrides` choose; returns the exit code.

    Args:
        jobs: the overrides of each; overrides: those of the sweep itself (``hydra/launcher=...``, ``output_root=...``).

    A job that fails leaves that in its run folder and does not stop the others.
    """
    from hydra._internal.callbacks import Callbacks
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.plugins import Plugins
    from hydra.types import HydraContext, RunMode

    from fedexp.config.compose import check_launcher, hydra_in_use

    with hydra_in_use(list(overrides)):
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        config = hydra.compose_config("config", list(overrides), run_mode=RunMode.MULTIRUN)
        check_launcher(config)
        config.hydra.mode = RunMode.MULTIRUN
        callbacks = Callbacks(config)
        context = HydraContext(config_loader=hydra.config_loader, callbacks=callbacks)
        callbacks.on_multirun_start(config=config, config_name="config")
        launcher = Plugins.instance().instantiate_launcher(
            hydra_context=context, task_function=sweep_job, config=config
        )
        try:
            _alive(lambda: launcher.launch([list(job) for job in jobs], initial_job_idx=0))
        except SystemExit as stop:  # SIGTERM in a job of this process
            return stop.code if isinstance(stop.code, int) else JOB_ERROR
        callbacks.on_multirun_end(config=config, config_name="config")
    return 0


def run_hydra(arguments: list[str]) -> int:
    """Hand over to Hydra, which parses flags, answers its flags and runs sweeps through its launchers."""
    import hydra
    from hydra._internal import utils
    from hydra.core.utils import JobReturn

    from fedexp.config.compose import JobFailedError
    from fedexp.config.folders import conf_dir

    sys.argv = [sys.argv[0], *arguments]
    report = utils.run_and_report  # prints a traceback for every error that it does not know
    utils.run_and_report = lambda func: report(lambda: _alive(func))
    jobs: Any = JobReturn
    returned = (
        jobs.return_value
    )  # prints the overrides of a job that failed, which has told them itself

    def quietly(job: Any) -> Any:
        if isinstance(job._return_value, JobFailedError):
            raise job._return_value
        return returned.fget(job)

    jobs.return_value = property(quietly, returned.fset)
    try:
        hydra.main(config_path=str(conf_dir()), config_name="config", version_base="1.3")(
            sweep_job
        )()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else JOB_ERROR
    finally:
        utils.run_and_report = report
        jobs.return_value = returned
    return 0


def _alive(work: Callable[[], Any]) -> Any:
    """Call `work`; a worker process of the launcher's that dies is told in words and ends the sweep.

    A job that failed has told why: Hydra would say it again.
    """
    from fedexp.config.compose import JobFailedError

    try:
        return work()
    except JobFailedError:
        if os.environ.get("HYDRA_FULL_ERROR"):
            raise
        raise SystemExit(JOB_ERROR) from None
    except BrokenProcessPool as error:
        how = ", ".join(sorted(set(re.findall(r"SIG[A-Z]+", str(error)))))
        print(
            f"error: a worker process died{f' ({how})' if how else ''}, as one does when memory runs out; the sweep ends\n"
            "  do: give the same command again, with a smaller hydra.launcher.n_jobs if memory ran out",
            file=sys.stderr,
        )
        raise SystemExit(JOB_ERROR) from None


def executed(config: Mapping[str, Any], what: str) -> dict[str, Any] | int:
    """The result of one job in this process; of one that was interrupted or failed the exit code, the reason being said."""
    from fedexp.running.execute import Interrupted, execute

    try:
        return execute(config)
    except (KeyboardInterrupt, Interrupted) as error:
        print(f"interrupted: the same command resumes {what}", file=sys.stderr)
        return int(getattr(error, "exit_code", 130))
    except FedexpError as error:
        tell(error)
        return JOB_ERROR


@lasting_output()
def tell_failure(label: str, error: object) -> None:
    """One job of a sweep failed, and why."""
    print(f"FAILED {label}\n{error}", file=sys.stderr, flush=True)


def sweep_job(config: Any) -> float:
    """One job of a sweep, called by Hydra's launchers, possibly in another process. Returns the headline value."""
    from hydra.core.hydra_config import HydraConfig

    from fedexp.config.compose import JobFailedError, register, resolve
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
    launcher = _launcher()
    if launcher is not None:
        _end_with(launcher)
    if concurrent > 1 and resolved["device"] in ("auto", "cuda"):
        take_gpu(hydra_config.job.num)
    job = f"job {hydra_config.job.num}"
    label = f"{job}: {' '.join(overrides)}"
    print(label, flush=True)
    try:
        with _WORKING:
            result = execute(
                resolved, group=os.environ.get("FEDEXP_SWEEP"), name=job if concurrent > 1 else ""
            )
    except Interrupted as stop:
        raise SystemExit(stop.exit_code) from None
    except FedexpError as error:
        tell_failure(label, error)
        raise JobFailedError(str(error).splitlines()[0]) from (
            error if os.environ.get("HYDRA_FULL_ERROR") else None
        )
    except (
        Exception
    ) as error:  # a bug: told at once, its traceback is in error.txt and follows at the sweep's end
        tell_failure(label, f"{type(error).__name__}: {error}")
        raise
    headline = result["headline"]
    print(f"done   {label}: {headline['metric']} {headline['value']:.4f}", flush=True)
    return float(headline["value"])


_WORKING = threading.Lock()  # held while a job is executed
_POLL_SECONDS = 0.5


def _launcher() -> int | None:
    """The sweep's own process, where this one is its worker on this machine."""
    parent = (
        multiprocessing.parent_process()
    )  # also of one that is gone; joblib's workers are made this way
    pid = os.getppid() if parent is None else parent.pid
    return pid if os.environ.get("FEDEXP_LAUNCHER_PID") == str(pid) else None


def _end_with(launcher: int) -> None:
    """Begin nothing when the sweep's own process is gone; from now on end, resumably, when it goes.

    A worker would take the jobs that wait in its queue, and then stay idle for minutes.
    """
    if os.getppid() != launcher:
        os._exit(128 + signal.SIGTERM)
    _watch(launcher)


@functools.cache
def _watch(launcher: int) -> None:
    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(_POLL_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)  # between jobs that is the end, in one an interruption
        with _WORKING:
            os._exit(128 + signal.SIGTERM)

    threading.Thread(target=watch, name="fedexp-parent", daemon=True).start()
