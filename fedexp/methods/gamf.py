"""GAMF: joint matching of all models by graduated assignment, then the mean.

Reference:
    Liu, Lou, Wang, Xi, Shen & Yan, Deep Neural Network Fusion via Graph Matching with
    Applications to Model Ensemble and Federated Learning, ICML 2022, with the schedules
    of the authors' code.
    https://proceedings.mlr.press/v162/liu22k.html

Update:
    Hidden units are permuted so that they match across models. The joint mode assigns
    the units of all models to common units. The pairwise mode assigns the units of each
    model to those of the first model. The permuted models are averaged with equal
    weights.

    The library pygmtools is not used, because its graduated assignment for many graphs
    (`gamgm`) differs in three points:

    - `gamgm` takes fixed inputs: one affinity matrix per pair of graphs and one
      adjacency matrix per graph. Here a layer's affinities are recomputed in every
      sweep, from weights whose units are permuted by the current assignments of the
      neighbouring layers.
    - `gamgm` runs equally many Sinkhorn iterations at every temperature, and lowers the
      temperature only when the assignments hardly change.
    - `gamgm` does not accept the constants of the authors' code.

    The `sinkhorn` of pygmtools equals `fedexp.matching.doubly_stochastic` without the
    early stop. Its `hungarian` is scipy's solver, which is also used here.

Communication:
    Up: models. Down: the model that the client starts from.

State:
    Server: the fused model.

Logged:
    ``gamf/moved``: share of the hidden units that changed their position, over all
    models except the first. ``gamf/sweeps``: number of sweeps of the joint mode.
    The metrics of `fedexp.matching.widths.one_to_one`.

Differences from the paper:
    The units of the fused network have the order of the first model's units. This order
    does not change the network's outputs. Networks with biases, norm layers and
    residual sums are supported, see `fedexp.matching.graduated_assignment`. In rounds
    after the first, the joint mode starts from the identity and takes fewer sweeps.
    Sinkhorn's iterations may end early (`early_stop`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from fedexp.core.build import require, require_positive
from fedexp.core.env import Env
from fedexp.core.jobs import ClientResult
from fedexp.core.task import Metrics
from fedexp.core.weights import ModelSpec, Weights
from fedexp.matching.alignment import movable, moved_share
from fedexp.matching.graduated_assignment import (
    Joint,
    Pairwise,
    identities,
    match_jointly,
    match_pairwise,
    random_start,
)
from fedexp.matching.placement import placed
from fedexp.matching.structure import structure_of
from fedexp.matching.widths import one_to_one
from fedexp.methods.bases.fusion import FusionAggregator, averaged


@dataclass(frozen=True)
class GAMF(FusionAggregator):
    """The aggregator of GAMF, the mean of matched models.

    Args:
        mode: ``joint`` (the units of all models are assigned to common units) or
            ``pairwise`` (the units of each model are assigned to those of the first
            model, by soft assignments).
        start: Assignments with which the joint mode starts in the first round:
            ``random`` or ``identity``. Later rounds start from the identity.
        later_sweeps: Largest number of sweeps of the joint mode in rounds after the
            first.
        early_stop: Tolerance of Sinkhorn's iterations. They end early once every row
            sum differs from one by at most this number. None: they never end early.
        joint: Schedule of the joint mode.
        pairwise: Schedule of the pairwise mode.
    """

    computes_in_float64: ClassVar[bool] = True

    mode: Literal["joint", "pairwise"] = "joint"
    start: Literal["random", "identity"] = "random"
    later_sweeps: int = 200
    early_stop: float | None = 1.0e-9
    joint: Joint = field(default_factory=Joint)
    pairwise: Pairwise = field(default_factory=Pairwise)

    def __post_init__(self) -> None:
        require_positive(self, "early_stop")
        least = self.joint.final
        require(
            self.later_sweeps > least,
            f"later_sweeps must exceed joint.final={least}, got {self.later_sweeps}",
        )

    def check(self, spec: ModelSpec, input_shape: tuple[int, ...]) -> None:
        structure_of(spec, input_shape)

    def fuse(self, results: Sequence[ClientResult], env: Env) -> tuple[Weights, Metrics]:
        models = placed([result.weights for result in results])
        structure = structure_of(env.server_spec, env.input_shape)
        groups = movable(structure, models[0])
        names = (env.seed, "graduated assignment", env.round)
        metrics: Metrics = {}

        if self.mode == "joint":
            options, count = self.joint, len(models)
            device = next(iter(models[0].params.values())).device
            if env.first and self.start == "random":
                start = random_start(groups, count, options.noise, device, *names)
            else:
                start = identities(groups, count, device)
            if not env.first:
                options = replace(options, sweeps=min(options.sweeps, self.later_sweeps))
            maps, sweeps = match_jointly(models, structure, groups, options, self.early_stop, start)
            metrics["gamf/sweeps"] = sweeps
        else:
            maps = [{}] + [
                match_pairwise(
                    model,
                    models[0],
                    structure,
                    groups,
                    self.pairwise,
                    self.early_stop,
                    *names,
                    number,
                )
                for number, model in enumerate(models[1:], start=1)
            ]

        moved = [
            structure.permute_weights(model, own) for model, own in zip(models, maps, strict=True)
        ]
        return averaged(moved).to(env.device), {
            **metrics,
            "gamf/moved": moved_share(structure, maps[1:]),
            **one_to_one(structure, len(models)),
        }
