"""Augmentation of images.

The tests check settings that change nothing and that samples are transformed
independently. They also check that the given noise is the only source of randomness.
"""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fedexp.data.augment import Augment


class Recorded:
    """Uniform noise that is equal for equal names. It records what is asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, name: str, shape: tuple[int, ...]) -> Tensor:
        self.asked.append(name)
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        return torch.rand(shape, generator=generator)


def batch(n: int = 16) -> Tensor:
    return torch.randn(n, 3, 6, 5, generator=torch.Generator().manual_seed(0))


def test_flipping_always_twice_is_the_identity() -> None:
    flip = Augment(flip=1.0)
    once = flip(batch(), Recorded())
    assert torch.equal(once, batch().flip(-1))
    assert torch.equal(flip(once, Recorded()), batch())


@pytest.mark.parametrize(
    "augment",
    [
        Augment(flip=0.0),
        Augment(flip=0.0, crop_padding=0),
        Augment(0.0, crop_padding=2, crop_probability=0.0),
    ],
)
def test_switched_off_is_the_identity_and_draws_nothing(augment: Augment) -> None:
    noise = Recorded()
    assert torch.equal(augment(batch(), noise), batch())
    assert noise.asked == []


def test_every_sample_is_one_window_of_its_padded_self() -> None:
    x = batch(40)
    out = Augment(flip=0.0, crop_padding=2)(x, Recorded())
    padded = functional.pad(x, (2, 2, 2, 2))
    offsets = set()
    for i in range(len(x)):
        found = [
            (r, c)
            for r in range(5)
            for c in range(5)
            if torch.equal(out[i], padded[i, :, r : r + 6, c : c + 5])
        ]
        assert found
        offsets.add(found[0])
    # Every sample has a separate offset in both directions
    assert len(offsets) > 10


def test_crop_probability_leaves_the_others_alone() -> None:
    x = batch(200)
    out = Augment(flip=0.0, crop_padding=2, crop_probability=0.5)(x, Recorded())
    same = sum(torch.equal(a, b) for a, b in zip(out, x, strict=True))
    assert 60 < same < 150


def test_a_batch_may_have_one_decision_and_one_offset() -> None:
    """With ``per="batch"``, every sample gets the same flip and the same offset.

    FedExP's code also transforms a batch like its first sample.
    """
    augment, alone = (Augment(0.5, 2, 0.5, per=per) for per in ("batch", "sample"))
    seen = set()
    for seed in range(8):

        def noise(name: str, shape: tuple[int, ...], seed: int = seed) -> Tensor:
            assert shape[0] == 1
            return torch.rand(shape, generator=torch.Generator().manual_seed(seed * 7 + len(name)))

        whole = augment(batch(), noise)
        seen.add(tuple(whole[0, 0, 0].tolist()))
        for i in range(16):
            assert torch.equal(alone(batch()[i : i + 1], noise)[0], whole[i])
    assert len(seen) > 3


def test_samples_do_not_influence_each_other() -> None:
    augment = Augment(flip=0.5, crop_padding=2, crop_probability=0.5)
    noise = {name: Recorded()(name, shape) for name, shape in SHAPES.items()}
    whole = augment(batch(), lambda name, shape: noise[name])
    for i in range(16):
        alone = augment(batch()[i : i + 1], lambda name, shape, i=i: noise[name][i : i + 1])
        assert torch.equal(alone[0], whole[i])


SHAPES = {"augment/flip": (16,), "augment/offset": (16, 2), "augment/crop": (16,)}


def test_extreme_noise_stays_inside() -> None:
    top = torch.tensor(1.0).nextafter(torch.tensor(0.0))
    out = Augment(flip=0.0, crop_padding=2)(
        batch(), lambda name, shape: torch.full(shape, float(top))
    )
    assert torch.equal(out, functional.pad(batch(), (2, 2, 2, 2))[:, :, 4:, 4:])


def test_probabilities_are_checked() -> None:
    for arguments in ({"flip": 1.5}, {"crop_padding": -1}, {"crop_probability": -0.1}):
        with pytest.raises(ValueError, match="give"):
            Augment(**arguments)
