"""SCAFFOLD: stochastic controlled averaging.

Reference: Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020, Algorithm 1.
Local step with ``g + c - c_i``; then c_i becomes, by option I, the client's full gradient at the received model, by
option II, ``c_i - c + (w^t - y_i) / (tau_i lr)``. Server: ``c += (1/N) sum_{i in P_t} (c_i_new - c_i)``, or, where the
models are weighted by samples, ``sum_{i in P_t} (n_i / n) (c_i_new - c_i)``, n being the samples of all N: c is then the
gradient of what the weighted mean minimises. Controls start at zero. Client state: c_i (D floats). Up: y_i and the change of
c_i (2D). Down: w and c (2D).

``correction=step`` applies ``w -= lr (c - c_i)`` after the optimizer's step, outside the momentum buffer. With momentum rho
only this is stable: inside the buffer, option II's recursion is undamped at 0.5 and diverges at 0.9. There tau steps with a
gradient g move w by ``lr a g``, a being `Trainer.normalizer`, and the correction moves it by ``lr tau (c - c_i)``: option I's
gradient is taken times a / tau, which tends to 1 / (1 - rho). Option II has the factor in its path.
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
    "corrects the gradient itself: inside a momentum buffer that diverges",
    "trainer.correction=step, which corrects outside the buffer",
)


@dataclass(frozen=True)
class Scaffold(Trainer):
    """Args:
    option: how c_i is renewed, ``I`` (one more pass over the data) or ``II``.
    correction: ``gradient`` (the paper's; plain SGD only) or ``step`` (outside the momentum buffer).
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
            amplified = (
                self.normalizer(ctx.num_steps, ctx.local_training) / ctx.num_steps
            )  # 1 without momentum
            change = trees.sub(trees.scale(ctx.full_gradient(ctx.start), amplified), old)
        else:
            change = trees.sub(ctx.start, params)
            torch._foreach_mul_(list(change.values()), 1 / (ctx.num_steps * ctx.local_training.lr))
            torch._foreach_sub_(list(change.values()), list(ctx.shared["c"].values()))
        return {"dc_i": change}, {"c_i": trees.add(old, change)}

    @property
    def payload_weights(self) -> Literal["uniform", "models"]:
        return "models"

    def update_shared(
        self, shared: Trees, payload_mean: Trees, update: ServerUpdate, stats: RoundStats
    ) -> Trees:
        return {"c": trees.add(shared["c"], payload_mean["dc_i"], alpha=stats.share)}
