"""The step kernel: one client's local training, from job to result.

`Trainer` documents the order of operations in a step.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial

import torch
from torch import Tensor

from fedexp.core import trees
from fedexp.core.data import FederatedData, Samples, count_classes
from fedexp.core.device import chunk_bytes, on_cpu, to_device, wide
from fedexp.core.errors import ClientError
from fedexp.core.jobs import ClientJob, ClientResult
from fedexp.core.local_optimizers import LocalOptimizer
from fedexp.core.local_training import LocalTraining
from fedexp.core.net import Net
from fedexp.core.result_check import check_pair, check_trees
from fedexp.core.seeds import seed_of, torch_generator
from fedexp.core.task import Batch, Metrics
from fedexp.core.trainer import Adjustment, Ascent, Clock, Ctx, Measured, Received, Trainer
from fedexp.core.trees import Tree, Trees
from fedexp.core.user_code import place_of_class
from fedexp.core.weights import Weights

# Names of the scalars that kernels measure. A trainer's scalars must have other names.
_OWN_NAMES = {"loss", "loss_last_epoch", "perturbation"}

# (epoch, start, stop) of every local step. Its batch has the samples at the positions
# start to stop - 1 in the order of the epoch.
Schedule = list[tuple[int, int, int]]


class Vectors:
    """Operations on all gradients of a client, which together form one vector."""

    @staticmethod
    def norm(tensors: list[Tensor]) -> Tensor:
        """Return the Euclidean norm over all tensors, without a synchronisation."""
        return trees.joint_norm(tensors)

    @staticmethod
    def scaled(tensors: list[Tensor], factor: Tensor) -> list[Tensor]:
        return list(torch._foreach_mul(tensors, factor))

    @staticmethod
    def moved(tensors: list[Tensor], along: list[Tensor], factor: Tensor) -> list[Tensor]:
        """Return new tensors ``tensors + factor * along``.

        On a CPU each tensor is read and written once. On other devices two kernel
        launches compute all tensors together.
        """
        if on_cpu(factor.device):
            return [value.addcmul(step, factor) for value, step in zip(tensors, along, strict=True)]
        return list(torch._foreach_add(tensors, torch._foreach_mul(along, factor)))


def train_client(
    job: ClientJob, net: Net, samples: Samples, index: Tensor, num_classes: int
) -> ClientResult:
    """Run `job` on the client's data.

    The result depends only on the job and the data, not on earlier uses of `net`.

    Args:
        job: The client's work.
        net: A network of ``job.start.spec``.
        samples: The training pool.
        index: (n,) int64 positions of this client's samples in the pool, on the CPU.
        num_classes: Number of classes of the data set.
    """
    trainer, local_training = job.trainer, job.local_training
    schedule = schedule_of(job, net, len(index))

    params = trees.clone(job.start.params)
    buffers = trees.clone(job.start.buffers)
    trainable = {
        name: value.requires_grad_() for name, value in params.items() if name not in job.frozen
    }
    # Detached views of the trainable parameters, which are changed in place.
    values = {name: value.detach() for name, value in trainable.items()}

    noise = StepNoise(job.seed, samples.x.device)
    ctx = context(job, net, samples, index, num_classes, len(schedule), noise)
    correct = (
        (lambda grad, params: trainer.correct(grad, params, ctx))
        if overrides(trainer, "correct")
        else None
    )
    after_step = (
        (lambda params: trainer.after_step(params, ctx))
        if overrides(trainer, "after_step")
        else None
    )

    optimizer = LocalOptimizer(local_training)
    measured: defaultdict[str, list[Tensor]] = defaultdict(list)
    versions = tensor_versions(job)
    net.train()
    net.set_noise(noise)
    adjustment, ascent = trainer.adjustment(ctx), trainer.ascent(ctx)

    for step, batch in enumerate(batches(job, samples, index, schedule, noise)):
        noise.step, noise.epoch = step, schedule[step][0]
        grad, loss = trainer.grad(net, params, buffers, batch, ctx)
        scalars = by_name(loss)
        if ascent is not None:

            def gradient_at(there: Tree, batch: Batch = batch) -> Tree:
                live = {name: value.requires_grad_() for name, value in there.items()}
                return trainer.grad(net, {**params, **live}, trees.clone(buffers), batch, ctx)[0]

            grad, scalars["perturbation"] = ascended(ascent, grad, values, gradient_at, Vectors)

        for name, value in scalars.items():
            measured[name].append(value)
        take_step(
            grad,
            values,
            ctx.start,
            local_training,
            optimizer,
            adjustment,
            correct,
            Vectors,
            after_step,
        )

    payload, state = call_finish(trainer, values, buffers, ctx)
    net.set_noise(None)
    check_unchanged(job, versions)
    trained = {**params, **values}
    metrics, finite = means(measured, schedule, trees.total([*trained.values(), *buffers.values()]))
    weights = Weights(job.start.spec, trained, buffers)
    return ClientResult(
        client=job.client,
        weights=weights,
        num_examples=len(index),
        num_steps=len(schedule),
        payload=payload,
        state=state,
        metrics=metrics,
        known_finite=weights if finite else None,
    )


def call_finish(
    trainer: Trainer, params: Tree, buffers: Tree, ctx: Ctx
) -> tuple[Trees, Trees | None]:
    """Return the payload and the new state of a client (`Trainer.finish`).

    Raises:
        FedexpError: The hook returned something else.
    """
    found = trainer.finish(params, buffers, ctx)
    check_pair(found, trainer, "finish", "return payload, state")
    payload, state = found
    check_trees(payload, "the payload", trainer, "finish")
    if state is not None:
        check_trees(state, "the new client state", trainer, "finish")
    return payload, state


def by_name(loss: Tensor | Measured) -> dict[str, Tensor]:
    """Return the scalars of one step by name, with the loss first."""
    if not isinstance(loss, Measured):
        return {"loss": loss}
    if taken := _OWN_NAMES & loss.scalars.keys():
        raise ValueError(f"a trainer's scalar must have another name than '{min(taken)}'")
    return {"loss": loss.loss, **loss.scalars}


def means(
    measured: Mapping[str, list[Tensor]], schedule: Schedule, total: Tensor
) -> tuple[Metrics, bool]:
    """Compute a client's metrics from the scalars of every step.

    The device is synchronised only once.

    Args:
        measured: The scalars of every step by name.
        schedule: The steps.
        total: The scalar `trees.total` of the trained model. It is NaN or infinite if
            the model contains NaN or infinity.

    Returns:
        The metrics, and whether `total` is finite. The metrics are the mean of each
        scalar over all steps, and the mean loss over the last epoch. Means are computed
        in float64.
    """
    check_measured(measured, len(schedule))
    stacked = {name: wide(torch.stack(values)) for name, values in measured.items()}
    last = stacked["loss"][last_epoch(schedule) :]
    # A trainer may measure scalars on a device that differs from the loss's device.
    averages = torch.stack([value.mean().to(last.device) for value in stacked.values()])
    numbers = torch.cat([averages, wide(total).to(last.device).view(1), last]).tolist()
    named = dict(zip(stacked, numbers, strict=False))
    losses = numbers[len(named) + 1 :]
    return {**named, "loss_last_epoch": sum(losses) / len(losses)}, math.isfinite(
        numbers[len(named)]
    )


def last_epoch(schedule: Schedule) -> int:
    """Return the index of the first step of the last epoch.

    The last epoch may be incomplete, because of ``limit.steps`` or ``local.steps``.
    """
    return next(step for step, (epoch, _, _) in enumerate(schedule) if epoch == schedule[-1][0])


def check_measured(measured: Mapping[str, list[Tensor]], steps: int) -> None:
    """Check that every scalar was measured exactly once in each batch.

    Raises:
        ValueError: A scalar was measured more than once in a batch, or not at all.
    """
    for name, values in measured.items():
        if len(values) != steps:
            raise ValueError(
                f"'{name}' was measured {len(values)} times in {steps} batches. It must be "
                "once in each"
            )


def ascended(
    ascent: Ascent,
    grad: Tree,
    values: Tree,
    gradient_at: Callable[[Tree], Tree],
    vectors: type[Vectors],
) -> tuple[Tree, Tensor]:
    """Compute the gradient at the perturbed parameters ``values + e``.

    `Ascent` defines the perturbation e.

    Args:
        ascent: Constants of the perturbation.
        grad: Gradient at `values`.
        values: Trained parameters.
        gradient_at: Function that computes the gradient at other parameters.
        vectors: Class of the operations on gradients.

    Returns:
        The gradient at ``values + e``, and the norm of e.
    """
    uphill = trees.tensors(grad, values)
    norm = vectors.norm(uphill)
    factor = ascent.rho / (norm + ascent.eps)
    there = dict(zip(values, vectors.moved(list(values.values()), uphill, factor), strict=True))
    return gradient_at(there), norm * factor


def take_step(
    grad: Tree,
    values: Tree,
    start: Tree,
    local_training: LocalTraining,
    optimizer: LocalOptimizer,
    adjustment: Adjustment | None,
    correct: Callable[[Tree, Tree], Tree] | None,
    vectors: type[Vectors],
    after_step: Callable[[Tree], Tree] | None,
) -> None:
    """Apply all operations of a local step that follow the computation of the gradient.

    `Trainer` documents their order. The parameters `values` are changed in place.
    """
    live = list(values.values())
    if adjustment is not None:
        grad = adjusted(grad, values, start, adjustment)
    if correct is not None:
        grad = correct(grad, values)
    direction = trees.tensors(grad, values)
    if local_training.clip is not None:
        direction = clipped(direction, local_training.clip, vectors)
    if local_training.weight_decay:
        direction = list(torch._foreach_add(direction, live, alpha=local_training.weight_decay))
    optimizer.step(live, direction)
    if adjustment is not None and adjustment.outside is not None:
        outside = trees.tensors(adjustment.outside, values)
        torch._foreach_add_(live, outside, alpha=-local_training.lr)
    if after_step is not None:
        torch._foreach_copy_(live, trees.tensors(after_step(values), values))


def overrides(trainer: Trainer, hook: str) -> bool:
    """Return whether a trainer's class overrides the method `hook` of `Trainer`."""
    return getattr(type(trainer), hook) is not getattr(Trainer, hook)


def tensor_versions(job: ClientJob) -> list[int]:
    """Count the in-place changes of each tensor that the hooks of a job read."""
    trees_read = [job.start.params, job.start.buffers, *job.shared.values()]
    trees_read += (job.state or {}).values()
    # Inference tensors, which a user's server may return, have no such number
    return [
        0 if value.is_inference() else value._version
        for tree in trees_read
        for value in tree.values()
    ]


def check_unchanged(job: ClientJob, versions: list[int]) -> None:
    """Refuse a trainer whose hooks changed a tensor that they may only read.

    Other clients read the same tensors, so a changed tensor would change their results.

    Args:
        job: The job, after its hooks were called.
        versions: The result of `tensor_versions` before the first hook was called.

    Raises:
        ClientError: A hook changed a tensor in place.
    """
    if tensor_versions(job) != versions:
        raise ClientError(
            f"the trainer {type(job.trainer).__name__} changed a tensor of ctx in place",
            where=place_of_class(type(job.trainer)),
            expected="hooks that change no tensor of ctx.start, received, shared and state",
            do="return new tensors, for example v + 1 instead of v.add_(1)",
        )


def context(
    job: ClientJob,
    net: Net,
    samples: Samples,
    index: Tensor,
    num_classes: int,
    num_steps: int,
    noise: StepNoise,
) -> Ctx:
    """Return the context that the trainer's hooks read for one client."""
    return Ctx(
        start=job.trainable,
        received=Received(job.start.params, job.start.buffers),
        shared=job.shared,
        state=job.state or {},
        task=job.task,
        local_training=job.local_training,
        round=job.round,
        num_examples=len(index),
        num_steps=num_steps,
        net=net,
        clock=noise,
        once=Once(noise),
        noise=noise,
        full_gradient=partial(_full_gradient, job, net, samples, index, noise),
        count_classes=lambda: count_classes(
            samples.labels(to_device(index, samples.x.device)), num_classes
        ),
    )


def schedule_of(job: ClientJob, net: Net, n: int) -> Schedule:
    """Return the `Schedule` of a client with `n` samples.

    Raises:
        ClientError: The client cannot take a step.
    """
    schedule = list(batch_ranges(n, job.local_training, smallest=2 if net.has_batch_norm else 1))
    if not schedule:
        raise ClientError(
            f"client {job.client} cannot take a step",
            where=f"client {job.client}, {n} training samples",
            expected="at least 2 samples: BatchNorm has no statistics of one"
            if n
            else "at least 1 sample",
            do="set partition.min_size=2, and partition.on_small=drop or repair if the split "
            "has smaller clients"
            if n
            else "raise partition.min_size, or set partition.on_small=drop",
        )
    return schedule


def adjusted(grad: Tree, params: Tree, start: Tree, how: Adjustment) -> Tree:
    """Return the adjusted gradient ``gradient * g + pull * (w - toward) + shift``.

    Here g is `grad` and w is `params`. The constants are fields of `how`. If ``toward``
    is None, `start` takes its place.
    """
    if how.gradient != 1:
        grad = trees.scale(grad, how.gradient)
    if how.pull:
        grad = trees.add(grad, trees.sub(params, how.toward or start), alpha=how.pull)
    return grad if how.shift is None else trees.add(grad, how.shift)


def clipped(grads: list[Tensor], bound: float, vectors: type[Vectors]) -> list[Tensor]:
    """Clip the gradient g, a list of tensors, to the norm `bound`.

    If the norm over all tensors exceeds the bound, the result is
    ``g * bound / (||g|| + 1e-6)``. Otherwise it is g.
    """
    norm = vectors.norm(grads)
    return vectors.scaled(
        grads, torch.where(norm > bound, bound / (norm + 1e-6), torch.ones_like(norm))
    )


def batch_ranges(
    n: int, local_training: LocalTraining, smallest: int
) -> Iterator[tuple[int, int, int]]:
    """Iterate over (epoch, start, stop) of every local step (see `Schedule`).

    The last batch of an epoch may be smaller than the other batches. If it has fewer
    than `smallest` samples, it is skipped.
    """
    epoch_ranges = [
        (a, min(a + local_training.batch_size, n)) for a in range(0, n, local_training.batch_size)
    ]
    epoch_ranges = [(a, b) for a, b in epoch_ranges if b - a >= smallest]
    if not epoch_ranges:
        return iter(())

    steps, max_steps = local_training.steps, local_training.max_steps
    epochs = itertools.count() if steps is not None else range(local_training.epochs or 0)
    return itertools.islice(
        ((epoch, a, b) for epoch in epochs for a, b in epoch_ranges),
        min((limit for limit in (steps, max_steps) if limit is not None), default=None),
    )


def num_steps(job: ClientJob, data: FederatedData) -> int:
    """Return the number of local steps of a job.

    Batches of one sample are counted, although a network with BatchNorm skips them.
    """
    return sum(1 for _ in batch_ranges(data.partition.size(job.client), job.local_training, 1))


def largest_batch(jobs: Sequence[ClientJob], data: FederatedData) -> int:
    """Return the number of samples in the largest batch of some jobs.

    It is smaller than the configured batch size if all clients have fewer samples.
    """
    return max(min(job.local_training.batch_size, data.partition.size(job.client)) for job in jobs)


def batches(
    job: ClientJob, samples: Samples, index: Tensor, schedule: Schedule, noise: StepNoise
) -> Iterator[Batch]:
    """Iterate over the training batches of `schedule`.

    Samples are shuffled anew in every epoch. Several consecutive batches are normalised
    together, in one chunk. Batches are augmented one by one.
    """
    sample_bytes = max(1, samples.x[:1].numel()) * samples.dtype.itemsize
    chunk = max(1, chunk_bytes(samples.x.device) // (sample_bytes * job.local_training.batch_size))
    position = 0
    order = torch.empty(0)
    while position < len(schedule):
        epoch, start, _ = schedule[position]
        if start == 0:
            order = to_device(epoch_order(job, index, epoch), samples.x.device)
        stop = position
        while stop < len(schedule) and stop - position < chunk and schedule[stop][0] == epoch:
            stop += 1
        end = schedule[stop - 1][2]
        x, y = samples.inputs(order[start:end]), samples.y.index_select(0, order[start:end])
        for i in range(position, stop):
            _, a, b = schedule[i]
            inputs = x[a - start : b - start]
            if samples.augment is not None:
                noise.step = i
                inputs = samples.augment(inputs, noise)
            yield Batch(inputs, y[a - start : b - start])
        position = stop


def epoch_order(job: ClientJob, index: Tensor, epoch: int) -> Tensor:
    """Return a client's sample positions in the order of `epoch`, on the CPU."""
    shuffle = torch.randperm(len(index), generator=torch_generator(job.seed, "order", epoch))
    return index.index_select(0, shuffle)


class StepNoise:
    """A source of uniform numbers that depend on the job's seed, the step and a name.

    If a step runs several forward passes, all of them therefore use the same dropout
    masks. This object is also the client's `Clock`.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self.step = self.epoch = 0
        self._seed, self._device = seed, device

    @cached_property
    def _generator(self) -> torch.Generator:
        return torch.Generator(device=self._device)

    def __call__(self, name: str, shape: tuple[int, ...]) -> Tensor:
        self._generator.manual_seed(seed_of(self._seed, "noise", self.step, name))
        return torch.rand(shape, generator=self._generator, device=self._generator.device)


class Once:
    """The function `Ctx.once`. It stores named tensors until the next local step."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._step = clock, -1
        self._made: Tree = {}

    def __call__(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        if self._step != self._clock.step:
            self._step, self._made = self._clock.step, {}
        if name not in self._made:
            with torch.no_grad():
                self._made[name] = make()
        return self._made[name]


def _full_gradient(
    job: ClientJob, net: Net, samples: Samples, index: Tensor, noise: StepNoise, at: Tree
) -> Tree:
    """Compute the mean gradient of the task's loss over the client's data.

    The network runs in training mode, on a copy of the job's buffers.

    Args:
        job: The client's work.
        net: The network.
        samples: The training pool.
        index: Positions of the client's samples, on the CPU.
        noise: Source of random numbers.
        at: The parameters at which the gradient is taken.
    """
    params = {
        **job.start.params,
        **{name: value.detach().clone().requires_grad_() for name, value in at.items()},
    }
    total = trees.zeros_like(at)
    parts = -(-len(index) // max(job.local_training.batch_size, 512))
    # The parts have nearly equal sizes, because a last part of only one sample would be
    # too small for BatchNorm.
    for part in torch.tensor_split(to_device(index, samples.x.device), parts):
        batch = Batch(samples.inputs(part), samples.y[part])
        loss = job.task.loss(net, params, trees.clone(job.start.buffers), batch, noise)
        grads = torch.autograd.grad(
            loss, [params[name] for name in at], allow_unused=True, materialize_grads=True
        )
        torch._foreach_add_(list(total.values()), grads, alpha=len(part) / len(index))
    return total
