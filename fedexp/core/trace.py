"""The interface to intermediate models of a server-side method within a round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from fedexp.core.outcome import Outcome


class Trace:
    """A receiver of intermediate models from an aggregator. This one wants none.

    The aggregator never sees test data. They stay with the receiver.
    """

    def wants(self, iteration: int) -> bool:
        """Return whether `iteration` is of interest.

        Iterations are counted through the steps of a round. 0 is before the first.
        """
        return False

    def __call__(
        self,
        iteration: int,
        outcomes: Mapping[str, Outcome],
        clients: Sequence[int] = (),
        values: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Receive the models of `iteration`, by the name of each series.

        Args:
            iteration: Number of the iteration in the round.
            outcomes: Models by series.
            clients: The clients of the models, for series of one model per client.
            values: Further values of the iteration, by name.
        """
