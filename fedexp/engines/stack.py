"""Several clients trained as one: their tensors stacked along a first axis, their steps taken together.

The order of a step's operations is the step kernel's (`fedexp.core.kernel`); no client takes a step that it would not take
alone, and no client's numbers depend on another's, their last bits aside: who is padded to whose size decides those.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from fedexp.core.data import Samples
from fedexp.core.jobs import ClientJob, ClientResult
from fedexp.core.kernel import CHUNK_BYTES, StepNoise, context, epoch_order, overrides, schedule_of, take_step
from fedexp.core.local_optimizers import make_optimizer
from fedexp.core.net import Net
from fedexp.core.trainer import Adjustment, Ctx, Trainer
from fedexp.core.trees import Tree
from fedexp.core.weights import Weights
from fedexp.engines.kernels.kernel import NotStackableError, StackBatch, StackKernel, StackTrees

Schedule = list[tuple[int, int, int]]


def train_stack(
    jobs: Sequence[ClientJob], net: Net, samples: Samples, indices: Sequence[Tensor], kind: type[StackKernel]
) -> Iterator[ClientResult]:
    """Train `jobs`, which agree in everything but client, start, seed and trees, as one; results in the jobs' order.

    Training is over when this returns; a client's payload and new state are made when its result is asked for, and are still
    in the processor's cache where the server reads them.

    Args:
        indices: each client's (n,) int64 positions in `samples`, on its device.
    """
    schedules = [schedule_of(job, net, len(index)) for job, index in zip(jobs, indices, strict=True)]
    order = sorted(range(len(jobs)), key=lambda i: -len(schedules[i]))  # those that still train are the first ones
    jobs, indices = [jobs[i] for i in order], [indices[i] for i in order]
    schedules = [schedules[i] for i in order]
    first, trainer, budget = jobs[0], jobs[0].trainer, jobs[0].budget
    steps = [len(schedule) for schedule in schedules]
    noises = [StepNoise(job.seed, samples.x.device) for job in jobs]
    own = [
        context(job, net, samples, index, count, noise)
        for job, index, count, noise in zip(jobs, indices, steps, noises, strict=True)
    ]
    hooks = [_on_stack(trainer, name, net) if overrides(trainer, name) else None for name in ("correct", "after_step")]
    whole = _stacked(jobs, own, steps, state=any(hooks) or kind.reads_state)
    kernel = kind(first, net)
    optimizer = make_optimizer(budget)
    between = any(hooks) or budget.clip is not None or budget.weight_decay or budget.optimizer != "sgd"
    fused = not between and kind.descend is not StackKernel.descend
    losses = torch.zeros(len(jobs), dtype=torch.float64, device=samples.x.device)
    net.train()
    adjustment = _adjustment(trainer, own, net)
    stack, active = whole, len(jobs)
    together = _together(first, stack)
    for step, batch in enumerate(_batches(jobs, samples, indices, schedules, noises)):
        count = len(batch.y)
        if count < active:
            active = count
            stack = _first(whole, count)
            together = _together(first, stack)
            adjustment = adjustment and _cut_adjustment(adjustment, count)
            optimizer.keep(count)
            kernel.keep(count)
        for noise in batch.noises:
            noise.step = step
        loss = kernel.descend(stack, batch, adjustment) if fused else None
        if loss is None:
            grads, loss = kernel.gradients(stack, batch)
            correct, after_step = (hook and partial(hook, together, own[:count]) for hook in hooks)
            take_step(grads, stack.live, stack.start, budget, optimizer, adjustment, correct, _clipped, after_step)
        losses[:count] += loss
    means = (losses / torch.tensor(steps, device=losses.device)).tolist()
    place = {i: at for at, i in enumerate(order)}
    return (
        _result(at, jobs[at], net, whole, own[at], noises[at], len(indices[at]), means[at])
        for at in (place[i] for i in range(len(jobs)))
    )


def _result(
    i: int, job: ClientJob, net: Net, whole: StackTrees, ctx: Ctx, noise: StepNoise, n: int, loss: float
) -> ClientResult:
    params = {name: value[i] for name, value in whole.params.items()}
    buffers = {name: value[i] for name, value in whole.buffers.items()}
    net.train()
    net.set_noise(noise)
    payload, state = job.trainer.finish({name: params[name] for name in whole.live}, ctx)
    net.set_noise(None)
    return ClientResult(
        client=job.client,
        weights=Weights(job.start.spec, params, buffers),
        num_examples=n,
        num_steps=ctx.num_steps,
        payload=payload,
        state=state,
        metrics={"loss": loss},
    )


def _stacked(jobs: Sequence[ClientJob], own: Sequence[Ctx], steps: list[int], state: bool) -> StackTrees:
    first = jobs[0]
    params = _own(_joined([job.start.params for job in jobs]))
    return StackTrees(
        params=params,
        live={name: value for name, value in params.items() if name not in first.frozen},
        buffers=_own(_joined([job.start.buffers for job in jobs])),
        start=_joined([ctx.start for ctx in own]),
        shared={name: _joined([job.shared[name] for job in jobs]) for name in first.shared},
        state={name: _joined([ctx.state[name] for ctx in own]) for name in own[0].state} if state else {},
        num_steps=steps[0] if len(set(steps)) == 1 else None,
    )


def _own(tree: Tree) -> Tree:
    return {name: value.clone(memory_format=torch.contiguous_format) for name, value in tree.items()}


def _joined(trees: list[Tree]) -> Tree:
    """Trees stacked along a first axis; one tensor that all clients share is repeated without a copy."""
    joined: Tree = {}
    for name, value in trees[0].items():
        same = all(tree[name] is value for tree in trees)
        joined[name] = value.expand(len(trees), *value.shape) if same else torch.stack([tree[name] for tree in trees])
    return joined


def _cut(tree: Tree, count: int) -> Tree:
    return {name: value[:count] for name, value in tree.items()}


def _cut_adjustment(whole: Adjustment, count: int) -> Adjustment:
    shift, outside = (None if tree is None else _cut(tree, count) for tree in (whole.shift, whole.outside))
    return replace(whole, shift=shift, outside=outside)


def _first(stack: StackTrees, count: int) -> StackTrees:
    params = _cut(stack.params, count)
    return StackTrees(
        params=params,
        live={name: params[name] for name in stack.live},
        buffers=_cut(stack.buffers, count),
        start=_cut(stack.start, count),
        shared={name: _cut(tree, count) for name, tree in stack.shared.items()},
        state={name: _cut(tree, count) for name, tree in stack.state.items()},
        num_steps=stack.num_steps,
    )


def _together(job: ClientJob, stack: StackTrees) -> Ctx:
    """The context of an elementwise hook for all clients of a stack; what such a hook may not use fails or is NaN."""

    def refuse(*arguments: Any, **named: Any) -> NoReturn:
        raise RuntimeError(
            f"a hook of {type(job.trainer).__name__} is marked elementwise and uses noise or full gradients"
        )

    steps: Any = math.nan
    return Ctx(stack.start, stack.shared, stack.state, job.task, job.budget, steps, refuse, refuse)


StackHook = Callable[..., Tree]  # (context of all, contexts of each, trees ...)


def _adjustment(trainer: Trainer, own: Sequence[Ctx], net: Net) -> Adjustment | None:
    """The stack's adjustment; raises `NotStackableError` where clients differ in more than their trees.

    Made client by client, each copied at once: stacking what it is made of would move twice as much memory.
    """
    if not overrides(trainer, "adjustment"):
        return None
    elementwise = getattr(trainer.adjustment, "elementwise", False)
    if elementwise and len({_identity(ctx) for ctx in own}) == 1:
        common = trainer.adjustment(own[0])
        return common and replace(
            common, shift=_repeated(common.shift, len(own)), outside=_repeated(common.outside, len(own))
        )
    kinds = set()
    shift: Tree = {}
    outside: Tree = {}
    for i, ctx in enumerate(own):
        net.set_noise(ctx.noise)
        how = trainer.adjustment(ctx)
        kinds.add(how and (how.gradient, how.pull, how.shift is None, how.outside is None))
        if len(kinds) > 1:
            raise NotStackableError
        for rows, tree in ((shift, how.shift), (outside, how.outside)) if how is not None else ():
            for name, value in (tree or {}).items():
                if not i:
                    rows[name] = value.new_empty(len(own), *value.shape)
                rows[name][i] = value
    net.set_noise(None)
    return how and replace(how, shift=shift or None, outside=outside or None)


def _identity(ctx: Ctx) -> tuple[int, ...]:
    """Equal for contexts that hold the very same tensors."""
    return tuple(id(v) for tree in (ctx.start, *ctx.shared.values(), *ctx.state.values()) for v in tree.values())


def _repeated(tree: Tree | None, count: int) -> Tree | None:
    return tree and {name: value.expand(count, *value.shape) for name, value in tree.items()}


def _on_stack(trainer: Trainer, name: str, net: Net) -> StackHook:
    """A trainer's hook on stacked trees: at once if it is elementwise, else client by client."""
    hook: Callable[..., Tree] = getattr(trainer, name)

    def at_once(together: Ctx, own: Sequence[Ctx], *trees: Tree) -> Tree:
        return hook(*trees, together)

    def one_by_one(together: Ctx, own: Sequence[Ctx], *trees: Tree) -> Tree:
        results = []
        for i, ctx in enumerate(own):
            net.set_noise(ctx.noise)
            results.append(hook(*({name: v[i] for name, v in tree.items()} for tree in trees), ctx))
        net.set_noise(None)
        return _joined(results)

    return at_once if getattr(hook, "elementwise", False) else one_by_one


def _clipped(grads: list[Tensor], bound: float) -> list[Tensor]:
    """As the step kernel's, with a norm for each client."""
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g.flatten(1), dim=1) for g in grads]), dim=0)
    factor = torch.where(norm > bound, bound / (norm + 1e-6), torch.ones_like(norm))
    return [g * factor.reshape(-1, *[1] * (g.dim() - 1)) for g in grads]


def _batches(
    jobs: Sequence[ClientJob],
    samples: Samples,
    indices: Sequence[Tensor],
    schedules: Sequence[Schedule],
    noises: list[StepNoise],
) -> Iterator[StackBatch]:
    """Every step's batches of the clients that still train: each client's own order, gathered in chunks of steps."""
    b = max(stop - start for schedule in schedules for _, start, stop in schedule)
    sample_bytes = max(1, samples.x[:1].numel()) * samples.dtype.itemsize
    orders: list[tuple[int, Tensor]] = [(-1, index) for index in indices]
    device = samples.x.device
    position, last = 0, len(schedules[0])
    while position < last:
        k = sum(len(schedule) > position for schedule in schedules)
        steps = min(last - position, max(1, CHUNK_BYTES // (sample_bytes * b * k)))
        index = torch.zeros((k, steps, b), dtype=torch.int64, device=device)
        sizes = [[0] * k for _ in range(steps)]
        for c in range(k):
            for at, run in _runs(schedules[c][position : position + steps]):
                epoch, start = run[0][:2]
                if orders[c][0] != epoch:
                    orders[c] = epoch, epoch_order(jobs[c], indices[c], epoch)
                index[c, at : at + len(run)].view(-1)[: run[-1][2] - start] = orders[c][1][start : run[-1][2]]
                for i, (_, a, z) in enumerate(run):
                    sizes[at + i][c] = z - a
        flat = index.transpose(0, 1).reshape(-1)
        x = samples.inputs(flat).view(steps, k, b, *samples.x.shape[1:])
        y = samples.y.index_select(0, flat).view(steps, k, b, *samples.y.shape[1:])
        for i in range(steps):
            count = sum(size > 0 for size in sizes[i])
            yield _batch(x[i, :count], y[i, :count], sizes[i][:count], position + i, samples, noises[:count])
        position += steps


def _batch(x: Tensor, y: Tensor, sizes: list[int], step: int, samples: Samples, noises: list[StepNoise]) -> StackBatch:
    longest = max(sizes)
    share: float | Tensor = 1 / longest
    if longest < x.shape[1]:
        x, y = x[:, :longest], y[:, :longest]
    if min(sizes) < longest:
        n = torch.tensor(sizes, device=x.device).unsqueeze(1)
        share = (torch.arange(longest, device=x.device) < n).to(x.dtype) / n
    if samples.augment is not None:
        x = x.clone()
        for c, (size, noise) in enumerate(zip(sizes, noises, strict=True)):
            noise.step = step
            x[c, :size] = samples.augment(x[c, :size], noise)
    return StackBatch(x, y, share, noises)


def _runs(schedule: Schedule) -> Iterator[tuple[int, Schedule]]:
    """Position and steps of every stretch whose samples lie one after the other in one epoch's order."""
    at = 0
    while at < len(schedule):
        end = at + 1
        while end < len(schedule) and schedule[end][0] == schedule[at][0] and schedule[end][1] == schedule[end - 1][2]:
            end += 1
        yield at, schedule[at:end]
        at = end
