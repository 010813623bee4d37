"""Kernel for any network and loss.

The trainer's own `loss` is vectorised over clients by `torch.vmap`.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedexp.core import trees
from fedexp.core.device import OutOfMemoryError, on_cpu
from fedexp.core.jobs import ClientJob
from fedexp.core.kernel import overrides
from fedexp.core.local_training import LocalTraining
from fedexp.core.net import Net
from fedexp.core.task import Batch
from fedexp.core.trainer import Ctx, Measured, Received, Trainer
from fedexp.core.trees import Tree, Trees
from fedexp.engines.kernels.kernel import (
    NotStackableError,
    StackBatch,
    StackKernel,
    StackTrees,
    UnlikeClientsError,
)

Draw = tuple[str, tuple[int, ...]]


class _UnansweredError(Exception):
    """The loss requested noise or class counts that it did not request in the trial."""


class _UnlikeEpochs(LocalTraining):
    """The local training of clients with different numbers of epochs."""

    @classmethod
    def of(cls, local_training: LocalTraining) -> _UnlikeEpochs:
        """Return a copy that does not give its number of epochs."""
        unlike = object.__new__(cls)
        unlike.__dict__.update(vars(local_training))
        return unlike

    def __getattribute__(self, name: str) -> Any:
        if name == "epochs":
            raise UnlikeClientsError("local_training")
        return object.__getattribute__(self, name)


class _SharedCtx(Ctx):
    """The context that a loss reads for several clients.

    Its values are those of the first client. Reading a number that differs between the
    clients raises `UnlikeClientsError`. The number of epochs is one of these numbers.
    """

    unlike: frozenset[str] = frozenset()

    @classmethod
    def of(cls, own: list[Ctx], **replaced: Any) -> _SharedCtx:
        """Return the context of the clients `own`, with some fields replaced."""
        values = {f.name: getattr(own[0], f.name) for f in fields(Ctx)} | replaced
        numbers = [name for name, value in values.items() if isinstance(value, int | float)]
        unlike = {name for name in numbers if len({getattr(ctx, name) for ctx in own}) > 1}
        if len({ctx.local_training for ctx in own}) > 1:
            values["local_training"] = _UnlikeEpochs.of(own[0].local_training)

        shared = cls(**values)
        object.__setattr__(shared, "unlike", frozenset(unlike))
        return shared

    def __getattribute__(self, name: str) -> Any:
        if name in object.__getattribute__(self, "unlike"):
            raise UnlikeClientsError(name)
        return object.__getattribute__(self, name)


class Vmapped(StackKernel):
    """A kernel that takes the gradient of the sum of the clients' losses.

    The loss of a client depends only on its own parameters, so this gradient consists
    of each client's own gradient. Only the forward pass is vectorised by `torch.vmap`.
    A loss with operations that have no batching rule raises `NotStackableError`.
    """

    # Padding rows would change the loss, because they would enter the mean over the
    # batch and the statistics of BatchNorm.
    pads: ClassVar[bool] = False

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
        # The noise that a loss draws, by the shape of one client's batch.
        self._draws: dict[tuple[int, ...], list[Draw]] = {}
        self._asks_for_counts = False
        # The clients' class counts (k, classes), by the range of clients.
        self._counts: dict[tuple[int, int], Tensor] = {}

    def gradients(self, stack: StackTrees, batch: StackBatch) -> tuple[Tree, Tensor | Measured]:
        try:
            return self._gradients(stack, batch)
        except UnlikeClientsError as error:
            self.alike |= {str(error)}
            raise
        except (OutOfMemoryError, NotStackableError):
            raise
        except Exception as error:
            # The job then runs serially. If the loss itself has an error, it is raised
            # there.
            text = str(error).partition("\n")[0]
            raise NotStackableError(
                f"its loss cannot be vectorised ({type(error).__name__}: {text})"
            ) from error

    def _gradients(self, stack: StackTrees, batch: StackBatch) -> tuple[Tree, Tensor | Measured]:
        if batch.x.shape[1:] not in self._draws:
            self._ask(stack, batch)

        live = [value.requires_grad_() for value in stack.live.values()]
        try:
            losses, scalars = self._answered_losses(stack, batch)
            grads = torch.autograd.grad(
                losses.sum(), live, allow_unused=True, materialize_grads=True
            )
        finally:
            for value in live:
                value.requires_grad_(False)

        if not on_cpu(batch.x.device):
            # If one gradient had other strides than its parameter, the update of all
            # parameters would need one kernel launch per tensor.
            grads = tuple(
                grad if grad.stride() == value.stride() else grad.contiguous()
                for grad, value in zip(grads, live, strict=True)
            )
        named = {name: value.detach() for name, value in scalars.items()}
        found = Measured(losses.detach(), named) if named else losses.detach()
        return dict(zip(stack.live, grads, strict=True)), found

    def _answered_losses(self, stack: StackTrees, batch: StackBatch) -> tuple[Tensor, Tree]:
        """Return the losses of the batch, and the numbers that the trainer measured.

        The loss receives the noise and the class counts that it requested in the last
        trial (`_ask`). From some epoch on, a loss may request more than in that trial.
        Then a new trial is made, and the losses are computed again. The buffers change
        only if the losses are returned.
        """
        before = trees.clone(stack.buffers) if overrides(self._job.trainer, "loss") else {}
        try:
            return self._losses(stack, stack.buffers, batch, self._noise(batch), None)
        except (_UnansweredError, UnlikeClientsError) as error:
            if before:
                torch._foreach_copy_(trees.tensors(stack.buffers), trees.tensors(before))
            if isinstance(error, UnlikeClientsError):
                raise
        self._ask(stack, batch)
        return self._losses(stack, stack.buffers, batch, self._noise(batch), None)

    def _ask(self, stack: StackTrees, batch: StackBatch) -> None:
        """Find out in a trial which noise and class counts the loss requests.

        The trial runs on copies of the buffers.
        """
        with torch.no_grad():
            asked: list[Draw] = []
            self._losses(stack, trees.clone(stack.buffers), batch, {}, asked)
            self._draws.setdefault(batch.x.shape[1:], []).extend(asked)

    def _noise(self, batch: StackBatch) -> dict[Draw, Tensor]:
        return {
            draw: torch.stack([ctx.noise(*draw) for ctx in batch.own])
            for draw in self._draws[batch.x.shape[1:]]
        }

    def _class_counts(self, batch: StackBatch) -> Tree:
        """Return the clients' class counts, (k, classes), if the loss requests them."""
        if not self._asks_for_counts:
            return {}
        key = batch.clients.start, batch.clients.stop
        if key not in self._counts:
            self._counts[key] = torch.stack([ctx.class_counts for ctx in batch.own])
        return {"n": self._counts[key]}

    def _losses(
        self,
        stack: StackTrees,
        buffers: Tree,
        batch: StackBatch,
        noise: dict[Draw, Tensor],
        asked: list[Draw] | None,
    ) -> tuple[Tensor, Tree]:
        """Return the losses of shape (k,) and other scalars.

        If `asked` is given, this is a trial. Each draw of noise that the loss requests
        is added to `asked`, and the loss receives zeros. If the loss requests class
        counts, it receives those of the first client. In other passes, it receives the
        noise and the class counts of every client.

        Raises:
            UnlikeClientsError: The loss reads a number in which the clients differ.
        """
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
                    self._asks_for_counts = True
                    return first.class_counts
                if not counts:
                    raise _UnansweredError
                return counts["n"]

            def refuse(at: Tree) -> Tree:
                raise NotStackableError(
                    "its loss uses full gradients, which need all of one client's data"
                )

            ctx = _SharedCtx.of(
                batch.own,
                start={
                    name: received.params[name] for name in stack.trained if name in received.params
                },
                received=received,
                shared=shared,
                state=state,
                # A tensor that `make` returns is valid only in this pass, so it is not
                # stored.
                once=lambda name, make: make(),
                noise=draw,
                full_gradient=refuse,
                count_classes=count_classes,
            )
            net.set_noise(draw)
            found = job.trainer.loss(net, params, buffers, Batch(x, y), ctx)
            job.trainer.check_loss(found, job.task)
            return (found.loss, dict(found.scalars)) if isinstance(found, Measured) else (found, {})

        reads = self.reads_context(job.trainer)
        received, shared = (stack.received, stack.shared) if reads else (Received({}, {}), {})
        # In a trial, the loss may build a second network. Its initialisation draws
        # random numbers, which `torch.vmap` must then allow.
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
                self._class_counts(batch),
            )
        finally:
            net.release()
            net.set_noise(None)

        return losses
