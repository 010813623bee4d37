"""Tests of data sets with masks: published files, the generated set, refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedexp.config.compose import compose
from fedexp.core.errors import ConfigError, DataError
from fedexp.data.carvana import Carvana
from fedexp.data.dataset import verify
from fedexp.data.federated import UNLABELLED
from fedexp.data.shapes_masks import ShapesMasks
from fedexp.running.experiment import Experiment
from tests.data.idx import pixels
from tests.world import CPU

CARS, VIEWS = ("0a1b", "77_f", "c0de"), ("01", "02")
SMALL = ShapesMasks(shape=(3, 8, 12), samples=9, test_samples=4)
SHAPES = [
    "dataset=shapes_masks",
    "dataset.shape=[3,8,8]",
    "dataset.samples=60",
    "dataset.test_samples=8",
]
NET = ["model=unet", "model.down=[[2],[3]]", "model.up=[[2]]"]
RUN = ["task=segmentation", *SHAPES, *NET]


def write_carvana(root: Path) -> dict[str, np.ndarray]:
    """Write photos of 8 x 12 pixels, and their masks as GIF files with a palette.

    The pixels of the car have the value 255 in a mask.
    """
    from PIL import Image

    written = {}
    for folder in ("train", "train_masks"):
        (root / "carvana" / folder).mkdir(parents=True)
    for number, name in enumerate(f"{car}_{view}" for car in CARS for view in VIEWS):
        photo = np.full((8, 12, 3), 30 * number, np.uint8)
        mask = 255 * (pixels(8, 12, seed=number) >= 128).astype(np.uint8)
        Image.fromarray(photo).save(root / "carvana" / "train" / f"{name}.jpg")
        Image.fromarray(mask).convert("P").save(
            root / "carvana" / "train_masks" / f"{name}_mask.gif"
        )
        written[name] = mask
    return written


def test_carvanas_photos_and_masks_are_read_and_cars_withheld(tmp_path: Path) -> None:
    masks = write_carvana(tmp_path)
    arrays = Carvana(shape=(3, 8, 12)).load(tmp_path, download=False)
    train, test = (
        [f"{car}_{v}" for car in CARS[:2] for v in VIEWS],
        [f"{CARS[2]}_{v}" for v in VIEWS],
    )
    for x, y, names in (
        (arrays.train_x, arrays.train_y, train),
        (arrays.test_x, arrays.test_y, test),
    ):
        assert [int(value) for value in x.float().mean((1, 2, 3)).round()] == [
            30 * list(masks).index(n) for n in names
        ]
        assert np.array_equal(y.numpy(), np.stack([masks[name] // 255 for name in names]))
    more = Carvana(shape=(3, 8, 12), test_fraction=0.6).load(tmp_path, download=False)
    assert len(more.train_y) == 2
    # The arrays are loaded from the cache
    again = Carvana(shape=(3, 8, 12)).load(tmp_path, download=False)
    assert again.fingerprint == arrays.fingerprint


def test_a_resized_masks_pixel_is_the_cars_where_half_of_it_is(tmp_path: Path) -> None:
    from PIL import Image

    write_carvana(tmp_path)
    mask = np.zeros((8, 12), np.uint8)
    # The car covers all of columns 0-3, a quarter of 4-7 and nothing of 8-11
    mask[:, :5] = 255
    Image.fromarray(mask).save(tmp_path / "carvana/train_masks/0a1b_01_mask.gif")
    mask[:, :7] = 255
    Image.fromarray(mask).save(tmp_path / "carvana/train_masks/0a1b_02_mask.gif")
    arrays = Carvana(shape=(3, 2, 3)).load(tmp_path, download=False)
    assert arrays.train_x.shape == (4, 3, 2, 3)
    assert arrays.train_y[:2].tolist() == [[[1, 0, 0]] * 2, [[1, 1, 0]] * 2]


def test_photos_and_masks_that_do_not_go_together_are_named(tmp_path: Path) -> None:
    from PIL import Image

    write_carvana(tmp_path)
    folder, file = tmp_path / "carvana", tmp_path / "carvana/train_masks/77_f_02_mask.gif"
    content = file.read_bytes()

    def refused(said: str, got: str) -> None:
        with pytest.raises(DataError, match=said) as caught:
            Carvana(shape=(3, 8, 12)).load(tmp_path, download=False)
        assert got in str(caught.value)

    Image.fromarray(np.zeros((8, 11), np.uint8)).save(file)
    refused("a mask has another size than its photo", "77_f_02_mask.gif")
    file.unlink()
    refused("do not form pairs", "1 photos without a mask (77_f_02.jpg)")
    file.write_bytes(content)
    (folder / "train/c0de_01.jpg").rename(folder / "c0de_01.jpg")
    refused("do not form pairs", "1 masks without a photo (c0de_01_mask.gif)")
    file.write_bytes(b"GIF")
    (folder / "c0de_01.jpg").rename(folder / "train/c0de_01.jpg")
    refused("cannot be decoded", "77_f_02_mask.gif")
    for name in ("77_f_01", "77_f_02", "c0de_01", "c0de_02"):
        (folder / f"train/{name}.jpg").unlink()
        (folder / f"train_masks/{name}_mask.gif").unlink()
    refused("too few cars", "2 photos of 1 car")


def test_shapes_have_their_masks_and_a_smaller_set_is_the_beginning_of_a_larger_one() -> None:
    arrays = SMALL.load(Path(), download=False)
    larger = replace(SMALL, samples=12).load(Path(), download=False)
    assert torch.equal(larger.train_x[:9], arrays.train_x) and torch.equal(
        larger.train_y[:9], arrays.train_y
    )
    assert not torch.equal(arrays.train_x[:4], arrays.test_x)
    assert replace(SMALL, seed=1).load(Path(), download=False).fingerprint != arrays.fingerprint
    plain = ShapesMasks(shape=(3, 32, 32), samples=100, noise=0.0).load(Path(), download=False)
    share = plain.train_y.double().mean((1, 2))
    assert share.min() > 0.02 and share.max() < 0.6
    # All pixels of the mask have one colour, and the background differs from it
    for image, mask in zip(plain.train_x, plain.train_y, strict=True):
        (colour,) = {tuple(pixel) for pixel in image[:, mask == 1].T.tolist()}
        background = image[:, mask == 0].double().mean(1)
        assert float((background - torch.tensor(colour)).abs().mean()) > 0.15 * 255


def test_verify_with_wrong_masks_raises_data_error() -> None:
    arrays = SMALL.load(Path(), download=False)
    for change, said in (
        (
            {"train_y": arrays.train_y[:, :, :-1]},
            r"masks have the wrong shape or dtype(.|\n)*\(n, 8, 12\)(.|\n)*\(9, 8, 11\)",
        ),
        ({"test_y": arrays.test_y.long()}, "masks have the wrong shape or dtype"),
        ({"train_y": torch.zeros(9, dtype=torch.int64)}, "masks have the wrong shape or dtype"),
        ({"train_y": arrays.train_y[1:]}, "numbers of samples and masks differ"),
        ({"train_y": arrays.train_y * 255}, "a mask is out of range"),
    ):
        with pytest.raises(DataError, match=said):
            verify(SMALL, replace(arrays, **change))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([*SHAPES, *NET], "trains on labels, and data set 'shapes_masks' has masks"),
        (["task=segmentation", *NET], "trains on masks, and data set 'digits' has labels"),
        (
            ["task=segmentation", *SHAPES],
            r"output does not fit the data set(.|\n)*\(batch, 1, 8, 8\)",
        ),
        (NET, r"output does not fit the data set(.|\n)*\(2, 10, 8, 8\)"),
        ([*RUN, "partition=shards"], "no classes by which"),
        ([*RUN, "partition=pathological"], "no classes by which"),
        ([*RUN, "partition=label_groups"], "no classes by which"),
        ([*RUN, "partition=dirichlet_per_client"], "no classes by which"),
        ([*RUN, "partition=natural"], "does not name the owners"),
        ([*RUN, "dataset.augment={flip: 0.5}"], "not their masks"),
    ],
)
def test_settings_that_masks_exclude_are_refused_before_loading(
    overrides: list[str], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        Experiment.of(compose(overrides))


def test_dirichlet_of_masks_samples_the_clients_sizes() -> None:
    """The test writes out the recipe for one class. It is NAFI's recipe with K = 1."""
    data = Experiment.of(compose([*RUN, "clients=3", "partition.min_size=5", "seed_data=4"])).load(
        CPU
    )
    rng = np.random.RandomState(4)
    while True:
        order = np.arange(60)
        rng.shuffle(order)
        cuts = (np.cumsum(rng.dirichlet([0.5] * 3)) * 60).astype(int)[:-1]
        parts = np.split(order, cuts)
        if min(map(len, parts)) >= 5:
            break
    assert data.partition.sizes.tolist() == [len(part) for part in parts]
    assert [sorted(data.partition.of(c)) for c in range(3)] == [sorted(part) for part in parts]
    assert data.class_counts().tolist() == [[len(part)] for part in parts]
    assert data.train.labels(data.positions(1)).tolist() == [0] * len(parts[1])


def test_limits_validation_and_a_proxy_take_images_with_their_masks() -> None:
    limits = [
        "clients=2",
        "partition=iid",
        "limit.train=40",
        "limit.test=5",
        "partition.val_fraction=0.1",
    ]
    data = Experiment.of(compose([*RUN, *limits, "proxy.source=train", "proxy.size=6"])).load(CPU)
    whole = ShapesMasks(shape=(3, 8, 8), samples=60, test_samples=8).load(Path(), download=False)
    assert data.val is not None and data.proxy is not None
    assert (len(data.train), len(data.test), len(data.val), len(data.proxy)) == (34, 5, 4, 6)
    assert data.proxy.y.tolist() == [UNLABELLED] * 6
    found = {
        image.numpy().tobytes(): mask
        for image, mask in zip(whole.train_x, whole.train_y, strict=True)
    }
    for part in (data.train, data.val):
        for image, mask in zip(part.x, part.y, strict=True):
            assert torch.equal(found[image.numpy().tobytes()], mask)
