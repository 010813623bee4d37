"""Storage of the user code that a run used.

The user's modules that are part of the run's code hash are stored. Each version of a
module is stored once, in a file that is named by the module's hash. The Git commits
that contain the modules are recorded, too.
"""

from __future__ import annotations

import difflib
import hashlib
import subprocess
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from fedexp.storage.files import write_bytes, write_json
from fedexp.storage.identity import own_modules
from fedexp.storage.stored_run import SOURCES, own_code

_FOLDER = "sources"  # folder under output_root


def store_sources(config: Mapping[str, Any], folder: Path) -> None:
    """Write ``sources.json`` of a run and the sources that it names.

    The sources are stored in ``<output_root>/sources``. Nothing is written if the run
    uses no user code. In ``sources.json``, ``modules`` maps each module to its file and
    sha256, and ``commits`` maps each folder to its Git commit. If files of the run
    differ from the commit or are not in it, a ``+`` is appended to the commit. Outside
    of Git, the commit is None.

    Args:
        config: Resolved config.
        folder: Folder of the run.
    """
    own = own_modules(config)
    if not own:
        return
    modules, files = {}, {}  # type: dict[str, dict[str, str]], dict[Path, list[Path]]
    for name, source in sorted(own.items()):
        content = (source.text or "").encode()
        sha256 = hashlib.sha256(content).hexdigest()
        if not (path := _path(folder, sha256)).exists():
            write_bytes(path, content)
        modules[name] = {"file": str(source.file), "sha256": sha256}
        files.setdefault(source.file.parent, []).append(source.file)

    commits = {str(home): commit(home, tuple(inside)) for home, inside in sorted(files.items())}
    write_json(folder / SOURCES, {"modules": modules, "commits": commits})


def _path(folder: Path, sha256: str) -> Path:
    """Return the path of a stored source of the run in `folder`."""
    return folder.parents[2] / _FOLDER / f"{sha256}.py"


# Every job of a sweep calls this function. The sources themselves are cached too, in
# `fedexp.storage.identity`.
@cache
def commit(folder: Path, files: tuple[Path, ...]) -> str | None:
    """Return the Git commit of the checkout around `folder`, or None outside of Git.

    If `files` have changes or are not in the commit, a ``+`` is appended to the commit.
    """
    described = git(folder, "describe", "--always", "--exclude=*")
    if not described:
        return None
    changes = git(folder, "status", "--porcelain", "--ignored", "--", *map(str, files))
    return described if changes == "" else f"{described}+"


def git(folder: Path, *arguments: str) -> str | None:
    """Return the output of a Git command in `folder`, or None if the command fails."""
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def differences(a: Path, b: Path) -> Iterator[str]:
    """Yield the lines of a unified diff of two runs' user code, module by module."""
    sides = [own_code(folder)[0] for folder in (a, b)]
    for name in sorted({*sides[0], *sides[1]}):
        hashes = [side.get(name) for side in sides]
        if hashes[0] == hashes[1]:
            continue

        texts = [_text(folder, sha256) for folder, sha256 in zip((a, b), hashes, strict=True)]
        if None in texts:
            yield f"{name} differs, and its source is no longer stored"
            continue
        before, after = (str(text).splitlines() for text in texts)
        labels = [f"{name}  {folder.parent.name}/{folder.name}" for folder in (a, b)]
        yield from difflib.unified_diff(before, after, labels[0], labels[1], lineterm="")


def _text(folder: Path, sha256: str | None) -> str | None:
    """Return the stored source with the digest `sha256`, or None if it is gone.

    If `sha256` is None, the run did not have the module, and the source is empty.
    """
    if sha256 is None:
        return ""
    try:
        return _path(folder, sha256).read_text()
    except OSError:
        return None
