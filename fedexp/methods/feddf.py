"""FedDF: ensemble distillation.

Reference:
    Lin et al., Ensemble Distillation for Robust Model Fusion in Federated Learning,
    NeurIPS 2020, Algorithm 1.
    https://arxiv.org/abs/2006.07242

Update:
    The m clients' models are the teachers, and their mean is the student. The student
    is trained on unlabelled proxy samples x. Its target is
    ``softmax((1 / m) sum_k logits_k(x))``, where logits_k are the logits of teacher k.
    The loss is the Kullback-Leibler divergence.

    Without augmentation every teacher runs only once per proxy sample. A teacher's
    logits are added to a sum when its model arrives, and no teacher is stored. With
    ``augment`` the teachers are stored and run on every batch.

    With ``student_start=fresh`` the student is the server's network with a new
    initialisation, and no models are averaged. In a run with one round the models may
    then have any architectures.

Communication:
    Up: the trained model y_i. Down: the global model w.

State:
    Server, within a round: the targets, or the teachers with ``augment``.

Differences from the paper:
    With several architectures the paper trains one student per architecture. Each
    student starts from the mean of the models of its architecture. This variant is not
    implemented.

Differences from the authors' code:
    The code's default settings differ from those in the commands that its authors give
    for the paper. The aggregator preset ``feddf_paper`` has the optimizer of these
    commands, ``feddf`` follows the re-implementation in FedLAW's code, and
    ``feddf_matched`` follows FedSyn. The option ``avg_losses`` of FedDF's code averages
    the divergences from the single teachers. Here ``average=probs`` has the same
    gradient, because the loss is linear in the target up to a constant. Two options
    that are off by default in the code are left out: weighting teachers by validation
    accuracy, and leaving out teachers whose accuracy is below chance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedexp.core.aggregator import State
from fedexp.core.build import require, require_positive
from fedexp.core.env import Env
from fedexp.core.jobs import ClientResult
from fedexp.core.kernel import StepNoise
from fedexp.core.needs import Needs
from fedexp.core.net import Net
from fedexp.core.outcome import Outcome
from fedexp.core.seeds import seed_of
from fedexp.core.task import Metrics
from fedexp.core.weights import Weights
from fedexp.distillation.losses import kl
from fedexp.distillation.student import fresh_student
from fedexp.evaluation.evaluate import Evaluator
from fedexp.methods.bases.distilling import Distilling
from fedexp.methods.bases.server_trained import Part, network, proxy_of
from fedexp.server_training.forward import logits_of


@dataclass(frozen=True)
class FedDF(Distilling):
    """The aggregator of FedDF.

    Args:
        student_start: The student's weights at the start of a round: ``fedavg`` (the
            clients' mean) or ``fresh`` (a new initialisation). With ``fresh``,
            `weights` has no effect. Trainers that override `Trainer.init_shared`, and
            server optimizers that change the mean, are then refused.
        average: Whether teachers' ``logits`` or ``probs`` are averaged.
        temperature: Temperature tau, which divides the logits of teachers and student.
            The loss is not multiplied by tau^2.
        validate_every: Optimizer steps between two measurements of the student's
            accuracy on the validation samples. The round's model is the student with
            the highest measured accuracy. None: nothing is measured, and the round's
            model is the student after the last step.
        patience: A round's distillation stops after this number of optimizer steps
            without a higher accuracy. None: it does not stop early.
        augment: Whether proxy batches are augmented like the clients' training batches.
            Each teacher then runs on every batch.
    """

    student_start: Literal["fedavg", "fresh"] = "fedavg"
    average: Literal["logits", "probs"] = "logits"
    temperature: float = 1.0
    validate_every: int | None = None
    patience: int | None = None
    augment: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "temperature")
        for name in ("validate_every", "patience"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"{name} must be at least 1 or null, got {value}")

        require(
            self.patience is None or self.validate_every is not None,
            "patience has no effect without validate_every",
        )
        require(
            self.student_start == "fedavg" or 0 not in (self.steps, self.epochs),
            "student_start=fresh without a step of distillation delivers an untrained network: "
            "set epochs or steps",
        )

    @property
    def needs(self) -> Needs:
        needs = super().needs | Needs(
            validation=self.validate_every is not None,
            augmented=self.augment,
            broadcasts=True,
            unseen_proxy=True,
        )
        if self.averages_updates:
            return replace(needs, lifted_by="aggregator.student_start=fresh")
        return replace(needs, same_architecture=False, sample_counts=False)

    @property
    def averages_updates(self) -> bool:
        return self.student_start == "fedavg"

    def steps_per_stage(self, env: Env) -> int:
        return self.validate_every or super().steps_per_stage(env)

    def first_step(
        self, state: State, results: Iterable[ClientResult], env: Env
    ) -> tuple[State, Metrics]:
        if self.student_start == "fedavg":
            return super().first_step(state, results, env)
        m = sum(1 for _ in results)
        # If every sampled client was skipped, the round changes nothing
        if not m:
            return state, {"clients": 0}
        student = fresh_student(env)
        return {**state, "weights": student, "evaluated": student}, {"clients": m}

    def collect(
        self, results: Iterable[ClientResult], start: Weights, collected: State, env: Env
    ) -> Iterator[ClientResult]:
        collected["ensemble"] = _TeacherMean(self.average, self.temperature)
        for result in results:
            if self.augment:
                collected["teachers"].append(env.store(result.weights))
            else:
                net = network(result.weights.spec, env.device, env.dtype).train(False)
                collected["ensemble"].add(logits_of(net, result.weights, proxy_of(env)))
            yield result

    def targets(self, collected: State, start: Weights, mean: Weights, env: Env) -> State:
        if self.augment:
            return {"teachers": collected["teachers"], "best": None}
        return {"target": collected["ensemble"].target(), "best": None}

    def student_batches(
        self, work: State, net: Net, parts: Iterator[Part], env: Env
    ) -> Iterator[Part]:
        if not self.augment:
            yield from super().student_batches(work, net, parts, env)
            return

        assert env.domain.augment is not None
        noise = StepNoise(seed_of(env.seed, "server", env.round, "augmentation"), env.device)
        teachers = [stored.load() for stored in work["teachers"]]

        for step, _, inputs in parts:
            noise.step = step
            seen = env.domain.augment(inputs, noise)
            ensemble = _TeacherMean(self.average, self.temperature)
            with torch.no_grad():
                for teacher in teachers:
                    ensemble.add(net.beside(teacher.spec)(teacher.params, teacher.buffers, seen))
            yield step, seen, ensemble.target()

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        return kl(target, logits / self.temperature).mean()

    def train(
        self, weights: Weights, work: State, net: Net, parts: Iterator[Part], env: Env
    ) -> tuple[Weights, State, Metrics]:
        until = min(work["taken"] + self.steps_per_stage(env), self.total(env))
        weights, work, metrics = super().train(weights, work, net, parts, env)
        if self.validate_every is None:
            return weights, work, metrics

        assert env.validation is not None  # required by `needs`
        measured = Evaluator(env.task, self.batch_size)(
            Outcome((weights,), "global"), env.validation, "server"
        )
        accuracy = measured["server/global/acc"]
        best = work["best"]

        if best is None or accuracy > best["accuracy"]:
            best = {"accuracy": accuracy, "taken": until, "weights": weights}

        return (
            weights,
            {**work, "best": best, "idle": until - best["taken"]},
            {**metrics, "server/val_acc": accuracy},
        )

    def stopped(self, work: State) -> bool:
        return self.patience is not None and work["idle"] >= self.patience

    def end(self, weights: Weights, work: State, env: Env) -> Weights:
        best: Weights = weights if self.validate_every is None else work["best"]["weights"]
        return best


class _TeacherMean:
    """The running mean of the teachers' logits or probabilities, of shape (b, classes).

    Probabilities are added in log space.
    """

    def __init__(self, average: str, temperature: float) -> None:
        self._average, self._temperature = average, temperature
        self._sum, self._m = torch.zeros(()), 0

    def add(self, logits: Tensor) -> None:
        term = logits / self._temperature
        plus: Callable[[Tensor, Tensor], Tensor] = torch.add
        if self._average == "probs":
            term, plus = F.log_softmax(term, 1), torch.logaddexp
        self._sum = plus(self._sum, term) if self._m else term
        self._m += 1

    def target(self) -> Tensor:
        """Return the log-probabilities (b, classes) of the mean."""
        return F.log_softmax(self._sum / self._m if self._average == "logits" else self._sum, 1)
