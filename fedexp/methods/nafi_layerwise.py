"""Layer-wise NAFI: FedMA's control flow with an assignment that pays for changing what is known of a unit.

Reference: Xiao & Cheng, Bayesian Federated Neural Matching that Completes Full Information, AAAI 2023, Appendix D (Algorithm 2)
and E (BatchNorm is folded). Up, server state and departures: as `fedexp.methods.fedma`; a matched layer is the posterior
mean, as in the authors' code, where Algorithm 2 divides by S however many models have a unit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fedexp.matching.beta_bernoulli import BetaBernoulli, Penalty
from fedexp.methods.fedma import FedMA


@dataclass(frozen=True)
class NAFILayerwise(FedMA):
    """The reward of every assignment less ``lam`` times a penalty; at 0 it is FedMA with the same options, to the bit.

    Args:
        penalty: ``paper``, the divergence of the posteriors before and after; ``code2020`` and ``code2022``, the code's.
        lam: lambda.
    """

    sigma0: float = 10.0
    gamma: float = 50.0
    penalty: Penalty = "code2020"
    lam: float = 0.5

    def matching(self) -> BetaBernoulli:
        return replace(super().matching(), penalty=self.penalty, strength=self.lam)
