"""Bayesian matching of chains of linear layers, from the last hidden layer down.

Reference: PFNM's scheme for several layers (Yurochkin et al. 2019).

A unit is compared by its bias and its outgoing weights. In the first hidden layer it is
also compared by its incoming weights. The last hidden layer is matched first, so when a
layer is matched, the layer above it is matched already. Global units are the units of
the fused network. A unit's outgoing weights have one entry per global unit of the layer
above. The entry is zero if the unit's model lacks this global unit. Weights between
hidden layers are estimated only once, as outgoing weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedexp.core.errors import ConfigError
from fedexp.core.weights import ModelSpec, by_spec, frozen_of
from fedexp.matching.beta_bernoulli import BetaBernoulli, UnitAssignment, match_each
from fedexp.matching.structure import Structure, structure_of
from fedexp.matching.tainting import norm_layers
from fedexp.matching.widths import width_metrics

# Prior mean mu_0 of biases, the value with which the authors initialise biases. The
# prior mean of weights is 0.
BIAS_MEAN = 0.1

Chain = Sequence[tuple[Tensor, Tensor | None]]
"""The weight (out, in) and bias (out,) of every layer, first to last, float64."""


@by_spec
def chain_structure(spec: ModelSpec, input_shape: tuple[int, ...]) -> Structure:
    """Return the structure of a network that is a chain of linear layers.

    Raises:
        ConfigError: The network is not a chain of linear layers. The message says why.
    """
    norms = norm_layers(spec)
    if norms:
        raise _chain_error(
            f"'{norms[0]}' is a norm layer, whose values do not belong to the prior of a unit", spec
        )

    structure = structure_of(spec, input_shape)
    for layer in structure.layers:
        if layer.kind != "linear":
            raise _chain_error(f"'{layer.weight}' is a convolution", spec)

    weights, groups = [layer.weight for layer in structure.layers], structure.groups
    is_untied = [group.layers for group in groups] == [(name,) for name in weights[:-1]]
    reads = [
        [(unit_axis.group, unit_axis.positions.shape[1]) for unit_axis in structure.inputs(name)]
        for name in weights
    ]
    if not is_untied or reads != [[], *([(group.name, 1)] for group in groups)]:
        raise _chain_error("a layer reads layers other than the one before it", spec)

    if any(
        structure.columns[name] != group.size
        for name, group in zip(weights[1:], groups, strict=True)
    ):
        raise _chain_error("a layer reads more than the layer before it", spec)

    known = {name for layer in structure.layers for name in (layer.weight, layer.bias)}
    frozen = frozen_of(spec.arch, tuple(name for name in known if name is not None))
    if frozen:
        raise _chain_error(f"'{min(frozen)}' is frozen, and all layers are estimated", spec)

    module = spec.module()
    others = [
        name
        for name, _ in (*module.named_parameters(), *module.named_buffers())
        if name not in known
    ]
    if others:
        raise _chain_error(f"'{others[0]}' does not belong to a layer", spec)

    return structure


def _chain_error(what: str, spec: ModelSpec) -> ConfigError:
    return ConfigError(
        f"only chains of linear layers can be matched here: {what}",
        where="model",
        expected="a multi-layer perceptron without norm layers or frozen parameters",
        got=spec.arch,
        do="choose model=mlp, or a method that moves units without a prior for them (ot_fusion)",
    )


@dataclass(frozen=True, eq=False)
class Fused:
    """The matched network.

    Args:
        chain: Layers of the network.
        matched: The assignment of every hidden layer, first to last.
    """

    chain: list[tuple[Tensor, Tensor | None]]
    matched: tuple[UnitAssignment, ...]

    def metrics(self) -> dict[str, float]:
        """Return the `width_metrics` of the hidden layers."""
        return width_metrics(
            [torch.cat(layer.units) for layer in self.matched],
            [len(x.members) for x in self.matched],
        )


def fuse_chains(
    models: Sequence[Chain],
    shares: Tensor,
    class_frequency: bool,
    options: BetaBernoulli,
    strengths: Sequence[float],
    orders: np.ndarray,
    start: Sequence[Sequence[Tensor]] | None = None,
) -> list[Fused]:
    """Match the hidden units of at least one model and take posterior means.

    Args:
        models: Models with the same number of layers. Hidden widths may differ.
        shares: For N models and C classes, the share f_{s,c} of the samples of class c
            that model s was trained on, of shape (N, C), float64.
        class_frequency: Whether the output layer's weights to class c have the
            precision f_{s,c} / sigma. Otherwise their precision is 1 / sigma. The
            output layer's biases always have the precision f_{s,c} / sigma.
        options: Options of the matching.
        strengths: Lambdas that replace ``options.strength``.
        orders: Visiting orders of shape (lambdas, hidden layers, sweeps, N). Hidden
            layers are in the order of the matching, the last one first.
        start: For each hidden layer, first to last, the global units to which each
            model is assigned at the beginning (see `match`). If None, models are
            assigned one by one.

    Returns:
        One network per lambda. Each is bit-identical to the network of a run with only
        this lambda.
    """
    classes = (shares if class_frequency else torch.ones_like(shares)) / options.sigma
    parts = [
        _PartlyMatchedChains(
            tuple(range(len(strengths))), [chain[-1][0].T for chain in models], classes, ()
        )
    ]

    for number, layer in enumerate(range(len(models[0]) - 2, -1, -1)):
        following: list[_PartlyMatchedChains] = []
        for part in parts:
            rows, mu0 = _rows(models, layer, part.outgoing)
            own = rows[0].new_full(
                (len(models), len(mu0) - part.precision.shape[1]), 1 / options.sigma
            )
            q, chosen = torch.cat([own, part.precision], 1), list(part.numbers)
            begin = None if start is None else start[layer]
            own_strengths = [strengths[i] for i in chosen]
            found = match_each(rows, q, mu0, options, own_strengths, orders[chosen, number], begin)
            # Lambdas with equal assignments share one object
            for matched in dict.fromkeys(found):
                alike = tuple(
                    i for i, assignment in zip(chosen, found, strict=True) if assignment is matched
                )
                following.append(part.next(models, layer, alike, matched, options))

        parts = following

    fused: dict[int, Fused] = {}
    for part in parts:
        fused |= dict.fromkeys(
            part.numbers, _assembled(models, part.matched, classes, shares, options)
        )

    return [fused[number] for number in range(len(strengths))]


@dataclass(frozen=True, eq=False)
class _PartlyMatchedChains:
    """Chains whose last hidden layers are matched, for lambdas with equal results.

    Args:
        numbers: Indices of these lambdas.
        outgoing: For each model, weights of shape (n, K), from the n units of the layer
            that is matched next to the K global units of the layer that was matched
            last (at first, to the K outputs).
        precision: Precisions of `outgoing`, of shape (N, K).
        matched: Assignments of the layers that are matched so far, first to last.
    """

    numbers: tuple[int, ...]
    outgoing: Sequence[Tensor]
    precision: Tensor
    matched: tuple[UnitAssignment, ...]

    def next(
        self,
        models: Sequence[Chain],
        layer: int,
        numbers: tuple[int, ...],
        matched: UnitAssignment,
        options: BetaBernoulli,
    ) -> _PartlyMatchedChains:
        outgoing = [
            _laid_out(chain[layer][0], units, len(matched.mean))
            for chain, units in zip(models, matched.units, strict=True)
            if layer > 0
        ]
        precision = self.precision.new_full((len(models), len(matched.mean)), 1 / options.sigma)
        return _PartlyMatchedChains(numbers, outgoing, precision, (matched, *self.matched))


def _rows(
    models: Sequence[Chain], layer: int, outgoing: Sequence[Tensor]
) -> tuple[list[Tensor], Tensor]:
    """Return the units of a hidden layer as rows, and the prior mean mu_0 of a row.

    A row is [incoming weights (only in the first layer), bias, outgoing weights].
    """
    rows = []
    for chain, sent in zip(models, outgoing, strict=True):
        weight, bias = chain[layer]
        incoming = [weight] if layer == 0 else []
        biases = [] if bias is None else [bias[:, None]]
        rows.append(torch.cat([*incoming, *biases, sent], 1))

    mu0 = torch.zeros_like(rows[0][0])
    if models[0][layer][1] is not None:
        mu0[-outgoing[0].shape[1] - 1] = BIAS_MEAN

    return rows, mu0


def _assembled(
    models: Sequence[Chain],
    matched: tuple[UnitAssignment, ...],
    classes: Tensor,
    shares: Tensor,
    options: BetaBernoulli,
) -> Fused:
    """Build the network whose units are the posterior means."""
    depth = len(models[0])
    weights = [models[0][0][0]] * depth
    biases: list[Tensor | None] = [None] * depth

    for layer, found in enumerate(matched):
        sent = shares.shape[1] if layer == depth - 2 else len(matched[layer + 1].mean)
        weights[layer + 1] = found.mean[:, -sent:].T
        if models[0][layer][1] is not None:
            biases[layer] = found.mean[:, -sent - 1]
        if layer == 0:
            weights[0] = found.mean[:, : models[0][0][0].shape[1]]

    if depth == 1:
        weights[0] = _means([chain[0][0] for chain in models], classes[:, :, None], 0.0, options)

    last = [bias for _, bias in (chain[-1] for chain in models) if bias is not None]
    if last:
        biases[-1] = _means(last, shares / options.sigma, BIAS_MEAN, options)

    return Fused(list(zip(weights, biases, strict=True)), matched)


def _laid_out(weight: Tensor, units: Tensor, width: int) -> Tensor:
    """Arrange a layer's weight (out, in) by the global units of its outputs.

    Args:
        weight: Weight of the layer.
        units: Global unit of each output unit, of shape (out,).
        width: Number of global units.

    Returns:
        Outgoing weights of each input unit, of shape (in, width). They are zero for
        global units that the model lacks.
    """
    sent = weight.new_zeros(weight.shape[1], width)
    sent[:, units.to(weight.device)] = weight.T
    return sent


def _means(values: Sequence[Tensor], q: Tensor, mu0: float, options: BetaBernoulli) -> Tensor:
    """Compute the posterior mean of values that all models have.

    Args:
        values: One tensor (C, ...) per model.
        q: Precisions of shape (N, C, ...).
        mu0: Mean of the prior.
        options: Options of the matching.
    """
    p0 = 1 / options.sigma0
    return (mu0 * p0 + (q * torch.stack(list(values))).sum(0)) / (p0 + q.sum(0))
