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
    As in `fedexp.methods.pfnm`. The authors' code has other penalties than the paper.
    The option `penalty` chooses between them. The reward of an assignment to global
    unit k contains ``log(c_k / (N - c_k))``, where c_k of the N models have the unit.
    The coefficient of this term (`popularity`) is 1 in the code and 2 in the paper.
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

    Every assignment of a local unit to a global unit has a reward. NAFI subtracts a
    penalty with the factor `lam` from each reward. With ``lam=0`` the result equals
    PFNM with the same options bit-exactly.

    With several values of lambda, the same local models are fused once per lambda. Each
    result is bit-identical to the result of a run with only this lambda. The run
    delivers the network of the first lambda and continues with this network. The other
    networks are only evaluated for the trace (``trace.every=1``). Iteration i of the
    trace belongs to the lambda of index i, from 0. The rows of the trace contain
    ``lam``, the metrics of the fused network (``fused``) and the values that PFNM logs.

    Args:
        penalty: ``paper`` (the Kullback-Leibler divergence between the posteriors of a
            global unit before and after an assignment), or the formula in the authors'
            code of 2020 (``code2020``) or of 2022 (``code2022``).
        lam: The factor lambda, or a list of several factors.
        continued: Used only with ``visits=raw`` and several lambdas. If true, one
            stream of random numbers gives the visiting orders of all lambdas, one
            lambda after the other. If false, every lambda starts from the stream's
            state after the split of the data.
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
