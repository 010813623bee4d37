"""Sharpness-aware minimisation at the clients: the step from the gradient at ``w + rho
g / ||g||``, on the same batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedexp.core.trainer import Ascent, Ctx, Trainer


@dataclass(frozen=True)
class Sam(Trainer):
    """Args: rho: radius of the perturbation."""

    rho: float = 0.1

    def ascent(self, ctx: Ctx) -> Ascent:
        return Ascent(self.rho)
