"""The plain mean of a cohort's N models, each with weight 1 / N.

Reference:
    "Average" of Su, Li, Xue, One-shot Federated Learning without server-side training,
    Neural Networks 2023 (MA-Echo).
    https://arxiv.org/abs/2204.12493

Update:
    Every floating-point tensor is averaged with equal weights. With
    ``last_layer=masked`` each row of the last layer is averaged only over clients that
    have the row's class (more than one sample of it).

Communication:
    Up: the trained model y_i. With ``last_layer=masked`` also the class counts n_{i,c},
    the numbers of client i's samples of each class c. Down: the global model w.

State:
    Server: the mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedexp.core.env import Env
from fedexp.core.jobs import ClientResult
from fedexp.core.task import Metrics
from fedexp.core.weights import Weights
from fedexp.methods.bases.fusion import averaged
from fedexp.methods.bases.output_layer import LastLayer, MaskableFusion


@dataclass(frozen=True)
class Average(MaskableFusion):
    """The aggregator of the plain mean of models.

    An integer buffer is set to its maximum over the models.

    Args:
        last_layer: Mean of the last layer, ``plain`` or ``masked``. With ``masked``,
            row c of the layer is the mean over the clients with more than one sample of
            class c. The row is zero if there is no such client.
    """

    last_layer: LastLayer = "plain"

    def fuse(self, results: Sequence[ClientResult], env: Env) -> tuple[Weights, Metrics]:
        models = [result.weights for result in results]
        return self.with_last_layer(averaged(models), models, results, env), {}
