"""Coefficients of methods, each chosen once, on held-out data of one cell: ``conf/tuned/<name>.yaml``, by ``scripts/tune.py``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedexp.config.folders import conf_dir, user_conf_dir
from fedexp.config.yaml_files import read_yaml
from fedexp.core.build import build, require
from fedexp.core.errors import ConfigError, suggest


@dataclass(frozen=True)
class Sweep:
    """What is swept of a method: a key of the config and its values."""

    over: str
    points: tuple[int | float, ...]

    def __post_init__(self) -> None:
        require(
            len(set(self.points)) == len(self.points) > 1, "points: give two or more, each once"
        )


@dataclass(frozen=True)
class Swept:
    """The number at every point of a sweep, none where its run failed (it diverged), and the point that was chosen."""

    values: tuple[float | None, ...]
    chosen: int | float


@dataclass(frozen=True)
class Tuning:
    """How the coefficients of a paper's methods are chosen, and which have been.

    Args:
        table: whose reduced form the cell is of; cell: a value for each of its conditions.
        overrides: what holds samples out; seed: of the runs, none of the table's.
        by: what chooses, a path in result.json; the highest counts, of equal ones the first point's.
        where: rows of a table that have the second columns.
        sweeps: by column; results: by column, written by ``scripts/tune.py``.
    """

    table: str
    cell: dict[str, Any]
    overrides: tuple[str, ...]
    seed: int
    by: str
    where: dict[str, Any]
    sweeps: dict[str, Sweep]
    results: dict[str, Swept] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(
            "val/" in self.by, f"by: a number of held-out data has val/ in its path, got {self.by}"
        )
        for method, results in self.results.items():
            sweep = self.sweeps.get(method)
            fitting = (
                sweep is not None
                and results.chosen in sweep.points
                and len(results.values) == len(sweep.points)
            )
            require(fitting, f"results.{method} is of other points: run scripts/tune.py again")

    def setting(self, method: str) -> tuple[str, ...] | None:
        """The overrides that were chosen for a column; None where none were."""
        results = self.results.get(method)
        return None if results is None else (f"{self.sweeps[method].over}={results.chosen}",)


def tuned_files() -> Mapping[str, Path]:
    """By name, built in or in ``./conf/tuned``."""
    folders = [folder / "tuned" for folder in (conf_dir(), user_conf_dir()) if folder is not None]
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.yaml"))}


def load_tuning(name: str) -> Tuning:
    """The tuning called `name`; `ConfigError` where there is none, or with what is wrong in its file."""
    files = tuned_files()
    if name not in files:
        raise ConfigError(f"no file conf/tuned/{name}.yaml", where="tuned", do=suggest(name, files))
    return build(Tuning, read_yaml(files[name]), f"conf/tuned/{name}.yaml")
