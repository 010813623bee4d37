"""MoFedSAM: FedSAM's gradient in FedCM's mix.

Reference:
    Qu et al., Generalized Federated Learning via Sharpness Aware Minimization, ICML
    2022.
    https://arxiv.org/abs/2206.02618

Update:
    A local step uses ``v = alpha g_2 + (1 - alpha) Delta``. g_2 is the gradient at
    FedSAM's perturbed weights, Delta is FedCM's momentum, and alpha is the share of the
    client's gradient. Everything else is as in `FedCM` and `FedSAM`. As in the code
    FL-Simulator, the perturbation is along the client's gradient at w, not along v.

Communication:
    Up: the trained model y_i. Down: the global model w and Delta, together 2 D floats
    for D parameters.

State:
    Clients: none. Server: Delta (D floats).

Differences from the paper:
    The paper aggregates by the mean. Here the aggregator may also be FedMRUR's
    normalised mean (FedMRUR-N in Table 4 of An et al., NeurIPS 2023). Delta may then be
    computed from the mean before its normalisation (`momentum_from`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fedexp.core.needs import Needs
from fedexp.core.trainer import RoundStats, ServerUpdate
from fedexp.core.trees import Trees
from fedexp.methods.fedcm import FedCM
from fedexp.methods.fedmrur.normalized_mean import PLAIN_MOMENTUM, before_normalisation
from fedexp.methods.fedsam import FedSAM


@dataclass(frozen=True)
class LocalMoFedSAM(FedSAM, FedCM):
    """The local training of MoFedSAM, with the arguments of `FedCM` and `FedSAM`.

    With ``alpha=1`` it is bit-identical to FedSAM, with ``rho=0`` to FedCM, and with
    both to FedAvg.
    """

    def __post_init__(self) -> None:
        FedCM.__post_init__(self)
        FedSAM.__post_init__(self)


@dataclass(frozen=True)
class MoFedSAM(LocalMoFedSAM):
    """The client's side of MoFedSAM, with the arguments of `LocalMoFedSAM`.

    Args:
        momentum_from: The aggregate from which the momentum Delta is computed, as in
            `fedexp.methods.fedmrur.trainer.FedMRUR`: the aggregate that the server
            applies (``normalised``) or the mean before its normalisation (``plain``).
    """

    # The client cache identifies a trainer by its repr. This field is not part of the
    # repr, because only the server reads it.
    momentum_from: Literal["normalised", "plain"] = field(default="normalised", repr=False)

    @property
    def needs(self) -> Needs:
        return super().needs | (PLAIN_MOMENTUM if self.momentum_from == "plain" else Needs())

    def update_shared(
        self, shared: Trees, payload_mean: Trees, update: ServerUpdate, stats: RoundStats
    ) -> Trees:
        if self.momentum_from == "plain":
            update = before_normalisation(update, stats)
        return super().update_shared(shared, payload_mean, update, stats)
