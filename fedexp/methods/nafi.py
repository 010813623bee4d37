"""NAFI: PFNM with a penalty on assignments that change the information about a unit.

Reference:
    Xiao & Cheng, Bayesian Federated Neural Matching that Completes Full Information,
    AAAI 2023, Eq. 14-15 and Algorithm 1, and the authors' code.
    https://arxiv.org/abs/2211.08010

Communication:
    As in `fedexp.methods.pfnm`.

State:
    As in `fedexp.methods.pfnm`.

Differences from the paper:
    As in `fedexp.methods.pfnm`. The authors' code has other penalties than the paper
    (`penalty`). In the code the coefficient of ``log(c_k / (N - c_k))`` (`popularity`)
    is 1, in the paper it is 2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fedexp.core.build import require
from fedexp.core.needs import Demand, Needs
from fedexp.matching.beta_bernoulli import BetaBernoulli, Penalty
from fedexp.methods.pfnm import PFNM

_TRACED = Demand(
    "trace.every",
    1,
    "has several lambdas, which only a trace reports",
    "give aggregator.lam one number",
)


@dataclass(frozen=True)
class NAFI(PFNM):
    """The aggregator of NAFI.

    A penalty with the factor `lam` is subtracted from the reward of every assignment.
    With ``lam=0`` the result equals PFNM with the same options bit-exactly.

    Several values of lambda form a grid on the same local models. The result of each
    lambda is bit-identical to that of a run with this lambda only. The run delivers the
    network of the first lambda and continues with this network. Iteration i of the
    trace (``trace.every=1``) belongs to the lambda of index i, from 0. The rows of the
    trace contain ``lam``, the metrics of ``fused`` and the values that PFNM logs.

    Args:
        penalty: ``paper`` (the divergence between the posteriors of a global unit
            before and after an assignment), ``code2020`` or ``code2022`` (the forms of
            the code).
        lam: The factor lambda, or several for a grid.
        continued: With ``visits=raw``, whether the orders of a lambda continue the
            stream of random numbers after the orders of the previous lambda. If not,
            every lambda starts from the stream's state after the split of the data.
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
        require(len(self.strengths) > 0, "lam must contain at least one lambda")
        for strength in self.strengths:
            replace(self.matching(), strength=strength)

    @property
    def needs(self) -> Needs:
        return super().needs | Needs((_TRACED,) if len(self.strengths) > 1 else ())

    def matching(self) -> BetaBernoulli:
        return replace(super().matching(), penalty=self.penalty)

    @property
    def strengths(self) -> tuple[float, ...]:
        return self.lam if isinstance(self.lam, tuple) else (self.lam,)

    def stretch(self, number: int) -> int:
        return number if self.continued else 0
