"""The ``fedexp`` command: check every job first, then let Hydra run one job or a sweep of them."""

from __future__ import annotations

import functools
import hashlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedexp.core.errors import ConfigError, FedexpError

SWEEP_FLAGS = ("-m", "--multirun")
HELP_FLAGS = ("--help", "-h")
HYDRA_FLAGS = ("--hydra-help", "--info", "-i", "--cfg", "-c", "--shell-completion", "-sc")  # Hydra answers
USAGE_ERROR, JOB_ERROR = 2, 1


def main() -> None:
    """Console entry point."""
    sys.exit(run_command(sys.argv[1:]))


def run_command(arguments: list[str]) -> int:
    """Run the command line; returns the exit code. Errors of the user's are told without a traceback."""
    return guarded(lambda: _run(arguments))


def guarded(work: Callable[[], int]) -> int:
    """Run `work`; print a `FedexpError` plainly, unless HYDRA_FULL_ERROR=1 asks for the traceback."""
    try:
        code = work()
        sys.stdout.flush()  # what breaks shall break here
        return code
    except FedexpError as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            traceback.print_exception(error)
        else:
            print(f"error: {error}", file=sys.stderr)
        return USAGE_ERROR
    except BrokenPipeError:  # `fedexp-runs list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(arguments: list[str]) -> int:
    if any(argument in HELP_FLAGS for argument in arguments):
        return _help()

    from fedexp import compose

    compose.register()
    if any(argument.partition("=")[0] in HYDRA_FLAGS for argument in arguments):
        return _hydra(arguments)
    sweep = any(argument in SWEEP_FLAGS for argument in arguments)
    overrides = [argument for argument in arguments if argument not in SWEEP_FLAGS]
    for flag in overrides:
        if flag.startswith("-"):
            raise ConfigError(
                f"unknown flag '{flag}'",
                expected=", ".join([*HELP_FLAGS, *SWEEP_FLAGS, *HYDRA_FLAGS]),
                do="a folder of configs is added with ./conf or hydra.searchpath=[file:///path/to/conf]",
            )
    jobs = compose.expand(overrides) if sweep else [overrides]
    configs = checked(jobs)
    if not sweep:
        return _single(configs[0])
    return _sweep(overrides, configs)


def _help() -> int:
    from fedexp.conf_folders import conf_dir, user_conf_dir
    from fedexp.help import help_text

    print(help_text(*filter(None, (conf_dir(), user_conf_dir()))), end="")
    return 0


def checked(jobs: list[list[str]]) -> list[dict[str, Any]]:
    """Compose and check every job before the first starts; the error names the job."""
    from fedexp.compose import compose
    from fedexp.core.build import build
    from fedexp.experiment import Experiment
    from fedexp.tracking.logger import Logger

    configs = []
    for number, overrides in enumerate(jobs):
        try:
            config = compose(overrides)
            Experiment.of(config)
            build(Logger, config["logger"], "logger").check()  # type: ignore[type-abstract]
        except FedexpError as error:
            if len(jobs) > 1:
                error.facts["where"] = f"job {number} ({' '.join(overrides)}): {error.facts.get('where') or 'config'}"
            raise
        configs.append(config)
    return configs


def _single(config: dict[str, Any]) -> int:
    from fedexp.execution import execute
    from fedexp.tracking.summary import print_result

    code, result = _attempt(lambda: execute(config))
    if result is not None:
        print_result(result, Path(result["folder"]))
    return code


def _attempt(work: Callable[[], dict[str, Any]]) -> tuple[int, dict[str, Any] | None]:
    """Run one job in this process; interruptions and failures as exit codes, with one line each."""
    from fedexp.execution import Interrupted

    try:
        return 0, work()
    except (KeyboardInterrupt, Interrupted) as error:
        print("interrupted: the same command resumes this run", file=sys.stderr)
        return getattr(error, "exit_code", 130), None
    except FedexpError as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            traceback.print_exception(error)
        print(f"error: {error}", file=sys.stderr)
        return JOB_ERROR, None


def _sweep(overrides: list[str], configs: list[dict[str, Any]]) -> int:
    """Hydra's own multirun over checked jobs, with a count before and a table after."""
    from fedexp.storage.run_folder import RunFolder, address
    from fedexp.tracking.summary import print_sweep

    name = hashlib.blake2b("\n".join(sorted(overrides)).encode(), digest_size=4).hexdigest()
    folders = [RunFolder(address(config)) for config in configs]
    done = sum(folder.result() is not None and config["reuse"] for folder, config in zip(folders, configs, strict=True))
    print(f"sweep {name}: {len(configs)} jobs - {done} done, {len(configs) - done} to run", flush=True)
    arguments = ["--multirun", *overrides]  # flags first: its parser wants overrides in one piece
    code = run_sweep(f"sweep-{name}", len(configs), lambda: _hydra(arguments))
    rows = [_row(folder, config) for folder, config in zip(folders, configs, strict=True)]
    print_sweep(rows)
    if code == 0 and any(row["status"] != "done" for row in rows):
        code = JOB_ERROR
    return code


def run_sweep(group: str, jobs: int, launch: Callable[[], int]) -> int:
    """Call `launch`, which starts `jobs` jobs through Hydra, with what these need to know of each other in the environment.

    Returns:
        its exit code, or that of the signal which interrupted it.
    """
    from fedexp.execution import Interrupted, terminable

    os.environ["FEDEXP_SWEEP"] = group
    os.environ["FEDEXP_SWEEP_JOBS"] = str(jobs)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # hydra/launcher=ray must not phone home
    os.environ["FEDEXP_LAUNCHER_PID"] = str(os.getpid())
    with terminable():
        try:
            return launch()
        except KeyboardInterrupt:
            return 130
        except Interrupted as stop:
            return stop.exit_code


def _row(folder: Any, config: dict[str, Any]) -> dict[str, Any]:
    from fedexp.storage.files import read_json

    status = read_json(folder.path / "status.json") or {"status": "queued", "error": None}
    result = folder.result()
    return {
        "overrides": config["overrides"],
        "status": "done" if result is not None else status["status"],
        "error": status.get("error"),
        "headline": (result or {}).get("headline"),
        "folder": str(folder.path),
    }


def _hydra(arguments: list[str]) -> int:
    """Hand over to Hydra, which parses flags, answers its flags and runs sweeps through its launchers."""
    import hydra

    from fedexp.conf_folders import conf_dir

    sys.argv = [sys.argv[0], *arguments]
    try:
        hydra.main(config_path=str(conf_dir()), config_name="config", version_base="1.3")(sweep_job)()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else JOB_ERROR
    return 0


def sweep_job(config: Any) -> float:
    """One job of a sweep, called by Hydra's launchers, possibly in another process. Returns the headline value."""
    from hydra.core.hydra_config import HydraConfig

    from fedexp.compose import JobFailedError, register, resolve
    from fedexp.execution import Interrupted, execute
    from fedexp.experiment import available_cores
    from fedexp.share import concurrent_jobs, take_gpu

    register()
    hydra_config = HydraConfig.get()
    overrides = list(hydra_config.overrides.task)
    jobs = int(os.environ.get("FEDEXP_SWEEP_JOBS", "1"))
    concurrent = concurrent_jobs(hydra_config.launcher, jobs, available_cores())
    os.environ["FEDEXP_CONCURRENT_JOBS"] = str(concurrent)
    resolved = resolve(config, hydra_config.runtime.choices, overrides)
    if os.environ.get("FEDEXP_LAUNCHER_PID") == str(os.getppid()):
        _die_with_parent()
    if concurrent > 1 and resolved["device"] in ("auto", "cuda"):
        take_gpu(hydra_config.job.num)
    label = f"job {hydra_config.job.num}: {' '.join(overrides)}"
    print(label, flush=True)
    try:
        result = execute(resolved, group=os.environ.get("FEDEXP_SWEEP"))
    except Interrupted as stop:
        raise SystemExit(stop.exit_code) from None
    except FedexpError as error:
        print(f"FAILED {label}\n{error}", file=sys.stderr, flush=True)
        raise JobFailedError(str(error).splitlines()[0]) from (error if os.environ.get("HYDRA_FULL_ERROR") else None)
    except Exception as error:  # a bug: told at once, its traceback is in error.txt and follows at the sweep's end
        print(f"FAILED {label}\n{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        raise
    headline = result["headline"]
    print(f"done   {label}: {headline['metric']} {headline['value']:.4f}", flush=True)
    return float(headline["value"])


@functools.cache
def _die_with_parent() -> None:
    """Once a process, in a worker of a launcher on this machine: end, resumably, when the sweep's own process is gone."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="fedexp-parent", daemon=True).start()
