"""Client work as values: what a client is asked to do and what comes back."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from fedexp.core.local_training import LocalTraining
from fedexp.core.probe import Probe
from fedexp.core.task import Metrics, Task
from fedexp.core.trainer import Trainer
from fedexp.core.trees import Tree, Trees, nonfinite, num_bytes
from fedexp.core.weights import Weights


@dataclass(frozen=True, eq=False)
class ClientJob:
    """One client's work in one step: a pure function of these values and the client's data.

    Args:
        client: index, or `fedexp.core.data.POOLED`.
        start: the model local training starts from.
        round, step: communication round and step within it, from 0.
        seed: the stream that batch order, augmentation and random layers draw from.
        shared: trees broadcast by the server (control variate, momentum ...).
        state: this client's own state; the runner fills it in and takes it back.
        frozen: names of parameters that must not change.
        probes: what the server asks of the trained model and the client's data besides.
        trained: `start` is what this client trained earlier: the probes are answered, and nothing else is done.
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

    def asking(self, weights: Weights, probes: tuple[Probe, ...]) -> ClientJob:
        """The job that asks `probes` about `weights`, which this one trained."""
        return replace(self, start=weights, shared={}, state=None, probes=probes, trained=True)

    @property
    def first(self) -> bool:
        """Whether it belongs to a run's first step, so that nothing here depends on earlier ones."""
        return self.round == self.step == 0


@dataclass(frozen=True, eq=False)
class ClientResult:
    """What a client sends back.

    Args:
        weights: the locally trained model; no tensors in answer to a `trained` job, for who asked has them.
        num_examples: size of its training data; num_steps: optimizer steps taken (tau_i).
        payload: further trees sent to the server; state: the new client state (None: it keeps none).
        metrics: ``loss``, the mean training loss over the steps, ``loss_last_epoch``, that over the steps of the last
            epoch alone, and what the trainer measured besides, averaged over the steps; none where nothing was trained.
        probes: answers to ``job.probes`` by name; none where the model holds NaN or infinity.
        probe_seconds: what they took, of the time that passed here.
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

    def with_answers(self, other: ClientResult) -> ClientResult:
        """This result with what `other` says besides to probes."""
        return replace(
            self, probes={**self.probes, **other.probes}, probe_seconds=other.probe_seconds
        )

    def in_order(self) -> ClientResult:
        """This result with every tensor row by row in memory, as it comes back from the memo, a file or a process.

        A product with a transposed matrix differs from it in its last bits; itself where nothing is transposed.
        """
        trees = [
            self.weights.params,
            self.weights.buffers,
            *self.payload.values(),
            *(self.state or {}).values(),
        ]
        if all(
            value.is_contiguous()
            for tree in (*trees, *self.probes.values())
            for value in tree.values()
        ):
            return self
        weights = Weights(
            self.weights.spec, _in_order(self.weights.params), _in_order(self.weights.buffers)
        )
        payload, probes = (
            {name: _in_order(tree) for name, tree in own.items()}
            for own in (self.payload, self.probes)
        )
        state = (
            None
            if self.state is None
            else {name: _in_order(tree) for name, tree in self.state.items()}
        )
        return replace(self, weights=weights, payload=payload, probes=probes, state=state)

    def nonfinite(self) -> str | None:
        """Name of the first tensor that holds NaN or infinity, answers to probes aside."""
        everything = {**self.weights.params, **self.weights.buffers}
        for name, tree in (*self.payload.items(), *(self.state or {}).items()):
            everything |= {f"{name} of {inside}": value for inside, value in tree.items()}
        return nonfinite(everything)


def _in_order(tree: Tree) -> Tree:
    return {name: value.contiguous() for name, value in tree.items()}


def bytes_down(job: ClientJob) -> int:
    """What a server would send for `job`: the model and the broadcast trees."""
    return sum(map(num_bytes, (job.start.params, job.start.buffers, *job.shared.values())))


def bytes_up(result: ClientResult) -> int:
    """What a client would send back: the model, its payload and the answers to probes."""
    sent = (
        result.weights.params,
        result.weights.buffers,
        *result.payload.values(),
        *result.probes.values(),
    )
    return sum(map(num_bytes, sent))
