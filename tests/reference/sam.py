"""Sharpness-aware minimisation at the clients.

A step uses the gradient at ``w + rho g / ||g||`` on the same batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedexp.core.trainer import Ascent, Ctx, Trainer


@dataclass(frozen=True)
class Sam(Trainer):
    """A trainer with sharpness-aware steps.

    Args:
        rho: Radius of the perturbation.
    """

    rho: float = 0.1

    def ascent(self, ctx: Ctx) -> Ascent:
        return Ascent(self.rho)
