"""From a table and the runs behind it to its report: numbers, verdicts, warnings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedexp.core.build import build
from fedexp.core.errors import ConfigError, FedexpError
from fedexp.storage.identity import NON_SCIENTIFIC
from fedexp.tables.cells import Slot, declared_seeds, key_of
from fedexp.tables.drawing import Drawing, DrawnRun
from fedexp.tables.lookup import CellRun, read_value
from fedexp.tables.ranks import spearman, tied
from fedexp.tables.report import layout
from fedexp.tables.report.report import Agreement, Cell, Form, Picture, Report, Verdict
from fedexp.tables.schema import Table

_SHOWN = 6  # names in a warning


def make_report(
    table: Table,
    form: Form,
    cells: Sequence[Slot],
    cell_runs: Mapping[tuple[str, ...], CellRun],
    *,
    root: Path,
    command: str,
    extra: Sequence[str] = (),
) -> Report:
    """The report of `cells`, from the runs that are there.

    Args:
        cell_runs: by a job's overrides; root: the output root, to which folders are relative.
        extra: the user's own overrides; command: what was typed.
    """
    shrunk = table.shrunk(form)
    blamed = [override for override in extra if _alters(override, table)]
    made = [_cell(table, slot, _runs(slot, cell_runs), shrunk.what if shrunk else "", root, blamed) for slot in cells]
    used = [cell_runs[overrides] for overrides in dict.fromkeys(job.overrides for slot in cells for job in slot.jobs)]
    done = [run for run in used if run.result]
    present = {cell.method for cell in made}
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
        methods=tuple(column.method for column in table.methods if column.key in present),
        cells=tuple(made),
        agreement=tuple(_agreement(made, table.tie)),
        tolerance=table.tolerance,
        assumptions=tuple((a.what, a.why) for a in table.assumptions),
        warnings=tuple(_warnings(table, form, cells, made, cell_runs, blamed)),
        facts=tuple(_facts(table, cells, done)),
        command=command,
    )


def with_pictures(
    report: Report, table: Table, cells: Sequence[Slot], cell_runs: Mapping[tuple[str, ...], CellRun]
) -> Report:
    """The report with the table's own drawings and the numbers as pictures, these where the paper prints some or else nothing
    was drawn. A drawing that cannot be made is a warning.
    """
    from fedexp.tables.report.pictures import RESERVED, pictures

    runs = [
        DrawnRun(
            {**slot.conditions, **job.pooled},
            slot.method,
            table.columns[slot.method].label,
            job.seed,
            run.folder,
            run.config,
            run.result,
        )
        for slot in cells
        for job in slot.jobs
        if (run := cell_runs[job.overrides]).result
    ]
    drawings = [build(Drawing, node, f"drawings[{number}]") for number, node in enumerate(table.drawings)]  # type: ignore[type-abstract]
    drawn: tuple[Picture, ...] = ()
    missed = []
    for drawing in drawings:
        try:
            new = drawing.draw(runs)
            if twice := {picture.name for picture in new} & {*RESERVED, *(picture.name for picture in drawn)}:
                raise ConfigError(f"another picture is called {', '.join(sorted(twice))}: give it a name")
            drawn += new
        except FedexpError as error:
            missed.append(f"{type(drawing).__name__} is not drawn: {error.what}")
    if layout.referenced(report) or not drawn:
        drawn += pictures(report)
    return replace(report, pictures=drawn, warnings=(*report.warnings, *missed))


def _runs(slot: Slot, cell_runs: Mapping[tuple[str, ...], CellRun]) -> list[CellRun]:
    """A cell's runs, each once: the user's overrides may make one of several."""
    return [cell_runs[overrides] for overrides in dict.fromkeys(job.overrides for job in slot.jobs)]


def _alters(override: str, table: Table) -> bool:
    """Whether an override of the user's may make another run than the table's."""
    key = key_of(override)
    return key not in table.given and not any(f"{key}.".startswith(f"{own}.") for own in NON_SCIENTIFIC)


def _cell(table: Table, slot: Slot, runs: Sequence[CellRun], reduced: str, root: Path, extra: Sequence[str]) -> Cell:
    column = table.columns[slot.method]
    paper, sd = table.printed(slot.conditions, slot.method)
    path = (column.value or table.headline.value).format(**slot.conditions)
    values, seeds, folders, failed, unread = [], [], [], [], ""
    for run in runs:
        if run.result:
            try:
                values.append(read_value(run, path) * table.headline.scale)
            except FedexpError as error:
                unread = error.what
                continue
            seeds.append(run.job.seed)
            folders.append(_relative(run.folder, root))
        elif run.status == "failed":
            failed.append(f"{_relative(run.folder, root)}: {run.error}")
    cell = Cell(
        conditions=dict(slot.conditions),
        method=slot.method,
        paper=paper,
        paper_sd=sd,
        values=tuple(values),
        seeds=tuple(seeds),
        verdict="not run",
        runs=tuple(folders),
        failed=tuple(failed),
        reduced=reduced if values else "",
    )
    tolerance = table.tolerance if column.tolerance is None else column.tolerance
    verdict, reason = judge(cell, tolerance, table.unit, _objection(runs, reduced, extra))
    if verdict == "not run":
        reason = column.why or unread or _why_not_run(runs)
    if any(run.other_code for run in runs if run.result):
        reason = "; ".join(filter(None, [reason, "made by other code than today's"]))
    return replace(cell, verdict=verdict, reason=reason)


def judge(cell: Cell, tolerance: float | None, unit: str, objection: str) -> tuple[Verdict, str]:
    """The verdict on a cell's numbers and, where it is not `reproduced`, why.

    Args:
        tolerance: in `unit`; None: the table judges nothing.
        objection: why the runs cannot stand beside the paper's number, empty where they can.
    """
    if cell.mean is None:
        return "not run", ""
    if cell.paper is None:
        return "no reference", "the paper prints no number here"
    if objection:
        return "not comparable", objection
    if tolerance is None:
        return "no reference", "the table declares no tolerance"
    assert cell.delta is not None
    if abs(cell.delta) <= tolerance:
        return "reproduced", ""
    return "deviates", f"{cell.delta:+.4g} {unit}, and the tolerance is {tolerance:g}"


def _objection(runs: Iterable[CellRun], reduced: str, extra: Sequence[str]) -> str:
    done = [run for run in runs if run.result]
    if reduced:
        return reduced
    if any(run.altered for run in done):
        return f"run with {' '.join(extra)}"
    lossy = sorted({name for run in done if (name := _lossy(run.config))})
    return f"the data are not the paper's bits: {', '.join(lossy)}" if lossy else ""


def _lossy(config: Mapping[str, Any]) -> str:
    """The name of a data set that is not the original's bits, else empty."""
    from fedexp.core.build import locate
    from fedexp.data.dataset import Dataset

    nodes = {"dataset": config["dataset"], "proxy.dataset": config.get("proxy", {}).get("dataset")}
    kinds = {key: locate(node["_target_"], Dataset, key) for key, node in nodes.items() if node}
    return " ".join(
        str(config["choices"].get(key)) for key, kind in kinds.items() if not getattr(kind, "faithful", True)
    )


def _why_not_run(runs: Sequence[CellRun]) -> str:
    failed = next((run for run in runs if run.status == "failed"), None)
    if failed is not None:
        return f"failed: {failed.error}"
    return next((run.error for run in runs if run.error), "no run is done")


def _agreement(cells: Sequence[Cell], tie: float) -> Iterable[Agreement]:
    rows: dict[str, list[Cell]] = {}
    for cell in cells:
        rows.setdefault(repr(cell.conditions), []).append(cell)
    for row in rows.values():
        pairs = [(cell.paper, cell.mean) for cell in row if cell.paper is not None and cell.mean is not None]
        rho = spearman(tied([paper for paper, _ in pairs], tie), [mean for _, mean in pairs])
        yield Agreement(dict(row[0].conditions), rho, len(pairs))


def _warnings(
    table: Table,
    form: Form,
    cells: Sequence[Slot],
    made: Sequence[Cell],
    cell_runs: Mapping[tuple[str, ...], CellRun],
    extra: Sequence[str],
) -> Iterable[str]:
    shrunk = table.shrunk(form)
    if shrunk is not None:
        yield f"This is the {form} form, and no reproduction: {shrunk.what}"
    asked, declared = {job.seed for slot in cells for job in slot.jobs}, set(declared_seeds(table, form))
    if asked and asked != declared:
        yield f"Seeds {_listed(asked)} were asked for; the table's are {_listed(declared)}"
    if extra and any(run.altered for run in cell_runs.values()):
        yield f"These runs are not the table's own: {' '.join(extra)}"
    yield from _few_runs(cells, made)
    failed = [cell for cell in made if cell.failed]
    if failed:
        yield f"{_count(sum(len(cell.failed) for cell in failed), 'run')} failed, in {_names(table, failed)}"
    yield from _mixed_splits(table, cells, cell_runs)
    done = [run for run in cell_runs.values() if run.result]
    yield from _mixed_headlines(done)
    other = [run for run in done if run.other_code]
    if other:
        yield (
            f"{_count(len(other), 'run')} of {len(done)} {'was' if len(other) == 1 else 'were'} made by other code than today's "
            f"({', '.join(sorted({run.folder.name for run in other}))}); rows may mix code"
        )
    waiting = [run for run in cell_runs.values() if not run.result and run.others]
    if waiting:
        yield f"{_count(len(waiting), 'run')} exist that other code than today's made: --any-code shows them"


def _mixed_headlines(done: Sequence[CellRun]) -> Iterable[str]:
    """A table's runs must have one rule of which rounds count; those of one method one metric."""
    rules = {run.result["headline"]["rule"] for run in done}
    if len(rules) > 1:
        yield f"Runs have different headline rules: {', '.join(sorted(rules))}"
    metrics: dict[str, set[str]] = {}
    for run in done:
        metrics.setdefault(str(run.result["choices"].get("method")), set()).add(run.result["headline"]["metric"])
    for method, names in metrics.items():
        if len(names) > 1:
            yield f"Runs of {method} have different headline metrics: {', '.join(sorted(names))}"


def _few_runs(cells: Sequence[Slot], made: Sequence[Cell]) -> Iterable[str]:
    wanted = [len({job.overrides for job in slot.jobs}) for slot in cells]
    partial = [(cell, of) for cell, of in zip(made, wanted, strict=True) if 0 < cell.n < of]
    counts = sorted({cell.n for cell in made if cell.n})
    if len(counts) > 1:
        yield f"Means are over unequal numbers of runs: n is {', '.join(map(str, counts))}, see each cell"
    if partial:
        shown = ", ".join(f"{_place(cell)} {cell.n}/{of}" for cell, of in partial[:_SHOWN])
        yield f"{_count(len(partial), 'cell')} with runs missing: {shown}{_more(len(partial))}"


def _mixed_splits(table: Table, cells: Sequence[Slot], cell_runs: Mapping[tuple[str, ...], CellRun]) -> Iterable[str]:
    """Methods in one row and seed must see one split; one data set must have one fingerprint."""
    splits: dict[str, set[str]] = {}
    data: dict[str, set[str]] = {}
    for slot in cells:
        for job in slot.jobs:
            run = cell_runs[job.overrides]
            if run.result:
                row = " ".join(f"{k}={v}" for k, v in {**slot.conditions, **job.pooled, "seed": job.seed}.items())
                splits.setdefault(row, set()).add(str(run.result["partition"]["sha256"]))
                data.setdefault(str(run.result["choices"].get("dataset")), set()).add(
                    str(run.result["partition"]["data_sha256"])
                )
    mixed = [row for row, hashes in splits.items() if len(hashes) > 1]
    if mixed:
        yield f"Methods of one row and seed saw different data splits: {'; '.join(mixed[:_SHOWN])}{_more(len(mixed))}"
    for name, hashes in data.items():
        if len(hashes) > 1:
            yield f"Data set {name} was not the same in all runs: {', '.join(sorted(h[:8] for h in hashes))}"


def _facts(table: Table, cells: Sequence[Slot], done: Sequence[CellRun]) -> Iterable[tuple[str, str]]:
    if not done:
        return
    results = [run.result for run in done]
    seconds = sum(float(result["seconds"]["total"]) for result in results)
    yield "runs", f"{len(done)} of {len({job.overrides for slot in cells for job in slot.jobs})}"
    yield "computing time", duration(seconds)
    for name, key in (("commit", "commit"), ("hardware", "gpu"), ("processor", "processor"), ("platform", "platform")):
        values = sorted({str(r["environment"][key]) for r in results if r.get("environment", {}).get(key)})
        if values:
            yield name, ", ".join(values)
    yield "torch", ", ".join(sorted({r["environment"]["packages"]["torch"] for r in results}))
    yield "seeds", ", ".join(map(str, sorted({run.job.seed for run in done})))
    data = {(str(r["choices"].get("dataset")), str(r["partition"]["data_sha256"])) for r in results}
    yield "data sha256", ", ".join(f"{name} {sha[:16]}" for name, sha in sorted(data))
    splits = sorted({str(r["partition"]["sha256"])[:8] for r in results})
    yield "split sha256", ", ".join(splits)
    yield "code hash", ", ".join(sorted({str(r["hashes"]["code"])[:8] for r in results}))
    rules = sorted({f"{r['headline']['metric']} ({r['headline']['rule']})" for r in results})
    yield "headline", ", ".join(rules)


def duration(seconds: float) -> str:
    """``12 s``, ``3.4 min``, ``2.1 h``."""
    for limit, length, unit in ((100, 1, "s"), (6000, 60, "min")):
        if seconds < limit:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds / 3600:.3g} h"


def _relative(folder: Path, root: Path) -> str:
    return folder.relative_to(root).as_posix() if folder.is_relative_to(root) else str(folder)


def _place(cell: Cell) -> str:
    return " ".join([cell.method, *(f"{key}={layout.label(value)}" for key, value in cell.conditions.items())])


def _listed(seeds: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(seeds)))


def _names(table: Table, cells: Sequence[Cell]) -> str:
    return ", ".join(_place(cell) for cell in cells[:_SHOWN]) + _more(len(cells))


def _more(count: int) -> str:
    return f" and {count - _SHOWN} more" if count > _SHOWN else ""


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
