"""PFNM: Bayesian matching of hidden units, which infers the width of the fused network.

Reference:
    Yurochkin et al., Bayesian Nonparametric Federated Learning of Neural Networks, ICML
    2019.
    https://arxiv.org/abs/1905.12022

Update:
    Every hidden unit of the cohort's models is assigned to a global unit
    (`fedexp.matching.beta_bernoulli`). Each unit of the fused network is the posterior
    mean of a global unit, given the local units assigned to it. If there are several
    hidden layers, the last one is matched first, as in the authors' code
    (`fedexp.matching.chains`). A unit is described by its weights and its bias. In
    networks without biases it is described by its weights only.

    In rounds after the first, every client trains its part of the fused network. The
    part consists of the global units to which the client's units were assigned in the
    round before. Matching then begins with these assignments.

Communication:
    Up: the trained model and the class counts n_{s,c}, the numbers of client s's
    samples of each class c. Down: the model that the client starts from. In later
    rounds this is its part of the fused network.

State:
    Server: the fused model and the assignments of the last cohort.

Logged:
    The metrics of `fedexp.matching.widths.width_metrics`.

Differences from the paper:
    Only chains of linear layers can be matched. If no client has a class, each of the N
    clients has the weight 1 / N in the class's row of the output layer. In a network
    without hidden layers, only the rows of the output layer are estimated, class by
    class. In the paper all clients take part in every round. Here a client that was not
    in the last cohort gets the global units that most of the cohort's models have.

Differences from the authors' code:
    In the second round, the code trains with weight decay towards the received model.
    From the third round on, it has no weight decay by default, and its step size falls
    by 1 % per round. Here all rounds have the same local training. If the code runs
    several rounds, the first one has three sweeps, too. To reproduce this, set
    ``sweeps=3``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from fedexp.core.aggregator import State
from fedexp.core.build import require, require_not_negative
from fedexp.core.env import Env
from fedexp.core.errors import ConfigError
from fedexp.core.jobs import ClientJob, ClientResult
from fedexp.core.needs import Demand, Needs
from fedexp.core.outcome import Outcome
from fedexp.core.paths import user_path
from fedexp.core.probe import Probe
from fedexp.core.seeds import numpy_generator
from fedexp.core.task import Metrics
from fedexp.core.weights import ModelSpec, Weights
from fedexp.matching.beta_bernoulli import BetaBernoulli
from fedexp.matching.chains import Chain, Fused, chain_structure, fuse_chains
from fedexp.matching.embedding import Embedding, units_of
from fedexp.matching.placement import placed
from fedexp.matching.structure import Structure, with_widths
from fedexp.methods.bases.class_counts import ClassCounts, counts
from fedexp.methods.bases.fusion import FusionAggregator, FusionState, OneModel
from fedexp.storage.files import file_sha256

_ONE_MATCHING = Demand(
    "rounds",
    1,
    "visits models in raw orders, which exist for one matching after the split",
    "set aggregator.visits=seed",
)


@dataclass(frozen=True)
class UnitMatching(OneModel):
    """The base of aggregators that match units by a Beta-Bernoulli process.

    `fedexp.matching.beta_bernoulli.BetaBernoulli` describes the process and its
    options.

    Args:
        sigma: Variance of the noise of local units around their global unit.
        sigma0: Variance of the prior of the global units.
        gamma: Mass of the Indian buffet process. A larger mass gives more global units.
        sweeps: Number of sweeps of the matching. A sweep matches every model once more.
        popularity: Coefficient of ``log(c_k / (N - c_k))`` in the reward of an
            assignment to global unit k, where c_k of the N models have the unit.
        caps: Whether the two caps of the authors' code apply: on c_k in this
            logarithm, and on the number of global units.
    """

    computes_in_float64: ClassVar[bool] = True

    sigma: float = 1.0
    sigma0: float = 1.0
    gamma: float = 1.0
    sweeps: int = 5
    popularity: Literal[1, 2] = 1
    caps: bool = True

    def matching(self) -> BetaBernoulli:
        """Return the options of the matching."""
        return BetaBernoulli(
            self.sigma, self.sigma0, self.gamma, self.sweeps, self.popularity, self.caps
        )


class PFNMState(FusionState):
    """The state of PFNM: the fused model, the last cohort and its assignments.

    Args:
        units: For each group of hidden units, the index of the global unit to which
            each unit of each model is assigned, of shape (models, n). Empty before the
            first round.
        cohort: Clients of the last cohort.
    """

    units: dict[str, Tensor]
    cohort: list[int]


@dataclass(frozen=True)
class PFNM(UnitMatching, FusionAggregator):
    """The aggregator of PFNM (probabilistic federated neural matching).

    Args:
        later_sweeps: Number of sweeps in rounds after the first. These rounds begin
            with the assignments of the round before.
        class_frequency: Whether client s's outgoing weights to class c have the
            precision f_{s,c} / sigma. f_{s,c} is the client's share of the cohort's
            samples of class c. If not, their precision is 1 / sigma.
        class_counts: Path of a .npy file with the numbers n_{s,c} of client s's samples
            of class c, integers of shape (clients, classes). None: the clients count
            their samples.
        visits: The order in which sweeps visit the cohort's models. ``seed``: random
            orders, drawn from the seed for every round and layer. ``raw``: random
            orders from NumPy's legacy generator in the state after the split of the
            data, as in the authors' code. ``raw`` works for one round only.
            ``ascending``: the order of the cohort.
        orders: Path of a .npy file of visiting orders of the N models, of shape (hidden
            layers, sweeps, N). It requires ``visits=seed`` and replaces the random
            orders. Layers are in the order in which they are matched, the last hidden
            layer first. All rounds use the same orders. Later rounds use only the first
            `later_sweeps` of them.
    """

    content_keys: ClassVar[Mapping[str, Callable[[Path], str]]] = {
        "orders": file_sha256,
        "class_counts": file_sha256,
    }

    later_sweeps: int = 3
    class_frequency: bool = True
    class_counts: str | None = None
    visits: Literal["seed", "raw", "ascending"] = "seed"
    orders: str | None = None

    def __post_init__(self) -> None:
        self.matching()
        require_not_negative(self, "later_sweeps")

        if self.orders is not None:
            require(
                self.visits == "seed",
                f"orders from a file and visits={self.visits} cannot be combined",
            )
            require(
                self.later_sweeps <= self.sweeps,
                f"orders are given for {self.sweeps} sweeps, "
                f"fewer than later_sweeps={self.later_sweeps}",
            )

    @property
    def needs(self) -> Needs:
        return super().needs | Needs(
            (_ONE_MATCHING,) if self.visits == "raw" else (),
            class_counts=self.class_counts is None,
        )

    @property
    def strengths(self) -> tuple[float, ...]:
        """The factors lambda of the penalty on assignments.

        PFNM has no penalty, so its only factor is 0. `NAFI` may have several factors.
        The run delivers the network of the first one. The trace evaluates the networks
        of all factors, with the index of the factor as the iteration.
        """
        return (0.0,)

    def check(self, spec: ModelSpec, input_shape: tuple[int, ...]) -> None:
        structure = chain_structure(spec, input_shape)
        if structure.groups:
            with_widths(spec, input_shape, {})
        if self.orders is not None:
            self._given_orders(self.orders, len(structure.groups))
        if self.class_counts is not None:
            _read(self.class_counts, "class_counts", 2)

    def probes(self, env: Env) -> tuple[Probe, ...]:
        return () if self.class_counts else (ClassCounts(env.num_classes),)

    def init(self, env: Env) -> PFNMState:
        return {**super().init(env), "units": {}, "cohort": []}

    def plan(self, state: State, env: Env) -> list[ClientJob]:
        jobs = super().plan(state, env)
        # Check the orders and the class counts before anything is trained
        present = [job for job in jobs if not job.drops_out]
        if present:
            self._orders(env, len(present), [0], bool(state["units"]))
        self._shares([job.client for job in jobs], env)
        return jobs

    def start_of(self, client: int, state: State, env: Env) -> Weights:
        fused: Weights = state["weights"]
        if not state["units"]:
            return fused
        small, large = (
            chain_structure(spec, env.input_shape) for spec in (env.server_spec, fused.spec)
        )
        return Embedding(small, large, units_of(client, state["units"], state["cohort"])).cut_out(
            fused
        )

    def update(
        self, state: State, results: Iterable[ClientResult], env: Env
    ) -> tuple[State, Metrics]:
        cohort = list(results)
        if not cohort:
            return state, {"clients": 0}

        clients = [result.client for result in cohort]
        owned = [units_of(client, state["units"], state["cohort"]) for client in clients]
        begin = [[own[name] for own in owned] for name in state["units"]] or None
        weights, fused = self._fused(cohort, env, begin)
        groups = chain_structure(env.server_spec, env.input_shape).groups
        units = {
            group.name: torch.stack(layer.units)
            for group, layer in zip(groups, fused.matched, strict=True)
        }

        return {"weights": weights, "units": units, "cohort": clients}, {
            "clients": len(cohort),
            **fused.metrics(),
        }

    def fuse(self, results: Sequence[ClientResult], env: Env) -> tuple[Weights, Metrics]:
        weights, fused = self._fused(results, env, None)
        return weights, fused.metrics()

    def _fused(
        self, results: Sequence[ClientResult], env: Env, begin: Sequence[Sequence[Tensor]] | None
    ) -> tuple[Weights, Fused]:
        """Match the models and return the network of the first lambda in `strengths`.

        Models are matched with a further lambda only if the trace evaluates it.

        Args:
            results: The cohort's results.
            env: The environment.
            begin: Assignments with which matching begins. For each hidden layer and
                each model, the tensor contains the global unit of each unit. None:
                matching begins without assignments.

        Returns:
            The fused model, and the result of the matching.
        """
        structure = chain_structure(env.server_spec, env.input_shape)
        models = [_chain(model, structure) for model in placed([r.weights for r in results])]
        device = models[0][0][0].device
        shares = self._shares([result.client for result in results], env)
        shares = class_shares(counts(list(results))) if shares is None else shares
        numbers = [
            number for number in range(len(self.strengths)) if not number or env.trace.wants(number)
        ]

        found = fuse_chains(
            models,
            shares.to(device),
            self.class_frequency,
            self.matching(),
            [self.strengths[number] for number in numbers],
            self._orders(env, len(models), numbers, begin is not None),
            begin,
        )
        networks = [self._network(fused, structure, results[0].weights, env) for fused in found]

        for number, fused, weights in zip(numbers, found, networks, strict=True):
            if env.trace.wants(number):
                env.trace(
                    number,
                    {"fused": Outcome((weights,), "global")},
                    values={"lam": self.strengths[number], **fused.metrics()},
                )

        return networks[0], found[0]

    def _network(self, fused: Fused, structure: Structure, like: Weights, env: Env) -> Weights:
        widths = {
            group.name: len(layer.members)
            for group, layer in zip(structure.groups, fused.matched, strict=True)
        }
        spec = with_widths(env.server_spec, env.input_shape, widths) if widths else env.server_spec
        values: dict[str, Tensor] = {}

        for layer, (weight, bias) in zip(structure.layers, fused.chain, strict=True):
            values[layer.weight] = weight
            if layer.bias is not None and bias is not None:
                values[layer.bias] = bias

        params = {
            name: values[name].to(value.dtype).contiguous() for name, value in like.params.items()
        }
        return Weights(spec, params, {}).to(env.device)

    def _shares(self, clients: Sequence[int], env: Env) -> Tensor | None:
        """Return the class shares f_{s,c} of `clients` from the file of class counts.

        Without a file, return None.
        """
        if self.class_counts is None:
            return None

        given = _read(self.class_counts, "class_counts", 2)
        expected = (env.num_clients, env.num_classes)
        if given.shape != expected:
            raise _file_error(
                "class_counts",
                "have the wrong shape",
                f"(clients, classes) = {expected}",
                given.shape,
            )

        if (given < 0).any():
            raise _file_error("class_counts", "are not counts", "integers from 0", int(given.min()))

        return class_shares(torch.from_numpy(given[list(clients)]))

    def _orders(self, env: Env, models: int, lambdas: Sequence[int], later: bool) -> np.ndarray:
        """Return the visiting orders of this round.

        Args:
            env: The environment.
            models: Number of models.
            lambdas: Indices in `strengths` of the lambdas for which models are matched.
            later: Whether matching begins with the assignments of the round before.

        Returns:
            Orders of shape (lambdas, hidden layers, sweeps, models).
        """
        layers = len(chain_structure(env.server_spec, env.input_shape).groups)
        sweeps = self.later_sweeps if later else self.sweeps
        if self.orders is not None:
            given = self._given_orders(self.orders, layers)
            if given.shape[2] != models:
                raise _file_error(
                    "orders",
                    "are for another number of models",
                    f"{models} in the cohort",
                    given.shape[2],
                )
            return given[None, :, :sweeps].repeat(len(lambdas), 0)

        if self.visits == "raw":
            drawn = self._raw(env, models, layers)
            return np.stack([drawn[self.stretch(number)] for number in lambdas])
        if self.visits == "ascending":
            return np.broadcast_to(np.arange(models), (len(lambdas), layers, sweeps, models))

        orders = [visiting_orders(env, layer, sweeps, models) for layer in range(layers)]
        shape = (1, layers, sweeps, models)
        return np.array(orders, dtype=np.int64).reshape(shape).repeat(len(lambdas), 0)

    def stretch(self, number: int) -> int:
        """Return the segment of the ``raw`` random stream that a lambda uses.

        Segment i contains the visiting orders of the i-th matching, from 0.

        Args:
            number: Index of the lambda in `strengths`.
        """
        return 0

    def _raw(self, env: Env, models: int, layers: int) -> np.ndarray:
        """Draw orders as the authors' code does, with `numpy.random.permutation`.

        Returns:
            Orders of shape (segments, hidden layers, sweeps, models). `stretch` returns
            the segment of a lambda.
        """
        generator = env.after_split()
        stretches = 1 + max(map(self.stretch, range(len(self.strengths))))
        drawn = [generator.permutation(models) for _ in range(stretches * layers * self.sweeps)]
        return np.array(drawn, dtype=np.int64).reshape(stretches, layers, self.sweeps, models)

    def _given_orders(self, path: str, layers: int) -> np.ndarray:
        """Read the file of visiting orders and check it.

        Returns:
            Orders of N models, of shape (hidden layers, sweeps, N).
        """
        orders = _read(path, "orders", 3)
        if orders.shape[:2] != (layers, self.sweeps):
            expected = f"(hidden layers, sweeps, N) = ({layers}, {self.sweeps}, N)"
            raise _file_error("orders", "have the wrong shape", expected, orders.shape)
        if not np.array_equal(
            np.sort(orders, 2), np.broadcast_to(np.arange(orders.shape[2]), orders.shape)
        ):
            raise _file_error(
                "orders", "are not permutations", "0 ... N - 1 once in every sweep", path
            )
        return orders


def visiting_orders(env: Env, layer: int, sweeps: int, models: int) -> np.ndarray:
    """Draw the random orders in which the sweeps over a layer visit the models.

    Args:
        env: The environment.
        layer: Number of the layer, from 0.
        sweeps: Number of sweeps.
        models: Number of models.

    Returns:
        Orders of shape (sweeps, models), int64.
    """
    stream = numpy_generator(env.seed, "visiting order", env.round, layer)
    orders = [stream.permutation(models) for _ in range(sweeps)]
    return np.array(orders, dtype=np.int64).reshape(sweeps, models)


def class_shares(counts: Tensor) -> Tensor:
    """Compute the share f_{s,c} of client s in the cohort's samples of class c.

    The share is ``n_{s,c} / sum_r n_{r,c}``, with the sum over all N clients r of the
    cohort. If no client has a sample of the class, each share is 1 / N.

    Args:
        counts: Numbers n_{s,c} of client s's samples of class c, of shape (models,
            classes), int64.

    Returns:
        Shares of shape (models, classes), float64.
    """
    n, total = counts.double(), counts.sum(0)
    return torch.where(total > 0, n / total.clamp(min=1), 1 / len(counts))


def _chain(model: Weights, structure: Structure) -> Chain:
    params = {name: value.double() for name, value in model.params.items()}
    return [
        (params[layer.weight], None if layer.bias is None else params[layer.bias])
        for layer in structure.layers
    ]


def _read(path: str, key: str, dim: int) -> np.ndarray:
    """Read a .npy file of integers with `dim` axes as int64."""
    try:
        found = np.load(user_path(path, f"aggregator.{key}"), allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise _file_error(
            key, "cannot be read", "a .npy file of integers", f"{path}: {error}"
        ) from error

    if not isinstance(found, np.ndarray) or found.ndim != dim:
        raise _file_error(
            key, "have the wrong shape", f"{dim} axes", getattr(found, "shape", "several arrays")
        )
    if not np.issubdtype(found.dtype, np.integer):
        raise _file_error(key, "are not integers", "a .npy file of integers", found.dtype)
    return found.astype(np.int64)


_NAMES = {"orders": "visiting orders", "class_counts": "class counts"}


def _file_error(key: str, what: str, expected: str, got: object) -> ConfigError:
    return ConfigError(
        f"the {_NAMES[key]} {what}",
        where=f"aggregator.{key}",
        expected=expected,
        got=got,
        do=f"give another file, or aggregator.{key}=null",
    )
