"""MoFedSAM: FedSAM's gradient in FedCM's mix.

Reference: Qu et al., Generalized Federated Learning via Sharpness Aware Minimization, ICML 2022:
``v = alpha g_2 + (1 - alpha) Delta`` with the gradient g_2 at the perturbed weights. Everything else is `FedCM`'s and `FedSAM`'s;
the ascent follows the plain gradient, not the mix, as in FL-Simulator.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedexp.methods.fedcm import FedCM
from fedexp.methods.fedsam import FedSAM


@dataclass(frozen=True)
class MoFedSAM(FedSAM, FedCM):
    """Args as of `FedCM` and `FedSAM`: alpha=1 is FedSAM, rho=0 FedCM, both FedAvg, to the bit."""

    def __post_init__(self) -> None:
        FedCM.__post_init__(self)
        FedSAM.__post_init__(self)
