"""Views of generated images: the images after normalisation and augmentation."""

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
"""The augmentation of generated images.

``none`` is no augmentation. ``clients`` is the transform of the clients' training
batches. ``authors`` is this transform with a flip probability of 1/2 for every data
set, as in DENSE's code, whose clients crop only on CIFAR. ``crop_flip`` is a crop of
the image padded by 4 pixels, and a flip with probability 1/2.
"""


def augmentation(views: Views, domain: InputDomain) -> Augmentation | None:
    """Return the random transform that `views` names, or None for no transform."""
    if views == "crop_flip":
        return Augment(flip=0.5, crop_padding=4)
    if views == "authors":
        mine = Augment() if domain.augment is None else domain.augment
        # Data sets have no other augmentation
        assert isinstance(mine, Augment)
        return replace(mine, flip=0.5)
    return domain.augment if views == "clients" else None


@dataclass(frozen=True, eq=False)
class View:
    """The transform of images to network inputs: normalisation and augmentation.

    Each view has its own stream of random numbers. The host does not wait for the
    device.

    Args:
        scale: Factor of 8-bit pixel values (`InputDomain.affine`). It is copied to the
            device once for all steps.
        shift: Summand of 8-bit pixel values (`InputDomain.affine`).
        augment: Augmentation of normalised inputs, or None.
        noise: Random numbers of the augmentation.
    """

    scale: Tensor
    shift: Tensor
    augment: Augmentation | None
    noise: StepNoise

    @classmethod
    def of(cls, views: Views, env: Env, name: str) -> View:
        """Return the view of stream `name` at ``env.round`` and ``env.step``."""
        scale, shift = env.domain.affine(1 + len(env.input_shape), env.device)
        return cls(
            scale=scale,
            shift=shift,
            augment=augmentation(views, env.domain),
            noise=StepNoise(seed_of(env.seed, name, env.round, env.step), env.device),
        )

    def inputs(self, images: Tensor, step: int) -> Tensor:
        """Return the network inputs of images at step number `step`.

        Images have shape (b, c, H, W) and values in [0, 1]. Gradients flow through.
        Without augmentation the result is that of `InputDomain.normalise`.
        """
        return self.augmented(images * 255.0 * self.scale + self.shift, step)

    def augmented(self, inputs: Tensor, step: int) -> Tensor:
        """Return normalised inputs after the augmentation of step number `step`."""
        self.noise.step = step
        return inputs if self.augment is None else self.augment(inputs, self.noise)
