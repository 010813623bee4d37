"""Tests of partition schemes: published partitions, and rules for all schemes."""

import time
from pathlib import Path

import numpy as np
import pytest

from fedexp.config.compose import compose
from fedexp.core.data import Partition
from fedexp.core.errors import ConfigError, DataError
from fedexp.data.federated import cut_validation
from fedexp.data.partition import (
    Partitioner,
    apply_small_policy,
    contains_partition,
    save_partition,
    validate,
)
from fedexp.data.partitions.dirichlet import Dirichlet
from fedexp.data.partitions.dirichlet_blocks import DirichletBlocks
from fedexp.data.partitions.dirichlet_per_client import DirichletPerClient
from fedexp.data.partitions.dirichlet_refilled import DirichletRefilled
from fedexp.data.partitions.iid import Iid
from fedexp.data.partitions.label_groups import LabelGroups
from fedexp.data.partitions.pathological import Pathological
from fedexp.data.partitions.pathological_refilled import PathologicalRefilled
from fedexp.data.partitions.quantity import Quantity
from fedexp.data.partitions.shards import Shards
from fedexp.running.experiment import load_data

FIFTY_THOUSAND = np.repeat(np.arange(10), 5000)


def rng(seed: int = 0) -> np.random.RandomState:
    return np.random.RandomState(seed)


def class_counts(partition: Partition, labels: np.ndarray, num_classes: int) -> np.ndarray:
    parts = [
        np.bincount(labels[partition.of(c)], minlength=num_classes)
        for c in range(partition.num_clients)
    ]
    return np.stack(parts)


def uneven_labels(n: int = 3000, num_classes: int = 10, seed: int = 3) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return generator.choice(
        num_classes, size=n, p=generator.dirichlet(np.full(num_classes, 5.0))
    ).astype(np.int64)


def test_golden_counts_of_the_gated_dirichlet_split() -> None:
    """The class counts are equal to those in the README of DENSE."""
    golden = [
        [156, 709, 301, 2629, 20, 651, 915, 113, 180, 2133],
        [1771, 2695, 1251, 1407, 665, 314, 1419, 3469, 0, 0],
        [236, 15, 1715, 76, 1304, 34, 1773, 75, 3289, 2360],
        [2809, 575, 157, 853, 2555, 2557, 203, 1213, 0, 0],
        [28, 1006, 1576, 35, 456, 1444, 690, 130, 1531, 507],
    ]
    partition = Dirichlet(alpha=0.5).split(FIFTY_THOUSAND, 10, 5, rng(1))
    assert class_counts(partition, FIFTY_THOUSAND, 10).tolist() == golden


@pytest.mark.parametrize(
    ("alpha", "sizes"),
    [(0.3, [12181, 11389, 8272, 9624, 8534]), (0.1, [11079, 11628, 11830, 12660, 2803])],
)
def test_golden_sizes_at_other_concentrations(alpha: float, sizes: list[int]) -> None:
    assert Dirichlet(alpha=alpha).split(FIFTY_THOUSAND, 10, 5, rng(1)).sizes.tolist() == sizes


def transcribed(
    labels: np.ndarray, num_classes: int, clients: int, alpha: float, seed: int, gated: bool
) -> list[list[int]]:
    """Compute the split literally from its specification, with lists."""
    random = np.random.RandomState(seed)
    limit = len(labels) / clients
    while True:
        parts: list[list[int]] = [[] for _ in range(clients)]
        for k in range(num_classes):
            idx = np.where(labels == k)[0]
            random.shuffle(idx)
            p = random.dirichlet([alpha] * clients)
            if gated:
                p = np.array([0.0 if len(parts[j]) >= limit else p[j] for j in range(clients)])
                p = p / p.sum()
            cuts = [int(c) for c in np.floor(np.cumsum(p) * len(idx))][:-1]
            for j, piece in enumerate(np.split(idx, cuts)):
                parts[j] += piece.tolist()
        if not gated or min(map(len, parts)) >= 10:
            break
    for part in parts:
        random.shuffle(part)
    return parts


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("clients", "alpha", "seed"), [(4, 0.5, 0), (10, 0.3, 5), (12, 0.1, 2)])
def test_dirichlet_replays_the_published_call_order(
    clients: int, alpha: float, seed: int, gated: bool
) -> None:
    labels = uneven_labels()
    partition = Dirichlet(alpha=alpha, gated=gated, on_small="error" if gated else "allow").split(
        labels, 10, clients, rng(seed)
    )
    expected = transcribed(labels, 10, clients, alpha, seed, gated)
    assert [partition.of(c).tolist() for c in range(clients)] == expected


def test_dirichlet_after_rejected_attempts_equals_published_code() -> None:
    """The accepted attempt equals that of the published code after rejected attempts.

    The last attempt equals that of the transcribed code.
    """
    labels = np.repeat(np.arange(10), 200)
    partition = Dirichlet(alpha=0.1).split(labels, 10, 16, rng(4))
    assert partition.info["draws"] > 1
    assert [partition.of(c).tolist() for c in range(16)] == transcribed(
        labels, 10, 16, 0.1, 4, gated=True
    )


def test_iid_replays_one_permutation_cut_in_parts() -> None:
    partition = Iid().split(uneven_labels(1003), 10, 7, rng(2))
    expected = np.array_split(np.random.RandomState(2).permutation(1003), 7)
    assert [partition.of(c).tolist() for c in range(7)] == [part.tolist() for part in expected]


SCHEMES: list[Partitioner] = [
    Iid(),
    Dirichlet(alpha=0.5),
    Dirichlet(alpha=0.1, gated=False, on_small="allow"),
    DirichletBlocks(alpha=0.3),
    DirichletPerClient(alpha=0.3),
    DirichletPerClient(alpha=0.001),
    Quantity(alpha=0.5),
    Shards(shards=3),
    Pathological(classes_per_client=3),
    LabelGroups(groups=tuple((i % 10, (i + 3) % 10) for i in range(12))),
]


@pytest.mark.parametrize(
    "scheme", SCHEMES, ids=lambda scheme: f"{scheme.name}-{SCHEMES.index(scheme)}"
)
@pytest.mark.parametrize("seed", [0, 1])
def test_schemes_are_disjoint_complete_and_deterministic(scheme: Partitioner, seed: int) -> None:
    labels = uneven_labels()
    partition = scheme.split(labels, 10, 12, rng(seed))
    assert partition.num_clients == 12
    assert np.array_equal(np.sort(partition.indices), np.arange(len(labels)))
    assert partition.indices.dtype == partition.offsets.dtype == np.int64
    assert scheme.split(labels, 10, 12, rng(seed)).sha256 == partition.sha256
    if not isinstance(scheme, LabelGroups) or seed:
        assert scheme.split(labels, 10, 12, rng(seed + 7)).sha256 != partition.sha256


def test_the_smaller_alpha_the_further_are_clients_from_the_pool() -> None:
    """The mean distance of the clients from the pool decreases with alpha.

    The distance is the total variation distance of the class shares. The mean is over
    all clients and 20 seeds. Every client has at least ten samples.
    """
    labels, distances = uneven_labels(), []
    pool = np.bincount(labels) / len(labels)
    for alpha in (0.1, 0.5, 5.0):
        splits = [Dirichlet(alpha=alpha).split(labels, 10, 8, rng(seed)) for seed in range(20)]
        assert all(split.sizes.min() >= 10 for split in splits)
        counts = np.concatenate([class_counts(split, labels, 10) for split in splits])
        distances.append((np.abs(counts / counts.sum(1, keepdims=True) - pool).sum(1) / 2).mean())
    assert distances[0] > distances[1] > distances[2] > 0


def transcribed_quantity(n: int, clients: int, alpha: float, seed: int) -> list[list[int]]:
    """Compute the split literally from its specification."""
    random = np.random.RandomState(seed)
    order = random.permutation(n).tolist()
    sizes = [0]
    while min(sizes) < 10:
        shares = random.dirichlet([alpha] * clients)
        ends = [int(sum(shares[: k + 1]) * n) for k in range(clients - 1)] + [n]
        sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    return [order[end - size : end] for size, end in zip(sizes, ends, strict=True)]


@pytest.mark.parametrize(("clients", "alpha", "seed"), [(5, 0.5, 0), (10, 0.5, 3), (20, 2.0, 1)])
def test_quantity_skew_is_computed_as_specified(clients: int, alpha: float, seed: int) -> None:
    labels = uneven_labels()
    partition = Quantity(alpha=alpha).split(labels, 10, clients, rng(seed))
    expected = transcribed_quantity(len(labels), clients, alpha, seed)
    assert [partition.of(c).tolist() for c in range(clients)] == expected


def test_sizes_of_quantity_skew_have_the_moments_of_a_dirichlet_distribution() -> None:
    """The variance of a share is (N - 1) / (N^2 (N alpha + 1))."""
    labels, clients, alpha = uneven_labels(100_000), 8, 3.0
    scheme = Quantity(alpha=alpha, min_size=1, on_small="allow")
    sizes = [scheme.split(labels, 10, clients, rng(seed)).sizes for seed in range(400)]
    shares = np.array(sizes) / len(labels)
    assert shares.mean(axis=0) == pytest.approx(np.full(clients, 1 / clients), abs=0.02)
    variance = (clients - 1) / (clients**2 * (clients * alpha + 1))
    assert shares.var() == pytest.approx(variance, rel=0.1)


def test_clients_of_quantity_skew_have_the_class_shares_of_the_pool() -> None:
    labels = uneven_labels(60_000)
    partition = Quantity(alpha=1.0).split(labels, 10, 10, rng(2))
    counts, pool = class_counts(partition, labels, 10), np.bincount(labels) / len(labels)
    expected = partition.sizes[:, None] * pool
    # The bound is 6 standard deviations of a binomial distribution.
    assert (abs(counts - expected) < 6 * np.sqrt(expected * (1 - pool)) + 1).all()
    assert partition.sizes.max() > 5 * partition.sizes.min()


@pytest.mark.parametrize("alpha", [0.01, 1e-9])
def test_quantity_skew_without_a_draw_that_fits_is_refused(alpha: float) -> None:
    scheme = Quantity(alpha=alpha, max_draws=20)
    with pytest.raises(DataError, match=r"gave every client min_size=10 samples \(attempts: 20\)"):
        scheme.split(uneven_labels(), 10, 12, rng())
    with pytest.raises(DataError, match="50 samples cannot give 12 clients min_size=10 each"):
        Quantity(alpha=5.0).split(uneven_labels(50), 10, 12, rng())


def test_quantity_skew_applies_the_policy_to_its_first_draw() -> None:
    labels, random = uneven_labels(), rng()
    random.permutation(len(labels))
    shares = random.dirichlet([0.01] * 12)
    scheme = Quantity(alpha=0.01, max_draws=20, on_small="allow")
    assert scheme.split(labels, 10, 12, rng()).sizes / 3000 == pytest.approx(shares, abs=1 / 3000)
    repaired = Quantity(alpha=0.01, max_draws=20, on_small="repair").split(labels, 10, 12, rng())
    assert repaired.sizes.min() == 10
    with pytest.raises(DataError, match="gave every client"):  # no draw has sizes
        Quantity(alpha=1e-9, max_draws=5, on_small="allow").split(labels, 10, 12, rng())


@pytest.mark.parametrize(
    "scheme", [Iid(), DirichletPerClient(alpha=0.2), Shards(shards=2)], ids=lambda s: s.name
)
def test_balanced_schemes_have_equal_sizes(scheme: Partitioner) -> None:
    sizes = scheme.split(uneven_labels(3001), 10, 8, rng()).sizes
    # Two clients have two shards each, and shard sizes differ by at most one sample
    spread = 2 if isinstance(scheme, Shards) else 1
    assert sizes.max() - sizes.min() <= spread


def test_per_client_priors_follow_alpha() -> None:
    """With a large alpha, every client has the class shares of the pool.

    With a tiny alpha, a client has hardly more than one class, as long as the samples
    of the class last.
    """
    labels = np.repeat(np.arange(10), 1000)
    even = class_counts(DirichletPerClient(alpha=1e6).split(labels, 10, 10, rng()), labels, 10)
    # The bound is 6 standard deviations of a binomial(1000, 0.1) distribution
    assert abs(even - 100).max() < 60
    skewed = class_counts(DirichletPerClient(alpha=1e-3).split(labels, 10, 100, rng()), labels, 10)
    # A client has 100 samples. If a popular class is used up, other classes replace it
    assert skewed.max(axis=1).mean() > 80


def test_per_client_hand_out_is_vectorised() -> None:
    """The scheme serves many clients in a step. 50,000 clients need fewer steps."""
    labels = np.random.RandomState(0).randint(0, 10, 500_000)
    partition = DirichletPerClient(alpha=0.3).split(labels, 10, 50_000, rng())
    assert set(partition.sizes) == {10}
    assert partition.info["passes"] <= 11


def test_shards_are_runs_of_the_sorted_pool() -> None:
    labels = np.tile(np.arange(10), 100)
    partition = Shards(shards=2).split(labels, 10, 10, rng())
    by_label = np.argsort(labels, kind="stable")
    place = np.empty(1000, dtype=np.int64)
    place[by_label] = np.arange(1000)
    for c in range(10):
        shards = {int(p) // 50 for p in place[partition.of(c)]}
        assert len(shards) == 2 and len(partition.of(c)) == 100


@pytest.mark.parametrize(("clients", "n"), [(12, 3), (10, 1), (6, 4), (25, 10)])
def test_pathological_clients_hold_n_classes_split_equally(clients: int, n: int) -> None:
    labels = np.repeat(np.arange(10), 300)
    counts = class_counts(
        Pathological(classes_per_client=n).split(labels, 10, clients, rng()), labels, 10
    )
    assert ((counts > 0).sum(axis=1) == n).all()
    assert all(counts[i, i % 10] > 0 for i in range(clients))
    for column in counts.T:
        holders = column[column > 0]
        assert holders.max() - holders.min() <= 1


REFILLED: list[Partitioner] = [
    DirichletRefilled(alpha=0.3),
    PathologicalRefilled(classes_per_client=3),
]


@pytest.mark.parametrize("scheme", REFILLED, ids=lambda scheme: scheme.name)
def test_refilled_clients_are_of_one_size_and_a_class_starts_again_when_all_its_images_are_gone(
    scheme: Partitioner,
) -> None:
    labels = uneven_labels(3007)
    partition = scheme.split(labels, 10, 30, rng())
    # Each client has floor(n / N) samples, and the first also has the remainder
    assert partition.sizes.tolist() == [107, *[100] * 29]
    times = np.bincount(partition.indices, minlength=len(labels))
    # No image is used a second time before all images of its class were used once
    for k in range(10):
        assert np.ptp(times[labels == k]) <= 1
    assert partition.info["repeated_samples"] == (times - 1).clip(0).sum() > 0
    assert partition.info["dropped_samples"] == (times == 0).sum() > 0
    assert scheme.split(labels, 10, 30, rng()).sha256 == partition.sha256
    assert scheme.split(labels, 10, 30, rng(1)).sha256 != partition.sha256


def test_refilled_pathological_clients_hold_n_classes_with_equal_probabilities() -> None:
    labels = np.repeat(np.arange(10), 300)
    counts = class_counts(
        PathologicalRefilled(classes_per_client=3).split(labels, 10, 10, rng()), labels, 10
    )
    assert ((counts > 0).sum(axis=1) == 3).all()
    # The bound is 6 standard deviations of a binomial(300, 1/3) distribution
    assert abs(counts[counts > 0] - 100).max() < 50
    # Each client samples its classes independently
    assert len({tuple(row > 0) for row in counts}) > 5


def test_refilled_priors_follow_alpha() -> None:
    labels = np.repeat(np.arange(10), 1000)
    even = class_counts(DirichletRefilled(alpha=1e6).split(labels, 10, 10, rng()), labels, 10)
    assert abs(even - 100).max() < 60
    skewed = class_counts(DirichletRefilled(alpha=1e-3).split(labels, 10, 100, rng()), labels, 10)
    # No class is ever used up
    assert (skewed.max(axis=1) == 100).mean() > 0.9


def test_refilled_schemes_ignore_classes_without_samples() -> None:
    labels = np.repeat([0, 2, 5], 40)
    for scheme in (DirichletRefilled(alpha=0.5), PathologicalRefilled(classes_per_client=3)):
        assert scheme.split(labels, 10, 6, rng()).sizes.tolist() == [20] * 6
    with pytest.raises(DataError, match="samples of 3 classes"):
        PathologicalRefilled(classes_per_client=4).split(labels, 10, 6, rng())


def test_validation_cut_of_repeated_samples_is_refused() -> None:
    drawn = DirichletRefilled(alpha=0.3).split(uneven_labels(), 10, 10, rng())
    with pytest.raises(DataError, match=r"eval\.held_out"):
        cut_validation(drawn, 0.1, 0)


@pytest.mark.parametrize(("clients", "alpha"), [(20, 0.1), (34, 0.3), (7, 0.1)])
def test_dirichlet_blocks_give_each_client_half_of_an_equal_share(
    clients: int, alpha: float
) -> None:
    labels = uneven_labels(6000)
    sizes = DirichletBlocks(alpha=alpha).split(labels, 10, clients, rng()).sizes
    for first in range(0, clients, 10):
        own = sizes[first : first + 10]
        assert abs(own.sum() - 6000 * len(own) / clients) <= 1
        assert own.min() >= own.sum() // (2 * len(own))
    # The sizes are not balanced either
    assert np.ptp(sizes) > 100


def test_dirichlet_blocks_beyond_max_draws_raises_with_keys_that_exist() -> None:
    labels = np.repeat(np.arange(10), 100)
    with pytest.raises(DataError, match="a block has a client") as caught:
        DirichletBlocks(alpha=0.01, max_draws=3).split(labels, 10, 10, rng())
    text = str(caught.value)
    assert "attempts: 3" in text and "partition.block" in text
    assert "on_small" not in text and "min_size" not in text and "gated" not in text


def test_label_groups_clients_hold_their_classes() -> None:
    labels = np.repeat(np.arange(4), 30)
    groups = ((0, 1), (1, 2), (3,), (1,))
    counts = class_counts(LabelGroups(groups=groups).split(labels, 4, 4, rng()), labels, 4)
    assert counts.tolist() == [[30, 10, 0, 0], [0, 10, 30, 0], [0, 0, 0, 30], [0, 10, 0, 0]]


def test_zero_proportions_are_drawn_again_instead_of_nan() -> None:
    """Proportions are sampled again if they are zero for all clients that are not full.

    This happens at alpha 0.001. The published code divides 0/0 in this case.
    """
    labels = np.repeat(np.arange(10), 40)
    for seed in range(20):
        partition = Dirichlet(alpha=0.001, min_size=1, on_small="allow", max_draws=20).split(
            labels, 10, 4, rng(seed)
        )
        assert partition.sizes.sum() == 400


def test_dirichlet_with_zero_proportions_raises_data_error() -> None:
    with pytest.raises(DataError, match="all zero"):
        Dirichlet(alpha=1e-9, on_small="allow").split(np.repeat(np.arange(10), 40), 10, 4, rng())


def test_dirichlet_beyond_max_draws_raises_with_keys_to_change() -> None:
    labels = np.repeat(np.arange(10), 100)
    with pytest.raises(DataError) as caught:
        Dirichlet(alpha=0.01, max_draws=7).split(labels, 10, 50, rng())
    text = str(caught.value)
    for part in (
        "attempts: 7",
        "min_size=10",
        "on_small=repair|drop|allow",
        "alpha",
        "smallest client between 0 and",
    ):
        assert part in text


def test_dirichlet_beyond_max_seconds_raises() -> None:
    scheme = Dirichlet(alpha=0.01, max_seconds=1e-9)
    with pytest.raises(DataError, match="attempts: 1"):
        scheme.split(np.repeat(np.arange(10), 100), 10, 50, rng())


def test_dirichlet_time_limit_counts_only_own_computing() -> None:
    """The time limit does not count time in which this process does not compute."""
    attempts = Dirichlet(max_seconds=0.2).attempts()
    next(attempts)
    time.sleep(0.3)
    assert next(attempts) == 2


@pytest.mark.parametrize("scheme", [Dirichlet, Quantity])
def test_beyond_its_bound_a_scheme_applies_the_policy_to_its_first_attempt(
    scheme: type[Dirichlet] | type[Quantity], tmp_path: Path
) -> None:
    """Nothing depends on when the time limit was reached, not even later draws."""
    labels = np.repeat(np.arange(10), 100)
    found = []
    for max_draws in (1, 5):
        generator = rng()
        bounded = scheme(alpha=0.01, min_size=10, max_draws=max_draws, on_small="repair")
        partition = bounded.split(labels, 10, 50, generator)
        assert partition.sizes.min() >= 10
        assert partition.info["draws"] == max_draws
        found.append((partition, generator.randint(10**6)))
    (first, next_number), (second, same_number) = found
    assert first.sha256 == second.sha256 and next_number == same_number
    save_partition(first, tmp_path / "partition.safetensors")
    assert contains_partition(tmp_path / "partition.safetensors", second)


def test_too_few_samples_are_refused_at_once() -> None:
    with pytest.raises(DataError, match="cannot give 50 clients min_size=10"):
        Dirichlet().split(np.repeat(np.arange(10), 10), 10, 50, rng())


LISTS = [np.arange(0, 50), np.arange(50, 52), np.arange(52, 52), np.arange(52, 100)]


def test_policy_error_names_the_clients() -> None:
    with pytest.raises(DataError, match="2 of 4 clients") as caught:
        apply_small_policy(Partition.from_lists(LISTS), 5, "error")
    assert "client 1 has 2, client 2 has 0" in str(caught.value)


def test_policy_allow_keeps_everything() -> None:
    partition = Partition.from_lists(LISTS)
    assert apply_small_policy(partition, 5, "allow") is partition


def test_policy_drop_renumbers_and_records() -> None:
    dropped = validate(apply_small_policy(Partition.from_lists(LISTS), 5, "drop"), 100)
    assert dropped.sizes.tolist() == [50, 48]
    assert np.array_equal(dropped.of(1), LISTS[3])
    assert dropped.info == {"dropped_clients": 2, "dropped_samples": 2}


def test_policy_drop_without_remaining_client_raises() -> None:
    with pytest.raises(DataError, match="leaves none"):
        apply_small_policy(Partition.from_lists(LISTS), 60, "drop")


def test_policy_repair_takes_the_last_samples_of_the_largest() -> None:
    repaired = validate(apply_small_policy(Partition.from_lists(LISTS), 5, "repair"), 100)
    assert repaired.sizes.min() == 5
    assert repaired.sizes.sum() == 100 and repaired.info["moved_samples"] == 8
    assert np.array_equal(repaired.of(0), LISTS[0][: len(repaired.of(0))])
    assert np.array_equal(repaired.of(3), LISTS[3][: len(repaired.of(3))])
    # Each sample is moved from the client that has the most samples
    assert abs(len(repaired.of(0)) - len(repaired.of(3))) <= 1
    assert set(LISTS[1]) <= set(repaired.of(1))


def test_policy_repair_needs_enough_samples() -> None:
    with pytest.raises(DataError, match="too few"):
        apply_small_policy(Partition.from_lists(LISTS), 26, "repair")


def test_schemes_without_a_minimum_refuse_empty_clients() -> None:
    with pytest.raises(DataError, match="fewer than min_size=1"):
        Iid().split(np.zeros(5, np.int64), 2, 8, rng())
    assert (
        Iid(on_small="allow").split(np.zeros(5, np.int64), 2, 8, rng()).sizes.tolist()
        == [1] * 5 + [0] * 3
    )


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ([[0, 1], [1, 2, 3]], "assigned twice"),
        ([[0, 1], [3]], "missing"),
        ([[0, 1], [2, 3, 4]], "outside the pool"),
        ([[0, -1], [2, 3]], "outside the pool"),
    ],
)
def test_validate_refuses(lists: list[list[int]], message: str) -> None:
    with pytest.raises(DataError, match=message):
        validate(Partition.from_lists([np.array(part) for part in lists]), 4)


@pytest.mark.parametrize("on_small", ["drop", "repair"])
def test_a_partition_with_repeated_samples_is_not_changed(on_small: str) -> None:
    shared = Partition.from_lists([np.arange(9), np.arange(7, 10)], repeated_samples=2)
    with pytest.raises(DataError, match="gives samples to several clients cannot be changed"):
        apply_small_policy(shared, 5, on_small)


def test_validate_counts_repeated_samples() -> None:
    lists = [np.array([0, 1]), np.array([1, 2, 1])]
    validate(Partition.from_lists(lists, repeated_samples=2, dropped_samples=1), 4)
    for repeated, dropped in ((1, 1), (3, 1), (2, 0)):
        with pytest.raises(DataError, match=r"assigned twice|missing"):
            validate(
                Partition.from_lists(lists, repeated_samples=repeated, dropped_samples=dropped), 4
            )


def test_a_users_scheme_is_validated() -> None:
    class Twice(Iid):
        def sample(
            self, labels: np.ndarray, num_classes: int, clients: int, rng: np.random.RandomState
        ) -> Partition:
            return Partition.from_lists([np.arange(len(labels))] * clients)

    with pytest.raises(DataError, match="assigned twice"):
        Twice().split(np.zeros(10, np.int64), 2, 2, rng())


@pytest.mark.parametrize(
    ("scheme", "clients", "message"),
    [
        (Pathological(classes_per_client=11), 10, "more classes than the data set has"),
        (Pathological(classes_per_client=2), 4, "cannot hold 10 classes"),
        (PathologicalRefilled(classes_per_client=11), 10, "more classes than the data set has"),
        (LabelGroups(groups=((0, 1),)), 2, "one group of classes per client"),
        (LabelGroups(), 2, "one group of classes per client"),
        (LabelGroups(groups=((0, 10),)), 1, "class 10 does not exist"),
        (Iid(), 0, "at least one client"),
    ],
)
def test_impossible_settings_are_refused_before_data(
    scheme: Partitioner, clients: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        scheme.check(clients, 10)


@pytest.mark.parametrize("scheme", [*REFILLED, DirichletBlocks()], ids=lambda scheme: scheme.name)
def test_more_clients_than_samples_are_refused(scheme: Partitioner) -> None:
    with pytest.raises(DataError, match="lower clients"):
        scheme.split(np.arange(10), 10, 11, rng())


def test_label_groups_must_cover_the_pool() -> None:
    with pytest.raises(DataError, match="without a client"):
        LabelGroups(groups=((0,), (1,))).split(np.array([0, 1, 2]), 3, 2, rng())


@pytest.mark.parametrize(
    "make",
    [
        lambda: Dirichlet(alpha=0.0),
        lambda: DirichletPerClient(alpha=-1.0),
        lambda: Shards(shards=0),
        lambda: Pathological(classes_per_client=0),
        lambda: LabelGroups(groups=((0, 0),)),
        lambda: DirichletBlocks(block=0),
        lambda: DirichletBlocks(alpha=0),
        lambda: DirichletRefilled(alpha=0),
        lambda: PathologicalRefilled(classes_per_client=0),
        lambda: Iid(val_fraction=1.0),
        lambda: Iid(min_size=0),
        lambda: Dirichlet(max_draws=0),
    ],
)
def test_values_out_of_range_are_refused(make: object) -> None:
    with pytest.raises(ValueError, match=r"must|twice"):
        make()  # type: ignore[operator]


@pytest.mark.parametrize("policy", ["drop", "repair"])
def test_equal_sizes_need_no_repair(policy: str) -> None:
    with pytest.raises(ValueError, match="nothing to move"):
        DirichletRefilled(on_small=policy)  # type: ignore[arg-type]


def test_label_groups_of_ma_echo_fig4_are_two_clients() -> None:
    """The groups {0, 1, 3, 4, 7} and {2, 5, 6, 8, 9} are given on a command line."""
    overrides = [
        "partition=label_groups",
        "partition.groups=[[0,1,3,4,7],[2,5,6,8,9]]",
        "clients=2",
    ]
    counts = load_data(compose(overrides)).class_counts()
    assert [np.flatnonzero(row).tolist() for row in counts] == [[0, 1, 3, 4, 7], [2, 5, 6, 8, 9]]
    assert counts.sum() == 1437
