"""The gated Dirichlet split, ten clients at a time.

"Gated" means that a client gets no more samples once it has its equal share of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedexp.core.build import require
from fedexp.core.data import Partition
from fedexp.core.errors import DataError
from fedexp.data.partitions.bounded import BoundedPartitioner
from fedexp.data.partitions.dirichlet import Dirichlet, DirichletPartitioner


@dataclass(frozen=True, kw_only=True)
class DirichletBlocks(DirichletPartitioner, BoundedPartitioner):
    """FedDF's split (Lin et al. 2020), which FedCDA cites.

    The shuffled pool is cut into blocks, one for every ten clients. Take a block of n_b
    samples for c clients. Each class of the block is divided among the c clients in
    proportions drawn from Dir(alpha 1_c). A client that holds n_b / c samples gets no
    samples of further classes. The block is sampled again until the smallest client has
    half of n_b / c samples. Every client therefore has samples, and no client has less
    than about half the mean number.

    Args:
        alpha: Concentration. As alpha goes to 0, each class of a block goes to one
            client.
        block: Number of clients per block. The last block may have fewer.
        max_draws: Largest number of attempts for each block.
        max_seconds: Largest CPU time of all attempts for a block, in seconds.
    """

    name: ClassVar[str] = "dirichlet_blocks"
    limited: ClassVar[str] = "block"

    block: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.block >= 1, f"block must be at least 1, got {self.block}")

    def sample(
        self, labels: np.ndarray, num_classes: int, clients: int, rng: np.random.RandomState
    ) -> Partition:
        if clients > len(labels):
            raise DataError(
                "every client gets at least half its equal share, but there are more clients than "
                "samples",
                where="clients",
                expected=f"at most {len(labels)}",
                got=clients,
                do="lower clients",
            )

        order = rng.permutation(len(labels))
        parts: list[np.ndarray] = []
        draws = 0

        for first in range(0, clients, self.block):
            own = min(self.block, clients - first)
            start, stop = (len(labels) * bound // clients for bound in (first, first + own))
            at = order[start:stop]

            smallest = max(1, len(at) // (2 * own))
            dealt = Dirichlet(
                alpha=self.alpha,
                min_size=smallest,
                max_draws=self.max_draws,
                max_seconds=self.max_seconds,
                on_small="allow",
            ).sample(labels[at], num_classes, own, rng)
            draws += int(dealt.info["draws"])

            if int(dealt.sizes.min()) < smallest:
                raise DataError(
                    "a block has a client with less than half its equal share in every attempt "
                    f"(attempts: {dealt.info['draws']})",
                    where=f"partition dirichlet_blocks: alpha={self.alpha}, {own} clients and "
                    f"{len(at)} samples in the block",
                    expected=f"a smallest client with at least {smallest} samples",
                    got=f"{int(dealt.sizes.min())} samples in the first attempt",
                    do="raise partition.alpha, partition.max_draws or partition.max_seconds, "
                    "or lower partition.block",
                )

            parts += [at[dealt.of(client)] for client in range(own)]

        return Partition.from_lists(parts, draws=draws)
