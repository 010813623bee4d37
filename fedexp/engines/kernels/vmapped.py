"""Any network and loss: the trainer's own `loss`, vectorised over clients by `torch.vmap`."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from fedexp.core.jobs import ClientJob
from fedexp.core.kernel import overrides
from fedexp.core.net import Net
from fedexp.core.task import Batch
from fedexp.core.trainer import Ctx
from fedexp.core.trees import Tree
from fedexp.engines.kernels.kernel import NotStackableError, StackBatch, StackKernel, StackTrees

Draw = tuple[str, tuple[int, ...]]


class Vmapped(StackKernel):
    """The gradients of the clients' summed loss are each client's own, for no client's loss knows another's parameters.

    Only the forward pass is vectorised by `torch.vmap`; a loss written with operations that have no batching rule raises
    `NotStackableError`.
    """

    same_sizes: ClassVar[bool] = True  # a mean over padding rows, or BatchNorm's statistics, would be another loss
    reads_state: ClassVar[bool] = True

    @classmethod
    def fits(cls, job: ClientJob, net: Net) -> bool:
        return not overrides(job.trainer, "grad") and len(job.frozen) < len(job.start.params)

    def __init__(self, job: ClientJob, net: Net) -> None:
        self._job, self._net = job, net
        self._draws: dict[tuple[int, ...], list[Draw]] = {}

    def gradients(self, stack: StackTrees, batch: StackBatch) -> tuple[Tree, Tensor]:
        try:
            return self._gradients(stack, batch)
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:  # where the loss itself is at fault, serial training says so
            raise NotStackableError from error

    def _gradients(self, stack: StackTrees, batch: StackBatch) -> tuple[Tree, Tensor]:
        live = [value.requires_grad_() for value in stack.live.values()]
        draws = self._draws.get(batch.x.shape)
        if draws is None:  # which random numbers does a step ask for? Find out on copies of the buffers
            draws = self._draws[batch.x.shape] = []
            copies = {name: value.clone() for name, value in stack.buffers.items()}
            with torch.no_grad():
                self._losses(stack, copies, batch, {}, draws)
        noise = {draw: torch.stack([own(*draw) for own in batch.noises]) for draw in draws}
        losses = self._losses(stack, stack.buffers, batch, noise, None)
        grads = torch.autograd.grad(losses.sum(), live, allow_unused=True, materialize_grads=True)
        for value in live:
            value.requires_grad_(False)
        return dict(zip(stack.live, grads, strict=True)), losses.detach()

    def _losses(
        self, stack: StackTrees, buffers: Tree, batch: StackBatch, noise: dict[Draw, Tensor], asked: list[Draw] | None
    ) -> Tensor:
        """(k,) losses; what is asked of the noise goes to `asked`, if given, and is answered with zeros."""
        job, net = self._job, self._net

        def loss(
            params: Tree,
            buffers: Tree,
            start: Tree,
            shared: dict[str, Tree],
            state: dict[str, Tree],
            x: Tensor,
            y: Tensor,
            numbers: dict[Draw, Tensor],
        ) -> Tensor:
            def draw(name: str, shape: tuple[int, ...]) -> Tensor:
                if asked is None:
                    return numbers[name, tuple(shape)]
                asked.append((name, tuple(shape)))
                return torch.zeros(shape, device=x.device)

            def refuse(at: Tree) -> Tree:
                raise NotStackableError  # it would run the network on all of one client's data

            ctx = Ctx(start, shared, state, job.task, job.budget, num_steps, draw, refuse)
            net.set_noise(draw)
            return job.trainer.loss(net, params, buffers, Batch(x, y), ctx)

        num_steps = stack.num_steps or 0  # all have equally many
        shared = {name: dict(tree) for name, tree in stack.shared.items()}
        state = {name: dict(tree) for name, tree in stack.state.items()}
        try:
            losses: Tensor = torch.vmap(loss)(
                stack.params, buffers, stack.start, shared, state, batch.x, batch.y, noise
            )
        finally:
            net.release()
            net.set_noise(None)
        return losses
