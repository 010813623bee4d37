"""Partition files.

A loaded partition is bit-identical to the stored one. The file is checked on loading
and contains no pickle.
"""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fedexp.config.compose import compose
from fedexp.core.data import Partition
from fedexp.core.errors import ConfigError, DataError
from fedexp.data.federated import cut_validation
from fedexp.data.partition import (
    CutPartition,
    contains_partition,
    load_partition,
    save_partition,
)
from fedexp.data.partitions.dirichlet import Dirichlet
from fedexp.data.partitions.file import File
from fedexp.running.experiment import Experiment, load_data

LABELS = np.repeat(np.arange(10), 50)


def drawn(seed: int = 0) -> Partition:
    return Dirichlet().split(LABELS, 10, 5, np.random.RandomState(seed))


def replay(
    path: Path, clients: int = 5, labels: np.ndarray = LABELS, **fields: object
) -> Partition:
    return File(path=str(path), **fields).split(labels, 10, clients, np.random.RandomState(99))  # type: ignore[arg-type]


def test_partition_file_saved_and_loaded_is_equal(tmp_path: Path) -> None:
    partition = drawn()
    save_partition(partition, tmp_path / "deep" / "p.safetensors")
    loaded = load_partition(tmp_path / "deep" / "p.safetensors")
    assert np.array_equal(loaded.indices, partition.indices) and np.array_equal(
        loaded.offsets, partition.offsets
    )
    assert loaded.info == partition.info and loaded.sha256 == partition.sha256
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["p.safetensors"]


def test_file_scheme_returns_the_stored_partition(tmp_path: Path) -> None:
    partition = drawn()
    save_partition(partition, tmp_path / "p")
    again = replay(tmp_path / "p", sha256=partition.sha256)
    assert again.sha256 == partition.sha256 and again.info["scheme"] == "dirichlet"


def test_partition_file_with_validation_cut_keeps_it(tmp_path: Path) -> None:
    cut = cut_validation(drawn(), 0.2, 0)
    save_partition(cut, tmp_path / "p")
    again = replay(tmp_path / "p", val_fraction=0.2)
    assert isinstance(again, CutPartition) and np.array_equal(again.held, cut.held)
    with pytest.raises(DataError, match="validation share of another size"):
        replay(tmp_path / "p", val_fraction=0.1)


def test_partition_file_with_dropped_clients_keeps_their_number(tmp_path: Path) -> None:
    scheme = Dirichlet(alpha=0.05, gated=False, on_small="drop", min_size=20)
    partition = scheme.split(LABELS, 10, 8, np.random.RandomState(0))
    assert partition.num_clients < 8
    save_partition(partition, tmp_path / "p")
    assert replay(tmp_path / "p", clients=8).sha256 == partition.sha256


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sha256": "0" * 64}, "another partition"),
        ({"labels": LABELS[:-1]}, "another pool"),
        ({"clients": 6}, "another number of clients"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(tmp_path: Path, arguments: dict, message: str) -> None:
    save_partition(drawn(), tmp_path / "p")
    with pytest.raises(DataError, match=message):
        replay(tmp_path / "p", **arguments)


def test_partition_file_damaged_raises_data_error(tmp_path: Path) -> None:
    path = tmp_path / "p"
    save_partition(drawn(), path)
    content = bytearray(path.read_bytes())
    # This changes the last array
    content[-8] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match="not a partition file"):
        load_partition(path)
    path.write_bytes(content[:100])
    with pytest.raises(DataError, match="not a partition file"):
        load_partition(path)
    save_file({"weights": np.zeros(3)}, path)
    assert load_file(path)["weights"].shape == (3,)
    with pytest.raises(DataError, match="not a partition file"):
        load_partition(path)


@pytest.mark.parametrize("path", ["", "absent.safetensors"])
def test_file_scheme_without_file_raises_before_loading(path: str) -> None:
    with pytest.raises(ConfigError, match="partition file"):
        File(path=path).check(5, 10)


def test_file_of_another_pool_of_equal_size_is_refused(tmp_path: Path) -> None:
    """The seed of the held-out samples changes the pool, but not its size."""
    held = ["eval.held_out=100", "clients=2"]
    written = load_data(compose([*held, "seed_data=1"]))
    save_partition(written.partition, tmp_path / "p", written.pool_sha256)
    read = [*held, "partition=file", f"partition.path={tmp_path / 'p'}"]
    again = load_data(compose([*read, "seed_data=1"]))
    assert again.partition.sha256 == written.partition.sha256
    assert again.pool_sha256 == written.pool_sha256
    with pytest.raises(DataError, match="other training samples") as caught:
        load_data(compose([*read, "seed_data=2"]))
    assert "seed_data" in str(caught.value)
    assert contains_partition(tmp_path / "p", written.partition, written.pool_sha256)
    assert not contains_partition(tmp_path / "p", written.partition, "0" * 64)

    # A file of an earlier version has no hash
    save_partition(written.partition, tmp_path / "p")
    assert contains_partition(tmp_path / "p", written.partition, written.pool_sha256)
    load_data(compose([*read, "seed_data=2"]))


def test_file_of_a_limited_pool_is_read_with_the_same_limit(tmp_path: Path) -> None:
    limits = ["limit.train=300", "eval.held_out=50", "clients=2"]
    written = load_data(compose(limits))
    save_partition(written.partition, tmp_path / "p", written.pool_sha256)
    read = ["partition=file", f"partition.path={tmp_path / 'p'}"]
    assert load_data(compose([*limits, *read])).pool_sha256 == written.pool_sha256
    assert not Experiment.of(compose([*limits, *read])).ignored_limits
    other = compose([*limits, *read, "limit.train=200"])
    assert [*Experiment.of(other).ignored_limits] == ["limit.train"]
    with pytest.raises(DataError, match=r"limit\.train"):
        load_data(other)


def test_limit_above_the_size_of_the_data_is_not_named_as_ignored(tmp_path: Path) -> None:
    held = ["eval.held_out=50", "clients=2"]
    written = load_data(compose(held))
    save_partition(written.partition, tmp_path / "p", written.pool_sha256)
    above = compose(
        [*held, "partition=file", f"partition.path={tmp_path / 'p'}", "limit.train=9999"]
    )
    assert not Experiment.of(above).ignored_limits
    assert load_data(above).pool_sha256 == written.pool_sha256
