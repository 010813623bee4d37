"""Fed-DAFL: DAFL with the clients' ensemble as the teacher.

Reference:
    Chen et al., Data-Free Learning of Student Networks (DAFL), ICCV 2019, and the
    authors' code. FedSyn (Zhang et al. 2021) uses it as a baseline of one-shot
    federated learning and gives none of its values.

Update:
    Generator and student learn together on fresh images. A step draws noise z. The
    generator descends ``w_oh L_oh + w_ie L_ie + w_a L_a`` of D(G(z)). The student
    descends ``KL(D(x) || S(x))`` on the same images. Their D(x) is computed once.

Communication:
    Up: models, of any architectures. Down: as in
    `fedexp.methods.bases.data_free.DataFree`.

State:
    Server: only the networks and their optimizers.

Logged:
    ``synthesis/loss``, ``oh``, ``ie`` and ``a``, means over the epoch, besides those of
    `fedexp.methods.bases.data_free.DataFree`.

Differences from the paper:
    FedSyn's generator replaces DAFL's, so that images stay in [0, 1] and are normalised
    as the clients' are. L_a is the mean over the teachers, because their penultimate
    features may differ in size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, cast

import torch
from torch import Tensor

from fedexp.core.aggregator import State
from fedexp.core.build import require
from fedexp.core.env import Env
from fedexp.core.layers import check_head
from fedexp.core.seeds import seed_of, torch_generator
from fedexp.core.task import Metrics
from fedexp.core.trees import Tree
from fedexp.core.weights import ModelSpec, Weights
from fedexp.distillation.ensemble import TeacherEnsemble
from fedexp.distillation.generator import generator_spec
from fedexp.distillation.losses import information_entropy, one_hot
from fedexp.distillation.pictures import generated
from fedexp.distillation.synthesis import Terms, generated_by, named
from fedexp.distillation.views import View
from fedexp.methods.bases.data_free import (
    DataFree,
    DataFreeState,
    DistillationBatch,
    GeneratorState,
)
from fedexp.server_training.gradients import value_and_grad
from fedexp.server_training.optimizers import Adam, Optimizer


@dataclass(frozen=True)
class FedDafl(DataFree):
    """The aggregator of Fed-DAFL. An epoch consists of `iterations` joint steps.

    Args:
        iterations: Joint steps per epoch, each on b images.
        lr_generator: Step size of the generator.
        generator: Optimizer of the generator.
        nz: Length of the noise (`fedexp.distillation.generator.Generator`, initialised
            once).
        ngf: Width of the generator (`fedexp.distillation.generator.Generator`).
        w_oh: Weight of L_oh.
        w_ie: Weight of L_ie.
        w_a: Weight of L_a. With 0 the teachers need no penultimate features.
    """

    remedy: ClassVar[str] = (
        "lower aggregator.lr_generator or lr_student, or bound gradients with "
        "aggregator.generator.clip or student.clip"
    )

    tau: float = 1.0
    iterations: int = 120
    lr_generator: float = 1e-3
    generator: Optimizer = field(default_factory=Adam)
    nz: int = 256
    ngf: int = 64
    w_oh: float = 1.0
    w_ie: float = 5.0
    w_a: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("iterations", "lr_generator", "nz", "ngf"):
            require(getattr(self, name) > 0, f"{name} must be positive, got {getattr(self, name)}")
        for name in ("w_oh", "w_ie", "w_a"):
            require(
                getattr(self, name) >= 0, f"{name} must not be negative, got {getattr(self, name)}"
            )

    def check(self, spec: ModelSpec, input_shape: tuple[int, ...]) -> None:
        generator_spec(input_shape, self.nz, self.ngf)
        if self.w_a > 0:
            check_head(spec, input_shape)

    def begin(self, own: State, env: Env) -> GeneratorState:
        if own:
            return cast(GeneratorState, own)
        spec = generator_spec(env.input_shape, self.nz, self.ngf)
        generator = Weights.init(spec, seed_of(env.seed, "generator"), env.device, env.dtype)
        return {"generator": generator, "optimizer": self.generator.init(generator.params)}

    def epoch(
        self, state: DataFreeState, ensemble: TeacherEnsemble, lr: float, env: Env
    ) -> tuple[DataFreeState, Metrics]:
        generator_epoch = _GeneratorEpoch(
            self, state["own"]["generator"], state["own"]["optimizer"], ensemble, env
        )
        state, trained = self.train_student(state, generator_epoch.distillation_batches(), lr, env)

        means = {
            name: float(torch.stack([row[name] for row in generator_epoch.rows]).mean())
            for name in generator_epoch.rows[0]
        }
        own: GeneratorState = {
            "generator": generator_epoch.generator,
            "optimizer": generator_epoch.optimizer,
        }
        return {**state, "own": own}, {**named(means), **trained}

    def synthetic_images(self, state: DataFreeState, env: Env) -> tuple[Tensor, Tensor]:
        return generated(state["own"]["generator"], state["student"], self.nz, env)


class _GeneratorEpoch:
    """The generator during one epoch, with one step before each step of the student.

    Attributes:
        generator: The generator after its steps so far.
        optimizer: The state of its optimizer.
        rows: The terms of every step so far.
    """

    def __init__(
        self,
        method: FedDafl,
        generator: Weights,
        optimizer: State,
        ensemble: TeacherEnsemble,
        env: Env,
    ) -> None:
        self.generator, self.optimizer, self.rows = generator, optimizer, list[Terms]()
        self._method, self._ensemble, self._env = method, ensemble, env
        self._view = View.of("none", env, "synthesis")
        self._shown: DistillationBatch | None = None

    def distillation_batches(self) -> Iterator[DistillationBatch]:
        """Yield the batch of each step, after the generator has taken the step.

        A batch holds normalised images and their logits, which the generator's loss has
        computed.
        """
        method, env = self._method, self._env
        random = torch_generator(env.seed, "z", env.round, env.step)
        noise = torch.randn(method.iterations, method.b, method.nz, generator=random).to(
            env.device, env.dtype
        )
        images_of = generated_by(self.generator, method.precision)
        for z in noise:

            def loss_of(params: Tree, z: Tensor = z) -> Tensor:
                return self._loss(images_of({**params, "z": z}))

            params = self.generator.params
            _, (grads,) = value_and_grad(loss_of, params)
            params, self.optimizer = method.generator.step(
                params, grads, self.optimizer, method.lr_generator
            )
            self.generator = Weights(self.generator.spec, params, self.generator.buffers)
            assert self._shown is not None
            yield self._shown

    def _loss(self, images: Tensor) -> Tensor:
        method = self._method
        inputs = self._view.inputs(images, len(self.rows))
        shown = self._ensemble.show(inputs, features=method.w_a > 0)
        self._shown = inputs.detach(), shown.logits.detach()
        oh, ie = one_hot(shown.logits), information_entropy(shown.logits)
        loss = method.w_oh * oh + method.w_ie * ie + method.w_a * shown.activation
        terms = {"loss": loss, "oh": oh, "ie": ie, "a": shown.activation}
        self.rows.append({name: value.detach() for name, value in terms.items()})
        return loss
