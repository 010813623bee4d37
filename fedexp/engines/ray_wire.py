"""Values that are sent between the run's process and Ray's actors.

Ray pickles them. Tensors are NumPy arrays of bytes, which Ray does not copy into the
pickle.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedexp.core.data import FederatedData
from fedexp.core.device import on_cpu
from fedexp.core.errors import FedexpError
from fedexp.core.jobs import ClientJob, ClientResult
from fedexp.core.trees import Tree
from fedexp.core.weights import Weights

# A tensor as flat bytes, its dtype and its shape. Tensors of every dtype have bytes.
Packed = tuple[np.ndarray, torch.dtype, tuple[int, ...]]


def pack(tree: Tree) -> dict[str, Packed]:
    """Pack every tensor of a tree."""
    return {name: _bytes_of(value) for name, value in tree.items()}


def unpack(packed: dict[str, Packed], device: torch.device) -> Tree:
    """Return a copy of a packed tree on `device`.

    torch aligns the copies in memory. The last bits of the results of some kernels
    depend on the alignment.
    """
    views = {name: _view_of(value) for name, value in packed.items()}
    return {name: v.clone() if on_cpu(device) else v.to(device) for name, v in views.items()}


def _bytes_of(value: Tensor) -> Packed:
    flat = value.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy(), value.dtype, tuple(value.shape)


def _view_of(packed: Packed) -> Tensor:
    """Return the tensor over the same memory, which must not be changed."""
    data, dtype, shape = packed
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*NumPy array is not writable")
        return torch.from_numpy(data).view(dtype).reshape(shape)


@dataclass(frozen=True, eq=False)
class SentData:
    """The part of `FederatedData` that the training of a client needs.

    The field `rest` has no samples. The test set stays in the run's process.
    """

    x: Packed
    y: Packed
    rest: FederatedData

    @classmethod
    def of(cls, data: FederatedData) -> SentData:
        train = data.train
        none = replace(train, x=train.x[:0].cpu().clone(), y=train.y[:0].cpu().clone())
        rest = replace(data, train=none, test=none, val=None, proxy=None)
        return cls(_bytes_of(train.x), _bytes_of(train.y), rest)

    def federated(self, device: torch.device) -> FederatedData:
        """Return the data on `device`, with an empty test set.

        On the CPU nothing is copied, and all actors of a node read the same memory.
        """
        x, y = _view_of(self.x).to(device), _view_of(self.y).to(device)
        train = replace(self.rest.train, x=x, y=y)
        return replace(self.rest, train=train, test=replace(train, x=x[:0], y=y[:0]))


@dataclass(frozen=True, eq=False)
class SentResult:
    """A `ClientResult` whose trees are packed. The field `rest` has no trees."""

    rest: ClientResult
    trees: list[dict[str, Packed]]

    @classmethod
    def of(cls, result: ClientResult) -> SentResult:
        trees: list[dict[str, Packed]] = []

        def take(tree: Tree) -> Tree:
            trees.append(pack(tree))
            return {}

        return cls(_with_trees(result, take), trees)

    def result(self, device: torch.device) -> ClientResult:
        trees = iter(self.trees)
        return _with_trees(self.rest, lambda _: unpack(next(trees), device))


def _with_trees(result: ClientResult, change: Callable[[Tree], Tree]) -> ClientResult:
    weights = result.weights
    return replace(
        result,
        weights=Weights(weights.spec, change(weights.params), change(weights.buffers)),
        payload=_changed(result.payload, change),
        state=None if result.state is None else _changed(result.state, change),
        probes=_changed(result.probes, change),
        known_finite=None,
    )


def _changed(values: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    return {name: change(value) for name, value in values.items()}


@dataclass(frozen=True, eq=False)
class SentJob:
    """A job that refers to its trees by their keys in `JobBatch.trees`.

    The field `rest` has no trees.
    """

    rest: ClientJob
    params: int
    buffers: int
    shared: dict[str, int]
    state: dict[str, int] | None


@dataclass(frozen=True, eq=False)
class JobBatch:
    """Chunks of jobs for one actor.

    Args:
        chunks: Jobs of each chunk.
        trees: Each distinct tree once, by key. If several jobs of the call of `map` use
            a tree, the value is a reference to it in the object store. Otherwise it is
            the packed tree.
        data: Reference to a `SentData` in the object store.
        targets: Import paths of the plug-ins that the jobs use.
        code: Fingerprint of the code of the run's process for these plug-ins.
    """

    chunks: list[list[SentJob]]
    trees: dict[int, Any]
    data: Any
    targets: tuple[str, ...]
    code: str

    def jobs(self, trees: dict[int, Tree]) -> list[list[ClientJob]]:
        """Return the jobs of each chunk. Jobs that shared a start model share it again.

        Args:
            trees: The unpacked trees, by key.
        """
        starts: dict[tuple[int, int], Weights] = {}

        def original(sent: SentJob) -> ClientJob:
            key = (sent.params, sent.buffers)
            if key not in starts:
                starts[key] = Weights(sent.rest.start.spec, trees[key[0]], trees[key[1]])
            return replace(
                sent.rest,
                start=starts[key],
                shared=_changed(sent.shared, trees.__getitem__),
                state=None if sent.state is None else _changed(sent.state, trees.__getitem__),
            )

        return [[original(sent) for sent in chunk] for chunk in self.chunks]


@dataclass(frozen=True, eq=False)
class Reply:
    """The results of a batch, in the order of its jobs, up to the first failure.

    Args:
        results: Results of the jobs.
        failure: Error of the next job, or None.
        stacked: Number of local steps of this batch that ran stacked.
        notes: Notes for the user.
    """

    results: list[SentResult]
    failure: FedexpError | None
    stacked: int = 0
    notes: list[str] = field(default_factory=list)


class Packer:
    """The jobs of one `map` call as `SentJob` objects.

    A tree is identified by its tensor objects. Two dictionaries with the same tensors
    are therefore sent only once.

    Args:
        jobs: Jobs of the call.
        put: Function that stores an object once for all actors and returns its
            reference.
    """

    def __init__(self, jobs: Sequence[ClientJob], put: Callable[[object], Any]) -> None:
        self._put = put
        # Key of each tree. The trees are kept alive, so that no id is used twice.
        self._numbers: dict[tuple[object, ...], int] = {}
        self._trees: list[Tree] = []
        self._jobs = [self._sent(job) for job in jobs]
        self._uses = Counter(key for job in self._jobs for key in _keys(job))
        self._references: dict[int, Any] = {}

    def batch(
        self, chunks: Sequence[Sequence[int]], data: Any, targets: tuple[str, ...], code: str
    ) -> JobBatch:
        sent = [[self._jobs[position] for position in chunk] for chunk in chunks]
        keys = sorted({key for chunk in sent for job in chunk for key in _keys(job)})
        return JobBatch(sent, {key: self._value(key) for key in keys}, data, targets, code)

    def _sent(self, job: ClientJob) -> SentJob:
        return SentJob(
            replace(job, start=Weights(job.start.spec, {}, {}), shared={}, state=None),
            self._key(job.start.params),
            self._key(job.start.buffers),
            _changed(job.shared, self._key),
            None if job.state is None else _changed(job.state, self._key),
        )

    def _key(self, tree: Tree) -> int:
        key = self._numbers.setdefault((*tree, *map(id, tree.values())), len(self._trees))
        if key == len(self._trees):
            self._trees.append(tree)
        return key

    def _value(self, key: int) -> Any:
        tree = self._trees[key]
        if self._uses[key] == 1 or not tree:
            return pack(tree)
        if key not in self._references:
            self._references[key] = self._put(pack(tree))
        return self._references[key]


def _keys(job: SentJob) -> list[int]:
    return [job.params, job.buffers, *job.shared.values(), *(job.state or {}).values()]
