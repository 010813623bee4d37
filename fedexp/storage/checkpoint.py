"""Checkpoints: a manifest, renamed last, that refers to the server's trees (by content) and to segments of client states."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from fedexp.core.client_states import After, committed
from fedexp.core.runner import Snapshot
from fedexp.storage.client_states import StoredClientStates
from fedexp.storage.files import read_json, write_text
from fedexp.storage.tensors import TensorStore, decode, encode, references

_VERSION = 2


class Checkpoint:
    """The latest snapshot of a run, in ``<folder>/checkpoint``.

    Server state is shared by content, so what repeats itself costs nothing. A run whose first snapshot has `client_states` for
    its clients keeps them here while it runs, too: a save writes those that changed since the last one.

    Args:
        memory_gb: client states that may lie in memory; see `StoredClientStates`.
    """

    def __init__(self, folder: Path, device: torch.device, memory_gb: float = 2.0) -> None:
        self._manifest = folder / "checkpoint" / "manifest.json"
        self._store = TensorStore(folder / "checkpoint" / "tensors")
        self._device = device
        self.client_states = StoredClientStates(folder / "checkpoint" / "client_states", device, memory_gb * 1e9)

    def save(self, snapshot: Snapshot, changed: set[int], offset: int) -> None:
        """Write `snapshot`; `offset` is the length of the metrics file it belongs to. Atomic: a crash leaves the last one.

        Of a snapshot whose client_states do not lie here, those of the `changed` clients are taken over.
        """
        clients = snapshot.clients
        if (clients.before if isinstance(clients, After) else clients) is self.client_states:
            committed(clients)
        else:
            for client in sorted(changed):
                self.client_states.put(client, clients[client])
            self.client_states.settle()
        manifest = {
            "version": _VERSION,
            "step": snapshot.step,
            "metrics_offset": offset,
            "state": encode(snapshot.state, self._store.put),
            "client_states": self.client_states.flush(),
        }
        write_text(self._manifest, json.dumps(manifest))
        self.client_states.secured()
        self._store.keep_only(set(references(manifest["state"])))

    def load(self) -> tuple[Snapshot, int] | None:
        """The last snapshot and its metrics offset, or None before the first save. What was written since is deleted.

        Raises:
            StorageError: a file is missing or damaged; a single one's damage may show only when it is read.
        """
        manifest = read_json(self._manifest)
        if manifest is None or manifest["version"] != _VERSION:
            self.client_states.restore(None)
            return None
        trees: dict[str, Any] = {}

        def get(name: str) -> Any:
            if name not in trees:
                trees[name] = self._store.get(name, self._device)
            return trees[name]

        self.client_states.restore(manifest["client_states"])
        return Snapshot(manifest["step"], decode(manifest["state"], get), self.client_states), manifest[
            "metrics_offset"
        ]

    def close(self) -> None:
        """Delete client_states on disk that the last save does not refer to."""
        self.client_states.close()
