"""Checkpoints: a manifest, renamed last, that refers to the server's trees (by content) and to segments of clients' memories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from fedexp.core.memories import After, committed
from fedexp.core.runner import Snapshot
from fedexp.storage.files import read_json, write_text
from fedexp.storage.memories import StoredMemories
from fedexp.storage.tensors import TensorStore, decode, encode, references

_VERSION = 2


class Checkpoint:
    """The latest snapshot of a run, in ``<folder>/checkpoint``.

    Server state is shared by content, so what repeats itself costs nothing. A run whose first snapshot has `memories` for
    its clients keeps them here while it runs, too: a save writes those that changed since the last one.

    Args:
        memory_gb: clients' memories that may lie in memory; see `StoredMemories`.
    """

    def __init__(self, folder: Path, device: torch.device, memory_gb: float = 2.0) -> None:
        self._manifest = folder / "checkpoint" / "manifest.json"
        self._store = TensorStore(folder / "checkpoint" / "tensors")
        self._device = device
        self.memories = StoredMemories(folder / "checkpoint" / "memories", device, memory_gb * 1e9)

    def save(self, snapshot: Snapshot, changed: set[int], offset: int) -> None:
        """Write `snapshot`; `offset` is the length of the metrics file it belongs to. Atomic: a crash leaves the last one.

        Of a snapshot whose memories do not lie here, those of the `changed` clients are taken over.
        """
        clients = snapshot.clients
        if (clients.before if isinstance(clients, After) else clients) is self.memories:
            committed(clients)
        else:
            for client in sorted(changed):
                self.memories.put(client, clients[client])
            self.memories.settle()
        manifest = {
            "version": _VERSION,
            "step": snapshot.step,
            "metrics_offset": offset,
            "state": encode(snapshot.state, self._store.put),
            "memories": self.memories.flush(),
        }
        write_text(self._manifest, json.dumps(manifest))
        self.memories.secured()
        self._store.keep_only(set(references(manifest["state"])))

    def load(self) -> tuple[Snapshot, int] | None:
        """The last snapshot and its metrics offset, or None before the first save. What was written since is deleted.

        Raises:
            StorageError: a file is missing or damaged; a single memory's damage may show only when it is read.
        """
        manifest = read_json(self._manifest)
        if manifest is None or manifest["version"] != _VERSION:
            self.memories.restore(None)
            return None
        trees: dict[str, Any] = {}

        def get(name: str) -> Any:
            if name not in trees:
                trees[name] = self._store.get(name, self._device)
            return trees[name]

        self.memories.restore(manifest["memories"])
        return Snapshot(manifest["step"], decode(manifest["state"], get), self.memories), manifest["metrics_offset"]

    def close(self) -> None:
        """Delete memories on disk that the last save does not refer to."""
        self.memories.close()
