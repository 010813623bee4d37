"""Checkpoints: a manifest, renamed last, that refers to content-addressed tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from fedexp.core.runner import Snapshot
from fedexp.storage.files import read_json, write_text
from fedexp.storage.tensors import TensorStore, decode, encode, references

_VERSION = 1


class Checkpoint:
    """The latest snapshot of a run, in ``<folder>/checkpoint``.

    Only memories of clients that changed since the last save are encoded again. Trees are shared by content, so server
    state that repeats a client's model costs nothing.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._manifest = folder / "checkpoint" / "manifest.json"
        self._store = TensorStore(folder / "checkpoint" / "tensors")
        self._device = device
        self._clients: dict[str, Any] = {}

    def save(self, snapshot: Snapshot, changed: set[int], offset: int) -> None:
        """Write `snapshot`; `offset` is the length of the metrics file it belongs to. Atomic: a crash leaves the last one."""
        for client in sorted(changed):
            self._clients[str(client)] = encode(dict(snapshot.clients[client]), self._store.put)
        manifest = {
            "version": _VERSION,
            "step": snapshot.step,
            "metrics_offset": offset,
            "state": encode(snapshot.state, self._store.put),
            "clients": self._clients,
        }
        write_text(self._manifest, json.dumps(manifest))
        self._store.keep_only({*references(manifest["state"]), *references(self._clients)})

    def load(self) -> tuple[Snapshot, int] | None:
        """The last snapshot and its metrics offset, or None before the first save."""
        manifest = read_json(self._manifest)
        if manifest is None or manifest["version"] != _VERSION:
            return None
        trees: dict[str, Any] = {}

        def get(name: str) -> Any:
            if name not in trees:
                trees[name] = self._store.get(name, self._device)
            return trees[name]

        self._clients = manifest["clients"]
        clients = {int(client): decode(node, get) for client, node in self._clients.items()}
        return Snapshot(manifest["step"], decode(manifest["state"], get), clients), manifest["metrics_offset"]
