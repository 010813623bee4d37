"""Tests of data sets: small files in real formats, absent and damaged files."""

import gzip
import hashlib
import pickle
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from fedexp.core.build import build
from fedexp.core.errors import ConfigError, DataError
from fedexp.data import torchvision_sets
from fedexp.data._torchvision import torchvision_module
from fedexp.data.dataset import Arrays, Dataset, verify
from fedexp.data.digits import Digits
from fedexp.data.image_folder import ImageFolder
from fedexp.data.synthetic import Synthetic
from fedexp.data.tiny_imagenet import TinyImageNet
from fedexp.data.torchvision_sets import TorchvisionSet
from tests.data.idx import pixels, write_mnist

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data"


def torchvision_set(source: str) -> TorchvisionSet:
    shape = (1, 28, 28) if "MNIST" in source else (3, 32, 32)
    classes = 100 if source == "CIFAR100" else 10
    return TorchvisionSet(source=source, shape=shape, num_classes=classes)  # type: ignore[arg-type]


@pytest.mark.parametrize("source", ["MNIST", "FashionMNIST"])
def test_torchvision_set_reads_idx_files(tmp_path: Path, source: str) -> None:
    files = write_mnist(tmp_path, source)
    arrays = torchvision_set(source).load(tmp_path, download=False)
    assert np.array_equal(arrays.train_x[:, 0].numpy(), files["train-images-idx3"])
    assert np.array_equal(arrays.test_y.numpy(), files["t10k-labels-idx1"])


@dataclass(frozen=True, kw_only=True)
class OtherImages(TorchvisionSet):
    checks_content: ClassVar[bool] = False


@pytest.mark.parametrize("source", ["MNIST", "FashionMNIST"])
def test_changed_file_of_the_publishers_size_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    write_mnist(tmp_path, source)
    dataset = torchvision_set(source)
    files = dataset.expected_files(tmp_path)
    published = tuple(
        (path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest()) for path in files
    )
    monkeypatch.setitem(torchvision_sets._PUBLISHED, source, published)
    sound = dataset.load(tmp_path, download=False).fingerprint

    for path in files:
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(DataError, match="is not the publisher's") as refused:
            dataset.load(tmp_path, download=False)
        assert str(path) in str(refused.value) and "checks_content" in str(refused.value)
        other = OtherImages(source=source, shape=(1, 28, 28), num_classes=10)  # type: ignore[arg-type]
        assert other.load(tmp_path, download=False).fingerprint != sound
        path.write_bytes(content)
    assert dataset.load(tmp_path, download=False).fingerprint == sound


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the original files of MNIST")
@pytest.mark.parametrize(
    ("source", "folder"), [("MNIST", "mnist"), ("FashionMNIST", "fashion-mnist")]
)
def test_published_digests_are_those_of_the_original_files(source: str, folder: str) -> None:
    published = torchvision_sets._PUBLISHED[source]
    for path, (size, sha256) in zip(
        torchvision_set(source).expected_files(Path()), published, strict=True
    ):
        content = gzip.decompress((SHARED / folder / f"{path.name}.gz").read_bytes())
        assert (len(content), hashlib.sha256(content).hexdigest()) == (size, sha256)


@pytest.mark.parametrize("source", ["CIFAR10", "CIFAR100"])
def test_torchvision_set_reads_cifar_archives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    kind = getattr(torchvision_module("torchvision.datasets"), source)
    key, classes = ("labels", 10) if source == "CIFAR10" else ("fine_labels", 100)
    folder = tmp_path / kind.base_folder
    folder.mkdir()
    content: dict[str, Any] = {}
    for number, (name, _) in enumerate(kind.train_list + kind.test_list):
        content[name] = {"data": pixels(classes, 3072, seed=number), key: list(range(classes))}
        (folder / name).write_bytes(pickle.dumps(content[name]))
    meta = {kind.meta["key"]: [f"class {i}" for i in range(classes)]}
    (folder / kind.meta["filename"]).write_bytes(pickle.dumps(meta))

    def md5(name: str) -> str:
        return hashlib.md5((folder / name).read_bytes()).hexdigest()

    dataset = torchvision_set(source)
    # The checksum is compared
    with pytest.raises(DataError, match="damaged or not the publisher's"):
        dataset.load(tmp_path, download=False)
    monkeypatch.setattr(kind, "train_list", [[name, md5(name)] for name, _ in kind.train_list])
    monkeypatch.setattr(kind, "test_list", [[name, md5(name)] for name, _ in kind.test_list])
    monkeypatch.setattr(kind, "meta", kind.meta | {"md5": md5(kind.meta["filename"])})
    arrays = dataset.load(tmp_path, download=False)
    first = content[kind.train_list[0][0]]["data"]
    assert np.array_equal(arrays.train_x[:classes].numpy(), first.reshape(-1, 3, 32, 32))
    assert arrays.train_x.shape == (classes * len(kind.train_list), 3, 32, 32)
    assert arrays.test_y.tolist() == list(range(classes))


def test_torchvision_set_reads_svhn_matlab_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from scipy.io import savemat

    kind = torchvision_module("torchvision.datasets").SVHN
    image = {"train": pixels(32, 32, 3, 20), "test": pixels(32, 32, 3, 10, seed=1)}
    splits = {}
    for split, x in image.items():
        path = tmp_path / f"{split}_32x32.mat"
        savemat(path, {"X": x, "y": (np.arange(x.shape[3], dtype=np.uint8) % 10 + 1)[:, None]})
        splits[split] = ["", path.name, hashlib.md5(path.read_bytes()).hexdigest()]
    monkeypatch.setattr(kind, "split_list", splits)
    arrays = torchvision_set("SVHN").load(tmp_path, download=False)
    assert np.array_equal(arrays.train_x[7].numpy(), image["train"][..., 7].transpose(2, 0, 1))
    # Label 10 of SVHN is the digit 0
    assert arrays.test_y.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0]


def save_image(path: Path, array: np.ndarray) -> None:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path)


def write_folder(root: Path) -> dict[str, np.ndarray]:
    written = {}
    for split, count in (("train", 3), ("test", 2)):
        for label, name in enumerate(("ant", "bee")):
            for i in range(count):
                array = pixels(6, 4, 3, seed=100 * label + i + (50 if split == "test" else 0))
                save_image(root / "bugs" / split / name / f"{i}.png", array)
                written[f"{split}/{name}/{i}"] = array
    return written


def bugs(**changes: Any) -> ImageFolder:
    return ImageFolder(**({"folder": "bugs", "num_classes": 2, "shape": (3, 6, 4)} | changes))


def test_image_folder_reads_class_folders(tmp_path: Path) -> None:
    written = write_folder(tmp_path)
    arrays = bugs().load(tmp_path, download=False)
    assert np.array_equal(arrays.train_x[4].numpy(), written["train/bee/1"].transpose(2, 0, 1))
    assert arrays.train_y.tolist() == [0, 0, 0, 1, 1, 1] and arrays.test_y.tolist() == [0, 0, 1, 1]
    elsewhere = bugs(folder=str(tmp_path / "bugs")).load(tmp_path / "another root", download=False)
    assert torch.equal(elsewhere.train_x, arrays.train_x)


def test_images_of_any_size_and_mode_become_the_declared_shape(tmp_path: Path) -> None:
    write_folder(tmp_path)
    save_image(tmp_path / "bugs/train/ant/grey.png", np.full((40, 30), 77, np.uint8))
    save_image(tmp_path / "bugs/train/ant/alpha.png", np.full((3, 3, 4), 200, np.uint8))
    arrays = bugs().load(tmp_path, download=False)
    assert arrays.train_x.shape == (8, 3, 6, 4)
    # The files in order are 0, 1, 2, alpha and grey
    assert (arrays.train_x[4] == 77).all() and (arrays.train_x[3] == 200).all()
    grey = bugs(shape=(1, 8, 8)).load(tmp_path, download=False)
    assert grey.train_x.shape == (8, 1, 8, 8) and (grey.train_x[4] == 77).all()


def test_an_image_that_cannot_be_decoded_is_named(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "bugs/train/bee/broken.png").write_bytes(b"\x89PNG\r\n\x1a\nnothing")
    with pytest.raises(DataError, match="cannot be decoded") as caught:
        bugs().load(tmp_path, download=False)
    assert "broken.png" in str(caught.value)
    (tmp_path / "bugs/train/bee/broken.png").unlink()
    save_image(tmp_path / "bugs/train/bee/deep.png", np.zeros((4, 4), np.uint16))
    with pytest.raises(DataError, match="more than 8 bits") as caught:
        bugs().load(tmp_path, download=False)
    assert "deep.png" in str(caught.value)


def test_an_image_with_too_many_pixels_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from PIL import Image

    write_folder(tmp_path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    save_image(tmp_path / "bugs/train/bee/large.png", np.zeros((20, 20), np.uint8))
    with pytest.raises(DataError, match="cannot be decoded") as caught:
        bugs().load(tmp_path, download=False)
    assert "large.png" in str(caught.value)


def test_images_in_hidden_folders_are_not_read(tmp_path: Path) -> None:
    write_folder(tmp_path)
    hidden = tmp_path / "bugs/train/ant/.ipynb_checkpoints"
    save_image(hidden / "0-checkpoint.png", np.zeros((6, 4), np.uint8))
    (hidden / "photo.avif").write_bytes(b"x")
    assert bugs().load(tmp_path, download=False).train_y.tolist() == [0, 0, 0, 1, 1, 1]


def test_class_folder_with_unread_files_or_without_images_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path)
    ant = tmp_path / "bugs/train/ant"
    for name in (".DS_Store", "Thumbs.db", "labels.csv", "README", "boxes.mat"):
        (ant / name).write_bytes(b"x")
    assert len(bugs().load(tmp_path, download=False).train_y) == 6
    (ant / "photo.avif").write_bytes(b"x")
    with pytest.raises(DataError, match="format that is not read") as caught:
        bugs().load(tmp_path, download=False)
    assert "photo.avif" in str(caught.value) and "jpeg, jpg, pgm, png" in str(caught.value)
    (ant / "photo.avif").unlink()

    for image in (tmp_path / "bugs/test/bee").iterdir():
        image.unlink()
    with pytest.raises(DataError, match="contains no images") as caught:
        bugs().load(tmp_path, download=False)
    assert "bee" in str(caught.value)


def test_class_folders_must_match(tmp_path: Path) -> None:
    write_folder(tmp_path)
    with pytest.raises(DataError, match=r"not dataset\.num_classes") as caught:
        bugs(num_classes=3).load(tmp_path, download=False)
    assert "dataset.num_classes=2" in str(caught.value)
    (tmp_path / "bugs/test/bee").rename(tmp_path / "bugs/test/beee")
    with pytest.raises(DataError, match="same classes") as caught:
        bugs().load(tmp_path, download=False)
    assert "did you mean 'bee'?" in str(caught.value) and "only in test: beee" in str(caught.value)


def test_tiny_imagenet_layout(tmp_path: Path) -> None:
    folder = tmp_path / "tiny-imagenet-200"
    (folder / "train" / ".ipynb_checkpoints").mkdir(parents=True)
    ids = ["n02", "n01"]
    for label, wnid in enumerate(ids):
        for i in range(2):
            save_image(
                folder / "train" / wnid / "images" / f"{wnid}_{i}.JPEG",
                np.full((64, 64, 3), 60 * label + 30, np.uint8),
            )
    for i in range(3):
        save_image(
            folder / "val" / "images" / f"val_{i}.JPEG", np.full((64, 64, 3), 40 * i, np.uint8)
        )
    lines = [
        "val_2.JPEG\tn01\t0\t0\t62\t62",
        "val_0.JPEG\tn02\t1\t1\t5\t5",
        "val_1.JPEG\tn01\t0\t0\t1\t1",
    ]
    (folder / "val" / "val_annotations.txt").write_text("\n".join(lines) + "\n")
    dataset = TinyImageNet(num_classes=2)
    arrays = dataset.load(tmp_path, download=False)
    assert arrays.train_y.tolist() == [0, 0, 1, 1] and arrays.test_y.tolist() == [0, 1, 0]
    # The training images of n01 come first
    assert (arrays.train_x[0].float().mean() - 90).abs() < 2
    # The test images have the order of the annotations
    assert (arrays.test_x[0].float().mean() - 80).abs() < 2
    (folder / "val" / "val_annotations.txt").write_text("val_2.JPEG\tn09\t0\t0\t1\t1\n")
    with pytest.raises(DataError, match="does not name a known class") as caught:
        dataset.load(tmp_path, download=False)
    assert "line 1" in str(caught.value)


@pytest.mark.parametrize("source", ["MNIST", "FashionMNIST", "CIFAR10", "CIFAR100", "SVHN"])
def test_dataset_without_files_raises_with_ways_to_get_them(tmp_path: Path, source: str) -> None:
    dataset = torchvision_set(source)
    with pytest.raises(DataError) as caught:
        dataset.check(tmp_path, download=False)
    text = str(caught.value)
    for part in (
        str(tmp_path),
        "dataset.download=true",
        f"fedexp-data prepare {dataset.name}",
        "FEDEXP_DATA",
    ):
        assert part in text
    assert str(dataset.expected_files(tmp_path)[0]) in text
    # The files may be downloaded, so the check passes
    dataset.check(tmp_path, download=True)


def test_absent_image_folders_cannot_be_downloaded(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        bugs().check(tmp_path, download=True)
    assert "bugs" in str(caught.value) and "download" not in str(caught.value)


def test_torchvision_set_with_damaged_idx_file_raises(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    file = tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(DataError, match="damaged") as caught:
        torchvision_set("MNIST").load(tmp_path, download=False)
    assert "train-images-idx3-ubyte" in str(caught.value)


def test_digits_equal_those_of_scikit_learn() -> None:
    from sklearn.datasets import load_digits

    source = load_digits()
    order = np.random.RandomState(0).permutation(1797)
    arrays = Digits().load(Path("nowhere"), download=False)
    assert len(arrays.train_y) == 1437 and len(arrays.test_y) == 360
    assert np.array_equal(torch.cat([arrays.train_y, arrays.test_y]).numpy(), source.target[order])
    x = torch.cat([arrays.train_x, arrays.test_x]).numpy()
    assert np.array_equal(x[:, 0], np.rint(source.images[order] * 255 / 16))


def test_synthetic_clusters_have_their_centres(tmp_path: Path) -> None:
    dataset = Synthetic(samples=30_001, test_samples=3_000, features=5, num_classes=3)
    assert dataset.shape == (5,) and dataset.pinned
    arrays = dataset.load(tmp_path, download=False)
    assert arrays.train_x.dtype == torch.uint8 and arrays.train_x.shape == (30_001, 5)
    assert np.bincount(arrays.train_y).tolist() == [10_001, 10_000, 10_000]
    x, test = (
        ((x.double() / 255) - dataset.mean[0]) / dataset.std[0]
        for x in (arrays.train_x, arrays.test_x)
    )
    centres = []
    for k in range(3):
        mine, unseen = x[arrays.train_y == k], test[arrays.test_y == k]
        centres.append(mine.mean(dim=0))
        assert (mine.std(dim=0) - 1).abs().max() < 0.05
        # The standard error of a mean is 1 / sqrt(1000) = 0.03
        assert (mine.mean(dim=0) - unseen.mean(dim=0)).abs().max() < 0.2
    assert all((centres[a] - centres[b]).norm() > 0.5 for a, b in ((0, 1), (1, 2), (0, 2)))
    assert list(tmp_path.iterdir()) == []


def test_synthetic_data_are_a_function_of_their_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedexp.data.synthetic._CHUNK", 64)

    def train(**changes: Any) -> Arrays:
        return Synthetic(**({"samples": 300, "test_samples": 100} | changes)).load(
            Path("nowhere"), download=False
        )

    first = train()
    assert torch.equal(first.train_x, train().train_x) and torch.equal(first.test_x, train().test_x)
    assert torch.equal(train(samples=999).train_x[:300], first.train_x)
    assert not torch.equal(train(seed=1).train_x, first.train_x)
    assert not torch.equal(first.train_x[:64], first.train_x[64:128]) and not torch.equal(
        first.train_x[:100], first.test_x
    )
    same = train(separation=0.0, samples=60_000).train_x.double().reshape(-1, 10, 8).mean(dim=0)
    # Without separation, every class has the same centre.
    # The standard error is 24 / sqrt(6000) = 0.3
    assert (same - 128).abs().max() < 2


@pytest.mark.parametrize(
    "change", [{"samples": 0}, {"test_samples": 0}, {"features": 0}, {"separation": -1.0}]
)
def test_synthetic_settings_are_checked(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        Synthetic(**change)
    with pytest.raises(ConfigError, match="unknown key 'shape'"):
        build(Dataset, {"_target_": "fedexp.data.synthetic.Synthetic", "shape": [3]}, "dataset")  # type: ignore[type-abstract]


@pytest.mark.skipif(
    not (SHARED / "mnist").is_dir(), reason="the original MNIST files are not beside the checkout"
)
def test_mnist_from_real_files_has_known_statistics(tmp_path: Path) -> None:
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for packed in (SHARED / "mnist").glob("*.gz"):
        (raw / packed.stem).write_bytes(gzip.decompress(packed.read_bytes()))
    arrays = torchvision_set("MNIST").load(tmp_path, download=False)
    assert np.bincount(arrays.train_y).tolist() == [
        5923,
        6742,
        5958,
        6131,
        5842,
        5421,
        5918,
        6265,
        5851,
        5949,
    ]
    assert len(arrays.test_y) == 10_000
    x = arrays.train_x.double() / 255
    assert abs(x.mean() - 0.1307) < 1e-4 and abs(x.std() - 0.3081) < 1e-4


def good() -> Arrays:
    x, y = torch.zeros(6, 1, 2, 2, dtype=torch.uint8), torch.arange(6) % 3
    return Arrays(x, y, x[:3], y[:3])


class Declared(Digits):
    """A data set of three classes with samples of shape 1 x 2 x 2."""


class Floating(Declared):
    pixels = False


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train_x": torch.zeros(6, 1, 2, 3, dtype=torch.uint8)}, "wrong shape"),
        ({"train_x": torch.zeros(6, 1, 2, 2, dtype=torch.int32)}, "wrong dtype"),
        ({"train_y": torch.arange(5) % 3}, "numbers of samples and labels differ"),
        ({"train_y": (torch.arange(6) % 3).int()}, "wrong shape or dtype"),
        ({"test_y": torch.tensor([0, 1, 3])}, "out of range"),
        ({"test_y": torch.tensor([0, -1, 2])}, "out of range"),
        (
            {
                "test_x": torch.zeros(0, 1, 2, 2, dtype=torch.uint8),
                "test_y": torch.zeros(0, dtype=torch.int64),
            },
            "is empty",
        ),
        ({"train_x": torch.zeros(6, 1, 2, 2)}, "pixels = True"),
        ({"train_x": np.zeros((6, 1, 2, 2))}, "torch tensors"),
    ],
)
def test_verify_with_undeclared_content_raises_data_error(
    change: dict[str, Any], message: str
) -> None:
    dataset = Declared(num_classes=3, shape=(1, 2, 2))
    verify(dataset, good())
    with pytest.raises(DataError, match=message) as caught:
        verify(dataset, replace(good(), **change))
    assert ("test" if "test_y" in change else "train") in str(caught.value)


@pytest.mark.parametrize("returned", [None, (1, 2, 3, 4)])
def test_read_without_arrays_raises_data_error(returned: Any) -> None:
    with pytest.raises(DataError, match=r"read\(\) must return Arrays") as caught:
        verify(Declared(num_classes=3, shape=(1, 2, 2)), returned)
    assert type(returned).__name__ in str(caught.value)


def test_owners_as_numpy_array_raise_data_error_that_asks_for_a_tensor() -> None:
    class Owned(Declared):
        has_owners = True

    owned = replace(good(), train_owner=np.zeros(6, np.int64))  # type: ignore[arg-type]
    with pytest.raises(DataError, match="train_owner must be a torch tensor") as caught:
        verify(Owned(num_classes=3, shape=(1, 2, 2)), owned)
    assert "ndarray" in str(caught.value)


def test_floating_point_samples_are_declared_and_finite() -> None:
    dataset, arrays = Floating(num_classes=3, shape=(1, 2, 2)), good()
    floats = replace(arrays, train_x=arrays.train_x / 2, test_x=arrays.test_x / 2)
    verify(dataset, floats)
    for wrong, message in (
        (arrays, "pixels = False"),
        (replace(floats, test_x=floats.test_x / 0), "NaN"),
    ):
        with pytest.raises(DataError, match=message):
            verify(dataset, wrong)


@dataclass(frozen=True, kw_only=True)
class Mine(Dataset):
    """A user's data set with an additional field and floating-point samples."""

    pixels: ClassVar[bool] = False

    points: int
    num_classes: int = 2
    shape: tuple[int, ...] = (3,)

    def read(self, root: Path, download: bool) -> Arrays:
        x, y = torch.linspace(-1, 1, 3 * self.points).reshape(-1, 3), torch.arange(self.points) % 2
        return Arrays(x, y, x, y)


def test_a_data_set_of_ones_own_is_a_class_named_in_yaml(tmp_path: Path) -> None:
    node = {"_target_": f"{Mine.__module__}.Mine", "points": 8, "augment": None}
    dataset = build(Dataset, node, "dataset")  # type: ignore[type-abstract]
    assert dataset.load(tmp_path, download=False).train_x.shape == (8, 3)
    # A user's read() may return something else later. Therefore its arrays are cached
    # only if the class declares that they may be
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match="points"):
        build(Dataset, {"_target_": f"{Mine.__module__}.Mine"}, "dataset")  # type: ignore[type-abstract]
    with pytest.raises(ConfigError, match="augment works on images"):
        build(Dataset, node | {"augment": {"flip": 0.5}}, "dataset")  # type: ignore[type-abstract]


@pytest.mark.parametrize(
    "changes",
    [
        {"num_classes": 1},
        {"shape": ()},
        {"mean": (0.5,)},
        {"mean": (0.5, 0.5), "std": (1.0, 1.0)},
        {"mean": (0.0,), "std": (0.0,)},
    ],
)
def test_dataset_with_impossible_declaration_raises(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"num_classes|shape|mean|std"):
        Digits(**changes)
