"""MA-Echo: aggregation in the null space of the clients' layer inputs.

Reference:
    Su, Li and Xue, One-shot Federated Learning without server-side training, Neural
    Networks 2023, Eq. 5-11 and Algorithm 1, and the authors' released code. The variant
    of the code gives the numbers of the paper's tables and is the default here
    (``conf/aggregator/ma_echo.yaml``). ``ma_echo_algorithm1.yaml`` has the settings of
    the algorithm as printed in the paper.
    https://arxiv.org/abs/2204.12493

Update:
    W_i is a layer's weight matrix at client i, for i = 1 ... N, and W is the fused
    matrix. A bias is one more column of its layer's matrix. Every client has a matrix
    V_i, which starts at W_i. Let ``R_i = W - V_i``. ``P_i = K_i K_i^T`` is close to the
    projection onto the inputs of the layer at client i
    (`fedexp.methods.ma_echo.projections`). a_i are the clients' weights. The following
    iteration runs T times for every layer. It updates W, and then every V_i by one of
    two rules. Both rules use the new W, also in R_i::

        W   <- W - eta sum_i a_i R_i P_i
        V_i <- V_i + step * Norm(R_i (I - s P_i))     (v_update=incremental)
        V_i <- W_i + (W - W_i)(I - s P_i)             (v_update=anchored, Eq. 11)

    eta and step are step sizes, and s is a damping factor. Norm divides each row by its
    Euclidean norm if `norm` is set, and otherwise changes nothing. mu is the paper's
    parameter of Eq. 11. The two settings are:

    - Released code: eta = step, a_i = 1 / N, s = 1. The damping ``mu / (1 + mu)`` is
      inside the recursion that computes P_i.
    - Algorithm 1: the a_i solve a quadratic program, eta is twice the paper's eta,
      step = 1, ``s = mu / (1 + mu)``, and P_i is not damped.

    With ``align`` the models are first aligned to a reference model by optimal
    transport (MA-Echo + OT).

Communication:
    Up: the trained model and one factor K_i per layer. With ``last_layer=masked`` also
    the class counts. Down: the model that the client starts from.

State:
    Server: the fused model.

Logged:
    With `rank`, ``ma_echo/projection_numbers``: size of the sent projections as Table 6
    of the paper counts it. With `align`, ``ot/moved``: share of the hidden units that
    changed their position, over all models except the reference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedexp.core.build import require, require_not_negative, require_positive
from fedexp.core.env import Env
from fedexp.core.errors import ConfigError
from fedexp.core.jobs import ClientResult
from fedexp.core.layers import Layer, layers_of
from fedexp.core.needs import Needs
from fedexp.core.outcome import Outcome
from fedexp.core.probe import Probe
from fedexp.core.seeds import seed_of
from fedexp.core.task import Metrics
from fedexp.core.trees import Tree
from fedexp.core.weights import ModelSpec, Weights, frozen_of
from fedexp.matching.alignment import Alignment
from fedexp.matching.structure import structure_of
from fedexp.methods.bases.fusion import averaged
from fedexp.methods.bases.output_layer import MaskableFusion
from fedexp.methods.ma_echo.null_space import LayerRule, NullSpace
from fedexp.methods.ma_echo.projections import Projections, full_size
from fedexp.methods.ot_fusion import aligned


@dataclass(frozen=True)
class MAEcho(MaskableFusion):
    """The aggregator of MA-Echo.

    Comments in its YAML files explain each key and give its source.
    """

    computes_in_float64: ClassVar[bool] = True
    unmasked: ClassVar[str] = "projected or aggregator.last_layer=plain"

    T: int = 60
    eta: float = 1.6
    step: float = 1.6
    mu: float = 1.0
    weights: Literal["uniform", "qp"] = "uniform"
    C: float = 1.0
    projector: Literal["recursion", "exact"] = "recursion"
    damping: Literal["recursion", "update"] = "recursion"
    alpha: float = 0.025118864315095794  # 0.01^0.8
    alpha_conv: float = 1.0e-4  # 0.00001^0.8
    z: float = 0.01
    probe_batch_size: int = 64
    rank: tuple[int, ...] | None = None
    v_update: Literal["incremental", "anchored"] = "incremental"
    norm: bool = False
    start: Literal["average", "first", "random"] = "average"
    returns: Literal["mean_v", "W"] = "mean_v"
    last_layer: Literal["masked", "plain", "projected"] = "masked"
    layers: tuple[str, ...] = ("*",)
    align: bool = False

    def __post_init__(self) -> None:
        require_not_negative(self, "T")
        require_positive(self, "mu", "alpha", "alpha_conv", "z")
        require(
            self.probe_batch_size >= 1,
            f"probe_batch_size must be at least 1, got {self.probe_batch_size}",
        )
        require(
            all(number >= 1 for number in self.rank or ()),
            f"rank must contain positive numbers, got {list(self.rank or ())}",
        )
        require(
            self.eta > 0 and self.step > 0,
            f"eta and step must be positive, got {self.eta} and {self.step}",
        )
        require(0 < self.C <= 1, f"C must be in (0, 1], got {self.C}")
        require(
            self.v_update == "incremental" or not self.norm,
            "norm requires v_update=incremental: an anchored V_i has no step",
        )
        require(
            self.projector == "recursion" or self.damping == "update",
            "projector=exact has no recursion in which mu could enter: set damping=update",
        )

    @property
    def needs(self) -> Needs:
        return super().needs | Needs(client_inputs=True)

    def check(self, spec: ModelSpec, input_shape: tuple[int, ...]) -> None:
        self._check_layers(spec, layers_of(spec, input_shape))
        super().check(spec, input_shape)
        if self.align:
            structure_of(spec, input_shape)

    def _check_layers(self, spec: ModelSpec, layers: tuple[Layer, ...]) -> None:
        names = [layer.weight for layer in layers]
        for pattern in self.layers:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ConfigError(
                    f"no layer is called '{pattern}'",
                    where="aggregator.layers",
                    expected=", ".join(names),
                )

        if self.rank is not None and len(self.rank) != len(layers):
            raise ConfigError(
                "aggregator.rank needs one number per layer",
                where="aggregator.rank",
                expected=f"{len(layers)} numbers, for {', '.join(names)}",
                got=list(self.rank),
            )

        fused = self._fused(spec, layers)
        if not fused:
            raise ConfigError(
                "no layer is left for the iteration",
                where="aggregator.layers, aggregator.last_layer, and what the model freezes",
                do="set aggregator.last_layer=projected, which iterates the output layer, too, "
                "or method=average, which needs no layer",
            )

        frozen = frozen_of(
            spec.arch, tuple(layer.bias for layer in fused if layer.bias is not None)
        )
        if frozen:
            raise ConfigError(
                "a layer's weight and bias are iterated as one matrix, and only the bias is frozen",
                where=f"model, {', '.join(sorted(frozen))}",
                do="freeze both or none, or leave the layer out with aggregator.layers",
            )

    def _fused(self, spec: ModelSpec, layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
        """Return the layers that take part in the iteration.

        Frozen layers are left out, because they are the same in all models.
        """
        frozen = frozen_of(spec.arch, tuple(layer.weight for layer in layers))
        inner = layers if self.last_layer == "projected" else layers[:-1]
        return tuple(
            layer
            for layer in inner
            if layer.weight not in frozen
            and any(fnmatchcase(layer.weight, pattern) for pattern in self.layers)
        )

    def probes(self, env: Env) -> tuple[Probe, ...]:
        projections = self.projections(env.server_spec, env.layers)
        return (projections, *super().probes(env))

    def projections(self, spec: ModelSpec, layers: tuple[Layer, ...]) -> Projections:
        """Return the probe that computes the factors K of a model's layers."""
        fused = self._fused(spec, layers)
        return Projections(
            layers=tuple(layer.weight for layer in fused),
            variant=self.projector,
            damping=self.shrinkage if self.damping == "recursion" else 1.0,
            alpha=self.alpha,
            alpha_conv=self.alpha_conv,
            z=self.z,
            batch_size=self.probe_batch_size,
            rank=self.rank
            and tuple(
                rank for layer, rank in zip(layers, self.rank, strict=True) if layer in fused
            ),
        )

    @property
    def shrinkage(self) -> float:
        """The factor ``mu / (1 + mu)`` of Eq. 11."""
        return self.mu / (1 + self.mu)

    def fuse(self, results: Sequence[ClientResult], env: Env) -> tuple[Weights, Metrics]:
        models, factors, metrics = self._aligned(results, env)
        rule = LayerRule(
            eta=self.eta,
            step=self.step,
            shrinkage=self.shrinkage if self.damping == "update" else 1.0,
            anchored=self.v_update == "anchored",
            norm=self.norm,
            C=self.C if self.weights == "qp" else None,
        )
        base = averaged(models)
        start = self._start(models, base, env)
        spaces = {}

        for layer in self._fused(env.server_spec, env.layers):
            spaces[layer] = NullSpace(
                local=[_matrix(layer, m.params) for m in models],
                factors=[own[layer.weight] for own in factors],
                start=_matrix(layer, start.params),
                rule=rule,
            )

        base = self.with_last_layer(base, models, results, env)
        clients = [result.client for result in results]
        for t in range(self.T + 1):
            if t:
                for space in spaces.values():
                    space.iterate()
            if env.trace.wants(t):
                env.trace(t, self._series(base, models, spaces), clients)

        if self.rank is not None:
            widths = [_matrix(layer, base.params).shape[1] for layer in env.layers]
            metrics["ma_echo/projection_numbers"] = sum(map(full_size, widths, self.rank))

        return self._assembled(base, spaces, self.returns), metrics

    def _start(self, models: Sequence[Weights], average: Weights, env: Env) -> Weights:
        if self.start == "average":
            return average
        if self.start == "first":
            return models[0]
        first = next(iter(average.params.values()))
        return Weights.init(
            average.spec, seed_of(env.seed, "ma_echo", env.round), first.device, first.dtype
        )

    def _aligned(
        self, results: Sequence[ClientResult], env: Env
    ) -> tuple[list[Weights], list[Tree], Metrics]:
        """Return the models, their factors K by layer, and metrics.

        If `align` is set, the models' units are aligned. A permutation matrix T of a
        layer's inputs turns ``Q = I - K K^T`` into ``T^T Q T``. The rows of K are
        permuted in the same way.
        """
        models = [result.weights for result in results]
        factors = [result.probes[Projections.name] for result in results]
        if not self.align:
            return models, factors, {}
        structure = structure_of(env.server_spec, env.input_shape)
        models, maps, share = aligned(models, env, Alignment())
        widths = {name: math.prod(models[0].params[name].shape[1:]) for name in factors[0]}

        def moved(name: str, K: Tensor, own: dict[str, Tensor]) -> Tensor:
            # The last row of K belongs to the bias (constant input 1) and does not move
            d = widths[name]
            return torch.cat([structure.permute_inputs(name, K[:d], own), K[d:]])

        factors = [
            {name: moved(name, K, own) for name, K in tree.items()}
            for tree, own in zip(factors, maps, strict=True)
        ]
        return models, factors, {"ot/moved": share}

    def _series(
        self, base: Weights, models: Sequence[Weights], spaces: dict[Layer, NullSpace]
    ) -> dict[str, Outcome]:
        local = [
            _with(model, {layer: space.v(i) for layer, space in spaces.items()})
            for i, model in enumerate(models)
        ]
        return {
            "mean_v": Outcome((self._assembled(base, spaces, "mean_v"),), "global"),
            "W": Outcome((self._assembled(base, spaces, "W"),), "global"),
            "V": Outcome(tuple(local), "local"),
        }

    def _assembled(self, base: Weights, spaces: dict[Layer, NullSpace], returns: str) -> Weights:
        return _with(
            base, {layer: s.W if returns == "W" else s.mean_v() for layer, s in spaces.items()}
        )


def _matrix(layer: Layer, params: Tree) -> Tensor:
    """Return a layer as a matrix (out, d), with its bias as the last column."""
    weight = params[layer.weight].flatten(1)
    return weight if layer.bias is None else torch.cat([weight, params[layer.bias][:, None]], 1)


def _with(model: Weights, matrices: dict[Layer, Tensor]) -> Weights:
    """Return `model` with the layers of `matrices` replaced by these matrices."""
    params = dict(model.params)
    for layer, matrix in matrices.items():
        weight = matrix if layer.bias is None else matrix[:, :-1]
        params[layer.weight] = weight.reshape(params[layer.weight].shape).contiguous()
        if layer.bias is not None:
            params[layer.bias] = matrix[:, -1].contiguous()
    return Weights(model.spec, params, model.buffers)
