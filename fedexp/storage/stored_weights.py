"""A run's kept models: in memory up to a limit, a file each in the tensor store beyond it and for checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedexp.core.stored_weights import ModelStore, StoredWeights, flat, stored_weights_in, unflat
from fedexp.core.trees import num_bytes
from fedexp.core.weights import ModelSpec, Weights
from fedexp.storage.tensors import TensorStore


class FileBackedWeights(StoredWeights):
    """In memory, on disk under the name `digest`, or both."""

    def __init__(
        self, store: TensorStore, device: torch.device, spec: ModelSpec, weights: Weights | None
    ) -> None:
        super().__init__(spec, weights)
        self.tensor_store, self._device = store, device
        self.on_disk = weights is None
        self.bytes = 0 if weights is None else num_bytes(flat(weights))

    def load(self) -> Weights:
        if self.weights is not None:
            return self.weights
        return unflat(self.spec, self.tensor_store.get(self.digest, self._device))

    def parameter(self, name: str) -> Tensor:
        if self.weights is not None:
            return self.weights.params[name]
        return self.tensor_store.tensor(self.digest, f"params/{name}", self._device)


class FileBackedModelStore(ModelStore):
    """Models of the state of a run, whose checkpoints and whose memory limit they share with the client states.

    A model goes to disk when a checkpoint refers to it or when the limit is exceeded, the longest kept first. Its file is
    deleted once neither the last checkpoint nor the state of the last step refers to it.

    Args:
        device: where models that are read from disk are put.
        free_bytes: bytes of memory for them, at present.
    """

    def __init__(
        self, store: TensorStore, device: torch.device, free_bytes: Callable[[], float]
    ) -> None:
        self._store, self._device, self._free_bytes = store, device, free_bytes
        self._held: dict[int, FileBackedWeights] = {}  # in memory, by id, the longest kept first
        self._bytes = 0
        self._spilled: set[str] = set()  # files written since the last checkpoint
        self.saved = store.names()  # files that the last checkpoint may refer to

    def store(self, weights: Weights) -> StoredWeights:
        model = FileBackedWeights(
            self._store, self._device, weights.spec, super().store(weights).load()
        )
        self._held[id(model)] = model
        self._bytes += model.bytes
        self._spill()
        return model

    def keep_only(self, state: Any) -> None:
        used = {id(reference): reference for reference in stored_weights_in(state)}
        self._held = {key: model for key, model in self._held.items() if key in used}
        self._bytes = sum(model.bytes for model in self._held.values())
        if self._spilled:
            needed = {
                reference.digest
                for reference in used.values()
                if isinstance(reference, FileBackedWeights) and reference.on_disk
            }
            for name in self._spilled - needed - self.saved:
                self._store.delete(name)
            self._spilled &= needed
        self._spill()

    def name_of(self, reference: StoredWeights) -> str:
        """The name of its file, written now if it is not there."""
        own = (
            reference
            if isinstance(reference, FileBackedWeights) and reference.tensor_store is self._store
            else None
        )
        if own is None or not own.on_disk:
            reference.digest = self._store.put(
                flat(reference.load()), reference.__dict__.get("digest")
            )
            self._spilled.add(reference.digest)
        if own is not None:
            own.on_disk = True
        return reference.digest

    def reference_to(self, spec: ModelSpec, name: str) -> StoredWeights:
        """The model that `name_of` named; it is not read yet."""
        model = FileBackedWeights(self._store, self._device, spec, None)
        model.digest = name
        return model

    def keep_files(self, names: set[str]) -> None:
        """The last checkpoint refers to the files `names`: delete all others."""
        self.saved = names
        self._spilled.clear()
        self._store.keep_only(names)

    def _spill(self) -> None:
        """Move what exceeds the limit to disk."""
        free_bytes = self._free_bytes()
        while self._held and self._bytes > free_bytes:
            key, model = next(iter(self._held.items()))
            self.name_of(model)
            model.weights = None
            del self._held[key]
            self._bytes -= model.bytes
