"""References to stored models.

An aggregator's state may contain such references in place of models. The models
themselves may be on disk, so together they may be larger than memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

from torch import Tensor

from fedexp.core.client_states import owned
from fedexp.core.trees import Tree, digest, joined, part_of
from fedexp.core.weights import ModelSpec, Weights


class StoredWeights:
    """A reference to a stored model.

    The tensors of the model must not be changed after the model has been stored. Two
    references are equal if the architectures and the tensors of their models are equal.
    This class keeps the model in memory. A subclass may keep it on disk.
    """

    def __init__(self, spec: ModelSpec, weights: Weights | None) -> None:
        self.spec, self.weights = spec, weights

    @cached_property
    def digest(self) -> str:
        """Hash of the model's parameters and buffers. It is computed only once."""
        return digest(tree_of(self.load()))

    def load(self) -> Weights:
        """Return the model.

        A model on disk is read at every call and is not cached. To free memory, drop
        the returned model after use.

        Raises:
            StorageError: The model's file is missing or damaged.
        """
        assert self.weights is not None
        return self.weights

    def parameter(self, name: str) -> Tensor:
        """Return one parameter of the model.

        If the model is on disk, only this parameter is read.
        """
        return self.load().params[name]

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, StoredWeights)
            and (self.spec, self.digest) == (other.spec, other.digest)
        )

    def __hash__(self) -> int:
        return hash((self.spec, self.digest))


class ModelStore:
    """A store of models.

    This class holds a model in memory as long as a reference to the model exists.
    """

    def store(self, weights: Weights) -> StoredWeights:
        return StoredWeights(weights.spec, weights_of(weights.spec, owned(tree_of(weights))))

    def keep_only(self, state: Any) -> None:
        """Drop the models that `state` does not refer to.

        It is called before each step with the state before the step.
        """


def stored_weights_in(state: Any) -> Iterator[StoredWeights]:
    """Yield all references in a state of nested dicts, lists and tuples."""
    if isinstance(state, StoredWeights):
        yield state
    elif isinstance(state, dict | list | tuple):
        for item in state.values() if isinstance(state, dict) else state:
            yield from stored_weights_in(item)


def tree_of(weights: Weights) -> Tree:
    """Return parameters and buffers as one tree."""
    return joined({"params": weights.params, "buffers": weights.buffers})


def weights_of(spec: ModelSpec, tree: Tree) -> Weights:
    """Return the weights of a tree that `tree_of` returned."""
    return Weights(spec, part_of(tree, "params"), part_of(tree, "buffers"))
