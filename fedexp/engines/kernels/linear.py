"""Kernel for chains of linear layers with ReLU and cross-entropy.

It uses batched matrix products and a backward pass written by hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from fedexp.core import trees
from fedexp.core.device import on_cpu
from fedexp.core.jobs import ClientJob
from fedexp.core.kernel import by_name, overrides
from fedexp.core.net import Net, same_author
from fedexp.core.trainer import Adjustment, Ascent, Measured
from fedexp.core.trees import Tree
from fedexp.engines.kernels.kernel import FusedKernel, StackBatch, StackTrees

Layer = tuple[str, str | None]  # names of weight and bias
# (number, input, gradient at the output) of each layer, last layer first.
Layers = Iterator[tuple[int, Tensor, Tensor]]

_BLOCK_BYTES = 1 << 20  # about the cache size of one core


@dataclass(frozen=True, eq=False)
class _Climb:
    """The perturbation e of an ascent from w to w + e, stored in factors.

    It is ``e = rho g / (||g|| + eps)``, where g is the gradient at the parameters w of
    one client, and rho and eps are those of `Ascent`. For a layer with inputs a and
    gradients d at its outputs, the gradient of the weights is ``d^T a``. Only the
    factors a and d are stored. The arrays have shape (k, b, width) for k clients, batch
    size b and the width of the layer.

    Args:
        inputs: Inputs a of the lowest trained layer and of all layers above it, in the
            pass at w, by layer number.
        uphill: Gradients d at the outputs of these layers times
            ``rho / (||g|| + eps)``, by layer number.
        lowest: Output of the lowest trained layer at w. The input of this layer is the
            same at w + e. The pass at w + e therefore only adds to this output, in
            place.
        norm: Norms of e, of shape (k,).
    """

    inputs: dict[int, Tensor]
    uphill: dict[int, Tensor]
    lowest: Tensor
    norm: Tensor


@dataclass(frozen=True, eq=False)
class _Forward:
    """A forward pass of k clients, and the gradients of the losses at its end.

    Args:
        measured: Losses and scalars by name, of shape (k,). The scalars are those of
            the trainer's `FeatureTerm`, if it has one.
        inputs: Input of every layer, of shape (k, b, width) for batch size b.
        top: Gradient at the output of the last layer.
        term_gradient: Gradient of the `FeatureTerm` at the input of the last layer.
            None if there is no term, or if it is a function of the logits.
        lowest: Output of the lowest layer that is trained.
    """

    measured: dict[str, Tensor]
    inputs: list[Tensor]
    top: Tensor
    term_gradient: Tensor | None
    lowest: Tensor


class Linear(FusedKernel):
    """A kernel for chains of linear layers.

    Padding rows have zero weight in the loss. Clients with unequal numbers of samples
    can therefore take steps together.
    """

    pads: ClassVar[bool] = True

    @classmethod
    def misfit(cls, job: ClientJob, net: Net) -> str | None:
        if not _trained(job, net):
            return "the network is not a chain of linear layers with ReLU, or all of it is frozen"
        if overrides(job.trainer, "grad"):
            return "the trainer overrides `grad`"

        if not same_author(type(job.trainer), "feature_term", "loss"):
            return (
                "the trainer overrides `loss`, "
                "or another class than that of its loss defines `feature_term`"
            )

        term = job.trainer.feature_term()
        last = net.linear_chain[-1][0].rpartition(".")[0]
        if term is not None and term.layer == "penultimate" and net.head_module != last:
            return "the network's head has more than its last layer"
        if not job.task.cross_entropy or not same_author(type(job.task), "cross_entropy", "loss"):
            return "the task's loss is not plain cross-entropy"

        return "the kernel does not support bf16" if net.precision == "bf16" else None

    def __init__(self, job: ClientJob, net: Net) -> None:
        self._chain = net.linear_chain
        self._trained = _trained(job, net)
        self._lowest = next(
            i for i, layer in enumerate(self._chain) if self._trained.intersection(layer)
        )
        self._term = job.trainer.feature_term()
        self._anchor: tuple[StackBatch, Tensor] | None = None
        self._by_factors = self._pays(job)
        self._lr, self._momentum = job.local_training.lr, job.local_training.momentum
        self._buffer: Tree = {}

    @property
    def fuses_ascent(self) -> bool:
        return self._by_factors

    def gradients(self, stack: StackTrees, batch: StackBatch) -> tuple[Tree, Measured]:
        measured, layers = self._passes(stack, batch, None)
        return self._gradients(stack, layers), Measured(measured.pop("loss"), measured)

    def gradients_uphill(
        self, stack: StackTrees, batch: StackBatch, ascent: Ascent
    ) -> tuple[Tree, Tensor | Measured, Tensor]:
        if not self._by_factors:
            return super().gradients_uphill(stack, batch, ascent)

        measured, layers = self._passes(stack, batch, ascent)
        norm = measured.pop("perturbation")
        return self._gradients(stack, layers), Measured(measured.pop("loss"), measured), norm

    def _gradients(self, stack: StackTrees, layers: Layers) -> Tree:
        grads: Tree = {}
        for number, a, d in layers:
            weight, bias = self._chain[number]
            if weight in self._trained:
                grads[weight] = torch.bmm(d.mT, a)
            if bias in self._trained:
                grads[str(bias)] = d.sum(1)
        return {name: grads[name] for name in stack.live}

    def _pays(self, job: ClientJob) -> bool:
        """Return whether an ascent should use the factors of gradients (`_Climb`).

        The alternative is to compute the gradients themselves. Factors are less work if
        the batch size b is small compared with the layers. Both are counted per sample,
        in products. In a layer with i inputs and o outputs, factors cost 3 b (i + o).
        A gradient costs i o for its computation. It would also be stored, enter a norm
        and be added to the parameters. As a first estimate, this costs i o again.
        """
        shapes = [
            job.start.params[weight].shape for weight, _ in self._chain if weight in self._trained
        ]
        return 3 * job.local_training.batch_size * sum(o + i for o, i in shapes) <= 2 * sum(
            o * i for o, i in shapes
        )

    def descend(
        self,
        stack: StackTrees,
        batch: StackBatch,
        adjustment: Adjustment | None,
        ascent: Ascent | None,
    ) -> dict[str, Tensor]:
        """Add the gradients to the weights or to the momentum buffers.

        The matrix products of a gradient are accumulated there, and no gradient is
        stored.
        """
        how = adjustment or Adjustment()
        if self._momentum and not self._buffer:
            self._buffer = {name: torch.zeros_like(value) for name, value in stack.live.items()}
        measured, layers = self._passes(stack, batch, ascent)
        for number, a, d in layers:
            weight, bias = self._chain[number]
            if weight in self._trained:
                for rows in self._blocks(stack.live[weight], how):
                    into, keep, factor = self._prepared(weight, rows, stack, how)
                    into.baddbmm_(d[rows].mT, a[rows], beta=keep, alpha=factor)
                    self._follow_buffer(weight, rows, stack)

            if bias is not None and bias in self._trained:
                everyone = slice(len(d))
                into, keep, factor = self._prepared(bias, everyone, stack, how)
                into.mul_(keep).add_(d.sum(1), alpha=factor)
                self._follow_buffer(bias, everyone, stack)

        if how.outside is not None:
            live, outside = trees.tensors(stack.live), trees.tensors(how.outside, stack.live)
            torch._foreach_add_(live, outside, alpha=-self._lr)

        return measured

    def _blocks(self, w: Tensor, how: Adjustment) -> list[slice]:
        """Return the groups of clients whose parameter `w` is updated at once.

        If `how` adds a pull or a shift to the gradient on a CPU, a group has as many
        clients as fit into the cache of a core. Otherwise all clients are one group.
        With momentum but no pull or shift, smaller groups were not faster.
        """
        k, one = len(w), w[0].numel() * w.element_size()
        size = (
            k
            if not on_cpu(w.device) or not (how.pull or how.shift is not None)
            else max(1, _BLOCK_BYTES // one)
        )
        return [slice(start, min(start + size, k)) for start in range(0, k, size)]

    def _prepared(
        self, name: str, rows: slice, stack: StackTrees, how: Adjustment
    ) -> tuple[Tensor, float, float]:
        """Return the tensor that the gradient g of parameter `name` is added to.

        This method returns (into, keep, factor) for the clients in `rows`. The caller
        then computes ``into = keep * into + factor * g``. All other terms of the step
        are added here. In the formulas, w is the parameter, lr is the learning rate,
        and `pull`, `toward` and `shift` are those of `how`.

        - Without momentum, this method computes
          ``w -= lr * (pull * (w - toward) + shift)``, and `into` is w.
        - With momentum, this method computes
          ``b = momentum * b + pull * (w - toward) + shift``, and `into` is the momentum
          buffer b. If there is no pull and no shift, b does not change here, and `keep`
          is the momentum.
        """
        w = stack.live[name][rows]
        if not self._momentum:
            if how.pull:
                w.lerp_((how.toward or stack.start)[name][rows], self._lr * how.pull)
            if how.shift is not None:
                w.add_(how.shift[name][rows], alpha=-self._lr)
            return w, 1.0, -self._lr * how.gradient

        b = self._buffer[name][rows]
        if not how.pull and how.shift is None:
            return b, self._momentum, how.gradient
        b.mul_(self._momentum)
        if how.pull:
            b.add_(w, alpha=how.pull).sub_((how.toward or stack.start)[name][rows], alpha=how.pull)
        if how.shift is not None:
            b.add_(how.shift[name][rows])
        return b, 1.0, how.gradient

    def _follow_buffer(self, name: str, rows: slice, stack: StackTrees) -> None:
        """If there is momentum, apply ``w -= lr * b`` with the momentum buffer b."""
        if self._momentum:
            stack.live[name][rows].add_(self._buffer[name][rows], alpha=-self._lr)

    def _passes(
        self, stack: StackTrees, batch: StackBatch, ascent: Ascent | None
    ) -> tuple[dict[str, Tensor], Layers]:
        """Return the measured values, and the input and output gradient of each layer.

        The values are measured at the current parameters w. The inputs and gradients
        belong to w, too, unless `ascent` is given. In this case they belong to the
        point w + e that `ascent` defines. Layers are yielded from the last one down to
        the lowest trained layer. The weights of a layer are read before the layer is
        yielded, so the caller may change them.
        """
        here = self._forward(stack, batch, keeps_lowest=ascent is not None)
        layers = self._backward(stack.params, here)
        if ascent is None:
            return here.measured, layers
        climb = self._climb(layers, here.lowest, ascent)
        there = self._forward(stack, batch, climb)
        return {**here.measured, "perturbation": climb.norm}, self._backward(
            stack.params, there, climb
        )

    def _climb(self, layers: Layers, lowest: Tensor, ascent: Ascent) -> _Climb:
        inputs, gradients = {}, {}
        square = lowest.new_zeros(len(lowest), dtype=torch.float64)
        for number, a, d in layers:
            weight, bias = self._chain[number]
            inputs[number], gradients[number] = a, d
            if weight in self._trained:
                # ||d^T a||^2 = <d d^T, a a^T>. If the samples' gradients nearly cancel,
                # the norm is small. In float32, the rounding error of this sum would
                # then exceed the norm.
                wide_a, wide_d = a.double(), d.double()
                square += (torch.bmm(wide_a, wide_a.mT) * torch.bmm(wide_d, wide_d.mT)).sum((1, 2))
            if bias in self._trained:
                square += d.sum(1).square().sum(1)

        norm = square.clamp(min=0).sqrt().to(lowest.dtype)
        factor = ascent.rho / (norm + ascent.eps)
        return _Climb(
            inputs,
            {number: d * factor[:, None, None] for number, d in gradients.items()},
            lowest,
            norm * factor,
        )

    def _forward(
        self,
        stack: StackTrees,
        batch: StackBatch,
        climb: _Climb | None = None,
        keeps_lowest: bool = False,
    ) -> _Forward:
        inputs = [batch.x.flatten(2)]
        lowest = inputs[0]

        for number, (weight, bias) in enumerate(self._chain):
            a = inputs[-1]
            z = (
                climb.lowest
                if climb and number == self._lowest
                else _outputs(a, stack.params, weight, bias)
            )

            if climb is not None and number in climb.uphill:
                e = climb.uphill[number]
                if weight in self._trained:
                    z = z.baddbmm_(torch.bmm(a, climb.inputs[number].mT), e)
                if bias in self._trained:
                    z += e.sum(1, keepdim=True)

            if number == self._lowest:
                lowest = z.clone() if keeps_lowest else z
            inputs.append(z.relu_() if number < len(self._chain) - 1 else z)

        logits = inputs.pop()
        log_p = logits.log_softmax(-1)
        target = batch.y.unsqueeze(-1)
        losses = -(log_p.gather(-1, target).squeeze(-1) * batch.share).sum(1)
        d = log_p.exp_()
        d.scatter_add_(-1, target, d.new_full((), -1.0).expand(target.shape))
        d.mul_(batch.share.unsqueeze(-1) if isinstance(batch.share, Tensor) else batch.share)

        if self._term is None:
            return _Forward({"loss": losses}, inputs, d, None, lowest)

        anchor = self._anchor_of(stack, batch)
        if self._term.layer == "logits":
            term = self._term.of(logits, anchor, batch.share, lambda: d)
            top, below = d + term.gradient, None
        else:
            last = len(self._chain) - 1
            term = self._term.of(
                inputs[-1], anchor, batch.share, lambda: self._below(stack.params, last, d, climb)
            )
            top, below = d, term.gradient

        return _Forward(
            by_name(Measured(losses + term.value, term.scalars)), inputs, top, below, lowest
        )

    def _anchor_of(self, stack: StackTrees, batch: StackBatch) -> Tensor:
        """Return the received models' representations of the batch, (k, b, width).

        The `FeatureTerm` names the layer whose outputs are the representations. They
        are computed once per batch.
        """
        assert self._term is not None
        if self._anchor is None or self._anchor[0] is not batch:
            z = batch.x.flatten(2)
            layers = self._chain if self._term.layer == "logits" else self._chain[:-1]
            for number, (weight, bias) in enumerate(layers):
                z = _outputs(z, stack.received.params, weight, bias)
                z = z.relu_() if number < len(self._chain) - 1 else z
            self._anchor = batch, z
        return self._anchor[1]

    def _backward(self, params: Tree, forward: _Forward, climb: _Climb | None = None) -> Layers:
        d = forward.top
        for number in range(len(self._chain) - 1, self._lowest - 1, -1):
            a = forward.inputs[number]
            below = self._below(params, number, d, climb) if number > self._lowest else None
            if (
                below is not None
                and forward.term_gradient is not None
                and number == len(self._chain) - 1
            ):
                below += forward.term_gradient

            yield number, a, d
            if below is not None:
                d = torch.ops.aten.threshold_backward(below, a, 0)

    def _below(self, params: Tree, number: int, d: Tensor, climb: _Climb | None) -> Tensor:
        """Return the gradient at a layer's input, from the gradient at its output."""
        weight = self._chain[number][0]
        below = torch.bmm(d, params[weight])
        if climb is not None and weight in self._trained:
            below.baddbmm_(torch.bmm(d, climb.uphill[number].mT), climb.inputs[number])
        return below


def _outputs(a: Tensor, params: Tree, weight: str, bias: str | None) -> Tensor:
    """Return the (k, b, width) outputs of a layer for the inputs of k clients.

    If all clients share one weight and one bias, a single product computes them.
    """
    w, c = params[weight], None if bias is None else params[bias]
    if not w.stride(0) and (c is None or not c.stride(0)):
        return functional.linear(a, w[0], None if c is None else c[0])
    return torch.bmm(a, w.mT) if c is None else torch.baddbmm(c.unsqueeze(1), a, w.mT)


def _trained(job: ClientJob, net: Net) -> set[str]:
    """Return the names of the chain's parameters that are not frozen."""
    return {name for layer in net.linear_chain for name in layer if name is not None} - job.frozen
