"""Kernel for any network and loss.

The trainer's own `loss` is vectorised over clients by `torch.vmap`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from fedexp.core import trees
from fedexp.core.jobs import ClientJob
from fedexp.core.kernel import overrides
from fedexp.core.net import Net
from fedexp.core.task import Batch
from fedexp.core.trainer import Measured, Received, Trainer
from fedexp.core.trees import Tree, Trees
from fedexp.engines.kernels.kernel import NotStackableError, StackBatch, StackKernel, StackTrees

Draw = tuple[str, tuple[int, ...]]


class _UnansweredError(Exception):
    """An error for noise or class counts that a loss did not ask for before."""


class Vmapped(StackKernel):
    """A kernel that takes the gradient of the sum of the clients' losses.

    This gradient consists of each client's own gradient, because no client's loss
    depends on another's parameters. Only the forward pass is vectorised by
    `torch.vmap`. A loss with operations that have no batching rule raises
    `NotStackableError`.
    """

    # With unequal sizes, the mean and BatchNorm's statistics would include padding
    # rows, which gives another loss.
    same_sizes: ClassVar[bool] = True

    @classmethod
    def misfit(cls, job: ClientJob, net: Net) -> str | None:
        if overrides(job.trainer, "grad"):
            return (
                "the trainer overrides `grad` (`adjustment`, `correct` and `ascent` can be stacked)"
            )
        return None if len(job.frozen) < len(job.start.params) else "every parameter is frozen"

    @classmethod
    def reads_context(cls, trainer: Trainer) -> bool:
        return overrides(trainer, "loss")

    def __init__(self, job: ClientJob, net: Net) -> None:
        self._job, self._net = job, net
        self._draws: dict[tuple[int, ...], list[Draw]] = {}
        self._counts: Tree = {}  # class counts (k, classes), once a loss asks for them

    def gradients(self, stack: StackTrees, batch: StackBatch) -> tuple[Tree, Tensor | Measured]:
        try:
            return self._gradients(stack, batch)
        except (torch.cuda.OutOfMemoryError, NotStackableError):
            raise
        except Exception as error:  # if the loss itself is at fault, serial training reports it
            text = str(error).partition("\n")[0]
            raise NotStackableError(
                f"its loss cannot be vectorised ({type(error).__name__}: {text})"
            ) from error

    def _gradients(self, stack: StackTrees, batch: StackBatch) -> tuple[Tree, Tensor | Measured]:
        live = [value.requires_grad_() for value in stack.live.values()]
        if batch.x.shape not in self._draws:
            self._ask(stack, batch)

        before = trees.clone(stack.buffers) if overrides(self._job.trainer, "loss") else {}
        try:
            losses, scalars = self._losses(stack, stack.buffers, batch, self._noise(batch), None)
        except _UnansweredError:
            # The loss asks for more than in earlier steps, for example from some epoch
            # on.
            if before:
                torch._foreach_copy_(trees.tensors(stack.buffers), trees.tensors(before))
            self._ask(stack, batch)
            losses, scalars = self._losses(stack, stack.buffers, batch, self._noise(batch), None)

        grads = torch.autograd.grad(losses.sum(), live, allow_unused=True, materialize_grads=True)
        for value in live:
            value.requires_grad_(False)
        named = {name: value.detach() for name, value in scalars.items()}
        found = Measured(losses.detach(), named) if named else losses.detach()
        return dict(zip(stack.live, grads, strict=True)), found

    def _ask(self, stack: StackTrees, batch: StackBatch) -> None:
        """Find out which noise and class counts a step asks for.

        The step is tried on copies of the buffers.
        """
        with torch.no_grad():
            asked = self._draws.setdefault(batch.x.shape, [])
            self._losses(stack, trees.clone(stack.buffers), batch, {}, asked)

    def _noise(self, batch: StackBatch) -> dict[Draw, Tensor]:
        return {
            draw: torch.stack([ctx.noise(*draw) for ctx in batch.own])
            for draw in self._draws[batch.x.shape]
        }

    def _losses(
        self,
        stack: StackTrees,
        buffers: Tree,
        batch: StackBatch,
        noise: dict[Draw, Tensor],
        asked: list[Draw] | None,
    ) -> tuple[Tensor, Tree]:
        """Return the losses of shape (k,) and other scalars.

        If `asked` is given, this is a trial. Each draw of noise that the loss asks for
        is added to `asked` and answered with zeros. If the loss asks for class counts,
        the counts of all clients are stored, and the loss receives those of the first
        client.
        """
        # The first client's context serves all clients, because their sizes, steps and
        # epochs are the same.
        job = self._job
        net = self._net
        first = batch.own[0]

        def loss(
            params: Tree,
            buffers: Tree,
            received: Received,
            shared: Trees,
            state: Trees,
            x: Tensor,
            y: Tensor,
            numbers: dict[Draw, Tensor],
            counts: Tree,
        ) -> tuple[Tensor, Tree]:
            def draw(name: str, shape: tuple[int, ...]) -> Tensor:
                if asked is not None:
                    asked.append((name, tuple(shape)))
                    return torch.zeros(shape, device=x.device)
                if (name, tuple(shape)) not in numbers:
                    raise _UnansweredError
                return numbers[name, tuple(shape)]

            def count_classes() -> Tensor:
                if asked is not None:
                    self._counts = {"n": torch.stack([ctx.class_counts for ctx in batch.own])}
                    return first.class_counts
                if not counts:
                    raise _UnansweredError
                return counts["n"]

            def refuse(at: Tree) -> Tree:
                raise NotStackableError(
                    "its loss uses full gradients, which need all of one client's data"
                )

            ctx = replace(
                first,
                start={
                    name: received.params[name] for name in stack.trained if name in received.params
                },
                received=received,
                shared=shared,
                state=state,
                once=lambda name, make: make(),  # a tensor of this pass is not valid in the next
                noise=draw,
                full_gradient=refuse,
                count_classes=count_classes,
            )
            net.set_noise(draw)
            found = job.trainer.loss(net, params, buffers, Batch(x, y), ctx)
            return (found.loss, dict(found.scalars)) if isinstance(found, Measured) else (found, {})

        reads = self.reads_context(job.trainer)
        received, shared = (stack.received, stack.shared) if reads else (Received({}, {}), {})
        # In a trial, the loss may build a second network, which is initialised at
        # random.
        randomness = "error" if asked is None else "same"

        try:
            losses: tuple[Tensor, Tree] = torch.vmap(loss, randomness=randomness)(
                stack.params,
                buffers,
                received,
                shared,
                stack.state,
                batch.x,
                batch.y,
                noise,
                self._counts,
            )
        finally:
            net.release()
            net.set_noise(None)

        return losses
