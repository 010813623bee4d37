"""The cache of decoded arrays.

If the arrays of a data set are in the cache, a run imports no decoder (such as Pillow
or torchvision) and opens only one file.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from fedexp.storage.files import delete_path, replacing, stale_files

FOLDER = ".fedexp"

# Fingerprints of the entries that this process decoded or looked up
_fingerprints: dict[Path, str] = {}
# A stack with one dictionary per open `sources_stay` block. A dictionary maps a data
# source (root, name, recipe and files) to its cache file
_entries: list[dict[tuple[str, ...], Path]] = []


@contextlib.contextmanager
def sources_stay() -> Iterator[None]:
    """Make `ArrayCache.known` look at each source file only once in a ``with`` block.

    This saves time, because there may be a hundred thousand files. The files must not
    change within the block.
    """
    _entries.append({})

    try:
        yield
    finally:
        _entries.pop()


class ArrayCache:
    """A cache of one data set's decoded arrays.

    An entry is the file ``<root>/.fedexp/<name>-<key>.safetensors``. The key is a hash
    of `recipe` and of the source files' names, sizes and modification times. The entry
    also contains the fingerprint of the arrays (their sha256). If the root cannot be
    written, nothing is cached and one warning is given. A damaged entry is decoded
    again.

    Args:
        root: Data root.
        name: Name of the data set.
        recipe: All settings that, besides the source files, determine the arrays'
            content.
    """

    def __init__(self, root: Path, name: str, recipe: tuple[str, ...]) -> None:
        self.root = root
        self.folder = root / FOLDER
        self.name = name
        self.recipe = recipe

    def path(self, files: list[Path]) -> Path:
        """Return the path of the cache entry for the current state of `files`."""
        digest = hashlib.sha256("\n".join(self.recipe).encode())
        for name, size, mtime in _listing(files, self.root):
            digest.update(f"\n{name}\0{size}\0{mtime}".encode())
        return self.folder / f"{self.name}-{digest.hexdigest()[:16]}.safetensors"

    def load(self, files: list[Path]) -> tuple[dict[str, Tensor], str] | None:
        """Return the stored tensors and their fingerprint, or None.

        None means that there is no readable entry. This method does not check the
        fingerprint against the tensors.
        """
        return self._read(files, lambda file: {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118

    def known(self, files: list[Path]) -> str | None:
        """Return the stored fingerprint of the arrays, without reading the arrays.

        Returns:
            The fingerprint for the current state of the files, or None if there is no
            entry.
        """
        sources = (str(self.root), self.name, *self.recipe, *map(str, files))
        entries = _entries[-1] if _entries else {}
        if (path := entries.get(sources)) is None:
            if not all(file.exists() for file in files):
                return None
            path = entries[sources] = self.path(files)

        if path not in _fingerprints and (found := self._read(files, lambda file: {})):
            _fingerprints[path] = found[1]
        return _fingerprints.get(path)

    def _read(
        self, files: list[Path], take: Callable[[Any], dict[str, Tensor]]
    ) -> tuple[dict[str, Tensor], str] | None:
        if not self.folder.is_dir() or not all(file.exists() for file in files):
            return None

        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.path(files), framework="pt") as file:
                return take(file), file.metadata()["sha256"]
        # There is no entry, or it is damaged. The next `store` replaces a damaged one
        except (SafetensorError, OSError, TypeError, KeyError):
            return None

    def store(self, files: list[Path], tensors: dict[str, Tensor], fingerprint: str) -> None:
        """Write the entry completely or not at all."""
        from safetensors.torch import save_file

        path = self.path(files)
        _fingerprints[path] = fingerprint
        for left in stale_files(self.folder):
            delete_path(left)
        try:
            with replacing(path) as part:
                save_file(
                    {name: t.contiguous() for name, t in tensors.items()},
                    part,
                    metadata={"sha256": fingerprint},
                )
                part.chmod(0o644)  # data roots are shared
        except OSError as error:
            warnings.warn(
                f"the decoded arrays of '{self.name}' cannot be stored in {self.folder} "
                f"({error.strerror or error}), so they are decoded again at every start",
                stacklevel=3,
            )

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold a lock, so that only one process downloads and decodes at a time.

        The operating system frees the lock if the process dies.
        """
        from filelock import FileLock

        lock = FileLock(self.folder / f"{self.name}.lock")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock.acquire()
        except OSError:  # not writable, so no process can store an entry
            yield
            return
        try:
            yield
        finally:
            lock.release()


def _listing(files: list[Path], root: Path) -> list[tuple[str, int, int]]:
    """Return (name, size, mtime) of every file in or under `files`, sorted by name."""
    found: list[tuple[str, int, int]] = []

    def add(entry: Path | os.DirEntry[str], name: str) -> None:
        if entry.is_dir():
            with os.scandir(entry) as inside:
                for child in inside:
                    add(child, f"{name}/{child.name}")
        else:
            stat = entry.stat()
            found.append((name, stat.st_size, stat.st_mtime_ns))

    for file in files:
        inside_root = file.is_relative_to(root)
        add(file, file.relative_to(root).as_posix() if inside_root else file.as_posix())
    return sorted(found)
