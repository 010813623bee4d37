"""Feature skew: inputs whose distribution differs from client to client.

The labels and the split do not change.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedexp.core.build import require
from fedexp.core.data import Partition
from fedexp.core.errors import ConfigError, DataError
from fedexp.core.seeds import torch_generator
from fedexp.data._torchvision import torchvision_module
from fedexp.data.dataset import Dataset
from fedexp.data.partition import CutPartition

# Images are changed in parts of this size, to limit the memory of floating-point copies
_PART = 1000


@dataclass(frozen=True)
class FeatureSkew:
    """The config's ``feature_skew.*``: a change of each client's inputs.

    The change is small for the first client and large for the last one. Client i of N
    has the strength ``strength i / (N - 1)``, for i from 0, so the inputs of client 0
    do not change. The inputs are changed once, when the data are split. Test samples,
    samples that are held out before the split, and proxy data do not change. A share
    of a client's samples that is cut for validation changes as its other samples do.

    Source: Li, Diao, Chen & He, Federated Learning on Non-IID Data Silos: An
        Experimental Study, ICDE 2022, for ``noise``. There, the strength is a variance
        and grows with i / N for i from 1. Unlike there, noisy 8-bit images are rounded
        and clipped to 0 to 255.

    Args:
        kind: ``none``, or one of the following. ``noise`` adds independent Gaussian
            noise. ``rotation`` rotates images counter-clockwise, bilinearly, and fills
            the corners with 0. ``blur`` convolves images with a Gaussian and reflects
            them at the border.
        strength: Strength for the last client. ``noise``: standard deviation. For 8-bit
            images, 1 is the whole range from 0 to 255. For other inputs, it is in the
            unit of the inputs. ``rotation``: angle in degrees. ``blur``: standard
            deviation in pixels.
    """

    kind: Literal["none", "noise", "rotation", "blur"] = "none"
    strength: float = 0.0

    def __post_init__(self) -> None:
        if self.kind == "none":
            require(
                self.strength == 0,
                f"feature_skew.strength={self.strength:g} has no effect: "
                "set feature_skew.kind=noise, rotation or blur",
            )
        else:
            require(
                self.strength > 0 and math.isfinite(self.strength),
                f"feature_skew.strength must be positive with feature_skew.kind={self.kind}, "
                f"got {self.strength:g}",
            )

    def check(self, dataset: Dataset, clients: int) -> None:
        """Check that the inputs of the clients can be changed.

        Raises:
            ConfigError: The inputs are not images, or the targets would have to be
                rotated with them, or there is only one client.
        """
        if self.kind != "none" and clients == 1:
            raise ConfigError(
                "the inputs of the first client do not change, and there is no other client",
                where="feature_skew.kind",
                expected="none, or two or more clients",
                got=f"{self.kind} with clients=1",
                do="raise clients, or set feature_skew.kind=none",
            )
        if self.kind in ("rotation", "blur") and len(dataset.shape) != 3:
            raise ConfigError(
                f"the inputs of data set '{dataset.name}' are not images",
                where="feature_skew.kind",
                expected="noise or none, or a data set of images",
                got=self.kind,
                do="set feature_skew.kind=noise",
            )
        if self.kind == "rotation" and dataset.targets == "masks":
            raise ConfigError(
                f"the masks of data set '{dataset.name}' would not be rotated with its images",
                where="feature_skew.kind",
                expected="noise, blur or none",
                got=self.kind,
                do="set feature_skew.kind=noise, or feature_skew.kind=blur",
            )

    def strength_of(self, client: int, clients: int) -> float:
        """Return the strength of one of `clients` clients."""
        return self.strength * client / max(1, clients - 1)

    def applied(self, x: Tensor, partition: Partition, seed_data: int) -> Tensor:
        """Return the training pool with changed inputs.

        Args:
            x: (n, *shape), the inputs of the training pool, on the CPU. They are not
                changed in place.
            partition: The split of the pool.
            seed_data: Seed of the noise.

        Raises:
            DataError: Clients share samples.
        """
        if self.kind == "none":
            return x
        if partition.info.get("repeated_samples"):
            raise DataError(
                "clients share samples, whose inputs cannot differ from client to client",
                where="feature_skew.kind",
                expected="none, because this split assigns samples more than once",
                got=self.kind,
                do="set feature_skew.kind=none, or choose another partition",
            )

        x = x.clone()
        for client in range(partition.num_clients):
            strength = self.strength_of(client, partition.num_clients)
            if strength > 0:
                at = torch.from_numpy(_positions(partition, client))
                generator = torch_generator(seed_data, "feature skew", client)
                for part in torch.split(at, _PART):
                    x[part] = self._changed(x[part], strength, generator)
        return x

    def _changed(self, x: Tensor, strength: float, generator: torch.Generator) -> Tensor:
        is_8_bit = x.dtype == torch.uint8
        raw = x.float() if is_8_bit else x

        if self.kind == "noise":
            noise = torch.randn(raw.shape, generator=generator, dtype=raw.dtype)
            new = raw + noise * strength * (255 if is_8_bit else 1)
        else:
            v2 = torchvision_module("torchvision.transforms.v2")
            if self.kind == "rotation":
                bilinear = v2.InterpolationMode.BILINEAR
                new = v2.functional.rotate(raw, strength, interpolation=bilinear)
            else:
                # Reflection needs a reach that is smaller than the image.
                reach = min(math.ceil(3 * strength), *(side - 1 for side in raw.shape[-2:]))
                new = v2.functional.gaussian_blur(raw, 2 * reach + 1, strength)

        return new.round().clamp(0, 255).to(torch.uint8) if is_8_bit else new


NO_SKEW = FeatureSkew()


def _positions(partition: Partition, client: int) -> np.ndarray:
    """Return the positions of all samples of a client, with its validation samples."""
    own = partition.of(client)
    if isinstance(partition, CutPartition):
        start, stop = partition.held_offsets[client : client + 2]
        own = np.concatenate([own, partition.held[start:stop]])
    return own
