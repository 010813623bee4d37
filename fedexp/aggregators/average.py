"""The plain mean of a cohort's models, each with weight 1 / N.

Reference: "Average" of Su, Li, Xue, One-shot Federated Learning without server-side training, Neural Networks 2023
(MA-Echo): every tensor plainly, or the last layer's rows over those clients that know their class.
Up: models; with ``last_layer=masked`` the class counts n_{i,c} as well. Server state: the mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedexp.aggregators.fusion import FusionAggregator
from fedexp.core.env import Env
from fedexp.core.errors import ConfigError
from fedexp.core.jobs import ClientResult
from fedexp.core.layers import Layer, layers_of
from fedexp.core.probe import Probe
from fedexp.core.task import Metrics
from fedexp.core.trees import Tree
from fedexp.core.weights import ModelSpec, Weights, by_spec
from fedexp.probes.class_counts import ClassCounts, counts

LastLayer = Literal["plain", "masked"]


@dataclass(frozen=True)
class Average(FusionAggregator):
    """The mean of the models; integer buffers take their maximum.

    Args:
        last_layer: ``plain``, or ``masked``: row c is the mean over the clients with more than one sample of class c, and
            zero where there is none.
    """

    last_layer: LastLayer = "plain"

    def check(self, spec: ModelSpec, input_shape: tuple[int, ...]) -> None:
        check_mask(self.last_layer, spec, input_shape, "last_layer", "plain")

    def probes(self, env: Env) -> tuple[Probe, ...]:
        return presence_probes(self.last_layer, env)

    def fuse(self, results: Sequence[ClientResult], env: Env) -> tuple[Weights, Metrics]:
        models = [result.weights for result in results]
        fused = averaged(models)
        if self.last_layer == "masked":
            fused = with_masked_output(fused, models, presence(results), env.layers[-1])
        return fused, {}


def check_mask(choice: str, spec: ModelSpec, input_shape: tuple[int, ...], key: str, others: str) -> None:
    """`check_classes` where `choice`, the value of ``aggregator.<key>``, is ``masked``; it could be `others`."""
    if choice == "masked":
        check_classes(spec, input_shape, f"aggregator.{key}", f"set aggregator.{key}={others}")


def check_classes(spec: ModelSpec, input_shape: tuple[int, ...], where: str, do: str) -> None:
    """Refuse a model whose last layer has rows that stand for no class, a generative one's say; `ConfigError` says what to do."""
    classes = dict(spec.kwargs).get("num_classes")
    if classes is None:
        return
    rows, name = _output_rows(spec, input_shape)
    if rows != classes:
        raise ConfigError(
            "an output layer merged class by class needs a row for every class, and the model's has other rows",
            where=where,
            expected=f"{classes} rows in {name}",
            got=f"{rows} rows",
            do=do,
        )


@by_spec
def _output_rows(spec: ModelSpec, input_shape: tuple[int, ...]) -> tuple[int, str]:
    """Rows of the last layer's weight, and its name."""
    name = layers_of(spec, input_shape)[-1].weight
    with torch.device("meta"):
        return len(spec.module().get_parameter(name)), name


def presence_probes(choice: str, env: Env) -> tuple[Probe, ...]:
    """What `presence` asks of the clients where `choice` is ``masked``; nothing else."""
    return (ClassCounts(env.num_classes),) if choice == "masked" else ()


def presence(results: Sequence[ClientResult]) -> Tensor:
    """(models, classes) bool: does the client have more than one sample of the class?"""
    return counts(list(results)) > 1


def averaged(models: Sequence[Weights]) -> Weights:
    """Mean of every parameter and floating buffer; maximum of integer buffers. What is frozen is the first model's, bit by bit.

    At least one model, all of one spec.
    """
    frozen = models[0].frozen

    def mean(values: list[Tensor]) -> Tensor:
        stacked = torch.stack(values)
        return stacked.mean(0) if stacked.is_floating_point() else stacked.amax(0)

    def over(trees: list[Tree]) -> Tree:
        return {k: v if k in frozen else mean([tree[k] for tree in trees]) for k, v in trees[0].items()}

    return Weights(models[0].spec, over([m.params for m in models]), over([m.buffers for m in models]))


def masked_output(rows: Tensor, present: Tensor) -> Tensor:
    """Row c is the mean over the models that know class c, zero where none does.

    Args:
        rows: (models, classes, ...), the last layer's weight or bias of every model.
        present: (models, classes) bool.
    """
    mask = present.to(rows).reshape(*present.shape, *[1] * (rows.dim() - 2))
    return (rows * mask).sum(0) / mask.sum(0).clamp(min=1)


def with_masked_output(fused: Weights, models: Sequence[Weights], present: Tensor, output: Layer) -> Weights:
    """`fused` with the last layer, weight and bias, replaced by the `masked_output` of `models`."""
    names = [name for name in (output.weight, output.bias) if name is not None]
    masked = {name: masked_output(torch.stack([m.params[name] for m in models]), present) for name in names}
    return Weights(fused.spec, {**fused.params, **masked}, fused.buffers)
