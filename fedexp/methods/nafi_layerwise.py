"""Layer-wise NAFI: FedMA's control flow with the penalised assignment of NAFI.

Reference:
    Xiao & Cheng, Bayesian Federated Neural Matching that Completes Full Information,
    AAAI 2023, Appendix D (Algorithm 2) and E (BatchNorm is folded).
    https://arxiv.org/abs/2211.08010

Communication:
    As in `fedexp.methods.fedma`.

State:
    As in `fedexp.methods.fedma`.

Differences from the paper:
    As in `fedexp.methods.fedma`. The units of a matched layer are posterior means, as
    in the authors' code. With ``merge=mean`` a unit is the mean over the models that
    have it. Algorithm 2 divides by the number S of all models, even if fewer models
    have the unit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fedexp.matching.beta_bernoulli import BetaBernoulli, Penalty
from fedexp.methods.fedma import FedMA


@dataclass(frozen=True)
class NAFILayerwise(FedMA):
    """The aggregator of layer-wise NAFI, which subtracts a penalty from every reward.

    The penalty has the factor `lam`. With ``lam=0`` the result equals FedMA with the
    same options bit-exactly.

    Args:
        penalty: ``paper`` (the divergence between the posteriors of a global unit
            before and after an assignment), ``code2020`` or ``code2022`` (the forms of
            the code).
        lam: The factor lambda of the penalty.
    """

    sigma0: float = 10.0
    gamma: float = 50.0
    penalty: Penalty = "code2020"
    lam: float = 0.5

    def matching(self) -> BetaBernoulli:
        return replace(super().matching(), penalty=self.penalty, strength=self.lam)
