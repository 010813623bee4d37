"""The aggregator interface: it plans client jobs and consumes their results."""

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

# The state of an aggregator: nested values of dict[str, ...], list, tuple, str, int,
# float, bool, None, Tensor and Weights. `Env.store` returns a reference to a model, and
# a state may contain this reference in place of Weights. The referenced model can be on
# disk. When a run is resumed, the state is read at once, but not the referenced models.
# The outermost value is a plain dict, whose keys a method declares as a TypedDict.
State = Any


@dataclass(frozen=True)
class Aggregator(ABC):
    """The server's side of a method.

    All state is in the `State` value that the methods of this class receive and return.
    An instance holds only its configuration.
    """

    # The kind of `Outcome` that the method delivers. It is the same after every step.
    delivers: ClassVar[Delivers] = "global"

    # Whether the server trains the delivered model. If so, the model is trained even if
    # the run has only one round. A model that was only merged is not.
    trains_on_server: ClassVar[bool] = False

    # Whether models are sent in every round. If not, no bytes are counted.
    communicates: ClassVar[bool] = True

    # Whether large parts of the computation are in float64. Some devices have no
    # float64.
    computes_in_float64: ClassVar[bool] = False

    @property
    def needs(self) -> Needs:
        """The requirements of this aggregator, checked before anything runs."""
        return Needs()

    @property
    def averages_updates(self) -> bool:
        """Whether the method averages client updates.

        If not, a trainer that overrides `Trainer.init_shared` is refused, because the
        server would not update the trainer's tensors.
        """
        return False

    def uses_server_step(self, rounds: int) -> bool:
        """Return whether a run of `rounds` rounds depends on the server optimizer."""
        return self.averages_updates

    @property
    def is_plain_mean(self) -> bool:
        """Whether the server optimizer gets the weighted mean of the updates.

        It does not if updates are divided by normalisers, or if the mean is multiplied
        by a factor.
        """
        return False

    @abstractmethod
    def init(self, env: Env) -> State:
        """Return the state before round 0."""

    def position(self, state: State, step: int) -> tuple[int, int]:
        """Return the round of the next step and the step's number within this round.

        By default every step is a round. Some methods have several steps per round, for
        example one per layer or one per epoch of server training. They read the
        position from their state. Client sampling, the decay of the step size and
        evaluation depend on the round. The client cache depends on the step, too.
        Checkpoints are made between steps, so a method should divide long server work
        into several steps. Positions must ascend.

        Args:
            state: The state after `step` steps.
            step: Number of steps that the run has finished.

        Returns:
            The communication round and the step within it, both counted from 0.
        """
        return step, 0

    @abstractmethod
    def plan(self, state: State, env: Env) -> list[ClientJob]:
        """Return the client jobs of this step.

        If the list is empty, only the server works in this step.
        """

    @abstractmethod
    def update(
        self, state: State, results: Iterable[ClientResult], env: Env
    ) -> tuple[State, Metrics]:
        """Consume the results of this step and return the new state.

        Args:
            state: The state before the step.
            results: A stream of results in job order.
            env: The environment at this step.

        Returns:
            The new state, and the metrics to log.
        """

    @abstractmethod
    def outcome(self, state: State) -> Outcome:
        """Return what the method would deliver if the run ended at `state`."""

    def pictures(self, state: State, env: Env) -> Mapping[str, Tensor]:
        """Return grids of images to draw after the last step of a round.

        Returns:
            Grids by name, of shape (rows, columns, c, H, W), with values in [0, 1].
        """
        return {}

    def check(self, spec: ModelSpec, input_shape: tuple[int, ...]) -> None:
        """Refuse a model that the method cannot merge, before anything is loaded.

        Args:
            spec: Architecture of the model.
            input_shape: Shape of one sample.

        Raises:
            ConfigError: The model does not fit. The message names the reason.
        """

    def check_extent(self, extent: Extent) -> None:
        """Refuse numbers of rounds or clients that the method cannot handle.

        It is called before anything is loaded.

        Args:
            extent: Rounds, clients and sampling of the run.

        Raises:
            ConfigError: The extent does not fit. The message names the reason.
        """

    def done(self, state: State, env: Env) -> bool:
        """Return whether the run ends before the step ``(env.round, env.step)``."""
        return env.round >= env.rounds
