"""Fed-ADI: pixels optimised by Adaptive DeepInversion of the clients' ensemble.

Reference:
    Yin et al., Dreaming to Distill: Data-Free Knowledge Transfer via DeepInversion,
    CVPR 2020. FedSyn (Zhang et al. 2021) uses it as a baseline of one-shot federated
    learning and reports none of its hyper-parameters.
    https://arxiv.org/abs/1912.08795

Update:
    An epoch draws labels y and u ~ N(0, I). The images of a batch are x = sigmoid(u).
    In each of N_inv Adam steps on u, the images are rolled by a random offset, which is
    the same for the whole batch. Let v be the rolled images. A step minimises
    ``CE(D(v), y) + w_f R_f(v) + w_tv R_tv(v) + w_2 ||v|| + w_c R_c(v)``. CE is the
    cross-entropy, and D(v) is the mean of the clients' logits. R_f is the distance of
    the BatchNorm statistics, R_tv is the total variation, and R_c is the competition
    between teachers and student (`fedexp.distillation.losses`). w_f, w_tv, w_2 and w_c
    are weights. The images of the step with the lowest loss are added to the bank of
    all images. The student is distilled from D on the bank as in FedSyn.

Communication:
    Up: models, of any architectures. Down: the model that the client starts from. In
    later rounds this is the student.

State:
    Server: as in `fedexp.methods.bases.replay.Replay`.

Logged:
    ``synthesis/loss``, and its terms ``synthesis/ce``, ``synthesis/f``,
    ``synthesis/tv``, ``synthesis/norm`` and ``synthesis/c`` without their weights, of
    the stored images. The metrics of `fedexp.methods.bases.replay.Replay`.

Differences from the paper:
    The authors optimise normalised pixels without bounds. Here the sigmoid bounds
    pixels to (0, 1), and total variation and norm are computed on these pixels. R_f is
    divided by the number of teachers. R_f is 0 if the teachers have no BatchNorm. The
    weights w_f = 1 and w_c = 1 are choices of fedexp. No source gives them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from fedexp.core.aggregator import State
from fedexp.core.build import require_not_negative, require_positive
from fedexp.core.env import Env
from fedexp.core.errors import ConfigError
from fedexp.core.seeds import torch_generator
from fedexp.core.task import Metrics
from fedexp.core.weights import ModelSpec, Weights
from fedexp.distillation.ensemble import TeacherEnsemble
from fedexp.distillation.losses import Variation, competition, total_variation
from fedexp.distillation.student import answers
from fedexp.distillation.synthesis import Terms, named, synthesise
from fedexp.distillation.views import View
from fedexp.methods.bases.replay import Replay
from fedexp.server_training.optimizers import Adam, Optimizer


@dataclass(frozen=True)
class FedAdi(Replay):
    """The aggregator of Fed-ADI.

    Args:
        N_inv: Number of optimizer steps on a batch of images.
        lr_pixels: Step size of the pixels.
        pixels: Optimizer of the pixels.
        w_f: Weight of R_f, the distance of the BatchNorm statistics. With 0 R_f is not
            computed, and ``synthesis/f`` is 0.
        w_tv: Weight of the total variation R_tv.
        w_2: Weight of the norm of the images.
        w_c: Weight of the competition R_c between teachers and student. With 0 R_c is
            not computed, and the images do not depend on the student.
        shift: Largest number of pixels by which images are rolled along either axis.
        tv: Variant of `fedexp.distillation.losses.total_variation`, ``l2`` or ``l1``.
    """

    N_inv: int = 30
    lr_pixels: float = 0.1
    pixels: Optimizer = field(default_factory=Adam)
    w_f: float = 1.0
    w_tv: float = 2.5e-5
    w_2: float = 0.0
    w_c: float = 1.0
    shift: int = 2
    tv: Variation = "l2"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "N_inv", "lr_pixels")
        require_not_negative(self, "w_f", "w_tv", "w_2", "w_c", "shift")

    def check(self, spec: ModelSpec, input_shape: tuple[int, ...]) -> None:
        if len(input_shape) != 3:
            raise ConfigError(
                "pixels are optimised, and the samples are not images",
                where="dataset",
                expected="(channels, height, width)",
                got=str(input_shape),
                do="choose a data set of images",
            )

    def synthesise(
        self, labels: Tensor, student: Weights, ensemble: TeacherEnsemble, own: State, env: Env
    ) -> tuple[Tensor, Metrics, State]:
        random = torch_generator(env.seed, "pixels", env.round, env.step)
        u = {"u": torch.randn(self.b, *env.input_shape, generator=random).to(env.device, env.dtype)}
        offsets = torch.randint(
            -self.shift, self.shift + 1, (self.N_inv, 2), generator=random
        ).tolist()
        view = View.of("none", env, "synthesis")
        terms_of = partial(self.terms, labels, answers(student), ensemble, offsets, view)
        made = synthesise(
            u,
            self.pixels.init(u),
            lambda u: u["u"].sigmoid(),
            terms_of,
            self.pixels,
            self.lr_pixels,
            self.N_inv,
            "pixels",
        )
        return made.images, named(made.lowest), own

    def terms(
        self,
        labels: Tensor,
        answer: Callable[[Tensor], Tensor],
        ensemble: TeacherEnsemble,
        offsets: list[list[int]],
        view: View,
        images: Tensor,
        step: int,
    ) -> Terms:
        """Compute the loss and its terms.

        Args:
            labels: Labels of the images, of shape (b,).
            answer: Function that computes the student's logits.
            ensemble: The teachers.
            offsets: The offset (rows, columns) of each step.
            view: The transform of images to network inputs.
            images: Images of shape (b, c, H, W).
            step: Number of the step, from 0.
        """
        v = images.roll(offsets[step], (2, 3))
        inputs = view.inputs(v, step)
        shown = ensemble.show(inputs, norms=self.w_f > 0)

        terms = {
            "ce": F.cross_entropy(shown.logits, labels),
            "f": shown.statistics,
            "tv": total_variation(v, self.tv),
            "norm": torch.linalg.vector_norm(v),
        }

        loss = (
            terms["ce"] + self.w_f * terms["f"] + self.w_tv * terms["tv"] + self.w_2 * terms["norm"]
        )

        if self.w_c > 0:
            terms["c"] = competition(shown.logits, answer(inputs))
            loss = loss + self.w_c * terms["c"]

        return {"loss": loss, **terms}
