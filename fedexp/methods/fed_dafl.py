"""Fed-DAFL: DAFL with the clients' ensemble as the teacher.

Reference:
    Chen et al., Data-Free Learning of Student Networks (DAFL), ICCV 2019, and the
    authors' code. FedSyn (Zhang et al. 2021) uses it as a baseline of one-shot
    federated learning and reports none of its hyper-parameters.
    https://arxiv.org/abs/1904.01186

Update:
    Generator G and student S learn together on new images. Each step draws noise z and
    makes images x = G(z). D(x) is the mean of the clients' logits of x, and S(x) are
    the student's logits. The generator minimises ``w_oh L_oh + w_ie L_ie + w_a L_a``.
    Here L_oh is the one-hot loss of D(x), and L_ie is the information entropy of D(x)
    (`fedexp.distillation.losses`). L_a is the activation loss, the negative mean
    absolute value of the clients' penultimate features. w_oh, w_ie and w_a are weights.
    The student minimises ``KL(D(x) || S(x))`` on the same images. D(x) is computed once
    for both networks.

Communication:
    Up: models, of any architectures. Down: the model that the client starts from. In
    later rounds this is the student.

State:
    Server: as in `fedexp.methods.bases.data_free.DataFree`. The state's entry ``own``
    contains the generator and the state of its optimizer.

Logged:
    ``synthesis/loss``, ``synthesis/oh``, ``synthesis/ie`` and ``synthesis/a``, means
    over the epoch. The metrics of `fedexp.methods.bases.data_free.DataFree`.

Differences from the paper:
    The generator is FedSyn's instead of DAFL's. Its images are in [0, 1] and can
    therefore be normalised in the same way as the clients' images. L_a is computed for
    each teacher and then averaged, because penultimate features of different models may
    differ in size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedexp.core.build import require_not_negative, require_positive
from fedexp.core.env import Env
from fedexp.core.layers import check_head
from fedexp.core.task import Metrics
from fedexp.core.trees import Tree
from fedexp.core.weights import ModelSpec, Weights
from fedexp.distillation.ensemble import TeacherEnsemble
from fedexp.distillation.losses import information_entropy, one_hot_loss
from fedexp.distillation.synthesis import Terms, generated_by, named
from fedexp.distillation.views import View
from fedexp.methods.bases.data_free import DataFreeState, DistillationBatch
from fedexp.methods.bases.generating import Generating, GeneratorState
from fedexp.server_training.gradients import value_and_grad


@dataclass(frozen=True)
class FedDafl(Generating):
    """The aggregator of Fed-DAFL.

    An epoch consists of `iterations` joint steps of generator and student. The
    generator is initialised once per run.

    Args:
        iterations: Joint steps per epoch, each on b images.
        w_oh: Weight of the one-hot loss L_oh.
        w_ie: Weight of the information entropy L_ie.
        w_a: Weight of the activation loss L_a. With 0 the teachers need no penultimate
            features. L_a is then not computed, and ``synthesis/a`` is 0.
    """

    remedy: ClassVar[str] = (
        "lower aggregator.lr_generator or lr_student, or bound gradients with "
        "aggregator.generator.clip or student.clip"
    )

    tau: float = 1.0
    iterations: int = 120
    w_oh: float = 1.0
    w_ie: float = 5.0
    w_a: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "iterations")
        require_not_negative(self, "w_oh", "w_ie", "w_a")

    def check(self, spec: ModelSpec, input_shape: tuple[int, ...]) -> None:
        super().check(spec, input_shape)
        if self.w_a > 0:
            check_head(spec, input_shape)

    def epoch(
        self, state: DataFreeState, ensemble: TeacherEnsemble, lr: float, env: Env
    ) -> tuple[DataFreeState, Metrics]:
        own: GeneratorState = state["own"].copy()
        rows: list[Terms] = []
        joint_steps = self._joint_steps(own, rows, ensemble, env)
        state, trained = self.train_student(state, joint_steps, lr, env)
        means = {name: float(torch.stack([row[name] for row in rows]).mean()) for name in rows[0]}
        return {**state, "own": own}, {**named(means), **trained}

    def _joint_steps(
        self, own: GeneratorState, rows: list[Terms], ensemble: TeacherEnsemble, env: Env
    ) -> Iterator[DistillationBatch]:
        """Take one step of the generator before each step of the student.

        Args:
            own: The generator and its optimizer's state, updated in place.
            rows: List to which each step appends its loss and the terms of the loss.
            ensemble: The teachers.
            env: The environment.

        Yields:
            Normalised images and the teachers' logits of these images. Both are
            computed for the generator's loss, before the generator's step.
        """
        view = View.of("none", env, "synthesis")
        images_of = generated_by(own["generator"], self.precision)
        shown: list[DistillationBatch] = []

        for step, z in enumerate(self.new_noise(env, self.iterations, self.b)):

            def loss_of(params: Tree, step: int = step, z: Tensor = z) -> Tensor:
                inputs = view.inputs(images_of({**params, "z": z}), step)
                seen = ensemble.show(inputs, features=self.w_a > 0)
                shown.append((inputs.detach(), seen.logits.detach()))
                oh, ie = one_hot_loss(seen.logits), information_entropy(seen.logits)
                loss = self.w_oh * oh + self.w_ie * ie + self.w_a * seen.activation
                terms = {"loss": loss, "oh": oh, "ie": ie, "a": seen.activation}
                rows.append({name: value.detach() for name, value in terms.items()})
                return loss

            generator = own["generator"]
            _, (grads,) = value_and_grad(loss_of, generator.params)
            params, own["optimizer"] = self.generator.step(
                generator.params, grads, own["optimizer"], self.lr_generator
            )
            own["generator"] = Weights(generator.spec, params, generator.buffers)
            yield shown.pop()
