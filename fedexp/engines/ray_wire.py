"""Values that are sent between the run's process and Ray's actors.

Trees are sent as byte arrays. A batch contains each tree of its jobs once, and the jobs
refer to their trees by keys. A reply contains the trees of the results.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedexp.core.data import FederatedData
from fedexp.core.device import on_cpu
from fedexp.core.errors import FedexpError
from fedexp.core.jobs import ClientJob, ClientResult
from fedexp.core.trees import Tree, Trees, num_bytes
from fedexp.core.weights import Weights


@dataclass(frozen=True, eq=False)
class Packed:
    """A tensor as a flat uint8 array, which the object store maps without a copy.

    Tensors of every torch dtype can be viewed as uint8.
    """

    data: np.ndarray
    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, value: Tensor) -> Packed:
        flat = value.detach().cpu().contiguous().reshape(-1)
        return cls(flat.view(torch.uint8).numpy(), value.dtype, tuple(value.shape))

    def view(self) -> Tensor:
        """Return the tensor over the same memory.

        The tensor must not be changed if the memory belongs to the object store.
        """
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message=".*NumPy array is not writable", category=UserWarning
            )
            flat = torch.from_numpy(self.data)
        return flat.view(self.dtype).reshape(self.shape)

    def tensor(self, device: torch.device) -> Tensor:
        """Return a copy on `device`, aligned in memory as torch aligns tensors.

        The last bits of the results of some kernels depend on the alignment.
        """
        value = self.view()
        return value.clone() if on_cpu(device) else value.to(device)


PackedTree = dict[str, Packed]
PackedTrees = dict[str, PackedTree]


def pack(tree: Tree) -> PackedTree:
    """Pack every tensor of a tree."""
    return {name: Packed.of(value) for name, value in tree.items()}


def unpack(packed: PackedTree, device: torch.device) -> Tree:
    """Return the tree of packed tensors on `device`."""
    return {name: value.tensor(device) for name, value in packed.items()}


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
        x, y = data.train.x, data.train.y
        none = replace(
            data.train, x=x.new_empty(0, *x.shape[1:]).cpu(), y=y.new_empty(0, *y.shape[1:]).cpu()
        )
        return cls(
            Packed.of(x), Packed.of(y), replace(data, train=none, test=none, val=None, proxy=None)
        )

    def federated(self, device: torch.device) -> FederatedData:
        """Return the data on `device`, with an empty test set.

        On the CPU nothing is copied, and all actors of a node read the same memory.
        """
        train = replace(self.rest.train, x=self.x.view().to(device), y=self.y.view().to(device))
        return replace(self.rest, train=train, test=replace(train, x=train.x[:0], y=train.y[:0]))


@dataclass(frozen=True, eq=False)
class SentJob:
    """A job that refers to its trees by their keys in `JobBatch.trees`.

    The field `job` has no trees.
    """

    job: ClientJob
    params: int
    buffers: int
    shared: dict[str, int]
    state: dict[str, int] | None


@dataclass(frozen=True, eq=False)
class JobBatch:
    """Chunks of jobs for one actor.

    Args:
        data: Reference to a `SentData` in the object store.
        trees: Each distinct tree once, by key. If several jobs use a tree, the value is
            a reference to it in the object store. Otherwise it is the packed tree.
        chunks: Jobs of each chunk.
        targets: Import paths of the plug-ins that the jobs use.
        code: Fingerprint of the code of the run's process for these plug-ins.
    """

    data: Any
    trees: dict[int, Any]
    chunks: list[list[SentJob]]
    targets: tuple[str, ...]
    code: str


@dataclass(frozen=True, eq=False)
class SentResult:
    """A `ClientResult` whose trees are packed as bytes.

    The field `rest` has no trees.
    """

    rest: ClientResult
    params: PackedTree
    buffers: PackedTree
    payload: PackedTrees
    state: PackedTrees | None
    probes: PackedTrees

    @classmethod
    def of(cls, result: ClientResult) -> SentResult:
        weights, state = result.weights, result.state
        return cls(
            replace(
                result,
                weights=Weights(weights.spec, {}, {}),
                payload={},
                state=None,
                probes={},
                known_finite=None,
            ),
            pack(weights.params),
            pack(weights.buffers),
            _packed(result.payload),
            None if state is None else _packed(state),
            _packed(result.probes),
        )

    def result(self, device: torch.device) -> ClientResult:
        return replace(
            self.rest,
            weights=Weights(
                self.rest.weights.spec, unpack(self.params, device), unpack(self.buffers, device)
            ),
            payload=_unpacked(self.payload, device),
            state=None if self.state is None else _unpacked(self.state, device),
            probes=_unpacked(self.probes, device),
        )


@dataclass(frozen=True, eq=False)
class Reply:
    """Results of a batch, chunk by chunk, up to the first failure.

    Args:
        chunks: Results of each chunk.
        failure: Error that ended the last chunk, or None.
        stacked: Number of local steps of this batch that ran stacked.
        notes: Notes for the user.
    """

    chunks: list[list[SentResult]]
    failure: FedexpError | None
    stacked: int
    notes: list[str]


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
        self._keys: dict[tuple[object, ...], int] = {}
        self._trees: list[Tree] = []
        self._uses: list[int] = []
        self._references: dict[int, Any] = {}
        self._jobs = [self._sent(job) for job in jobs]

    def batch(
        self, chunks: Sequence[Sequence[int]], data: Any, targets: tuple[str, ...], code: str
    ) -> JobBatch:
        sent = [[self._jobs[position] for position in chunk] for chunk in chunks]
        keys = {key for chunk in sent for job in chunk for key in _keys(job)}
        return JobBatch(
            data, {key: self._travelling(key) for key in sorted(keys)}, sent, targets, code
        )

    def own_bytes(self, position: int) -> int:
        """Return the bytes of the model that job `position` starts from.

        The job's result has about the same size.
        """
        job = self._jobs[position]
        return num_bytes(self._trees[job.params]) + num_bytes(self._trees[job.buffers])

    def _sent(self, job: ClientJob) -> SentJob:
        return SentJob(
            replace(job, start=Weights(job.start.spec, {}, {}), shared={}, state=None),
            self._key(job.start.params),
            self._key(job.start.buffers),
            {name: self._key(tree) for name, tree in job.shared.items()},
            None
            if job.state is None
            else {name: self._key(tree) for name, tree in job.state.items()},
        )

    def _key(self, tree: Tree) -> int:
        identity = (*tree, *map(id, tree.values()))
        key = self._keys.setdefault(identity, len(self._trees))
        if key == len(self._trees):
            self._trees.append(tree)  # kept alive, so that no id is used twice
            self._uses.append(0)
        self._uses[key] += 1
        return key

    def _travelling(self, key: int) -> Any:
        if self._uses[key] == 1 or not self._trees[key]:
            return pack(self._trees[key])
        if key not in self._references:
            self._references[key] = self._put(pack(self._trees[key]))
        return self._references[key]


def _keys(job: SentJob) -> list[int]:
    return [job.params, job.buffers, *job.shared.values(), *(job.state or {}).values()]


def rebuilt(
    sent: SentJob, trees: Mapping[int, Tree], starts: dict[tuple[int, int], Weights]
) -> ClientJob:
    """Return the original job of a `SentJob`.

    Jobs that shared a start model share it again. For this, the start models are stored
    in `starts`, by the keys of their parameters and buffers.
    """
    key = (sent.params, sent.buffers)
    if key not in starts:
        starts[key] = Weights(sent.job.start.spec, trees[sent.params], trees[sent.buffers])
    return replace(
        sent.job,
        start=starts[key],
        shared={name: trees[k] for name, k in sent.shared.items()},
        state=None if sent.state is None else {name: trees[k] for name, k in sent.state.items()},
    )


def _packed(trees: Trees) -> PackedTrees:
    return {name: pack(tree) for name, tree in trees.items()}


def _unpacked(packed: PackedTrees, device: torch.device) -> dict[str, Tree]:
    return {name: unpack(tree, device) for name, tree in packed.items()}
