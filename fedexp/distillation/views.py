"""How generated images enter networks: normalised as the clients' are, and augmented."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from fedexp.core.data import Augmentation, InputDomain
from fedexp.core.env import Env
from fedexp.core.kernel import StepNoise
from fedexp.core.seeds import seed_of
from fedexp.data.augment import Augment

Views = Literal["none", "clients", "authors", "crop_flip"]
"""``clients``: the transform of their training batches; ``authors``: the same, with a flip with probability 1/2 in any case (that
of DENSE's code where clients crop on CIFAR alone); ``crop_flip``: a crop of the image padded by 4 pixels, and that flip."""


def augmentation(views: Views, domain: InputDomain) -> Augmentation | None:
    """The random transform of normalised batches that `views` names."""
    if views == "crop_flip":
        return Augment(flip=0.5, crop_padding=4)
    if views == "authors":
        mine = Augment() if domain.augment is None else domain.augment
        assert isinstance(mine, Augment)  # data sets have no other
        return replace(mine, flip=0.5)
    return domain.augment if views == "clients" else None


@dataclass(frozen=True, eq=False)
class View:
    """Images or inputs as a step's networks see them, drawn from a stream of its own; the host waits for nothing.

    Args:
        scale, shift: of pixels in 8 bits, `InputDomain.affine`, on the device once for all steps.
        augment: or None; noise: what it draws from.
    """

    scale: Tensor
    shift: Tensor
    augment: Augmentation | None
    noise: StepNoise

    @classmethod
    def of(cls, views: Views, env: Env, name: str) -> View:
        """That of stream `name` in the step at ``env.round``, ``env.step``."""
        noise = StepNoise(seed_of(env.seed, name, env.round, env.step), env.device)
        scale, shift = env.domain.affine(1 + len(env.input_shape), env.device)
        return cls(scale, shift, augmentation(views, env.domain), noise)

    def inputs(self, images: Tensor, step: int) -> Tensor:
        """Network inputs of (b, c, H, W) images in [0, 1], as step number `step` sees them; gradients flow through.

        Without augmentation, what `InputDomain.normalise` makes of them.
        """
        return self.augmented(images * 255.0 * self.scale + self.shift, step)

    def augmented(self, inputs: Tensor, step: int) -> Tensor:
        """The same for inputs that are normalised already."""
        self.noise.step = step
        return inputs if self.augment is None else self.augment(inputs, self.noise)
