"""The cache of decoded arrays is reused and refreshed, and its failure stops no run."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedexp.data import cache, images
from fedexp.data.dataset import Dataset
from fedexp.data.image_folder import ImageFolder


def bugs() -> ImageFolder:
    return ImageFolder(folder="bugs", num_classes=2, shape=(3, 4, 4))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for split in ("train", "test"):
        for value, name in enumerate(("ant", "bee")):
            folder = tmp_path / "bugs" / split / name
            folder.mkdir(parents=True)
            Image.fromarray(np.full((4, 4, 3), 100 * value + 20, np.uint8)).save(folder / "0.png")
    return tmp_path


def entries(root: Path) -> list[Path]:
    return sorted((root / ".fedexp").glob("*.safetensors"))


def forbid_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("an image was decoded")

    monkeypatch.setattr(images, "_decode", refuse)


def test_a_second_load_decodes_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = bugs().load(root, download=False)
    forbid_decoding(monkeypatch)
    second = bugs().load(root, download=False)
    for name in ("train_x", "train_y", "test_x", "test_y"):
        assert torch.equal(getattr(first, name), getattr(second, name))
    assert len(entries(root)) == 1


@pytest.mark.parametrize("change", ["content", "added", "shape"])
def test_cache_after_a_change_of_files_decodes_again(root: Path, change: str) -> None:
    bugs().load(root, download=False)
    file = root / "bugs/train/ant/0.png"
    dataset: Dataset = bugs()
    if change == "content":
        Image.fromarray(np.full((4, 4, 3), 200, np.uint8)).save(file)
        # A coarse clock may give both files the same time
        os.utime(file, ns=(0, file.stat().st_mtime_ns + 1_000_000))
    elif change == "added":
        Image.fromarray(np.full((4, 4, 3), 200, np.uint8)).save(root / "bugs/train/ant/1.png")
    else:
        dataset = ImageFolder(folder="bugs", num_classes=2, shape=(1, 2, 2))
    arrays = dataset.load(root, download=False)
    assert len(entries(root)) == 2
    if change == "content":
        assert int(arrays.train_x[0, 0, 0, 0]) == 200
    elif change == "added":
        assert len(arrays.train_y) == 3
    else:
        assert arrays.train_x.shape == (2, 1, 2, 2)


def test_cache_within_a_sweep_lists_the_files_once(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fingerprint = bugs().load(root, download=False).fingerprint
    looked: list[int] = []
    listing = cache._listing
    monkeypatch.setattr(cache, "_listing", lambda *given: looked.append(1) or listing(*given))
    with cache.sources_stay():
        assert {bugs().content(root) for _ in range(3)} == {fingerprint} and len(looked) == 1
    os.utime(root / "bugs" / "train" / "ant" / "0.png", (1, 1))
    # The files are listed and read again
    assert bugs().content(root) == fingerprint and len(looked) > 1


def test_cache_key_does_not_depend_on_normalisation(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bugs().load(root, download=False)
    forbid_decoding(monkeypatch)
    ImageFolder(folder="bugs", num_classes=2, shape=(3, 4, 4), mean=(0.1,), std=(2.0,)).load(
        root, download=False
    )


def test_a_damaged_entry_is_decoded_again(root: Path) -> None:
    first = bugs().load(root, download=False)
    entry = entries(root)[0]
    entry.write_bytes(entry.read_bytes()[:50])
    assert torch.equal(bugs().load(root, download=False).train_x, first.train_x)
    assert entry.stat().st_size > 50


def test_cache_in_read_only_root_warns_once(root: Path) -> None:
    (root / ".fedexp").write_text("a file where the folder would be")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        arrays = bugs().load(root, download=False)
    assert len(arrays.train_y) == 2
    assert len(caught) == 1 and "cannot be stored" in str(caught[0].message)


SCRIPT = """
import sys
from pathlib import Path
from fedexp.data.image_folder import ImageFolder
from fedexp.data.digits import Digits
from fedexp.data.torchvision_sets import TorchvisionSet
root = Path(sys.argv[1])
ImageFolder(folder="bugs", num_classes=2, shape=(3, 4, 4)).load(root, download=False)
TorchvisionSet(source="MNIST", num_classes=10, shape=(1, 28, 28)).load(root, download=False)
Digits().load(root, download=False)
print([name for name in ("torchvision", "PIL", "sklearn", "matplotlib", "scipy.io") if name in sys.modules])
"""


def test_a_warm_start_imports_no_decoder(root: Path) -> None:
    from fedexp.data.torchvision_sets import TorchvisionSet
    from tests.data.idx import write_mnist

    write_mnist(root)
    bugs().load(root, download=False)
    TorchvisionSet(source="MNIST", num_classes=10, shape=(1, 28, 28)).load(root, download=False)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(root)],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    )
    assert done.stdout.strip() == "[]"
