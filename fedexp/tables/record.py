"""The record of a table's runs: all data of a report, stored as plain files.

The files contain one row per run, curves, and resolved configs. A report can be built
from them after the folders of the runs have been deleted.
"""

from __future__ import annotations

import base64
import csv
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from fedexp.core.build import convert, locate
from fedexp.core.errors import ConfigError, FedexpError, StorageError
from fedexp.core.resolved_config import ResolvedConfig
from fedexp.data.dataset import Dataset
from fedexp.evaluation.breakdown import is_part
from fedexp.storage.files import damaged, read_json, write_json, write_text
from fedexp.storage.identity import config_hash
from fedexp.storage.run_folder import rows_of
from fedexp.tables.cells import Job, PlannedCell, placeholders
from fedexp.tables.claims import Curve, Curves, RowKey
from fedexp.tables.grouping import grouped
from fedexp.tables.lookup import CellRun, read_value, traced
from fedexp.tables.report.configs import parted
from fedexp.tables.report.csv import csv_text, inert
from fedexp.tables.report.layout import label
from fedexp.tables.report.picture_sizes import sizes_of_png, with_sizes
from fedexp.tables.report.report import Picture, Value, Variant
from fedexp.tables.schema import Table

# Fields of `RunRecord` with one column of runs.csv for each name that they contain, and
# the beginning of these columns' headings.
_BY_NAME = {"phases": "seconds.", "parts": "metric.", "rounds_to": "rounds_to."}
# Fields of `RunRecord` that are spread over several columns of runs.csv.
_SPREAD = ("conditions", "pooled", *_BY_NAME)
# Some fields of `RunRecord` have other names in runs.csv than in the code.
_STORED_RUN_NAMES = {"split_seed": "draw", "criterion": "by"}
# Keys of record.json besides "table". Each has the name of the field of `TableRecord`
# that it stores, and the type of its value.
_ABOUT: Mapping[str, tuple[str, Any]] = {
    "form": ("variant", Variant),
    "only": ("only", dict[str, tuple[Value, ...]]),
    "seeds": ("seeds", tuple[int, ...] | None),
    "extra": ("extra", tuple[str, ...]),
    "command": ("command", str),
    "drawn": ("figures", tuple[tuple[str, str], ...]),
    "missed": ("missed", tuple[str, ...]),
}
# Identifies a run by its row, its column, its split seed and its point of a grid. A row
# is identified by some conditions of the table, and the others are pooled. The split
# seed is a text with the seed and the pooled conditions. A point is a value that is
# tried for a hyper-parameter.
RunKey = tuple[RowKey, str, str, str]
RUNS, CURVES, CONFIGS, ABOUT = "runs.csv", "curves.csv", "configs.json", "record.json"

Parsed = TypeVar("Parsed")


@dataclass(frozen=True)
class RunRecord:
    """A run as it is recorded for one cell.

    Args:
        conditions: Conditions of the row.
        method: Key of the run's column.
        seed: Seed of the run.
        split_seed: The seed and the pooled conditions as text. Runs that are compared
            with each other have the same text.
        point: Point of the column's hyper-parameter grid, empty without a grid.
        value: The run's number in the table's unit, or None if there is none. The
            reason is in `error` if it is known.
        criterion: Number by which the best point of the grid is chosen. None: `value`
            is used.
        last_10: Values of the last ten rounds in the table's unit, empty unless the
            table has `NumberSource.pooled_rounds`.
        status: Status of the run, such as done, failed, damaged or missing.
        error: Error of the run.
        run: Folder of the run, relative to the output root.
        altered: Whether the user's overrides change the run. Then it does not count as
            a run of the table.
        other_code: Whether the result was made by code that differs from the current
            code.
        others: Number of results of this run that were made by other code.
        lossy: Names of the run's data sets whose samples are not exactly those of the
            papers, for example because they were compressed again.
        commit: Commit of the result.
        code: Hash of the code.
        config: Hash of the config.
        choice: Option of ``method``.
        metric: Metric of the headline, which is the main number of a run.
        rule: Rule of the headline, which tells the rounds that count.
        dataset: Option of ``dataset``.
        data: Fingerprint of the data.
        split: Hash of the data split.
        seconds: Computing time in seconds.
        gpu: Name of the GPU.
        processor: Model name of the processor.
        threads: Number of torch threads that the run trained with. 0: not recorded.
        engine: Engine that the run chose, with its options. Empty: not recorded.
        platform: Platform.
        torch: Version of torch.
        fedexp_version: Version of fedexp.
        date: Date of the result.
        rounds: Number of rounds of the run. None: not recorded.
        bytes_up: Bytes that all clients sent in all rounds. None: not recorded.
        bytes_down: Bytes that all clients received in all rounds. None: not recorded.
        pooled: Conditions of the run that do not identify its row.
        phases: Seconds by phase.
        parts: Metrics of single classes, and summaries over clients, by name.
        rounds_to: For each target of the headline, the first evaluated round that
            reaches it. Infinite: no round reaches it.
    """

    conditions: dict[str, Value]
    method: str
    seed: int
    split_seed: str
    point: str = ""
    value: float | None = None
    criterion: float | None = None
    last_10: tuple[float, ...] = ()
    status: str = "missing"
    error: str = ""
    run: str = ""
    altered: bool = False
    other_code: bool = False
    others: int = 0
    lossy: str = ""
    commit: str = ""
    code: str = ""
    config: str = ""
    choice: str = ""
    metric: str = ""
    rule: str = ""
    dataset: str = ""
    data: str = ""
    split: str = ""
    seconds: float = 0.0
    gpu: str = ""
    processor: str = ""
    threads: int = 0
    engine: str = ""
    platform: str = ""
    torch: str = ""
    fedexp_version: str = ""
    date: str = ""
    rounds: int | None = None
    bytes_up: int | None = None
    bytes_down: int | None = None
    pooled: dict[str, Value] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    parts: dict[str, float] = field(default_factory=dict)
    rounds_to: dict[str, float] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        return self.status == "done"


# Fields that every runs.csv has, including those of older versions.
_REQUIRED = ("method", "seed", "split_seed", "value", "status")
# Types, as text, of the fields that are one column of runs.csv.
_FIELDS = {f.name: str(f.type) for f in fields(RunRecord) if f.name not in _SPREAD}


def split_seed_of(job: Job) -> str:
    """Return a job's seed and pooled conditions as text: ``seed=0 beta=0.1``.

    The pooled conditions are those that do not identify a row of the table. Runs that
    are compared with each other have the same text.
    """
    return " ".join(f"{key}={value}" for key, value in {"seed": job.seed, **job.pooled}.items())


def run_key(table: Table, planned: PlannedCell, job: Job) -> RunKey:
    """Return the row, column, split seed and point that identify a run in a record."""
    return table.row_key(planned.conditions), planned.method, split_seed_of(job), job.point


@dataclass(frozen=True)
class TableRecord:
    """The data of a report.

    Args:
        variant: Variant of the table.
        only: Values by condition (or ``method``) that the user asked for. Empty: all.
        seeds: Seeds that the user asked for. None: the table's.
        extra: Overrides of the user.
        command: Command that was typed.
        runs: Runs by row, column, split seed and point of a grid (see `RunKey`).
        curves: Curves of runs that claims of the table compare.
        configs: Resolved configs by their hashes. In a record that was read from files,
            the configs are flat, and their keys are dotted paths.
        figures: (name, title) of each picture that was drawn from the runs' own files.
        missed: Reasons why other figures were not drawn.
    """

    variant: Variant
    only: Mapping[str, Sequence[Value]]
    seeds: Sequence[int] | None
    extra: Sequence[str]
    command: str
    runs: Mapping[RunKey, RunRecord]
    curves: Curves = field(default_factory=dict)
    configs: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    figures: Sequence[tuple[str, str]] = ()
    missed: Sequence[str] = ()

    def runs_of(self, table: Table, planned: PlannedCell) -> list[RunRecord]:
        """Return the runs of a cell without repetition.

        The user's overrides may turn several jobs into one run. Such a run is returned
        once for each point of the column's grid. If the record lacks a job, for example
        because it was added to the table later, its run has the status ``missing``.
        """
        found = [
            self.runs.get(run_key(table, planned, job)) or _missing(planned, job)
            for job in planned.jobs
        ]
        return list(
            {(run.run or index, run.point): run for index, run in enumerate(found)}.values()
        )


def _missing(planned: PlannedCell, job: Job) -> RunRecord:
    return RunRecord(
        dict(planned.conditions),
        planned.method,
        job.seed,
        split_seed_of(job),
        job.point,
        pooled=dict(job.pooled),
    )


def recorded(
    table: Table,
    cells: Sequence[PlannedCell],
    cell_runs: Mapping[tuple[str, ...], CellRun],
    root: Path,
    asked: TableRecord,
) -> TableRecord:
    """Add the runs of cells, their curves and their configs to a record.

    Args:
        table: The table.
        cells: Cells with their jobs.
        cell_runs: Runs by the overrides of their jobs.
        root: Output root. The recorded folders are relative to it.
        asked: Record with the user's request (variant, cells, seeds, overrides and
            command) and without runs.
    """
    runs: dict[RunKey, RunRecord] = {}
    configs: dict[str, dict[str, Any]] = {}
    curves: dict[tuple[RowKey, str, str, str], Curve] = {}
    needed = {
        (name, claim.curve, claim.axis)
        for claim in table.claims
        for name in (*claim.a, *claim.b)
        if claim.curve
    }

    for planned in cells:
        place = table.row_key(planned.conditions)

        for job in planned.jobs:
            run = cell_runs[job.overrides]
            key = run_key(table, planned, job)
            row = _run_record(table, planned, job, run, root)

            if run.result:
                row = replace(row, lossy=_lossy(run.config))
                configs[row.config] = {
                    key: value
                    for key, value in run.config.to_stored().items()
                    if key not in _ELSEWHERE
                }

            runs[key] = row

            for name, curve, axis in needed if run.result else ():
                if name != planned.method or curve is None:
                    continue
                try:
                    points = _curve(run, curve, axis)
                except StorageError as error:
                    runs[key] = _damaged(row, error)
                    break
                if points:
                    curves[place, name, row.split_seed, curve] = [
                        (x, table.headline.scale * y) for x, y in points
                    ]

    return replace(asked, runs=runs, curves=curves, configs=configs)


def _damaged(row: RunRecord, error: StorageError) -> RunRecord:
    return replace(row, value=None, criterion=None, status="damaged", error=error.what)


# Keys of a config that are not stored. They describe the machine or repeat other keys.
_ELSEWHERE = (
    "overrides",
    "output_root",
    "data_root",
    "logger",
)


def _run_record(
    table: Table, planned: PlannedCell, job: Job, run: CellRun, root: Path
) -> RunRecord:
    where = (
        run.folder.relative_to(root).as_posix()
        if run.folder.is_relative_to(root)
        else str(run.folder)
    )
    row = replace(
        _missing(planned, job),
        status=run.status,
        error=run.error,
        run=where if run.config else "",
        altered=run.altered,
        other_code=run.other_code,
        others=len(run.others),
    )
    if not run.result:
        return row

    column, result = table.columns[planned.method], run.result
    filled = placeholders(planned, job)

    try:
        path = table.value_path(column).format(**filled)
        row = replace(row, value=read_value(run, path) * table.headline.scale)
        if column.grid is not None and column.grid.by is not None:
            row = replace(row, criterion=read_value(run, column.grid.by.format(**filled)))
    except StorageError as error:
        return _damaged(row, error)
    except FedexpError as error:
        row = replace(row, value=None, error=error.what)

    about, numerics = result.get("environment", {}), result.get("numerics", {})
    traffic = result.get("bytes", {})

    return replace(
        row,
        last_10=_last_10(table, planned, filled, result),
        commit=str(about.get("commit") or ""),
        code=str(result["hashes"]["code"]),
        config=config_hash(run.config),
        choice=str(result["choices"].get("method")),
        metric=result["headline"]["metric"],
        rule=result["headline"]["rule"],
        dataset=str(result["choices"].get("dataset")),
        data=str(result["partition"]["data_sha256"]),
        split=str(result["partition"]["sha256"]),
        seconds=float(result["seconds"]["total"]),
        gpu=str(about.get("gpu") or ""),
        processor=str(about.get("processor") or ""),
        threads=int(numerics.get("threads", 0)),
        engine=_engine_text(numerics.get("engine") or {}),
        platform=str(about.get("platform") or ""),
        torch=str(about["packages"]["torch"]),
        fedexp_version=str(result.get("fedexp_version", "0.1")),
        date=run.date,
        rounds=result.get("rounds"),
        bytes_up=traffic.get("up"),
        bytes_down=traffic.get("down"),
        phases={name: float(own) for name, own in result["seconds"].items() if name != "total"},
        parts={name: float(own) for name, own in result["metrics"].items() if is_part(name)},
        rounds_to={name: float(own) for name, own in result.get("rounds_to", {}).items()},
    )


def _engine_text(engine: Mapping[str, Any]) -> str:
    """Return an engine as text, such as ``Vectorized kernel=auto stack=10``."""
    path = str(engine.get("_target_", ""))
    options = [f"{key}={value}" for key, value in sorted(engine.items()) if key != "_target_"]
    return " ".join([path.rpartition(".")[2], *options])


def _last_10(
    table: Table, planned: PlannedCell, filled: Mapping[str, Value], result: Mapping[str, Any]
) -> tuple[float, ...]:
    """Return the values of the last ten rounds.

    The result is empty if the table does not pool rounds, or if the column has its own
    `value`. It is also empty if older code made the run's result.
    """
    if table.headline.pooled_rounds is None or table.columns[planned.method].value is not None:
        return ()
    metric = table.headline.pooled_rounds.format(**filled).removeprefix("last_10.")
    return tuple(
        value * table.headline.scale for value in result.get("last_10", {}).get(metric, ())
    )


def _lossy(config: ResolvedConfig) -> str:
    """Return the names of data sets whose samples differ from those of the papers."""
    nodes = {
        "dataset": config["dataset"],
        "proxy.dataset": config.values.get("proxy", {}).get("dataset"),
    }
    kinds = {key: locate(node["_target_"], Dataset, key) for key, node in nodes.items() if node}
    return " ".join(
        str(config.choices.get(key))
        for key, kind in kinds.items()
        if not getattr(kind, "faithful", True)
    )


def _curve(run: CellRun, name: str, axis: str) -> Curve:
    """Return a curve of a run, empty if the run has no such curve.

    A claim that needs an absent curve is undecided.
    """
    try:
        rows = rows_of(run.folder, run.result) if axis == "round" else traced(run.folder, 1)
    except ConfigError:
        return []
    return [(float(row[axis]), float(row[name])) for row in rows if name in row]


def placed(record: TableRecord, table: Table, cells: Sequence[PlannedCell]) -> TableRecord:
    """Add the pooled conditions of the jobs to the runs of a record.

    Pooled conditions are those that do not identify a row. A record that was read from
    files lacks them.
    """
    pooled = {run_key(table, planned, job): job.pooled for planned in cells for job in planned.jobs}
    runs = {
        key: replace(run, pooled=dict(pooled.get(key, run.pooled)))
        for key, run in record.runs.items()
    }
    return replace(record, runs=runs)


def completed(record: TableRecord, others: Iterable[TableRecord]) -> TableRecord:
    """Complete a record with runs of other records.

    A run of another record is added if the first record lacks the run. It is also added
    if only the other record has the run's number. The cells are those of all records.
    All other fields, such as `TableRecord.command`, are those of the first record.

    Raises:
        ConfigError: Another record has another variant, other seeds or other overrides.
            Or the cells of all records cannot be described by one `TableRecord.only`.
    """
    runs, curves, configs = dict(record.runs), dict(record.curves), dict(record.configs)
    only = record.only

    for other in others:
        got = _request(other)
        for name, expected in _request(record).items():
            if got[name] != expected:
                raise ConfigError(
                    f"records of different {name} cannot make one report",
                    where="--from",
                    expected=expected,
                    got=got[name],
                    do=f"write both records with the same {name}, or make one report per record",
                )
        only = _either(only, other.only)

        lacking = {
            key: run
            for key, run in other.runs.items()
            if key not in runs or (runs[key].value is None and run.value is not None)
        }
        places = {(place, method, split_seed) for place, method, split_seed, _ in lacking}
        runs |= lacking
        curves |= {key: curve for key, curve in other.curves.items() if key[:3] in places}
        configs |= {
            run.config: other.configs[run.config]
            for run in lacking.values()
            if run.config in other.configs
        }

    return replace(record, runs=runs, curves=curves, configs=configs, only=only)


def _either(
    only: Mapping[str, Sequence[Value]], other: Mapping[str, Sequence[Value]]
) -> Mapping[str, Sequence[Value]]:
    """Return the restriction to the cells of either of two restrictions.

    A restriction has the allowed values by key. A key that it lacks is not restricted.

    Raises:
        ConfigError: The restrictions differ in several keys, and neither contains the
            other. No restriction has exactly the cells of both.
    """
    for small, large in ((only, other), (other, only)):
        if all(
            key in small and all(value in values for value in small[key])
            for key, values in large.items()
        ):
            return dict(large)

    differing = [
        key
        for key in {**only, **other}
        if sorted(map(repr, only.get(key, ()))) != sorted(map(repr, other.get(key, ())))
    ]
    if len(differing) > 1:
        raise ConfigError(
            "records of cells that differ in several conditions cannot make one report",
            where="--from",
            expected=only_text(only),
            got=only_text(other),
            do="make one report per record, or run the table without --only",
        )

    # Neither contains the other, so both restrict the key.
    (key,) = differing
    values = [*only[key], *(value for value in other[key] if value not in only[key])]
    return {**only, key: values}


def _request(record: TableRecord) -> dict[str, str]:
    """Return the variant, seeds and overrides that the user chose, as texts."""
    seeds = "the table's" if record.seeds is None else ", ".join(map(str, record.seeds))
    overrides = " ".join(record.extra) or "none"
    return {"variant": record.variant, "seeds": seeds, "overrides": overrides}


def only_text(only: Mapping[str, Sequence[Value]]) -> str:
    """Return a restriction as it is typed: ``alpha=0.1,0.5 method=fedavg``."""
    return " ".join(f"{key}={','.join(map(label, values))}" for key, values in only.items())


# --- files


def write(table: Table, record: TableRecord, folder: Path) -> None:
    """Write ``runs.csv``, ``curves.csv``, ``configs.json`` and ``record.json``.

    ``curves.csv`` is written only if claims need curves.
    """
    pooled = [key for key in table.conditions if key not in table.keys]
    spread = {
        (group, name): f"{heading}{name}"
        for group, heading in _BY_NAME.items()
        for run in record.runs.values()
        for name in getattr(run, group)
    }

    head = [
        "table",
        *table.keys,
        *pooled,
        *(_heading(table, name) for name in _FIELDS),
        "unit",
        *spread.values(),
    ]
    rows = []
    for run in record.runs.values():
        rows.append(
            [
                table.name,
                *map(_condition_text, run.conditions.values()),
                *(_condition_text(run.pooled[key]) if key in run.pooled else "" for key in pooled),
                *(_value_text(getattr(run, name)) for name in _FIELDS),
                table.unit,
                *(_value_text(getattr(run, group).get(name)) for group, name in spread),
            ]
        )

    write_text(folder / RUNS, csv_text(head, rows))

    lines = [
        [*map(_condition_text, place), method, split_seed, name, repr(x), repr(y)]
        for (place, method, split_seed, name), curve in record.curves.items()
        for x, y in curve
    ]

    if lines:
        heading = [*table.keys, "method", "draw", "curve", "x", "y"]
        write_text(folder / CURVES, csv_text(heading, lines))
    else:
        (folder / CURVES).unlink(missing_ok=True)

    shared, own = parted(record.configs)
    write_json(folder / CONFIGS, {"of all": shared, "of each": own})
    about = {key: getattr(record, name) for key, (name, _) in _ABOUT.items()}
    write_json(folder / ABOUT, {"table": table.name, **about})


def _heading(table: Table, name: str) -> str:
    """Return the heading of a field in ``runs.csv``.

    If the table has a condition with the field's name, such as ``dataset``, the heading
    is ``run.<name>``.
    """
    name = _STORED_RUN_NAMES.get(name, name)
    return f"run.{name}" if name in table.conditions else name


def _there(row: Mapping[str, str], table: Table, name: str) -> str | None:
    """Return the text of a field in a row of ``runs.csv``, or None if it is absent.

    A field is absent if the record is older than the field. In older records, a field
    with the same name as a condition is stored differently:

    - If the condition is one of `Table.keys`, the field is absent.
    - Otherwise the heading of the field is its name without ``run.``.
    """
    heading = _heading(table, name)
    stored = _STORED_RUN_NAMES.get(name, name)
    if heading not in row and stored not in table.keys:
        heading = stored
    return row.get(heading)


def read(table: Table, folder: Path) -> TableRecord:
    """Read a record that `write` wrote.

    Raises:
        ConfigError: The folder has no record, the record of another table, or a record
            whose rows have other keys than the table.
        StorageError: A file of the record is damaged.
    """
    about = _read_about(folder)
    if about["table"] != table.name:
        raise ConfigError("the record is another table's", where=str(folder), expected=table.name)
    asked = {
        name: _converted(about[key], kind, folder / ABOUT, key)
        for key, (name, kind) in _ABOUT.items()
    }
    if any(key not in ("method", *table.conditions) for key in asked["only"]):
        raise _other_keys(table, folder, f"a record made with --only {only_text(asked['only'])}")

    runs: dict[RunKey, RunRecord] = {}
    for run in _read_csv(folder / RUNS, "method", lambda row: _read_run(table, folder, row)):
        key = (tuple(run.conditions.values()), run.method, run.split_seed, run.point)
        if key in runs:
            got = f"several runs of method={run.method} {run.split_seed} in one row"
            raise _other_keys(table, folder, got)
        runs[key] = run

    points = (
        _read_csv(
            folder / CURVES,
            "x",
            lambda row: (_curve_key(table, row), (float(row["x"]), float(row["y"]))),
        )
        if (folder / CURVES).is_file()
        else ()
    )

    configs = _read_configs(folder / CONFIGS)
    return TableRecord(**asked, runs=runs, curves=grouped(points), configs=configs)


def name_of_table(folder: Path) -> str:
    """Return the name of the table whose record is in `folder`.

    Raises:
        ConfigError: The folder has no record.
        StorageError: The file ``record.json`` is damaged.
    """
    name: str = _converted(_read_about(folder)["table"], str, folder / ABOUT, "table")
    return name


def _read_about(folder: Path) -> dict[str, Any]:
    """Return the content of ``record.json``. It has all keys."""
    path = folder / ABOUT
    if not path.is_file() or not (folder / RUNS).is_file():
        raise ConfigError(
            "there is no record of a table here",
            where=str(folder),
            expected=f"{RUNS} and {ABOUT}, as fedexp-table writes them beside a report",
        )
    return _read_object(path, ("table", *_ABOUT))


def _read_configs(path: Path) -> dict[str, dict[str, Any]]:
    """Return the configs of the runs by their hashes."""
    if not path.is_file():
        return {}
    stored = _read_object(path, ("of all", "of each"))
    shared = _converted(stored["of all"], dict[str, Any], path, "of all")
    each = _converted(stored["of each"], dict[str, dict[str, Any]], path, "of each")
    return {name: {**shared, **own} for name, own in each.items()}


def _read_object(path: Path, keys: Sequence[str]) -> dict[str, Any]:
    """Return the JSON object in a file of a record. It must have the keys `keys`."""
    try:
        value = read_json(path)
    except StorageError as error:
        raise _damaged_file(path, error.facts["got"]) from error
    if not isinstance(value, dict):
        raise _damaged_file(path, "it is not a JSON object")
    if absent := [key for key in keys if key not in value]:
        raise _damaged_file(path, f"no key '{absent[0]}'")
    return value


def _converted(value: Any, kind: Any, path: Path, name: str) -> Any:
    """Return a value from the file `path` as the type `kind`."""
    try:
        return convert(value, kind, name)
    except ConfigError as error:
        expected = error.facts["expected"]
        raise _damaged_file(path, f"{error.what}, expected {expected}") from error


def _damaged_file(path: Path, how: str | None) -> StorageError:
    return damaged(path, how, "restore the file, or write the record again with fedexp-table")


def _read_run(table: Table, folder: Path, row: Mapping[str, str]) -> RunRecord:
    """Read a row of ``runs.csv``."""
    if lost := [key for key in table.keys if key not in row]:
        raise _other_keys(table, folder, f"a record without {', '.join(lost)}")
    conditions = {key: _read_condition(row[key]) for key in table.keys}
    values = {
        name: _read_value(text, kind)
        for name, kind in _FIELDS.items()
        if (text := _there(row, table, name)) is not None
    }
    if absent := [name for name in _REQUIRED if name not in values]:
        raise KeyError(_heading(table, absent[0]))
    by_name: dict[str, Any] = {
        group: {
            name.removeprefix(heading): float(text)
            for name, text in row.items()
            if name.startswith(heading) and text
        }
        for group, heading in _BY_NAME.items()
    }
    return RunRecord(conditions, **values, **by_name)


def _other_keys(table: Table, folder: Path, got: str) -> ConfigError:
    return ConfigError(
        "the rows of the record have other keys than the table",
        where=str(folder / RUNS),
        expected=f"rows with the keys {', '.join(table.keys)}",
        got=got,
        do="use the table's file with which the record was made, or run the table again",
    )


def _curve_key(table: Table, row: Mapping[str, str]) -> tuple[RowKey, str, str, str]:
    place = tuple(_read_condition(row[key]) for key in table.keys)
    return place, row["method"], row["draw"], row["curve"]


def pictures(record: TableRecord, folder: Path) -> tuple[Picture, ...]:
    """Read the pictures that were drawn from the runs' own files."""
    found = []
    for name, title in record.figures:
        png, svg = (folder / f"report-{name}.{ending}" for ending in ("png", "svg"))
        if png.is_file():
            data = png.read_bytes()
            drawing = svg.read_text() if svg.is_file() else _as_svg(data)
            found.append(Picture(name, title, drawing, data))
    return tuple(found)


def _as_svg(png: bytes) -> str:
    """Return an SVG that contains a PNG image and the sizes that the PNG records."""
    # Width and height are in the header of a PNG file.
    width, height = (int.from_bytes(png[at : at + 4], "big") for at in (16, 20))
    data = base64.b64encode(png).decode()
    sizes = sizes_of_png(png)
    # Without a width, browsers may shrink an SVG to the narrowest possible size.
    shown = f"{sizes[1]:g}pt" if sizes else f"{width}"
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{shown}" viewBox="0 0 {width} {height}">'
        f'<image width="{width}" height="{height}" href="data:image/png;base64,{data}"/></svg>'
    )
    return svg if sizes is None else with_sizes(svg, *sizes)


def _read_csv(path: Path, column: str, parse: Callable[[dict[str, str]], Parsed]) -> list[Parsed]:
    """Read a CSV file.

    Args:
        path: The file.
        column: A column that the file must have, also if it has no rows.
        parse: Function that reads a row. It raises a KeyError for an absent column, and
            a ValueError for a damaged value.

    Raises:
        StorageError: A line is incomplete or damaged, or a column is absent. An
            incomplete last line may lack digits of a number. Absent lines are not
            noticed.
    """
    try:
        text = path.read_text()
    except UnicodeDecodeError as error:
        raise _damaged_file(path, str(error)) from error
    if not text.endswith("\n"):
        raise _damaged_file(path, "its last line is incomplete" if text else "it is empty")

    reader = csv.DictReader(io.StringIO(text))
    parsed = []
    try:
        if column not in (reader.fieldnames or ()):
            raise KeyError(column)
        for row in reader:
            if None in row or None in row.values():
                raise ValueError("the number of cells is not that of line 1")
            parsed.append(parse(row))
    except KeyError as error:
        raise _damaged_file(path, f"no column {error}") from error
    except (ValueError, csv.Error) as error:
        raise _damaged_file(path, f"line {reader.line_num}: {error}") from error
    return parsed


def _condition_text(value: Value) -> str:
    """Return the value of a condition as text that `_read_condition` reads back.

    A text stays as it is, unless it is also valid JSON. Then it is quoted, as JSON.
    Any other value is written as JSON.
    """
    if isinstance(value, str):
        try:
            json.loads(value)
        except ValueError:
            return value
    return json.dumps(value)


def _read_condition(text: str) -> Value:
    """Read what `_condition_text` wrote. Older records quote every text."""
    try:
        value: Value = json.loads(text)
    except ValueError:
        return str(_read_value(text, "str"))
    if isinstance(value, dict | list):
        raise ValueError(f"expected one value, got '{text}'")
    return value


def _value_text(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(repr, value))
    return "" if value is None else repr(value) if isinstance(value, float) else str(value)


def _read_value(text: str, kind: str) -> Any:
    if text.startswith("'") and inert(text[1:]) == text:
        text = text[1:]
    if kind == "float | None":
        return float(text) if text else None
    if kind == "float":
        return float(text)
    if kind.startswith("tuple"):
        return tuple(map(float, text.split()))
    if kind == "bool":
        if text not in ("True", "False"):
            raise ValueError(f"expected True or False, got '{text}'")
        return text == "True"
    if kind == "int | None":
        return int(text) if text else None
    return int(text) if kind == "int" else text
