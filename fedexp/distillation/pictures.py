"""Pictures of a server's images: a few per class, or fresh ones of a generator."""

from __future__ import annotations

import torch
from torch import Tensor

from fedexp.core.env import Env
from fedexp.core.seeds import torch_generator
from fedexp.core.weights import Weights
from fedexp.distillation.student import answers
from fedexp.distillation.synthesis import generated_by
from fedexp.distillation.views import View

_COLUMNS = 8
# Images of a generator per class. Their actual classes may differ.
_DRAWN = 16
_AT_ONCE = 128


def by_class(images: Tensor, classes: Tensor, num_classes: int) -> Tensor:
    """Arrange the last 8 images of each class in a grid, white if there are fewer.

    Args:
        images: Images of shape (n, c, H, W), with 8 bits per value or in [0, 1].
        classes: Their classes, of shape (n,).
        num_classes: Number of classes.

    Returns:
        A grid of shape (num_classes, 8, c, H, W), in [0, 1].
    """
    dtype = torch.float32 if images.dtype == torch.uint8 else images.dtype
    grid = torch.ones(num_classes, _COLUMNS, *images.shape[1:], device=images.device, dtype=dtype)
    for number, row in enumerate(grid):
        last = images[(classes == number).nonzero().flatten()[-_COLUMNS:]]
        row[: len(last)] = last / 255 if last.dtype == torch.uint8 else last
    return grid


@torch.no_grad()
def generated(generator: Weights, student: Weights, nz: int, env: Env) -> tuple[Tensor, Tensor]:
    """Return images of fresh noise (n, `nz`) and the classes that the student assigns.

    Returns:
        Images of shape (n, c, H, W), and classes of shape (n,).
    """
    random = torch_generator(env.seed, "pictures", env.round)
    noise = torch.randn(_DRAWN * env.num_classes, nz, generator=random).to(env.device, env.dtype)
    images_of, answer, view = (
        generated_by(generator),
        answers(student),
        View.of("none", env, "pictures"),
    )
    images = [images_of({**generator.params, "z": z}) for z in torch.split(noise, _AT_ONCE)]
    return torch.cat(images), torch.cat([answer(view.inputs(part, 0)).argmax(1) for part in images])
