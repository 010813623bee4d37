"""The merge of the clients' output layers, class by class.

Row c of the merged layer is the mean of the rows c of those clients that have more than
one sample of class c.

Reference:
    Su, Li, Xue, One-shot Federated Learning without server-side training, Neural
    Networks 2023 (MA-Echo).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedexp.core.env import Env
from fedexp.core.errors import ConfigError
from fedexp.core.jobs import ClientResult
from fedexp.core.layers import Layer, layers_of
from fedexp.core.needs import Needs
from fedexp.core.probe import Probe
from fedexp.core.weights import ModelSpec, Weights, by_spec
from fedexp.methods.bases.class_counts import ClassCounts, counts
from fedexp.methods.bases.fusion import FusionAggregator

LastLayer = Literal["plain", "masked"]


@dataclass(frozen=True)
class MaskableFusion(FusionAggregator):
    """The base of fusions that can merge the output layer class by class.

    Args:
        last_layer: How the last layer is merged. With ``masked``, row c is the mean
            over the clients with more than one sample of class c. The row is zero if
            there is no such client. The derived class defines the other values.
    """

    last_layer: Literal["masked", "plain", "projected"]

    # Values that an error message suggests instead of ``masked``
    unmasked: ClassVar[str] = "plain"

    @property
    def needs(self) -> Needs:
        return super().needs | Needs(class_counts=self.last_layer == "masked")

    def check(self, spec: ModelSpec, input_shape: tuple[int, ...]) -> None:
        check_mask(self.last_layer, spec, input_shape, "last_layer", self.unmasked)

    def probes(self, env: Env) -> tuple[Probe, ...]:
        return presence_probes(self.last_layer, env)

    def with_last_layer(
        self,
        fused: Weights,
        models: Sequence[Weights],
        results: Sequence[ClientResult],
        env: Env,
    ) -> Weights:
        """Return `fused`, with its last layer replaced if ``last_layer`` is ``masked``.

        Args:
            fused: The fused model.
            models: The models whose last layers `with_masked_output` merges.
            results: Results of the clients, with the class counts.
            env: The environment.
        """
        if self.last_layer != "masked":
            return fused
        return with_masked_output(fused, models, presence(results), env.layers[-1])


def check_mask(
    choice: str, spec: ModelSpec, input_shape: tuple[int, ...], key: str, others: str
) -> None:
    """Call `check_classes` if ``aggregator.<key>`` has the value ``masked``.

    Args:
        choice: Value of the key.
        spec: Architecture of the model.
        input_shape: Shape of one sample.
        key: Name of the key.
        others: Values that the message suggests instead.
    """
    if choice == "masked":
        check_classes(spec, input_shape, f"aggregator.{key}", f"set aggregator.{key}={others}")


def check_classes(spec: ModelSpec, input_shape: tuple[int, ...], where: str, do: str) -> None:
    """Refuse a model whose last layer does not have one row per class.

    A generative model is refused, for example. A model without an argument
    ``num_classes`` is not checked.

    Args:
        spec: Architecture of the model.
        input_shape: Shape of one sample.
        where: Config key that the message names.
        do: Advice that the message gives.

    Raises:
        ConfigError: The last layer does not have one row per class.
    """
    classes = dict(spec.kwargs).get("num_classes")
    if classes is None:
        return

    rows, name = _output_rows(spec, input_shape)
    if rows != classes:
        raise ConfigError(
            "an output layer that is merged class by class needs one row per class, "
            "and the model has other rows",
            where=where,
            expected=f"{classes} rows in {name}",
            got=f"{rows} rows",
            do=do,
        )


@by_spec
def _output_rows(spec: ModelSpec, input_shape: tuple[int, ...]) -> tuple[int, str]:
    """Return the number of rows of the last layer's weight, and its name."""
    name = layers_of(spec, input_shape)[-1].weight
    return len(spec.module_without_values().get_parameter(name)), name


def presence_probes(choice: str, env: Env) -> tuple[Probe, ...]:
    """Return the probes that `presence` needs.

    If `choice` is not ``masked``, no probe is needed.
    """
    return (ClassCounts(env.num_classes),) if choice == "masked" else ()


def presence(results: Sequence[ClientResult]) -> Tensor:
    """Return whether each client has more than one sample of each class.

    Returns:
        Booleans of shape (models, classes).
    """
    return counts(list(results)) > 1


def masked_output(rows: Tensor, present: Tensor) -> Tensor:
    """Average each row c over the models whose clients have class c.

    The row is zero if no client has class c.

    Args:
        rows: The last layer's weight or bias of every model, of shape (models, classes,
            ...).
        present: Whether each client has each class, from `presence`. Booleans of shape
            (models, classes).
    """
    mask = present.to(rows).reshape(*present.shape, *[1] * (rows.dim() - 2))
    return (rows * mask).sum(0) / mask.sum(0).clamp(min=1)


def with_masked_output(
    fused: Weights, models: Sequence[Weights], present: Tensor, output: Layer
) -> Weights:
    """Return `fused` with another last layer, the `masked_output` of `models`.

    Both weight and bias of the layer are replaced, unless they are frozen.
    """
    masked = {
        name: masked_output(torch.stack([m.params[name] for m in models]), present)
        for name in (output.weight, output.bias)
        if name is not None and name not in fused.frozen
    }
    return Weights(fused.spec, {**fused.params, **masked}, fused.buffers)
