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
    As in `fedexp.methods.fedma`. By default the merged units of a layer are posterior
    means, as in the authors' code. With ``merge=mean`` a merged unit is the mean over
    the models that have it. Algorithm 2 divides by the number S of all models instead,
    even if fewer models have the unit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fedexp.matching.beta_bernoulli import BetaBernoulli, Penalty
from fedexp.methods.fedma import FedMA


@dataclass(frozen=True)
class NAFILayerwise(FedMA):
    """The aggregator of layer-wise NAFI.

    Every assignment of a local unit to a global unit has a reward. NAFI subtracts a
    penalty with the factor `lam` from each reward. With ``lam=0`` the result equals
    FedMA with the same options bit-exactly.

    Args:
        penalty: ``paper`` (the Kullback-Leibler divergence between the posteriors of a
            global unit before and after an assignment), or the formula in the authors'
            code of 2020 (``code2020``) or of 2022 (``code2022``).
        lam: The factor lambda of the penalty.
    """

    sigma0: float = 10.0
    gamma: float = 50.0
    penalty: Penalty = "code2020"
    lam: float = 0.5

    def matching(self) -> BetaBernoulli:
        return replace(super().matching(), penalty=self.penalty, strength=self.lam)
