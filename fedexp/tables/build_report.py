"""Functions that build the report of a table from the record of its runs.

The record contains the results of the runs (`fedexp.tables.record`). The report
compares them with the paper. It has numbers, verdicts, claims and warnings.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedexp.core.build import build
from fedexp.core.errors import ConfigError, FedexpError
from fedexp.storage.identity import NON_SCIENTIFIC
from fedexp.tables.cells import PlannedCell, command, declared_seeds, key_of, planned_cells
from fedexp.tables.chance import is_at_chance
from fedexp.tables.claims import decide_claims
from fedexp.tables.drawing import Drawing, DrawnRun
from fedexp.tables.grouping import grouped
from fedexp.tables.lookup import FAILED, CellRun
from fedexp.tables.ranks import spearman, tied
from fedexp.tables.record import (
    RunRecord,
    TableRecord,
    only_text,
    pictures,
    placed,
    split_seed_of,
)
from fedexp.tables.report import layout, texts
from fedexp.tables.report import pictures as number_pictures
from fedexp.tables.report.configs import flat
from fedexp.tables.report.report import Agreement, Cell, Origin, Picture, Report, Summary, Variant
from fedexp.tables.schema import Grid, Table, fits
from fedexp.tables.settings import warning_of_settings
from fedexp.tables.verdicts import judge, mean_interval

# Largest number of names in a warning.
_SHOWN = 6


def build_report(table: Table, cells: Sequence[PlannedCell], record: TableRecord) -> Report:
    """Build the report of a table's cells from the recorded runs of these cells.

    A cell is one column (a method) in one row of the table.
    """
    smaller = table.smaller(record.variant)
    blamed = [override for override in record.extra if _alters(override, table)]
    made = [
        _judged_cell(table, planned, record, smaller.what if smaller else "", blamed)
        for planned in cells
    ]
    done = {run.run: run for planned in cells for run in record.runs_of(table, planned) if run.done}
    present = {cell.method for cell in made}

    variant: Variant = (
        "partial"
        if record.variant == "full" and is_partial(table, cells, record)
        else record.variant
    )

    objections = (_objection(record.runs_of(table, planned), "", blamed) for planned in cells)

    return Report(
        name=table.name,
        paper=table.paper,
        source=table.source,
        title=table.title,
        metric=table.metric,
        unit=table.unit,
        higher_is_better=table.higher_is_better,
        variant=variant,
        keys=table.keys,
        methods=tuple(table.method(column) for column in table.methods if column.key in present),
        cells=tuple(made),
        agreement=tuple(
            _agreement([c for c in made if table.columns[c.method].reads is None], table.tie)
        ),
        tolerance=None if table.tolerance is None else table.tolerance.within,
        assumptions=tuple(_assumptions(table, present)),
        warnings=tuple(_warnings(table, variant, cells, made, record, blamed)),
        facts=tuple(_facts(cells, list(done.values()))),
        command=record.command,
        claims=decide_claims(
            table, variant, made, record.curves, next(filter(None, objections), "")
        ),
        summaries=tuple(_summaries(table, made)),
        left_out=tuple(_left_out(table, made)),
    )


def report_of_record(table: Table, record: TableRecord, folder: Path) -> tuple[TableRecord, Report]:
    """Build the report of a stored record, with the pictures stored beside it.

    Args:
        table: The table.
        record: The record as it was read.
        folder: Folder of the record.

    Returns:
        The record and the report. Each run in the returned record also has its pooled
        conditions, which are those that do not identify its row (`placed`).
    """
    cells = planned_cells(
        table, record.variant, only=record.only, seeds=record.seeds, extra=record.extra
    )
    record = placed(record, table, cells)
    report = build_report(table, cells, record)
    return record, with_pictures(report, pictures(record, folder), record.missed)


def is_partial(table: Table, cells: Sequence[PlannedCell], record: TableRecord) -> bool:
    """Return whether a report lacks runs of its variant, or contains other runs.

    The variant of the table declares cells, seeds and overrides. The result is True if
    the user asked for only some of these cells, for other seeds, or for overrides that
    may change the runs. It is also True if some runs have no number, or if a column has
    no runs because its coefficients have not been chosen.
    """
    if record.variant != "smoke" and any(column.untuned for column in table.methods):
        return True
    if record.only or any(_alters(override, table) for override in record.extra):
        return True
    asked = set(record.seeds or ())
    if asked and any(asked != set(declared_seeds(table, record.variant, c)) for c in table.methods):
        return True
    return any(run.value is None for planned in cells for run in record.runs_of(table, planned))


def draw_figures(
    table: Table,
    cells: Sequence[PlannedCell],
    cell_runs: Mapping[tuple[str, ...], CellRun],
    report: Report,
) -> tuple[tuple[Picture, ...], tuple[str, ...]]:
    """Draw the figures in `Table.drawings` from the files of the table's runs.

    A note below each figure names the variant of the report.

    Returns:
        The pictures, and one reason for every figure that could not be drawn.
    """
    # One run may measure all points of a hyper-parameter grid. The jobs of these points
    # then have the same overrides. Only one of them is taken, so the run is drawn once.
    runs = [
        DrawnRun(
            {**planned.conditions, **job.pooled},
            planned.method,
            table.columns[planned.method].label,
            job.seed,
            run.folder,
            run.config,
            run.result,
            table.plot_styles.get(planned.method),
            table.columns[planned.method].role,
        )
        for planned in cells
        for job in {(split_seed_of(job), job.overrides): job for job in planned.jobs}.values()
        if (run := cell_runs[job.overrides]).result
    ]
    drawings = [
        build(Drawing, node, f"drawings[{number}]")  # type: ignore[type-abstract]
        for number, node in enumerate(table.drawings)
    ]
    pictures: tuple[Picture, ...] = ()
    taken = {*number_pictures.RESERVED}
    missed = []
    notes = [texts.variant_note(report), texts.stamp(report)]
    for drawing in drawings:
        try:
            new = drawing.draw(runs, notes)
            names = [picture.name for picture in new]
            if twice := taken.intersection(names):
                raise ConfigError(
                    f"another picture is called {', '.join(sorted(twice))}: give it a name"
                )
            taken.update(names)
            pictures += new
        except FedexpError as error:
            missed.append(f"{type(drawing).__name__} is not drawn: {error.what}")
    return pictures, tuple(missed)


def with_pictures(report: Report, drawings: tuple[Picture, ...], missed: Sequence[str]) -> Report:
    """Add the drawn figures to a report, and pictures of its numbers if needed.

    Pictures of the numbers are needed if the paper prints a number in the table, or if
    no figure was drawn.

    Args:
        report: The report.
        drawings: Pictures of the table's figures.
        missed: Reasons why other figures could not be drawn. They become warnings of
            the report.
    """
    if layout.has_reference(report) or not drawings:
        drawings += number_pictures.pictures(report)
    return replace(report, pictures=drawings, warnings=(*report.warnings, *missed))


def _alters(override: str, table: Table) -> bool:
    """Return whether an override of the user may make runs differ from the table's.

    It may not if the table leaves its key to the user (`Table.given`), or if the key
    does not affect the numbers of a run.
    """
    key = key_of(override)
    return key not in table.given and not any(
        f"{key}.".startswith(f"{own}.") for own in NON_SCIENTIFIC
    )


# --- cells


def _judged_cell(
    table: Table, planned: PlannedCell, record: TableRecord, reduced: str, extra: Sequence[str]
) -> Cell:
    column, runs = table.columns[planned.method], record.runs_of(table, planned)
    paper, sd = table.printed(planned.conditions, planned.method)
    best, incomplete = _best(column.grid, runs)
    done = [run for run in best if run.value is not None]
    last_10 = tuple(run.last_10 for run in done)
    # Values of the last ten rounds are pooled only if all runs have them. Otherwise the
    # pooled mean would be over fewer runs than the mean of the cell.
    cell = Cell(
        conditions=dict(planned.conditions),
        method=planned.method,
        paper=paper,
        paper_sd=sd,
        values=tuple(run.value for run in done if run.value is not None),
        seeds=tuple(run.seed for run in done),
        split_seeds=tuple(run.split_seed for run in done),
        last_10=last_10 if all(last_10) else (),
        chosen=tuple(run.point for run in done) if column.grid else (),
        verdict="not run",
        same_as=column.equals.column
        if column.equals and fits(column.equals.where, planned.conditions, planned.method)
        else "",
        runs=tuple(run.run for run in done),
        origins=tuple(_origin(table, record, run) for run in done),
        did_not_learn=tuple(
            is_at_chance(table, column, run, record.configs.get(run.config)) for run in done
        ),
        parts=_mean_parts(done, table.headline.scale),
        failed=tuple(
            dict.fromkeys(f"{run.run}: {run.error}" for run in runs if run.status in FAILED)
        ),
        reduced=reduced if done else "",
    )
    cell = _with_verdict(cell, table, _objection(runs, reduced, extra))
    if cell.verdict == "not run":
        untuned = column.why_untuned(planned.conditions)
        reason = column.why or untuned or incomplete or _why_not_run(runs)
        return replace(cell, reason=reason)
    other = "made by other code than the current one" if any(r.other_code for r in done) else ""
    return replace(cell, reason="; ".join(filter(None, [cell.reason, incomplete, other])))


def _mean_parts(runs: Sequence[RunRecord], scale: float) -> tuple[tuple[str, float], ...]:
    return tuple(
        (name, sum(run.parts[name] for run in runs) / len(runs) * scale)
        for name in (runs[0].parts if runs else ())
        if all(name in run.parts for run in runs)
    )


def _origin(table: Table, record: TableRecord, run: RunRecord) -> Origin:
    where = {**run.conditions, **run.pooled}
    return Origin(
        run.run,
        command(table, record.variant, record.extra, where, run.method, run.seed),
        run.config,
        run.split,
        run.commit,
        run.date,
    )


def _best(grid: Grid | None, runs: Sequence[RunRecord]) -> tuple[list[RunRecord], str]:
    """Select, for each split seed, the run at the best point of the grid.

    A point is one of the values that are tried for a hyper-parameter. The split seed is
    a text with the seed of a run and its conditions that do not identify a row. NaN (a
    run that diverged) is the worst number. If numbers are equal, the first point is
    selected.

    Returns:
        The selected runs, and a message. The message names the split seeds that were
        skipped because some of their points have no number. It is empty if no split
        seed was skipped.
    """
    if grid is None:
        return list(runs), ""

    def score(run: RunRecord) -> float:
        value = run.value if grid.by is None else run.criterion
        # This function is called only if all runs of the split seed have a value.
        assert value is not None
        return -math.inf if math.isnan(value) else value if grid.best == "highest" else -value

    best, lacking = [], []
    for split_seed, own in grouped((run.split_seed, run) for run in runs).items():
        absent = [run for run in own if run.value is None]
        if not absent:
            best.append(max(own, key=score))
            continue
        shown = texts.shortened(
            [f"{run.point} ({run.error or run.status})" for run in absent], _SHOWN
        )
        lacking.append(f"{split_seed} has no number at {len(absent)} of {len(own)} values: {shown}")
    return best, f"the grid of {grid.over} is incomplete: {'; '.join(lacking)}" if lacking else ""


def _with_verdict(cell: Cell, table: Table, objection: str) -> Cell:
    """Return a cell with the verdict on its numbers.

    Args:
        cell: The cell without a verdict.
        table: Its table.
        objection: Reason why the runs cannot be compared with the paper's number, empty
            if they can.
    """
    if cell.mean is None:
        return cell
    if cell.paper is None:
        return replace(cell, verdict="no reference", reason="the paper prints no number here")
    if objection:
        return replace(cell, verdict="not comparable", reason=objection)
    tolerance = table.columns[cell.method].tolerance or table.tolerance
    if tolerance is None:
        return replace(cell, verdict="no reference", reason="the table declares no tolerance")
    found = judge(cell.values, cell.paper, cell.paper_sd, tolerance.within, table.paper_runs or 1)

    return replace(
        cell,
        verdict=found.verdict,
        direction=found.direction,
        reason=found.reason,
        interval=found.interval,
        settles=found.settles,
        deterministic=found.deterministic,
    )


def _objection(runs: Iterable[RunRecord], reduced: str, extra: Sequence[str]) -> str:
    done = [run for run in runs if run.done]
    if reduced:
        return reduced
    if any(run.altered for run in done):
        return f"run with {' '.join(extra)}"
    lossy = sorted({run.lossy for run in done if run.lossy})
    return f"the data differ from the paper's: {', '.join(lossy)}" if lossy else ""


def _why_not_run(runs: Sequence[RunRecord]) -> str:
    failures = [f"failed: {run.error}" for run in runs if run.status in FAILED]
    errors = [run.error for run in runs if run.error]
    return [*failures, *errors, "no run is done"][0]


def _agreement(cells: Sequence[Cell], tie: float) -> Iterable[Agreement]:
    for row in grouped((repr(cell.conditions), cell) for cell in cells).values():
        pairs = [
            (cell.paper, cell.mean)
            for cell in row
            if cell.paper is not None and cell.mean is not None and not math.isnan(cell.mean)
        ]
        rho = spearman(tied([paper for paper, _ in pairs], tie), [mean for _, mean in pairs])
        yield Agreement(dict(row[0].conditions), rho, len(pairs))


def _summaries(table: Table, cells: Sequence[Cell]) -> Iterable[Summary]:
    """Yield each column's mean difference from the numbers that the paper prints.

    The rows of a column count if the paper prints a number and our runs can be compared
    with it. The differences are averaged over these rows for each seed, then over
    seeds. A seed counts only if it occurs in all of these rows.

    A column is left out if it has no such row or seed, or if a number is not finite.
    """
    unfit = ("not comparable", "not run")
    for column in table.methods:
        rows = [
            c
            for c in cells
            if c.method == column.key and c.paper is not None and c.verdict not in unfit
        ]
        by_row = [_by_seed(cell) for cell in rows]
        seeds = set.intersection(*map(set, by_row)) if by_row else set()
        numbers = [value for cell in rows for value in (*cell.values, cell.paper or 0.0)]
        if seeds and all(map(math.isfinite, numbers)):
            means = [statistics.fmean(row[seed] for row in by_row) for seed in sorted(seeds)]
            interval = mean_interval(means, table.paper_runs or 1)
            yield Summary(column.key, len(rows), len(seeds), statistics.fmean(means), interval)


def _by_seed(cell: Cell) -> dict[int, float]:
    """Return our number minus the paper's number, by seed.

    If the cell has several runs with one seed, the mean of their numbers is used.
    """
    assert cell.paper is not None
    values = grouped(zip(cell.seeds, cell.values, strict=True))
    return {seed: statistics.fmean(own) - cell.paper for seed, own in values.items()}


def _left_out(table: Table, cells: Sequence[Cell]) -> Iterable[str]:
    """Yield the paper's cells for which we have no number, then `Table.omits`.

    If all cells of a method are missing, they are listed as one item. If all cells with
    one value of a condition are missing, they are listed as one item, too.
    """
    there = {(tuple(c.conditions.values()), c.method) for c in cells if c.values}
    keys = ("method", *table.keys)
    known = [row for row in table.reference if row.get("value") is not None]
    missing = [
        row for row in known if (tuple(row[key] for key in table.keys), row["method"]) not in there
    ]

    while missing:
        groups = dict.fromkeys((key, row[key]) for row in missing for key in keys)
        whole = [
            (sum(row[key] == value for row in missing), key, value)
            for key, value in groups
            if not any(row[key] == value for row in known if row not in missing)
        ]
        count, key, value = max(whole, key=lambda group: group[0], default=(0, "", None))
        if count < 2:
            break
        yield f"{key}={layout.label(value)} ({texts.count(count, 'cell')})"
        missing = [row for row in missing if row[key] != value]

    for row in missing:
        yield " ".join(f"{key}={layout.label(row[key])}" for key in keys)
    yield from table.omits


def _assumptions(table: Table, present: set[str]) -> Iterable[tuple[str, str]]:
    """Yield the report's assumptions as (what, why).

    The order is: the table's assumptions, hyper-parameter grids whose best point is
    chosen by a number other than the column's (`Grid.by`), tolerances, the paper's
    number of runs.
    """
    yield from ((a.what, a.why) for a in table.assumptions)

    for column in table.methods:
        if column.grid is not None and column.grid.by is not None and column.key in present:
            grid = column.grid
            yield (
                f"{column.label}: the {grid.over} with the {grid.best} {grid.by} in every trial",
                "held-out data choose" if grid.held_out else "test data choose, so it is an oracle",
            )

    if not table.reference:
        return

    if table.tolerance is not None:
        yield (
            f"a tolerance of {table.tolerance.within:g} {layout.difference_unit(table.unit)}",
            table.tolerance.why,
        )

    for column in table.methods:
        if column.tolerance is not None and column.key in present:
            yield (
                f"a tolerance of {column.tolerance.within:g} "
                f"{layout.difference_unit(table.unit)} for {column.label}",
                column.tolerance.why,
            )

    if table.paper_runs is None and table.tolerance is not None:
        yield (
            "each of the paper's numbers is one run",
            "it does not state how many runs they are means of",
        )


# --- warnings and facts


def _warnings(
    table: Table,
    variant: Variant,
    cells: Sequence[PlannedCell],
    made: Sequence[Cell],
    record: TableRecord,
    extra: Sequence[str],
) -> Iterable[str]:
    smaller = table.smaller(record.variant)
    runs = [run for planned in cells for run in record.runs_of(table, planned)]
    if smaller is not None:
        yield f"This is the {record.variant} variant and not a reproduction: {smaller.what}"
    if variant == "partial":
        yield "These are not exactly the runs of the full variant"
    if record.only:
        yield f"Only some cells of the table were asked for: {only_text(record.only)}"
    asked = {job.seed for planned in cells for job in planned.jobs}
    declared = {
        seed for column in table.methods for seed in declared_seeds(table, record.variant, column)
    }
    if record.seeds and asked != declared:
        yield (
            f"Seeds {_sorted_text(asked)} were asked for; the table's are {_sorted_text(declared)}"
        )
    if extra and any(run.altered for run in runs):
        yield f"These runs differ from the table's: {' '.join(extra)}"

    yield from _few_runs(cells, made)
    yield from _at_chance(made)
    if failed := [cell for cell in made if cell.failed]:
        count = sum(len(cell.failed) for cell in failed)
        names = texts.shortened(
            [layout.cell_name(cell.method, cell.conditions) for cell in failed], _SHOWN
        )
        yield f"{texts.count(count, 'run')} failed, in {names}"
    yield from warnings_of_runs(runs, record.configs)
    yield from warning_of_settings(table, cells, record)
    if waiting := {run.run for run in runs if not run.done and run.others}:
        yield (
            f"{texts.count(len(waiting), 'run')} exist only as results of other code: "
            f"--any-code shows them"
        )


def warnings_of_runs(
    runs: Sequence[RunRecord], configs: Mapping[str, Mapping[str, Any]]
) -> Iterable[str]:
    """Yield warnings if runs that are compared may not be comparable.

    They differ in their data, in their headlines or in the code that made them.

    Args:
        runs: Runs of all cells.
        configs: Configs of the runs by their hashes.
    """
    yield from _mixed_splits([run for run in runs if run.done], configs)
    done = list({run.run: run for run in runs if run.done}.values())
    yield from _mixed_headlines(done)
    yield from _mixed_versions(done)
    if other := [run for run in done if run.other_code]:
        number, were = texts.count(len(other), "run"), "was" if len(other) == 1 else "were"
        codes = ", ".join(sorted({run.code[:8] for run in other}))
        yield (
            f"{number} of {len(done)} {were} made by other code than the current one ({codes}), "
            "so rows may mix code"
        )


def _mixed_versions(done: Sequence[RunRecord]) -> Iterable[str]:
    """Yield a warning if runs of one row were made by different versions of fedexp.

    Version 0.1 did not store its number, so a result without a version is from 0.1.
    """
    rows = grouped((_row_text(run) or "all", run.fedexp_version or "0.1") for run in done)
    mixed = [
        f"{row} ({_listed(versions)})" for row, versions in rows.items() if len(set(versions)) > 1
    ]
    if mixed:
        yield (
            "Runs of one row are of different versions of fedexp: "
            + texts.shortened(mixed, 3, "; ")
        )


def _mixed_headlines(done: Sequence[RunRecord]) -> Iterable[str]:
    """Yield warnings if runs measure their main number, the headline, differently.

    The headline rule determines which rounds count. It must be the same in all runs of
    a table. The headline metric must be the same in all runs of a method.
    """
    rules = {run.rule for run in done}
    if len(rules) > 1:
        yield f"Runs have different headline rules: {_listed(rules)}"
    for method, metrics in grouped((run.choice, run.metric) for run in done).items():
        if len(set(metrics)) > 1:
            yield f"Runs of {method} have different headline metrics: {_listed(metrics)}"


def _at_chance(made: Sequence[Cell]) -> Iterable[str]:
    """Yield a warning if some of the numbers come from runs that did not learn."""
    flagged = [cell for cell in made if any(cell.did_not_learn)]
    if flagged:
        count = sum(sum(cell.did_not_learn) for cell in flagged)
        names = texts.shortened(
            [layout.cell_name(cell.method, cell.conditions) for cell in flagged], _SHOWN
        )
        yield (
            f"{texts.count(count, 'number')} of runs that did not learn (accuracy at chance "
            f"level), in {names}. They count in every mean and test"
        )


def _few_runs(cells: Sequence[PlannedCell], made: Sequence[Cell]) -> Iterable[str]:
    wanted = [
        len({job.overrides for job in planned.jobs if job.point == planned.jobs[0].point})
        for planned in cells
    ]
    partial = [(cell, of) for cell, of in zip(made, wanted, strict=True) if 0 < cell.n < of]
    counts = sorted({cell.n for cell in made if cell.n})
    if len(counts) > 1:
        yield (
            f"Means are over unequal numbers of runs: n is {', '.join(map(str, counts))}, "
            f"see each cell"
        )
    if partial:
        shown = texts.shortened(
            [
                f"{layout.cell_name(cell.method, cell.conditions)} {cell.n}/{of}"
                for cell, of in partial
            ],
            _SHOWN,
        )
        yield f"{texts.count(len(partial), 'cell')} with runs missing: {shown}"


# Keys of a config that determine the data split.
_SPLIT_KEYS = re.compile(
    r"(dataset|partition|limit|proxy\.dataset)\..*|proxy\.(source|size)|clients|eval\.held_out"
)


def _mixed_splits(
    done: Sequence[RunRecord], configs: Mapping[str, Mapping[str, Any]]
) -> Iterable[str]:
    """Yield warnings if runs that are compared used different data.

    Runs of one row must use the same data split if they have the same seed and the same
    `RunRecord.pooled`. A data set must have the same fingerprint in all runs.

    Args:
        done: Runs with a result.
        configs: Configs of the runs by their hashes.
    """
    rows = grouped((" ".join(filter(None, [_row_text(run), run.split_seed])), run) for run in done)
    mixed = {row: runs for row, runs in rows.items() if len({run.split for run in runs}) > 1}
    if mixed:
        shown = texts.shortened(list(mixed), _SHOWN, "; ")
        # The row with the most runs has the most columns to compare. It is therefore
        # most likely to show the setting that differs.
        reason = _split_reason(max(mixed.values(), key=len), configs)
        yield f"Methods of one row and seed saw different data splits: {shown}. {reason}"

    for name, hashes in grouped((run.dataset, run.data) for run in done).items():
        if len(set(hashes)) > 1:
            shown = ", ".join(sha[:8] for sha in sorted(set(hashes)))
            yield f"Data set {name} was not the same in all runs: {shown}"


def _row_text(run: RunRecord) -> str:
    return " ".join(f"{key}={value}" for key, value in run.conditions.items())


def _split_reason(runs: Sequence[RunRecord], configs: Mapping[str, Mapping[str, Any]]) -> str:
    """Name the settings in which runs with different splits differ.

    Args:
        runs: Runs of one row with the same split seed.
        configs: Configs of the runs by their hashes.
    """
    own = {run.method: flat(configs.get(run.config, {})) for run in runs}
    keys = sorted({key for config in own.values() for key in config if _SPLIT_KEYS.fullmatch(key)})
    found = []
    for key in keys:
        values: dict[str, list[str]] = {}
        for method, config in own.items():
            values.setdefault(layout.label(config.get(key)), []).append(method)
        if len(values) > 1:
            of_each = [
                f"{value} ({texts.shortened(methods, 3)})" for value, methods in values.items()
            ]
            found.append(f"{key} is {' or '.join(of_each)}")
    return "; ".join(found) or "Their recorded settings of the split are equal"


def _facts(cells: Sequence[PlannedCell], done: Sequence[RunRecord]) -> Iterable[tuple[str, str]]:
    if not done:
        return
    yield (
        "runs",
        f"{len(done)} of {len({job.overrides for planned in cells for job in planned.jobs})}",
    )
    if dates := sorted({run.date for run in done} - {""}):
        yield "date", dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    yield "computing time", layout.duration(sum(run.seconds for run in done))
    if phases := _phases(done):
        yield "of it", ", ".join(f"{name} {layout.duration(own)}" for name, own in phases)

    known = {
        "commit": _listed(run.commit for run in done if run.commit),
        "hardware": _listed(run.gpu for run in done if run.gpu),
        "processor": _listed(run.processor for run in done if run.processor),
        "engine": _listed(run.engine for run in done if run.engine),
        "threads": _listed(str(run.threads) for run in done if run.threads),
        "platform": _listed(run.platform for run in done if run.platform),
    }
    yield from ((name, values) for name, values in known.items() if values)

    data = sorted({(run.dataset, run.data) for run in done})
    yield from {
        "torch": _listed(run.torch for run in done),
        "seeds": _sorted_text({run.seed for run in done}),
        "data sha256": ", ".join(f"{name} {sha[:16]}" for name, sha in data),
        "split sha256": _listed(run.split[:8] for run in done),
        "code hash": _listed(run.code[:8] for run in done),
        "headline": _listed(f"{run.metric} ({run.rule})" for run in done),
    }.items()


def _phases(done: Sequence[RunRecord]) -> list[tuple[str, float]]:
    """Return the seconds of each phase, summed over runs.

    The longest phase is first. Runs that did not record their phases are not counted.
    """
    names = dict.fromkeys(name for run in done for name in run.phases)
    sums = {name: sum(run.phases.get(name, 0.0) for run in done) for name in names}
    return sorted(((name, own) for name, own in sums.items() if own), key=lambda phase: -phase[1])


def _listed(values: Iterable[str]) -> str:
    """Return the different values in alphabetic order."""
    return ", ".join(sorted(set(values)))


def _sorted_text(seeds: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(seeds)))
