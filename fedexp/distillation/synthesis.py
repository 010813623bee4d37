"""Synthesis: images, or a generator and its noise, are optimised to lower a loss.

The images of the iterate with the lowest loss are returned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from fedexp.core import trees
from fedexp.core.aggregator import State
from fedexp.core.errors import FedexpError
from fedexp.core.numerics import Precision
from fedexp.core.task import Metrics
from fedexp.core.trees import Tree
from fedexp.core.weights import Weights
from fedexp.distillation.student import net_of
from fedexp.server_training.gradients import value_and_grad
from fedexp.server_training.optimizers import Optimizer

Terms = dict[str, Tensor]
"""Scalars by name: ``loss``, which is minimised, and the terms of this loss."""


@dataclass(frozen=True, eq=False)
class Synthesis:
    """The result of a synthesis.

    Args:
        images: Images of the iterate with the lowest loss. The iterates are the images
            before each step, so the result of the last step is not one of them.
        learned: The optimised tensors after the last step.
        optimizer: The optimizer's state after the last step.
        terms: ``loss`` and its terms for every iterate.
    """

    images: Tensor
    learned: Tree
    optimizer: State
    terms: list[Metrics]

    @property
    def lowest(self) -> Metrics:
        """The terms of the iterate with the lowest loss, the first one among ties."""
        return min(self.terms, key=lambda row: row["loss"])


def synthesise(
    learned: Tree,
    state: State,
    images_of: Callable[[Tree], Tensor],
    terms_of: Callable[[Tensor, int], Terms],
    optimizer: Optimizer,
    lr: float,
    steps: int,
    optimizer_key: str = "generator",
    unclipped: Collection[str] = (),
) -> Synthesis:
    """Take `steps` steps of `optimizer` on `learned` to minimise ``loss``.

    The host waits for the device only once, at the end.

    Args:
        learned: The tensors that are optimised.
        state: State of the optimizer before the first step.
        images_of: Differentiable function that returns the images of `learned`.
        terms_of: Function of the images and the step number that returns ``loss`` and
            its terms.
        optimizer: The optimizer.
        lr: Step size.
        steps: Number of steps, at least 1.
        optimizer_key: The optimizer's key in the aggregator's config, for error
            messages. The key of `lr` is ``lr_<optimizer_key>``.
        unclipped: Names of tensors whose gradient the optimizer does not clip.

    Raises:
        FedexpError: A loss is NaN or infinite.
    """
    rows: list[Terms] = []
    seen: list[Tensor] = []
    best = best_images = torch.zeros(())

    for step in range(steps):

        def loss_of(learned: Tree, step: int = step) -> Tensor:
            images = images_of(learned)
            terms = terms_of(images, step)
            rows.append({name: value.detach() for name, value in terms.items()})
            seen.append(images.detach())
            return terms["loss"]

        loss, (grads,) = value_and_grad(loss_of, learned)
        images = seen.pop()
        if step:
            better = loss < best
            loss, images = torch.where(better, loss, best), torch.where(better, images, best_images)

        best, best_images = loss, images
        learned, state = optimizer.step(learned, grads, state, lr, unclipped)

    table = torch.stack(
        [torch.stack([value.double() for value in row.values()]) for row in rows]
    ).tolist()
    terms = [dict(zip(rows[0], values, strict=True)) for values in table]
    for step, row in enumerate(terms):
        if not math.isfinite(row["loss"]):
            raise FedexpError(
                f"the loss of generated images is not finite in step {step + 1} of {steps}",
                where=", ".join(f"{name} {value:g}" for name, value in row.items()),
                do=f"lower aggregator.lr_{optimizer_key}, or bound gradients with "
                f"aggregator.{optimizer_key}.clip"
                if step
                else "nothing was optimised yet: lower local.lr (clients), aggregator.lr_student, "
                "or the coefficients of the loss",
            )

    return Synthesis(best_images, learned, state, terms)


def named(terms: Metrics) -> Metrics:
    """Return the terms under the names of the log, ``synthesis/<name>``."""
    return {f"synthesis/{name}": value for name, value in terms.items()}


def generated_by(generator: Weights, precision: Precision = "float32") -> Callable[[Tree], Tensor]:
    """Return a function that computes the images of a generator in training mode.

    The argument of the returned function is a tree of the generator's parameters and
    the noise ``z`` (b, nz).

    Args:
        generator: A generator of the same architecture, whose buffers are copied.
        precision: Precision of the generator's pass, as in `fedexp.core.net.Net`.
    """
    net = net_of(generator, training=True, precision=precision)
    # Training mode changes the buffers
    buffers = trees.clone(generator.buffers)

    def images_of(learned: Tree) -> Tensor:
        return net({name: learned[name] for name in generator.params}, buffers, learned["z"])

    return images_of
