"""What methods have in common whose server distils the cohort into the mean: a student that starts there fits given targets."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from fedexp.core import trees
from fedexp.core.aggregator import State
from fedexp.core.build import require
from fedexp.core.env import Env
from fedexp.core.needs import Demand, Needs
from fedexp.core.net import Net
from fedexp.core.task import Metrics
from fedexp.core.trees import Tree
from fedexp.core.weights import Weights
from fedexp.methods.bases.server_trained import Part, ServerTrained, mean_loss, whole
from fedexp.server_training.gradients import value_and_grad
from fedexp.server_training.optimizers import Optimizer, Sgd, cosine
from fedexp.tasks.classification import Classification


@dataclass(frozen=True)
class Distilling(ServerTrained):
    """The student is the mean, in training mode; the optimizer's state starts empty every round.

    Args:
        optimizer: of the student; lr: its step size.
        schedule: of `lr` over a round's steps, ``constant`` or ``cosine`` (to 0).
    """

    optimizer: Optimizer = field(default_factory=lambda: Sgd(momentum=0.9, weight_decay=5e-4))
    lr: float = 0.08
    schedule: Literal["constant", "cosine"] = "constant"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.lr > 0, f"lr must be positive, got {self.lr}")

    @property
    def needs(self) -> Needs:
        return super().needs | Needs(
            (Demand("task", Classification, "compares logits of classes"),)
        )

    @abstractmethod
    def taught(self, gathered: State, start: Weights, mean: Weights, env: Env) -> State:
        """What `lessons` needs of the cohort: ``target``, (n, classes) log-probabilities for all proxy samples."""

    def lessons(self, work: State, net: Net, parts: Iterator[Part], env: Env) -> Iterator[Part]:
        """Each part's step, inputs and targets (b, classes)."""
        for step, index, inputs in parts:
            yield step, inputs, work["target"].index_select(0, index)

    @abstractmethod
    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """Of the student's logits (b, classes), a scalar."""

    def after_step(self, work: State, live: Tree, step: int) -> State:
        """`work` after optimizer step `step`, from 0, which made `live` of the trained parameters."""
        return work

    def begin(self, gathered: State, start: Weights, mean: Weights, env: Env) -> State:
        return {
            "optimizer": self.optimizer.init(mean.trainable),
            **self.taught(gathered, start, mean, env),
        }

    def train(
        self, weights: Weights, work: State, net: Net, parts: Iterator[Part], env: Env
    ) -> tuple[Weights, State, Metrics]:
        live, buffers, total = weights.trainable, trees.clone(weights.buffers), self.total(env)
        losses: dict[int, Tensor] = {}
        for step, inputs, target in self.lessons(work, net, parts, env):

            def loss_of(live: Tree, inputs: Tensor = inputs, target: Tensor = target) -> Tensor:
                return self.loss(net(whole(weights, live), buffers, inputs), target)

            loss, (grads,) = value_and_grad(loss_of, live)
            lr = self.lr if self.schedule == "constant" else cosine(self.lr, step, total)
            live, optimizer = self.optimizer.step(live, grads, work["optimizer"], lr)
            work = self.after_step({**work, "optimizer": optimizer}, live, step)
            losses[step] = loss
        return (
            Weights(weights.spec, whole(weights, live), buffers),
            work,
            mean_loss(losses, total, env),
        )
