"""Files that are either the old or the new version, whenever the process dies; and what is in them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from fedexp.core.errors import StorageError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary neighbour to write: in the end flushed to disk and renamed over `path`, after an error deleted."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def write_bytes(path: Path, data: bytes) -> None:
    """Write to a temporary neighbour, flush to disk, rename over `path`."""
    with replacing(path) as part:
        part.write_bytes(data)


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2) + "\n")


def read_json(path: Path) -> Any:
    """The value in `path`, or None where there is no such file; a `StorageError` names one that is damaged."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except ValueError as error:  # of a codec, too
        raise damaged(path, str(error)) from error


def damaged(path: Path, how: str | None = None) -> StorageError:
    """The error for a file that does not hold what was written."""
    return StorageError(
        f"{path.name} is damaged",
        where=str(path),
        got=how,
        do="restore the file, or start the run afresh with reuse=false",
    )


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSON-lines file; a last line that a crash cut short is left out.

    Raises:
        StorageError: another line is damaged.
    """
    if not path.exists():
        return []
    try:
        lines = path.read_text().split("\n")
        return [json.loads(line) for line in lines[:-1] if line]
    except ValueError as error:
        raise damaged(path, str(error)) from error


def file_sha256(file: Path) -> str:
    """Hex digest of a file's bytes; read again only after the file has changed."""
    stat = file.stat()
    return _sha256(file.resolve(), stat.st_size, stat.st_mtime_ns)


@cache
def _sha256(file: Path, size: int, mtime: int) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
