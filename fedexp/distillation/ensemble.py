"""The ensemble of the clients' models, which is the frozen teacher of the student.

It returns mean logits. On request it also returns two scalars for generated images: how
far their BatchNorm statistics are from the running statistics, and the mean activation
of the models' penultimate features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedexp.core.build import require
from fedexp.core.net import Net
from fedexp.core.trees import Tree
from fedexp.core.weights import Weights
from fedexp.distillation.student import net_of

# Largest number of teachers whose activations are in memory at the same time by
# default. The activations of 100 ResNets do not fit into a device's memory.
_AT_ONCE = 10


class EnsembleOutput(NamedTuple):
    """The output of an ensemble of m teachers for inputs x of shape (b, ...).

    Scalars that were not requested are 0.

    Args:
        logits: D(x), the mean or weighted mean of the teachers' logits, of shape (b,
            C) for C classes.
        statistics: The scalar L_BN, the mean of `distance_of_statistics` over the
            teachers.
        activation: The scalar ``-(1 / m) sum_k mean |phi_k|``. phi_k are teacher k's
            penultimate features. Their absolute values are averaged over the batch and
            all features.
    """

    logits: Tensor
    statistics: Tensor
    activation: Tensor


class TeacherEnsemble:
    """An ensemble of m teachers of any architectures, in evaluation mode.

    The teachers are never changed.

    Args:
        teachers: The m teachers.
        at_once: Number of teachers whose activations may be in memory for a gradient at
            the same time. If there are more teachers, activations are recomputed for
            the gradient. With None the number depends on m. Up to ten teachers keep all
            activations, and nothing is computed twice. With more than ten, the number
            is ten if they are stacked, and one otherwise.
        stacked: Whether the teachers run as one network, with their tensors stacked
            along a first axis. Stacked teachers must have the same architecture. If
            false, the teachers run one after the other.
        bf16: Whether the teachers run under autocast to bfloat16. Stacked teachers do
            not support it. Outputs are cast to the inputs' dtype.
    """

    def __init__(
        self,
        teachers: Sequence[Weights],
        at_once: int | None = None,
        *,
        stacked: bool = False,
        bf16: bool = False,
    ) -> None:
        require(len(teachers) > 0, "an ensemble needs a teacher")
        examples = {teacher.spec: teacher for teacher in teachers}
        self._nets = {spec: net_of(example, training=False) for spec, example in examples.items()}
        self._teachers = list(teachers)
        few = len(teachers) <= _AT_ONCE
        self._at_once, self._bf16 = at_once or (_AT_ONCE if few or stacked else 1), bf16
        self._stacks: dict[int, tuple[Tree, Tree]] = {}

        if stacked:
            require(len(self._nets) == 1, "stacked teachers must have one architecture")
            require(not bf16, "stacked teachers do not run in bf16")
            self._stacks = {start: _stack(self._part(start)) for start in self._starts}

    def __len__(self) -> int:
        return len(self._teachers)

    @property
    def _starts(self) -> range:
        """Index of the first teacher of each part of the ensemble.

        A part consists of teachers whose activations are in memory at the same time.
        """
        return range(0, len(self), self._at_once)

    def _part(self, start: int) -> list[Weights]:
        return self._teachers[start : start + self._at_once]

    def each(self, inputs: Tensor) -> Tensor:
        """Return the logits of each of the m teachers, of shape (m, b, C)."""
        if self._stacks:
            return torch.cat(
                [self._run_stacked(start, inputs, False, False)[0] for start in self._starts]
            )
        return torch.stack(
            [self._run_one(teacher, inputs, False, False)[0] for teacher in self._teachers]
        )

    def __call__(self, inputs: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the mean logits D(x) of shape (b, C), as `show` computes them."""
        return self.show(inputs, weights).logits

    def show(
        self,
        inputs: Tensor,
        weights: Tensor | None = None,
        *,
        norms: bool = False,
        features: bool = False,
    ) -> EnsembleOutput:
        """Return the mean logits D(x) and the requested scalars.

        The result is differentiable with respect to `inputs`.

        Args:
            inputs: Normalised inputs x of shape (b, ...).
            weights: Weights of the teachers' logits, of shape (m,). `shares_of`
                normalises them. None: D(x) is the plain mean.
            norms: Whether to compute `EnsembleOutput.statistics`.
            features: Whether to compute `EnsembleOutput.activation`.
        """
        m = len(self)
        shares = inputs.new_full((m,), 1 / m) if weights is None else shares_of(weights)
        sums = partial(self._sums, shares=shares, norms=norms, features=features)
        starts = self._starts
        if len(starts) > 1 and torch.is_grad_enabled() and inputs.requires_grad:
            logits, statistics, activation = _InParts.apply(inputs, sums, starts)  # type: ignore[no-untyped-call]
        else:
            logits, statistics, activation = _total(sums, inputs, starts)
        return EnsembleOutput(logits, statistics / m, activation / m)

    def _sums(
        self, inputs: Tensor, start: int, *, shares: Tensor, norms: bool, features: bool
    ) -> Sums:
        """Compute sums over the part of the teachers that begins at index `start`.

        Returns:
            The sum of the weighted logits (b, C), the sum of `distance_of_statistics`,
            and the negated sum of the mean absolute features.
        """
        if self._stacks:
            each, distances, sizes = self._run_stacked(start, inputs, norms, features)
            weighted = each * shares[start : start + len(each), None, None]
            return weighted.sum(0), distances.sum(), -sizes.sum()
        logits, statistics, activation = [], inputs.new_zeros(()), inputs.new_zeros(())
        for teacher, share in zip(self._part(start), shares[start:], strict=False):
            output, distance, size = self._run_one(teacher, inputs, norms, features)
            logits.append(output * share)
            statistics, activation = statistics + distance, activation - size
        return torch.stack(logits).sum(0), statistics, activation

    def _run_stacked(self, start: int, inputs: Tensor, norms: bool, features: bool) -> Sums:
        """Run `_observe` for the k stacked teachers of a part in one pass.

        Returns:
            The results of `_observe` per teacher, of shapes (k, b, C), (k,) and (k,).
        """
        (net,) = self._nets.values()
        one = partial(self._observe, net, inputs, norms, features)
        try:
            found: Sums = torch.vmap(one)(*self._stacks[start])
        finally:
            net.release()
        return found

    def _run_one(self, teacher: Weights, inputs: Tensor, norms: bool, features: bool) -> Sums:
        return self._observe(
            self._nets[teacher.spec], inputs, norms, features, teacher.params, teacher.buffers
        )

    def _observe(
        self, net: Net, inputs: Tensor, norms: bool, features: bool, params: Tree, buffers: Tree
    ) -> Sums:
        """Run one teacher.

        Returns:
            The teacher's logits (b, C), its `distance_of_statistics`, and its mean
            absolute feature. Scalars that were not requested are 0.
        """
        with torch.autocast(inputs.device.type, torch.bfloat16) if self._bf16 else nullcontext():
            seen = net.observe(params, buffers, inputs, norms=norms, features=features)
        nothing = inputs.new_zeros(())
        size = nothing if seen.features is None else seen.features.to(inputs.dtype).abs().mean()
        return (
            seen.output.to(inputs.dtype),
            nothing + distance_of_statistics(seen.norms, buffers),
            size,
        )


def _stack(teachers: Sequence[Weights]) -> tuple[Tree, Tree]:
    """Stack the teachers' parameters and buffers along a new first axis."""
    params, buffers = teachers[0].params, teachers[0].buffers
    return (
        {name: torch.stack([teacher.params[name] for teacher in teachers]) for name in params},
        {name: torch.stack([teacher.buffers[name] for teacher in teachers]) for name in buffers},
    )


def shares_of(weights: Tensor) -> Tensor:
    """Divide weights (m,) by their sum, or by 1e-8 if their sum is below 1e-8."""
    return weights / weights.sum().clamp_min(1e-8)


Sums = tuple[Tensor, Tensor, Tensor]


def _total(sums: Callable[[Tensor, int], Sums], inputs: Tensor, starts: range) -> Sums:
    total = sums(inputs, starts[0])
    for start in starts[1:]:
        logits, statistics, activation = map(torch.add, total, sums(inputs, start))
        total = logits, statistics, activation
    return total


class _InParts(torch.autograd.Function):
    """The function `_total` without an autograd graph in the forward pass.

    The backward pass recomputes the outputs with a graph, one part of the teachers
    after the other. torch.utils.checkpoint would do the same, but its first call takes
    seconds, because it imports a compiler.
    """

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, sums: Callable[[Tensor, int], Sums], starts: range
    ) -> Sums:
        ctx.save_for_backward(inputs)
        ctx.sums, ctx.starts = sums, starts
        return _total(sums, inputs, starts)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor, None, None]:
        inputs = ctx.saved_tensors[0].detach().requires_grad_()
        total = torch.zeros_like(inputs)
        for start in ctx.starts:
            with torch.enable_grad():
                outputs = ctx.sums(inputs, start)
            pairs = [
                (out, c) for out, c in zip(outputs, cotangents, strict=True) if out.requires_grad
            ]
            total += torch.autograd.grad([out for out, _ in pairs], inputs, [c for _, c in pairs])[
                0
            ]
        return total, None, None


def distance_of_statistics(norms: Tree, buffers: Tree) -> Tensor:
    """Compute the distance between batch statistics and BatchNorm's running statistics.

    It is the scalar ``sum_l (||mu_l - running_mean_l|| + ||var_l - running_var_l||)``,
    with the sum over the network's BatchNorm layers l. mu_l and var_l are the mean and
    the biased variance of layer l's input over the batch and all positions. They are
    computed in float32 or a wider type. Reference: DeepInversion, Yin et al. 2020. As
    in its released code, the norms are not squared.

    Args:
        norms: Inputs of the BatchNorm layers, by the name of the layer.
        buffers: The network's buffers.
    """
    total = torch.zeros(())
    for name, value in norms.items():
        # A BatchNorm may have no running statistics
        if f"{name}.running_mean" in buffers:
            exact = value.to(torch.promote_types(value.dtype, torch.float32))
            var, mean = torch.var_mean(
                exact, [d for d in range(value.dim()) if d != 1], correction=0
            )
            for found, statistic in ((mean, "running_mean"), (var, "running_var")):
                total = total + torch.linalg.vector_norm(
                    found - buffers[f"{name}.{statistic}"].to(found)
                )

    return total
