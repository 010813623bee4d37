"""PFNM: hidden units of the cohort's models are matched, and the fused network has as many as it takes.

Reference: Yurochkin et al., Bayesian Nonparametric Federated Learning of Neural Networks, ICML 2019; several hidden layers by
the authors' top-down scheme (`fedexp.matching.chains`). Networks without biases leave that coordinate out.
Up: models and the class counts n_{s,c}. Server state: the fused model.
Departures: chains of linear layers alone. In several rounds every client gets the whole fused network and matching begins
anew; the paper sends each its own part of it and keeps the assignments. The output layer's frequency of a class that no
client has is 1 / N. Without hidden layers the rows of the output are what is estimated, class by class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from fedexp.aggregators.fusion import FusionAggregator
from fedexp.core.aggregator import State
from fedexp.core.env import Env
from fedexp.core.errors import ConfigError
from fedexp.core.jobs import ClientJob, ClientResult
from fedexp.core.probe import Probe
from fedexp.core.seeds import numpy_generator
from fedexp.core.task import Metrics
from fedexp.core.weights import ModelSpec, Weights
from fedexp.matching.beta_bernoulli import BetaBernoulli
from fedexp.matching.chains import Chain, chain_structure, fuse_chains
from fedexp.matching.structure import Structure, with_widths
from fedexp.probes.class_counts import ClassCounts, counts
from fedexp.storage.files import file_sha256


@dataclass(frozen=True)
class PFNM(FusionAggregator):
    """Probabilistic federated neural matching. Logs what `fedexp.matching.chains.Fused.metrics` says.

    Args:
        sigma, sigma0, gamma, sweeps, popularity, caps: `fedexp.matching.beta_bernoulli.BetaBernoulli`.
        class_frequency: outgoing weights to class c have the precision f_{s,c} / sigma, with f_{s,c} the client's share of
            the class's samples, not 1 / sigma.
        orders: a .npy file (hidden layers, sweeps, N) of the orders in which sweeps visit the cohort's models, in the order
            in which layers are matched, the last hidden one first; the same in every round. None: drawn from the seed, for
            every round and layer.
    """

    content_keys: ClassVar[Mapping[str, Callable[[Path], str]]] = {"orders": file_sha256}

    sigma: float = 1.0
    sigma0: float = 1.0
    gamma: float = 1.0
    sweeps: int = 5
    popularity: Literal[1, 2] = 1
    caps: bool = True
    class_frequency: bool = True
    orders: str | None = None

    def __post_init__(self) -> None:
        self.matching()

    def matching(self) -> BetaBernoulli:
        """How units are matched."""
        return BetaBernoulli(self.sigma, self.sigma0, self.gamma, self.sweeps, self.popularity, self.caps)

    def check(self, spec: ModelSpec, input_shape: tuple[int, ...]) -> None:
        structure = chain_structure(spec, input_shape)
        if structure.groups:
            with_widths(spec, input_shape, {})
        if self.orders is not None:
            self._given(self.orders, len(structure.groups))

    def probes(self, env: Env) -> tuple[Probe, ...]:
        return (ClassCounts(env.num_classes),)

    def plan(self, state: State, env: Env) -> list[ClientJob]:
        jobs = super().plan(state, env)
        self._visits(env, len(jobs))  # before anything is trained
        return jobs

    def fuse(self, results: Sequence[ClientResult], env: Env) -> tuple[Weights, Metrics]:
        structure = chain_structure(env.server_spec, env.input_shape)
        models = [_chain(result.weights, structure) for result in results]
        shares = class_shares(counts(list(results))).to(models[0][0][0].device)
        orders = self._visits(env, len(models))
        fused = fuse_chains(models, shares, self.class_frequency, self.matching(), orders)
        names = [group.name for group in structure.groups]
        widths = {name: len(layer.members) for name, layer in zip(names, fused.matched, strict=True)}
        spec = with_widths(env.server_spec, env.input_shape, widths) if widths else env.server_spec
        first = results[0].weights.params
        values: dict[str, Tensor] = {}
        for layer, (weight, bias) in zip(structure.layers, fused.chain, strict=True):
            values[layer.weight] = weight
            if layer.bias is not None and bias is not None:
                values[layer.bias] = bias
        params = {name: values[name].to(value.dtype).contiguous() for name, value in first.items()}
        return Weights(spec, params, {}), fused.metrics()

    def _visits(self, env: Env, models: int) -> np.ndarray:
        """(hidden layers, sweeps, models) visiting orders of this round."""
        layers = len(chain_structure(env.server_spec, env.input_shape).groups)
        if self.orders is None:
            streams = [numpy_generator(env.seed, "visiting order", env.round, layer) for layer in range(layers)]
            drawn = [[rng.permutation(models) for _ in range(self.sweeps)] for rng in streams]
            return np.asarray(drawn, dtype=np.int64).reshape(layers, self.sweeps, models)
        given = self._given(self.orders, layers)
        if given.shape[2] != models:
            raise _bad_orders("are for another number of models", f"{models} in the cohort", given.shape[2])
        return given

    def _given(self, path: str, layers: int) -> np.ndarray:
        """What is in the file of orders."""
        try:
            orders = np.load(Path(path).expanduser(), allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise _bad_orders("cannot be read", "a .npy file of integers", f"{path}: {error}") from error
        if not isinstance(orders, np.ndarray) or orders.ndim != 3 or orders.shape[:2] != (layers, self.sweeps):
            shape = getattr(orders, "shape", "several arrays")
            raise _bad_orders("have another shape", f"(hidden layers, sweeps, N) = ({layers}, {self.sweeps}, N)", shape)
        if not np.array_equal(np.sort(orders, 2), np.broadcast_to(np.arange(orders.shape[2]), orders.shape)):
            raise _bad_orders("are no permutations", "0 ... N - 1 once in every sweep", path)
        return orders.astype(np.int64)


def class_shares(counts: Tensor) -> Tensor:
    """(models, classes) int64 -> f_{s,c} = n_{s,c} / sum_r n_{r,c} in float64; 1 / N where nobody has the class."""
    n, total = counts.double(), counts.sum(0)
    return torch.where(total > 0, n / total.clamp(min=1), 1 / len(counts))


def _chain(model: Weights, structure: Structure) -> Chain:
    params = {name: value.double() for name, value in model.params.items()}
    return [(params[layer.weight], None if layer.bias is None else params[layer.bias]) for layer in structure.layers]


def _bad_orders(what: str, expected: str, got: object) -> ConfigError:
    return ConfigError(
        f"the visiting orders {what}",
        where="aggregator.orders",
        expected=expected,
        got=got,
        do="give another file, or aggregator.orders=null",
    )
