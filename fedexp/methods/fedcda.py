"""FedCDA: the mean of one recent model per client, with models chosen close together.

Reference:
    Wang et al., FedCDA: Federated Learning with Cross-round Divergence-aware
    Aggregation, ICLR 2024, Algorithm 1.
    https://openreview.net/forum?id=nbPGqeH3lt

Update:
    The server stores the last K models of every client. Each model has a loss F, the
    mean training loss of the last local epoch. In each round the server chooses one
    stored model w_n for each participant n. All other clients keep the model that was
    chosen before. The choice minimises
    ``J = (1/M) sum_n [F_n(w_n) + (L/2) ||w_n - wbar||^2]`` (Eq. 5). The sum is over the
    M clients that have a stored model, F_n(w_n) is the loss of w_n, and L is a
    smoothness constant. wbar is the mean of the chosen models with equal weights. The
    new global model is w^{t+1} = wbar.

    With ``chosen_weights=samples`` the weight of client n in J and in wbar is q_n
    instead of 1/M. q_n is client n's share of the samples of the M clients. This is Eq.
    2 to 8 for the objective ``sum_n q_n F_n``.

    The first rounds are a warm-up with the base method: averaging with this
    aggregator's `weights`, the configured trainer and the configured server optimizer.
    Models are also stored during the warm-up. After the warm-up the trainer and its
    server half continue as before, but w^{t+1} is wbar instead of the server
    optimizer's result.

    The candidates are the stored models of the participants. J does not change if the
    same vector is subtracted from all models. w^t is therefore subtracted from all
    candidates, and all terms of J are computed in float64 from one Gram matrix. Without
    the subtraction ||w_n||^2 is 1e3 to 1e4, while the values that are compared are 1e-2
    to 10. Norms and products include only the trained parameters. BatchNorm's
    statistics are averaged over the same models as the parameters. Counters are set to
    their maximum.

Communication:
    Up: the trained model y_i and its loss. Down: the global model w.

State:
    Server: references to K models per client, and the sum of the chosen models in
    float64. Models beyond the limit ``state.memory_gb`` are on disk. During a round
    memory contains the candidates of the m participants (m K models) and two such sums.
    With ``random_over=all`` every round reads one model of each client.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, TypedDict

import numpy as np
import torch
from torch import Tensor

from fedexp.core import trees
from fedexp.core.aggregator import State
from fedexp.core.build import require
from fedexp.core.env import Env, Extent
from fedexp.core.errors import ConfigError, overflow
from fedexp.core.jobs import ClientResult
from fedexp.core.needs import Needs
from fedexp.core.seeds import numpy_generator
from fedexp.core.stored_weights import StoredWeights
from fedexp.core.task import Metrics
from fedexp.core.trees import Tree
from fedexp.core.weights import Weights
from fedexp.methods.bases.averaging import AveragingState
from fedexp.methods.fedavg import Mean

# The inner products of candidates are summed over blocks of parameters. This is the
# largest size of a float64 block, in bytes.
BLOCK_BYTES = 1 << 22
# Largest number of combinations of candidates in one group. A table with one float64
# value per combination then has 128 MiB.
MOST_COMBINATIONS = 1 << 24


class CacheEntry(TypedDict):
    """A stored model of a client.

    Args:
        model: The model.
        loss: Its training loss F.
        norm: ||w||^2 of its trained parameters.
        round: The round in which it was trained. -1 stands for w_0.
    """

    model: StoredWeights
    loss: float
    norm: float
    round: int


class ClientEntries(TypedDict):
    """The stored models of one client, called the client's cache.

    Args:
        entries: The models, the newest first.
        chosen: Index in `entries` of the model that is part of the mean.
    """

    entries: list[CacheEntry]
    chosen: int


class FedCDAState(AveragingState):
    """The state of FedAvg with the clients' caches and the sum of the chosen models.

    Args:
        caches: Caches by client.
        sum: Sum of the chosen models in float64. Each is multiplied by its weight
            before normalisation.
    """

    caches: dict[str, ClientEntries]
    sum: Tree


@dataclass(frozen=True)
class FedCDA(Mean):
    """The aggregator of FedCDA.

    Args:
        weights: Weights p_i of the mean during the warm-up.
        K: Number of stored models per client.
        B: Number of groups into which the participants are divided. Models are chosen
            group by group. When a group chooses, two kinds of models are fixed: those
            of earlier groups, and those of clients that do not participate in the
            round. Later groups are left out of J (Eq. 8). If fewer than B participants
            return in a round, every participant is a group.
        L: Smoothness constant L in J.
        strategy: How models are chosen: ``newest`` (the newest models), ``random`` (a
            random choice for the participants), ``approximate`` (J is minimised in B
            groups) or ``optimal`` (J is minimised for all participants at once, Eq. 7).
        warm_up: Length of the warm-up: a number of rounds (an integer), or a fraction
            of all rounds.
        loss_term: Whether J contains the losses F.
        unseen: How clients that have not taken part yet are treated: ``left_out`` of
            the mean, or part of it with the ``initial`` model.
        random_over: Clients for which ``random`` chooses anew in a round: the
            ``participants``, or ``all`` clients that have a model.
        loss_reduction: How the samples' losses are reduced to F: ``mean`` or ``sum``
            (line 7 of Algorithm 1 accumulates the loss).
        chosen_weights: Weights of the chosen models after the warm-up: ``uniform``
            (line 10 of Algorithm 1) or by ``samples``.
    """

    computes_in_float64: ClassVar[bool] = True

    K: int = 3
    B: int = 3
    L: float = 1.0
    strategy: Literal["newest", "random", "approximate", "optimal"] = "approximate"
    warm_up: int | float = 0.25
    loss_term: bool = True
    unseen: Literal["left_out", "initial"] = "left_out"
    random_over: Literal["participants", "all"] = "participants"
    loss_reduction: Literal["mean", "sum"] = "mean"
    chosen_weights: Literal["uniform", "samples"] = "uniform"

    def __post_init__(self) -> None:
        require(self.K >= 1, f"K counts the models stored per client, at least 1, got {self.K}")
        require(self.B >= 1, f"B counts groups, at least 1, got {self.B}")
        require(self.L >= 0, f"L must not be negative, got {self.L}")
        require(
            self.L > 0 or self.loss_term or not self._searches,
            f"with L = 0 and loss_term = false strategy '{self.strategy}' "
            "has no criterion to choose by",
        )

        require(
            self.random_over == "participants" or self.strategy == "random",
            f"random_over=all needs strategy=random, got strategy={self.strategy}",
        )
        require(
            self.loss_reduction == "mean" or self.loss_term,
            "loss_reduction=sum needs loss_term=true, because J contains no loss without it",
        )

        if not (self.warm_up >= 0 and (isinstance(self.warm_up, int) or self.warm_up <= 1)):
            rounds = f"{self.warm_up:g}" if float(self.warm_up).is_integer() else "50"
            raise ConfigError(
                "warm_up is not a length",
                where="aggregator.warm_up",
                expected="a fraction of all rounds (at most 1.0), or a number of rounds "
                "(an integer from 0)",
                got=self.warm_up,
                do="set aggregator.warm_up=0"
                if self.warm_up < 0
                else f"set aggregator.warm_up={rounds} for rounds, "
                "or aggregator.warm_up=0.25 for a share",
            )

    @property
    def needs(self) -> Needs:
        # The weights are the clients' numbers of samples. Models from
        # client_models.path must have been trained on clients with these numbers.
        return super().needs | Needs(client_inputs=self.chosen_weights == "samples")

    @property
    def _searches(self) -> bool:
        return self.strategy in ("approximate", "optimal")

    def uses_server_step(self, rounds: int) -> bool:
        # After the warm-up, the choice of models replaces the optimizer's result.
        return self.warm_up_rounds(rounds) > 0

    def warm_up_rounds(self, rounds: int) -> int:
        """Return the number of warm-up rounds in a run of `rounds` rounds."""
        return self.warm_up if isinstance(self.warm_up, int) else round(self.warm_up * rounds)

    def check_extent(self, extent: Extent) -> None:
        if self.warm_up_rounds(extent.rounds) > extent.rounds:
            raise ConfigError(
                "the warm-up is longer than the run",
                where="aggregator.warm_up",
                expected=f"at most rounds={extent.rounds}, or a fraction such as 0.25",
                got=self.warm_up,
                do=f"set aggregator.warm_up={extent.rounds} or less, a fraction "
                f"(aggregator.warm_up=0.25), or rounds={self.warm_up} or more",
            )

        if not self._searches:
            return

        m, groups = extent.sampling.m, self._groups(extent)
        # With Bernoulli sampling, m is only the expected number of clients
        fixed = extent.sampling.kind != "bernoulli"
        # A single client is one group, whatever B is
        if self.strategy == "approximate" and fixed and 1 < m < groups:
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
            remedy = (
                f"raise limit.server_steps, which reduces {self.B} groups to {groups}, "
                if self.strategy == "approximate" and groups < self.B
                else "set aggregator.strategy=approximate with more groups (aggregator.B), "
            )
            raise ConfigError(
                f"a group of {size} clients with {self.K} models each "
                f"has {self.K}^{size} combinations",
                where="aggregator.B" if self.strategy == "approximate" else "aggregator.strategy",
                expected=f"at most {MOST_COMBINATIONS:,} combinations per group",
                do=f"{remedy}or set a smaller aggregator.K"
                + ("" if fixed else ", or sampling=fixed, which bounds the clients of a round"),
            )

    def _groups(self, world: Env | Extent) -> int:
        return 1 if self.strategy == "optimal" else world.server_steps(self.B)

    def init(self, env: Env) -> FedCDAState:
        base = super().init(env)
        start: Weights = base["weights"]
        caches: dict[str, ClientEntries] = {}
        if self.unseen == "initial":
            entry = CacheEntry(
                model=env.store(start),
                loss=0.0,
                norm=trees.squared_norm(start.trainable),
                round=-1,
            )
            alike = ClientEntries(entries=[entry], chosen=0)
            caches = {str(client): alike for client in np.flatnonzero(env.sizes).tolist()}

        weight = sum(map(self._weights(env), caches))
        total = {k: v.double() * weight for k, v in _averaged(start).items()}
        return {**base, "caches": caches, "sum": total}

    def update(
        self, state: State, results: Iterable[ClientResult], env: Env
    ) -> tuple[State, Metrics]:
        arrived: dict[str, CacheEntry] = {}

        def store_entries() -> Iterator[ClientResult]:
            for result in results:
                arrived[str(result.client)] = self._entry(result, env)
                yield result

        base: AveragingState
        base, metrics = super().update(state, store_entries(), env)
        if not arrived:
            return state, metrics

        old: Weights = state["weights"]
        before: dict[str, ClientEntries] = state["caches"]
        warm = env.round < self.warm_up_rounds(env.rounds)
        fresh = {
            client: self._pushed(before.get(client), entry) for client, entry in arrived.items()
        }
        if self.random_over == "all" and not warm:
            # Clients that do not participate also choose anew
            fresh |= {
                client: cache["entries"]
                for client, cache in before.items()
                if client not in arrived
            }

        rest = {client: _chosen(cache) for client, cache in before.items() if client not in fresh}
        weight = self._weights(env)
        rest_weight = sum(map(weight, rest))
        fixed = self._fixed(state, fresh, weight, bool(rest))
        selection_metrics: Metrics = {}

        if warm or self.strategy == "newest":
            picks = [0] * len(fresh)
        elif self.strategy == "random":
            picks = _random_picks(list(fresh.values()), env)
        else:
            picks, selection_metrics = self._search(fresh, old.trainable, fixed, rest, env)

        after: dict[str, ClientEntries] = {
            client: {"entries": entries, "chosen": pick}
            for (client, entries), pick in zip(fresh.items(), picks, strict=True)
        }
        chosen = [(_chosen(cache), weight(client)) for client, cache in after.items()]
        mean, total = _mean_of(chosen, old, fixed, rest_weight)
        new: FedCDAState = {**base, "caches": {**before, **after}, "sum": total}

        if warm:
            return new, metrics

        weights = Weights(
            old.spec,
            {**old.params, **trees.part_of(mean, "params")},
            {**base["weights"].buffers, **trees.part_of(mean, "buffers")},
        )
        ages = [env.round - _chosen(cache)["round"] for cache in new["caches"].values()]
        selection_metrics |= {
            "selection/models": len(ages),
            "selection/age": float(np.mean(ages)),
            "selection/older": float(np.mean([pick > 0 for pick in picks])),
        }

        return {**new, "weights": weights, "evaluated": weights}, {
            "clients": metrics["clients"],
            **selection_metrics,
        }

    def _entry(self, result: ClientResult, env: Env) -> CacheEntry:
        loss = result.metrics.get("loss_last_epoch")
        if loss is None and self.loss_term and self._searches:
            raise ConfigError(
                "models from client_models.path come without their training loss",
                where="client_models.path",
                do="set aggregator.loss_term=false, or client_models.path=null",
            )

        samples = result.num_examples if self.loss_reduction == "sum" else 1
        return {
            "model": env.store(result.weights),
            "loss": samples * (loss or 0.0),
            "norm": trees.squared_norm(result.weights.trainable),
            "round": env.round,
        }

    def _weights(self, env: Env) -> Callable[[str], int]:
        """Return the function that gives the weight of a client's chosen model.

        The weights are not normalised. With ``uniform`` each weight is 1.
        """
        if self.chosen_weights == "uniform":
            return lambda client: 1
        return lambda client: int(env.sizes[int(client)])

    def _pushed(self, cache: ClientEntries | None, entry: CacheEntry) -> list[CacheEntry]:
        """Return a client's newest K entries, with the new `entry` first.

        The initial model w_0 is dropped. It is an entry only until the client has a
        trained model.
        """
        return [entry, *(e for e in (cache["entries"] if cache else ()) if e["round"] >= 0)][
            : self.K
        ]

    def _fixed(
        self, state: State, fresh: Iterable[str], weight: Callable[[str], int], at_rest: bool
    ) -> Tree:
        """Return the sum of the chosen models of the clients at rest, in float64.

        Clients at rest keep their chosen model in this round. All other clients are in
        `fresh`. Each model is multiplied by the client's `weight`.

        Args:
            state: The state before the round.
            fresh: The clients for which a model is chosen in this round.
            weight: Function that returns the weight of a client.
            at_rest: Whether any client is at rest. If not, the sum is exactly zero.
        """
        if not at_rest:
            return trees.zeros_like(state["sum"])
        total = trees.clone(state["sum"])
        for client in fresh:
            if client in state["caches"]:
                model = _chosen(state["caches"][client])["model"].load()
                _add(total, _averaged(model), -float(weight(client)))
        return total

    def _search(
        self,
        fresh: Mapping[str, Sequence[CacheEntry]],
        centre: Tree,
        fixed: Tree,
        rest: Mapping[str, CacheEntry],
        env: Env,
    ) -> tuple[list[int], Metrics]:
        """Choose an entry for every participant so that J (Eq. 5) is low.

        Args:
            fresh: Entries of each participant.
            centre: The trained parameters of the global model w^t.
            fixed: The weighted sum of the chosen models of all other clients.
            rest: Chosen entries of all other clients.
            env: The environment at this step.

        Returns:
            For each participant the index of its chosen entry, and the metrics to log.
            The metrics are J of this choice, of the newest models and of a random
            choice.
        """
        weight, owners = self._weights(env), list(fresh.values())
        rest_weight = sum(map(weight, rest))
        candidates = [entry["model"].parameter for entries in owners for entry in entries]
        inner = products(candidates, centre, trees.part_of(fixed, "params"), rest_weight)
        if not np.isfinite(inner).all():
            raise overflow("the inner products of the clients' models")

        problem = Selection(
            products=inner,
            losses=np.array(
                [
                    entry["loss"] if self.loss_term else 0.0
                    for entries in owners
                    for entry in entries
                ]
            ),
            sizes=tuple(map(len, owners)),
            fixed=rest_weight,
            fixed_loss=sum(weight(client) * entry["loss"] for client, entry in rest.items())
            if self.loss_term
            else 0.0,
            fixed_norm=sum(weight(client) * entry["norm"] for client, entry in rest.items()),
            L=self.L,
            weights=tuple(map(weight, fresh)),
        )
        m = len(fresh)
        order = np.arange(m)

        if self.strategy == "approximate":
            order = numpy_generator(env.seed, "groups", env.round).permutation(m)

        picks = problem.choose(np.array_split(order, min(self._groups(env), m)))
        return picks, {
            "selection/J": problem.objective(picks),
            "selection/J_newest": problem.objective([0] * m),
            "selection/J_random": problem.objective(_random_picks(owners, env)),
        }


@dataclass(frozen=True)
class Selection:
    """The problem of choosing models, in terms of their inner products and losses.

    The n candidates are the stored models of the participants. The centre is the global
    model w^t. It is subtracted from all candidates. The chosen models of clients that
    do not participate are fixed. The fixed part is the weighted sum of the fixed models
    minus `fixed` times the centre.

    Args:
        products: Inner products from the function `products`, of shape (n + 2, n + 2),
            float64. Rows and columns are the candidates (by client, the newest first),
            then the fixed part, then the centre.
        losses: Losses F of the candidates, of shape (n,).
        sizes: Number of candidates of each participant.
        fixed: Sum of the weights of the fixed models. If weights are uniform, it is the
            number of these models.
        fixed_loss: Weighted sum of the losses F of the fixed models.
        fixed_norm: Weighted sum of ||w||^2 of the fixed models.
        L: Smoothness constant.
        weights: Weight of each participant before normalisation. Empty if all weights
            are 1.
    """

    products: np.ndarray
    losses: np.ndarray
    sizes: tuple[int, ...]
    fixed: int
    fixed_loss: float
    fixed_norm: float
    L: float
    weights: tuple[int, ...] = ()

    def choose(self, groups: Sequence[np.ndarray]) -> list[int]:
        """Choose one candidate per participant so that J is lowest.

        Candidates are chosen group by group (Eq. 8). With one group this is Eq. 7. Ties
        within a group go to the lexicographically first combination of indices, where
        index 0 is a client's newest model.

        Args:
            groups: For each group, the indices of its participants.

        Returns:
            For each participant, the index of its chosen candidate.
        """
        n = len(self.losses)
        gram, with_fixed = self.products[:n, :n], self.products[:n, n].copy()
        first = np.cumsum([0, *self.sizes])
        M, picks = self.fixed, [0] * len(self.sizes)
        owners = self._weights()
        weights = np.repeat(owners, self.sizes)

        for group in groups:
            M += int(owners[group].sum())
            norms = np.diag(gram)
            # If one client has all the weight, M - w is exactly 0. Its models then tie.
            spread = (weights * (M - weights) * norms - 2 * weights * with_fixed) / M**2
            unary = weights * self.losses / M + self.L / 2 * spread
            rows = lowest(
                unary,
                -self.L / M**2 * np.outer(weights, weights) * gram,
                [np.arange(first[i], first[i + 1]) for i in group],
            )
            with_fixed += (weights[rows] * gram[:, rows]).sum(1)
            for client, row in zip(group.tolist(), rows, strict=True):
                picks[client] = row - int(first[client])

        return picks

    def objective(self, picks: Sequence[int]) -> float:
        """Return J of a choice (Eq. 6), with the terms that are equal for all choices.

        Args:
            picks: For each participant, the index of its chosen candidate.
        """
        weights = self._weights()
        n, M = len(self.losses), self.fixed + int(weights.sum())
        rows = np.cumsum([0, *self.sizes[:-1]]) + np.array(picks)
        to_centre, centre = self.products[n, n + 1], self.products[n + 1, n + 1]
        # Compute the sum of ||w_n - r||^2 over the fixed models w_n, where r is the
        # centre. The fixed part is the sum of the w_n minus `fixed` times r.
        at_rest = self.fixed_norm - 2 * to_centre - self.fixed * centre
        chosen = self.products[np.ix_(rows, rows)]
        squares = np.trace(weights[:, None] * chosen) + at_rest
        mean = (
            (np.outer(weights, weights) * chosen).sum()
            + 2 * (weights * self.products[rows, n]).sum()
            + self.products[n, n]
        ) / M**2
        loss = ((weights * self.losses[rows]).sum() + self.fixed_loss) / M
        return float(loss + self.L / 2 * (squares / M - mean))

    def _weights(self) -> np.ndarray:
        """Return the weights of the participants, of shape (participants,), float64."""
        return np.array(self.weights or [1] * len(self.sizes), dtype=np.float64)


def products(
    candidates: Sequence[Callable[[str], Tensor]], centre: Tree, fixed: Tree, count: int
) -> np.ndarray:
    """Compute the inner products of n + 2 vectors in float64.

    The first n vectors are the candidates minus `centre`. Then follow
    ``fixed - count * centre`` and `centre`. Parameters are processed one after the
    other. Memory contains the current parameter of all candidates, and a block of its
    values in float64.

    Args:
        candidates: For each of the n candidates, a function that returns one of its
            parameters by name.
        centre: The vector that is subtracted, as a tree of parameters.
        fixed: The weighted sum of the fixed models.
        count: The sum of their weights.

    Returns:
        Products of shape (n + 2, n + 2).
    """
    rows = len(candidates) + 2
    width = max(1, BLOCK_BYTES // (8 * rows))
    device = next(iter(centre.values())).device
    total = torch.zeros(rows, rows, dtype=torch.float64, device=device)
    longest = min(width, max(at.numel() for at in centre.values()))
    # All blocks share one buffer. A new buffer for every block would take about twice
    # the time, because the first access to new memory pages is slow.
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
    """Choose one row per client so that a sum of terms is lowest.

    Every client has several rows, and n is the number of all rows. The sum contains
    ``unary[i]`` for each chosen row i, and ``pair[i, j]`` once for each pair i < j of
    chosen rows. Ties go to the first combination.

    The clients are divided into two halves. A combination of a half contains one row
    for each of its clients. Each half has a 0/1 matrix of shape (combinations, n),
    which marks the rows of each combination. The sum for two combinations has three
    parts: the terms within the first half, the terms within the second half, and the
    terms of pairs across the halves. Matrix products compute the sums for all pairs of
    combinations together.

    Args:
        unary: Terms of rows, of shape (n,).
        pair: Terms of pairs, of shape (n, n), symmetric.
        members: For every client, the rows that it may choose.

    Returns:
        The chosen row of each client.
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
    """Return all combinations of one row per client.

    The last client's row changes fastest. Without clients there is one empty
    combination.

    Returns:
        Rows of shape (combinations, clients), int64.
    """
    if not members:
        return np.zeros((1, 0), dtype=np.int64)
    return np.stack(np.meshgrid(*members, indexing="ij"), -1).reshape(-1, len(members))


def _averaged(weights: Weights) -> Tree:
    """Return the tensors of a model that are averaged.

    They are the trained parameters and the floating-point buffers that are not frozen.
    """
    frozen = weights.frozen
    floating = {
        k: v for k, v in weights.buffers.items() if v.is_floating_point() and k not in frozen
    }
    return trees.joined({"params": weights.trainable, "buffers": floating})


def _mean_of(
    chosen: Sequence[tuple[CacheEntry, int]], old: Weights, fixed: Tree, at_rest: int
) -> tuple[Tree, Tree]:
    """Compute the mean of all chosen models.

    The models w_n with weights a_n are those chosen in this round and those of the
    clients at rest, which keep their model. The mean is
    ``w + (1 / M) sum_n a_n (w_n - w)`` with ``M = sum_n a_n``, where w is the global
    model before the round. It is computed in the models' own dtype, so that
    floating-point rounding is the same as in all averaging methods.

    Args:
        chosen: Models chosen in this round, with their weights.
        old: The global model before the round.
        fixed: Weighted sum of the models of clients at rest. It is changed in place.
        at_rest: Sum of the weights of the models of clients at rest.

    Returns:
        The mean, and the weighted sum of all models.
    """
    start = _averaged(old)
    moved = trees.zeros_like(start)
    if at_rest:
        for name, value in moved.items():
            value.copy_(torch.sub(fixed[name], start[name], alpha=at_rest))
    total = at_rest
    for entry, weight in chosen:
        model = _averaged(entry["model"].load())
        _add(moved, trees.sub(model, start), float(weight))
        _add(fixed, model, float(weight))
        total += weight
    torch._foreach_mul_(trees.tensors(moved), 1 / total)
    return trees.add(start, moved), fixed


def _add(total: Tree, tree: Tree, alpha: float) -> None:
    torch._foreach_add_(trees.tensors(total), trees.tensors(tree, total), alpha=alpha)


def _chosen(cache: ClientEntries) -> CacheEntry:
    return cache["entries"][cache["chosen"]]


def _random_picks(fresh: Sequence[Sequence[CacheEntry]], env: Env) -> list[int]:
    """Choose one entry per participant, uniformly among the participant's entries."""
    rng = numpy_generator(env.seed, "choice", env.round)
    return [int(rng.integers(len(entries))) for entries in fresh]
