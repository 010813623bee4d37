"""The aggregator interface: a state machine that plans client jobs and consumes their results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from fedexp.core.env import Env, Extent
from fedexp.core.jobs import ClientJob, ClientResult
from fedexp.core.needs import Needs
from fedexp.core.outcome import Delivers, Outcome
from fedexp.core.task import Metrics
from fedexp.core.weights import ModelSpec

# A nest of dict[str, ...], list, tuple, str, int, float, bool, None, Tensor, Weights and, in place of Weights that memory
# need not hold, what `Env.keep` returns. Everything but those is read at once when a run is resumed.
State = dict[str, Any]


@dataclass(frozen=True)
class Aggregator(ABC):
    """What the server does. All state is in the `State` value; a plug-in keeps none of its own."""

    delivers: ClassVar[Delivers] = "global"  # the kind of its outcome, at any time
    communicates: ClassVar[bool] = (
        True  # do models travel every round? (False: no bytes are counted)
    )

    @property
    def needs(self) -> Needs:
        return Needs()

    @property
    def averages_updates(self) -> bool:
        """Whether trainers' server halves and server optimizers take effect."""
        return False

    @abstractmethod
    def init(self, env: Env) -> State:
        """State before round 0."""

    def position(self, state: State, step: int) -> tuple[int, int]:
        """(communication round, step within it) of the step that follows `step` finished ones, both counted from 0.

        By default every step is a round. A method whose round has several steps (a layer each, an epoch of server training
        each) reads them off its state. Sampling, decay of the step size and evaluation follow the round; checkpoints and the
        memo follow the step, so long server work is several steps. Positions ascend.
        """
        return step, 0

    @abstractmethod
    def plan(self, state: State, env: Env) -> list[ClientJob]:
        """This step's client work; an empty list is a server-only step."""

    @abstractmethod
    def update(
        self, state: State, results: Iterable[ClientResult], env: Env
    ) -> tuple[State, Metrics]:
        """Consume the results, which arrive as a stream in job order; return the new state and what to log."""

    @abstractmethod
    def outcome(self, state: State) -> Outcome:
        """What would be delivered if the run ended now."""

    def pictures(self, state: State, env: Env) -> Mapping[str, Tensor]:
        """What there is to look at after a round's last step: by name, a grid (rows, columns, c, H, W) of images in [0, 1]."""
        return {}

    def check(self, spec: ModelSpec, input_shape: tuple[int, ...]) -> None:
        """Refuse a model that the method cannot merge, before anything is loaded; `ConfigError` says why."""

    def check_extent(self, extent: Extent) -> None:
        """Refuse rounds or cohorts that the method cannot work with, before anything is loaded; `ConfigError` says why."""

    def done(self, state: State, env: Env) -> bool:
        """Whether the run is over before the step at ``env.round``, ``env.step``."""
        return env.round >= env.rounds
