"""NAFI: PFNM whose assignment pays for changing what is known of a unit.

Reference: Xiao & Cheng, Bayesian Federated Neural Matching that Completes Full Information, AAAI 2023, Eq. 14-15 and
Algorithm 1, and the authors' code, which has other penalties than the paper and the coefficient 1 of the popularity.
Up, server state and departures: as `fedexp.methods.pfnm`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fedexp.core.build import require
from fedexp.core.needs import Demand, Needs
from fedexp.matching.beta_bernoulli import BetaBernoulli, Penalty
from fedexp.methods.pfnm import PFNM

_LOOKED_AT = Demand(
    "trace.every",
    1,
    "has several lambdas, which nothing but a trace looks at",
    "give aggregator.lam one number",
)


@dataclass(frozen=True)
class NAFI(PFNM):
    """The reward of every assignment less ``lam`` times a penalty; at 0 it is PFNM with the same options, to the bit.

    Several lambdas are a grid on the same local models, each to the bit what it is alone: the first one's network is what the
    run delivers and goes on with, and lambda number i is iteration i of a trace (``trace.every=1``), whose rows have ``lam``,
    the metrics of ``fused`` and what PFNM logs.

    Args:
        penalty: ``paper``, the divergence of the posteriors before and after; ``code2020`` and ``code2022``, the code's.
        lam: lambda, or several.
        continued: with ``visits=raw``, a lambda's orders follow in the stream on those of the lambda before it; else all
            begin where the split left it.
    """

    sigma: float = 0.9
    sigma0: float = 3.0
    caps: bool = False
    class_frequency: bool = False
    penalty: Penalty = "code2020"
    lam: float | tuple[float, ...] = 0.5
    continued: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require(len(self.strengths) > 0, "lam names no lambda")
        for strength in self.strengths:
            replace(self.matching(), strength=strength)

    @property
    def needs(self) -> Needs:
        return super().needs | Needs((_LOOKED_AT,) if len(self.strengths) > 1 else ())

    def matching(self) -> BetaBernoulli:
        return replace(super().matching(), penalty=self.penalty)

    @property
    def strengths(self) -> tuple[float, ...]:
        return self.lam if isinstance(self.lam, tuple) else (self.lam,)

    def stretch(self, number: int) -> int:
        return number if self.continued else 0
