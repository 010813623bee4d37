"""Storage of the models that the state of a run refers to.

Models are in memory up to a limit. Models that exceed the limit, and models that a
checkpoint refers to, are stored in files (`TensorStore`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedexp.core.stored_weights import (
    ModelStore,
    StoredWeights,
    stored_weights_in,
    tree_of,
    weights_of,
)
from fedexp.core.trees import num_bytes
from fedexp.core.weights import ModelSpec, Weights
from fedexp.storage.tensors import TensorStore


class FileBackedWeights(StoredWeights):
    """A reference to a model in memory, on disk under the name `digest`, or both."""

    def __init__(
        self, store: TensorStore, device: torch.device, spec: ModelSpec, weights: Weights | None
    ) -> None:
        super().__init__(spec, weights)
        self.tensor_store, self._device = store, device
        self.on_disk = weights is None
        self.bytes = 0 if weights is None else num_bytes(tree_of(weights))

    def load(self) -> Weights:
        if self.weights is not None:
            return self.weights
        return weights_of(self.spec, self.tensor_store.get(self.digest, self._device))

    def parameter(self, name: str) -> Tensor:
        if self.weights is not None:
            return self.weights.params[name]
        return self.tensor_store.tensor(self.digest, f"params/{name}", self._device)


class FileBackedModelStore(ModelStore):
    """A store of the models that a run's state refers to.

    Models and client states share one memory limit and are saved in the same
    checkpoints. A model is written to disk when a checkpoint refers to it. If the limit
    is exceeded, models move to disk in the order in which they were stored. A file is
    deleted when neither the last checkpoint nor the state of the last step refers to
    it.

    Args:
        store: Store of the files.
        device: Device on which models that are read from disk are put.
        free_bytes: Callback that returns the bytes of memory that models may use at
            present.
    """

    def __init__(
        self, store: TensorStore, device: torch.device, free_bytes: Callable[[], float]
    ) -> None:
        self._store, self._device, self._free_bytes = store, device, free_bytes
        # Models in memory by `id`, in the order in which they were stored.
        self._held: dict[int, FileBackedWeights] = {}
        self._bytes = 0
        self._spilled: set[str] = set()  # names of files written since the last checkpoint
        self.saved = store.names()  # names of files that the last checkpoint may refer to

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
        """Return the name of the file of `reference`.

        The file is written if it does not exist yet.
        """
        own = (
            reference
            if isinstance(reference, FileBackedWeights) and reference.tensor_store is self._store
            else None
        )

        if own is None or not own.on_disk:
            reference.digest = self._store.put(
                tree_of(reference.load()), reference.__dict__.get("digest")
            )
            self._spilled.add(reference.digest)

        if own is not None:
            own.on_disk = True
        return reference.digest

    def reference_to(self, spec: ModelSpec, name: str) -> StoredWeights:
        """Return a reference to the model whose file has the name `name`.

        The file is not read yet.
        """
        model = FileBackedWeights(self._store, self._device, spec, None)
        model.digest = name
        return model

    def keep_files(self, names: set[str]) -> None:
        """Delete all files except those that the last checkpoint refers to.

        Args:
            names: Names of the files that the last checkpoint refers to.
        """
        self.saved = names
        self._spilled.clear()
        self._store.keep_only(names)

    def _spill(self) -> None:
        """Move models to disk until the models in memory do not exceed the limit."""
        free_bytes = self._free_bytes()
        while self._held and self._bytes > free_bytes:
            key, model = next(iter(self._held.items()))
            self.name_of(model)
            model.weights = None
            del self._held[key]
            self._bytes -= model.bytes
