"""Fed-ADI: Adaptive DeepInversion of the clients' ensemble, which optimises pixels.

Reference:
    Yin et al., Dreaming to Distill: Data-Free Knowledge Transfer via DeepInversion,
    CVPR 2020. FedSyn (Zhang et al. 2021) uses it as a baseline of one-shot federated
    learning and gives none of its values.

Update:
    A batch of images x = sigmoid(u), u ~ N(0, I), takes N_inv Adam steps on
    ``CE(D(v), y) + w_f R_f + w_tv R_tv(v) + w_2 ||v|| + w_c R_c(v)``. v is x rolled by
    the same random offset for all images. The iterate with the lowest loss joins the
    bank. The student follows D on the bank as in FedSyn.

Communication:
    Up: models, of any architectures. Down: as in
    `fedexp.methods.bases.data_free.DataFree`.

State:
    Server: see `fedexp.methods.bases.replay.Replay`.

Logged:
    ``synthesis/loss``, ``ce``, ``f``, ``tv``, ``norm`` and ``c`` (unweighted) of the
    stored images, besides those of `fedexp.methods.bases.replay.Replay`.

Differences from the paper:
    The sigmoid is an addition: the authors optimise normalised pixels without bounds.
    Total variation and norm are therefore those of images in [0, 1]. R_f is divided by
    the number of teachers. It is 0 if the teachers have no BatchNorm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from fedexp.core.aggregator import State
from fedexp.core.build import require
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
        N_inv: Number of steps on a batch.
        lr_pixels: Size of these steps.
        pixels: Optimizer of the pixels.
        w_f: Weight of the statistics R_f.
        w_tv: Weight of the total variation.
        w_2: Weight of the norm.
        w_c: Weight of the competition. With 0 the student is not evaluated.
        shift: Largest offset along either side, in pixels.
        tv: Form of the total variation.
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
        for name in ("N_inv", "lr_pixels"):
            require(getattr(self, name) > 0, f"{name} must be positive, got {getattr(self, name)}")
        for name in ("w_f", "w_tv", "w_2", "w_c", "shift"):
            require(
                getattr(self, name) >= 0, f"{name} must not be negative, got {getattr(self, name)}"
            )

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
        terms_of = self.loss(labels, student, ensemble, offsets, View.of("none", env, "synthesis"))
        state = self.pixels.init(u)
        arguments = terms_of, self.pixels, self.lr_pixels, self.N_inv, "pixels"
        made = synthesise(u, state, lambda u: u["u"].sigmoid(), *arguments)
        return made.images, named(made.lowest), own

    def loss(
        self,
        labels: Tensor,
        student: Weights,
        ensemble: TeacherEnsemble,
        offsets: list[list[int]],
        view: View,
    ) -> Callable[[Tensor, int], Terms]:
        """Return the function that computes the loss and its terms.

        Its arguments are images (b, c, H, W) and the number of a step, whose offset is
        ``offsets[step]``.
        """
        answer = answers(student)

        def terms_of(images: Tensor, step: int) -> Terms:
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
                terms["ce"]
                + self.w_f * terms["f"]
                + self.w_tv * terms["tv"]
                + self.w_2 * terms["norm"]
            )

            if self.w_c > 0:
                terms["c"] = competition(shown.logits, answer(inputs))
                loss = loss + self.w_c * terms["c"]

            return {"loss": loss, **terms}

        return terms_of
