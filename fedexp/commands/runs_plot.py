"""The command ``fedexp-runs plot``: a picture of stored runs.

Curves are means over seeds with 95 % intervals. Panels and series are values of config
keys.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from fedexp.core.errors import ConfigError, suggest
from fedexp.storage.files import write_bytes
from fedexp.storage.stored_run import StoredRun
from fedexp.tracking.terminal import console

_NAMES = ("x", "y", "by", "rows", "cols")
_NEAR = ("row", "col", "column", "columns", "hue", "metric", "value", "values")
SUFFIXES = (".png", ".svg", ".pdf")
# Largest number of characters in the name of a picture's file.
_LONGEST = 120
# Signs of conditions, and the words for them in the name of a picture's file.
_SIGNS = {"!=": "not", "<=": "up-to", ">=": "from", "<": "below", ">": "above"}


def plot(
    runs: Sequence[StoredRun],
    arguments: Sequence[str],
    allowed: Sequence[str],
    root: Path,
    out: Path | None,
) -> int:
    """Draw stored runs and write the picture as PNG, SVG and PDF.

    Args:
        runs: Stored runs, the newest first.
        arguments: ``x=AXIS``, ``y=METRIC``, ``by=KEY[,KEY]``, ``rows=KEY[,KEY]``,
            ``cols=KEY[,KEY]`` and conditions on runs.
        allowed: Keys in which the series may differ.
        root: Output root. By default, the picture is written to its folder ``plots``.
        out: File to write. Without a suffix, all three formats are written.

    Returns:
        The exit code.

    Raises:
        ConfigError: The arguments are invalid, or the runs differ in more than the
            picture shows.
    """
    given, conditions = _parse_arguments(arguments)
    if out is not None and out.suffix not in ("", *SUFFIXES):
        raise ConfigError(
            f"a picture cannot be written as '{out.suffix}'",
            where="--out",
            expected=f"a file that ends in {', '.join(SUFFIXES)}, or a name without ending",
            got=str(out),
        )

    # matplotlib and scipy take a second to import.
    from fedexp.analysis.figure import draw
    from fedexp.analysis.series import PlotSpec, plot_data

    parts = {
        name: tuple(text.split(",")) if name in ("by", "rows", "cols") else text
        for name, text in given.items()
    }
    spec = PlotSpec(allowed=tuple(allowed), **parts)  # type: ignore[arg-type]
    data = plot_data(runs, spec, conditions)
    title = " ".join(
        [
            f"{data.metric} over {spec.x} by {','.join(spec.by)}",
            *(f"{name}={given[name]}" for name in ("rows", "cols") if name in given),
            *conditions,
        ]
    )
    contents = draw(data, title)

    path = out or root / "plots" / _file_name(title)
    formats = [path.suffix] if path.suffix in SUFFIXES and out else SUFFIXES
    stem = path.with_suffix("") if path.suffix in SUFFIXES and out else path
    stem.parent.mkdir(parents=True, exist_ok=True)
    for suffix in formats:
        write_bytes(stem.with_name(stem.name + suffix), contents[suffix])

    printer = console()
    for note in data.notes:
        printer.print(note, markup=False, soft_wrap=True)
    printer.print(
        f"{data.num_runs} runs, seeds {', '.join(data.seeds)}", markup=False, soft_wrap=True
    )
    others = "".join(f", {suffix}" for suffix in formats[1:])
    printer.print(f"picture: {stem}{formats[0]}{others}", markup=False, soft_wrap=True)
    return 0


def _file_name(title: str) -> str:
    """Return a file name for a title.

    Titles that differ in the signs of `_SIGNS`, or after their first characters, have
    different names.
    """
    from fedexp.tables.report.canvas import picture_name

    words = title
    for sign, word in _SIGNS.items():
        words = words.replace(sign, f"-{word}-")
    name = picture_name("", words)
    if len(name) > _LONGEST:
        digest = hashlib.blake2b(title.encode(), digest_size=4).hexdigest()
        name = f"{name[: _LONGEST - 9]}-{digest}"
    return name


def _parse_arguments(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    given: dict[str, str] = {}
    conditions = []
    for argument in arguments:
        name, sign, text = argument.partition("=")
        if name in _NAMES and sign:
            if not text or "" in text.split(","):
                raise ConfigError(
                    f"'{name}' has no value", got=argument, do=f"{name}=KEY, e.g. x=round by=method"
                )
            given[name] = text
        elif name in _NEAR:
            raise ConfigError(f"'{name}' is not part of a picture", do=suggest(name, _NAMES))
        else:
            conditions.append(argument)
    return given, conditions
