"""What a report needs of its runs, as plain files that outlive them: a row a run, curves, resolved configs."""

from __future__ import annotations

import base64
import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from fedexp.core.build import locate
from fedexp.core.errors import ConfigError, FedexpError, StorageError
from fedexp.data.dataset import Dataset
from fedexp.evaluation.breakdown import is_part
from fedexp.storage.files import read_json, write_json, write_text
from fedexp.storage.identity import config_hash
from fedexp.storage.run_folder import rows_of
from fedexp.tables.cells import Job, Slot
from fedexp.tables.claims import Curve, Curves, Place
from fedexp.tables.lookup import CellRun, read_value, traced
from fedexp.tables.report.configs import parted
from fedexp.tables.report.csv import inert
from fedexp.tables.report.report import Form, Picture, Value
from fedexp.tables.schema import Table

_SPREAD = ("conditions", "pooled", "phases", "parts")  # of a run, over columns of their own
_SECONDS, _METRIC = "seconds.", "metric."
RUNS, CURVES, CONFIGS, ABOUT = "runs.csv", "curves.csv", "configs.json", "record.json"


@dataclass(frozen=True)
class RunRecord:
    """A run in one cell.

    Args:
        method, seed, draw: its column, its seed, and what it shares with the runs that it is compared with.
        pooled: conditions that make no row.
        point: of the column's grid; empty without one.
        value: in the table's unit; None where there is none, for the reason `error`.
        by: what chooses among the grid's points, where that is another number.
        last_10: the last ten rounds' values, in the table's unit, where the table has `Headline.pooled_rounds`; else empty.
        status: done | failed | damaged | missing ...
        run: its folder, relative to the output root.
        altered: the user's own overrides make it another run than the table's.
        other_code: made by other code than today's; others: how many results other code has made.
        lossy: names of data sets that are not the original's bits.
        commit, date, code, config: of the result; phases: seconds by name; parts: metrics of classes and clients; the rest is
            what the report says of cost, machine, data and headline.
    """

    conditions: dict[str, Value]
    method: str
    seed: int
    draw: str
    point: str = ""
    value: float | None = None
    by: float | None = None
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
    platform: str = ""
    torch: str = ""
    fedexp_version: str = ""
    date: str = ""
    pooled: dict[str, Value] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        return self.status == "done"


def draw_of(job: Job) -> str:
    """What a job shares with those that it is compared with: ``seed=0 beta=0.1``."""
    return " ".join(f"{key}={value}" for key, value in {"seed": job.seed, **job.pooled}.items())


@dataclass(frozen=True)
class Record:
    """All that a report is made of.

    Args:
        form, only, seeds, extra: what was asked of the table; command: what was typed.
        runs: by row, column, draw and point of a grid; curves: those that claims need.
        configs: resolved, by their hashes; keys of a record that was read are whole paths, with dots.
        drawn: name and title of the pictures that were made from the runs' own files; missed: why others were not.
    """

    form: Form
    only: dict[str, list[Value]]
    seeds: list[int] | None
    extra: list[str]
    command: str
    runs: Mapping[tuple[Place, str, str, str], RunRecord]
    curves: Curves = field(default_factory=dict)
    configs: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    drawn: Sequence[tuple[str, str]] = ()
    missed: Sequence[str] = ()

    def of(self, table: Table, slot: Slot) -> list[RunRecord]:
        """A cell's runs, each once (for every point that it has of a grid): the user's overrides may make one of several.

        Missing are those that the table has got since the record was written.
        """
        place = tuple(slot.conditions[key] for key in table.keys)
        found = [
            self.runs.get((place, slot.method, draw_of(job), job.point)) or _missing(slot, job)
            for job in slot.jobs
        ]
        return list(
            {(run.run or index, run.point): run for index, run in enumerate(found)}.values()
        )


def _missing(slot: Slot, job: Job) -> RunRecord:
    return RunRecord(
        dict(slot.conditions),
        slot.method,
        job.seed,
        draw_of(job),
        job.point,
        pooled=dict(job.pooled),
    )


def recorded(
    table: Table,
    cells: Sequence[Slot],
    cell_runs: Mapping[tuple[str, ...], CellRun],
    root: Path,
    asked: Record,
) -> Record:
    """`asked` with the runs of `cells`.

    Args:
        cell_runs: by a job's overrides; root: the output root, to which folders are relative.
    """
    runs: dict[tuple[Place, str, str, str], RunRecord] = {}
    configs: dict[str, dict[str, Any]] = {}
    curves: dict[tuple[Place, str, str, str], Curve] = {}
    needed = {
        (name, claim.curve, claim.axis)
        for claim in table.claims
        for name in (*claim.a, *claim.b)
        if claim.curve
    }
    for slot in cells:
        place = tuple(slot.conditions[key] for key in table.keys)
        for job in slot.jobs:
            run = cell_runs[job.overrides]
            row = _row(table, slot, job, run, root)
            if run.result:
                row = replace(row, lossy=_lossy(run.config))
                configs[row.config] = {
                    key: value for key, value in run.config.items() if key not in _ELSEWHERE
                }
            runs[place, slot.method, row.draw, row.point] = row
            for name, curve, axis in needed if run.result else ():
                if name != slot.method or curve is None:
                    continue
                try:
                    points = _curve(run, curve, axis)
                except StorageError as error:
                    runs[place, slot.method, row.draw, row.point] = _damaged(row, error)
                    break
                if points:
                    curves[place, name, row.draw, curve] = [
                        (x, table.headline.scale * y) for x, y in points
                    ]
    return replace(asked, runs=runs, curves=curves, configs=configs)


def _damaged(row: RunRecord, error: StorageError) -> RunRecord:
    return replace(row, value=None, by=None, status="damaged", error=error.what)


_ELSEWHERE = (
    "overrides",
    "output_root",
    "data_root",
    "logger",
)  # of the machine, or said by the rest


def _row(table: Table, slot: Slot, job: Job, run: CellRun, root: Path) -> RunRecord:
    where = (
        run.folder.relative_to(root).as_posix()
        if run.folder.is_relative_to(root)
        else str(run.folder)
    )
    row = replace(
        _missing(slot, job),
        status=run.status,
        error=run.error,
        run=where if run.config else "",
        altered=run.altered,
        other_code=run.other_code,
        others=len(run.others),
    )
    if not run.result:
        return row
    column, result = table.columns[slot.method], run.result
    path = column.value or table.headline.value
    filled = {**slot.conditions, **({"point": job.point} if column.grid else {})}
    try:
        row = replace(row, value=read_value(run, path.format(**filled)) * table.headline.scale)
        if column.grid is not None and column.grid.by is not None:
            row = replace(row, by=read_value(run, column.grid.by.format(**filled)))
    except StorageError as error:
        return _damaged(row, error)
    except FedexpError as error:
        row = replace(row, value=None, error=error.what)
    about = result.get("environment", {})
    return replace(
        row,
        last_10=_last_10(table, slot, filled, result),
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
        platform=str(about.get("platform") or ""),
        torch=str(about["packages"]["torch"]),
        fedexp_version=str(result.get("fedexp_version", "0.1")),
        date=run.date,
        phases={name: float(own) for name, own in result["seconds"].items() if name != "total"},
        parts={name: float(own) for name, own in result["metrics"].items() if is_part(name)},
    )


def _last_10(
    table: Table, slot: Slot, filled: Mapping[str, Value], result: Mapping[str, Any]
) -> tuple[float, ...]:
    """Empty where the column reads another number than the table's, and where older code made the result."""
    if table.headline.pooled_rounds is None or table.columns[slot.method].value is not None:
        return ()
    metric = table.headline.pooled_rounds.format(**filled).removeprefix("last_10.")
    return tuple(
        value * table.headline.scale for value in result.get("last_10", {}).get(metric, ())
    )


def _lossy(config: Mapping[str, Any]) -> str:
    """The names of data sets that are not the original's bits, else empty."""
    nodes = {"dataset": config["dataset"], "proxy.dataset": config.get("proxy", {}).get("dataset")}
    kinds = {key: locate(node["_target_"], Dataset, key) for key, node in nodes.items() if node}
    return " ".join(
        str(config["choices"].get(key))
        for key, kind in kinds.items()
        if not getattr(kind, "faithful", True)
    )


def _curve(run: CellRun, name: str, axis: str) -> Curve:
    """Empty where the run has none: the claim that needs it stays open."""
    try:
        rows = rows_of(run.folder, run.result) if axis == "round" else traced(run.folder, 1)
    except ConfigError:
        return []
    return [(float(row[axis]), float(row[name])) for row in rows if name in row]


def placed(record: Record, table: Table, cells: Sequence[Slot]) -> Record:
    """`record`, as it was read, with the pooled conditions that the table's jobs give its runs."""
    runs = dict(record.runs)
    for slot in cells:
        place = tuple(slot.conditions[key] for key in table.keys)
        for job in slot.jobs:
            key = place, slot.method, draw_of(job), job.point
            if key in runs:
                runs[key] = replace(runs[key], pooled=dict(job.pooled))
    return replace(record, runs=runs)


def completed(record: Record, others: Iterable[Record]) -> Record:
    """`record`, whose cells and form they are, with the runs that it lacks from `others`.

    Raises:
        ConfigError: another one is of another form, or was made with other seeds or overrides.
    """
    runs, curves, configs = dict(record.runs), dict(record.curves), dict(record.configs)
    for other in others:
        for name in ("form", "seeds", "extra"):
            if getattr(other, name) != getattr(record, name):
                raise ConfigError(
                    f"records of different {name} make no common report",
                    where="--from",
                    expected=str(getattr(record, name)),
                    got=str(getattr(other, name)),
                )
        lacking = {
            key: run
            for key, run in other.runs.items()
            if key not in runs or (runs[key].value is None and run.value is not None)
        }
        places = {(place, method, draw) for place, method, draw, _ in lacking}
        runs |= lacking
        curves |= {key: curve for key, curve in other.curves.items() if key[:3] in places}
        configs |= {
            run.config: other.configs[run.config]
            for run in lacking.values()
            if run.config in other.configs
        }
    return replace(record, runs=runs, curves=curves, configs=configs)


# --- files


def write(table: Table, record: Record, folder: Path) -> None:
    """``runs.csv``, ``curves.csv`` (where claims need curves), ``configs.json``, ``record.json`` in `folder`."""
    names = [f.name for f in fields(RunRecord) if f.name not in _SPREAD]
    pooled = [key for key in table.conditions if key not in table.keys]
    phases = list(dict.fromkeys(name for run in record.runs.values() for name in run.phases))
    parts = list(dict.fromkeys(name for run in record.runs.values() for name in run.parts))
    spread = [*(f"{_SECONDS}{name}" for name in phases), *(f"{_METRIC}{name}" for name in parts)]
    head = [
        "table",
        *table.keys,
        *pooled,
        *(_heading(table, name) for name in names),
        "unit",
        *spread,
    ]
    rows = []
    for run in record.runs.values():
        values = asdict(run)
        rows.append(
            [
                table.name,
                *map(_condition, run.conditions.values()),
                *(_condition(run.pooled[key]) if key in run.pooled else "" for key in pooled),
                *(_text(values[name]) for name in names),
                table.unit,
                *(_text(run.phases.get(name)) for name in phases),
                *(_text(run.parts.get(name)) for name in parts),
            ]
        )
    write_text(folder / RUNS, _csv(head, rows))
    lines = [
        [*map(_condition, place), method, draw, name, repr(x), repr(y)]
        for (place, method, draw, name), curve in record.curves.items()
        for x, y in curve
    ]
    if lines:
        write_text(folder / CURVES, _csv([*table.keys, "method", "draw", "curve", "x", "y"], lines))
    else:
        (folder / CURVES).unlink(missing_ok=True)
    shared, own = parted(record.configs)
    write_json(folder / CONFIGS, {"of all": shared, "of each": own})
    asked = {
        name: getattr(record, name)
        for name in ("form", "only", "seeds", "extra", "command", "drawn", "missed")
    }
    write_json(folder / ABOUT, {"table": table.name, **asked})


def _heading(table: Table, name: str) -> str:
    """Of a run's own column, which a condition may be called as (dataset)."""
    return f"run.{name}" if name in table.conditions else name


def _there(row: Mapping[str, str], table: Table, name: str) -> str | None:
    """What a row has of a run; older records gave way to conditions that make rows alone, and lack what is newer."""
    heading = _heading(table, name)
    if heading not in row and name not in table.keys:
        heading = name
    return row.get(heading)


def read(table: Table, folder: Path) -> Record:
    """What `write` wrote; raises `ConfigError` where it is absent, or of another table."""
    about = read_json(folder / ABOUT)
    if about is None or not (folder / RUNS).is_file():
        raise ConfigError(
            "there is no record of a table here",
            where=str(folder),
            expected=f"{RUNS} and {ABOUT}, as fedexp-table writes them beside a report",
        )
    if about.pop("table") != table.name:
        raise ConfigError("the record is another table's", where=str(folder), expected=table.name)
    kinds = {f.name: str(f.type) for f in fields(RunRecord) if f.name not in _SPREAD}
    runs: dict[tuple[Place, str, str, str], RunRecord] = {}
    for row in _rows(folder / RUNS):
        conditions = {key: _of_condition(row[key]) for key in table.keys}
        values = {
            name: _value(text, kind)
            for name, kind in kinds.items()
            if (text := _there(row, table, name)) is not None
        }
        phases, parts = (
            {
                name.removeprefix(kind): float(text)
                for name, text in row.items()
                if name.startswith(kind) and text
            }
            for kind in (_SECONDS, _METRIC)
        )
        run = RunRecord(conditions, **values, phases=phases, parts=parts)
        runs[tuple(conditions.values()), run.method, run.draw, run.point] = run
    curves: dict[tuple[Place, str, str, str], list[tuple[float, float]]] = {}
    for row in _rows(folder / CURVES) if (folder / CURVES).is_file() else ():
        place = tuple(_of_condition(row[key]) for key in table.keys)
        curves.setdefault((place, row["method"], row["draw"], row["curve"]), []).append(
            (float(row["x"]), float(row["y"]))
        )
    stored = read_json(folder / CONFIGS) or {"of all": {}, "of each": {}}
    configs = {name: {**stored["of all"], **own} for name, own in stored["of each"].items()}
    return Record(**about, runs=runs, curves=curves, configs=configs)


def pictures(record: Record, folder: Path) -> tuple[Picture, ...]:
    """Those that were drawn from the runs' own files and lie in `folder` beside the record."""
    found = []
    for name, title in record.drawn:
        png, svg = (folder / f"report-{name}.{ending}" for ending in ("png", "svg"))
        if png.is_file():
            data = png.read_bytes()
            found.append(
                Picture(name, title, svg.read_text() if svg.is_file() else _as_svg(data), data)
            )
    return tuple(found)


def _as_svg(png: bytes) -> str:
    width, height = (int.from_bytes(png[at : at + 4], "big") for at in (16, 20))  # of its header
    data = base64.b64encode(png).decode()
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">'
        f'<image width="{width}" height="{height}" href="data:image/png;base64,{data}"/></svg>'
    )


def _rows(path: Path) -> Iterable[dict[str, str]]:
    return csv.DictReader(io.StringIO(path.read_text()))


def _csv(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(map(inert, row) for row in rows)
    return text.getvalue()


def _condition(value: Value) -> str:
    """Words as they are, all else as JSON: words that JSON would read as something else are quoted."""
    if isinstance(value, str):
        try:
            json.loads(value)
        except ValueError:
            return value
    return json.dumps(value)


def _of_condition(text: str) -> Value:
    """What `_condition` wrote; older records quote every word."""
    try:
        value: Value = json.loads(text)
    except ValueError:
        return str(_value(text, "str"))
    return value


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(repr, value))
    return "" if value is None else repr(value) if isinstance(value, float) else str(value)


def _value(text: str, kind: str) -> Any:
    if text.startswith("'") and inert(text[1:]) == text:
        text = text[1:]
    if kind.startswith("float"):
        return float(text) if text else None
    if kind.startswith("tuple"):
        return tuple(map(float, text.split()))
    if kind == "bool":
        return text == "True"
    return int(text) if kind == "int" else text
