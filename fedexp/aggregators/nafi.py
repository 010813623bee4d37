"""NAFI: PFNM whose assignment pays for changing what is known of a unit.

Reference: Xiao & Cheng, Bayesian Federated Neural Matching that Completes Full Information, AAAI 2023, Eq. 14-15 and
Algorithm 1, and the authors' code, which has other penalties than the paper and the coefficient 1 of the popularity.
Up, server state and departures: as `fedexp.aggregators.pfnm`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fedexp.aggregators.pfnm import PFNM
from fedexp.matching.beta_bernoulli import BetaBernoulli, Penalty


@dataclass(frozen=True)
class NAFI(PFNM):
    """The reward of every assignment less ``lam`` times a penalty; at 0 it is PFNM with the same options, to the bit.

    Args:
        penalty: ``paper``, the divergence of the posteriors before and after; ``code2020`` and ``code2022``, the code's.
        lam: lambda.
    """

    sigma: float = 0.9
    sigma0: float = 3.0
    caps: bool = False
    class_frequency: bool = False
    penalty: Penalty = "code2020"
    lam: float = 0.5

    def matching(self) -> BetaBernoulli:
        return replace(super().matching(), penalty=self.penalty, strength=self.lam)
