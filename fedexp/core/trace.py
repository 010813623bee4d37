"""The interface to intermediate models of a server-side method within a round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from fedexp.core.outcome import Outcome


class Trace:
    """A receiver of intermediate models from an aggregator.

    This class receives none. A subclass may evaluate the models on test data. The
    aggregator never sees the test data.
    """

    def wants(self, iteration: int) -> bool:
        """Return whether the receiver wants the models of `iteration`.

        Iterations are counted across all steps of a round. Number 0 stands for the
        models before the first iteration.
        """
        return False

    def __call__(
        self,
        iteration: int,
        outcomes: Mapping[str, Outcome],
        clients: Sequence[int] = (),
        values: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Receive the models of `iteration`, grouped by series.

        Args:
            iteration: Number of the iteration in the round.
            outcomes: Models by name of the series.
            clients: The clients of the models, for a series with one model per client.
            values: Further values of the iteration, by name.
        """
