"""The styles of methods in pictures, read from files ``_plot_styles.yaml``.

All tables and figures of a paper use the styles in ``conf/table/<paper>``. Tables in
folders without such a file, and pictures of other runs, use those in ``conf/table``.
"""

from __future__ import annotations

from pathlib import Path

import yaml

from fedexp.config.folders import conf_dirs
from fedexp.core.build import convert
from fedexp.core.errors import ConfigError
from fedexp.storage.yaml_files import read_yaml
from fedexp.tables.report.report import PlotStyle

FILE = "_plot_styles.yaml"


def read_plot_styles(folder: Path) -> dict[str, PlotStyle]:
    """Read the plot styles of a paper by column key, empty without the file.

    Raises:
        ConfigError: The file is not a mapping of plot styles, or two methods differ
            only in colour.
    """
    path = folder / FILE
    plot_styles = _parse(path, "a paper's plot styles")

    seen: dict[tuple[str, str], str] = {}
    for key, plot_style in plot_styles.items():
        other = seen.setdefault((plot_style.marker, plot_style.dash), key)
        if other != key:
            raise ConfigError(
                f"'{other}' and '{key}' have the same marker and dash: in grey they look the same",
                where=str(path),
                do="give one of them another marker or dash",
            )

    return plot_styles


def read_method_styles() -> dict[str, PlotStyle]:
    """Read the styles of methods outside papers' tables, by method.

    The user's ``conf/table/_plot_styles.yaml`` adds to the built-in styles.

    Raises:
        ConfigError: A file is not a mapping of plot styles.
    """
    return {
        name: plot_style
        for folder in conf_dirs()
        for name, plot_style in _parse(folder / "table" / FILE, "plot styles").items()
    }


def _parse(path: Path, what: str) -> dict[str, PlotStyle]:
    """Return the plot styles in a file, empty without the file.

    Args:
        path: The file.
        what: Name of its content in error messages, in the plural.

    Raises:
        ConfigError: The file is not a mapping of plot styles.
    """
    if not path.is_file():
        return {}

    try:
        plot_styles: dict[str, PlotStyle] = convert(read_yaml(path), dict[str, PlotStyle], "")
    except yaml.YAMLError as error:
        raise ConfigError(f"{what} are not YAML", where=" ".join(str(error).split())) from None
    except ConfigError as error:
        error.facts["where"] = f"{path} {error.facts.get('where', '')}".strip()
        raise
    return plot_styles
