"""The ``fedexp-table`` command: list, run, report, site."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fedexp.commands.errors import JOB_ERROR, Parser, run_guarded
from fedexp.commands.forecast import print_forecast
from fedexp.core.errors import ConfigError
from fedexp.core.paths import user_path
from fedexp.storage.stored_run import resume_condition
from fedexp.tables.cells import (
    Job,
    PlannedCell,
    check_rows_differ,
    key_of,
    launch_order,
    parse_only,
    placeholders,
    planned_cells,
    split_only,
)
from fedexp.tables.load import load_table, table_names
from fedexp.tables.report.files import report_folder, write_report
from fedexp.tables.report.report import Report
from fedexp.tables.report.terminal import print_report, print_tables
from fedexp.tables.schema import Table
from fedexp.tracking.outlet import require_output

if TYPE_CHECKING:
    from fedexp.running.experiment import Experiment
    from fedexp.tables.lookup import CellRun
    from fedexp.tables.record import TableRecord

# Prefixes of the keys that configure the whole sweep, and not a single run.
_SWEEP_KEYS = ("hydra", "output_root")


def main() -> None:
    """Run the command as a console script."""
    sys.exit(run_command(sys.argv[1:]))


def run_command(arguments: list[str]) -> int:
    """Run the command line.

    Returns:
        The exit code. It is 0 after a success, 1 if a cell failed, and 130 after
        Ctrl-C. With ``--strict``, it is also 1 if the verdict of a number is
        ``different``, or if a claim of the paper is contradicted. If a command only
        prints, for example with ``--dry-run``, it is also 1 if the output cannot be
        written. It is 2 for errors of the user, which are printed without a traceback.
    """
    if arguments[:1] == ["tune"]:
        return run_guarded(lambda: _refuse_tune(arguments[1:]))
    return run_guarded(lambda: parser().run(arguments))


def _refuse_tune(arguments: list[str]) -> int:
    raise ConfigError(
        "tuning is a separate command",
        where="fedexp-table",
        expected="list, run, report, site",
        got="tune",
        do=shlex.join(["fedexp-tune", *arguments]),
    )


def parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(prog="fedexp-table", description="Papers' tables: run them, compare, report.")
    commands = parser.add_subparsers(required=True, dest="command")

    listing = commands.add_parser(
        "list",
        command=_list,
        help="list the tables: title, data sets and whether their files exist, measured hours",
    )
    listing.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="paper/table | key=value",
        help="only these tables, with the status of their runs; overrides as for run",
    )
    listing.add_argument("--json", action="store_true", help="machine-readable: one JSON list")

    shared = Parser(add_help=False)
    shared.add_argument(
        "name", metavar="paper/table", help="a name that 'fedexp-table list' prints"
    )
    shared.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="key=value",
        help="overrides for every cell, as for fedexp",
    )
    variant = shared.add_mutually_exclusive_group()
    for name, text in (
        ("smoke", "the whole pipeline in under a minute"),
        ("reduced", "a variant for a small machine"),
    ):
        variant.add_argument(
            f"--{name}", dest="variant", action="store_const", const=name, help=text
        )
    shared.add_argument(
        "--only",
        action="extend",
        nargs="+",
        default=[],
        metavar="key=value",
        help="cells with these conditions (or method=...) only, several values: beta=0.01,0.1",
    )
    shared.add_argument("--seeds", type=_seeds, metavar="0,1", help="seeds instead of the table's")
    shared.add_argument(
        "--any-code",
        action="store_true",
        help="if the current code has made no result, show the newest of other code",
    )
    shared.add_argument(
        "--strict",
        action="store_true",
        help="exit code 1 if the verdict of a number is different, or if a claim of the paper is "
        "contradicted",
    )
    shared.add_argument(
        "--out",
        type=Path,
        help="folder of the report (default: <output_root>/tables/<paper>/<table>[-partial])",
    )
    shared.set_defaults(variant="full")

    run = commands.add_parser(
        "run",
        command=_run,
        parents=[shared],
        help="run what is missing or failed, then report",
        epilog="example: fedexp-table run demo/digits --only alpha=0.5 hydra/launcher=joblib",
    )
    run.add_argument(
        "--dry-run",
        action="store_true",
        help="check every run, print what is stored and what the others would take, and stop",
    )
    report = commands.add_parser(
        "report",
        command=_report,
        parents=[shared],
        help="report the runs that exist, without running any",
    )
    report.add_argument(
        "--from",
        dest="records",
        type=Path,
        action="append",
        metavar="DIR",
        help="folder of a record of runs, which may have been deleted. It can be given several "
        "times. Each run is taken from the first record that has it, so name a record with "
        "newer runs first. Files are written only with --out",
    )
    site = commands.add_parser(
        "site",
        command=_site,
        help="build a site of all committed results, to be read from disk",
    )
    site.add_argument(
        "--out", type=Path, default=Path("outputs/site"), help="its folder (default: %(default)s)"
    )
    site.add_argument(
        "--results",
        type=Path,
        metavar="DIR",
        help="folder of records (default: scripts/results of the checkout)",
    )
    return parser


def _seeds(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isdecimal() for part in parts) or len({int(part) for part in parts}) < len(
        parts
    ):
        raise argparse.ArgumentTypeError(
            f"'{text}' are not seeds: whole numbers, each once, e.g. 0,1,2"
        )
    return [int(part) for part in parts]


class _Request:
    """The cells of a table that the user asked for, and their runs."""

    def __init__(self, options: argparse.Namespace) -> None:

        if own := [o for o in options.overrides if key_of(o) == "seed" or o.isdecimal()]:
            raise ConfigError(
                "a table gives each run its seed", got=own[0], do="name the seeds: --seeds 0,1"
            )

        self.options = options
        self.table = load_table(options.name)
        clauses, overrides = split_only(self.table, options.only)
        options.overrides = [*options.overrides, *overrides]
        self.extra = _split_overrides(options.overrides, of_sweep=False)
        self.only = parse_only(self.table, clauses)

        # Equal rows are a mistake in the file even if the user asks for other cells.
        # Rows of a smoke variant may be equal, because it only tests the pipeline.
        check_rows_differ(self.table, "reduced" if options.variant == "reduced" else "full")

        self.cells = planned_cells(
            self.table,
            options.variant,
            only=self.only,
            seeds=options.seeds,
            extra=[o for o in options.overrides if not key_of(o).startswith("hydra")],
        )
        untuned = [why for cell in self.cells if (why := _why_untuned(self.table, cell))]
        if untuned and not any(planned.jobs for planned in self.cells):
            raise ConfigError(
                "no coefficients have been chosen for these columns",
                where=f"table {self.table.name}",
                do=untuned[0].partition(": ")[2],
            )
        self.find_runs()

    def find_runs(self) -> None:
        """Look up the stored run of each job of the cells."""
        from fedexp.tables.lookup import find

        self.cell_runs = find(self.cells, any_code=self.options.any_code)

    @property
    def root(self) -> Path:
        """The absolute path of ``output_root``."""
        from fedexp.config.compose import compose

        config = next((run.config for run in self.cell_runs.values() if run.config), None)
        if config is None:
            config = compose([o for o in self.options.overrides if o.startswith("output_root=")])
        return user_path(config["output_root"], "output_root").resolve()


def _why_untuned(table: Table, cell: PlannedCell) -> str:
    """Return why the coefficients of a cell have not been chosen, "" if they have."""
    return table.columns[cell.method].why_untuned(cell.conditions)


def _split_overrides(overrides: Iterable[str], *, of_sweep: bool) -> list[str]:
    """Return the overrides that configure the whole sweep, or all other overrides.

    The first kind is returned if `of_sweep` is true, the second kind otherwise.
    """
    return [o for o in overrides if key_of(o).startswith(_SWEEP_KEYS) == of_sweep]


def _run(options: argparse.Namespace) -> int:
    from fedexp.commands.launching import multirun, run_sweep
    from fedexp.running.result_data import check_result_data
    from fedexp.storage.run_folder import RunFolder
    from fedexp.tables.lookup import FAILED
    from fedexp.tables.progress import ProgressMonitor

    request = _Request(options)
    jobs = launch_order(request.cells)
    todo = [job for job in jobs if not _is_done(request.cell_runs[job.overrides])]
    # A run refuses a result of other data itself, but finished runs are not launched.
    check_result_data(
        (run.config, run.result) for run in request.cell_runs.values() if _is_done(run)
    )
    _check(request, todo)
    methods = {job.overrides: planned.method for planned in request.cells for job in planned.jobs}
    # With --any-code, the folder of a CellRun may be that of a run of other code.
    waiting = [
        (methods[job.overrides], RunFolder.of(request.cell_runs[job.overrides].config).path)
        for job in todo
    ]
    failed = sum(request.cell_runs[job.overrides].status in FAILED for job in todo)
    again = f" ({failed} failed before)" if failed else ""
    lacking = [cell for cell in request.cells if not cell.jobs]
    untuned = sum(bool(_why_untuned(request.table, cell)) for cell in lacking)
    absent = len(lacking) - untuned
    without = f"; {absent} cells have no method yet" if absent else ""
    without += f"; {untuned} cells are not tuned yet" if untuned else ""

    print(
        f"table {options.name}: {len(request.cells)} cells, {len(jobs)} runs - "
        f"{len(jobs) - len(todo)} done, {len(todo)} to run{again}{without}",
        flush=True,
    )
    if options.dry_run:
        print_forecast([request.cell_runs[job.overrides].config for job in todo])
        require_output()
        return 0

    if todo:
        sweep = _split_overrides(options.overrides, of_sweep=True)
        monitor = ProgressMonitor(options.name, waiting, len(jobs) - len(todo))
        with monitor():
            code = run_sweep(
                group(options), len(todo), lambda: multirun([job.overrides for job in todo], sweep)
            )
        request.find_runs()
        if code:
            # All runs have the command line's `reuse`.
            condition = resume_condition(request.cell_runs[todo[0].overrides].config.values)
            print(f"interrupted: the same command{condition} continues from here", file=sys.stderr)
            return code

    report = _make_report(request)
    if any(run.status != "done" for run in request.cell_runs.values()):
        return JOB_ERROR
    if request.table.next_commands:
        print("\nnext:", *request.table.next_commands, sep="\n  ")
    return _strict(options, report)


def _report(options: argparse.Namespace) -> int:
    return _strict(
        options, _report_of_records(options) if options.records else _make_report(_Request(options))
    )


def _report_of_records(options: argparse.Namespace) -> Report:
    """Build the report of a table from one or more stored records."""
    from fedexp.tables import record
    from fedexp.tables.build_report import report_of_record

    asked = [name for name in ("overrides", "only", "seeds") if getattr(options, name)] + [
        "variant"
    ] * (options.variant != "full")
    if asked:
        raise ConfigError(
            "a record determines its cells itself",
            where="--from",
            got=", ".join(asked),
            do="leave them out",
        )

    table = load_table(options.name)
    first, *others = (record.read(table, folder) for folder in options.records)
    found = record.completed(first, others)

    found, report = report_of_record(table, found, options.records[0])
    _publish(report, table, found, options.out, None)
    return report


def _is_done(run: CellRun) -> bool:
    return bool(run.result) and not run.other_code and bool(run.config["reuse"])


def _strict(options: argparse.Namespace, report: Report) -> int:
    ours = {method.key for method in report.methods if method.role == "ours"}
    beyond = any(cell.verdict == "different" and cell.method not in ours for cell in report.cells)
    contradicted = any(claim.state == "contradicted" for claim in report.paper_claims)
    return int(options.strict and (beyond or contradicted))


def group(options: argparse.Namespace) -> str:
    """Return the name of the group in which trackers show the runs of a table."""
    return str(options.name) + ("" if options.variant == "full" else f"-{options.variant}")


def _check(request: _Request, todo: Sequence[Job]) -> None:
    """Compose and check every job before the first job starts.

    The paths of the numbers that the table reads from each run are checked, too. If all
    jobs of a column are done, they are checked for one of them. An error names the run.
    """
    from fedexp.config.compose import compose
    from fedexp.running.check import CheckedJob, check_splits, name_job_in_errors

    placed: dict[tuple[str, ...], list[tuple[PlannedCell, Job]]] = {}
    for planned in request.cells:
        for job in planned.jobs:
            placed.setdefault(job.overrides, []).append((planned, job))

    begun = {*(job.overrides for job in todo)}
    waiting = {cell.method for cell in request.cells for job in cell.jobs if job.overrides in begun}
    first = {cell.method: cell.jobs[0] for cell in reversed(request.cells) if cell.jobs}
    done = [job for method, job in first.items() if method not in waiting]

    experiments = []
    for job in [*todo, *done]:
        name = f"a run of table {request.table.name} ({' '.join(job.overrides)})"
        with name_job_in_errors(name):
            experiment = CheckedJob.of(
                request.cell_runs[job.overrides].config or compose(list(job.overrides))
            ).experiment
            for planned, placed_job in placed[job.overrides]:
                _check_paths(request.table, planned, placed_job, experiment)
        if job.overrides in begun:
            experiments.append((name, experiment))
    check_splits(experiments)


def _without_local_paths(typed: str) -> str:
    """Return a typed command without paths of this machine, to be shown in a report."""
    words, remaining = iter(shlex.split(typed)), list[str]()
    for word in words:
        if word == "--out":
            next(words)
        elif not word.startswith(("--out=", "output_root=", "data_root=")):
            remaining.append(word)
    return shlex.join(remaining)


def _check_paths(table: Table, planned: PlannedCell, job: Job, experiment: Experiment) -> None:
    """Raise `ConfigError` if the table reads a number that the run will not have.

    The numbers are the value of a cell, the values of the last rounds if the table
    pools them, the value by which a grid point is chosen, and the curves of claims.
    """
    from fedexp.tables.paths import check_curve, check_path

    column = table.columns[planned.method]

    grid = column.grid
    for place, path in (
        ("headline.value", table.value_path(column)),
        ("headline.pooled_rounds", table.headline.pooled_rounds if column.value is None else None),
        ("methods.grid.by", None if grid is None else grid.by),
    ):
        if path is None:
            continue
        if (
            place == "methods.grid.by"
            and grid is not None
            and grid.held_out
            and not experiment.has_validation
        ):
            raise ConfigError(
                f"the {grid.over} of a grid is chosen by '{grid.by}', which is not measured",
                where="eval.held_out",
                expected=", ".join(experiment.metric_names),
                do="set eval.held_out to a number of training samples",
            )
        check_path(path.format(**placeholders(planned, job)), experiment, place)
    if (
        grid is not None
        and grid.by is not None
        and grid.best == "highest"
        and not experiment.task.higher_is_better(grid.by)
    ):
        raise ConfigError(
            f"the point with the highest '{grid.by}' is the worst one",
            where="methods.grid.best",
            expected="lowest",
            got=grid.best,
        )

    for claim in table.claims:
        if claim.curve is not None and column.key in (*claim.a, *claim.b):
            check_curve(claim.curve, claim.axis, experiment, f"claims.{claim.id}.curve")


def _make_report(request: _Request) -> Report:
    """Build the report, print it and write its files.

    If the runs were sent to W&B, a summary is sent there, too.
    """
    from fedexp.tables.build_report import build_report, draw_figures, is_partial, with_pictures
    from fedexp.tables.record import TableRecord, recorded

    options, table, cells, root = request.options, request.table, request.cells, request.root
    asked = TableRecord(
        options.variant,
        request.only,
        options.seeds,
        request.extra,
        _without_local_paths(options.typed),
        {},
    )

    record = recorded(table, cells, request.cell_runs, root, asked)
    report = build_report(table, cells, record)
    pictures, missed = draw_figures(table, cells, request.cell_runs, report)
    record = replace(
        record, figures=[(picture.name, picture.title) for picture in pictures], missed=missed
    )
    report = with_pictures(report, pictures, missed)

    folder = options.out or report_folder(
        root, report.name, options.variant, is_partial(table, cells, record)
    )
    _publish(report, table, record, folder, root)

    logger = next((run.config["logger"] for run in request.cell_runs.values() if run.config), None)
    if logger is not None and any(run.result for run in request.cell_runs.values()):
        from fedexp.tables.report.wandb import send_summary

        if send_summary(report, logger, group(options), folder):
            print(f"W&B:  group {group(options)}, summary run in {folder / 'wandb'}")
    return report


def _publish(
    report: Report, table: Table, record: TableRecord, folder: Path | None, root: Path | None
) -> None:
    """Print the report, and write it to `folder` with the record of its runs.

    Nothing is written if `folder` is None. The page links to the runs in `root`. It has
    no such links if `root` is None.
    """
    from fedexp.storage.files import delete_path, stale_files
    from fedexp.tables.record import write

    print_report(report)
    if folder is None:
        require_output()
        return
    for left in stale_files(folder):
        delete_path(left)
    write(table, record, folder)
    page = write_report(report, folder, root, record.configs)
    print(
        f"files: {folder}/report.md, .csv, .tex, runs.csv"
        + (", pictures as .png, .svg" if report.pictures else "")
    )
    print(f"page: {page}")


def _is_override(text: str) -> bool:
    return "=" in text or text.startswith("~")


def _site(options: argparse.Namespace) -> int:
    from fedexp.site.build import build

    print(f"site: {build(options.out, options.results)}")
    return 0


def _list(options: argparse.Namespace) -> int:
    from fedexp.tables.data_files import data_root
    from fedexp.tables.listing import list_runs, list_table

    names = [text for text in options.overrides if not _is_override(text)]
    overrides = [text for text in options.overrides if _is_override(text)]
    known = table_names()
    for name in names:
        if name not in known:
            load_table(name)  # the error suggests the nearest name

    if names:
        rows = []
        for name in names:
            print(f"composing the runs of table {name}", file=sys.stderr, flush=True)
            rows.append(list_runs(name, overrides))
    else:
        if others := [text for text in overrides if not text.startswith("data_root=")]:
            raise ConfigError(
                "overrides change the runs of named tables only",
                got=others[0],
                do=f"name the tables: fedexp-table list demo/digits {others[0]}",
            )
        rows = [list_table(name, data_root(overrides)) for name in known]

    if options.json:
        print(json.dumps(rows, indent=2))
    else:
        print_tables(rows)
    require_output()
    return 0


if __name__ == "__main__":
    main()
