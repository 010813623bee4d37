"""Functions that find and read the file of a table, and add its tuned columns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fedexp.config.folders import conf_dir, user_conf_dir
from fedexp.core.build import build
from fedexp.core.errors import ConfigError, nearest
from fedexp.storage.yaml_files import read_yaml_mapping
from fedexp.tables.cells import declared_seeds
from fedexp.tables.checks import check_table
from fedexp.tables.plot_styles import read_method_styles, read_plot_styles
from fedexp.tables.report.report import Variant
from fedexp.tables.schema import OverrideRule, Table, Untuned, fits, require_known
from fedexp.tuning.tuned_files import Tuning, load_tuning


def with_tuned(table: Table) -> Table:
    """Add a tuned column for every method that is swept in the table's tuning file.

    In such a sweep, several values of one coefficient of the method are tried. The
    column uses the values that were chosen. If none has been chosen yet, the column has
    no runs and shows the reason. If they are the table's own values, there is no second
    column.

    Raises:
        ConfigError: The file sweeps an unknown column, or it has a seed of the table.
    """
    if table.tuned is None:
        return table
    tuning, columns = _tuning(table, table.tuned), list(table.methods)

    for key in tuning.sweeps:
        if key in tuning.unchanged:
            continue
        base, setting = table.columns[key], tuning.setting(key)
        rules = [*table.rules, *(table.reduced.rules if table.reduced else ())]
        own = [
            override
            for rule in rules
            if "method" in rule.where and fits(rule.where, tuning.cell, key)
            for override in rule.overrides
        ]
        columns.append(
            replace(
                base,
                key=f"{key}_tuned",
                label=f"{base.label}, tuned" + (f" ({', '.join(setting)})" if setting else ""),
                role="ours",
                overrides=setting and (*(base.overrides or ()), *own, *setting),
                why="" if setting else _not_tuned(table.tuned, key),
                where={**base.where, **tuning.where},
                equals=None,
            )
        )

    return replace(table, methods=tuple(columns))


def with_equal_tuning(table: Table) -> Table:
    """Apply the values that tuning files chose to the table's own columns.

    Every file chooses values for every column, from equally many points. The values
    apply to the rows that the file names. If a file has not chosen a column's values
    yet, the column has no runs in these rows and shows the reason.

    Raises:
        ConfigError: A file has a seed of the table, names rows by something else than
            the table's keys, or does not sweep each column over equally many points,
            with ``local.lr`` first and without an extension.
    """
    rules, columns = [*table.rules], table.columns
    for name in table.equal_tuning:
        tuning = _tuning(table, name)
        require_known(tuning.where, table.keys, f"conf/tuned/{name}.yaml, where")
        if tuning.extension:
            raise ConfigError(
                "an extension gives only those columns more points whose best point is at an edge",
                where=f"conf/tuned/{name}.yaml, extension",
                expected="0, because all columns are tuned over equally many points",
                got=tuning.extension,
            )
        where = f"conf/tuned/{name}.yaml, sweeps"
        if unswept := [key for key in columns if key not in tuning.sweeps]:
            raise ConfigError(
                f"column '{unswept[0]}' is not tuned",
                where=where,
                expected=f"a sweep of each column: {', '.join(columns)}",
            )
        counts = {key: sum(len(one.points) for one in own) for key, own in tuning.sweeps.items()}
        for key, own in tuning.sweeps.items():
            if own[0].over != "local.lr" or counts[key] != min(counts.values()):
                raise ConfigError(
                    f"column '{key}' is not tuned as the others are",
                    where=where,
                    expected=f"{min(counts.values())} points, the first ones over local.lr",
                    got=f"{counts[key]} points, the first ones over {own[0].over}",
                )
            setting = tuning.setting(key)
            if setting is None:
                column = columns[key]
                columns[key] = replace(
                    column,
                    untuned=(*column.untuned, Untuned(tuning.where, _not_tuned(name, key))),
                )
            else:
                rules.append(OverrideRule({**tuning.where, "method": key}, setting))
    return replace(table, methods=tuple(columns.values()), rules=tuple(rules))


def _tuning(table: Table, name: str) -> Tuning:
    """Load a tuning file of a table, and check its columns and seeds."""
    tuning = load_tuning(name)
    require_known(tuning.sweeps, table.columns, f"conf/tuned/{name}.yaml, sweeps")
    variants: tuple[Variant, ...] = ("full", "reduced")
    own = {
        seed
        for variant in variants
        for column in table.methods
        for seed in declared_seeds(table, variant, column)
    }
    if shared := sorted({*tuning.seeds} & own):
        raise ConfigError(
            "coefficients must not be chosen with the seeds of the table",
            where=f"conf/tuned/{name}.yaml, seeds",
            got=", ".join(map(str, shared)),
        )
    return tuning


def _not_tuned(name: str, key: str) -> str:
    return f"not chosen yet: run fedexp-tune {name} {key}"


def table_names() -> dict[str, Path]:
    """Return the names ``<paper>/<table>`` of all tables, with their files.

    The files are built into fedexp or are in ``./conf/table``. If both folders have a
    table of the same name, the file in ``./conf/table`` is used.
    """
    found = {}
    for folder in (conf_dir(), user_conf_dir()):
        for path in sorted((folder / "table").rglob("*.yaml")) if folder is not None else ():
            # Files with an underscore are shared by a paper's tables.
            if not path.name.startswith("_"):
                found[path.relative_to(folder / "table").with_suffix("").as_posix()] = path  # type: ignore[operator]
    return found


def load_table(name: str, *, tuned: bool = True) -> Table:
    """Load a table by its name.

    Args:
        name: Name of the table.
        tuned: Whether the values of tuning files are applied.

    Raises:
        ConfigError: There is no such table (the message has the nearest name), or its
            file is wrong.
    """
    known = table_names()
    if name not in known:
        with_end = (full for full in known if full.rpartition("/")[2] == name)
        near = next(with_end, nearest(name, known))
        raise ConfigError(
            f"unknown table '{name}'",
            expected=", ".join(known) or "a file in conf/table",
            do=f"did you mean '{near}'?" if near else "fedexp-table list prints all tables",
        )
    return read_table(known[name], name, tuned=tuned)


def read_table(path: Path, name: str, *, tuned: bool = True) -> Table:
    """Read and check the table in the file `path`."""
    node = read_yaml_mapping(path, "a table's file")
    try:
        table = build(Table, {**node, "name": name}, "")
        check_table(table)
        if tuned:
            table = with_equal_tuning(with_tuned(table))
            check_table(table)
        styles = read_plot_styles(path.parent) or read_method_styles()
        return replace(table, plot_styles=styles)
    except ValueError as error:
        raise ConfigError(str(error), where=f"{path}") from error
    except ConfigError as error:
        inside = error.facts.get("where")
        error.facts["where"] = f"{path}" + (f", {inside}" if inside and inside != "config" else "")
        raise
