"""Synthesis of images by minimising a loss.

The optimizer changes pixels, or a generator and its noise. The result contains the
images before the optimizer step with the lowest loss.
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

    Images and loss are computed before each optimizer step, and not once more after the
    last step.

    Args:
        images: Images before the step with the lowest loss.
        learned: The optimised tensors after the last step.
        optimizer: The optimizer's state after the last step.
        terms: For every step, ``loss`` and its terms before the step.
    """

    images: Tensor
    learned: Tree
    optimizer: State
    terms: list[Metrics]

    @property
    def lowest(self) -> Metrics:
        """``loss`` and its terms in the step with the lowest loss.

        Ties go to the first of these steps.
        """
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

    The CPU waits for the GPU only once, at the end.

    Args:
        learned: The tensors that are optimised.
        state: State of the optimizer before the first step.
        images_of: Differentiable function that returns the images of `learned`.
        terms_of: Function of the images and the step number. It returns the scalar
            ``loss`` and the terms of this loss.
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
    """Rename terms for the log, from ``<name>`` to ``synthesis/<name>``."""
    return {f"synthesis/{name}": value for name, value in terms.items()}


def generated_by(generator: Weights, precision: Precision = "float32") -> Callable[[Tree], Tensor]:
    """Return a function that computes the images of a generator in training mode.

    The returned function takes a tree with the generator's parameters and the noise
    ``z`` (b, nz).

    Args:
        generator: The generator. Its architecture and a copy of its buffers are used,
            but not its parameters.
        precision: Precision of the generator's pass, as in `fedexp.core.net.Net`.
    """
    net = net_of(generator, training=True, precision=precision)
    # Copy the buffers, because a network in training mode changes them in place
    buffers = trees.clone(generator.buffers)

    def images_of(learned: Tree) -> Tensor:
        return net({name: learned[name] for name in generator.params}, buffers, learned["z"])

    return images_of
