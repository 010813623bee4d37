"""Numbers that summarise a table over its rows, and their uncertainty.

References:
    Agarwal et al., Deep Reinforcement Learning at the Edge of the Statistical
    Precipice, NeurIPS 2021: interquartile mean, stratified bootstrap, probability of
    improvement.
    Demsar, Statistical Comparisons of Classifiers over Multiple Data Sets, JMLR 2006:
    average ranks, Friedman's test, critical difference.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.stats import friedmanchisquare, rankdata, studentized_range, t, trim_mean

from fedexp.tables.seeds import ROUNDING, Seeds
from fedexp.tables.verdicts import LEVEL

# Number of resamples of a bootstrap interval.
DRAWS = 2000
_SEED = 0  # the intervals of a table are the same at every call

# The values of a column: for each row, the value of each seed.
Scores = Sequence[Mapping[Seeds, float]]


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % interval.

    Args:
        value: The number.
        low: Lower end of the interval. None if a row has only one run, which says
            nothing about the variation between seeds. None also if two rows have some,
            but not all, seeds in common.
        high: Upper end of the interval, or None.
    """

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class ColumnAggregate:
    """The numbers that summarise a column.

    Args:
        column: Key of the column.
        mean: Mean over rows of the mean over seeds.
        median: Median over rows of the mean over seeds.
        iqm: Interquartile mean: the mean of the values of all rows and seeds without
            the lowest and the highest quarter.
        rank: Mean over rows of the rank of the column's mean. The best has rank 1.
        win_rate: Share of comparisons with another column that this column wins. There
            is one comparison for each row, other column and common seed. A tie counts
            half. None if there is no comparison.
        groups: Numbers of the groups that the column belongs to. Columns of one group
            are not distinguished by `Aggregates.critical_difference`.
    """

    column: str
    mean: Estimate
    median: Estimate
    iqm: Estimate
    rank: float
    win_rate: float | None
    groups: tuple[int, ...] = ()


@dataclass(frozen=True)
class Improvement:
    """The probability that a run of column b is better than a run of column a.

    In each row, every run of a is paired with every run of b, and the share of pairs in
    which b is better is computed. A tie counts half. The probability is the mean of
    these shares over the rows.
    """

    a: str
    b: str
    probability: Estimate


@dataclass(frozen=True)
class Aggregates:
    """Aggregates of all columns over rows.

    Args:
        columns: Aggregates of the columns, by average rank.
        improvements: Probabilities of improvement of the compared pairs of columns.
        num_rows: Number of rows.
        p: p value of Friedman's test, None with fewer than three columns.
        critical_difference: Smallest difference of average ranks that Nemenyi's test
            distinguishes at the level of 5 %. None with fewer than three columns.
    """

    columns: tuple[ColumnAggregate, ...]
    improvements: tuple[Improvement, ...]
    num_rows: int
    p: float | None = None
    critical_difference: float | None = None


def column_pairs(columns: Sequence[str], against: str | None) -> list[tuple[str, str]]:
    """Return the pairs of columns (a, b) that are compared.

    Args:
        columns: Names of the columns.
        against: The column a of all pairs. None: every two columns are a pair.
    """
    if against is None:
        return [*itertools.combinations(columns, 2)]
    return [(against, column) for column in columns if column != against]


def aggregate(
    scores: Mapping[str, Scores], higher_is_better: bool, against: str | None = None
) -> Aggregates:
    """Summarise columns over their rows.

    Args:
        scores: Values of each column. All columns have the same rows, and each row has
            at least one value, which is finite.
        higher_is_better: Whether higher values are better.
        against: Column with which the others are compared. None: every two columns are
            compared.

    Returns:
        The aggregates. All intervals describe the variation between seeds, not between
        other rows. The interval of the mean is that of Student's t distribution, see
        `_mean_over_rows`. The others are those of a stratified bootstrap, which keeps
        the rows and draws the same seeds for all rows that have the same seeds. With
        few seeds, they contain the true value in less than 95 % of the cases.
    """
    keys = [*scores]
    values = {key: [np.array([*row.values()]) for row in scores[key]] for key in keys}
    means = np.array([[row.mean() for row in values[key]] for key in keys])  # (columns, rows)
    sizes = np.array([[np.abs(row).max() for row in values[key]] for key in keys])
    means = _tied(means, sizes)
    sign = -1 if higher_is_better else 1
    ranks = rankdata(sign * means, axis=0).mean(axis=1)

    p = difference = None
    groups: list[tuple[int, ...]] = [()] * len(keys)
    if len(keys) >= 3:
        p = _friedman(means)
        difference = critical_difference(len(keys), means.shape[1])
        groups = rank_groups([float(rank) for rank in ranks], difference, p < LEVEL)

    numbers = np.random.default_rng(_SEED)
    columns = []
    for key, rank, group in zip(keys, ranks, groups, strict=True):
        drawn = _resampled(scores[key], numbers)
        own = np.array([row.mean() for row in values[key]])
        pooled = np.concatenate(values[key])
        median, middle = Estimate(float(np.median(own))), Estimate(float(iqm(pooled)))
        if drawn is not None:
            by_row = np.stack([row.mean(axis=1) for row in drawn], axis=1)
            median = _with_interval(median, np.median(by_row, axis=1))
            middle = _with_interval(middle, iqm(np.concatenate(drawn, axis=1)))
        mean = _mean_over_rows(scores[key])
        wins = _win_rate(key, scores, higher_is_better)
        columns.append(ColumnAggregate(key, mean, median, middle, float(rank), wins, group))

    improvements = [
        Improvement(a, b, _improvement(scores[a], scores[b], higher_is_better, numbers))
        for a, b in column_pairs(keys, against)
    ]
    columns.sort(key=lambda column: column.rank)
    return Aggregates(tuple(columns), tuple(improvements), means.shape[1], p, difference)


def _tied(means: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return means in which equal means of a row tie.

    Means of the same numbers in another order differ in their last digits. Without this
    function, they would have different ranks. The tolerance is relative to the values
    of the two compared cells, so a huge value does not make the other cells equal. It
    is not relative to their means, because a mean near 0 has the rounding errors of
    larger values.

    Args:
        means: Mean of each cell, of shape (columns, rows).
        sizes: Largest absolute value of each cell, of the same shape.
    """
    tied = means.copy()
    for row, size in zip(tied.T, sizes.T, strict=True):
        order = np.argsort(row)
        for before, after in itertools.pairwise(order):
            if row[after] - row[before] <= ROUNDING * max(size[before], size[after]):
                row[after] = row[before]
    return tied


def means_by_seed(rows: Scores) -> dict[Seeds, float]:
    """Return for each seed that all rows have the mean over the rows."""
    return {
        seeds: statistics.fmean(row[seeds] for row in rows)
        for seeds in rows[0]
        if all(seeds in row for row in rows)
    }


def _mean_over_rows(rows: Scores) -> Estimate:
    """Return the mean over rows of the means over runs.

    Runs of different rows are not independent if they have the same seed, because one
    seed usually gives the same split of the data. Rows with the same seeds are
    therefore averaged for each seed. The variance of their mean is ``s^2 / n``, where s
    is the standard deviation of these n averages.

    If all rows have the same seeds, the interval is that of Student's t distribution
    with ``n - 1`` degrees of freedom. Rows without common seeds are independent. Their
    variances are then added, and the degrees of freedom are those of Welch and
    Satterthwaite.
    """
    value = float(np.mean([np.mean([*row.values()]) for row in rows]))
    groups = _groups_by_seeds(rows)
    if groups is None:
        return Estimate(value)

    shares = np.array([len(group) / len(rows) for group in groups])
    means = [
        np.array([*means_by_seed([rows[number] for number in group]).values()]) for group in groups
    ]
    variances = shares**2 * np.array([own.var(ddof=1) / len(own) for own in means])
    total = variances.sum()
    if total == 0:
        return Estimate(value, value, value)
    freedom = total**2 / sum(v**2 / (len(own) - 1) for v, own in zip(variances, means, strict=True))
    half = float(t.ppf(1 - LEVEL / 2, freedom) * math.sqrt(total))
    return Estimate(value, value - half, value + half)


def _groups_by_seeds(rows: Scores) -> list[list[int]] | None:
    """Group the numbers of the rows that have the same seeds.

    Rows of different groups have no common seed.

    Returns:
        The groups. None if the rows allow no interval, see `Estimate`.
    """
    groups: dict[frozenset[Seeds], list[int]] = {}
    for number, row in enumerate(rows):
        groups.setdefault(frozenset(row), []).append(number)
    overlap = sum(map(len, groups)) > len(frozenset().union(*groups))
    return None if overlap or min(map(len, groups)) < 2 else [*groups.values()]


def iqm(values: np.ndarray) -> np.ndarray:
    """Return the interquartile mean along the last axis."""
    return np.asarray(trim_mean(values, 0.25, axis=-1))


def critical_difference(columns: int, rows: int) -> float:
    """Return the critical difference of average ranks of Nemenyi's test at 5 %."""
    quantile = float(studentized_range.ppf(1 - LEVEL, columns, math.inf)) / math.sqrt(2)
    return quantile * math.sqrt(columns * (columns + 1) / (6 * rows))


def rank_groups(
    ranks: Sequence[float], difference: float, is_significant: bool
) -> list[tuple[int, ...]]:
    """Return for each column the groups that it belongs to, numbered from 1.

    A group is a largest set of columns whose average ranks differ by less than
    `difference`. If Friedman's test is not significant, there is one group.
    """
    if not is_significant:
        return [(1,)] * len(ranks)
    order = sorted(range(len(ranks)), key=lambda i: ranks[i])
    found: list[list[int]] = []
    for number, first in enumerate(order):
        members = [i for i in order[number:] if ranks[i] - ranks[first] < difference]
        if not found or members[-1] != found[-1][-1]:
            found.append(members)
    return [
        tuple(number for number, members in enumerate(found, 1) if i in members)
        for i in range(len(ranks))
    ]


def _friedman(means: np.ndarray) -> float:
    """Return the p value of Friedman's test, 1 if all columns are equal in all rows."""
    if (means == means[0]).all():
        return 1.0
    return float(friedmanchisquare(*means).pvalue)


def _win_rate(key: str, scores: Mapping[str, Scores], higher_is_better: bool) -> float | None:
    wins = [
        _wins(mine[seeds] - theirs[seeds], higher_is_better)
        for other in scores
        if other != key
        for mine, theirs in zip(scores[key], scores[other], strict=True)
        for seeds in mine
        if seeds in theirs
    ]
    return sum(wins) / len(wins) if wins else None


def _wins(difference: float, higher_is_better: bool) -> float:
    if difference == 0:
        return 0.5
    return float((difference > 0) == higher_is_better)


def _improvement(
    a: Scores, b: Scores, higher_is_better: bool, numbers: np.random.Generator
) -> Estimate:
    sign = 1 if higher_is_better else -1

    def share(left: np.ndarray, right: np.ndarray) -> np.ndarray:
        difference = sign * (right[..., :, None] - left[..., None, :])
        return np.asarray(((np.sign(difference) + 1) / 2).mean(axis=(-2, -1)))

    own = [[np.array([*row.values()]) for row in rows] for rows in (a, b)]
    found = Estimate(float(np.mean([*map(share, *own)])))

    # Each column draws its own seeds. With common draws, a sample would contain too
    # many pairs of runs with the same seed.
    left, right = _resampled(a, numbers), _resampled(b, numbers)
    if left is None or right is None:
        return found
    return _with_interval(found, np.mean([*map(share, left, right)], axis=0))


def _resampled(rows: Scores, numbers: np.random.Generator) -> list[np.ndarray] | None:
    """Return for each row `DRAWS` samples of its runs, drawn with replacement.

    A sample has the same seeds in all rows that have the same seeds.

    Returns:
        For each row, values of shape (DRAWS, n). None if the rows allow no interval.
    """
    groups = _groups_by_seeds(rows)
    if groups is None:
        return None
    drawn: dict[int, np.ndarray] = {}
    for group in groups:
        seeds = [*rows[group[0]]]
        places = numbers.integers(len(seeds), size=(DRAWS, len(seeds)))
        for number in group:
            drawn[number] = np.array([rows[number][seed] for seed in seeds])[places]
    return [drawn[number] for number in range(len(rows))]


def _with_interval(estimate: Estimate, drawn: np.ndarray) -> Estimate:
    """Return the estimate with its interval by the bootstrap values `drawn`."""
    low, high = np.quantile(drawn, [LEVEL / 2, 1 - LEVEL / 2])
    return replace(estimate, low=float(low), high=float(high))
