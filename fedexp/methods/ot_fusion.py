"""Optimal-transport fusion: models are aligned unit by unit, then averaged.

Reference:
    Singh & Jaggi, Model Fusion via Optimal Transport, NeurIPS 2020.
    https://arxiv.org/abs/1910.05653

Update:
    The hidden units of the cohort's models are moved so that they match. Then the
    models are averaged. More than two models are fused in one of two ways. As in
    MA-Echo (Su et al. 2023), all models are aligned to one reference model. As in NAFI
    (Xiao & Cheng 2023), each model is aligned to the fusion of the models before it.
    Units are compared by weights, or by activations on the server's data
    (``alignment.support``).

Communication:
    Up: models. With ``last_layer=masked`` the class counts, too. Down: the model that
    the client starts from.

State:
    Server: the fused model.

Logged:
    ``ot/moved``: share of the hidden units that changed their position, over all models
    except the reference. The metrics of `fedexp.matching.widths.one_to_one`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedexp.core.build import require
from fedexp.core.env import Env
from fedexp.core.jobs import ClientResult
from fedexp.core.needs import Needs
from fedexp.core.task import Metrics
from fedexp.core.weights import ModelSpec, Weights
from fedexp.matching.alignment import Alignment, align, movable, moved_share
from fedexp.matching.structure import structure_of
from fedexp.matching.widths import one_to_one
from fedexp.methods.bases.fusion import averaged
from fedexp.methods.bases.output_layer import LastLayer, MaskableFusion


@dataclass(frozen=True)
class OTFusion(MaskableFusion):
    """The aggregator of OT fusion, the mean of aligned models.

    Args:
        fold: ``reference``: all models are aligned to a reference model and then
            averaged uniformly. The reference is the first model, or the second if there
            are two. ``running`` and ``uniform``: the fused model F starts as the first
            model, and each further model is aligned to F. With ``running``, F becomes
            the mean of F and this model, so later models have a higher weight (NAFI's
            code). With ``uniform``, F becomes the mean of all models aligned so far
            (uniform weights, as in Singh & Jaggi).
        last_layer: ``plain`` or ``masked``, as in `fedexp.methods.average.Average`.
        alignment: How units are compared and moved.
    """

    computes_in_float64: ClassVar[bool] = True

    fold: Literal["reference", "running", "uniform"] = "reference"
    last_layer: LastLayer = "plain"
    alignment: Alignment = field(default_factory=Alignment)

    def __post_init__(self) -> None:
        if self.last_layer != "masked":
            return
        require(
            self.fold == "reference",
            f"last_layer=masked needs fold=reference, got fold={self.fold}",
        )
        require(
            self.alignment.output == "inputs",
            "last_layer=masked needs alignment.output=inputs: "
            "transported rows belong to other classes",
        )

    @property
    def needs(self) -> Needs:
        if self.alignment.support == "weights":
            return super().needs
        return super().needs | Needs(proxy=True, unseen_proxy=True)

    def check(self, spec: ModelSpec, input_shape: tuple[int, ...]) -> None:
        structure_of(spec, input_shape)
        super().check(spec, input_shape)

    def fuse(self, results: Sequence[ClientResult], env: Env) -> tuple[Weights, Metrics]:
        models = [result.weights for result in results]
        structure = structure_of(env.server_spec, env.input_shape)
        sizes = one_to_one(structure, len(models))

        if self.fold != "reference":
            fused, maps, onto_fused = models[0], [], [models[0]]
            for model in models[1:]:
                maps += align([model], fused, structure, self.alignment, env.proxy)
                onto_fused.append(self.alignment.apply(model, structure, maps[-1]))
                fused = averaged(onto_fused if self.fold == "uniform" else [fused, onto_fused[-1]])
            return fused, {"ot/moved": moved_share(structure, maps), **sizes}

        moved, _, share = aligned(models, env, self.alignment)
        fused = self.with_last_layer(averaged(moved), moved, results, env)
        return fused, {"ot/moved": share, **sizes}


def aligned(
    models: Sequence[Weights], env: Env, options: Alignment
) -> tuple[list[Weights], list[dict[str, Tensor]], float]:
    """Align the hidden units of all models to those of a reference model.

    The reference is the first model, or the second if there are two. Its maps are
    identities. Units of a frozen tensor have no map and do not move
    (`fedexp.matching.alignment.held_groups`).

    Args:
        models: The models.
        env: The environment.
        options: How units are compared and moved.

    Returns:
        The aligned models in the order of `models`, the maps of each model by group of
        hidden units, and the share of units that changed their position. The maps are
        permutations, or transport plans with ``solver=sinkhorn``. The share is over all
        models except the reference.
    """
    structure = structure_of(env.server_spec, env.input_shape)
    target = 1 if len(models) == 2 else 0
    others = [*models[:target], *models[target + 1 :]]
    found = align(others, models[target], structure, options, env.proxy)
    identities = {
        group.name: torch.arange(group.size) for group in movable(structure, models[target])
    }
    moved = [options.apply(model, structure, own) for model, own in zip(others, found, strict=True)]
    return (
        [*moved[:target], models[target], *moved[target:]],
        [*found[:target], identities, *found[target:]],
        moved_share(structure, found),
    )
