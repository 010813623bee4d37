"""FedNova: normalised averaging.

Reference:
    Wang et al., Tackling the Objective Inconsistency Problem in Heterogeneous Federated
    Optimization, NeurIPS 2020, Eq. 8-10.
    https://arxiv.org/abs/2007.07481

Update:
    ``w <- w + tau_eff * sum_i p_i u_i / a_i`` with ``tau_eff = sum_i p_i a_i``. u_i is
    the update of client i, p_i is its weight, and a_i is its normaliser. a_i measures,
    in units of lr, how far the local steps move the weights under a constant unit
    gradient. It depends on the momentum (`Trainer.normalizer`) and on a proximal pull
    (`FedProx.normalizer`). The trainer therefore computes it.

Communication:
    Up: the update u_i and a_i. Down: the global model w.

State:
    Clients: none.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedexp.core.env import Env
from fedexp.core.jobs import ClientResult
from fedexp.core.needs import SGD, Needs
from fedexp.core.trainer import RoundStats
from fedexp.core.trees import Tree
from fedexp.methods.fedavg import Mean


@dataclass(frozen=True)
class FedNova(Mean):
    """The aggregator of FedNova.

    Each update is divided by its normaliser a_i. The weighted mean of these quotients
    is multiplied by tau_eff.
    """

    @property
    def needs(self) -> Needs:
        return super().needs | Needs((SGD,), local_steps=True)

    def normalizer(self, result: ClientResult, env: Env) -> float:
        return env.trainer.normalizer(result.num_steps, env.local_training_this_round)

    def factor(self, merged: Tree, stats: RoundStats, env: Env) -> float:
        """Return tau_eff (Eq. 10)."""
        a = [env.trainer.normalizer(tau, env.local_training_this_round) for tau in stats.tau]
        return sum(p * a_i for p, a_i in zip(stats.p, a, strict=True))
