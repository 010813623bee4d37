"""A run's kept models: in memory up to a limit, a file each in the tensor store beyond it and for checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedexp.core.stored_weights import Kept, ModelStore, flat, kept_in, unflat
from fedexp.core.trees import num_bytes
from fedexp.core.weights import ModelSpec, Weights
from fedexp.storage.tensors import TensorStore


class StoredModel(Kept):
    """In memory, on disk under the name `digest`, or both."""

    def __init__(
        self, store: TensorStore, device: torch.device, spec: ModelSpec, weights: Weights | None
    ) -> None:
        super().__init__(spec, weights)
        self.store, self._device = store, device
        self.on_disk = weights is None
        self.bytes = 0 if weights is None else num_bytes(flat(weights))

    def load(self) -> Weights:
        if self.weights is not None:
            return self.weights
        return unflat(self.spec, self.store.get(self.digest, self._device))

    def parameter(self, name: str) -> Tensor:
        if self.weights is not None:
            return self.weights.params[name]
        return self.store.tensor(self.digest, f"params/{name}", self._device)


class KeptModels(ModelStore):
    """Models of the state of a run, whose checkpoints and whose memory limit they share with the client states.

    A model goes to disk when a checkpoint refers to it or when the limit is exceeded, the longest kept first. Its file is
    deleted once neither the last checkpoint nor the state of the last step refers to it.

    Args:
        device: where models that are read from disk are put.
        room: bytes of memory for them, at present.
    """

    def __init__(self, store: TensorStore, device: torch.device, room: Callable[[], float]) -> None:
        self._store, self._device, self._room = store, device, room
        self._held: dict[int, StoredModel] = {}  # in memory, by id, the longest kept first
        self._bytes = 0
        self._spilled: set[str] = set()  # files written since the last checkpoint
        self.saved = store.names()  # files that the last checkpoint may refer to

    def keep(self, weights: Weights) -> Kept:
        model = StoredModel(self._store, self._device, weights.spec, super().keep(weights).load())
        self._held[id(model)] = model
        self._bytes += model.bytes
        self._settle()
        return model

    def retain(self, state: Any) -> None:
        used = {id(kept): kept for kept in kept_in(state)}
        self._held = {key: model for key, model in self._held.items() if key in used}
        self._bytes = sum(model.bytes for model in self._held.values())
        if self._spilled:
            needed = {
                kept.digest
                for kept in used.values()
                if isinstance(kept, StoredModel) and kept.on_disk
            }
            for name in self._spilled - needed - self.saved:
                self._store.delete(name)
            self._spilled &= needed
        self._settle()

    def name_of(self, kept: Kept) -> str:
        """The name of its file, written now if it is not there."""
        mine = kept if isinstance(kept, StoredModel) and kept.store is self._store else None
        if mine is None or not mine.on_disk:
            kept.digest = self._store.put(flat(kept.load()), kept.__dict__.get("digest"))
            self._spilled.add(kept.digest)
        if mine is not None:
            mine.on_disk = True
        return kept.digest

    def stored(self, spec: ModelSpec, name: str) -> Kept:
        """The model that `name_of` named; it is not read yet."""
        model = StoredModel(self._store, self._device, spec, None)
        model.digest = name
        return model

    def secure(self, names: set[str]) -> None:
        """The last checkpoint refers to the files `names`: delete all others."""
        self.saved = names
        self._spilled.clear()
        self._store.keep_only(names)

    def _settle(self) -> None:
        """Move what exceeds the limit to disk."""
        room = self._room()
        while self._held and self._bytes > room:
            key, model = next(iter(self._held.items()))
            self.name_of(model)
            model.weights = None
            del self._held[key]
            self._bytes -= model.bytes
