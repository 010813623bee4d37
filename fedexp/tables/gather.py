"""From a table and the record of its runs to its report: numbers, verdicts, claims, warnings."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from fedexp.core.build import build
from fedexp.core.errors import ConfigError, FedexpError
from fedexp.storage.identity import NON_SCIENTIFIC
from fedexp.tables.cells import Slot, command, declared_seeds, key_of
from fedexp.tables.claims import judged
from fedexp.tables.drawing import Drawing, DrawnRun
from fedexp.tables.index import FAILED
from fedexp.tables.lookup import CellRun
from fedexp.tables.ranks import spearman, tied
from fedexp.tables.record import Record, RunRecord, draw_of
from fedexp.tables.report import layout, texts
from fedexp.tables.report.report import Agreement, Cell, Form, Origin, Picture, Report, Summary
from fedexp.tables.schema import Grid, Table, fits
from fedexp.tables.verdicts import judge, mean_interval

_SHOWN = 6  # names in a warning


def make_report(table: Table, cells: Sequence[Slot], record: Record) -> Report:
    """The report of `cells`, from the runs that are recorded."""
    shrunk = table.shrunk(record.form)
    blamed = [override for override in record.extra if _alters(override, table)]
    made = [_cell(table, slot, record, shrunk.what if shrunk else "", blamed) for slot in cells]
    done = [run for slot in cells for run in record.of(table, slot) if run.done]
    present = {cell.method for cell in made}
    form: Form = (
        "partial" if record.form == "full" and is_part(table, cells, record) else record.form
    )
    objections = [_objection(record.of(table, slot), "", blamed) for slot in cells]
    return Report(
        name=table.name,
        paper=table.paper,
        source=table.source,
        title=table.title,
        metric=table.metric,
        unit=table.unit,
        higher_is_better=table.higher_is_better,
        form=form,
        keys=table.keys,
        methods=tuple(table.method(column) for column in table.methods if column.key in present),
        cells=tuple(made),
        agreement=tuple(
            _agreement([c for c in made if table.columns[c.method].reads is None], table.tie)
        ),
        tolerance=None if table.tolerance is None else table.tolerance.within,
        assumptions=tuple(_assumptions(table, present)),
        warnings=tuple(_warnings(table, form, cells, made, record, blamed)),
        facts=tuple(_facts(cells, done)),
        command=record.command,
        claims=judged(table, record.form, made, record.curves, next(filter(None, objections), "")),
        summaries=tuple(_summaries(table, made)),
        left_out=tuple(_left_out(table, made)),
    )


def is_part(table: Table, cells: Sequence[Slot], record: Record) -> bool:
    """Whether these are fewer, or other, runs than the form's: asked for or there."""
    if record.only or any(_alters(override, table) for override in record.extra):
        return True
    asked = set(record.seeds or ())
    if asked and any(asked != set(declared_seeds(table, record.form, c)) for c in table.methods):
        return True
    return any(run.value is None for slot in cells for run in record.of(table, slot))


def drawn(
    table: Table,
    cells: Sequence[Slot],
    cell_runs: Mapping[tuple[str, ...], CellRun],
    report: Report,
) -> tuple[tuple[Picture, ...], tuple[str, ...]]:
    """The table's own drawings, made from its runs' files and naming the report's form, and why some could not be made."""
    from fedexp.tables.report.pictures import RESERVED

    runs = [
        DrawnRun(
            {**slot.conditions, **job.pooled},
            slot.method,
            table.columns[slot.method].label,
            job.seed,
            run.folder,
            run.config,
            run.result,
            table.looks.get(slot.method),
            table.columns[slot.method].role,
        )
        for slot in cells
        for job in {
            (draw_of(job), job.overrides): job for job in slot.jobs
        }.values()  # one may hold a whole grid
        if (run := cell_runs[job.overrides]).result
    ]
    drawings = [
        build(Drawing, node, f"drawings[{number}]")  # type: ignore[type-abstract]
        for number, node in enumerate(table.drawings)
    ]
    pictures: tuple[Picture, ...] = ()
    missed = []
    notes = [texts.form(report), texts.stamp(report)]
    for drawing in drawings:
        try:
            new = drawing.draw(runs, notes)
            if twice := {picture.name for picture in new} & {
                *RESERVED,
                *(picture.name for picture in pictures),
            }:
                raise ConfigError(
                    f"another picture is called {', '.join(sorted(twice))}: give it a name"
                )
            pictures += new
        except FedexpError as error:
            missed.append(f"{type(drawing).__name__} is not drawn: {error.what}")
    return pictures, tuple(missed)


def with_pictures(report: Report, drawings: tuple[Picture, ...], missed: Sequence[str]) -> Report:
    """The report with `drawn` and the numbers as pictures, these where the paper prints some or else nothing was drawn."""
    from fedexp.tables.report.pictures import pictures

    if layout.referenced(report) or not drawings:
        drawings += pictures(report)
    return replace(report, pictures=drawings, warnings=(*report.warnings, *missed))


def _alters(override: str, table: Table) -> bool:
    """Whether an override of the user's may make another run than the table's."""
    key = key_of(override)
    return key not in table.given and not any(
        f"{key}.".startswith(f"{own}.") for own in NON_SCIENTIFIC
    )


# --- cells


def _cell(table: Table, slot: Slot, record: Record, reduced: str, extra: Sequence[str]) -> Cell:
    column, runs = table.columns[slot.method], record.of(table, slot)
    paper, sd = table.printed(slot.conditions, slot.method)
    best, incomplete = _best(column.grid, runs)
    done = [run for run in best if run.value is not None]
    last_10 = tuple(run.last_10 for run in done)
    cell = Cell(
        conditions=dict(slot.conditions),
        method=slot.method,
        paper=paper,
        paper_sd=sd,
        values=tuple(run.value for run in done if run.value is not None),
        seeds=tuple(run.seed for run in done),
        draws=tuple(run.draw for run in done),
        last_10=last_10
        if all(last_10)
        else (),  # of some of the runs, they would not go with the mean
        chosen=tuple(run.point for run in done) if column.grid else (),
        verdict="not run",
        same_as=column.equals.column
        if column.equals and fits(column.equals.where, slot.conditions, slot.method)
        else "",
        runs=tuple(run.run for run in done),
        origins=tuple(_origin(table, record, run) for run in done),
        parts=tuple(_parts(done, table.headline.scale)),
        failed=tuple(
            dict.fromkeys(f"{run.run}: {run.error}" for run in runs if run.status in FAILED)
        ),
        reduced=reduced if done else "",
    )
    cell = _judged(cell, table, _objection(runs, reduced, extra))
    if cell.verdict == "not run":
        cell = replace(cell, reason=column.why or incomplete or _why_not_run(runs))
    elif incomplete:
        cell = replace(cell, reason="; ".join(filter(None, [cell.reason, incomplete])))
    if any(run.other_code for run in done):
        cell = replace(
            cell, reason="; ".join(filter(None, [cell.reason, "made by other code than today's"]))
        )
    return cell


def _parts(runs: Sequence[RunRecord], scale: float) -> Iterable[tuple[str, float]]:
    for name in runs[0].parts if runs else ():
        if all(name in run.parts for run in runs):
            yield name, sum(run.parts[name] for run in runs) / len(runs) * scale


def _origin(table: Table, record: Record, run: RunRecord) -> Origin:
    where = {**run.conditions, **run.pooled}
    typed = command(table, record.form, record.extra, where, run.method, run.seed)
    return Origin(run.run, typed, run.config, run.split, run.commit, run.date)


def _best(grid: Grid | None, runs: Sequence[RunRecord]) -> tuple[list[RunRecord], str]:
    """Of every draw the run at the best point of the grid, and in words which draws lack points and have none, therefore.

    A number that is NaN (a run that diverged) is the worst; of equal ones the first point's counts.
    """
    if grid is None:
        return list(runs), ""
    draws: dict[str, list[RunRecord]] = {}
    for run in runs:
        draws.setdefault(run.draw, []).append(run)

    def score(run: RunRecord) -> float:
        value = run.value if grid.by is None else run.by
        assert value is not None  # it is not lacking
        return -math.inf if math.isnan(value) else value if grid.best == "highest" else -value

    best, lacking = [], []
    for draw, own in draws.items():
        absent = [run for run in own if run.value is None]
        if not absent:
            best.append(max(own, key=score))
            continue
        shown = ", ".join(
            f"{run.point} ({run.error or run.status})" for run in absent[:_SHOWN]
        ) + _more(len(absent))
        lacking.append(f"{draw} has no number at {len(absent)} of {len(own)} values: {shown}")
    return best, f"the grid of {grid.over} is incomplete: {'; '.join(lacking)}" if lacking else ""


def _judged(cell: Cell, table: Table, objection: str) -> Cell:
    """The cell with its verdict.

    Args:
        objection: why the runs cannot stand beside the paper's number, empty where they can.
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
        reason=found.reason,
        interval=found.interval,
        near=found.near,
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
    return f"the data are not the paper's bits: {', '.join(lossy)}" if lossy else ""


def _why_not_run(runs: Sequence[RunRecord]) -> str:
    failed = next((run for run in runs if run.status in FAILED), None)
    if failed is not None:
        return f"failed: {failed.error}"
    return next((run.error for run in runs if run.error), "no run is done")


def _agreement(cells: Sequence[Cell], tie: float) -> Iterable[Agreement]:
    rows: dict[str, list[Cell]] = {}
    for cell in cells:
        rows.setdefault(repr(cell.conditions), []).append(cell)
    for row in rows.values():
        pairs = [
            (cell.paper, cell.mean)
            for cell in row
            if cell.paper is not None and cell.mean is not None
        ]
        rho = spearman(tied([paper for paper, _ in pairs], tie), [mean for _, mean in pairs])
        yield Agreement(dict(row[0].conditions), rho, len(pairs))


def _summaries(table: Table, cells: Sequence[Cell]) -> Iterable[Summary]:
    """Of every column that the paper has numbers of: differences to it, averaged over rows, seed by seed."""
    for column in table.methods:
        rows = [
            c
            for c in cells
            if c.method == column.key and c.paper is not None and c.verdict not in _UNFIT
        ]
        by_row = [_by_seed(cell) for cell in rows]
        seeds = set.intersection(*map(set, by_row)) if by_row else set()
        if seeds and not any(_endless(cell) for cell in rows):
            means = [statistics.fmean(row[seed] for row in by_row) for seed in sorted(seeds)]
            interval = mean_interval(means, table.paper_runs or 1)
            yield Summary(column.key, len(rows), len(seeds), statistics.fmean(means), interval)


_UNFIT = ("not comparable", "not run")


def _by_seed(cell: Cell) -> dict[int, float]:
    """The difference to the paper's number; runs of one seed that are pooled in the cell count with their mean."""
    assert cell.paper is not None
    values: dict[int, list[float]] = {}
    for seed, value in zip(cell.seeds, cell.values, strict=True):
        values.setdefault(seed, []).append(value)
    return {seed: statistics.fmean(own) - cell.paper for seed, own in values.items()}


def _endless(cell: Cell) -> bool:
    return not all(abs(value) < float("inf") for value in (*cell.values, cell.paper or 0.0))


def _left_out(table: Table, cells: Sequence[Cell]) -> Iterable[str]:
    """The paper's cells without runs of ours, summed up where all of a kind are; then panels and the like."""
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
        yield f"{key}={layout.label(value)} ({_count(count, 'cell')})"
        missing = [row for row in missing if row[key] != value]
    for row in missing:
        yield " ".join(f"{key}={layout.label(row[key])}" for key in keys)
    yield from table.omits


def _assumptions(table: Table, present: set[str]) -> Iterable[tuple[str, str]]:
    """The table's, and what judges: tolerances and the paper's number of runs."""
    yield from ((a.what, a.why) for a in table.assumptions)
    for column in table.methods:
        if column.grid is not None and column.grid.by is not None and column.key in present:
            grid, data = (
                column.grid,
                "held-out data choose" if column.grid.held_out else "test data choose: an oracle",
            )
            yield (
                f"{column.label}: the {grid.over} with the {grid.best} {grid.by} in every trial",
                data,
            )
    if not table.reference:
        return
    if table.tolerance is not None:
        yield (
            f"a tolerance of {table.tolerance.within:g} {layout.points(table.unit)}",
            table.tolerance.why,
        )
    for column in table.methods:
        if column.tolerance is not None and column.key in present:
            what = f"a tolerance of {column.tolerance.within:g} {layout.points(table.unit)} for {column.label}"
            yield what, column.tolerance.why
    if table.paper_runs is None and table.tolerance is not None:
        yield (
            "each of the paper's numbers is one run",
            "it does not say of how many runs they are means",
        )


# --- warnings and facts


def _warnings(
    table: Table,
    form: Form,
    cells: Sequence[Slot],
    made: Sequence[Cell],
    record: Record,
    extra: Sequence[str],
) -> Iterable[str]:
    shrunk = table.shrunk(record.form)
    runs = [run for slot in cells for run in record.of(table, slot)]
    if shrunk is not None:
        yield f"This is the {record.form} form, and no reproduction: {shrunk.what}"
    if form == "partial":
        yield "These are not all runs of the full form"
    asked = {job.seed for slot in cells for job in slot.jobs}
    declared = {
        seed for column in table.methods for seed in declared_seeds(table, record.form, column)
    }
    if record.seeds and asked != declared:
        yield f"Seeds {_listed(asked)} were asked for; the table's are {_listed(declared)}"
    if extra and any(run.altered for run in runs):
        yield f"These runs are not the table's own: {' '.join(extra)}"
    yield from _few_runs(cells, made)
    failed = [cell for cell in made if cell.failed]
    if failed:
        yield f"{_count(sum(len(cell.failed) for cell in failed), 'run')} failed, in {_names(failed)}"
    yield from _mixed_splits([run for run in runs if run.done])
    done = list({run.run: run for run in runs if run.done}.values())
    yield from _mixed_headlines(done)
    yield from _mixed_versions(done)
    other = [run for run in done if run.other_code]
    if other:
        yield (
            f"{_count(len(other), 'run')} of {len(done)} {'was' if len(other) == 1 else 'were'} made by other code than today's "
            f"({', '.join(sorted({run.code[:8] for run in other}))}); rows may mix code"
        )
    waiting = {run.run for run in runs if not run.done and run.others}
    if waiting:
        yield f"{_count(len(waiting), 'run')} exist that other code than today's made: --any-code shows them"


def _mixed_versions(done: Sequence[RunRecord]) -> Iterable[str]:
    """Yield a warning if runs of one row are of different versions of fedexp.

    Results of 0.1 do not name their version.
    """
    rows: dict[str, set[str]] = {}
    for run in done:
        row = " ".join(f"{key}={value}" for key, value in run.conditions.items())
        rows.setdefault(row or "all", set()).add(run.fedexp_version or "0.1")
    mixed = [
        f"{row} ({', '.join(sorted(versions))})"
        for row, versions in rows.items()
        if len(versions) > 1
    ]
    if mixed:
        shown = "; ".join(mixed[:3])
        more = f" and {len(mixed) - 3} more" if len(mixed) > 3 else ""
        yield f"Runs of one row are of different versions of fedexp: {shown}{more}"


def _mixed_headlines(done: Sequence[RunRecord]) -> Iterable[str]:
    """A table's runs must have one rule of which rounds count; those of one method one metric."""
    rules = {run.rule for run in done}
    if len(rules) > 1:
        yield f"Runs have different headline rules: {', '.join(sorted(rules))}"
    metrics: dict[str, set[str]] = {}
    for run in done:
        metrics.setdefault(run.choice, set()).add(run.metric)
    for method, names in metrics.items():
        if len(names) > 1:
            yield f"Runs of {method} have different headline metrics: {', '.join(sorted(names))}"


def _few_runs(cells: Sequence[Slot], made: Sequence[Cell]) -> Iterable[str]:
    wanted = [
        len({job.overrides for job in slot.jobs if job.point == slot.jobs[0].point})
        for slot in cells
    ]
    partial = [(cell, of) for cell, of in zip(made, wanted, strict=True) if 0 < cell.n < of]
    counts = sorted({cell.n for cell in made if cell.n})
    if len(counts) > 1:
        yield f"Means are over unequal numbers of runs: n is {', '.join(map(str, counts))}, see each cell"
    if partial:
        shown = ", ".join(f"{_place(cell)} {cell.n}/{of}" for cell, of in partial[:_SHOWN])
        yield f"{_count(len(partial), 'cell')} with runs missing: {shown}{_more(len(partial))}"


def _mixed_splits(done: Sequence[RunRecord]) -> Iterable[str]:
    """Methods in one row and draw must see one split; one data set must have one fingerprint."""
    splits: dict[str, set[str]] = {}
    data: dict[str, set[str]] = {}
    for run in done:
        row = " ".join([*(f"{key}={value}" for key, value in run.conditions.items()), run.draw])
        splits.setdefault(row, set()).add(run.split)
        data.setdefault(run.dataset, set()).add(run.data)
    mixed = [row for row, hashes in splits.items() if len(hashes) > 1]
    if mixed:
        yield f"Methods of one row and seed saw different data splits: {'; '.join(mixed[:_SHOWN])}{_more(len(mixed))}"
    for name, hashes in data.items():
        if len(hashes) > 1:
            yield f"Data set {name} was not the same in all runs: {', '.join(sorted(h[:8] for h in hashes))}"


def _facts(cells: Sequence[Slot], done: Sequence[RunRecord]) -> Iterable[tuple[str, str]]:
    done = list({run.run: run for run in done}.values())
    if not done:
        return
    yield "runs", f"{len(done)} of {len({job.overrides for slot in cells for job in slot.jobs})}"
    if dates := sorted({run.date for run in done} - {""}):
        yield "date", dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    yield "computing time", layout.duration(sum(run.seconds for run in done))
    if phases := _phases(done):
        yield "of it", ", ".join(f"{name} {layout.duration(own)}" for name, own in phases)
    for name, key in (
        ("commit", "commit"),
        ("hardware", "gpu"),
        ("processor", "processor"),
        ("platform", "platform"),
    ):
        if values := sorted({getattr(run, key) for run in done} - {""}):
            yield name, ", ".join(values)
    yield "torch", ", ".join(sorted({run.torch for run in done}))
    yield "seeds", _listed({run.seed for run in done})
    data = {(run.dataset, run.data) for run in done}
    yield "data sha256", ", ".join(f"{name} {sha[:16]}" for name, sha in sorted(data))
    yield "split sha256", ", ".join(sorted({run.split[:8] for run in done}))
    yield "code hash", ", ".join(sorted({run.code[:8] for run in done}))
    yield "headline", ", ".join(sorted({f"{run.metric} ({run.rule})" for run in done}))


def _phases(done: Sequence[RunRecord]) -> list[tuple[str, float]]:
    """Seconds by phase, over runs that recorded them, the longest first."""
    names = dict.fromkeys(name for run in done for name in run.phases)
    sums = {name: sum(run.phases.get(name, 0.0) for run in done) for name in names}
    return sorted(((name, own) for name, own in sums.items() if own), key=lambda phase: -phase[1])


def _place(cell: Cell) -> str:
    return " ".join(
        [cell.method, *(f"{key}={layout.label(value)}" for key, value in cell.conditions.items())]
    )


def _listed(seeds: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(seeds)))


def _names(cells: Sequence[Cell]) -> str:
    return ", ".join(_place(cell) for cell in cells[:_SHOWN]) + _more(len(cells))


def _more(count: int) -> str:
    return f" and {count - _SHOWN} more" if count > _SHOWN else ""


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
