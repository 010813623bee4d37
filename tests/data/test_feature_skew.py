"""Tests of inputs that differ from client to client."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedexp.config.compose import compose
from fedexp.core.data import Partition
from fedexp.core.errors import ConfigError, DataError
from fedexp.data.feature_skew import FeatureSkew
from fedexp.running.experiment import load_data

# Client 0 has the first 40 samples, client 1 the next 20, client 2 the last 40.
SPLIT = Partition.from_lists([np.arange(40), np.arange(40, 60), np.arange(60, 100)])


def images(dtype: torch.dtype = torch.uint8, side: int = 9) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(50, 200, (100, 2, side, side), generator=generator)
    return x.to(dtype)


def skewed(kind: Any, strength: float, x: Tensor, seed: int = 0) -> Tensor:
    return FeatureSkew(kind, strength).applied(x, SPLIT, seed)


@pytest.mark.parametrize(("kind", "strength"), [("rotation", 90), ("blur", 1)])
def test_strength_grows_from_0_for_the_first_client(kind: Any, strength: float) -> None:
    x = images()
    before = x.clone()
    new = skewed(kind, strength, x)
    assert new.dtype == torch.uint8
    assert torch.equal(x, before)  # not changed in place

    everything_last = Partition.from_lists([np.arange(0), np.arange(100)])
    half, whole = (
        FeatureSkew(kind, share * strength).applied(x, everything_last, 0) for share in (0.5, 1)
    )
    assert not torch.equal(half, whole)
    assert torch.equal(new, torch.cat([x[:40], half[40:60], whole[60:]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_has_the_standard_deviation(dtype: torch.dtype) -> None:
    x = torch.zeros(100, 500, dtype=dtype)
    new = skewed("noise", 0.4, x)
    for client, sigma in [(0, 0.0), (1, 0.2), (2, 0.4)]:
        own = new[SPLIT.of(client)]
        # 10,000 and 20,000 numbers: the relative error of sigma is below 4 / sqrt(2 n).
        assert float(own.std()) == pytest.approx(sigma, rel=0.03)
        assert float(own.mean()) == pytest.approx(0, abs=4 * 0.4 / 100)
    assert not torch.allclose(new[40:60] * 2, new[60:80])  # each client has its own noise
    again, other = skewed("noise", 0.4, x), skewed("noise", 0.4, x, seed=1)
    assert torch.equal(new, again) and not torch.equal(new, other)


def test_noise_of_8_bit_images_is_a_share_of_their_range() -> None:
    x = torch.full((100, 1, 20, 20), 128, dtype=torch.uint8)
    own = skewed("noise", 0.1, x)[SPLIT.of(2)].double()
    assert float(own.std()) == pytest.approx((25.5**2 + 1 / 12) ** 0.5, rel=0.03)
    bright = skewed("noise", 0.5, torch.full_like(x, 250))[SPLIT.of(2)]
    assert float((bright == 255).double().mean()) > 0.4  # clipped, not wrapped


def test_rotation_by_a_right_angle_is_exact_and_counter_clockwise() -> None:
    x = images()
    new = skewed("rotation", 180, x)
    assert torch.equal(new[40:60], torch.rot90(x[40:60], 1, (2, 3)))
    assert torch.equal(new[60:], torch.rot90(x[60:], 2, (2, 3)))


def test_corners_of_rotated_images_are_0() -> None:
    new = skewed("rotation", 45, images(side=21))
    assert new[60:, :, 0, 0].max() == 0 and new[60:, :, 10, 10].min() >= 50


def test_blur_is_a_convolution_with_a_gaussian() -> None:
    sigma, side = 1.5, 31
    x = torch.zeros(100, 1, side, side, dtype=torch.float64)
    x[:, :, 15, 15] = 1.0
    new = skewed("blur", sigma, x)[60, 0]
    at = np.arange(side) - 15
    weights = np.where(abs(at) <= 5, np.exp(-(at**2) / (2 * sigma**2)), 0)  # 5 = ceil(3 sigma)
    weights /= weights.sum()
    assert new.numpy() == pytest.approx(np.outer(weights, weights), abs=1e-6)


def test_blur_of_a_small_image_keeps_its_mean_level() -> None:
    """The Gaussian is wider than the image."""
    x = torch.full((100, 1, 3, 3), 77, dtype=torch.uint8)
    assert torch.equal(skewed("blur", 9.0, x), x)


def test_samples_of_several_clients_are_refused() -> None:
    shared = Partition.from_lists([np.arange(60), np.arange(40, 100)], repeated_samples=20)
    with pytest.raises(DataError, match="clients share samples"):
        FeatureSkew("noise", 0.1).applied(images(), shared, 0)
    assert FeatureSkew().applied(x := images(), shared, 0) is x


def test_only_the_clients_own_samples_change() -> None:
    """Validation samples that are cut from a client's samples change with them."""
    skew = ["feature_skew.kind=noise", "feature_skew.strength=0.2"]
    common = ["clients=4", "proxy.source=train", "proxy.size=50"]
    for way in ("eval.held_out=100", "partition.val_fraction=0.2"):
        plain, changed = (load_data(compose([*common, way, *more])) for more in ([], skew))
        assert torch.equal(plain.test.x, changed.test.x)
        assert torch.equal(plain.proxy.x, changed.proxy.x)
        assert torch.equal(plain.train.y, changed.train.y)
        assert plain.partition.sha256 == changed.partition.sha256
        assert torch.equal(plain.val.x, changed.val.x) == (way == "eval.held_out=100")
        moved = [
            not torch.equal(plain.train.x[at], changed.train.x[at])
            for at in map(plain.positions, range(4))
        ]
        assert moved == [False, True, True, True]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["clients=1", "feature_skew.kind=noise"], "there is no other client"),
        (["dataset=synthetic", "feature_skew.kind=blur"], "are not images"),
        (["dataset=shapes_masks", "model=unet", "task=segmentation", "feature_skew.kind=rotation"],
         "would not be rotated"),
    ],
)  # fmt: skip
def test_data_sets_that_cannot_be_changed_are_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_data(compose([*overrides, "feature_skew.strength=1"]))
