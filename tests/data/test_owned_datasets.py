"""Data sets whose samples have owners (writers, domains), and the natural split.

The tests use small files of the real formats.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedexp.config.compose import compose
from fedexp.core.errors import ConfigError, DataError
from fedexp.data.cifar10_jpeg import Cifar10Jpeg
from fedexp.data.dataset import Dataset
from fedexp.data.domainnet import DomainNet
from fedexp.data.femnist import Femnist
from fedexp.data.partitions.natural import Natural
from fedexp.running.experiment import Experiment, load_data
from tests.data.idx import pixels
from tests.data.test_datasets import save_image

WRITERS = {"f0002_01": [3, 61, 0], "f0001_41": [9, 9, 10, 35], "f0003_00": [40], "f0000_14": [1, 2]}


def write_leaf(root: Path) -> dict[str, np.ndarray]:
    """Write two training files and one test file in LEAF's format.

    Returns:
        The (n, 784) bytes of each writer and split.
    """
    written = {}
    for split, groups in (
        ("train", [list(WRITERS)[:2], list(WRITERS)[2:]]),
        ("test", [list(WRITERS)]),
    ):
        folder = root / "femnist" / split
        folder.mkdir(parents=True)
        for number, users in enumerate(groups):
            data = {}
            for user in users:
                labels = WRITERS[user] if split == "train" else WRITERS[user][:1]
                image = pixels(len(labels), 784, seed=sum(map(ord, user + split)))
                written[f"{split}/{user}"] = image
                data[user] = {"x": (image / 255).tolist(), "y": labels}
            content = {
                "users": users,
                "num_samples": [len(data[u]["y"]) for u in users],
                "user_data": data,
            }
            (folder / f"all_data_{number}_niid_0_keep_0_{split}_9.json").write_text(
                json.dumps(content)
            )
    return written


def test_femnist_reads_leafs_files(tmp_path: Path) -> None:
    written = write_leaf(tmp_path)
    arrays = Femnist().load(tmp_path, download=False)
    assert arrays.train_owner is not None
    for writer, user in enumerate(sorted(WRITERS)):
        mine = arrays.train_owner == writer
        assert arrays.train_y[mine].tolist() == WRITERS[user]
        assert np.array_equal(
            arrays.train_x[mine].reshape(-1, 784).numpy(), written[f"train/{user}"]
        )
    assert sorted(arrays.test_y.tolist()) == sorted(labels[0] for labels in WRITERS.values())
    # The arrays are loaded from the cache, including the owners
    again = Femnist().load(tmp_path, download=False)
    assert (
        any((tmp_path / ".fedexp").glob("femnist-*.safetensors"))
        and again.fingerprint == arrays.fingerprint
    )
    assert replace(arrays, train_owner=None).fingerprint != arrays.fingerprint


def test_femnist_with_ten_classes_keeps_only_digits(tmp_path: Path) -> None:
    write_leaf(tmp_path)
    arrays = Femnist(num_classes=10).load(tmp_path, download=False)
    assert sorted(arrays.train_y.tolist()) == [0, 1, 2, 3, 9, 9] and arrays.train_owner is not None
    # Writer f0003_00 wrote no digit
    assert sorted(arrays.train_owner.tolist()) == [0, 0, 1, 1, 2, 2]
    with pytest.raises(ValueError, match=r"62 \(all characters\) or 10"):
        Femnist(num_classes=36)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("num_samples", [3, 5], "num_samples 5"),
        ("users", ["nobody", "f0001_41"], "nobody"),
        ("user_data", [], "TypeError"),
    ],
)
def test_femnist_with_foreign_file_raises_with_its_path(
    tmp_path: Path, key: str, value: object, said: str
) -> None:
    write_leaf(tmp_path)
    file = sorted((tmp_path / "femnist/train").glob("*.json"))[0]
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(DataError, match="not one of LEAF's femnist") as caught:
        Femnist().load(tmp_path, download=False)
    assert file.name in str(caught.value) and said in str(caught.value)
    file.write_text("{")
    with pytest.raises(DataError, match="not one of LEAF's femnist"):
        Femnist().load(tmp_path, download=False)


def write_domains(root: Path) -> None:
    """Write image folders and split lists of two domains with two classes each."""
    home = root / "domainnet"
    for d, domain in enumerate(("clipart", "sketch")):
        for split, count in (("train", 3), ("test", 1)):
            lines = []
            for label, kind in enumerate(("The_Eiffel_Tower", "airplane")):
                for i in range(count):
                    path = f"{domain}/{kind}/{domain}_{label}_{split}_{i}.jpg"
                    save_image(
                        home / path,
                        np.full((30 + d, 20, 3), 100 * d + 50 * label + 10 * i, np.uint8),
                    )
                    lines.append(f"{path} {label}")
            (home / f"{domain}_{split}.txt").write_text("\n".join(lines) + "\n")


TWO = {"num_classes": 2, "shape": (3, 8, 8), "domains": ("clipart", "sketch")}


def test_domainnet_reads_the_publishers_lists(tmp_path: Path) -> None:
    write_domains(tmp_path)
    arrays = DomainNet(**TWO).load(tmp_path, download=False)  # type: ignore[arg-type]
    assert arrays.train_x.shape == (12, 3, 8, 8) and arrays.train_owner is not None
    assert (
        arrays.train_y.tolist() == [0, 0, 0, 1, 1, 1] * 2 and arrays.test_y.tolist() == [0, 1] * 2
    )
    assert arrays.train_owner.tolist() == [0] * 6 + [1] * 6
    expected = 100 * arrays.train_owner + 50 * arrays.train_y + 10 * torch.tensor([0, 1, 2] * 4)
    assert (arrays.train_x.float().mean((1, 2, 3)) - expected).abs().max() <= 2
    first = DomainNet(**TWO, per_class=1).load(tmp_path, download=False)  # type: ignore[arg-type]
    assert torch.equal(first.train_x, arrays.train_x[[0, 3, 6, 9]])


def test_domainnet_with_faulty_list_raises_data_error(tmp_path: Path) -> None:
    write_domains(tmp_path)
    with pytest.raises(DataError, match="number of classes") as caught:
        DomainNet(**TWO | {"num_classes": 3}).load(tmp_path, download=False)  # type: ignore[arg-type]
    assert "dataset.num_classes=2" in str(caught.value)
    lists = tmp_path / "domainnet/sketch_train.txt"
    for line in ("sketch/airplane/a.jpg 0", "sketch/airplane/a.jpg", "a.jpg 1"):
        lists.write_text(line)
        with pytest.raises(DataError, match="does not name an image with its class") as caught:
            DomainNet(**TWO).load(tmp_path, download=False)  # type: ignore[arg-type]
        assert "sketch_train.txt, line 1" in str(caught.value)


@pytest.mark.parametrize(
    ("dataset", "parts"),
    [
        (Femnist(), ("femnist/train", "LEAF", "preprocess.sh")),
        (DomainNet(), ("domainnet/clipart_train.txt", "M3SDA")),
        (Cifar10Jpeg(folder="cifar10-jpeg"), ("cifar10-jpeg/train", "airplane")),
    ],
    ids=lambda value: value.name if isinstance(value, Dataset) else "",
)
def test_owned_data_set_without_files_raises_with_instructions(
    tmp_path: Path, dataset: Dataset, parts: tuple[str, ...]
) -> None:
    with pytest.raises(DataError) as caught:
        dataset.check(tmp_path, download=True)
    assert all(part in str(caught.value) for part in (*parts, "FEDEXP_DATA"))


def test_the_jpeg_copy_of_cifar10_is_not_faithful(tmp_path: Path) -> None:
    names = [
        "airplane",
        "automobile",
        "bird",
        "cat",
        "deer",
        "dog",
        "frog",
        "horse",
        "ship",
        "truck",
    ]
    for split in ("train", "test"):
        for label, name in enumerate(names):
            save_image(
                tmp_path / "cifar10-jpeg" / split / name / "0000.jpg",
                np.full((32, 32, 3), 20 * label, np.uint8),
            )
    config = compose(
        [
            "dataset=cifar10_jpeg",
            f"data_root={tmp_path}",
            "partition=iid",
            "clients=2",
            "model=cnn_maecho",
        ]
    )
    experiment = Experiment.of(config)
    assert not experiment.dataset.faithful and Femnist.faithful
    data = load_data(config)
    # CIFAR-10 sorts its classes alphabetically
    assert data.test.y.tolist() == list(range(10))
    assert (data.test.x.float().mean((1, 2, 3)) - 20 * data.test.y).abs().max() <= 2


OWNER = np.repeat(np.arange(8), [5, 1, 4, 9, 2, 7, 3, 6])


def groups(scheme: Natural, clients: int, seed: int = 0) -> list[list[int]]:
    """Return the owners of each client, and check that it has all of their samples."""
    partition = scheme.split(OWNER, 8, clients, np.random.RandomState(seed))
    held = [np.unique(OWNER[partition.of(c)]) for c in range(clients)]
    for client, owners in enumerate(held):
        assert np.array_equal(np.sort(partition.of(client)), np.flatnonzero(np.isin(OWNER, owners)))
    return [owners.tolist() for owners in held]


def test_natural_assigns_whole_owners_in_even_groups() -> None:
    dealt = groups(Natural(), 3)
    assert sorted(owner for group in dealt for owner in group) == list(range(8))
    assert sorted(map(len, dealt)) == [2, 3, 3]
    assert groups(Natural(), 3) == dealt != groups(Natural(), 3, seed=1)
    assert groups(Natural(), 8, seed=5) == [[i] for i in range(8)]


def test_natural_with_owners_per_client_leaves_out_the_rest() -> None:
    drawn = groups(Natural(owners_per_client=2), 3)
    assert [len(group) for group in drawn] == [2, 2, 2] and len(
        {o for group in drawn for o in group}
    ) == 6
    partition = Natural(owners_per_client=1).split(OWNER, 8, 4, np.random.RandomState(0))
    assert partition.info["unused_owners"] == 4
    assert partition.info["dropped_samples"] == len(OWNER) - len(partition.indices) > 0


def test_natural_with_owners_per_client_that_uses_all_owners_is_random() -> None:
    dealt = [groups(Natural(owners_per_client=2), 4, seed) for seed in range(3)]
    for held in dealt:
        assert sorted(owner for group in held for owner in group) == list(range(8))
    assert dealt[0] != dealt[1] != dealt[2] != dealt[0]


def test_natural_divides_owners_only_with_split_owners() -> None:
    with pytest.raises(DataError, match="not enough owners") as caught:
        Natural().split(OWNER, 8, 16, np.random.RandomState(0))
    assert "split_owners=true" in str(caught.value)
    domains = np.repeat(np.arange(6), 10)
    partition = Natural(split_owners=True).split(domains, 6, 12, np.random.RandomState(0))
    assert partition.sizes.tolist() == [5] * 12
    assert [np.unique(domains[partition.of(c)]).tolist() for c in range(12)] == [
        [c // 2] for c in range(12)
    ]
    uneven = Natural(split_owners=True, min_size=3).split(domains, 6, 15, np.random.RandomState(0))
    assert uneven.sizes.tolist() == [4, 3, 3] * 3 + [5, 5] * 3


def test_a_natural_split_from_files_to_clients(tmp_path: Path) -> None:
    write_leaf(tmp_path)
    config = compose(["dataset=femnist", "partition=natural", "clients=2", f"data_root={tmp_path}"])
    data = load_data(config)
    writers = [{name for name in WRITERS if set(WRITERS[name]) <= held} for held in _labels(data)]
    assert all(len(names) == 2 for names in writers) and writers[0] | writers[1] == set(WRITERS)


def _labels(data: object) -> list[set[int]]:
    return [
        set(data.labels[data.partition.of(c)].tolist()) for c in range(data.partition.num_clients)
    ]  # type: ignore[attr-defined]


def test_data_without_owners_are_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigError, match="does not name the owners") as caught:
        Experiment.of(compose(["partition=natural"]))
    assert "femnist" in str(caught.value)
