"""Storage of client states for checkpoints, and for states that memory cannot hold.

States are stored in segments. A segment is a file with the states of many clients. It
is never changed after it has been written.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from fedexp.core.client_states import ClientStates
from fedexp.core.errors import StorageError
from fedexp.core.trees import Tree, Trees, checksum, joined, num_bytes
from fedexp.storage.tensors import opened, read_facts, read_tensor, save_tree

# Maximum number of states per segment. A larger number means fewer files. A smaller
# number means shorter file headers. The header is read with every state.
_MOST = 128
_MOST_BYTES = 16e6  # maximum bytes per segment, which is composed in memory
_SLACK = 1024  # see `_clean_up`


class StoredClientStates(ClientStates):
    """Client states that are in memory up to a limit, and otherwise on disk.

    The states that changed last are in memory. All other states are in segments. A
    segment is a safetensors file with several states. Segments are numbered in the
    order of writing. If several segments contain a state of the same client, the
    segment with the highest number contains the current state. The client's states in
    the other segments are superseded.

    A segment is deleted when all its states are superseded. If the last checkpoint
    refers to the segment, it is deleted only after the next checkpoint. When there are
    many superseded states, segments with few current states are replaced (`_clean_up`).

    Args:
        folder: Folder of the segments.
        device: Device on which states that are read from disk are put.
        limit: Maximum bytes of states in memory, on the device where training left
            them. If they exceed the limit, the states that changed longest ago move to
            disk.
    """

    def __init__(self, folder: Path, device: torch.device, limit: float) -> None:
        self.folder, self._device, self._limit = folder, device, limit
        last = max(self._on_disk(), default=0)
        self._reset(last + 1, last)
        self._obsolete.extend(self._on_disk())

    def _reset(self, first: int, last: int) -> None:
        """Forget all states. The next segment has the number after `last`.

        Args:
            first: Number of the first segment that the next `flush` covers.
            last: Number of the last segment that exists.
        """
        # The state that has been unchanged for longest is first.
        self._held: dict[int, Trees] = {}  # states in memory, by client
        self.bytes = 0  # bytes of the states in memory
        self._unsaved: dict[int, None] = {}  # clients in memory whose states are not on disk

        self._place: dict[int, int] = {}  # number of the segment with each client's state
        self._live: dict[int, int] = {}  # number of current states, by segment
        self._dead = 0  # number of superseded states on disk
        self._written: dict[int, int] = {}  # number of all states, by segment
        self._digests: dict[int, str] = {}  # digest of each segment's facts

        self._obsolete: list[int] = []  # segments only the last checkpoint refers to
        self._first, self._next = first, last + 1
        # Segments up to this number may belong to the last checkpoint.
        self._durable = last
        # Segments up to this number were not written by this object.
        self._inherited = last
        # Verified states of these inherited segments, as pairs (segment, client).
        self._verified: set[tuple[int, int]] = set()

    def put(self, client: int, state: Trees) -> None:
        old = self._held.get(client)
        if old is state:
            return
        # If this method is interrupted below, a segment without current states may stay
        # on disk. A segment with current states is never deleted.
        self._unsaved[client] = None
        self._held.pop(client, None)
        self._held[client] = state
        self.bytes += _size(state) - (0 if old is None else _size(old))
        self._supersede(client)

    def spill(self) -> None:
        """Move states to disk until the states in memory do not exceed the limit."""
        leaving: list[int] = []
        excess = self.bytes - self._limit
        for client, state in self._held.items():
            if excess <= 0:
                break
            leaving.append(client)
            excess -= _size(state)

        self._save([client for client in leaving if client in self._unsaved])
        for client in leaving:
            self.bytes -= _size(self._held.pop(client))
        self._clean_up()

    def flush(self) -> dict[str, Any]:
        """Write the states that are not on disk.

        The caller stores the returned values and then calls `delete_obsolete`.

        Returns:
            The values that `restore` needs.
        """
        self._save(list(self._unsaved))
        self._durable = self._next - 1
        # With the stored digests, `restore` detects a segment that is missing or was
        # replaced. Otherwise it could restore earlier states of clients.
        segments = [[number, self._digests[number]] for number in sorted(self._live)]
        return {
            "first": self._first,
            "last": self._next - 1,
            "clients": len(self),
            "segments": segments,
        }

    def delete_obsolete(self) -> None:
        """Delete the segments that only the previous checkpoint referred to.

        Call it after a checkpoint with all present states has been written.
        """
        while self._obsolete:
            self._path(self._obsolete.pop()).unlink(missing_ok=True)

    def restore(self, range_: dict[str, Any] | None) -> None:
        """Restore the states at the time of the `flush` that returned `range_`.

        Files written since that `flush` are deleted.

        Args:
            range_: The values that `flush` returned, or None for no states.

        Raises:
            StorageError: A file is missing or damaged, or was exchanged. The message
                names it.
        """
        first, last = (range_["first"], range_["last"]) if range_ else (1, 0)
        # Checkpoints of earlier versions do not list their segments.
        listed = dict(range_["segments"]) if range_ and "segments" in range_ else None

        for number, path in self._on_disk().items():
            if not first <= number <= last or (listed is not None and number not in listed):
                path.unlink()
        for part in self.folder.glob(".*.part"):
            part.unlink()

        self._reset(first, last)
        for number in sorted(self._on_disk() if listed is None else listed):
            with self._open(number) as (_, facts):
                clients = [int(client) for client in facts["layout"]]
                self._digests[number] = _digest(facts["layout"], facts["checksums"])
                if listed is not None and self._digests[number] != listed[number]:
                    raise ValueError("the segment is not the one that was written")
            self._enter(number, clients)
        if range_ and len(self._place) != range_["clients"]:
            raise _unusable(self.folder)

    def close(self) -> None:
        """Delete the segments that no checkpoint refers to."""
        for number, path in self._on_disk().items():
            if number > self._durable:
                path.unlink(missing_ok=True)

    def __getitem__(self, client: int) -> Trees:
        if client in self._held:
            return self._held[client]
        return self._read(self._place[client], [client])[client]

    def __iter__(self) -> Iterator[int]:
        return iter({**self._place, **self._unsaved})

    def __len__(self) -> int:
        return len({**self._place, **self._unsaved})

    def __contains__(self, client: object) -> bool:
        return client in self._unsaved or client in self._place

    def _save(self, clients: list[int]) -> None:
        for part in _batches((client, self._held[client]) for client in clients):
            self._write(part)
            for client in part:
                self._unsaved.pop(client, None)

    def _write(self, states: dict[int, Trees]) -> None:
        number = self._next
        tree: Tree = {}
        layout: dict[str, dict[str, list[str]]] = {}
        checksums: dict[str, int] = {}

        for client, state in states.items():
            layout[str(client)] = {group: list(inner) for group, inner in state.items()}
            own = {name: value.cpu() for name, value in joined(state).items()}
            checksums[str(client)] = checksum(own)
            tree |= joined({str(client): own})
        save_tree(self._path(number), tree, {"layout": layout, "checksums": checksums})
        self._digests[number] = _digest(layout, checksums)
        self._next = number + 1
        self._enter(number, list(states))

    def _enter(self, number: int, clients: list[int]) -> None:
        self._written[number] = self._live[number] = len(clients)
        for client in clients:
            # If the loop is interrupted, every client must still have a place, because
            # the run then saves its last checkpoint.
            old = self._place.get(client)
            self._place[client] = number
            self._count_superseded(old)

    def _supersede(self, client: int) -> None:
        """Mark the state of `client` on disk, if there is one, as superseded."""
        self._count_superseded(self._place.pop(client, None))

    def _count_superseded(self, number: int | None) -> None:
        """Count a superseded state in segment `number`, if it is not None."""
        if number is None:
            return
        self._dead += 1
        self._live[number] -= 1
        if not self._live[number]:
            self._drop(number)

    def _drop(self, number: int) -> None:
        # `_clean_up` expects a size in `_written` for every segment in `_live`.
        del self._live[number]
        self._dead -= self._written.pop(number)
        self._digests.pop(number, None)
        if number <= self._durable:
            self._obsolete.append(number)
        else:
            self._path(number).unlink(missing_ok=True)

    def _clean_up(self) -> None:
        """Write current states to new segments, so that old segments can be deleted.

        This is done if there are more than ``n + _SLACK`` superseded states on disk,
        where n is the number of current states on disk. Segments are replaced if at
        least half of their states are superseded.
        """
        if self._dead <= len(self._place) + _SLACK:
            return
        emptiest = [
            number for number, live in self._live.items() if 2 * live <= self._written[number]
        ]
        for part in _batches(item for number in emptiest for item in self._in_use(number)):
            self._write(part)

    def _in_use(self, number: int) -> Iterator[tuple[int, Trees]]:
        with self._open(number) as (_, facts):
            clients = [int(c) for c in facts["layout"] if self._place.get(int(c)) == number]
        yield from self._read(number, clients).items()

    def _read(self, number: int, clients: Iterable[int]) -> dict[int, Trees]:
        """Return the states of `clients` that segment `number` contains.

        States that another process wrote are verified when they are first read.
        """
        states: dict[int, Trees] = {}
        with self._open(number) as (file, facts):
            for client in clients:
                states[client] = state = {
                    group: {name: read_tensor(file, f"{client}/{group}/{name}") for name in names}
                    for group, names in facts["layout"][str(client)].items()
                }
                if number <= self._inherited and (number, client) not in self._verified:
                    if checksum(joined(state)) != facts["checksums"][str(client)]:
                        raise ValueError(f"client {client}'s state is not the one that was written")
                    self._verified.add((number, client))
        return states

    @contextlib.contextmanager
    def _open(self, number: int) -> Iterator[tuple[Any, dict[str, Any]]]:
        """Open the file of a segment and read its facts.

        The facts are JSON values that are stored with the tensors. For each client,
        they contain the tensor names of each group and the checksum of the state.
        """
        path = self._path(number)
        try:
            with opened(path, self._device) as file:
                yield file, read_facts(file)
        except (FileNotFoundError, StorageError, KeyError, TypeError, ValueError) as error:
            raise _unusable(path) from error

    def _on_disk(self) -> dict[int, Path]:
        return {
            int(path.stem): path
            for path in self.folder.glob("*.safetensors")
            if path.stem.isdecimal()
        }

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:08d}.safetensors"


def _batches(states: Iterable[tuple[int, Trees]]) -> Iterator[dict[int, Trees]]:
    """Group states into parts, each of which becomes one segment."""
    part: dict[int, Trees] = {}
    size = 0
    for client, state in states:
        part[client] = state
        size += _size(state)
        if len(part) == _MOST or size >= _MOST_BYTES:
            yield part
            part, size = {}, 0
    if part:
        yield part


def _size(state: Trees) -> int:
    return sum(map(num_bytes, state.values()))


def _digest(layout: dict[str, Any], checksums: dict[str, int]) -> str:
    """Return a digest of a segment's states, from their tensor names and checksums."""
    return hashlib.sha256(json.dumps([layout, checksums]).encode()).hexdigest()[:40]


def _unusable(path: Path) -> StorageError:
    return StorageError(
        "the stored states of clients are missing or damaged",
        where=str(path),
        do="restart the run with reuse=false",
    )
