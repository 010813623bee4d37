"""Models that a state refers to instead of holding them: a state may be larger than memory."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

from torch import Tensor

from fedexp.core.client_states import owned
from fedexp.core.trees import Tree, digest, joined, part_of
from fedexp.core.weights import ModelSpec, Weights


class StoredWeights:
    """A model as it was when it was kept; its tensors must not be changed afterwards.

    Equal to another of the same spec and content. This one lies in memory; a run's may lie on disk.
    """

    def __init__(self, spec: ModelSpec, weights: Weights | None) -> None:
        self.spec, self.weights = spec, weights

    @cached_property
    def digest(self) -> str:
        """Hash of parameters and buffers; computed once."""
        return digest(flat(self.load()))

    def load(self) -> Weights:
        """The model. What lies on disk is read at every call and not remembered: let go of it after use.

        Raises:
            StorageError: its file is missing or damaged.
        """
        assert self.weights is not None
        return self.weights

    def parameter(self, name: str) -> Tensor:
        """One of the model's parameters, read alone where the model lies on disk."""
        return self.load().params[name]

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, StoredWeights)
            and (self.spec, self.digest) == (other.spec, other.digest)
        )

    def __hash__(self) -> int:
        return hash((self.spec, self.digest))


class ModelStore:
    """Where kept models lie: here in memory, for as long as somebody refers to them."""

    def store(self, weights: Weights) -> StoredWeights:
        return StoredWeights(
            weights.spec, unflat(weights.spec, owned({"all": flat(weights)})["all"])
        )

    def keep_only(self, state: Any) -> None:
        """From here on only what `state` refers to is needed; called before a step with the state it begins with."""


def stored_weights_in(state: Any) -> Iterator[StoredWeights]:
    """The references in a nest of dict, list and tuple."""
    if isinstance(state, StoredWeights):
        yield state
    elif isinstance(state, dict | list | tuple):
        for item in state.values() if isinstance(state, dict) else state:
            yield from stored_weights_in(item)


def flat(weights: Weights) -> Tree:
    """Parameters and buffers as one tree."""
    return joined({"params": weights.params, "buffers": weights.buffers})


def unflat(spec: ModelSpec, tree: Tree) -> Weights:
    """The inverse of `flat`."""
    return Weights(spec, part_of(tree, "params"), part_of(tree, "buffers"))
