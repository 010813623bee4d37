"""A run's kept models: in memory up to a limit, a file each in the tensor store beyond it and for checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fedexp.core.kept import Kept, ModelStore, flat, kept_in, unflat
from fedexp.core.trees import num_bytes
from fedexp.core.weights import ModelSpec, Weights
from fedexp.storage.tensors import TensorStore


class StoredModel(Kept):
    """In memory, on disk under the name `digest`, or both."""

    def __init__(self, store: TensorStore, device: torch.device, spec: ModelSpec, weights: Weights | None) -> None:
        super().__init__(spec, weights)
        self.store, self._device = store, device
        self.written = weights is None
        self.bytes = 0 if weights is None else num_bytes(flat(weights))

    def load(self) -> Weights:
        if self._weights is not None:
            return self._weights
        return unflat(self.spec, self.store.get(self.digest, self._device))

    def write(self) -> None:
        """Make sure that it lies on disk."""
        if not self.written:
            self.digest = self.store.put(flat(self.load()), self.__dict__.get("digest"))
            self.written = True

    def release(self) -> None:
        """Leave memory, once on disk."""
        self._weights = None


class KeptModels(ModelStore):
    """Models of the state of a run, whose checkpoints and whose memory limit they share with the client states.

    A model goes to disk when a checkpoint refers to it or when the limit is exceeded, the longest kept first. A file is
    deleted once neither the last checkpoint nor the state of the last step refers to it.

    Args:
        store: where the last checkpoint may refer to any file that is there.
        device: where models that are read from disk are put.
        room: bytes of memory for them, at present.
    """

    def __init__(self, store: TensorStore, device: torch.device, room: Callable[[], float]) -> None:
        self._store, self._device, self._room = store, device, room
        self._held: dict[int, StoredModel] = {}  # in memory, by id, the longest kept first
        self._bytes = 0
        self._spilled: set[str] = set()  # files written since the last checkpoint
        self.saved = store.names()  # files that the last checkpoint may refer to

    def keep(self, weights: Weights) -> StoredModel:
        kept = super().keep(weights)
        model = StoredModel(self._store, self._device, kept.spec, kept.load())
        self._held[id(model)] = model
        self._bytes += model.bytes
        self._settle()
        return model

    def retain(self, state: Any) -> None:
        used = list(kept_in(state))
        ids = {id(kept) for kept in used}
        self._held = {key: model for key, model in self._held.items() if key in ids}
        self._bytes = sum(model.bytes for model in self._held.values())
        if self._spilled:
            needed = {kept.digest for kept in used if isinstance(kept, StoredModel) and kept.written}
            for name in self._spilled - needed - self.saved:
                self._store.delete(name)
            self._spilled &= needed
        self._settle()

    def name_of(self, kept: Kept) -> str:
        """The name of its file, written now if it is not there."""
        if not isinstance(kept, StoredModel) or kept.store is not self._store:
            return self._store.put(flat(kept.load()), kept.digest)
        if not kept.written:
            kept.write()
            self._spilled.add(kept.digest)
        return kept.digest

    def stored(self, spec: ModelSpec, name: str) -> StoredModel:
        """The model that `name_of` named; it is not read yet."""
        model = StoredModel(self._store, self._device, spec, None)
        model.digest = name
        return model

    def secure(self, names: set[str]) -> None:
        """The last checkpoint refers to the files `names`: delete all others."""
        self.saved = names
        self._spilled.clear()
        self._store.keep_only(names)

    def restore(self, names: set[str]) -> None:
        """Hold nothing, with no more on disk than the checkpoint that refers to `names`."""
        self._held, self._bytes = {}, 0
        self.secure(names)

    def close(self) -> None:
        """Delete what no checkpoint refers to."""
        self._store.keep_only(self.saved)

    def _settle(self) -> None:
        """Move what exceeds the limit to disk."""
        room = self._room()
        while self._held and self._bytes > room:
            key, model = next(iter(self._held.items()))
            self.name_of(model)
            model.release()
            del self._held[key]
            self._bytes -= model.bytes
