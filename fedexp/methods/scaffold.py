"""SCAFFOLD: control variates that correct the drift of local training.

Reference:
    Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated
    Learning, ICML 2020, Algorithm 1.
    https://arxiv.org/abs/1910.06378

Update:
    Client i has a control variate c_i, and the server has a control variate c. All
    start at zero. A local step uses ``g + c - c_i`` instead of the gradient g. After
    local training c_i is replaced by c_i_new. With option I, c_i_new is the client's
    full gradient at the received model w^t. With option II it is
    ``c_i - c + (w^t - y_i) / (tau_i lr)``, where y_i is the model trained with tau_i
    local steps of size lr. The server adds ``(1 / N) sum_{i in P_t} (c_i_new - c_i)``
    to c. P_t are the participants of round t among the N clients.

Communication:
    Up: the trained model y_i and the change of c_i, together 2 D floats for D
    parameters. Down: the global model w and c (2 D floats).

State:
    Clients: c_i (D floats). Server: c (D floats).

Differences from the paper:
    If the models are weighted by samples, the server adds
    ``sum_{i in P_t} (n_i / n) (c_i_new - c_i)`` instead. n_i is client i's number of
    samples, and n is the number of samples of all N clients. Then c estimates the
    gradient of the sample-weighted loss, which weighted averaging minimises.

    ``correction=step`` is an extension that allows a local momentum rho. It applies
    ``w <- w - lr (c - c_i)`` after the optimizer's step, outside the momentum buffer.
    With momentum only this variant is stable. With the correction inside the buffer,
    the recursion of option II is undamped at rho = 0.5 and diverges at rho = 0.9.

    With momentum, tau steps with a constant gradient g move w by ``-lr a g``, where
    ``a`` is `Trainer.normalizer`. The correction outside the buffer moves w only by
    ``-lr tau (c - c_i)``. To give c and c_i the scale of the gradient's effect, option
    I multiplies the full gradient by ``a / tau``, which tends to ``1 / (1 - rho)``. In
    option II, ``w^t - y_i`` already contains this factor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from fedexp.core import trees
from fedexp.core.needs import SAME_INIT, SGD, Demand, Needs
from fedexp.core.trainer import (
    Adjustment,
    Ctx,
    Received,
    RoundStats,
    ServerUpdate,
    Trainer,
    elementwise,
)
from fedexp.core.trees import Tree, Trees

PLAIN = Demand(
    "local.momentum",
    0,
    "corrects the gradient itself, which diverges inside a momentum buffer",
    "trainer.correction=step, which corrects outside the buffer",
)


@dataclass(frozen=True)
class Scaffold(Trainer):
    """The trainer of SCAFFOLD.

    The server stores its control variate c for this trainer (`init_shared`,
    `update_shared`).

    Args:
        option: How the client's control variate c_i is updated: ``I`` (by one more pass
            over the data) or ``II`` (from the trained model).
        correction: Where ``c - c_i`` is added: ``gradient`` (to the gradient, as in the
            paper, plain SGD only) or ``step`` (after the optimizer's step, outside the
            momentum buffer).
    """

    option: Literal["I", "II"] = "II"
    correction: Literal["gradient", "step"] = "gradient"

    @property
    def needs(self) -> Needs:
        return Needs((SGD, SAME_INIT) if self.correction == "step" else (SGD, SAME_INIT, PLAIN))

    def init_state(self, start: Tree, received: Received) -> Trees:
        return {"c_i": trees.zeros_like(start)}

    def init_shared(self, start: Tree) -> Trees:
        return {"c": trees.zeros_like(start)}

    @elementwise
    def adjustment(self, ctx: Ctx) -> Adjustment:
        drift = trees.sub(ctx.shared["c"], ctx.state["c_i"])
        return (
            Adjustment(shift=drift) if self.correction == "gradient" else Adjustment(outside=drift)
        )

    def finish(self, params: Tree, buffers: Tree, ctx: Ctx) -> tuple[Trees, Trees]:
        old = ctx.state["c_i"]
        if self.option == "I":
            # The factor a / tau, which is 1 without momentum
            amplified = self.normalizer(ctx.num_steps, ctx.local_training) / ctx.num_steps
            change = trees.sub(trees.scale(ctx.full_gradient(ctx.start), amplified), old)
        else:
            change = trees.sub(ctx.start, params)
            torch._foreach_mul_(list(change.values()), 1 / (ctx.num_steps * ctx.local_training.lr))
            torch._foreach_sub_(list(change.values()), trees.tensors(ctx.shared["c"], change))
        return {"dc_i": change}, {"c_i": trees.add(old, change)}

    @property
    def payload_weights(self) -> Literal["uniform", "models"]:
        return "models"

    def update_shared(
        self, shared: Trees, payload_mean: Trees, update: ServerUpdate, stats: RoundStats
    ) -> Trees:
        return {"c": trees.add(shared["c"], payload_mean["dc_i"], alpha=stats.share)}
