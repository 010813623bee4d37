"""``fedexp-runs check-conf``: list the uses of paths and config keys of version 0.1."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from fedexp.commands.errors import JOB_ERROR
from fedexp.config.old_names import in_python, in_yaml
from fedexp.core.errors import ConfigError
from fedexp.core.renames import Finding

_SKIPPED = {"__pycache__", "build", "dist", "node_modules", "outputs", "site-packages"}


def check_conf(paths: Sequence[Path]) -> int:
    """Print all lines that use a dotted path, import or config key of version 0.1.

    Args:
        paths: Files, and folders of configs. For a folder, the Python files below its
            parent folder are read, too.

    Returns:
        The exit code: 1 if there is such a line, and 0 otherwise.

    Raises:
        ConfigError: One of the paths does not exist.
    """
    for path in paths:
        if not path.exists():
            raise ConfigError(
                f"there is no '{path}'",
                where="check-conf",
                expected="a YAML or Python file, or a folder of configs",
                do="give its path: fedexp-runs check-conf PATH",
            )
    files = [*dict.fromkeys(file for path in paths for file in _files(path))]
    found = {file: sorted({*_findings(file, paths)}) for file in files}
    for file, findings in found.items():
        for line, old, new in findings:
            print(f"{file}:{line}: {old} -> {new}")

    count = sum(map(len, found.values()))
    if count:
        changed = sum(map(bool, found.values()))
        print(f"{count} names to change in {changed} of {len(files)} files")
    else:
        print(f"{len(files)} files: every path and config key is current")
    return JOB_ERROR if count else 0


def _findings(file: Path, paths: Sequence[Path]) -> Iterator[Finding]:
    """Find the lines that use an old name in `file`, which is in one of `paths`."""
    if file.suffix == ".py":
        return in_python(file)
    home = next((path for path in paths if path.is_dir() and file.is_relative_to(path)), None)
    return in_yaml(file, home)


def _files(path: Path) -> Iterator[Path]:
    """Yield the files to check for one path of the command line.

    If the path is a file, only this file is checked. If it is a folder, the YAML and
    Python files below it are checked, and then the Python files below its parent
    folder.
    """
    if path.is_file():
        yield path
        return
    yield from _walk(path, (".yaml", ".yml", ".py"))
    yield from _walk(path / os.pardir if path.name in ("", os.pardir) else path.parent, (".py",))


def _walk(folder: Path, endings: Iterable[str]) -> Iterator[Path]:
    """Yield the files with one of `endings` below a folder.

    Hidden folders, virtual environments, build folders and folders with stored runs are
    left out.
    """
    for home, inside, names in os.walk(folder):
        inside[:] = sorted(
            name
            for name in inside
            if not name.startswith(".") and name not in _SKIPPED and not _is_made(Path(home) / name)
        )
        yield from (Path(home) / name for name in sorted(names) if Path(name).suffix in endings)


def _is_made(folder: Path) -> bool:
    """Return whether a folder is a virtual environment or an ``output_root``.

    The user should not change files in such a folder, so they are not checked.
    """
    return (folder / "pyvenv.cfg").exists() or (folder / "runs").is_dir()
