"""The ``fedexp`` command.

All jobs are checked before the first job runs. A single job runs in this process, and a
sweep runs through Hydra.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedexp import __version__
from fedexp.commands.errors import JOB_ERROR, run_guarded
from fedexp.core.errors import ConfigError, FedexpError
from fedexp.tracking.outlet import require_output

if TYPE_CHECKING:
    from fedexp.core.resolved_config import ResolvedConfig
    from fedexp.running.check import CheckedJob
    from fedexp.storage.run_folder import RunFolder
    from fedexp.tuning.objective import Objective

SWEEP_FLAGS = ("-m", "--multirun")
HELP_FLAGS = ("--help", "-h")
VERSION_FLAG = "--version"
DRY_FLAG = "--dry-run"
# Flags that Hydra answers.
HYDRA_FLAGS = (
    "--hydra-help",
    "--info",
    "-i",
    "--cfg",
    "-c",
    "--shell-completion",
    "-sc",
)
# Configs that --cfg prints.
CONFIGS = ("job", "hydra", "all")


def main() -> None:
    """Run the command as a console script."""
    sys.exit(run_command(sys.argv[1:]))


def run_command(arguments: list[str]) -> int:
    """Run the command line.

    Returns:
        The exit code. Errors of the user are printed without a traceback.
    """
    return run_guarded(lambda: _run(arguments))


def _run(arguments: list[str]) -> int:
    if any(argument in HELP_FLAGS for argument in arguments):
        return _help([argument for argument in arguments if not argument.startswith("-")])
    if VERSION_FLAG in arguments:
        print(f"fedexp {__version__}")
        return 0

    from fedexp.commands.launching import run_hydra
    from fedexp.commands.wandb_agent import without_dashes
    from fedexp.config.messages import refuse_flags
    from fedexp.config.search_path import register
    from fedexp.config.sweep_expansion import expand
    from fedexp.running.check import check_jobs, check_split, check_splits, job_name

    register()
    arguments = without_dashes(arguments)
    if (asked := _overrides_to_print(arguments)) is not None:
        return _print_config(asked)
    if any(argument.partition("=")[0] in HYDRA_FLAGS for argument in arguments):
        return run_hydra(arguments)
    sweep = any(argument in SWEEP_FLAGS for argument in arguments)
    overrides = [argument for argument in arguments if argument not in (*SWEEP_FLAGS, DRY_FLAG)]
    refuse_flags(overrides, [*HELP_FLAGS, VERSION_FLAG, *SWEEP_FLAGS, DRY_FLAG, *HYDRA_FLAGS])
    jobs = expand(overrides) if sweep else [overrides]
    checked = check_jobs(jobs)

    if DRY_FLAG in arguments:
        check_splits(
            (job_name(i, job.config.overrides), job.experiment) for i, job in enumerate(checked)
        )
        return _dry_run([job.config for job in checked])

    if not sweep:
        check_split(checked[0])
        return _single(checked[0])
    return _sweep(overrides, checked)


def _overrides_to_print(arguments: list[str]) -> list[str] | None:
    """Return the overrides if the command line has ``--cfg job``, and otherwise None.

    Hydra itself answers ``--cfg hydra``, ``--cfg all`` and its other flags.
    """
    given = [
        flag.partition("=")[2] or after
        for flag, after in zip(arguments, [*arguments, ""][1:], strict=True)
        if flag.partition("=")[0] in ("--cfg", "-c")
    ]

    if given and given[0] not in CONFIGS:
        raise ConfigError(
            f"there is no config '{given[0]}' to print",
            where="--cfg",
            expected=" | ".join(CONFIGS),
            do="--cfg job",
        )

    rest = [argument for argument in arguments if argument not in ("--cfg=job", "--resolve")]
    for flag in ("--cfg", "-c"):
        if flag in rest and rest[rest.index(flag) + 1 :][:1] == ["job"]:
            del rest[rest.index(flag) : rest.index(flag) + 2]
    asked = len(rest) < len([argument for argument in arguments if argument != "--resolve"])

    return rest if asked and not any(argument.startswith("-") for argument in rest) else None


def _print_config(overrides: list[str]) -> int:
    """Print the config as YAML. References and environment variables are resolved."""
    from omegaconf import OmegaConf

    from fedexp.config.compose import compose

    print(OmegaConf.to_yaml(OmegaConf.create(compose(overrides).values)), end="")
    require_output()
    return 0


def _help(topics: list[str]) -> int:
    from fedexp.commands.help import help_text, topic_text
    from fedexp.config.folders import conf_dirs
    from fedexp.config.groups import groups

    folders = conf_dirs()
    # Overrides that do not set a group have no help, so they are ignored.
    named = dict(groups(tuple(folders)))
    topics = [topic for topic in topics if "=" not in topic or topic.partition("=")[0] in named]
    texts = [topic_text(topic, *folders) for topic in topics] or [help_text(*folders)]
    print("\n".join(texts), end="")
    return 0


def _dry_run(configs: list[ResolvedConfig]) -> int:
    """Print what a run or a sweep would do, after all its jobs were checked."""
    from fedexp.commands.forecast import print_forecast
    from fedexp.storage.run_folder import RunFolder

    rows = [_job_row(RunFolder.of(config), config) for config in configs]
    todo = [
        c for c, row in zip(configs, rows, strict=True) if row["status"] != "done" or not c["reuse"]
    ]
    print(f"dry run: {len(configs)} runs - {len(configs) - len(todo)} done, {len(todo)} to run")
    _print_weights_note(configs)
    _print_split_note(configs)
    print_forecast(todo)
    require_output()
    return 0


def _single(job: CheckedJob) -> int:
    """Run one job in this process.

    If the job is interrupted or fails, the reason is printed, and an exit code is
    returned.
    """
    from fedexp.commands.launching import execute_job
    from fedexp.commands.wandb_agent import log_stored_run
    from fedexp.storage.run_folder import RunFolder, read_result_and_status
    from fedexp.tracking.terminal import print_result

    stored = job.config["reuse"] and read_result_and_status(RunFolder.of(job.config))[0]
    result = execute_job(job, "this run")
    if isinstance(result, int):
        return result
    if stored:
        log_stored_run(job.config, Path(result["folder"]))
    print_result(result, Path(result["folder"]))
    return 0


def _sweep(overrides: list[str], jobs: list[CheckedJob]) -> int:
    """Run checked jobs as Hydra's multirun.

    The number of jobs is printed before the first job. A table of results is printed
    after the last one.
    """
    from fedexp.commands.launching import checked_jobs, recorded_jobs, run_hydra, run_sweep
    from fedexp.config.compose import resolve_stored
    from fedexp.config.sweep_expansion import sweep_title, sweeper_plugin
    from fedexp.core.resolved_config import ResolvedConfig
    from fedexp.running.check import check_splits, job_name
    from fedexp.storage.run_folder import RunFolder
    from fedexp.storage.stored_run import resume_condition
    from fedexp.tracking.terminal import print_sweep

    sweeper = sweeper_plugin(overrides)
    grid = sweeper is None
    objective = None
    if sweeper is not None:
        from fedexp.commands.sweepers import objective_of_sweep

        objective = objective_of_sweep(sweeper, jobs)

    name = hashlib.blake2b("\n".join(sorted(overrides)).encode(), digest_size=4).hexdigest()
    configs = [job.config for job in jobs]
    folders = [RunFolder.of(config) for config in configs]
    rows = [_job_row(folder, config) for folder, config in zip(folders, configs, strict=True)]
    todo = [
        row["status"] != "done" or not config["reuse"]
        for row, config in zip(rows, configs, strict=True)
    ]
    check_splits(
        (job_name(i, configs[i].overrides), jobs[i].experiment) for i in range(len(jobs)) if todo[i]
    )

    done = todo.count(False)
    counted = f"{len(configs)} jobs - {done} done, {len(configs) - done} to run"
    by = "" if objective is None else f", by {objective.text}"
    print(f"sweep {name}: {counted if grid else f'its sweeper chooses the jobs{by}'}", flush=True)
    _print_weights_note(configs)
    _print_split_note(configs)

    def launch() -> int:
        # If all jobs are done, Hydra is not called, because it would compose every job
        # again.
        if done == len(configs) and grid:
            return _reuse_results(jobs)
        # Hydra's parser refuses a flag between two overrides, so the flag is the first
        # argument.
        return run_hydra(["--multirun", *overrides])

    with checked_jobs(jobs), recorded_jobs() as record:
        title = sweep_title(overrides, name)
        objective_path = "" if objective is None else objective.path
        code = run_sweep(
            f"sweep-{name}", len(configs), launch, title=title, objective_path=objective_path
        )
        # Hydra's basic sweeper runs the jobs in `configs`. Another sweeper may have run
        # other jobs.
        if not grid:
            configs = [resolve_stored(ResolvedConfig.from_stored(one)) for _, one in record()]

    if not configs:
        print("no job was recorded here: see the sweeper's own output")
        return code
    rows = [_job_row(RunFolder.of(config), config, objective) for config in configs]
    metric = None if objective is None else objective.metric
    print_sweep(rows, metric, _best_job(rows, objective))
    if code > 128 and grid:
        # All jobs have the command line's `reuse`.
        condition = resume_condition(configs[0].values)
        print(f"interrupted: the same command{condition} continues from here", file=sys.stderr)
    if code == 0 and any(row["status"] != "done" for row in rows):
        code = JOB_ERROR

    return code


def _best_job(rows: Sequence[Mapping[str, Any]], objective: Objective | None) -> int | None:
    """Return the number of the first job with the best objective, or None."""
    if objective is None:
        return None
    sign = 1 if objective.higher_is_better else -1
    done = [number for number, row in enumerate(rows) if row["objective"] is not None]
    return max(done, key=lambda number: sign * rows[number]["objective"], default=None)


def _print_weights_note(configs: list[ResolvedConfig]) -> None:
    """Print a note if methods weigh their clients differently.

    There is no note if the user set ``aggregator.weights``.
    """
    weights: dict[str, list[str]] = {}
    for config in configs:
        own = config["aggregator"].get("weights")
        if any(override.startswith("aggregator.weights=") for override in config.overrides):
            return
        if own is not None and config["method"] not in weights.setdefault(own, []):
            weights[own].append(config["method"])

    if len(weights) > 1:
        found = ", ".join(f"{own} ({', '.join(methods)})" for own, methods in weights.items())
        print(
            f"note: the methods weigh their clients differently: {found}. "
            "aggregator.weights=uniform makes them alike"
        )


def _print_split_note(configs: list[ResolvedConfig]) -> None:
    """Print a note if methods have other splits, because of the server's data.

    There is no note if all methods have the same amounts, for example in a sweep over
    ``proxy.size``.
    """
    reserved: dict[str, set[float]] = {}
    for config in configs:
        proxy = config["proxy"]
        taken = proxy["size"] if proxy["source"] == "train" and proxy["dataset"] is None else 0
        reserved.setdefault(config["method"], set()).add(taken)

    if len(set(map(frozenset, reserved.values()))) > 1:
        sizes = sorted(set().union(*reserved.values()))
        methods = {size: [name for name, own in reserved.items() if size in own] for size in sizes}
        found = ", ".join(f"{size or 'none'} ({', '.join(methods[size])})" for size in sizes)
        # With a data set of the server, `proxy.size` reserves no training samples.
        others = any(config["proxy"]["dataset"] is not None for config in configs)
        print(
            "note: the methods reserve different amounts of training samples for the server, so "
            f"their clients have different data: {found}. "
            f"{'proxy.dataset=null ' if others else ''}proxy.source=train "
            f"proxy.size={sizes[-1]} makes them alike"
        )


def _reuse_results(jobs: list[CheckedJob]) -> int:
    """Read and check the stored result of each job of a finished sweep."""
    from fedexp.commands.launching import print_failure
    from fedexp.running.execute import execute

    failed = False
    for number, job in enumerate(jobs):
        try:
            execute(job.config, experiment=job.experiment)
        except FedexpError as error:
            print_failure(f"job {number}: {' '.join(job.config.overrides)}", error)
            failed = True
    return JOB_ERROR if failed else 0


def _job_row(
    folder: RunFolder, config: ResolvedConfig, objective: Objective | None = None
) -> dict[str, Any]:
    from fedexp.storage.run_folder import read_result_and_status

    result, state = read_result_and_status(folder)
    status = "done" if result else state.get("status", "queued")
    # If the result was deleted, the next launch executes the job again.
    if status == "missing":
        status = "queued"

    return {
        "overrides": config.overrides,
        "status": status,
        "error": state.get("error"),
        "headline": result.get("headline"),
        "objective": None if objective is None else objective.value(result),
        "folder": str(folder.path),
    }
