"""Client states in segments: files of many states each, written once, for checkpoints and for what memory cannot hold."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import safetensors
import torch

from fedexp.core.client_states import ClientStates
from fedexp.core.errors import StorageError
from fedexp.core.trees import Tree, Trees, checksum, joined, num_bytes
from fedexp.storage.tensors import read_facts, save_tree

_MOST = 128  # states a segment: few files and flushes, yet short headers to read one state
_MOST_BYTES = 16e6  # of a segment: it is composed in memory
_SLACK = 1024  # superseded states on disk that are not worth a clean-up


class StoredClientStates(ClientStates):
    """ClientStates of which the latest changes are held in memory, up to a limit, and the rest lies in ``<folder>``.

    A segment is a safetensors file, numbered in order of writing; the highest number that holds a client has its state.
    It is deleted when all its states are superseded, those of the last checkpoint not before the next one. When more
    than half of what lies on disk is superseded, the rest of the emptiest segments is written anew.

    Args:
        limit: bytes of tensors held in memory (where training left them); what changed longest ago goes to disk beyond it.
        device: where states that are read from disk are put.
    """

    def __init__(self, folder: Path, device: torch.device, limit: float) -> None:
        self.folder, self._device, self._limit = folder, device, limit
        self._held: dict[int, Trees] = {}  # in memory, the longest unchanged first
        self.bytes = 0  # in memory
        self._unsaved: dict[int, None] = {}  # of these, not on disk
        self._place: dict[int, int] = {}  # on disk: the segment of a client's state
        self._live: dict[int, int] = {}  # by segment: states in use
        self._dead = 0  # states on disk that are superseded
        self._written: dict[int, int] = {}  # by segment: states in all
        self._obsolete = list(self._on_disk())  # segments that only the last checkpoint refers to
        self._durable = max(
            self._on_disk(), default=0
        )  # segments up to here may belong to the last checkpoint
        self._first = self._next = self._durable + 1
        self._inherited = self._durable  # segments up to here were not written by this object
        self._verified: set[tuple[int, int]] = set()  # of those: (segment, client)

    def put(self, client: int, state: Trees) -> None:
        old = self._held.get(client)
        if old is state:
            return
        # Interrupted anywhere, a segment may be counted as in use though it is not, never the other way round.
        self._unsaved[client] = None
        self._held.pop(client, None)
        self._held[client] = state
        self.bytes += _size(state) - (0 if old is None else _size(old))
        self._supersede(client)

    def spill(self) -> None:
        """Move what exceeds the limit to disk."""
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

    def flush(self) -> dict[str, int]:
        """Write what is not on disk; returns what `restore` needs. Call `delete_obsolete` once that is stored."""
        self._save(list(self._unsaved))
        self._durable = self._next - 1
        return {"first": self._first, "last": self._next - 1, "clients": len(self)}

    def delete_obsolete(self) -> None:
        """A checkpoint refers to all of the present states, and no longer to the earlier ones."""
        while self._obsolete:
            self._path(self._obsolete.pop()).unlink(missing_ok=True)

    def restore(self, range_: dict[str, int] | None) -> None:
        """Be as at the `flush` that returned `range_`, or empty; deletes what was written since.

        Raises:
            StorageError: a file is missing or damaged.
        """
        first, last = (range_["first"], range_["last"]) if range_ else (1, 0)
        for number, path in self._on_disk().items():
            if not first <= number <= last:
                path.unlink()
        for part in self.folder.glob(".*.part"):
            part.unlink()
        self._held, self._unsaved, self.bytes, self._obsolete = {}, {}, 0, []
        self._place, self._live, self._written, self._dead = {}, {}, {}, 0
        self._first, self._next, self._durable = first, last + 1, last
        self._inherited, self._verified = last, set()
        for number in sorted(self._on_disk()):
            with self._open(number) as (_, facts):
                clients = [int(client) for client in facts["layout"]]
            self._enter(number, clients)
        if range_ and len(self._place) != range_["clients"]:
            raise _unusable(self.folder)

    def close(self) -> None:
        """Delete what no checkpoint refers to."""
        for number, path in self._on_disk().items():
            if number > self._durable:
                path.unlink(missing_ok=True)

    def __getitem__(self, client: int) -> Trees:
        if client in self._held:
            return self._held[client]
        return self._read(self._place[client], [client])[client]

    def __iter__(self) -> Iterator[int]:
        yield from self._place
        yield from (client for client in self._unsaved if client not in self._place)

    def __len__(self) -> int:
        return len(self._place) + sum(client not in self._place for client in self._unsaved)

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
        self._next = number + 1
        self._enter(number, list(states))

    def _enter(self, number: int, clients: list[int]) -> None:
        self._written[number] = self._live[number] = len(clients)
        for client in clients:
            self._supersede(client)
            self._place[client] = number

    def _supersede(self, client: int) -> None:
        """What lies on disk for `client` is out of date."""
        number = self._place.pop(client, None)
        if number is None:
            return
        self._dead += 1
        self._live[number] -= 1
        if not self._live[number]:
            self._drop(number)

    def _drop(self, number: int) -> None:
        self._dead -= self._written.pop(number)
        del self._live[number]
        if number <= self._durable:
            self._obsolete.append(number)
        else:
            self._path(number).unlink(missing_ok=True)

    def _clean_up(self) -> None:
        """Write the states of half-empty segments anew, where that halves the disk's use."""
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
        """States of a segment; those that another process wrote are verified when they are first read."""
        states: dict[int, Trees] = {}
        with self._open(number) as (file, facts):
            for client in clients:
                states[client] = state = {
                    group: {name: file.get_tensor(f"{client}/{group}/{name}") for name in names}
                    for group, names in facts["layout"][str(client)].items()
                }
                if number <= self._inherited and (number, client) not in self._verified:
                    if checksum(joined(state)) != facts["checksums"][str(client)]:
                        raise ValueError(f"client {client}'s state is not the one that was written")
                    self._verified.add((number, client))
        return states

    @contextlib.contextmanager
    def _open(self, number: int) -> Iterator[tuple[Any, dict[str, Any]]]:
        """A segment's file and its facts: by client, the names of the tensors of each group, and the state's checksum."""
        path = self._path(number)
        try:
            with safetensors.safe_open(path, framework="pt", device=str(self._device)) as file:
                yield file, read_facts(file)
        except (
            FileNotFoundError,
            safetensors.SafetensorError,
            KeyError,
            TypeError,
            ValueError,
        ) as error:
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
    """What goes into one segment each."""
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


def _unusable(path: Path) -> StorageError:
    return StorageError(
        "clients' stored states are missing or damaged",
        where=str(path),
        do="start the run afresh with reuse=false",
    )
