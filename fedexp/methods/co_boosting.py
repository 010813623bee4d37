"""Co-Boosting: hard generated images, and ensemble weights learned on these images.

Reference:
    Dai et al., Enhancing One-Shot Federated Learning Through Data and Ensemble
    Co-Boosting, ICLR 2024, and the authors' code, whose values are the defaults.
    https://arxiv.org/abs/2402.15070

Update:
    Images are generated and distilled as in DENSE (`fedexp.methods.dense`). The teacher
    D_w(x) is the mean of the m clients' logits with weights w. All m weights start at
    1 / m. The bank contains the images generated so far. An epoch has four steps:

    1. A generator and its noise are trained to minimise
       ``L_H + lambda_a L_A + lambda_bn L_BN`` over a batch of images. lambda_a and
       lambda_bn are weights. L_H is the mean of the cross-entropies of D_w, weighted by
       ``(1 - p_y)^h``. Here p_y is the probability that D_w gives to the label y, and h
       is an exponent. L_A is ``-KL(D_w || S)``, with the Kullback-Leibler divergence KL
       and the student S. L_BN is the distance of the BatchNorm statistics.
    2. For each batch of the bank, w takes one step against the sign of the gradient of
       D_w's cross-entropy. The weights stay in [0, 1].
    3. The new images are added to the bank.
    4. The student learns from D_w on perturbed images of the bank. Each image is moved
       by epsilon along the sign of a gradient. The gradient is that of a randomly
       weighted sum of D_w's softmax outputs.

    Step 2 needs only each client's logits of the bank's images. They are computed once
    per image, without augmentation.

Communication:
    Up: models, of any architectures. Down: the model that the client starts from. In
    later rounds this is the student.

State:
    Server: as in `fedexp.methods.bases.replay.Replay`. The state's entry ``own`` also
    contains the weights w and each client's logits of the bank's images.

Logged:
    ``synthesis/loss``, ``synthesis/hard`` (L_H), ``synthesis/adversarial`` (L_A) and
    ``synthesis/bn`` (L_BN) of the stored images. ``weights/min`` and ``weights/max``,
    the smallest and largest entry of w. The metrics of
    `fedexp.methods.bases.replay.Replay`.

Differences from the authors' code:
    epsilon refers to pixel values in [0, 1]. The default 4 / 255 equals the code's
    8 / 255, which refers to pixel values in [-1, 1]. Step 2 uses the bank's images
    without augmentation. Weights are divided by their sum, or by 1e-8 if the sum is
    smaller. Pixels are rounded to the nearest 8-bit value, not down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NotRequired

import torch
import torch.nn.functional as F
from torch import Tensor

from fedexp.core.aggregator import State
from fedexp.core.build import require, require_not_negative, require_positive
from fedexp.core.data import Samples
from fedexp.core.env import Env
from fedexp.core.seeds import torch_generator
from fedexp.core.task import Metrics
from fedexp.core.trees import Tree
from fedexp.core.weights import Weights
from fedexp.distillation.ensemble import TeacherEnsemble, shares_of
from fedexp.distillation.losses import boundary_support, hard_similarity
from fedexp.distillation.student import answers
from fedexp.distillation.synthesis import Terms, named
from fedexp.distillation.views import View
from fedexp.methods.bases.data_free import DistillationBatch
from fedexp.methods.bases.generating import Generating
from fedexp.methods.bases.replay import BankState, Replay, ensemble_logits
from fedexp.server_training.batches import batches, on_device
from fedexp.server_training.gradients import value_and_grad
from fedexp.server_training.optimizers import Adam, Optimizer, Sgd


class CoBoostingState(BankState):
    """The state of Co-Boosting: the bank and the teachers' weights.

    The entry ``logits`` contains one tensor per batch of the bank: the logits of each
    teacher, of shape (teachers, b, C) for C classes.

    Args:
        weights: Weights of the teachers, of shape (teachers,).
    """

    weights: NotRequired[Tensor]


@dataclass(frozen=True)
class CoBoosting(Replay, Generating):
    """The aggregator of Co-Boosting.

    Args:
        T_G: Generator steps per epoch.
        h: Exponent of ``1 - p_y`` in the loss L_H, where p_y is the teacher's
            probability of the label.
        lambda_a: Weight of the adversarial loss L_A.
        lambda_bn: Weight of the distance L_BN of BatchNorm statistics. With 0 L_BN is
            not computed, and ``synthesis/bn`` is 0.
        tau_a: Temperature of L_A.
        mu: Step size of the teachers' weights w in a round's first epoch. In epoch e
            (from 0) the step size is ``mu mu_decay^e``.
        mu_decay: Factor of the step size of w per epoch.
        epsilon: Size of the images' perturbation, for pixel values in [0, 1].
        tau_epsilon: Temperature of the softmax in the perturbation.
    """

    tau: float = 4.0
    schedule: Literal["constant", "cosine"] = "cosine"
    student: Optimizer = field(
        default_factory=lambda: Sgd(momentum=0.9, weight_decay=1e-4, clip=10.0)
    )
    T_G: int = 30
    generator: Optimizer = field(default_factory=lambda: Adam(betas=(0.5, 0.999), clip=10.0))
    h: float = 1.0
    lambda_a: float = 1.0
    lambda_bn: float = 0.0
    tau_a: float = 3.0
    mu: float = 0.01
    mu_decay: float = 0.99
    epsilon: float = 4 / 255
    tau_epsilon: float = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "T_G", "tau_a", "mu_decay", "tau_epsilon")
        require(self.mu_decay <= 1, f"mu_decay must be at most 1, got {self.mu_decay}")
        require_not_negative(self, "h", "lambda_a", "lambda_bn", "mu", "epsilon")

    def synthesise(
        self, labels: Tensor, student: Weights, ensemble: TeacherEnsemble, own: State, env: Env
    ) -> tuple[Tensor, Metrics, State]:
        """Make images with the current weights w, then update w on the bank.

        In this update the bank does not contain the new images yet.
        """
        even = torch.full((len(ensemble),), 1 / len(ensemble), dtype=env.dtype, device=env.device)
        weights: Tensor = own.get("weights", even)
        view = View.of("none", env, "synthesis")
        terms_of = partial(self.terms, labels, answers(student), ensemble, weights, view)
        made = self.optimised_images(terms_of, self.new_noise(env, self.b), self.T_G, env)
        logits: list[Tensor] = own.get("logits", [])

        with torch.no_grad():
            logits = [*logits, *map(ensemble.each, self.bank_inputs(own, len(logits), env))]

        if logits:
            known = torch.cat([batch["y"] for batch in own["bank"]])
            order = batches(len(known), self.B, env.seed, "weights", env.round, env.step)
            weights = reweighted(
                weights,
                torch.cat(logits, 1),
                known,
                on_device(order, env.device),
                self.mu * self.mu_decay ** (env.step - 1),
            )

        return (
            made.images,
            {
                **named(made.lowest),
                "weights/min": float(weights.min()),
                "weights/max": float(weights.max()),
            },
            CoBoostingState(bank=own["bank"], weights=weights, logits=logits),
        )

    def terms(
        self,
        labels: Tensor,
        answer: Callable[[Tensor], Tensor],
        ensemble: TeacherEnsemble,
        weights: Tensor,
        view: View,
        images: Tensor,
        step: int,
    ) -> Terms:
        """Compute the loss and its terms.

        Args:
            labels: Labels of the images, of shape (b,).
            answer: Function that computes the student's logits.
            ensemble: The teachers.
            weights: Weights w of the teachers, of shape (m,).
            view: The transform of images to network inputs.
            images: Images of shape (b, c, H, W).
            step: Number of the step, from 0.
        """
        inputs = view.inputs(images, step)
        shown = ensemble.show(inputs, weights, norms=self.lambda_bn > 0)
        hard = hard_similarity(shown.logits, labels, self.h)
        adversarial = boundary_support(shown.logits, answer(inputs), self.tau_a, "none")
        loss = hard + self.lambda_a * adversarial + self.lambda_bn * shown.statistics
        return {"loss": loss, "hard": hard, "adversarial": adversarial, "bn": shown.statistics}

    def distillation_batches(
        self, own: State, samples: Samples, ensemble: TeacherEnsemble, env: Env
    ) -> tuple[State, Iterator[DistillationBatch]]:
        """Return batches of perturbed images and the teachers' logits of them.

        An image is perturbed along the sign of the gradient of ``sum_c u_c p_c``. Here
        p_c is the teachers' probability of class c, and the u_c are random weights.
        Every pass draws new weights. Pixel values of perturbed images may be outside
        [0, 1].
        """
        return own, self._perturbed(partial(ensemble, weights=own["weights"]), samples, env)

    def _perturbed(
        self, teach: Callable[[Tensor], Tensor], samples: Samples, env: Env
    ) -> Iterator[DistillationBatch]:
        random = torch_generator(env.seed, "directions", env.round, env.step)
        u = (2 * torch.rand(len(samples), env.num_classes, generator=random) - 1).to(
            env.device, env.dtype
        )
        # Change of the normalised input per change of a pixel value in [0, 1]
        scale = 255 * env.domain.affine(samples.x.dim(), env.device)[0]
        for inputs, at in self.inputs(samples, View.of(self.views, env, "distillation"), env):
            moved = inputs + self.epsilon * scale * direction(
                inputs, teach, u[at], self.tau_epsilon
            )
            yield moved, ensemble_logits(teach, moved)


def direction(inputs: Tensor, teach: Callable[[Tensor], Tensor], u: Tensor, tau: float) -> Tensor:
    """Compute the direction in which `inputs` are perturbed.

    It is the sign of the gradient of ``sum(u * softmax(teach(inputs) / tau))`` with
    respect to the inputs.

    Args:
        inputs: Inputs of a batch, of shape (b, ...).
        teach: Function that returns the teachers' logits.
        u: Random weights of shape (b, C).
        tau: Temperature.
    """
    leaf = inputs.detach().requires_grad_()
    with torch.enable_grad():
        value = (u * F.softmax(teach(leaf) / tau, 1)).sum()
    return torch.autograd.grad(value, leaf)[0].sign()


def reweighted(
    weights: Tensor, logits: Tensor, labels: Tensor, order: Iterable[Tensor], step: float
) -> Tensor:
    """Update the teachers' weights w by one step per batch.

    A step subtracts `step` times the sign of a gradient. The gradient is that of the
    cross-entropy of D_w, the mean of the teachers' logits with weights w.

    Args:
        weights: Weights w of the m teachers, of shape (m,).
        logits: Logits of every teacher for N images, of shape (m, N, C).
        labels: Labels of the images, of shape (N,).
        order: For each batch, the indices of its images, on the device of `logits`.
        step: Size of the steps.

    Returns:
        Weights of shape (m,), in [0, 1].
    """
    for at in order:
        own, y = logits[:, at], labels[at]
        _, (grads,) = value_and_grad(partial(_cross_entropy, own, y), {"w": weights})
        weights = (weights - step * grads["w"].sign()).clamp(0, 1)
    return weights


def _cross_entropy(logits: Tensor, labels: Tensor, tree: Tree) -> Tensor:
    return F.cross_entropy((logits * shares_of(tree["w"])[:, None, None]).sum(0), labels)
