"""Beta-Bernoulli matching written as loops over units and pairs.

All sums are computed anew from their members every time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linear_sum_assignment


@dataclass
class Constants:
    sigma: float = 0.9
    sigma0: float = 3.0
    gamma: float = 1.0
    b: int = 1
    caps: bool = False
    penalty: str = "paper"
    lam: float = 0.0


def matched(models, q, mu0, k: Constants, orders, start=None):
    """Return the units of each model and the posterior means.

    The arguments are those of `fedexp.matching.beta_bernoulli.match`.
    """
    N, p0 = len(models), np.full(len(mu0), 1 / k.sigma0)
    a0 = mu0 * p0
    groups: list[list[tuple[int, int]]] = []  # members (model, unit) of each global unit

    def sums(members):
        G, S = a0.copy(), p0.copy()
        for s, j in members:
            G, S = G + q[s] * models[s][j], S + q[s]
        return G, S, len(members)

    def place(s):
        J, K = len(models[s]), len(groups)
        T = min(J, max(700 - K, 1)) if k.caps else J
        table = np.zeros((J, K + T))
        for j in range(J):
            v = q[s] * models[s][j]
            for i in range(K + T):
                G, S, c = sums(groups[i]) if i < K else (a0, p0, 0)
                value = ((v + G) ** 2 / (q[s] + S) - G**2 / S).sum()
                if i < K:
                    counted = min(c, 10) if k.caps else c
                    value += k.b * math.log(counted / (N - counted))
                else:
                    value += 2 * math.log(k.gamma / N) - 2 * math.log(i - K + 1)
                table[j, i] = value - k.lam * PENALTIES[k.penalty](
                    v, models[s][j], q[s], G, S, c, a0
                )
        for j, i in zip(*linear_sum_assignment(-table), strict=True):
            if i < K:
                groups[i].append((s, j))
            else:
                groups.append([(s, j)])

    for unit in sorted({int(u) for units in start or () for u in units}):
        groups.append(
            [(s, j) for s, units in enumerate(start) for j, u in enumerate(units) if u == unit]
        )
    for s in sorted(range(N), key=lambda s: (-len(models[s]), s)) if start is None else []:
        if groups:
            place(s)
        else:
            groups = [[(s, j)] for j in range(len(models[s]))]
    for order in orders if N > 1 else []:
        for s in order:
            groups = [left for g in groups if (left := [m for m in g if m[0] != s])]
            place(s)
    units = [np.zeros(len(model), dtype=int) for model in models]
    for i, members in enumerate(groups):
        for s, j in members:
            units[s][j] = i
    return units, np.array([G / S for G, S, _ in map(sums, groups)])


def _paper(v, w, q, G, S, c, a0):
    return 0.5 * (q / S - np.log(1 + q / S) + q**2 * (w - G / S) ** 2 / (S + q)).sum()


def _code2020(v, w, q, G, S, c, a0):
    if c == 0:
        return (q * (v - a0) ** 2 / (S + q) ** 2).sum()
    after = (min(c, 10) + 1) * (q * (v - a0 + G - c * a0) ** 2 / (q + S) ** 2).sum()
    return after - min(c, 10) * (q * (G - c * a0) ** 2 / S**2).sum()


def _code2022(v, w, q, G, S, c, a0):
    return _code2020(v, w, q, G, S, c, a0) + (q**2 * (w - G / S) ** 2 / (S + q) ** 3).sum()


PENALTIES = {"paper": _paper, "code2020": _code2020, "code2022": _code2022}


def fused(models, shares, frequency: bool, k: Constants, orders):
    """Return [(weight, bias)] of the fused network.

    Models are [(weight, bias or None)] as numpy arrays in float64.
    """
    N, H = len(models), len(models[0]) - 1
    biased = models[0][0][1] is not None
    result: list[list] = [[None, None] for _ in range(H + 1)]
    next_units, width = [np.arange(shares.shape[1])] * N, shares.shape[1]
    for step, h in enumerate(reversed(range(H))):
        rows, q = [], []
        for s in range(N):
            receivers = models[s][h + 1][0]
            own = []
            for j in range(receivers.shape[1]):
                out = np.zeros(width)
                for r in range(receivers.shape[0]):
                    out[next_units[s][r]] = receivers[r, j]
                head = list(models[s][h][0][j]) if h == 0 else []
                own.append(np.array([*head, *([models[s][h][1][j]] if biased else []), *out]))
            rows.append(np.array(own))
            precision = np.full(rows[-1].shape[1], 1 / k.sigma)
            if h == H - 1 and frequency:
                precision[-width:] = shares[s] / k.sigma
            q.append(precision)
        mu0 = np.zeros(rows[0].shape[1])
        if biased:
            mu0[rows[0].shape[1] - width - 1] = 0.1
        next_units, theta = matched(rows, q, mu0, k, orders[step])
        result[h + 1][0] = theta[:, -width:].T
        if biased:
            result[h][1] = theta[:, -width - 1]
        if h == 0:
            result[0][0] = theta[:, : models[0][0][0].shape[1]]
        width = len(theta)
    if biased:
        total = sum(shares[s] * models[s][H][1] for s in range(N)) / k.sigma
        result[H][1] = (0.1 / k.sigma0 + total) / (1 / k.sigma0 + sum(shares) / k.sigma)
    return result
