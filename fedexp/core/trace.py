"""The interface through which an aggregator passes on its models within a round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from fedexp.core.outcome import Outcome


class Trace:
    """A receiver of intermediate models from an aggregator.

    This class ignores all models. A subclass may evaluate them on test data, which the
    aggregator never sees.
    """

    def wants(self, iteration: int) -> bool:
        """Return whether the aggregator shall pass on the models of `iteration`.

        Iterations on the server are counted across all steps of a round. Number 0
        stands for the models before the first iteration.
        """
        return False

    def __call__(
        self,
        iteration: int,
        outcomes: Mapping[str, Outcome],
        clients: Sequence[int] = (),
        values: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Receive the models of `iteration`.

        A series is a sequence of models over the iterations, for example that of the
        global model. It has a name.

        Args:
            iteration: Number of the iteration in the round.
            outcomes: The models of this iteration, by name of the series.
            clients: The clients of the models, if a series has one model per client.
            values: Further numbers of this iteration, by name.
        """
