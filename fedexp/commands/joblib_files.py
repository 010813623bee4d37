"""Removal of the files that joblib leaves in /dev/shm if a whole sweep is killed."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from fedexp.storage.files import delete_path, is_alive

SHARED_MEMORY = Path("/dev/shm")


@contextlib.contextmanager
def mark_joblib_files() -> Iterator[None]:
    """Delete the files that joblib left for killed sweeps, and mark this sweep.

    joblib names its files by the ID of the process. Other programs that use joblib
    leave such files, too. The names therefore do not show which files belong to fedexp.
    For this reason, each sweep writes a mark: a file in the folder for temporary files
    that is named by the process ID. Files of processes without a mark are never
    deleted. The mark of this sweep is deleted at the end of the `with` block.
    """
    folder = Path(tempfile.gettempdir()) / f"fedexp-{os.getuid()}"
    mark: Path | None = None
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        # Another user may have made a folder of this name.
        if folder.is_dir() and _is_own(folder):
            mark = folder / str(os.getpid())
            mark.write_text(_namespace())
    if mark is not None:
        with contextlib.suppress(OSError):
            _delete_files_of_dead(folder)

    try:
        yield
    finally:
        if mark is not None:
            with contextlib.suppress(OSError):
                mark.unlink()


def _delete_files_of_dead(folder: Path) -> None:
    """Delete joblib's files of the marked processes that have ended.

    Marks of another container are ignored, because this process cannot see whether the
    container's processes are alive.
    """
    for mark in folder.iterdir():
        if not (mark.name.isdecimal() and _is_own(mark) and mark.read_text() == _namespace()):
            continue
        if is_alive(int(mark.name)):
            continue

        names = re.compile(rf"joblib_memmapping_folder_{mark.name}_\w+|sem\.loky-{mark.name}-\w+")
        for path in SHARED_MEMORY.iterdir():
            if names.fullmatch(path.name) and _is_own(path):
                delete_path(path)
        mark.unlink(missing_ok=True)


def _namespace() -> str:
    """Return the name of the Linux namespace of process IDs that this process is in."""
    return str(Path("/proc/self/ns/pid").readlink())


def _is_own(path: Path) -> bool:
    return path.lstat().st_uid == os.getuid()
