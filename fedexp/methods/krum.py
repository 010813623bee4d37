"""Krum and Multi-Krum: the mean of the updates that are closest to their neighbours.

Reference:
    Blanchard, El Mhamdi, Guerraoui, Stainer, Machine Learning with Adversaries:
    Byzantine Tolerant Gradient Descent, NIPS 2017.
    https://arxiv.org/abs/1703.02757

Update:
    n participants send updates, and f of them may be attackers. The score of update u_i
    is ``s(i) = sum_j ||u_i - u_j||^2``. The sum is over the n - f - 2 updates u_j that
    are nearest to u_i, without u_i itself. Krum takes the update with the lowest score.
    Ties go to the first client. Multi-Krum takes the mean of the m updates with the
    lowest scores. For m = n this is the uniform mean. The paper's guarantee needs
    2 f + 2 < n. The server computes n^2 distances.

Communication:
    Up: the trained model y_i. Down: the global model w.

State:
    None.

Differences from the paper:
    The paper's workers send gradients. Here, as usual in federated learning, updates
    u_i = y_i - w are compared. A distance is over all parameters together. Only
    parameters are protected. Floating-point buffers (of BatchNorm) and everything that
    a trainer sends besides the model are averaged over all participants.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from fedexp.core.aggregator import State
from fedexp.core.build import require
from fedexp.core.env import Env, Extent
from fedexp.core.errors import ConfigError
from fedexp.core.trees import Tree
from fedexp.methods.bases.averaging import Collecting


@dataclass(frozen=True)
class Krum(Collecting):
    """The aggregator of Krum and Multi-Krum.

    All clients have the same weight, whatever their numbers of samples. With
    ``client_dropout`` or ``on_nonfinite=skip_client``, fewer clients may return than
    were sampled. The condition n >= 2 f + 3 is checked for the sampled clients, minus
    all clients without data. Every score is computed from at least one neighbour.

    Args:
        f: Number of attackers among a round's participants. An int is a count. A float
            is a fraction of the participants. The resulting number is rounded down.
        m: Number of updates that are averaged. 1 is Krum, a larger number Multi-Krum.
    """

    computes_in_float64: ClassVar[bool] = True

    f: int | float = 0.2
    m: int = 1

    def __post_init__(self) -> None:
        require(
            self.f >= 0 and (isinstance(self.f, int) or self.f < 0.5),
            f"f must be a count (2) or a fraction below one half (0.2), got {self.f}",
        )
        require(self.m >= 1, f"m must be at least 1, got {self.m}")

    def attackers(self, n: int) -> int:
        """Return f for n participants."""
        return self.f if isinstance(self.f, int) else int(self.f * n + 1e-9)

    def check_extent(self, extent: Extent) -> None:
        if extent.sampling.kind != "fixed":
            raise ConfigError(
                "Krum requires 2 f + 3 participants or more in every round",
                where="sampling",
                expected="fixed",
                got=extent.sampling.kind,
            )
        self._check(int(extent.sampling.m))

    def _check(self, n: int) -> None:
        """Refuse f and m that do not fit n participants."""
        f = self.attackers(n)
        if n < 2 * f + 3:
            raise ConfigError(
                f"Krum against f = {f} attackers needs 2 f + 3 = {2 * f + 3} participants or more",
                where="aggregator.f",
                expected=f"at most {(n - 3) // 2}" if n >= 3 else "3 participants or more",
                got=f"{self.f}, and {n} of a round's clients have data",
                do="lower aggregator.f, or raise clients_per_round"
                if n >= 3
                else "raise clients_per_round",
            )

        if self.m > n:
            raise ConfigError(
                "more updates would be averaged than there are",
                where="aggregator.m",
                expected=f"at most {n}",
                got=self.m,
            )

    def init(self, env: Env) -> State:
        # Clients without data send no update. At worst, all of them are sampled.
        self._check(max(0, int(env.sampling.m) - int((env.sizes == 0).sum())))
        return super().init(env)

    def shares(self, merging: Sequence[Tree], p: Sequence[float]) -> Sequence[float]:
        updates, n = merging, len(merging)
        squared = torch.zeros(
            n, n, dtype=torch.float64, device=next(iter(updates[0].values())).device
        )

        for name in updates[0]:
            # Not `flatten(1)`, because a parameter may be a scalar
            stacked = torch.stack([update[name] for update in updates]).reshape(n, -1).double()
            squared += torch.cdist(
                stacked, stacked, compute_mode="donot_use_mm_for_euclid_dist"
            ).square()

        # A client is not its own neighbour
        squared.fill_diagonal_(torch.inf)
        scores = squared.sort(1).values[:, : max(1, n - self.attackers(n) - 2)].sum(1)
        chosen = scores.argsort(stable=True)[: self.m].tolist()
        return [1.0 if client in chosen else 0.0 for client in range(n)]

    def merge(self, updates: Sequence[Tree], p: Sequence[float]) -> Tree:
        chosen = [client for client, share in enumerate(p) if share]
        return {
            name: torch.stack([updates[c][name] for c in chosen]).mean(0) for name in updates[0]
        }
