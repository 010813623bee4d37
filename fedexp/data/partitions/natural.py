"""A split by the natural owners of the data, such as writers or domains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from fedexp.core.build import require
from fedexp.core.data import Partition
from fedexp.core.errors import DataError
from fedexp.data.partition import Partitioner, from_owners


@dataclass(frozen=True, kw_only=True)
class Natural(Partitioner):
    """A split that puts owners (writers, domains) into random groups, one per client.

    All samples of an owner go to one client. If there are as many clients as owners,
    client i is owner i. With `split_owners`, more clients than owners are allowed. Each
    owner's samples are then shuffled and divided equally among the owner's clients,
    which have consecutive numbers. MA-Echo makes twelve clients from six domains in
    this way.

    Args:
        owners_per_client: Number of owners of each client. Owners that are left over
            are not used. ``all`` assigns every owner, and the numbers of owners of any
            two clients differ by at most one.
        split_owners: Whether an owner's samples may be divided.
    """

    name: ClassVar[str] = "natural"
    deals: ClassVar[Literal["labels", "owners"]] = "owners"

    owners_per_client: Literal["all"] | int = "all"
    split_owners: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        per = self.owners_per_client
        require(
            per == "all" or per >= 1, f"owners_per_client must be 'all' or at least 1, got {per}"
        )
        require(per == "all" or not self.split_owners, "split_owners needs owners_per_client=all")

    def sample(
        self, labels: np.ndarray, num_classes: int, clients: int, rng: np.random.RandomState
    ) -> Partition:
        present, owner = np.unique(labels, return_inverse=True)
        owners = len(present)
        if clients > owners and self.split_owners:
            return self._divided(owner, owners, clients, rng)

        asked = clients if self.owners_per_client == "all" else clients * self.owners_per_client
        if asked > owners:
            raise DataError(
                "there are not enough owners",
                where="clients",
                expected=f"at most {owners} owners (writers, domains) in all",
                got=f"{asked} for {clients} clients",
                do="lower clients or partition.owners_per_client; "
                "or divide owners with partition.split_owners=true",
            )

        order = rng.permutation(owners) if clients < owners else np.arange(owners)
        used = order if self.owners_per_client == "all" else order[:asked]
        client_of = np.full(owners, -1)
        client_of[used] = np.arange(len(used)) % clients

        client = client_of[owner]
        at = np.flatnonzero(client >= 0)
        dealt = from_owners(client[at], clients)

        info: dict[str, str | int | float | bool] = {"owners": len(used)}
        if len(at) < len(client):
            info |= {"unused_owners": owners - len(used), "dropped_samples": len(client) - len(at)}
        return Partition(at[dealt.indices], dealt.offsets, info)

    def _divided(
        self, owner: np.ndarray, owners: int, clients: int, rng: np.random.RandomState
    ) -> Partition:
        each, more = divmod(clients, owners)
        parts: list[np.ndarray] = []
        for i in range(owners):
            parts += np.array_split(rng.permutation(np.flatnonzero(owner == i)), each + (i < more))
        return Partition.from_lists(parts, owners=owners)
