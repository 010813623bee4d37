"""Any network and loss: the trainer's own `loss`, vectorised over clients by `torch.vmap`."""

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


class Vmapped(StackKernel):
    """The gradients of the clients' summed loss are each client's own, for no client's loss knows another's parameters.

    Only the forward pass is vectorised by `torch.vmap`; a loss written with operations that have no batching rule raises
    `NotStackableError`.
    """

    same_sizes: ClassVar[bool] = True  # a mean over padding rows, or BatchNorm's statistics, would be another loss

    @classmethod
    def misfit(cls, job: ClientJob, net: Net) -> str | None:
        if overrides(job.trainer, "grad"):
            return "the trainer has a grad of its own (`adjustment`, `correct` and `ascent` can be stacked)"
        return None if len(job.frozen) < len(job.start.params) else "every parameter is frozen"

    @classmethod
    def reads_context(cls, trainer: Trainer) -> bool:
        return overrides(trainer, "loss")

    def __init__(self, job: ClientJob, net: Net) -> None:
        self._job, self._net = job, net
        self._draws: dict[tuple[int, ...], list[Draw]] = {}
        self._counts: Tree = {}  # class counts, once they were asked for

    def gradients(self, stack: StackTrees, batch: StackBatch) -> tuple[Tree, Tensor | Measured]:
        try:
            return self._gradients(stack, batch)
        except (torch.cuda.OutOfMemoryError, NotStackableError):
            raise
        except Exception as error:  # where the loss itself is at fault, serial training says so
            text = str(error).partition("\n")[0]
            raise NotStackableError(f"its loss cannot be vectorised ({type(error).__name__}: {text})") from error

    def _gradients(self, stack: StackTrees, batch: StackBatch) -> tuple[Tree, Tensor | Measured]:
        live = [value.requires_grad_() for value in stack.live.values()]
        draws = self._draws.get(batch.x.shape)
        if draws is None:  # what does a step ask for? Find out on copies of the buffers
            draws = self._draws[batch.x.shape] = []
            with torch.no_grad():
                self._losses(stack, trees.clone(stack.buffers), batch, {}, draws)
        noise = {draw: torch.stack([ctx.noise(*draw) for ctx in batch.own]) for draw in draws}
        losses, scalars = self._losses(stack, stack.buffers, batch, noise, None)
        grads = torch.autograd.grad(losses.sum(), live, allow_unused=True, materialize_grads=True)
        for value in live:
            value.requires_grad_(False)
        named = {name: value.detach() for name, value in scalars.items()}
        found = Measured(losses.detach(), named) if named else losses.detach()
        return dict(zip(stack.live, grads, strict=True)), found

    def _losses(
        self, stack: StackTrees, buffers: Tree, batch: StackBatch, noise: dict[Draw, Tensor], asked: list[Draw] | None
    ) -> tuple[Tensor, Tree]:
        """(k,) losses and other scalars.

        Where there is `asked`, what the loss asks of the noise goes there and is answered with zeros; class counts that it
        asks for are computed, and answered with the first client's.
        """
        job, net, first = self._job, self._net, batch.own[0]  # sizes, steps and epochs are the same for all

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
                if asked is None:
                    return numbers[name, tuple(shape)]
                asked.append((name, tuple(shape)))
                return torch.zeros(shape, device=x.device)

            def count_classes() -> Tensor:
                if asked is None:
                    return counts["of each class"]
                self._counts = {"of each class": torch.stack([ctx.class_counts for ctx in batch.own])}
                return first.class_counts

            def refuse(at: Tree) -> Tree:
                raise NotStackableError("its loss uses full gradients, which need all of one client's data")

            ctx = replace(
                first,
                start={name: received.params[name] for name in stack.trained if name in received.params},
                received=received,
                shared=shared,
                state=state,
                noise=draw,
                full_gradient=refuse,
                count_classes=count_classes,
            )
            net.set_noise(draw)
            found = job.trainer.loss(net, params, buffers, Batch(x, y), ctx)
            return (found.loss, dict(found.scalars)) if isinstance(found, Measured) else (found, {})

        reads = self.reads_context(job.trainer)
        received, shared = (stack.received, stack.shared) if reads else (Received({}, {}), {})
        # a second network is built when it is first asked for, and initialised at random
        randomness = "error" if asked is None else "same"
        try:
            losses: tuple[Tensor, Tree] = torch.vmap(loss, randomness=randomness)(
                stack.params, buffers, received, shared, stack.state, batch.x, batch.y, noise, self._counts
            )
        finally:
            net.release()
            net.set_noise(None)
        return losses
