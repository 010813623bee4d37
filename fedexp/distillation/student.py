"""The student: its initialisation, its training by distillation, and its logits.

In distillation the student runs in training mode. While images are generated, it runs
in evaluation mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from fedexp.core import trees
from fedexp.core.aggregator import State
from fedexp.core.env import Env
from fedexp.core.kernel import StepNoise
from fedexp.core.net import Net
from fedexp.core.numerics import Precision
from fedexp.core.seeds import seed_of
from fedexp.core.trees import Tree
from fedexp.core.weights import Weights
from fedexp.distillation.losses import kl
from fedexp.server_training.gradients import value_and_grad
from fedexp.server_training.optimizers import Optimizer


def fresh_student(env: Env) -> Weights:
    """Initialise the server's network with a seed that depends on the round."""
    return Weights.init(
        env.server_spec, seed_of(env.seed, "student", env.round), env.device, env.dtype
    )


def distil(
    student: Weights,
    state: State,
    distillation_batches: Iterable[tuple[Tensor, Tensor]],
    optimizer: Optimizer,
    lr: float,
    tau: float,
    noise: StepNoise,
) -> tuple[Weights, State, Tensor]:
    """Train the student with one optimizer step per batch.

    The loss is ``KL_tau(D(x) || S(x))``, the Kullback-Leibler divergence `kl` at
    temperature `tau`. D(x) are the teachers' logits of inputs x, and S(x) are the
    student's logits in training mode.

    Args:
        student: The student.
        state: State of the student's optimizer.
        distillation_batches: Normalised inputs x (b, ...) and the teachers' logits D(x)
            (b, C).
        optimizer: The student's optimizer.
        lr: Step size.
        tau: Temperature.
        noise: Random numbers of the student's random layers.

    Returns:
        The trained student, its optimizer's state, and losses of shape (steps,).
    """
    net = net_of(student, training=True)
    net.set_noise(noise)
    learned, buffers = student.trainable, trees.clone(student.buffers)
    losses: list[Tensor] = []
    for step, (inputs, target) in enumerate(distillation_batches):
        noise.step = step

        def loss_of(learned: Tree, inputs: Tensor = inputs, target: Tensor = target) -> Tensor:
            return kl(target, net({**student.params, **learned}, buffers, inputs), tau).mean()

        loss, (grads,) = value_and_grad(loss_of, learned)
        learned, state = optimizer.step(learned, grads, state, lr)
        losses.append(loss)
    net.set_noise(None)
    return Weights(student.spec, {**student.params, **learned}, buffers), state, torch.stack(losses)


def answers(student: Weights) -> Callable[[Tensor], Tensor]:
    """Return a function that computes the student's logits (b, C) in evaluation mode.

    The logits are differentiable with respect to the inputs. The student does not
    change.
    """
    net = net_of(student, training=False)
    return lambda inputs: net(student.params, student.buffers, inputs)


def net_of(weights: Weights, training: bool, precision: Precision = "float32") -> Net:
    """Return a new network module for `weights`, in training or evaluation mode."""
    first = next(iter(weights.params.values()))
    return Net(weights.spec, first.device, first.dtype, precision).train(training)
