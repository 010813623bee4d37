"""MOON: model-contrastive federated learning.

Reference:
    Li, He & Song, Model-Contrastive Federated Learning, CVPR 2021, Eq. 3 and Algorithm
    1.
    https://arxiv.org/abs/2103.16257

Update:
    The loss is the task's loss plus mu times the contrastive term. This term is the
    batch mean of
    ``-log(exp(s_glob / tau) / (exp(s_glob / tau) + exp(s_prev / tau)))`` with
    temperature tau. ``s_glob = sim(z, z_glob)`` and ``s_prev = sim(z, z_prev)`` are
    cosine similarities of features of one input. z are the features in the current
    model, z_glob in the received model, and z_prev in the model that the client trained
    last. The received and the last model run in evaluation mode and without a gradient.
    In its first round a client uses the received model as its last model, too. The term
    is then log 2 and its gradient is zero.

Communication:
    Up: the trained model y_i. Down: the global model w.

State:
    Clients: the model after the last local training, with its buffers.

Differences from the paper:
    The paper adds a projection head before the output layer, and z is its output. Here
    z is the input of the output layer. Both definitions agree if the network's last
    hidden layers are a projection head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from fedexp.core.build import require_not_negative, require_positive
from fedexp.core.layers import check_head
from fedexp.core.needs import Demand, Needs
from fedexp.core.net import Net
from fedexp.core.task import Batch
from fedexp.core.trainer import Ctx, Measured, Received, Trainer
from fedexp.core.trees import Tree, Trees
from fedexp.core.weights import ModelSpec
from fedexp.tasks.classification import Classification


@dataclass(frozen=True)
class Moon(Trainer):
    """The client's side of MOON.

    Args:
        mu: Weight of the contrastive term. With 0 the method equals FedAvg bit-exactly.
        temperature: Temperature tau.
    """

    mu: float = 1.0
    temperature: float = 0.5

    def __post_init__(self) -> None:
        require_not_negative(self, "mu")
        require_positive(self, "temperature")

    @property
    def needs(self) -> Needs:
        return Needs(
            (Demand("task", Classification, "adds its term to the cross-entropy of class labels"),),
            global_model=self.mu > 0,
        )

    def check(self, spec: ModelSpec, input_shape: tuple[int, ...]) -> None:
        if self.mu:
            check_head(spec, input_shape)

    def init_state(self, start: Tree, received: Received) -> Trees | None:
        return {"params": received.params, "buffers": received.buffers} if self.mu else None

    def loss(
        self, net: Net, params: Tree, buffers: Tree, batch: Batch, ctx: Ctx
    ) -> Tensor | Measured:
        """Compute the loss, and measure ``contrast``, the term before the factor mu."""
        if not self.mu:
            return super().loss(net, params, buffers, batch, ctx)
        seen = net.observe(params, buffers, batch.x, features=True)
        assert seen.features is not None
        z = seen.features.flatten(1)
        near = F.cosine_similarity(z, _features(ctx, *ctx.received, batch.x))
        far = F.cosine_similarity(
            z, _features(ctx, ctx.state["params"], ctx.state["buffers"], batch.x)
        )
        term = F.softplus((far - near) / self.temperature).mean()
        return Measured(F.cross_entropy(seen.output, batch.y) + self.mu * term, {"contrast": term})

    def finish(self, params: Tree, buffers: Tree, ctx: Ctx) -> tuple[Trees, Trees | None]:
        return {}, {
            "params": {**ctx.received.params, **params},
            "buffers": buffers,
        } if self.mu else None


def _features(ctx: Ctx, params: Tree, buffers: Tree, x: Tensor) -> Tensor:
    """Return the features (b, d) of inputs x in the model of `params` and `buffers`."""
    features = ctx.reference.observe(params, buffers, x, features=True).features
    assert features is not None
    return features.flatten(1)
