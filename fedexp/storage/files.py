"""Atomic replacement of files, and reading and checking of their contents.

If the process dies at any time, a file is either the old or the new version.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Literal

from fedexp.core.errors import StorageError

_OPEN_FILES = ("/dev/stdout", "/dev/stderr")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file that replaces `path` after the `with` block.

    The block writes the temporary file, which is next to `path`. At the end of the
    block, the file is flushed to disk and renamed to `path`. After an error, the
    temporary file is deleted. If `path` is a link, the file that it points to is
    replaced. A device or a pipe, such as ``/dev/stdout``, is not replaced: the path
    itself is yielded.
    """
    is_special = path.exists() and not path.is_file() and not path.is_dir()
    # The output of this process may be redirected to a file, which must not be replaced
    if is_special or str(path) in _OPEN_FILES or str(path.parent) in ("/dev/fd", "/proc/self/fd"):
        yield path
        return
    if path.is_symlink():
        path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    part = temporary_path(path, "part")
    try:
        yield part
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def temporary_path(path: Path, kind: Literal["part", "deleted"]) -> Path:
    """Return the path of a temporary file or folder next to `path`.

    The temporary file contains data that are not complete yet or are being deleted.
    Only this process creates and removes it. Its name contains the host name and the
    process ID.
    """
    return path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.{kind}")


def stale_files(folder: Path, ours: bool = False) -> Iterator[Path]:
    """Yield the temporary files and folders that killed processes left in `folder`.

    A file is yielded if its process ran on this machine and is dead, and if the file is
    at least an hour old. The age is checked because a container may have the host name
    of this machine. A process in the container may be alive although its ID is unknown
    here. No process needs a temporary file for an hour.

    Args:
        folder: Folder to search.
        ours: Whether the folder belongs to this process only. If so, its subfolders are
            searched too, and all temporary files found are stale.
    """
    for path in folder.rglob(".*") if ours else folder.glob(".*"):
        if (found := _TEMPORARY.fullmatch(path.name)) and (
            ours or _is_stale(path, found[1], int(found[2]))
        ):
            yield path


def delete_path(path: Path) -> None:
    """Delete a file or a folder. Errors are ignored, because it may be gone already."""
    with contextlib.suppress(OSError):
        path.unlink()
    shutil.rmtree(path, ignore_errors=True)


_TEMPORARY = re.compile(r"\.(.+)\.(\d+)\.(?:part|deleted)")
_STALE_SECONDS = 3600


def _is_stale(path: Path, name: str, pid: int) -> bool:
    try:
        age = time.time() - path.lstat().st_mtime
    except OSError:
        return False
    is_ours = name.endswith(f".{socket.gethostname()}")
    return is_ours and age >= _STALE_SECONDS and not is_alive(pid)


def is_alive(pid: int) -> bool:
    """Return whether this machine has a process with this ID."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


def write_bytes(path: Path, data: bytes) -> None:
    """Write `data` to `path` through a temporary file.

    The temporary file is next to `path`. It is flushed to disk and renamed.
    """
    with replacing(path) as part:
        part.write_bytes(data)


def write_text(path: Path, text: str) -> None:
    """Write text in UTF-8, as `write_bytes` does."""
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any, seal: bool = False) -> None:
    """Write `value` as JSON.

    Args:
        path: File to write.
        value: JSON value.
        seal: Whether a digest is stored with `value`, so that `read_json` detects
            changes. `value` must then be a JSON object.
    """
    sealed = {**value, _SEAL: _digest(value)} if seal else value
    write_text(path, json.dumps(sealed, indent=2) + "\n")


def read_json(path: Path) -> Any:
    """Return the value in `path`, or None if there is no such file.

    Raises:
        StorageError: The file is damaged.
    """
    if path.is_fifo():  # opening it would wait for a writer
        raise damaged(path, "it is a named pipe")
    try:
        value = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, RecursionError) as error:  # includes UnicodeDecodeError
        raise damaged(path, f"it is not JSON: {error}") from error
    if isinstance(value, dict) and _SEAL in value and value.pop(_SEAL) != _digest(value):
        raise damaged(path, "the content is not the one that was written")
    return value


def parse_yaml(text: str) -> Any:
    """Return the value that a YAML text describes.

    Raises:
        yaml.YAMLError: The text is not YAML, or is nested too deeply.
    """
    import yaml

    # libyaml, if PyYAML was built with it, takes a tenth of the time.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    if sum(map(text.count, ("[", "{", "- ", "? "))) > _DEEPEST:
        # The depth is checked here, because libyaml recurses without a limit when it
        # builds values.
        depth = 0
        for event in yaml.parse(text, loader):
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > _DEEPEST:
                raise yaml.YAMLError(f"more than {_DEEPEST} values are nested")
    try:
        return yaml.load(text, loader)
    except RecursionError as error:
        raise yaml.YAMLError("too many values are nested") from error


_DEEPEST = 500  # maximum depth of nested lists and mappings in a YAML file
_SEAL = "seal"


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:40]


def damaged(
    path: Path,
    how: str | None = None,
    do: str = "restore the file, or restart the run with reuse=false",
) -> StorageError:
    """Return the error for a file that does not contain what was written.

    Args:
        path: The damaged file.
        how: What was found, for the message.
        do: Next step for the message. The default suggests ``reuse=false``, which moves
            all files of a run aside except the lock and ``identity.json``.
    """
    return StorageError(
        f"{path.name} is damaged",
        where=str(path),
        got=how,
        do=do,
    )


_REFUSALS = {
    errno.ENOSPC: "free some space, or write to another disk",
    errno.EDQUOT: "free some space, or write to another disk",
    errno.EFBIG: "raise the limit of file sizes (ulimit -f)",
    errno.EPERM: "make it readable and writable, or use another place",
    errno.EACCES: "make it readable and writable, or use another place",
    errno.EROFS: "make it readable and writable, or use another place",
    errno.ENAMETOOLONG: "use a shorter path",
    errno.EISDIR: "use the path of a file, in a folder",
    errno.EEXIST: "use the path of a file, in a folder",
    errno.ENOTDIR: "use the path of a file, in a folder",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "raise the system's limit of open files",
}


def refused(error: BaseException, where: Path | None = None) -> StorageError | None:
    """Return the error to report if the system refused an operation.

    Reasons are a full disk, a limit of file sizes, missing permission, too many open
    files and a path that is too long. For any other `error` the result is None.
    """
    if not isinstance(error, OSError) or error.errno not in _REFUSALS:
        return None
    return StorageError(
        f"the work cannot go on: {os.strerror(error.errno)}",
        where=str(error.filename or where) if error.filename or where else None,
        do=f"{_REFUSALS[error.errno]}, then run the same command again",
    )


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a JSON-lines file.

    An incomplete last line, which a crash may leave, is left out.

    Raises:
        StorageError: Another line is damaged.
    """
    if not path.exists():
        return []
    try:
        return [json.loads(line) for line in path.read_text().split("\n")[:-1] if line]
    except (ValueError, RecursionError) as error:
        raise damaged(path, str(error)) from error


def file_sha256(file: Path) -> str:
    """Return the hex digest of a file's bytes.

    The file is read again only after it has changed.
    """
    stat = file.stat()
    return _sha256(file.resolve(), stat.st_size, stat.st_mtime_ns)


@cache
def _sha256(file: Path, size: int, mtime: int) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
