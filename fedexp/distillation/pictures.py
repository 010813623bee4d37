"""Example images of a server: stored images by class, or new images of a generator."""

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
# Number of generated images divided by the number of classes. The generator does not
# take a class, so a single class may have more or fewer images.
_DRAWN = 16
_AT_ONCE = 128


def by_class(images: Tensor, classes: Tensor, num_classes: int) -> Tensor:
    """Arrange the last 8 images of each class in a grid. Free cells are white.

    Args:
        images: Images of shape (n, channels, H, W), uint8 or with values in [0, 1].
        classes: Classes of the images, of shape (n,).
        num_classes: Number of classes.

    Returns:
        A grid of shape (num_classes, 8, channels, H, W), in [0, 1].
    """
    dtype = torch.float32 if images.dtype == torch.uint8 else images.dtype
    grid = torch.ones(num_classes, _COLUMNS, *images.shape[1:], device=images.device, dtype=dtype)
    for number, row in enumerate(grid):
        last = images[(classes == number).nonzero().flatten()[-_COLUMNS:]]
        row[: len(last)] = last / 255 if last.dtype == torch.uint8 else last
    return grid


@torch.no_grad()
def generated(generator: Weights, student: Weights, nz: int, env: Env) -> tuple[Tensor, Tensor]:
    """Generate n images from new noise, and classify them with the student.

    n is 16 times the number of classes. `nz` is the length of a noise vector.

    Returns:
        Images of shape (n, channels, H, W), and the predicted classes of shape (n,).
    """
    random = torch_generator(env.seed, "pictures", env.round)
    noise = torch.randn(_DRAWN * env.num_classes, nz, generator=random).to(env.device, env.dtype)
    images_of = generated_by(generator)
    answer = answers(student)
    view = View.of("none", env, "pictures")
    images = [images_of({**generator.params, "z": z}) for z in torch.split(noise, _AT_ONCE)]
    return torch.cat(images), torch.cat([answer(view.inputs(part, 0)).argmax(1) for part in images])
