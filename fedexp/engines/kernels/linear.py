"""Chains of linear layers with ReLU and cross-entropy: batched matrix products and a backward pass written by hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from fedexp.core.jobs import ClientJob
from fedexp.core.kernel import overrides
from fedexp.core.net import Net, same_author
from fedexp.core.trainer import Adjustment
from fedexp.core.trees import Tree
from fedexp.engines.kernels.kernel import FusedKernel, StackBatch, StackTrees

Layer = tuple[str, str | None]  # names of weight and bias


class Linear(FusedKernel):
    """Padding rows have no share in the loss, so clients of unequal sizes go together."""

    same_sizes: ClassVar[bool] = False

    @classmethod
    def misfit(cls, job: ClientJob, net: Net) -> str | None:
        if not _trained(job, net):
            return "the network is no chain of linear layers with ReLU, or all of it is frozen"
        for hook in ("grad", "loss"):
            if overrides(job.trainer, hook):
                return f"the trainer has a {hook} of its own"
        if not job.task.cross_entropy or not same_author(type(job.task), "cross_entropy", "loss"):
            return "the task's loss is not plain cross-entropy"
        return "under bf16 it has no arithmetic" if net.precision == "bf16" else None

    def __init__(self, job: ClientJob, net: Net) -> None:
        self._chain = net.linear_chain
        self._trained = _trained(job, net)
        self._lowest = next(i for i, layer in enumerate(self._chain) if self._trained.intersection(layer))
        self._lr, self._momentum = job.budget.lr, job.budget.momentum
        self._buffer: Tree = {}

    def gradients(self, stack: StackTrees, batch: StackBatch) -> tuple[Tree, Tensor]:
        losses, inputs, top = self._forward(stack.params, batch)
        grads: Tree = {}
        for (weight, bias), a, d in self._backward(stack.params, inputs, top):
            if weight in self._trained:
                grads[weight] = torch.bmm(d.mT, a)
            if bias in self._trained:
                grads[str(bias)] = d.sum(1)
        return {name: grads[name] for name in stack.live}, losses

    def descend(self, stack: StackTrees, batch: StackBatch, adjustment: Adjustment | None) -> Tensor:
        """The products are accumulated straight into the weights (or the momentum buffer): no gradient is stored."""
        how = adjustment or Adjustment()
        if self._momentum and not self._buffer:
            self._buffer = {name: torch.zeros_like(value) for name, value in stack.live.items()}
        losses, inputs, top = self._forward(stack.params, batch)
        for (weight, bias), a, d in self._backward(stack.params, inputs, top):
            if weight in self._trained:
                into, keep, factor = self._prepared(weight, stack, how)
                into.baddbmm_(d.mT, a, beta=keep, alpha=factor)
                self._follow_buffer(weight, stack)
            if bias is not None and bias in self._trained:
                into, keep, factor = self._prepared(bias, stack, how)
                into.mul_(keep).add_(d.sum(1), alpha=factor)
                self._follow_buffer(bias, stack)
        if how.outside is not None:
            torch._foreach_add_(list(stack.live.values()), list(how.outside.values()), alpha=-self._lr)
        return losses

    def _prepared(self, name: str, stack: StackTrees, how: Adjustment) -> tuple[Tensor, float, float]:
        """Where the gradient g of parameter `name` goes, as ``into = keep * into + factor * g``: (into, keep, factor).

        Everything else that is added in the same step has been added when this returns. Without momentum that is
        ``w -= lr * (pull * (w - toward) + shift)``, else the same sum, without -lr, on ``momentum * b``. A decay of b by which
        nothing comes first is left to `keep`: the product that adds g does it on its way.
        """
        w = stack.live[name]
        if not self._momentum:
            if how.pull:
                w.lerp_((how.toward or stack.start)[name], self._lr * how.pull)
            if how.shift is not None:
                w.add_(how.shift[name], alpha=-self._lr)
            return w, 1.0, -self._lr * how.gradient
        b = self._buffer[name]
        if not how.pull and how.shift is None:
            return b, self._momentum, how.gradient
        b.mul_(self._momentum)
        if how.pull:
            b.add_(w, alpha=how.pull).sub_((how.toward or stack.start)[name], alpha=how.pull)
        if how.shift is not None:
            b.add_(how.shift[name])
        return b, 1.0, how.gradient

    def _follow_buffer(self, name: str, stack: StackTrees) -> None:
        """``w -= lr * b``, where there is momentum."""
        if self._momentum:
            stack.live[name].add_(self._buffer[name], alpha=-self._lr)

    def keep(self, count: int) -> None:
        self._buffer = {name: value[:count] for name, value in self._buffer.items()}

    def _forward(self, params: Tree, batch: StackBatch) -> tuple[Tensor, list[Tensor], Tensor]:
        """The (k,) losses, every layer's (k, b, width) input and the losses' gradient at the last layer's output."""
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
        return losses, inputs, d

    def _backward(self, params: Tree, inputs: list[Tensor], d: Tensor) -> Iterator[tuple[Layer, Tensor, Tensor]]:
        """(layer, its input, its output's gradient), last layer first. A layer's weights are read before it is yielded."""
        for number in range(len(self._chain) - 1, self._lowest - 1, -1):
            layer, a = self._chain[number], inputs[number]
            below = torch.bmm(d, params[layer[0]]) if number > self._lowest else None
            yield layer, a, d
            if below is not None:
                d = torch.ops.aten.threshold_backward(below, a, 0)


def _trained(job: ClientJob, net: Net) -> set[str]:
    """Names of the chain's parameters that are not frozen."""
    return {name for layer in net.linear_chain for name in layer if name is not None} - job.frozen
