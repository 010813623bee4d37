"""The ``fedexp-tune`` command, which chooses hyper-parameters on held-out data."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedexp.commands.errors import JOB_ERROR, Parser, print_error, run_guarded
from fedexp.core.errors import ConfigError, FedexpError, suggest
from fedexp.tracking.outlet import require_output
from fedexp.tuning.search_keys import SEARCH_KEYS

if TYPE_CHECKING:
    from fedexp.tuning.plan import SearchPlan
    from fedexp.tuning.study import Launch, TuningStudy
    from fedexp.tuning.summary import Summary


def main() -> None:
    """Run the command as a console script."""
    sys.exit(run_command(sys.argv[1:]))


def run_command(arguments: list[str]) -> int:
    """Run the command line.

    Returns:
        The exit code. It is 0 after a success, 1 if all trials or a test run failed,
        and 130 after Ctrl-C. With ``--dry-run``, it is also 1 if the output cannot be
        written. It is 2 for errors of the user, which are printed without a traceback.
    """
    return run_guarded(lambda: parser().run(arguments))


def parser() -> Parser:
    """Return the parser of the command line."""
    keys = "; ".join(f"{key}=: {text}" for key, text in SEARCH_KEYS.items())
    parser = Parser(
        prog="fedexp-tune",
        command=_tune,
        description="Choose hyper-parameters on held-out data, and test the chosen values.",
        epilog="example: fedexp-tune method=NAME 'local.lr=log(0.001,1)' trials=20 seeds=0,1",
    )
    parser.add_argument(
        "arguments",
        nargs="*",
        default=[],
        metavar="key=value",
        help="ranges of keys: key=log(LOW,HIGH), uniform(LOW,HIGH), int(LOW,HIGH), "
        "logint(LOW,HIGH) or a list of values (A,B,C); overrides of every run, as for fedexp; "
        f"and keys of the search. {keys}. Without a range: NAME [METHOD ...], a file of "
        "conf/tuned without its suffix, and the methods of it that are tuned (default: all)",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check every run, print the search, and stop",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="only for a file of conf/tuned: write the results to this file "
        "(required if an override changes them)",
    )
    return parser


def _tune(options: argparse.Namespace) -> int:
    words = [text for text in options.arguments if "=" not in text and not text.startswith("~")]
    overrides = [text for text in options.arguments if text not in words]
    if words:
        return _tune_file(words[0], words[1:], overrides, options)
    if options.out is not None:
        raise ConfigError(
            "--out belongs to the tuning of a file of conf/tuned",
            where="--out",
            got=str(options.out),
            do="set output_root, the folder of all results",
        )
    return _search(overrides, options)


def _search(arguments: Sequence[str], options: argparse.Namespace) -> int:
    """Search the ranges of a command line."""
    from fedexp.tuning.plan import plan_search
    from fedexp.tuning.study import TuningStudy

    hydra = [one for one in arguments if one.startswith("hydra")]
    others = [one for one in arguments if one not in hydra or one.startswith("hydra.searchpath")]
    plan = plan_search(others)
    search = plan.search
    launch = _launcher(plan.name, hydra, others, search.objective.path)
    batch = plan.batch or _batch(plan, hydra)
    study = TuningStudy(search, launch, lambda text: print(text, flush=True))

    _print_plan(plan, batch)
    if options.dry_run:
        require_output()
        return 0
    with study.locked():
        begun = len(study.rows())
        if begun:
            print(f"{begun} trials were begun before", flush=True)
        code = study.run(plan.trials, batch)
        if not code:
            code = _finish(plan, study, _launcher(plan.name, hydra, others, ""), options.typed)
    if code >= 128:
        print("interrupted: the same command continues from here", file=sys.stderr)
    return code


def _print_plan(plan: SearchPlan, batch: int) -> None:
    search = plan.search
    rungs = search.rungs
    print(f"study {plan.name}: {plan.trials} trials, sampler {search.sampler}, {batch} at a time")
    print(f"ranges:    {'  '.join(one.text for one in search.space)}")
    print(f"objective: {search.objective.text}, mean over seeds {_listed(search.seeds)}")
    print(f"held out:  {plan.held_out}")
    if len(rungs) > 1:
        print(f"halving:   one trial in {search.factor} goes on after {_listed(rungs[:-1])} rounds")
    print(f"test:      {plan.headline} of the best point, seeds {_listed(plan.test_seeds)}")
    print(f"files:     {_shown(search.folder)}", flush=True)


def _shown(folder: Path) -> Path:
    """Return a path that starts at the working directory, if it can."""
    here = Path.cwd().resolve()
    return folder.relative_to(here) if folder.is_relative_to(here) else folder


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _batch(plan: SearchPlan, hydra: Sequence[str]) -> int:
    """Return the number of trials that are launched together.

    TPE learns from finished trials, so it gets only as many trials as the launcher runs
    at the same time.
    """
    from fedexp.config.hydra_composition import use_hydra
    from fedexp.config.hydra_private import compose_for_multirun
    from fedexp.config.sweep_expansion import check_launcher
    from fedexp.runtime.resources import available_cores, concurrent_jobs

    with use_hydra([*hydra]):
        config = compose_for_multirun(hydra)
        check_launcher(config)
        if plan.search.sampler != "tpe":
            return plan.trials
        seeds = len(plan.search.seeds)
        jobs = concurrent_jobs(config.hydra.launcher, plan.trials * seeds, available_cores())
        return max(1, jobs // seeds)


def _launcher(
    name: str, hydra: Sequence[str], overrides: Sequence[str], objective_path: str
) -> Launch:
    """Return a function that launches the jobs that have no stored result.

    Args:
        name: Name of the study.
        hydra: Overrides of Hydra's own keys, such as the launcher.
        overrides: All other overrides.
        objective_path: As for `fedexp.commands.launching.run_sweep`.
    """
    from fedexp.commands.launching import multirun, run_sweep
    from fedexp.config.compose import compose
    from fedexp.running.result_data import check_result_data
    from fedexp.tuning.study import read_run

    path = [one for one in overrides if one.startswith("hydra.searchpath")]
    of_sweep = [*hydra, *(one for one in overrides if one.startswith("output_root="))]

    def launch(jobs: Sequence[Sequence[str]]) -> int:
        distinct = dict.fromkeys(map(tuple, jobs))
        configs = {job: compose([*path, *job]) for job in distinct}
        stored = {
            job: result
            for job, config in configs.items()
            if config["reuse"] and (result := read_run(config)[0])
        }
        # A run refuses a result of other data itself, but these runs are not launched.
        check_result_data((configs[job], result) for job, result in stored.items())
        todo = [job for job in distinct if job not in stored]
        if not todo:
            return 0
        return run_sweep(
            f"tune-{name}",
            len(todo),
            lambda: multirun(todo, of_sweep),
            title=f"tune {name}",
            objective_path=objective_path,
        )

    return launch


def _finish(plan: SearchPlan, study: TuningStudy, launch: Launch, typed: str) -> int:
    """Run the best point with the test seeds, and print and write the summary."""
    from fedexp.config.compose import compose
    from fedexp.storage.files import replacing, write_json, write_text
    from fedexp.tuning.picture import draw_trials
    from fedexp.tuning.study import read_run
    from fedexp.tuning.summary import Summary, TestRun, require_best, trials_csv

    search, rows = plan.search, study.rows()
    folder = search.folder
    write_text(folder / "trials.csv", trials_csv(rows))
    title = f"{' '.join(search.fixed) or 'defaults'}: {search.sampler}, {len(rows)} trials"
    found = study.best()
    with replacing(folder / "trials.png") as part:
        draw_trials(rows, found, search.space, search.objective, part, title)
    try:
        best = require_best(found, rows)
    except FedexpError as error:
        print_error(error)
        return JOB_ERROR

    point = [f"{key}={value}" for key, value in best.point.items()]
    jobs = plan.test_jobs(point)
    if code := launch(jobs):
        return code
    tests = []
    for seed, job in zip(plan.test_seeds, jobs, strict=True):
        result, _ = read_run(compose([*search.search_path, *job]))
        tests.append(TestRun(seed, float(result["headline"]["value"]) if result else None))

    summary = Summary(
        typed,
        search.objective,
        plan.held_out,
        search.seeds,
        tuple(rows),
        best,
        search.space,
        plan.headline,
        tuple(tests),
        (*search.search_path, *search.fixed),
    )
    write_json(folder / "result.json", summary.to_json())
    _print_summary(summary, folder)
    return JOB_ERROR if any(test.value is None for test in tests) else 0


def _print_summary(summary: Summary, folder: Path) -> None:
    from rich.table import Column

    from fedexp.tracking.numbers import number_text
    from fedexp.tracking.terminal import console, escaped, ruled_table

    out = console()
    # A search over the rounds already has this column
    rounds = [] if "rounds" in summary.best.point else [Column("rounds", justify="right")]
    table = ruled_table(
        Column("trial", justify="right"),
        *summary.best.point,
        Column(summary.objective.metric, justify="right"),
        *rounds,
        Column("state", overflow="fold"),
    )
    for row in summary.rows:
        state = f"failed: {row.error}" if row.error else row.state
        table.add_row(
            str(row.number),
            *map(escaped, row.point.values()),
            "-" if row.value is None else number_text(row.value),
            *(["-" if row.rounds is None else str(row.rounds)] if rounds else []),
            escaped("done, best" if row == summary.best else state),
        )
    out.print(table)

    counts = {state: sum(row.state == state for row in summary.rows) for state in _STATES}
    lines = [
        ", ".join(f"{number} {state}" for state, number in counts.items() if number),
        f"best:  {' '.join(summary.point)} (trial {summary.best.number})",
        *(f"note:  {warning}" for warning in (*summary.edges, *summary.ties)),
        f"test:  {summary.test_text}",
        f"again: {summary.best_command}",
        f"files: {_shown(folder)}/result.json, trials.csv, trials.png, journal.log",
    ]
    for line in lines:
        out.print(line, markup=False, soft_wrap=True)


_STATES = ("done", "stopped", "failed", "unfinished")


def _tune_file(
    name: str, methods: Sequence[str], overrides: Sequence[str], options: argparse.Namespace
) -> int:
    """Tune the methods of a file of ``conf/tuned``."""
    from fedexp.tables.sweeps import count_runs, plan_tuning, run_tuning
    from fedexp.tuning.tuned_files import tuned_files

    if own := [one for one in overrides if one.partition("=")[0] in SEARCH_KEYS]:
        raise ConfigError(
            f"conf/tuned/{name}.yaml says what is searched",
            where=own[0],
            expected="overrides of runs",
            do="leave it out, or change the file",
        )
    if name not in tuned_files():
        raise ConfigError(
            f"no file conf/tuned/{name}.yaml",
            where="fedexp-tune",
            expected="key=value, or the name of a file of conf/tuned",
            got=name,
            do=suggest(name, tuned_files()),
        )
    hydra = [one for one in overrides if one.startswith("hydra")]
    others = [one for one in overrides if one not in hydra]
    plan = plan_tuning(name, methods, others, options.out)
    total, done = count_runs(plan)
    print(f"conf/tuned/{name}.yaml: {total} runs - {done} done, {total - done} to run", flush=True)
    if options.dry_run:
        require_output()
        return 0

    launch = _launcher(name, hydra, others, plan.tuning.by)
    try:
        code = run_tuning(plan, launch, lambda text: print(text, flush=True))
    except FedexpError as error:
        print_error(error)
        return JOB_ERROR
    if code >= 128:
        print("interrupted: the same command continues from here", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
