"""Git Re-Basin: the mean of models whose hidden units are permuted to match.

Reference:
    Ainsworth, Hayase & Srinivasa, Git Re-Basin: Merging Models modulo Permutation
    Symmetries, ICLR 2023, weight matching (Algorithm 1, and Algorithm 3 for more than
    two models).
    https://arxiv.org/abs/2209.04836

Update:
    Hidden units are permuted so that the weights of the cohort's models are as close as
    possible. The permuted models are averaged.

Communication:
    Up: models. Down: the model that the client starts from.

State:
    Server: the fused model.

Logged:
    ``git_rebasin/moved``: share of the hidden units that changed their position, over
    all models except the first. ``git_rebasin/sweeps``: number of sweeps over all
    groups of units, summed over all searches. The metrics of
    `fedexp.matching.widths.one_to_one`.

Differences from the paper:
    Two models are averaged with weight 1/2 each. The paper interpolates between the two
    models. With more than two models, the units of the fused network have the order of
    the first model's units. This order does not change the network's outputs. In
    networks with norm layers or residual sums, units of several layers are permuted
    together, in the groups that `fedexp.matching.structure` finds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from fedexp.core.env import Env
from fedexp.core.jobs import ClientResult
from fedexp.core.task import Metrics
from fedexp.core.weights import ModelSpec, Weights
from fedexp.matching.alignment import movable, moved_share
from fedexp.matching.structure import structure_of
from fedexp.matching.unit_graphs import check_equal
from fedexp.matching.weight_matching import WeightMatching, match_many, match_pair
from fedexp.matching.widths import one_to_one
from fedexp.methods.bases.fusion import FusionAggregator, averaged


@dataclass(frozen=True)
class GitRebasin(FusionAggregator):
    """The aggregator of Git Re-Basin, the mean of matched models.

    If there are two models, the second model's units are permuted to match the first.

    Args:
        matching: Conditions that end the search, and the number of searches.
    """

    computes_in_float64: ClassVar[bool] = True

    matching: WeightMatching = field(default_factory=WeightMatching)

    def check(self, spec: ModelSpec, input_shape: tuple[int, ...]) -> None:
        structure_of(spec, input_shape)

    def fuse(self, results: Sequence[ClientResult], env: Env) -> tuple[Weights, Metrics]:
        models = [result.weights for result in results]
        check_equal(models)
        structure = structure_of(env.server_spec, env.input_shape)
        groups = movable(structure, models[0])
        names = (env.seed, "weight matching", env.round)

        if len(models) == 2:
            found = match_pair(
                models[1].params, models[0].params, structure, groups, self.matching, *names
            )
            moved = [models[0], structure.permute_weights(models[1], found.maps[0])]
        else:
            found = match_many(
                [model.params for model in models], structure, groups, self.matching, *names
            )
            moved = [
                structure.permute_weights(m, own) for m, own in zip(models, found.maps, strict=True)
            ]

        others = found.maps if len(models) == 2 else found.maps[1:]
        return averaged(moved), {
            "git_rebasin/moved": moved_share(structure, others),
            "git_rebasin/sweeps": found.sweeps,
            **one_to_one(structure, len(models)),
        }
