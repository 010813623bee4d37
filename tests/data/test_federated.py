"""The samples of clients, proxy and validation are disjoint, and limits hold."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from fedexp.config.compose import compose
from fedexp.core.build import build
from fedexp.core.data import POOLED, FederatedData, Partition, Samples
from fedexp.core.errors import ConfigError, DataError
from fedexp.data.augment import Augment
from fedexp.data.cifar10_jpeg import Cifar10Jpeg
from fedexp.data.dataset import Arrays, Dataset
from fedexp.data.digits import Digits
from fedexp.data.domainnet import DomainNet
from fedexp.data.federated import Division, Proxy, _resized, balanced, cut_validation, federate
from fedexp.data.femnist import Femnist
from fedexp.data.partition import Partitioner
from fedexp.data.partitions.dirichlet import Dirichlet
from fedexp.data.partitions.iid import Iid
from fedexp.data.shapes_masks import ShapesMasks
from fedexp.data.synthetic import Synthetic


@dataclass(frozen=True, kw_only=True)
class Numbered(Dataset):
    """A data set whose samples are different numbers, so that tests can identify them.

    The training samples start at 0 and the test samples at 10,000.
    """

    pixels: ClassVar[bool] = False

    num_classes: int = 4
    shape: tuple[int, ...] = (1,)

    def read(self, root: Path, download: bool) -> Arrays:
        def split(n: int, start: int) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.arange(start, start + n, dtype=torch.float32)[:, None], torch.arange(n) % 4

        return Arrays(*split(400, 0), *split(100, 10_000))


def make(
    dataset: Dataset | None = None, partitioner: Partitioner | None = None, **changes: Any
) -> FederatedData:
    arguments: dict[str, Any] = {
        "partitioner": partitioner or Iid(),
        "clients": 5,
        "seed_data": 0,
        "val_fraction": 0.0,
        "held_out": 0,
        "proxy": Proxy(),
        "limit_train": None,
        "limit_test": None,
        "limit_proxy": None,
    }
    place = {
        "root": Path("nowhere"),
        "download": False,
        "device": torch.device("cpu"),
        "dtype": torch.float32,
    }
    place = {key: changes.pop(key, value) for key, value in place.items()}
    return federate(dataset or Numbered(), Division(**(arguments | changes)), **place)


def numbers(samples: Any) -> list[int]:
    return [] if samples is None else samples.x[:, 0].int().tolist()


def test_after_split_continues_the_generator_of_the_partition() -> None:
    """``after_split`` is the state of the generator after the partition was sampled.

    The published code seeds one generator. It samples the split with it, and draws all
    later random numbers from it. Sampling the validation set and the proxy set does not
    advance this generator.
    """
    labels = np.arange(400) % 4
    rng = np.random.RandomState(7)
    partition = Dirichlet(alpha=0.5).split(labels, 4, 5, rng)
    for changes in ({}, {"val_fraction": 0.2}):
        data = make(partitioner=Dirichlet(alpha=0.5), seed_data=7, **changes)
        if not changes:
            assert data.partition.sha256 == partition.sha256
        following = np.random.RandomState(0)
        following.set_state(data.after_split)
        expected = np.random.RandomState(0)
        expected.set_state(rng.get_state())
        assert [following.permutation(9).tolist() for _ in range(3)] == [
            expected.permutation(9).tolist() for _ in range(3)
        ]


def test_without_options_the_pool_is_the_data_set() -> None:
    data = make()
    assert numbers(data.train) == list(range(400)) and numbers(data.test) == list(
        range(10_000, 10_100)
    )
    assert data.val is None and data.proxy is None and data.proxy_source == "none"
    assert np.array_equal(data.labels, data.train.y.numpy())
    assert data.class_counts().sum() == 400
    assert data.partition.sha256 == Iid().split(data.labels, 4, 5, np.random.RandomState(0)).sha256


@pytest.mark.parametrize(
    ("source", "size", "count"), [("train", 40, 40), ("train", 0.25, 100), ("test", 0.1, 10)]
)
def test_a_proxy_is_disjoint_balanced_and_recorded(source: str, size: float, count: int) -> None:
    data = make(proxy=Proxy(source, size, labelled=True))  # type: ignore[arg-type]
    pools = {"train": data.train, "test": data.test}
    assert data.proxy is not None and data.proxy_source == source
    assert len(data.proxy) == count
    assert not set(numbers(data.proxy)) & (set(numbers(data.train)) | set(numbers(data.test)))
    whole = {"train": range(400), "test": range(10_000, 10_100)}
    for name, pool in pools.items():
        expected = set(whole[name]) - (set(numbers(data.proxy)) if name == source else set())
        assert set(numbers(pool)) == expected
    per_class = np.bincount(data.proxy.y.numpy(), minlength=4)
    assert per_class.max() - per_class.min() <= 1
    # The label is the number modulo 4 in both splits, since 10,000 is a multiple of 4
    assert [n % 4 for n in numbers(data.proxy)] == data.proxy.y.tolist()
    assert data.fingerprint == make().fingerprint


def test_an_unlabelled_proxy_knows_no_labels() -> None:
    data = make(proxy=Proxy("test", 10))
    assert data.proxy is not None and set(data.proxy.y.tolist()) == {-1}
    assert (data.test.y >= 0).all() and (data.train.y >= 0).all()


def test_proxy_of_the_test_split_does_not_change_the_partition() -> None:
    assert make(proxy=Proxy("test", 10)).partition.sha256 == make().partition.sha256


def test_proxy_sample_does_not_depend_on_the_scheme() -> None:
    """The proxy is equal under every scheme.

    It does not change the scheme's generator.
    """
    iid = make(proxy=Proxy("train", 40))
    dirichlet = make(partitioner=Dirichlet(alpha=1.0), proxy=Proxy("train", 40))
    assert (
        numbers(iid.proxy)
        == numbers(dirichlet.proxy)
        != numbers(make(proxy=Proxy("train", 40), seed_data=1).proxy)
    )
    assert iid.partition.sha256 == Iid().split(iid.labels, 4, 5, np.random.RandomState(0)).sha256


def test_proxy_of_a_whole_split_is_refused() -> None:
    with pytest.raises(ConfigError, match="all of the test split"):
        make(proxy=Proxy("test", 100))


@pytest.mark.parametrize(
    ("source", "size"), [("train", 0), ("train", 1.5), ("test", -1), ("none", 10)]
)
def test_proxy_values_are_checked(source: Any, size: float) -> None:
    with pytest.raises(ValueError, match=r"proxy\.size"):
        Proxy(source, size)


@dataclass(frozen=True, kw_only=True)
class Others(Numbered):
    """Another data set of 5 classes.

    Its numbers start at 20,000 (training) and 30,000 (test).
    """

    num_classes: int = 5
    mean: tuple[float, ...] = (7.0,)
    std: tuple[float, ...] = (3.0,)

    def read(self, root: Path, download: bool) -> Arrays:
        x, y = torch.arange(20_000, 20_060).float()[:, None], torch.arange(60) % 5
        return Arrays(x, y, x[:20] + 10_000, y[:20])


class EightBits(Others):
    pixels = True

    def read(self, root: Path, download: bool) -> Arrays:
        arrays = super().read(root, download)
        return replace(arrays, train_x=arrays.train_x.byte(), test_x=arrays.test_x.byte())


@pytest.mark.parametrize(
    ("source", "size", "count"), [("train", 40, 40), ("train", 1.0, 60), ("test", 0.5, 10)]
)
def test_proxy_of_another_data_set_leaves_the_clients_samples(
    source: Any, size: float, count: int
) -> None:
    main = Numbered(mean=(100.0,), std=(50.0,))
    data, plain = make(main, proxy=Proxy(source, size, dataset=Others())), make(main)
    assert data.proxy is not None and len(data.proxy) == count
    start = {"train": 20_000, "test": 30_000}[source]
    assert all(start <= number < start + 60 for number in numbers(data.proxy))
    assert numbers(data.train) == numbers(plain.train) and numbers(data.test) == numbers(plain.test)
    assert data.partition.sha256 == plain.partition.sha256 and data.fingerprint == plain.fingerprint
    assert (
        data.proxy_dataset == "others"
        and data.proxy_fingerprint == Others().read(Path(), False).fingerprint
    )
    assert set(data.proxy.y.tolist()) == {-1}
    # The proxy is normalised with the mean and std of the clients' data set, not with
    # those of its data set
    expected = (data.proxy.x - 100.0) / 50.0
    torch.testing.assert_close(data.proxy.inputs(slice(None)), expected, rtol=1e-6, atol=1e-4)


def test_limit_proxy_bounds_proxies_of_every_source() -> None:
    """``limit_proxy`` bounds the size of the proxy set for every source.

    Samples that the proxy set does not contain stay in their split.
    """
    for source, size, other in (("train", 1.0, Others()), ("test", 40, None), ("train", 0.5, None)):
        data = make(proxy=Proxy(source, size, dataset=other), limit_proxy=7)
        assert data.proxy is not None and len(data.proxy) == 7
        assert len(data.train) == (400 if other or source == "test" else 393)
    noise = [
        make(Pictures(), proxy=Proxy("noise", 9), limit_proxy=bound).proxy
        for bound in (None, 20, 7)
    ]
    assert [len(samples or ()) for samples in noise] == [9, 9, 7]


def test_proxy_of_another_data_set_may_take_all_samples() -> None:
    assert len(make(proxy=Proxy("test", 20, dataset=Others())).proxy or ()) == 20
    with pytest.raises(ConfigError, match="more than all of the test split"):
        make(proxy=Proxy("test", 21, dataset=Others()))


def test_result_names_test_data_used_in_training() -> None:
    assert make().test_data_in_training is None
    assert make(proxy=Proxy("train", 40)).test_data_in_training is None
    assert make(proxy=Proxy("test", 40)).test_data_in_training == "proxy.source=test: 40 samples"
    assert make(proxy=Proxy("train", 40, dataset=Others())).test_data_in_training is None
    named = make(proxy=Proxy("test", 9, dataset=Others())).test_data_in_training
    assert named == "proxy.source=test: 9 samples of others"


@pytest.mark.parametrize(("proxy", "words"), [
    (Proxy("train", 9, dataset=Digits()), "do not fit"),
    (Proxy("train", 9, dataset=Numbered(mean=(1.0,), std=(2.0,))), "share its samples"),
    (Proxy("train", 9, True, dataset=Others()), "the proxy.s labels do not fit"),
])  # fmt: skip
def test_a_proxy_that_does_not_fit_is_refused(proxy: Proxy, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        proxy.check(Numbered())
    Proxy("train", 9, dataset=Others()).check(Numbered())
    Proxy("train", 9, True, dataset=Others()).check(Numbered(num_classes=5))
    with pytest.raises(ValueError, match=r"proxy\.dataset"):
        Proxy(dataset=Others())


@pytest.mark.parametrize(("main", "other", "refused"), [
    ("cifar10", "cifar10_jpeg", True), ("cifar10_jpeg", "cifar10", True), ("cifar10_jpeg", "elsewhere", True),
    ("cifar10_jpeg", "cifar100", False), ("cifar100", "cifar10_jpeg", False),
])  # fmt: skip
def test_a_proxy_of_a_copy_is_refused(main: str, other: str, refused: bool) -> None:
    """The lossy copy contains the images of CIFAR-10, including the test images."""
    named = ("cifar10", "cifar100", "cifar10_jpeg")
    sets = {n: build(Dataset, compose([f"dataset={n}"])["dataset"], n) for n in named}  # type: ignore[type-abstract]
    sets["elsewhere"] = Cifar10Jpeg(folder="elsewhere")
    proxy = Proxy("train", 9, dataset=sets[other])
    if not refused:
        proxy.check(sets[main])
        return
    with pytest.raises(ConfigError, match="share its samples"):
        proxy.check(sets[main])


@pytest.mark.parametrize(("main", "other", "refused"), [
    (Synthetic(test_samples=1000), Synthetic(), True), (ShapesMasks(), ShapesMasks(samples=9, shape=(3, 8, 8)), True),
    (Femnist(), Femnist(num_classes=10), True), (Synthetic(), Synthetic(num_classes=5), False),
    (Synthetic(), Synthetic(seed=1, samples=9), False), (ShapesMasks(), ShapesMasks(seed=1), False),
    (DomainNet(domains=("real", "sketch")), DomainNet(domains=("clipart", "real")), True),
    (DomainNet(domains=("real", "sketch")), DomainNet(domains=("clipart", "painting")), False),
])  # fmt: skip
def test_a_proxy_of_the_same_samples_in_another_number_is_refused(
    main: Dataset, other: Dataset, refused: bool
) -> None:
    """With the same seed, a smaller data set is the beginning of a larger one."""
    proxy = Proxy("train", 9, dataset=other, resize=True)
    if not refused:
        proxy.check(main)
        return
    with pytest.raises(ConfigError, match="share its samples"):
        proxy.check(main)


def test_eight_bit_and_floating_point_samples_do_not_mix() -> None:
    with pytest.raises(DataError, match="cannot be normalised in the same way"):
        make(proxy=Proxy("train", 9, dataset=EightBits()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("mean", "std"), [((0.3054,), (0.3757,)), ((), ())])
def test_an_image_becomes_an_input_as_a_clients_sample_does(
    mean: Any, std: Any, dtype: torch.dtype
) -> None:
    """The inputs are bit-identical.

    The values of an 8-bit image are divided by 255. Those of a floating-point sample
    are not changed.
    """
    data = make(Digits(mean=mean, std=std, augment=Augment()), dtype=dtype)
    domain = data.train.domain
    assert (domain.mean, domain.std, domain.pixel_range, domain.augment) == (
        mean,
        std,
        (0.0, 1.0),
        Augment(),
    )
    assert torch.equal(
        domain.normalise(data.train.x.to(dtype) / 255), data.train.inputs(slice(None))
    )
    every = Samples(
        torch.arange(256, dtype=torch.uint8).reshape(-1, 1, 1, 1),
        torch.zeros(256),
        mean,
        std,
        dtype=dtype,
    )
    assert torch.equal(domain.normalise(every.x.to(dtype) / 255), every.inputs(slice(None)))
    numbered = make(Numbered(mean=mean, std=std), dtype=dtype)
    assert numbered.train.domain.pixel_range is None
    assert torch.equal(
        numbered.train.domain.normalise(numbered.train.x), numbered.train.inputs(slice(None))
    )


def test_colours_are_normalised_channel_by_channel_and_gradients_flow() -> None:
    mean, std = (0.5, 0.25, 0.0), (0.5, 0.25, 2.0)
    x = torch.randint(
        256, (6, 3, 4, 4), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
    )
    samples = Samples(x, torch.zeros(6), mean, std, dtype=torch.float64)
    images = (x.double() / 255).requires_grad_()
    inputs = samples.domain.normalise(images)
    assert torch.equal(inputs, samples.inputs(slice(None)))
    (gradient,) = torch.autograd.grad(inputs.sum(), images)
    torch.testing.assert_close(gradient[0, :, 0, 0], 1 / torch.tensor(std, dtype=torch.float64))


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.9])
def test_the_validation_share_is_cut_from_every_client(fraction: float) -> None:
    whole, data = (
        make(partitioner=Dirichlet(alpha=0.5)),
        make(partitioner=Dirichlet(alpha=0.5), val_fraction=fraction),
    )
    assert data.val is not None
    kept, held = set(data.partition.indices.tolist()), set(numbers(data.val))
    assert not kept & held and kept | held == set(range(400))
    assert set(data.partition.of(POOLED).tolist()) == kept
    for client in range(5):
        before, after = whole.partition.of(client), data.partition.of(client)
        # The remaining samples keep their order
        assert [i for i in before if i in kept] == after.tolist()
        assert len(before) - len(after) == min(int(fraction * len(before) + 0.5), len(before) - 1)
    assert data.class_counts().sum() == len(kept)
    assert data.partition.info["val_samples"] == len(held)


def test_held_out_samples_are_balanced_and_belong_to_no_client() -> None:
    data, again = (
        make(held_out=50),
        make(partitioner=Dirichlet(alpha=0.5), held_out=50, proxy=Proxy("test", 10)),
    )
    assert data.val is not None and len(data.val) == 50 and data.val.augment is None
    assert sorted(numbers(data.train) + numbers(data.val)) == list(range(400))
    assert sorted(np.bincount(data.val.y.numpy()).tolist()) == [12, 12, 13, 13]
    assert data.partition.sha256 == Iid().split(data.labels, 4, 5, np.random.RandomState(0)).sha256
    assert numbers(data.val) == numbers(again.val) != numbers(make(held_out=50, seed_data=1).val)
    with pytest.raises(ConfigError, match="all training samples would be held out"):
        make(held_out=400)


def test_validation_samples_are_taken_once() -> None:
    with pytest.raises(
        ConfigError, match="held out before the split, and also from the clients' own"
    ):
        make(held_out=50, val_fraction=0.1)


def test_clients_keep_one_sample_and_empty_ones_stay_empty() -> None:
    partition = Partition.from_lists(
        [np.array([0]), np.array([], dtype=np.int64), np.array([1, 2])]
    )
    assert cut_validation(partition, 0.99, 0).sizes.tolist() == [1, 0, 1]


def test_a_clients_cut_does_not_depend_on_the_other_clients() -> None:
    mine, others = np.arange(50, 90), np.concatenate([np.arange(50), np.arange(90, 100)])
    together = cut_validation(Partition.from_lists([mine, others]), 0.25, 3)
    split = cut_validation(Partition.from_lists([others[:30], mine, others[30:]]), 0.25, 3)
    assert together.of(0).tolist() == split.of(1).tolist()


def test_a_validation_share_of_nothing_is_refused() -> None:
    with pytest.raises(DataError, match="validation share is empty"):
        make(val_fraction=1e-4)


def test_limits_are_balanced_and_deterministic() -> None:
    data = make(limit_train=42, limit_test=8)
    assert sorted(np.bincount(data.labels).tolist()) == [10, 10, 11, 11]
    assert len(data.test) == 8
    assert numbers(make(limit_train=42, seed_data=5).train) == numbers(data.train)
    assert numbers(make(limit_train=10_000).train) == list(range(400))


def test_balanced_takes_what_a_short_class_cannot_give_from_the_others() -> None:
    labels = np.array([0] * 50 + [1] * 3 + [2] * 20)
    chosen = balanced(labels, 30, 4)
    assert np.bincount(labels[chosen]).tolist() == [14, 3, 13]
    assert len(set(chosen.tolist())) == 30 and np.array_equal(chosen, np.sort(chosen))
    assert len(balanced(labels, 73, 4)) == 73


def test_augmentation_is_for_training_only() -> None:
    data = make(Digits(augment=Augment()), val_fraction=0.2, proxy=Proxy("train", 50))
    assert data.train.augment == Augment()
    assert data.val is not None and data.proxy is not None
    assert data.val.augment is None and data.test.augment is None and data.proxy.augment is None


def test_digits_are_normalised_to_their_own_statistics() -> None:
    data = make(Digits(mean=(0.3054,), std=(0.3757,)))
    x = data.train.inputs(slice(None)).double()
    assert abs(x.mean()) < 1e-3 and abs(x.std() - 1) < 1e-3
    assert data.train.x.dtype == torch.uint8


def test_the_fingerprint_sees_every_array() -> None:
    arrays = Numbered().read(Path(), False)
    names = ("train_x", "train_y", "test_x", "test_y")
    prints = {arrays.fingerprint}
    for name in names:
        parts = {other: getattr(arrays, other).clone() for other in names}
        parts[name][0] += 1
        prints.add(Arrays(**parts).fingerprint)
    assert len(prints) == 5


@dataclass(frozen=True, kw_only=True)
class Pictures(Dataset):
    """8-bit images with one grey value each, 40 for training and 10 for testing."""

    pixels: ClassVar[bool] = True

    num_classes: int = 4
    shape: tuple[int, ...] = (1, 8, 8)

    def read(self, root: Path, download: bool) -> Arrays:
        x = (5 * torch.arange(50)).byte()[:, None, None, None].expand(-1, *self.shape).contiguous()
        return Arrays(x[:40], torch.arange(40) % 4, x[40:], torch.arange(10) % 4)


class ServersPictures(Pictures):
    """The server's images."""


def test_noise_is_the_servers_own_and_takes_nothing_away() -> None:
    data, again = (make(Pictures(), proxy=Proxy("noise", 500)) for _ in range(2))
    assert data.proxy is not None and again.proxy is not None
    assert data.proxy.x.shape == (500, 1, 8, 8) and data.proxy.x.dtype == torch.uint8
    assert torch.equal(data.proxy.x, again.proxy.x) and set(data.proxy.y.tolist()) == {-1}
    assert len(data.train) == 40 and len(data.test) == 10 and data.test_data_in_training is None
    values = data.proxy.x.double()
    # The uniform distribution has mean 127.5 and variance (256^2 - 1) / 12
    assert values.min() == 0 and values.max() == 255
    assert abs(values.mean() - 127.5) < 2 and abs(values.var() / 5461.25 - 1) < 0.05
    other = make(Pictures(), proxy=Proxy("noise", 500), seed_data=1).proxy
    assert other is not None and not torch.equal(other.x, data.proxy.x)
    with pytest.raises(ConfigError, match="8-bit images"):
        Proxy("noise", 5).check(Numbered())


def test_images_of_another_size_are_brought_to_the_clients() -> None:
    small = ServersPictures(shape=(1, 4, 4))
    proxy = Proxy("train", 1.0, dataset=small, resize=True)
    proxy.check(Pictures())
    data = make(Pictures(), proxy=proxy)
    assert (
        data.proxy is not None
        and data.proxy.x.shape == (40, 1, 8, 8)
        and data.proxy.x.dtype == torch.uint8
    )
    # A resized image of one grey value keeps this value
    assert torch.equal(data.proxy.x[:, 0, 3, 5], (5 * torch.arange(40)).byte())
    step = torch.tensor([[0, 255]], dtype=torch.uint8).expand(1, 1, 2, 2)
    # The interpolation is linear between the centres of the pixels
    assert _resized(step, (4, 4))[0, 0, 0].tolist() == [0, 64, 191, 255]
    for proxy in (
        Proxy("train", 1.0, dataset=small),
        Proxy("train", 9, dataset=ServersPictures(shape=(3, 4, 4)), resize=True),
    ):
        with pytest.raises(ConfigError, match="do not fit"):
            proxy.check(Pictures())

    # Vectors have no height and width
    with pytest.raises(ConfigError, match="do not fit"):
        Proxy("train", 9, dataset=Synthetic(features=4), resize=True).check(Synthetic(features=8))
