"""What a server-side method goes through within a round, handed to whoever evaluates it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from fedexp.core.outcome import Outcome


class Trace:
    """Takes intermediate models from an aggregator; this one wants none. Test data stay on the other side."""

    def wants(self, iteration: int) -> bool:
        """Whether somebody looks at `iteration`, counted through a round's steps (0: before the first)."""
        return False

    def __call__(
        self,
        iteration: int,
        outcomes: Mapping[str, Outcome],
        clients: Sequence[int] = (),
        values: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Take the models of `iteration`, by the name of each series; those of one model a client belong to `clients`.

        Args:
            values: what there is to say besides, by name.
        """
