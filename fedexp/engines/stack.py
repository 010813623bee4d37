"""Training of several clients as one batched computation, called a stack.

The clients' tensors are stacked along a new first axis, and their local steps are taken
together. The order of operations in a step is that of the step kernel
(`fedexp.core.kernel`). Each client takes the same steps as if it trained on its own.
Only the last bits of its results depend on other clients, namely on the numbers of
samples and epochs of all clients in the stack.

A stack's kernel (`StackKernel`) computes the gradients of its clients. If the kernel
pads batches, all clients take a step together. For other kernels, the clients are
divided into groups in each step. The clients of a group have batches of the same length
and are in the same epoch. Clients are sorted by their number of steps and samples. A
group is therefore a range of clients, and its tensors are views.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, islice, pairwise
from operator import itemgetter
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import Tensor

from fedexp.core import trees
from fedexp.core.data import Samples
from fedexp.core.device import chunk_bytes, on_cpu, to_device, wide
from fedexp.core.jobs import ClientJob, ClientResult
from fedexp.core.kernel import (
    Schedule,
    StepNoise,
    by_name,
    call_finish,
    check_measured,
    check_unchanged,
    context,
    epoch_order,
    last_epoch,
    overrides,
    schedule_of,
    take_step,
    tensor_versions,
)
from fedexp.core.local_optimizers import LocalOptimizer
from fedexp.core.net import Net
from fedexp.core.task import Metrics
from fedexp.core.trainer import Adjustment, Ascent, Ctx, Received, Trainer
from fedexp.core.trees import Tree, Trees
from fedexp.core.weights import Weights
from fedexp.engines.kernels.kernel import (
    FusedKernel,
    StackBatch,
    StackedVectors,
    StackKernel,
    StackTrees,
    UnlikeClientsError,
    UnlikeJobsError,
)


@dataclass(frozen=True, eq=False)
class _StackedClient:
    """One client of a stack."""

    job: ClientJob
    index: Tensor
    schedule: Schedule
    noise: StepNoise
    ctx: Ctx
    versions: list[int]  # of the job's tensors, before the first hook is called


def train_stack(
    jobs: Sequence[ClientJob],
    net: Net,
    samples: Samples,
    indices: Sequence[Tensor],
    num_classes: int,
    kind: type[StackKernel],
) -> tuple[list[int], Iterator[ClientResult]]:
    """Train `jobs` as one stack.

    The jobs may differ only in their client, start model, seed, number of epochs, and
    the values of broadcast trees and client states. Training has finished when this
    function returns. The payload and the new state of a client are computed only when
    its result is requested. They are then still in the processor's cache when the
    server reads them.

    Args:
        jobs: Jobs of the stack.
        net: Network of the model spec that all jobs have.
        samples: Training pool, which contains the samples of all clients.
        indices: For each client, the positions of its samples in `samples`, (n,) int64,
            on the CPU.
        num_classes: Number of classes.
        kind: Class of the kernel that computes the gradients.

    Returns:
        For each job, the number of steps that were taken together with another client,
        and the results in the order of the jobs.
    """
    clients = []
    for job, index in zip(jobs, indices, strict=True):
        schedule, noise = schedule_of(job, net, len(index)), StepNoise(job.seed, samples.x.device)
        ctx = context(job, net, samples, index, num_classes, len(schedule), noise)
        clients.append(_StackedClient(job, index, schedule, noise, ctx, tensor_versions(job)))

    # Clients are ordered by descending number of steps, so the clients that still train
    # are always the first ones. Without padding, clients with equally many steps are
    # ordered by descending number of samples, so that batches of equal length are
    # adjacent.
    def position(i: int) -> tuple[int, int]:
        return -len(clients[i].schedule), 0 if kind.pads else -len(clients[i].index)

    order = sorted(range(len(jobs)), key=position)
    clients = [clients[i] for i in order]
    net.train()

    training = _Training(clients, net, kind)
    for batch in _batches(clients, samples, kind.pads):
        training.step(batch)
    training.end()
    places = [order.index(i) for i in range(len(jobs))]
    return [training.stacked_steps[i] for i in places], map(training.result, places)


@dataclass(frozen=True, eq=False)
class _Group:
    """The clients of a stack that take a step together.

    All tensors are views of the tensors of the whole stack.
    """

    stack: StackTrees
    optimizer: LocalOptimizer
    adjustment: Adjustment | None
    correct: Callable[[Tree, Tree], Tree] | None
    after_step: Callable[[Tree], Tree] | None


class _Training:
    """The joint training of the clients of a stack.

    It has the trees of all clients, and the kernel, optimizer and hooks that change
    these trees.

    Attributes:
        stacked_steps: For each client, the number of steps that it took together with
            another client. It is set by `end`.
    """

    def __init__(
        self, clients: Sequence[_StackedClient], net: Net, kind: type[StackKernel]
    ) -> None:
        """Prepare the trees and hooks.

        `clients` are sorted by descending number of steps.
        """
        first = clients[0].job
        trainer = first.trainer
        local_training = first.local_training
        contexts = [client.ctx for client in clients]
        hooks = [
            _on_stack(trainer, name, net) if overrides(trainer, name) else None
            for name in ("correct", "after_step")
        ]

        self._clients, self._net, self._first, self._hooks = clients, net, first, hooks
        self._whole = _stacked(clients, state=any(hooks) or kind.reads_context(trainer))

        self._kernel = kind(first, net)
        self._ascent = _ascent(trainer, contexts)
        self._adjustment = _adjustment(trainer, contexts, net)
        between = any(hooks) or local_training.clip is not None or local_training.weight_decay
        fused = (
            self._kernel
            if isinstance(self._kernel, FusedKernel) and local_training.optimizer == "sgd"
            else None
        )
        self._fused = (
            fused if fused and not between and (not self._ascent or fused.fuses_ascent) else None
        )

        self._optimizer = LocalOptimizer(local_training)
        if self._fused is None:
            self._optimizer.start(list(self._whole.live.values()))

        # Measured values by name. Each batch adds one tensor of shape (clients,).
        self._measured: defaultdict[str, list[Tensor]] = defaultdict(list)
        self._measured_of: list[slice] = []  # the clients of each batch
        self._groups: dict[tuple[int, int], _Group] = {}

    def step(self, batch: StackBatch) -> None:
        """Take one step of each client in `batch`."""
        names = sorted(self._kernel.alike)
        parts = _runs([[getattr(ctx, name) for name in names] for ctx in batch.own])
        if len(parts) > 1:
            for start, stop in parts:
                self.step(batch.of_clients(start, stop))
            return

        try:
            self._step(batch)
        except UnlikeClientsError:
            self.step(batch)

    def _step(self, batch: StackBatch) -> None:
        group = self._group(batch.clients)
        if self._fused:
            scalars = self._fused.descend(group.stack, batch, group.adjustment, self._ascent)
            self._measure(scalars, batch.clients)
            return

        if self._ascent is None:
            grads, loss = self._kernel.gradients(group.stack, batch)
            self._measure(by_name(loss), batch.clients)
        else:
            grads, loss, norm = self._kernel.gradients_uphill(group.stack, batch, self._ascent)
            self._measure({**by_name(loss), "perturbation": norm}, batch.clients)

        group.optimizer.steps_taken = batch.own[0].step
        take_step(
            grads,
            group.stack.live,
            group.stack.start,
            self._first.local_training,
            group.optimizer,
            group.adjustment,
            group.correct,
            StackedVectors,
            group.after_step,
        )

    def _measure(self, scalars: Tree, clients: slice) -> None:
        self._measured_of.append(clients)
        for name, values in scalars.items():
            self._measured[name].append(values)

    def _group(self, clients: slice) -> _Group:
        """Return the group of these clients. Each group is made once."""
        key = clients.start, clients.stop
        if key not in self._groups:
            stack = _part(self._whole, clients)
            common_ctx = _shared_context(self._clients[0], stack)
            own = [client.ctx for client in self._clients[clients]]
            hooks = (hook and partial(hook, common_ctx, own) for hook in self._hooks)
            adjustment = self._adjustment and _changed(
                self._adjustment, lambda value: value[clients]
            )
            optimizer = self._optimizer.of_clients(clients)
            self._groups[key] = _Group(stack, optimizer, adjustment, *hooks)
        return self._groups[key]

    def end(self) -> None:
        """Finish training. Only `result` may be called afterwards."""
        check_measured(self._measured, len(self._measured_of))
        places = [(i.start, i.stop) for i in self._measured_of]
        self._rows, self._finite = self._numbers(places)
        self.stacked_steps = [0] * len(self._clients)
        for start, stop in places:
            for i in range(start, stop):
                self.stacked_steps[i] += stop - start > 1

    def _numbers(
        self, places: Sequence[tuple[int, int]]
    ) -> tuple[dict[str, list[list[float]]], bool]:
        """Return the measured values, and whether all models are known to be finite.

        Reading a number from a GPU waits for all its work, so all numbers are read at
        once. They include a number that shows whether the models are finite. On a CPU,
        reading a number costs nothing, so the models are not checked here. They are
        checked later, when the server reads them and they are in the processor's cache.

        Args:
            places: The clients of each batch, as a range of positions.

        Returns:
            The measured values by name and client, in the order of the client's steps.
            Then True if all models are finite, or False if this is not the case or not
            known.
        """
        tree = {**self._whole.params, **self._whole.buffers}
        unknown = all(on_cpu(value.device) for value in tree.values())
        device = self._measured["loss"][0].device
        # Values that a trainer measures may have another dtype or device than the loss.
        values = [wide(torch.cat(batches)).to(device) for batches in self._measured.values()]
        if not unknown:
            values.append(wide(trees.total(tree.values())).to(device).view(1))
        numbers = iter(torch.cat(values).tolist())

        rows: dict[str, list[list[float]]] = {}
        for name in self._measured:
            rows[name] = [[] for _ in self._clients]
            for start, stop in places:
                for row, value in zip(
                    rows[name][start:stop], islice(numbers, stop - start), strict=True
                ):
                    row.append(value)
        return rows, not unknown and math.isfinite(next(numbers))

    def _metrics(self, i: int) -> Metrics:
        schedule = self._clients[i].schedule

        own = {name: rows[i] for name, rows in self._rows.items()}
        last = own["loss"][last_epoch(schedule) :]
        return {name: sum(values) / len(values) for name, values in own.items()} | {
            "loss_last_epoch": sum(last) / len(last)
        }

    def result(self, i: int) -> ClientResult:
        """Return the result of the i-th client."""
        client, net = self._clients[i], self._net
        job = client.job

        params = {name: value[i] for name, value in self._whole.params.items()}
        buffers = {name: value[i] for name, value in self._whole.buffers.items()}
        net.train()
        net.set_noise(client.noise)

        payload, state = call_finish(
            job.trainer, {name: params[name] for name in self._whole.live}, buffers, client.ctx
        )
        net.set_noise(None)
        check_unchanged(job, client.versions)

        weights = Weights(job.start.spec, params, buffers)
        return ClientResult(
            client=job.client,
            weights=weights,
            num_examples=len(client.index),
            num_steps=len(client.schedule),
            payload=payload,
            state=state,
            metrics=self._metrics(i),
            known_finite=weights if self._finite else None,
        )


def _stacked(clients: Sequence[_StackedClient], state: bool) -> StackTrees:
    """Return the trees of all clients. Client states are included if `state` is true.

    Raises:
        UnlikeJobsError: A broadcast tensor or a tensor of the client states has another
            shape for another client.
    """
    first, own = clients[0].job, [client.ctx for client in clients]
    _check_shapes([ctx.shared for ctx in own])
    if state:
        _check_shapes([ctx.state for ctx in own])

    received = Received(
        _joined([ctx.received.params for ctx in own]),
        _joined([ctx.received.buffers for ctx in own]),
    )
    return StackTrees(
        params=_contiguous_copies(received.params),
        buffers=_contiguous_copies(received.buffers),
        trained=tuple(own[0].start),
        received=received,
        shared={name: _joined([ctx.shared[name] for ctx in own]) for name in first.shared},
        state={name: _joined([ctx.state[name] for ctx in own]) for name in own[0].state}
        if state
        else {},
    )


def _check_shapes(trees_of_all: Sequence[Trees]) -> None:
    """Refuse tensors of one name that differ in shape from client to client."""
    for group, tree in trees_of_all[0].items():
        for name, value in tree.items():
            if any(trees_of_one[group][name].shape != value.shape for trees_of_one in trees_of_all):
                raise UnlikeJobsError(
                    f"its tensor '{name}' of '{group}' differs in shape from client to client"
                )


def _runs(keys: Sequence[object]) -> list[tuple[int, int]]:
    """Return the ranges (start, stop) of consecutive equal keys."""
    changes = [i for i in range(1, len(keys)) if keys[i] != keys[i - 1]]
    return list(pairwise([0, *changes, len(keys)]))


def _contiguous_copies(tree: Tree) -> Tree:
    return {
        name: value.clone(memory_format=torch.contiguous_format) for name, value in tree.items()
    }


def _joined(trees: list[Tree]) -> Tree:
    """Return the trees stacked along a first axis.

    A tensor that all clients share is repeated without a copy.
    """
    joined: Tree = {}
    for name, value in trees[0].items():
        same = all(tree[name] is value for tree in trees)
        joined[name] = (
            value.expand(len(trees), *value.shape)
            if same
            else torch.stack([tree[name] for tree in trees])
        )
    return joined


def _part(stack: StackTrees, clients: slice) -> StackTrees:
    """Return the trees of some of the clients, as views."""

    def cut(tree: Tree) -> Tree:
        return {name: value[clients] for name, value in tree.items()}

    return StackTrees(
        params=cut(stack.params),
        buffers=cut(stack.buffers),
        trained=stack.trained,
        received=Received(cut(stack.received.params), cut(stack.received.buffers)),
        shared={name: cut(tree) for name, tree in stack.shared.items()},
        state={name: cut(tree) for name, tree in stack.state.items()},
    )


def _shared_context(client: _StackedClient, stack: StackTrees) -> Ctx:
    """Return one context for all clients of a stack, for hooks marked elementwise.

    An elementwise hook is called once with the stacked trees of all clients. Fields
    that such a hook may not use raise an error or are NaN.
    """

    def refuse(*arguments: Any, **named: Any) -> NoReturn:
        raise RuntimeError(
            f"a hook of {type(client.job.trainer).__name__} is marked elementwise "
            "and uses noise, full gradients, class counts "
            "or other networks"
        )

    unknown: Any = math.nan
    return replace(
        _without_numbers(client.ctx),
        start=stack.start,
        received=stack.received,
        shared=stack.shared,
        state=stack.state,
        net=SimpleNamespace(beside=refuse, spec=None),  # type: ignore[arg-type]
        clock=SimpleNamespace(step=unknown, epoch=unknown),
        once=refuse,
        noise=refuse,
        full_gradient=refuse,
        count_classes=refuse,
    )


def _without_numbers(ctx: Ctx) -> Ctx:
    """Return a context in which the numbers that differ between clients are NaN."""
    local_training = copy.copy(ctx.local_training)
    # `replace` would refuse the value.
    object.__setattr__(local_training, "epochs", math.nan)
    unknown: Any = math.nan
    return replace(ctx, num_examples=unknown, num_steps=unknown, local_training=local_training)


StackHook = Callable[..., Tree]  # (common context, context of each client, trees ...)


def _ascent(trainer: Trainer, own: Sequence[Ctx]) -> Ascent | None:
    """Return the ascent that all clients have, or None if the trainer has no ascent.

    Raises:
        UnlikeJobsError: The ascents differ from client to client.
    """
    if not overrides(trainer, "ascent"):
        return None
    ascents = {trainer.ascent(ctx) for ctx in own}
    if len(ascents) > 1:
        raise UnlikeJobsError("its ascents differ from client to client")
    return ascents.pop()


def _adjustment(trainer: Trainer, own: Sequence[Ctx], net: Net) -> Adjustment | None:
    """Return the stacked adjustments of all clients, or None if there are none.

    An elementwise adjustment is made once if all clients have the same tensors.
    Otherwise one adjustment is made per client, and its tensors are copied into the
    stack immediately. Stacking them later would move twice as much memory.

    Raises:
        UnlikeJobsError: The adjustments differ in more than their trees.
    """
    if not overrides(trainer, "adjustment"):
        return None

    elementwise = getattr(trainer.adjustment, "elementwise", False)
    if elementwise and len({_identity(ctx) for ctx in own}) == 1:
        common = trainer.adjustment(_without_numbers(own[0]))
        return common and _changed(common, lambda value: value.expand(len(own), *value.shape))

    kinds = set()
    rows: dict[str, Tree] = {}
    for i, ctx in enumerate(own):
        net.set_noise(ctx.noise)
        how = trainer.adjustment(ctx)
        parts = _parts(how)
        kinds.add(how and (how.gradient, how.pull, *parts))
        if len(kinds) > 1:
            raise UnlikeJobsError(
                "its adjustments differ from client to client in more than their trees"
            )

        for part, tree in parts.items():
            for name, value in tree.items():
                if not i:
                    rows.setdefault(part, {})[name] = value.new_empty(len(own), *value.shape)
                rows[part][name][i] = value

    net.set_noise(None)
    return how and Adjustment(how.gradient, how.pull, **rows)


def _identity(ctx: Ctx) -> tuple[int, ...]:
    """Return a value that is equal for contexts with the same tensor objects."""
    return tuple(
        id(v)
        for tree in (ctx.start, *ctx.shared.values(), *ctx.state.values())
        for v in tree.values()
    )


def _changed(how: Adjustment, change: Callable[[Tensor], Tensor]) -> Adjustment:
    """Return an adjustment with `change` applied to each of its tensors."""
    parts = {
        part: {name: change(v) for name, v in tree.items()} for part, tree in _parts(how).items()
    }
    return Adjustment(how.gradient, how.pull, **parts)


def _parts(how: Adjustment | None) -> dict[str, Tree]:
    """Return the trees that an adjustment has, by name."""
    parts = (
        {"toward": how.toward, "shift": how.shift, "outside": how.outside}
        if how is not None
        else {}
    )
    return {part: tree for part, tree in parts.items() if tree is not None}


def _on_stack(trainer: Trainer, name: str, net: Net) -> StackHook:
    """Return a trainer's hook as a function of stacked trees.

    If the trainer's hook is elementwise, it is called once for all clients. Otherwise
    it is called once per client.
    """
    hook: Callable[..., Tree] = getattr(trainer, name)

    def at_once(common_ctx: Ctx, own: Sequence[Ctx], *trees: Tree) -> Tree:
        return hook(*trees, common_ctx)

    def one_by_one(common_ctx: Ctx, own: Sequence[Ctx], *trees: Tree) -> Tree:
        results = []
        for i, ctx in enumerate(own):
            net.set_noise(ctx.noise)
            results.append(hook(*({name: v[i] for name, v in tree.items()} for tree in trees), ctx))
        net.set_noise(None)
        return _joined(results)

    return at_once if getattr(hook, "elementwise", False) else one_by_one


def _batches(
    clients: Sequence[_StackedClient], samples: Samples, pads: bool
) -> Iterator[StackBatch]:
    """Yield, for each step, the batches of the clients that still train.

    Each client has its own order of samples. To save calls, the samples of several
    steps are read from `samples` in one operation.

    Args:
        clients: Clients by descending number of steps.
        samples: Training pool, which contains the samples of all clients.
        pads: Whether one batch contains all clients that take the step. Otherwise the
            clients of a batch are in the same epoch and have equally many samples in
            it.
    """
    schedules = [client.schedule for client in clients]
    b = max(stop - start for schedule in schedules for _, start, stop in schedule)
    sample_bytes = max(1, samples.x[:1].numel()) * samples.dtype.itemsize
    orders: list[tuple[int, Tensor]] = [(-1, client.index) for client in clients]
    device = samples.x.device
    position, last = 0, len(schedules[0])

    while position < last:
        k = sum(len(schedule) > position for schedule in schedules)
        steps = min(last - position, max(1, chunk_bytes(device) // (sample_bytes * b * k)))

        index = torch.zeros((k, steps, b), dtype=torch.int64)
        sizes = [[0] * k for _ in range(steps)]

        for c in range(k):
            at = 0
            for epoch, group in groupby(
                schedules[c][position : position + steps], key=itemgetter(0)
            ):
                # The steps of one epoch. Their samples are adjacent in the epoch's
                # order.
                run = list(group)
                start, stop = run[0][1], run[-1][2]
                if orders[c][0] != epoch:
                    orders[c] = epoch, epoch_order(clients[c].job, clients[c].index, epoch)
                index[c, at : at + len(run)].view(-1)[: stop - start] = orders[c][1][start:stop]
                for i, (_, a, z) in enumerate(run):
                    sizes[at + i][c] = z - a
                at += len(run)

        flat = to_device(index.transpose(0, 1).reshape(-1), device)
        x = samples.inputs(flat).view(steps, k, b, *samples.x.shape[1:])
        y = samples.y.index_select(0, flat).view(steps, k, b, *samples.y.shape[1:])

        for i in range(steps):
            count = sum(size > 0 for size in sizes[i])
            epochs = [schedule[position + i][0] for schedule in schedules[:count]]
            groups = _runs(list(zip(sizes[i], epochs, strict=False)))
            for start, stop in [(0, count)] if pads else groups:
                yield _batch(
                    x[i, start:stop],
                    y[i, start:stop],
                    sizes[i][start:stop],
                    position + i,
                    samples,
                    clients,
                    slice(start, stop),
                )

        position += steps


def _batch(
    x: Tensor,
    y: Tensor,
    sizes: list[int],
    step: int,
    samples: Samples,
    everyone: Sequence[_StackedClient],
    clients: slice,
) -> StackBatch:
    own = everyone[clients]
    longest = max(sizes)
    share: float | Tensor = 1 / longest
    if longest < x.shape[1]:
        x, y = x[:, :longest], y[:, :longest]
    if min(sizes) < longest:
        n = to_device(torch.tensor(sizes), x.device).unsqueeze(1)
        share = (torch.arange(longest, device=x.device) < n).to(x.dtype) / n

    if samples.augment is not None:
        x = x.clone()
    for c, client in enumerate(own):
        client.noise.step, client.noise.epoch = step, client.schedule[step][0]
        if samples.augment is not None:
            x[c, : sizes[c]] = samples.augment(x[c, : sizes[c]], client.noise)

    return StackBatch(x, y, share, [client.ctx for client in own], clients)
