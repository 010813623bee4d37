"""The plot styles of a paper's methods: ``conf/table/<paper>/_plot_styles.yaml``.

All tables and figures of a paper use the same styles.
"""

from __future__ import annotations

from pathlib import Path

import yaml

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
    if not path.is_file():
        return {}

    try:
        plot_styles: dict[str, PlotStyle] = convert(read_yaml(path), dict[str, PlotStyle], "")
    except yaml.YAMLError as error:
        raise ConfigError(
            "a paper's plot styles are not YAML", where=" ".join(str(error).split())
        ) from None
    except ConfigError as error:
        error.facts["where"] = f"{path} {error.facts.get('where', '')}".strip()
        raise

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
