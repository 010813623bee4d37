"""FedCDA: the mean of one recent model of every client, so chosen that they lie close together.

Reference: Wang et al., FedCDA: Federated Learning with Cross-round Divergence-aware Aggregation, ICLR 2024, Algorithm 1.
The server keeps the last K models of every client with their loss F (the mean over the last local epoch). Each round the
participants choose theirs anew, all others keep their choice, by the least (Eq. 6, wbar is the mean of the chosen)

    J = (1/M) sum_n [F_n(w_n) + (L/2) ||w_n - wbar||^2],

and w^{t+1} = wbar, with equal weights over all M clients that have a model. Warm-up: so many rounds of the base method, that
is of this aggregator's `weights` with the configured trainer and server optimizer; models are kept meanwhile. Later the
trainer and its server half go on as before, and the server optimizer's weights give way to wbar.

J does not change if all models move alike, so that all is computed from one Gram matrix of the candidates less w^t, in
float64: ||w_n||^2 is 1e3 to 1e4, what is compared 1e-2 to 10. Norms and products are those of the trained parameters;
BatchNorm's statistics are averaged over the same models, counters take their maximum.

Up: y_i and F_i. Down: w. Server state: references to K models a client, on disk beyond ``state.memory_gb``, and the sum of the
chosen ones in float64. In memory in a round: the participants' candidates (m K models) and two such sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedexp.core import trees
from fedexp.core.aggregator import State
from fedexp.core.build import require
from fedexp.core.env import Env, Extent
from fedexp.core.errors import ConfigError, overflow
from fedexp.core.jobs import ClientResult
from fedexp.core.seeds import numpy_generator
from fedexp.core.task import Metrics
from fedexp.core.trees import Tree
from fedexp.core.weights import Weights
from fedexp.methods.fedavg import Mean

BLOCK_BYTES = 1 << 22  # of candidates side by side in float64, while products are summed
MOST_COMBINATIONS = 1 << 24  # of one group: a table of 128 MiB

Entry = dict[str, Any]  # model: Kept; loss: F; norm: ||w||^2; round: when it was trained, -1 is w_0
Caches = Mapping[
    str, Mapping[str, Any]
]  # by client: entries, the newest first, and the index of the chosen one


@dataclass(frozen=True)
class FedCDA(Mean):
    """Args:
    weights: p_i of the warm-up's mean; the mean of the chosen models is uniform.
    K: models a client.
    B: groups that choose one after the other, those before them and the clients at rest being fixed, those after them
        left out (Eq. 8); a round with fewer participants has as many groups as these.
    L: smoothness constant.
    strategy: ``newest``; ``random`` (participants draw); ``approximate`` (B groups); ``optimal`` (all participants at once,
        Eq. 7).
    warm_up: rounds, or a fraction of all rounds.
    loss_term: whether F counts.
    unseen: clients that never took part are ``left_out`` of the mean, or stand in it with the ``initial`` model.
    """

    K: int = 3
    B: int = 3
    L: float = 1.0
    strategy: Literal["newest", "random", "approximate", "optimal"] = "approximate"
    warm_up: int | float = 0.25
    loss_term: bool = True
    unseen: Literal["left_out", "initial"] = "left_out"

    def __post_init__(self) -> None:
        require(
            self.K >= 1, f"K counts the models that are kept of a client, at least 1, got {self.K}"
        )
        require(self.B >= 1, f"B counts groups, at least 1, got {self.B}")
        require(self.L >= 0, f"L must not be negative, got {self.L}")
        require(
            self.L > 0 or self.loss_term or not self._searches,
            f"with L = 0 and loss_term = false strategy '{self.strategy}' has nothing to choose by",
        )
        require(self.warm_up >= 0, f"warm_up must not be negative, got {self.warm_up}")
        require(
            isinstance(self.warm_up, int) or self.warm_up <= 1,
            f"warm_up is a count of rounds (an integer) or a fraction of them (at most 1.0), got {self.warm_up}",
        )

    @property
    def _searches(self) -> bool:
        return self.strategy in ("approximate", "optimal")

    def warm_up_rounds(self, rounds: int) -> int:
        """Rounds of the base method, of `rounds` in all."""
        return self.warm_up if isinstance(self.warm_up, int) else round(self.warm_up * rounds)

    def check_extent(self, extent: Extent) -> None:
        if self.warm_up_rounds(extent.rounds) > extent.rounds:
            raise ConfigError(
                "the warm-up is longer than the run",
                where="aggregator.warm_up",
                expected=f"at most rounds={extent.rounds}, or a fraction such as 0.25",
                got=self.warm_up,
            )
        if not self._searches:
            return
        m, groups = extent.sampling.m, self._groups(extent)
        fixed = extent.sampling.kind != "bernoulli"  # else m is a mean
        if (
            self.strategy == "approximate" and fixed and 1 < m < groups
        ):  # one client is one group, whatever B
            raise ConfigError(
                "there are more groups than participants",
                where="aggregator.B",
                expected=f"at most {m:g}, the clients of a round",
                got=self.B,
                do="lower aggregator.B, or raise clients_per_round",
            )
        most = int(m) if fixed else extent.clients
        size = -(-most // groups)
        if self.K**size > MOST_COMBINATIONS:
            raise ConfigError(
                f"a group of {size} clients with {self.K} models each has {self.K}^{size} combinations",
                where="aggregator.B" if self.strategy == "approximate" else "aggregator.strategy",
                expected=f"at most {MOST_COMBINATIONS:,} combinations a group",
                do="set aggregator.strategy=approximate with more groups (aggregator.B), or a smaller aggregator.K"
                + ("" if fixed else "; sampling=fixed bounds the clients of a round"),
            )

    def _groups(self, world: Env | Extent) -> int:
        return 1 if self.strategy == "optimal" else world.server_steps(self.B)

    def init(self, env: Env) -> State:
        base = super().init(env)
        start: Weights = base["weights"]
        caches: dict[str, Any] = {}
        if self.unseen == "initial":
            entry = {
                "model": env.store(start),
                "loss": 0.0,
                "norm": trees.squared_norm(start.trainable),
                "round": -1,
            }
            alike = {"entries": [entry], "chosen": 0}
            caches = {str(client): alike for client in np.flatnonzero(env.sizes).tolist()}
        total = {k: v.double() * len(caches) for k, v in _averaged(start).items()}
        return {**base, "caches": caches, "sum": total}

    def update(
        self, state: State, results: Iterable[ClientResult], env: Env
    ) -> tuple[State, Metrics]:
        arrived: dict[str, Entry] = {}

        def kept() -> Iterator[ClientResult]:
            for result in results:
                arrived[str(result.client)] = self._entry(result, env)
                yield result

        base, metrics = super().update(state, kept(), env)
        if not arrived:
            return state, metrics
        old: Weights = state["weights"]
        before: Caches = state["caches"]
        rest = [_chosen(cache) for client, cache in before.items() if client not in arrived]
        fixed = self._fixed(state, arrived, bool(rest))
        warm = env.round < self.warm_up_rounds(env.rounds)
        fresh = {
            client: self._pushed(before.get(client), entry) for client, entry in arrived.items()
        }
        facts: Metrics = {}
        if warm or self.strategy == "newest":
            picks = [0] * len(fresh)
        elif self.strategy == "random":
            picks = _drawn(list(fresh.values()), env)
        else:
            picks, facts = self._search(list(fresh.values()), old.trainable, fixed, rest, env)
        after = {
            client: {"entries": entries, "chosen": pick}
            for (client, entries), pick in zip(fresh.items(), picks, strict=True)
        }
        mean, total = _mean_of([_chosen(cache) for cache in after.values()], old, fixed, len(rest))
        new = {**base, "caches": {**before, **after}, "sum": total}
        if warm:
            return new, metrics
        weights = Weights(
            old.spec,
            {**old.params, **trees.part_of(mean, "params")},
            {**base["weights"].buffers, **trees.part_of(mean, "buffers")},
        )
        ages = [env.round - _chosen(cache)["round"] for cache in new["caches"].values()]
        facts |= {
            "selection/models": len(ages),
            "selection/age": float(np.mean(ages)),
            "selection/older": float(np.mean([pick > 0 for pick in picks])),
        }
        return {**new, "weights": weights, "evaluated": weights}, {
            "clients": metrics["clients"],
            **facts,
        }

    def _entry(self, result: ClientResult, env: Env) -> Entry:
        loss = result.metrics.get("loss_last_epoch")
        if loss is None and self.loss_term and self._searches:
            raise ConfigError(
                "models from elsewhere come without their training loss",
                where="client_models.path",
                do="set aggregator.loss_term=false, or client_models.path=null",
            )
        return {
            "model": env.store(result.weights),
            "loss": loss or 0.0,
            "norm": trees.squared_norm(result.weights.trainable),
            "round": env.round,
        }

    def _pushed(self, cache: Mapping[str, Any] | None, entry: Entry) -> list[Entry]:
        """A client's entries with a new one; w_0 stands in until there is one and is no candidate."""
        return [entry, *(e for e in (cache["entries"] if cache else ()) if e["round"] >= 0)][
            : self.K
        ]

    def _fixed(self, state: State, arrived: Mapping[str, Entry], at_rest: bool) -> Tree:
        """Sum of what the clients at rest have chosen, in float64; exactly zero where there are none."""
        if not at_rest:
            return trees.zeros_like(state["sum"])
        total = trees.clone(state["sum"])
        for client in arrived:
            if client in state["caches"]:
                _add(total, _averaged(_chosen(state["caches"][client])["model"].load()), -1.0)
        return total

    def _search(
        self,
        fresh: Sequence[Sequence[Entry]],
        centre: Tree,
        fixed: Tree,
        rest: Sequence[Entry],
        env: Env,
    ) -> tuple[list[int], Metrics]:
        """Every participant's index into its entries; J (Eq. 6) of the choice, of the newest and of a random one."""
        candidates = [entry["model"].parameter for entries in fresh for entry in entries]
        inner = products(candidates, centre, trees.part_of(fixed, "params"), len(rest))
        if not np.isfinite(inner).all():
            raise overflow("the inner products of the clients' models")
        problem = Selection(
            products=inner,
            losses=np.array(
                [entry["loss"] if self.loss_term else 0.0 for entries in fresh for entry in entries]
            ),
            sizes=tuple(map(len, fresh)),
            fixed=len(rest),
            fixed_loss=sum(entry["loss"] for entry in rest) if self.loss_term else 0.0,
            fixed_norm=sum(entry["norm"] for entry in rest),
            L=self.L,
        )
        m = len(fresh)
        order = np.arange(m)
        if self.strategy == "approximate":
            order = numpy_generator(env.seed, "groups", env.round).permutation(m)
        picks = problem.choose(np.array_split(order, min(self._groups(env), m)))
        facts = {
            "selection/J": problem.objective(picks),
            "selection/J_newest": problem.objective([0] * m),
            "selection/J_random": problem.objective(_drawn(fresh, env)),
        }
        return picks, facts


@dataclass(frozen=True)
class Selection:
    """Whom the mean is made of, as numbers: no model is looked at again.

    Args:
        products: (n + 2, n + 2) float64, of `products`: candidates by client, the newest first; the fixed part; the centre.
        losses: (n,) F of the candidates.
        sizes: candidates of each participant (K_i).
        fixed: clients whose choice is fixed; fixed_loss, fixed_norm: sums of their F and ||w||^2.
        L: smoothness constant.
    """

    products: np.ndarray
    losses: np.ndarray
    sizes: tuple[int, ...]
    fixed: int
    fixed_loss: float
    fixed_norm: float
    L: float

    def choose(self, groups: Sequence[np.ndarray]) -> list[int]:
        """Each participant's index among its candidates, by the least J group after group (Eq. 8); of one group, Eq. 7.

        Ties go to newer models, then to the lexicographically first choice.
        """
        n = len(self.losses)
        gram, with_fixed = self.products[:n, :n], self.products[:n, n].copy()
        first = np.cumsum([0, *self.sizes])
        M, picks = self.fixed, [0] * len(self.sizes)
        for group in groups:
            M += len(group)
            norms = np.diag(gram)
            unary = self.losses / M + self.L / 2 * (norms / M - (norms + 2 * with_fixed) / M**2)
            rows = lowest(
                unary, -self.L / M**2 * gram, [np.arange(first[i], first[i + 1]) for i in group]
            )
            with_fixed += gram[:, rows].sum(1)
            for client, row in zip(group.tolist(), rows, strict=True):
                picks[client] = row - int(first[client])
        return picks

    def objective(self, picks: Sequence[int]) -> float:
        """J of a choice, with the terms that all choices share (Eq. 6)."""
        n, M = len(self.losses), self.fixed + len(self.sizes)
        rows = np.cumsum([0, *self.sizes[:-1]]) + np.array(picks)
        to_centre, centre = self.products[n, n + 1], self.products[n + 1, n + 1]
        # sum over fixed clients of ||w_n - r||^2, their sum less M r being the fixed part
        at_rest = self.fixed_norm - 2 * to_centre - self.fixed * centre
        chosen = self.products[np.ix_(rows, rows)]
        squares = np.trace(chosen) + at_rest
        mean = (chosen.sum() + 2 * self.products[rows, n].sum() + self.products[n, n]) / M**2
        return float(
            (self.losses[rows].sum() + self.fixed_loss) / M + self.L / 2 * (squares / M - mean)
        )


def products(
    candidates: Sequence[Callable[[str], Tensor]], centre: Tree, fixed: Tree, count: int
) -> np.ndarray:
    """Inner products in float64 of the n `candidates` less `centre`, of ``fixed - count * centre`` and of `centre`.

    Returns:
        (n + 2, n + 2). A tensor of all candidates is in memory at once, and a part of it in float64.
    """
    rows = len(candidates) + 2
    width = max(1, BLOCK_BYTES // (8 * rows))
    device = next(iter(centre.values())).device
    total = torch.zeros(rows, rows, dtype=torch.float64, device=device)
    longest = min(width, max(at.numel() for at in centre.values()))
    # One piece of memory for all blocks: the first touch of new pages takes half the time.
    memory = torch.empty(rows * longest, dtype=torch.float64, device=device)
    for name, at in centre.items():
        flat = [value.reshape(-1) for value in (*(of(name) for of in candidates), fixed[name], at)]
        for start in range(0, at.numel(), width):
            block = memory[: rows * min(width, at.numel() - start)].view(rows, -1)
            for row, values in zip(block, flat, strict=True):
                row.copy_(values[start : start + width])
            block[:-2] -= block[-1]
            block[-2] -= count * block[-1]
            total.addmm_(block, block.T)
    found: np.ndarray = total.cpu().numpy()
    return found


def lowest(unary: np.ndarray, pair: np.ndarray, members: Sequence[np.ndarray]) -> list[int]:
    """One row of each of `members` by the least sum of ``unary[i]`` and, over pairs, ``pair[i, j]``; ties: the first.

    Args:
        unary: (n,); pair: (n, n), symmetric; members: of every client the rows it may choose.

    The table of all combinations is the sum of those of the first and the second half of the clients and of a product between
    them: of rows marked in (combinations, n), no combination is looked at by itself.
    """
    half = (len(members) + 1) // 2
    sides = [_combinations(part) for part in (members[:half], members[half:])]
    marks = [np.zeros((len(side), len(unary))) for side in sides]
    for mark, side in zip(marks, sides, strict=True):
        np.put_along_axis(mark, side, 1.0, axis=1)
    own = [mark @ (unary - np.diag(pair) / 2) + ((mark @ pair) * mark).sum(1) / 2 for mark in marks]
    table = marks[0] @ pair @ marks[1].T
    table += own[0][:, None]
    table += own[1]
    a, b = divmod(int(table.argmin()), len(sides[1]))
    return [*sides[0][a].tolist(), *sides[1][b].tolist()]


def _combinations(members: Sequence[np.ndarray]) -> np.ndarray:
    """(combinations, clients) int64, the last client's choice changing fastest; of no clients one, the empty one."""
    if not members:
        return np.zeros((1, 0), dtype=np.int64)
    return np.stack(np.meshgrid(*members, indexing="ij"), -1).reshape(-1, len(members))


def _averaged(weights: Weights) -> Tree:
    """What is averaged of a model: trained parameters and floating buffers, in one tree."""
    frozen = weights.frozen
    floating = {
        k: v for k, v in weights.buffers.items() if v.is_floating_point() and k not in frozen
    }
    return trees.joined({"params": weights.trainable, "buffers": floating})


def _mean_of(chosen: Sequence[Entry], old: Weights, fixed: Tree, at_rest: int) -> tuple[Tree, Tree]:
    """The mean of the `chosen` models and of those `at_rest`, whose sum is `fixed`; and the sum of all, in place of `fixed`.

    The mean is ``w + (1/M) sum (w_n - w)`` in the models' own type, as every averaging method rounds it.
    """
    start = _averaged(old)
    moved = trees.zeros_like(start)
    if at_rest:
        for name, value in moved.items():
            value.copy_(torch.sub(fixed[name], start[name], alpha=at_rest))
    for entry in chosen:
        model = _averaged(entry["model"].load())
        _add(moved, trees.sub(model, start), 1.0)
        _add(fixed, model, 1.0)
    torch._foreach_mul_(trees.tensors(moved), 1 / (len(chosen) + at_rest))
    return trees.add(start, moved), fixed


def _add(total: Tree, tree: Tree, alpha: float) -> None:
    torch._foreach_add_(trees.tensors(total), trees.tensors(tree), alpha=alpha)


def _chosen(cache: Mapping[str, Any]) -> Entry:
    entry: Entry = cache["entries"][cache["chosen"]]
    return entry


def _drawn(fresh: Sequence[Sequence[Entry]], env: Env) -> list[int]:
    """A uniform draw of each participant's entries."""
    rng = numpy_generator(env.seed, "choice", env.round)
    return [int(rng.integers(len(entries))) for entries in fresh]
