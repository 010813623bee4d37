"""FedAvg: local training, then the weighted mean of the clients' updates.

Reference:
    McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized
    Data, AISTATS 2017, Algorithm 1.
    https://arxiv.org/abs/1602.05629

Update:
    ``w <- w + sum_i p_i (y_i - w)``, where w is the global model and y_i is client i's
    trained model. The sum is over the participants. By default p_i is client i's share
    of the participants' samples. The result is the paper's weighted mean of models. All
    averaging methods compute such a step from w, so their floating-point rounding is
    the same.

Communication:
    Up: the trained model y_i. Down: the global model w.

State:
    Clients: none. Server: w.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fedexp.core import trees
from fedexp.core.build import require_positive
from fedexp.core.server_optimizer import ServerOptimizer
from fedexp.core.task import Metrics
from fedexp.core.trainer import RoundStats, Trainer
from fedexp.core.trees import Tree
from fedexp.methods.bases.averaging import Averaging


@dataclass(frozen=True)
class PlainTrainer(Trainer):
    """Plain local training: the task's loss and the configured local optimizer.

    A client sends only its model.
    """


@dataclass(frozen=True)
class Mean(Averaging):
    """The aggregator of FedAvg, the weighted mean of the clients' updates.

    Each update is added to a running sum when it arrives. Memory therefore does not
    grow with the number of clients.
    """

    @property
    def is_plain_mean(self) -> bool:
        names = ("normalizer", "factor", "add", "shares", "merged", "update")
        return all(getattr(type(self), name) is getattr(Mean, name) for name in names)

    def add(self, merging: Tree | None, update: Tree, p: float, a: float) -> Tree:
        total = trees.zeros_like(update) if merging is None else merging
        torch._foreach_add_(trees.tensors(total), trees.tensors(update, total), alpha=p / a)
        return total

    def merged(self, merging: Tree, p: Sequence[float]) -> Tree:
        torch._foreach_mul_(trees.tensors(merging), 1 / sum(p))
        return merging


@dataclass(frozen=True)
class PlainServerStep(ServerOptimizer):
    """The plain server step ``w + lr * direction``, without momentum.

    w is the global model, and `direction` is the aggregated client update. With
    ``lr=1`` the new model is the aggregate of the clients' models.

    Args:
        lr: Server step size (eta_g).
    """

    lr: float = 1.0

    def __post_init__(self) -> None:
        require_positive(self, "lr")

    @property
    def changes_update(self) -> bool:
        return self.lr != 1.0

    def step(
        self, state: dict[str, Any], params: Tree, direction: Tree, stats: RoundStats
    ) -> tuple[dict[str, Any], Tree, Metrics]:
        return state, trees.add(params, direction, alpha=self.lr), {}
