"""The base of methods whose server distils a cohort's models into their mean.

The student starts from the mean and fits the targets that the method computes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from fedexp.core import trees
from fedexp.core.aggregator import State
from fedexp.core.build import require_positive
from fedexp.core.env import Env
from fedexp.core.needs import Demand, Needs
from fedexp.core.net import Net
from fedexp.core.task import Metrics
from fedexp.core.trees import Tree
from fedexp.core.weights import Weights
from fedexp.methods.bases.server_trained import Part, ServerTrained, mean_loss, with_frozen
from fedexp.server_training.gradients import value_and_grad
from fedexp.server_training.optimizers import Optimizer, Sgd, cosine
from fedexp.tasks.classification import Classification


@dataclass(frozen=True)
class Distilling(ServerTrained):
    """The base of aggregators that distil a cohort's models into their mean.

    The mean is the student. Its network is in training mode. The state of its optimizer
    starts empty in every round.

    Args:
        optimizer: Optimizer of the student.
        lr: Step size of the student.
        schedule: Schedule of `lr` over a round's steps: ``constant`` or ``cosine`` (to
            0).
    """

    optimizer: Optimizer = field(default_factory=lambda: Sgd(momentum=0.9, weight_decay=5e-4))
    lr: float = 0.08
    schedule: Literal["constant", "cosine"] = "constant"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "lr")

    @property
    def needs(self) -> Needs:
        return super().needs | Needs(
            (Demand("task", Classification, "compares logits of classes"),)
        )

    @abstractmethod
    def targets(self, collected: State, start: Weights, mean: Weights, env: Env) -> State:
        """Return the entries that `student_batches` reads from the state.

        By default it reads the entry ``target``, the target log-probabilities (n,
        classes) of all n proxy samples. The arguments are those of `begin`.
        """

    def student_batches(
        self, work: State, net: Net, parts: Iterator[Part], env: Env
    ) -> Iterator[Part]:
        """Yield the step number, the inputs and the targets (b, classes) per batch."""
        for step, index, inputs in parts:
            yield step, inputs, work["target"].index_select(0, index)

    @abstractmethod
    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """Compute the scalar loss of the student's logits (b, classes)."""

    def after_step(self, work: State, live: Tree, step: int) -> State:
        """Return `work` after an optimizer step.

        Args:
            work: The state of server training.
            live: The trained parameters after the step.
            step: Number of the step, from 0.
        """
        return work

    def begin(self, collected: State, start: Weights, mean: Weights, env: Env) -> State:
        return {
            "optimizer": self.optimizer.init(mean.trainable),
            **self.targets(collected, start, mean, env),
        }

    def train(
        self, weights: Weights, work: State, net: Net, parts: Iterator[Part], env: Env
    ) -> tuple[Weights, State, Metrics]:
        live, buffers, total = weights.trainable, trees.clone(weights.buffers), self.total(env)
        losses: dict[int, Tensor] = {}
        for step, inputs, target in self.student_batches(work, net, parts, env):

            def loss_of(live: Tree, inputs: Tensor = inputs, target: Tensor = target) -> Tensor:
                return self.loss(net(with_frozen(weights, live), buffers, inputs), target)

            loss, (grads,) = value_and_grad(loss_of, live)
            lr = self.lr if self.schedule == "constant" else cosine(self.lr, step, total)
            live, optimizer = self.optimizer.step(live, grads, work["optimizer"], lr)
            work = self.after_step({**work, "optimizer": optimizer}, live, step)
            losses[step] = loss
        return (
            Weights(weights.spec, with_frozen(weights, live), buffers),
            work,
            mean_loss(losses, total, env),
        )
