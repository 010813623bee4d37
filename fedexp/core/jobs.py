"""The work of a client in one step: the job, and the result of the job."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import Tensor

from fedexp.core.local_training import LocalTraining
from fedexp.core.probe import Probe
from fedexp.core.task import Metrics, Task
from fedexp.core.trainer import Trainer
from fedexp.core.trees import Tree, Trees, nonfinite, num_bytes
from fedexp.core.weights import Weights, computes_channels_last, layout_of, with_layout


@dataclass(frozen=True, eq=False)
class ClientJob:
    """One client's work in one step.

    The result is a pure function of the fields of the job and the client's data.

    Args:
        client: Index of the client, or `fedexp.core.data.POOLED`.
        start: The model that local training starts from.
        trainer: The trainer.
        task: The task.
        local_training: The local training of this round.
        round: Communication round, from 0.
        seed: Seed of batch order, augmentation and random layers.
        shared: Trees (`fedexp.core.trees`) that the server broadcasts besides the
            model, by name (control variate, momentum ...).
        step: Step within the round, from 0.
        state: This client's state from earlier rounds. The runner adds it to the job
            and stores the new state of the result.
        frozen: Names of parameters that must not change.
        probes: Functions of the trained model and the client's data (see `Probe`).
        trained: Whether this client has already trained `start`. If so, the job only
            runs the probes.
        drops_out: Whether the client drops out of the round. The runner does not give
            the job to an engine, and the job has no result.
    """

    client: int
    start: Weights
    trainer: Trainer
    task: Task
    local_training: LocalTraining
    round: int
    seed: int
    shared: Trees
    step: int = 0
    state: Trees | None = None
    frozen: frozenset[str] = frozenset()
    probes: tuple[Probe, ...] = ()
    trained: bool = False
    drops_out: bool = False

    def asking(self, weights: Weights, probes: tuple[Probe, ...]) -> ClientJob:
        """Return a job that only runs `probes`.

        Args:
            weights: The model that resulted from this job.
            probes: The probes.
        """
        return replace(self, start=weights, shared={}, state=None, probes=probes, trained=True)

    @property
    def trainable(self) -> Tree:
        """The parameters of `start` that local training changes."""
        return {name: v for name, v in self.start.params.items() if name not in self.frozen}

    @property
    def first(self) -> bool:
        """Whether the job belongs to the first step of the run."""
        return self.round == self.step == 0


@dataclass(frozen=True, eq=False)
class ClientResult:
    """The result of a client's job.

    Args:
        client: Index of the client.
        weights: The locally trained model. It has no tensors if `ClientJob.trained` is
            true, because the process that sent the job already has the model.
        num_examples: Number of training samples of the client, or 0 if it is not known
            (models from ``client_models.path``).
        num_steps: Number of optimizer steps taken (tau_i).
        payload: Trees that are sent to the server besides the model, by name.
        state: The new client state, or None if the client has no state.
        metrics: ``loss`` is the mean training loss over the steps. ``loss_last_epoch``
            is the mean over the steps of the last epoch. Scalars that the trainer
            measures are averaged over the steps. Empty if nothing was trained.
        probes: Answers to ``job.probes`` by name. Empty if the result contains NaN or
            infinity.
        probe_seconds: Seconds that the probes took. They are a part of the job's time.
        known_finite: The object `weights`, if a check has already found no NaN or
            infinity in it. Then it is not checked again. Otherwise None.
    """

    client: int
    weights: Weights
    num_examples: int
    num_steps: int
    payload: Trees
    state: Trees | None
    metrics: Metrics
    probes: dict[str, Tree] = field(default_factory=dict)
    probe_seconds: float = 0.0
    known_finite: Weights | None = None

    def with_answers(self, other: ClientResult) -> ClientResult:
        """Return this result with the probe answers of `other` added."""
        return replace(
            self, probes={**self.probes, **other.probes}, probe_seconds=other.probe_seconds
        )

    def in_order(self) -> ClientResult:
        """Return this result with its tensors in the memory layout of the device.

        In this layout all tensors are contiguous. If the network computes channels
        last, 4-D tensors are channels last instead. Results that come from the client
        cache, a file or another process may have another layout. It is changed for two
        reasons:

        - The last bits of a matrix product can depend on the layout of the operands.
        - Arithmetic on tensors is slow if their layouts differ.

        If all tensors have the layout already, the result itself is returned.
        """
        every = [
            value
            for tree in (
                self.weights.params,
                self.weights.buffers,
                *self.payload.values(),
                *(self.state or {}).values(),
                *self.probes.values(),
            )
            for value in tree.values()
        ]
        last = bool(every) and computes_channels_last(self.weights.spec, every[0].device.type)
        # This runs once per client, so the common case is kept short.
        if not last and all(map(Tensor.is_contiguous, every)):
            return self
        if all(value.is_contiguous(memory_format=layout_of(value, last)) for value in every):
            return self

        weights = Weights(
            self.weights.spec,
            with_layout(self.weights.params, last),
            with_layout(self.weights.buffers, last),
        )
        return replace(
            self,
            weights=weights,
            payload={name: with_layout(tree, last) for name, tree in self.payload.items()},
            probes={name: with_layout(tree, last) for name, tree in self.probes.items()},
            state=None
            if self.state is None
            else {name: with_layout(tree, last) for name, tree in self.state.items()},
            known_finite=weights if self.known_finite is self.weights else None,
        )

    def nonfinite(self) -> str | None:
        """Return the name of the first tensor that holds NaN or infinity, or None.

        Answers to probes are not checked.
        """
        everything = (
            {}
            if self.known_finite is self.weights
            else {**self.weights.params, **self.weights.buffers}
        )
        for name, tree in (*self.payload.items(), *(self.state or {}).items()):
            everything |= {f"{name} of {inside}": value for inside, value in tree.items()}
        return nonfinite(everything)


def bytes_down(job: ClientJob) -> int:
    """Return the bytes that a server would send for a job.

    These are the bytes of the model and of the broadcast trees `shared`.
    """
    return sum(map(num_bytes, (job.start.params, job.start.buffers, *job.shared.values())))


def bytes_up(result: ClientResult) -> int:
    """Return the bytes that a client would send.

    These are the bytes of the model, of the payload and of the probe answers.
    """
    return sum(
        num_bytes(tree)
        for tree in (
            result.weights.params,
            result.weights.buffers,
            *result.payload.values(),
            *result.probes.values(),
        )
    )
