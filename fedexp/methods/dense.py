"""DENSE (FedSyn): a student learns from the clients' ensemble on generated images.

Reference:
    Zhang et al., DENSE: Data-Free One-Shot Federated Learning, NeurIPS 2022, and the
    authors' code. Equations and Algorithm 1 are numbered as in the paper's preprint
    (FedSyn, arXiv 2112.12371v1).
    https://arxiv.org/abs/2112.12371

Update:
    A generator G makes images that the clients' models classify with confidence. An
    epoch draws labels y and noise z. Then T_G Adam steps train G to minimise
    ``CE(D(x), y) + lambda_1 L_BN + lambda_2 L_div`` for the images x = G(z) (Eq. 3, 4,
    6, 7). CE is the cross-entropy, and D(x) is the mean of the clients' logits. L_BN is
    the distance of the BatchNorm statistics. L_div is the negative divergence between D
    and the student. lambda_1 and lambda_2 are weights. The student is then distilled
    from D on all images made so far (Eq. 9).

    In four points the paper and the code differ, and the default follows the code:

    1. The generator's weights are drawn anew in every epoch.
    2. The noise z is optimised together with the generator.
    3. The images of the step with the lowest loss are stored, without augmentation.
    4. Each epoch distils on the bank of all stored batches.

    ``variant=paper_literal`` is Algorithm 1. One generator is trained during the whole
    run, and z is not optimised. In each epoch the student takes one step, on the images
    after the generator's last step.

Communication:
    Up: models, of any architectures. Down: the model that the client starts from. In
    later rounds this is the student.

State:
    Server: as in `fedexp.methods.bases.replay.Replay`. With ``variant=paper_literal``
    the generator and its optimizer replace the bank.

Logged:
    ``synthesis/loss``, and its terms ``synthesis/ce``, ``synthesis/bn`` and
    ``synthesis/div`` without their weights, of the stored images. With
    ``variant=paper_literal`` these are the values before the generator's last step. The
    metrics of `fedexp.methods.bases.replay.Replay`.

Differences from the paper:
    L_BN compares the images' statistics with the BatchNorm statistics of the teachers
    (the clients' models). The paper names the statistics of the generator, whose shapes
    do not fit.

    The authors published no code for the paper's experiment with several rounds (Table
    5). Here the clients and the student start in later rounds from the student of the
    round before. The bank and the state of the student's optimizer start empty in every
    round.

Differences from the authors' code:
    The L_BN of the code finds no layer to compare. Here it has an effect, and is
    divided by the number of teachers, like the loss of Eq. 5. The student is always in
    evaluation mode while images are made. In the first epoch of the code, it is in
    training mode. Pixels are rounded to the nearest 8-bit value, not down.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedexp.core.aggregator import State
from fedexp.core.build import require, require_not_negative, require_positive
from fedexp.core.env import Env
from fedexp.core.kernel import StepNoise
from fedexp.core.seeds import seed_of, torch_generator
from fedexp.core.task import Metrics
from fedexp.core.weights import Weights
from fedexp.distillation.bank import samples_of
from fedexp.distillation.ensemble import TeacherEnsemble
from fedexp.distillation.losses import Mask, boundary_support
from fedexp.distillation.student import answers, net_of
from fedexp.distillation.synthesis import Terms, generated_by, named, synthesise
from fedexp.distillation.views import View, Views
from fedexp.methods.bases.data_free import DataFreeState
from fedexp.methods.bases.generating import Generating, GeneratorState
from fedexp.methods.bases.replay import Replay, ensemble_logits
from fedexp.server_training.forward import recomputed_statistics
from fedexp.server_training.optimizers import Adam, Optimizer


@dataclass(frozen=True)
class Dense(Replay, Generating):
    """The aggregator of DENSE.

    Args:
        variant: ``bank`` (the student trains on the bank of all images) or
            ``paper_literal`` (Algorithm 1, without a bank).
        T_G: Generator steps per epoch.
        lambda_1: Weight of L_BN, the distance of the BatchNorm statistics. With 0 L_BN
            is not computed, and ``synthesis/bn`` is 0.
        lambda_2: Weight of L_div, the negative divergence between teachers and student.
            With 0 L_div is not computed, and the images do not depend on the student.
        tau_d: Temperature of L_div.
        mask: Samples that count in L_div: those on which teachers and student predict
            different classes (``disagree``) or the same class (``agree``), or all
            samples (``none``).
        synthesis_views: Augmentation of the images while they are made. It takes the
            same values as `views`.
        reestimate_batch_norm: Whether the student's running BatchNorm statistics are
            recomputed over the bank after a round's last epoch. This pass uses the
            images without augmentation, in shuffled batches of B images
            (`fedexp.server_training.forward.recomputed_statistics`). The paper and the
            code keep the statistics of training. Networks without BatchNorm do not
            change.
    """

    variant: Literal["bank", "paper_literal"] = "bank"
    T_G: int = 30
    generator: Optimizer = field(default_factory=lambda: Adam(betas=(0.5, 0.999)))
    lambda_1: float = 1.0
    lambda_2: float = 0.5
    tau_d: float = 1.0
    mask: Mask = "disagree"
    synthesis_views: Views = "clients"
    reestimate_batch_norm: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "T_G", "tau_d")
        require_not_negative(self, "lambda_1", "lambda_2")

        if self.variant == "paper_literal":
            for name in ("keep_bank", "rounding", "reestimate_batch_norm"):
                default = getattr(Dense, name)
                require(
                    getattr(self, name) == default,
                    f"{name} has no effect with variant=paper_literal, which has no bank: "
                    f"set {name}={default}",
                )

    def begin(self, own: State, env: Env) -> State:
        if self.variant == "bank":
            return super().begin(own, env)
        return Generating.begin(self, own, env)

    def epoch(
        self, state: DataFreeState, ensemble: TeacherEnsemble, lr: float, env: Env
    ) -> tuple[DataFreeState, Metrics]:
        if self.variant == "bank":
            state, metrics = super().epoch(state, ensemble, lr, env)
            if self.reestimate_batch_norm and env.step == env.server_steps(self.T):
                state = {**state, "student": self._reestimated(state, env)}
            return state, metrics
        images, made, own = self.synthesise(
            self.labels(env), state["student"], ensemble, state["own"], env
        )
        inputs = View.of(self.views, env, "distillation").inputs(images, 0)
        batch = inputs, ensemble_logits(ensemble, inputs)
        state, trained = self.train_student({**state, "own": own}, [batch], lr, env)
        return state, {**made, **trained}

    def _reestimated(self, state: DataFreeState, env: Env) -> Weights:
        """Return the student with BatchNorm statistics of one pass over the bank."""
        bank = samples_of(state["own"]["bank"], env.domain)
        # Shuffle the images, because each batch of the bank is sorted by class
        names = (env.seed, "statistics", env.round)
        order = torch.randperm(len(bank), generator=torch_generator(*names)).to(bank.x.device)
        shuffled = replace(bank, x=bank.x[order], y=bank.y[order])

        net = net_of(state["student"], training=True)
        net.set_noise(StepNoise(seed_of(*names, "noise"), env.device))
        return recomputed_statistics(net, state["student"], shuffled, self.B)

    def synthetic_images(self, state: DataFreeState, env: Env) -> tuple[Tensor, Tensor]:
        if self.variant == "bank":
            return super().synthetic_images(state, env)
        return Generating.synthetic_images(self, state, env)

    def synthesise(
        self, labels: Tensor, student: Weights, ensemble: TeacherEnsemble, own: State, env: Env
    ) -> tuple[Tensor, Metrics, State]:
        z = self.new_noise(env, self.b)
        view = View.of(self.synthesis_views, env, "synthesis")
        terms_of = partial(self.terms, labels, answers(student), ensemble, view)
        if self.variant == "bank":
            made = self.optimised_images(terms_of, z, self.T_G, env)
            return made.images, named(made.lowest), own

        generator = own["generator"]
        images_of = generated_by(generator, self.precision)
        made = synthesise(
            generator.params,
            own["optimizer"],
            lambda params: images_of({**params, "z": z}),
            terms_of,
            self.generator,
            self.lr_generator,
            self.T_G,
        )
        with torch.no_grad():
            images = images_of({**made.learned, "z": z})

        after = GeneratorState(
            generator=Weights(generator.spec, made.learned, generator.buffers),
            optimizer=made.optimizer,
        )
        return images, named(made.terms[-1]), after

    def terms(
        self,
        labels: Tensor,
        answer: Callable[[Tensor], Tensor],
        ensemble: TeacherEnsemble,
        view: View,
        images: Tensor,
        step: int,
    ) -> Terms:
        """Compute the loss of Eq. 7 and its terms.

        Args:
            labels: Labels of the images, of shape (b,).
            answer: Function that computes the student's logits.
            ensemble: The teachers.
            view: The transform of images to network inputs.
            images: Images of shape (b, c, H, W).
            step: Number of the step, from 0.
        """
        inputs = view.inputs(images, step)
        shown = ensemble.show(inputs, norms=self.lambda_1 > 0)
        ce = F.cross_entropy(shown.logits, labels)
        terms = {
            "loss": ce + self.lambda_1 * shown.statistics,
            "ce": ce,
            "bn": shown.statistics,
        }

        if self.lambda_2 > 0:
            terms["div"] = boundary_support(shown.logits, answer(inputs), self.tau_d, self.mask)
            terms["loss"] = terms["loss"] + self.lambda_2 * terms["div"]

        return terms
