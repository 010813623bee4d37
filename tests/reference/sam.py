"""A trainer with sharpness-aware minimisation at the clients.

Each step uses the gradient at ``w + rho g / ||g||`` on the same batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedexp.core.trainer import Ascent, Ctx, Trainer


@dataclass(frozen=True)
class Sam(Trainer):
    """A trainer that perturbs the weights before it computes the gradient.

    Args:
        rho: Radius of the perturbation.
    """

    rho: float = 0.1

    def ascent(self, ctx: Ctx) -> Ascent:
        return Ascent(self.rho)
