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

- ``none``: no augmentation.
- ``clients``: the transform of the clients' training batches.
- ``authors``: the transform of the clients' training batches, but always with a flip of
  probability 1/2. This is the augmentation of DENSE's code, whose clients crop images
  only on CIFAR.
- ``crop_flip``: a crop of the image padded by 4 pixels, and a flip with probability
  1/2.
"""


def augmentation(views: Views, domain: InputDomain) -> Augmentation | None:
    """Return the random transform that `views` names, or None for no transform."""
    if views == "crop_flip":
        return Augment(flip=0.5, crop_padding=4)
    if views == "authors":
        mine = Augment() if domain.augment is None else domain.augment
        # Data sets have no augmentation of another type
        assert isinstance(mine, Augment)
        return replace(mine, flip=0.5)
    return domain.augment if views == "clients" else None


@dataclass(frozen=True, eq=False)
class View:
    """The transform of images to network inputs: normalisation and augmentation.

    The normalised value of a pixel with 8-bit value p is ``p * scale + shift``
    (`InputDomain.affine`). Each view has its own stream of random numbers.

    Args:
        scale: Factor of the normalisation. It is copied to the device once for all
            steps, so that the CPU does not wait for the GPU in a step.
        shift: Summand of the normalisation.
        augment: Augmentation of normalised inputs, or None.
        noise: Random numbers of the augmentation.
    """

    scale: Tensor
    shift: Tensor
    augment: Augmentation | None
    noise: StepNoise

    @classmethod
    def of(cls, views: Views, env: Env, name: str) -> View:
        """Return the view whose random numbers depend on `name`, round and step.

        Round and step are ``env.round`` and ``env.step``.
        """
        scale, shift = env.domain.affine(1 + len(env.input_shape), env.device)
        return cls(
            scale=scale,
            shift=shift,
            augment=augmentation(views, env.domain),
            noise=StepNoise(seed_of(env.seed, name, env.round, env.step), env.device),
        )

    def inputs(self, images: Tensor, step: int) -> Tensor:
        """Normalise and augment images.

        The result is differentiable. Without augmentation it equals the result of
        `InputDomain.normalise`.

        Args:
            images: Images of shape (b, channels, H, W) with values in [0, 1].
            step: Number of the step, which determines the random augmentation.
        """
        return self.augmented(images * 255.0 * self.scale + self.shift, step)

    def augmented(self, inputs: Tensor, step: int) -> Tensor:
        """Augment normalised inputs, with the random numbers of step `step`."""
        self.noise.step = step
        return inputs if self.augment is None else self.augment(inputs, self.noise)
