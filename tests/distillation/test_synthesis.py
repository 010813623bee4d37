"""The synthesis of images by optimising a generator and its noise."""

from __future__ import annotations

import torch

from fedexp.core import trees
from fedexp.core.weights import Weights
from fedexp.distillation.generator import generator_spec
from fedexp.distillation.synthesis import Terms, generated_by, synthesise
from fedexp.server_training.optimizers import Sgd


def test_clip_bounds_the_generator_and_not_the_noise() -> None:
    spec = generator_spec((1, 8, 8), 4, 2)
    z = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def terms_of(images: torch.Tensor, step: int) -> Terms:
        return {"loss": 1e4 * images.pow(2).mean()}

    def moved(clip: float | None) -> tuple[torch.Tensor, float]:
        generator, sgd = Weights.init(spec, 3, z.device, z.dtype), Sgd(clip=clip)
        start, free = generator.params, {**generator.params, "z": z}
        images_of = generated_by(generator)
        learned = synthesise(
            free, sgd.init(free), images_of, terms_of, sgd, 0.1, 1, unclipped={"z"}
        ).learned
        change = trees.sub({name: learned[name] for name in start}, start)
        return learned["z"] - z, trees.squared_norm(change) ** 0.5

    free_z, free_length = moved(None)
    bounded_z, bounded_length = moved(10.0)
    assert free_length > 2 and abs(bounded_length - 0.1 * 10) < 1e-5
    torch.testing.assert_close(bounded_z, free_z)
