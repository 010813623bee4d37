"""MoFedSAM: FedSAM's gradient in FedCM's mix.

Reference:
    Qu et al., Generalized Federated Learning via Sharpness Aware Minimization, ICML
    2022.

Update:
    ``v = alpha g_2 + (1 - alpha) Delta``, where g_2 is the gradient at the perturbed
    weights. Everything else is as in `FedCM` and `FedSAM`. As in FL-Simulator, the
    ascent follows the plain gradient, not the mix.

Communication:
    Up: y_i. Down: w and Delta (2D). D is the number of parameters.

State:
    Clients: none. Server: Delta (D floats).
"""

from __future__ import annotations

from dataclasses import dataclass

from fedexp.methods.fedcm import FedCM
from fedexp.methods.fedsam import FedSAM


@dataclass(frozen=True)
class MoFedSAM(FedSAM, FedCM):
    """The client's side of MoFedSAM, with the arguments of `FedCM` and `FedSAM`.

    With alpha=1 it equals FedSAM, with rho=0 FedCM and with both FedAvg, bit-exactly.
    """

    def __post_init__(self) -> None:
        FedCM.__post_init__(self)
        FedSAM.__post_init__(self)
