"""Chains of linear layers with ReLU and cross-entropy: batched matrix products and a backward pass written by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from fedexp.core.jobs import ClientJob
from fedexp.core.kernel import overrides
from fedexp.core.net import Net, same_author
from fedexp.core.trainer import Adjustment
from fedexp.core.trees import Tree
from fedexp.engines.kernels.kernel import StackBatch, StackKernel, StackTrees

Sink = Callable[[str, str | None, Tensor, Tensor], None]  # (weight, bias or None, layer's input, output's gradient)


class Linear(StackKernel):
    """Padding rows have no share in the loss, so clients of unequal sizes go together."""

    same_sizes: ClassVar[bool] = False
    reads_state: ClassVar[bool] = False

    @classmethod
    def fits(cls, job: ClientJob, net: Net) -> bool:
        own = overrides(job.trainer, "loss") or overrides(job.trainer, "grad")
        known = job.task.cross_entropy and same_author(type(job.task), "cross_entropy", "loss")
        if own or not known or net.precision == "bf16":
            return False
        return bool(_trained(job, net))

    def __init__(self, job: ClientJob, net: Net) -> None:
        self._chain = net.linear_chain
        self._trained = _trained(job, net)
        self._lowest = next(i for i, layer in enumerate(self._chain) if self._trained.intersection(layer))
        self._lr, self._momentum = job.budget.lr, job.budget.momentum
        self._buffer: Tree = {}

    def gradients(self, stack: StackTrees, batch: StackBatch) -> tuple[Tree, Tensor]:
        grads: Tree = {}

        def collect(weight: str, bias: str | None, a: Tensor, d: Tensor) -> None:
            if weight in self._trained:
                grads[weight] = torch.bmm(d.mT, a)
            if bias in self._trained:
                grads[str(bias)] = d.sum(1)

        losses = self._backward(stack, batch, collect)
        return {name: grads[name] for name in stack.live}, losses

    def descend(self, stack: StackTrees, batch: StackBatch, adjustment: Adjustment | None) -> Tensor:
        """The products are accumulated straight into the weights (or the momentum buffer): no gradient is stored."""
        lr, momentum = self._lr, self._momentum
        how = adjustment or Adjustment()
        if momentum and not self._buffer:
            self._buffer = {name: torch.zeros_like(value) for name, value in stack.live.items()}

        def target(name: str) -> tuple[Tensor, float, float]:
            """What the gradient is added to, what that is multiplied by before, and the gradient's factor."""
            w = stack.live[name]
            into, keep, factor = (self._buffer[name], momentum, 1.0) if momentum else (w, 1.0, -lr)
            if how.pull and momentum:
                into.mul_(keep).add_(w, alpha=how.pull).sub_(stack.start[name], alpha=how.pull)
                keep = 1.0
            elif how.pull:
                into.lerp_(stack.start[name], lr * how.pull)
            if how.shift is not None:
                if keep != 1.0:
                    into.mul_(keep)
                into.add_(how.shift[name], alpha=factor)
                keep = 1.0
            return into, keep, factor * how.gradient

        def accumulate(weight: str, bias: str | None, a: Tensor, d: Tensor) -> None:
            if weight in self._trained:
                into, keep, factor = target(weight)
                into.baddbmm_(d.mT, a, beta=keep, alpha=factor)
                if momentum:
                    stack.live[weight].add_(into, alpha=-lr)
            if bias is not None and bias in self._trained:
                into, keep, factor = target(bias)
                into.mul_(keep).add_(d.sum(1), alpha=factor)
                if momentum:
                    stack.live[bias].add_(into, alpha=-lr)

        losses = self._backward(stack, batch, accumulate)
        if how.outside is not None:
            torch._foreach_add_(list(stack.live.values()), list(how.outside.values()), alpha=-lr)
        return losses

    def keep(self, count: int) -> None:
        self._buffer = {name: value[:count] for name, value in self._buffer.items()}

    def _backward(self, stack: StackTrees, batch: StackBatch, sink: Sink) -> Tensor:
        """Send every layer's input and output gradient to `sink`, last layer first; a layer's weights are read before."""
        params = stack.params
        inputs = [batch.x.flatten(2)]
        for number, (weight, bias) in enumerate(self._chain):
            a, w = inputs[-1], params[weight].mT
            z = torch.bmm(a, w) if bias is None else torch.baddbmm(params[bias].unsqueeze(1), a, w)
            inputs.append(z.relu_() if number < len(self._chain) - 1 else z)
        log_p = inputs.pop().log_softmax(-1)
        target = batch.y.unsqueeze(-1)
        losses = -(log_p.gather(-1, target).squeeze(-1) * batch.share).sum(1)
        d = log_p.exp_()
        d.scatter_add_(-1, target, d.new_full((), -1.0).expand(target.shape))
        d.mul_(batch.share.unsqueeze(-1) if isinstance(batch.share, Tensor) else batch.share)
        for number in range(len(self._chain) - 1, self._lowest - 1, -1):
            weight, bias = self._chain[number]
            a = inputs[number]
            below = torch.bmm(d, params[weight]) if number > self._lowest else None
            sink(weight, bias, a, d)
            if below is not None:
                d = torch.ops.aten.threshold_backward(below, a, 0)
        return losses


def _trained(job: ClientJob, net: Net) -> set[str]:
    """Names of the chain's parameters that are not frozen."""
    return {name for layer in net.linear_chain for name in layer if name is not None} - job.frozen
