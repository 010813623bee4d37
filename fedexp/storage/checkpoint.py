"""Checkpoints of a run.

A checkpoint consists of a manifest (a JSON file) and the files that the manifest refers
to. The manifest is written last. The other files are of two kinds:

- A file with one tree of the server's state. A tree is a dict of tensors. The file's
  name is a hash of the tree.
- A segment, which is a file with the states of several clients
  (`fedexp.storage.client_states`).
"""

from __future__ import annotations

import hashlib
import json
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from fedexp.core.client_states import After, committed
from fedexp.core.runner import Snapshot
from fedexp.storage.client_states import StoredClientStates
from fedexp.storage.files import damaged, read_json, write_text
from fedexp.storage.stored_weights import FileBackedModelStore
from fedexp.storage.tensors import TensorStore, decode, encode, references

_VERSION = 3


class Checkpoint:
    """The latest snapshot of a run, in ``<folder>/checkpoint``.

    A save writes only what is not on disk yet. A tree that occurs several times in the
    server's state is stored once.

    Between saves, this object also stores data that do not fit into memory:

    - client states, if the run's first snapshot uses the `client_states` of this object
    - models, if the run's environment (`Env`) uses the `models` of this object

    Args:
        folder: Folder of the run.
        device: Device on which loaded tensors are put.
        memory_gb: Gigabytes of client states and stored models that may be in memory.
            If the limit is exceeded, models move to disk before client states.
    """

    def __init__(self, folder: Path, device: torch.device, memory_gb: float = 1.0) -> None:
        self._manifest = folder / "checkpoint" / "manifest.json"
        self._store = TensorStore(folder / "checkpoint" / "tensors")
        self._device = device
        limit = memory_gb * 1e9
        self.client_states = StoredClientStates(
            folder / "checkpoint" / "client_states", device, limit
        )
        self.models = FileBackedModelStore(
            self._store, device, lambda: limit - self.client_states.bytes
        )

    def save(self, snapshot: Snapshot, changed: set[int], journal: Any) -> None:
        """Write `snapshot`.

        The save is atomic: after a crash, the previous snapshot is still valid. If the
        snapshot does not use this object's `client_states`, the states of the `changed`
        clients are copied into them.

        Args:
            snapshot: Snapshot to write.
            changed: Clients whose states have changed.
            journal: JSON value that tells how much of ``metrics.jsonl`` belongs to the
                snapshot (`Journal.mark`).
        """
        clients = snapshot.clients
        if (clients.before if isinstance(clients, After) else clients) is self.client_states:
            committed(clients)
        else:
            for client in sorted(changed):
                self.client_states.put(client, clients[client])
            self.client_states.spill()

        manifest = {
            "version": _VERSION,
            "step": snapshot.step,
            "journal": journal,
            "state": encode(snapshot.state, self._store.put, self.models.name_of),
            "client_states": self.client_states.flush(),
        }

        names = set(references(manifest["state"]))
        # If the save is interrupted below, either the old or the new checkpoint is
        # valid. The model files of both checkpoints must therefore stay.
        self.models.saved = self.models.saved | names
        write_text(self._manifest, json.dumps({**manifest, "sha256": _sha256(manifest)}))
        self.client_states.delete_obsolete()
        self.models.keep_files(names)

    def load(self) -> tuple[Snapshot, Any] | None:
        """Return the last snapshot and its `journal`, or None before the first save.

        Files written since that save are deleted. Stored models are read only when they
        are used.

        Raises:
            StorageError: A file is missing or damaged. Damage may be detected only
                later, when the file is read.
        """
        manifest = read_json(self._manifest)
        if not isinstance(manifest, dict | None):
            raise damaged(self._manifest)
        if manifest is None or manifest.get("version") != _VERSION:
            self.client_states.restore(None)
            self.models.keep_files(set())
            return None
        if manifest.pop("sha256", None) != _sha256(manifest):
            raise damaged(self._manifest)

        self.client_states.restore(manifest["client_states"])
        self.models.keep_files(set(references(manifest["state"])))
        # A tree that occurs in two places is read once.
        get = cache(partial(self._store.get, device=self._device))
        state = decode(manifest["state"], get, self.models.reference_to)
        return Snapshot(manifest["step"], state, self.client_states), manifest["journal"]

    def close(self) -> None:
        """Delete the files that the last save does not refer to."""
        self.client_states.close()
        self.models.keep_files(self.models.saved)


def _sha256(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest).encode()).hexdigest()
