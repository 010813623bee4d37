"""The base of data-free distillation.

In each round the clients train their models first. These models are the teachers. Then
the server trains another network, the student, in several epochs. Each epoch is one
step of the run.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, TypedDict

import torch
from torch import Tensor

from fedexp.core.aggregator import Aggregator, State
from fedexp.core.build import require, require_positive
from fedexp.core.device import has_bf16
from fedexp.core.env import Env
from fedexp.core.errors import ConfigError, FedexpError
from fedexp.core.jobs import ClientJob, ClientResult
from fedexp.core.kernel import StepNoise
from fedexp.core.needs import Demand, Needs
from fedexp.core.outcome import Outcome
from fedexp.core.seeds import seed_of
from fedexp.core.stored_weights import StoredWeights
from fedexp.core.task import Metrics
from fedexp.core.weights import Weights
from fedexp.distillation.ensemble import TeacherEnsemble
from fedexp.distillation.pictures import by_class
from fedexp.distillation.stacking import Running, stacks
from fedexp.distillation.student import distil, fresh_student
from fedexp.methods.bases.fusion import averaged
from fedexp.server_training.optimizers import Optimizer, Sgd, cosine
from fedexp.tasks.classification import Classification

_FLOAT32 = Demand(
    "dtype",
    "float32",
    "runs networks under autocast, which changes only float32",
    "aggregator.precision=float32",
)

# Normalised inputs (b, ...) and the teachers' logits (b, C)
DistillationBatch = tuple[Tensor, Tensor]


class DataFreeState(TypedDict):
    """The state of data-free distillation.

    Args:
        round: Number of finished rounds.
        epoch: Number of finished steps in the round.
        stacked: Whether the teachers run as one stacked network. None before the
            clients have trained for the first time.
        student: The student.
        optimizer: The state of the student's optimizer.
        teachers: The round's teachers.
        own: The derived class's own state, such as an image bank or a generator.
    """

    round: int
    epoch: int
    stacked: bool | None
    student: Weights
    optimizer: State
    teachers: list[StoredWeights]
    own: State


@dataclass(frozen=True)
class DataFree(Aggregator):
    """The base of aggregators that distil without data.

    In a round's first step the clients train. In the first round they start from their
    initial weights. In later rounds they start from the student, which the server sends
    them. Each of the T further steps of a round is an epoch of the method on the
    server. If a run is killed in an epoch, the resumed run repeats this epoch.

    The outcome is the student, the server's network. If the config asks for a trace,
    the student after each epoch is evaluated under the name ``student``. Each epoch
    logs ``distillation/loss`` (mean over its steps) and ``distillation/steps``. A
    round's first step logs ``teachers/stacked``, 0 or 1.

    The state is a `DataFreeState`. It contains references to the stored teachers, not
    the teachers themselves.

    Args:
        T: Number of server epochs per round. ``limit.server_steps`` is an upper bound.
        tau: Temperature of distillation. The loss is multiplied by tau^2.
        lr_student: Step size of the student.
        schedule: Schedule of `lr_student`: ``constant``, or ``cosine`` (half a cosine
            over the T epochs towards 0).
        student: Optimizer of the student.
        student_start: Weights of the student at the start of a round: ``previous`` (the
            student of the last round, or a new initialisation in the first round),
            ``fresh`` (a new initialisation) or ``fedavg`` (the teachers' mean).
        b: Images per generated batch.
        at_once: Number of teachers whose activations are in memory for a gradient at
            the same time. None leaves the choice to
            `fedexp.distillation.ensemble.TeacherEnsemble`.
        teachers: ``stacked`` (the teachers run as one network), ``looped`` (they run
            one after the other) or ``auto``. With ``auto``
            `fedexp.distillation.stacking` chooses as soon as clients have trained for
            the first time. The choice is stored in the state and applies to all rounds.
        precision: ``bf16`` runs the looped teachers and the generator under autocast.
            Losses, statistics and the student stay in float32.
    """

    trains_on_server: ClassVar[bool] = True

    remedy: ClassVar[str] = (
        "lower aggregator.lr_student, or bound gradients with aggregator.student.clip"
    )

    T: int = 200
    tau: float = 20.0
    lr_student: float = 0.01
    schedule: Literal["constant", "cosine"] = "constant"
    student: Optimizer = field(default_factory=lambda: Sgd(momentum=0.9))
    student_start: Literal["previous", "fresh", "fedavg"] = "previous"
    b: int = 128
    at_once: int | None = None
    teachers: Running = "auto"
    precision: Literal["float32", "bf16"] = "float32"

    def __post_init__(self) -> None:
        require_positive(self, "T", "tau", "lr_student", "at_once")
        # BatchNorm cannot compute the variance of a single image
        require(self.b >= 2, f"b must be at least 2, got {self.b}")
        require(
            self.precision == "float32" or self.teachers != "stacked",
            "teachers=stacked does not support precision=bf16: set teachers=looped",
        )

    @property
    def needs(self) -> Needs:
        return Needs(
            (
                Demand("task", Classification, "compares logits of classes"),
                *((_FLOAT32,) if self.precision == "bf16" else ()),
            ),
            same_architecture=self.student_start == "fedavg",
            lifted_by="aggregator.student_start=fresh" if self.student_start == "fedavg" else "",
            same_clients=self.teachers == "stacked",
            broadcasts=True,
            images=True,
        )

    def init(self, env: Env) -> DataFreeState:
        if self.teachers == "stacked":
            _check_stackable(env)

        if self.precision == "bf16":
            _check_bf16(env)

        return {
            "round": 0,
            "epoch": 0,
            "stacked": None,
            "student": fresh_student(env),
            "optimizer": {},
            "teachers": [],
            "own": {},
        }

    def position(self, state: DataFreeState, step: int) -> tuple[int, int]:
        return state["round"], state["epoch"]

    def plan(self, state: DataFreeState, env: Env) -> list[ClientJob]:
        if env.step:
            return []
        return [
            env.job(c, state["student"] if env.round else env.initial_weights(c), {})
            for c in env.sample()
        ]

    def update(
        self, state: DataFreeState, results: Iterable[ClientResult], env: Env
    ) -> tuple[DataFreeState, Metrics]:
        if env.step == 0:
            return self._begin(state, [result.weights for result in results], env)

        ensemble = TeacherEnsemble(
            [stored.load() for stored in state["teachers"]],
            self.at_once,
            stacked=bool(state["stacked"]),
            bf16=self.precision == "bf16",
        )
        epochs, lr = env.server_steps(self.T), self.lr_student

        if self.schedule == "cosine":
            lr = cosine(lr, env.step - 1, epochs)

        state, metrics = self.epoch(state, ensemble, lr, env)
        if env.trace.wants(env.step):
            env.trace(env.step, {"student": self.outcome(state)}, values=metrics)

        if env.step == epochs:
            return _ended(state), metrics

        return {**state, "epoch": env.step + 1}, metrics

    def _begin(
        self, state: DataFreeState, models: list[Weights], env: Env
    ) -> tuple[DataFreeState, Metrics]:
        """Store the round's teachers and set the student's initial weights."""
        # If every client was skipped, the round changes nothing
        if not models:
            return _ended(state), {"clients": 0}

        student = state["student"]
        if self.student_start == "fedavg":
            student = averaged(models)
        elif self.student_start == "fresh" and env.round:
            student = fresh_student(env)

        stacked = state["stacked"]
        if stacked is None:
            inputs = torch.zeros(self.b, *env.input_shape, device=env.device, dtype=env.dtype)
            running = "looped" if self.precision == "bf16" else self.teachers
            stacked = stacks(running, models, self.at_once, inputs)

        return {
            **state,
            "epoch": 1,
            "stacked": stacked,
            "student": student,
            "optimizer": self.student.init(student.trainable),
            "teachers": [env.store(model) for model in models],
            "own": self.begin(state["own"], env),
        }, {"clients": len(models), "teachers/stacked": int(stacked)}

    def begin(self, own: State, env: Env) -> State:
        """Return the derived class's state, ``state["own"]``, at the start of a round.

        Args:
            own: This state at the end of the last round. It is empty before the first
                round.
            env: The environment.
        """
        return {}

    @abstractmethod
    def epoch(
        self, state: DataFreeState, ensemble: TeacherEnsemble, lr: float, env: Env
    ) -> tuple[DataFreeState, Metrics]:
        """Run epoch number ``env.step`` (from 1) of a round.

        Args:
            state: The state before the epoch.
            ensemble: The teachers.
            lr: Step size of the student.
            env: The environment.

        Returns:
            The state after the epoch, with new values of ``student``, ``optimizer`` and
            ``own``, and the values to log.
        """

    @abstractmethod
    def synthetic_images(self, state: DataFreeState, env: Env) -> tuple[Tensor, Tensor]:
        """Return images to show after a round, the oldest first.

        Returns:
            Images of shape (n, channels, H, W), and their classes of shape (n,). Pixels
            are uint8 or floats in [0, 1].
        """

    def pictures(self, state: DataFreeState, env: Env) -> Mapping[str, Tensor]:
        """Return the picture ``synthetic``, a grid of images with one row per class.

        The images are from the image bank. A method without a bank makes new images
        with its generator. Before the first cohort has trained, the result is empty.
        """
        return (
            {"synthetic": by_class(*self.synthetic_images(state, env), env.num_classes)}
            if state["own"]
            else {}
        )

    def train_student(
        self,
        state: DataFreeState,
        distillation_batches: Iterable[DistillationBatch],
        lr: float,
        env: Env,
    ) -> tuple[DataFreeState, Metrics]:
        """Take one step of the student on each of `distillation_batches`.

        Returns:
            The state after the steps, and the values to log.
        """
        student, optimizer, losses = distil(
            state["student"],
            state["optimizer"],
            distillation_batches,
            self.student,
            lr,
            self.tau,
            StepNoise(seed_of(env.seed, "student noise", env.round, env.step), env.device),
        )

        metrics = {"distillation/loss": float(losses.mean()), "distillation/steps": len(losses)}
        if not math.isfinite(metrics["distillation/loss"]):
            raise FedexpError(
                f"the student's loss is not finite in server epoch {env.step}", do=self.remedy
            )

        return {**state, "student": student, "optimizer": optimizer}, metrics

    def outcome(self, state: DataFreeState) -> Outcome:
        return Outcome((state["student"],), self.delivers)


def _check_stackable(env: Env) -> None:
    """Refuse teachers that cannot run as one network.

    They cannot if their architectures differ, or if they use an operation that
    torch.vmap does not support.
    """
    specs = list(dict.fromkeys(env.spec_of(client) for client in range(env.num_clients)))
    reason = "they differ in architecture"
    if len(specs) == 1:
        model = Weights.init(specs[0], seed_of("stacked"), env.device, env.dtype)
        inputs = torch.zeros(2, *env.input_shape, device=env.device, dtype=env.dtype)
        try:
            TeacherEnsemble([model, model], stacked=True)(inputs)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
        else:
            return

    raise ConfigError(
        f"teachers cannot be stacked: {reason}",
        where="aggregator.teachers",
        expected="auto or looped",
        got="stacked",
        do="set aggregator.teachers=auto",
    )


def _check_bf16(env: Env) -> None:
    """Refuse CUDA without native bfloat16."""
    if not has_bf16(env.device):
        raise ConfigError(
            f"bfloat16 cannot be used: {env.device} does not support it",
            where="aggregator.precision",
            expected="float32, or a device with bfloat16",
            got="bf16",
            do="set aggregator.precision=float32",
        )


def _ended(state: DataFreeState) -> DataFreeState:
    return {**state, "round": state["round"] + 1, "epoch": 0, "teachers": []}
