"""Fed-DAFL: DAFL with the clients' ensemble as the teacher.

Reference:
    Chen et al., Data-Free Learning of Student Networks (DAFL), ICCV 2019, and the
    authors' code. FedSyn (Zhang et al. 2021) uses it as a baseline of one-shot
    federated learning and reports none of its hyper-parameters.

Update:
    Generator G and student S learn together on new images. Each step draws noise z and
    makes images x = G(z). D is the mean of the clients' logits. The generator minimises
    ``w_oh L_oh + w_ie L_ie + w_a L_a`` of D(x). The student minimises
    ``KL(D(x) || S(x))`` on the same images. D(x) is computed once for both losses.

Communication:
    Up: models, of any architectures. Down: the model that the client starts from. In
    later rounds this is the student.

State:
    Server: as in `fedexp.methods.bases.data_free.DataFree`. ``own`` holds the generator
    and the state of its optimizer.

Logged:
    ``synthesis/loss``, ``synthesis/oh``, ``synthesis/ie`` and ``synthesis/a``, means
    over the epoch, besides the metrics of `fedexp.methods.bases.data_free.DataFree`.

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
from fedexp.distillation.losses import information_entropy, one_hot_loss
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
    """The aggregator of Fed-DAFL.

    An epoch consists of `iterations` joint steps of generator and student. The
    generator is initialised once per run.

    Args:
        iterations: Joint steps per epoch, each on b images.
        lr_generator: Step size of the generator.
        generator: Optimizer of the generator.
        nz: Length of the noise (`fedexp.distillation.generator.Generator`).
        ngf: Width of the generator (`fedexp.distillation.generator.Generator`).
        w_oh: Weight of the one-hot loss L_oh.
        w_ie: Weight of the information entropy L_ie.
        w_a: Weight of the activation loss L_a. With 0 the teachers need no penultimate
            features.
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
    """The generator during one epoch.

    The generator takes one step before each step of the student.

    Attributes:
        generator: The generator after its steps so far.
        optimizer: The state of the generator's optimizer.
        rows: The loss and its terms of every step so far.
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

        A batch holds normalised images and the teachers' logits of them. Both come from
        the generator's loss, so the images are from before the generator's step.
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
        oh, ie = one_hot_loss(shown.logits), information_entropy(shown.logits)
        loss = method.w_oh * oh + method.w_ie * ie + method.w_a * shown.activation
        terms = {"loss": loss, "oh": oh, "ie": ie, "a": shown.activation}
        self.rows.append({name: value.detach() for name, value in terms.items()})
        return loss
