"""FedMA: layer-wise matching of hidden units, with retraining of the layers above.

Reference:
    Wang, Yurochkin, Sun, Papailiopoulos & Khazaeni, Federated Learning with Matched
    Averaging, ICLR 2020, Algorithm 1, with the constants of the authors' code.
    https://arxiv.org/abs/2002.06440

Update:
    A round is a communication cycle of the paper, one pass of Algorithm 1 over all
    layers. It has several steps. In its first step the clients train the whole model,
    and the server matches the first hidden layer. In each further step every client
    retrains those layers of its local model that are not matched yet. The matched
    layers are frozen. Then the server matches the next layer. In the last step only the
    output layer is trained, and the output layers are merged. With ``retrain=false`` a
    round has one step, in which all layers are matched.

    In later rounds every client trains its part of the fused network. This part has the
    widths of the client's first network. It consists of the units to which the client's
    units were assigned in the last round.

Communication:
    Up: the trained model after every step, and the class counts n_{s,c} (the numbers of
    client s's samples of each class c). Down: the model that the client starts from.

State:
    Server: the fused model and the assignments of the last cohort. Within a round also
    the cohort's models.

Logged:
    ``fusion/width_<layer>`` in the step that matches the layer. At the end of a round
    the metrics of `fedexp.matching.widths.width_metrics`.

Differences from the paper:
    If no client has a class, each of the N clients has the weight 1 / N in the class's
    row of the output layer. In the paper all clients take part in every round. Here a
    client that was not in the last cohort gets the global units that most of the
    cohort's models have. BatchNorm is folded into the layer before it (NAFI, Appendix
    E).

    Fixed widths (``widths=fixed``) are an extension. Assignments are then permutations,
    and all clients get the whole model. Norm layers and layers with shared units
    (ResNet) are permuted with their units.

    Matched units are merged by the posterior mean of the authors' code, with noise
    variance sigma and prior variance sigma_0. In every round it multiplies the mean
    weights of c_k matched units by ``c_k / (c_k + sigma / sigma_0)``. Algorithm 1 has
    the plain mean.

Differences from the authors' code:
    In every layer the prior mean of the bias is 0.1, and that of weights is 0. From the
    second layer on, the code applies the value 0.1 to a weight instead of the bias.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Literal, TypedDict

import torch
from torch import Tensor

from fedexp.core.build import require, require_not_negative, require_positive
from fedexp.core.env import Env
from fedexp.core.errors import ConfigError
from fedexp.core.jobs import ClientJob, ClientResult
from fedexp.core.kernel import overrides
from fedexp.core.local_training import LocalTraining
from fedexp.core.needs import Needs
from fedexp.core.stored_weights import StoredWeights
from fedexp.core.task import Metrics
from fedexp.core.weights import ModelSpec, Weights
from fedexp.matching.beta_bernoulli import BetaBernoulli
from fedexp.matching.embedding import Embedding, units_of
from fedexp.matching.folding import fold_batch_norm, folded_spec
from fedexp.matching.layerwise import PartlyMatched, common_layers
from fedexp.matching.placement import placed
from fedexp.matching.structure import Structure, structure_of, with_widths
from fedexp.matching.tainting import norm_layers
from fedexp.matching.widths import width_metrics
from fedexp.methods.bases.class_counts import ClassCounts, counts
from fedexp.methods.bases.fusion import FusionState, averaged
from fedexp.methods.bases.output_layer import check_classes
from fedexp.methods.pfnm import UnitMatching, class_shares, visiting_orders


class Matching(TypedDict):
    """The cohort of a round, as the state stores it between two steps of the round.

    Args:
        cohort: Clients of the round.
        models: Models of these clients, with the matched layers replaced.
        units: For each matched group of hidden units, the index of the common unit to
            which each unit of each model is assigned, of shape (models, n).
        counted: Number of training samples of each class, of shape (models, classes).
    """

    cohort: list[int]
    models: list[StoredWeights]
    units: dict[str, Tensor]
    counted: Tensor


class FedMAState(FusionState):
    """The state of FedMA.

    Args:
        round: Number of finished rounds.
        cohort: Clients of the last finished round.
        units: For each group of hidden units, the index of the common unit to which
            each unit of each model is assigned, of shape (models, n). The models are
            those of `cohort`.
        stage: Number of finished steps in the round.
        matching: The cohort of the round, or None before its first step.
    """

    round: int
    cohort: list[int]
    units: dict[str, Tensor]
    stage: int
    matching: Matching | None


@dataclass(frozen=True)
class FedMA(UnitMatching):
    """The aggregator of FedMA (layer-wise matched averaging).

    Args:
        widths: Widths of the fused network: ``inferred`` by the matching, or ``fixed``
            (the widths of the local models).
        merge: How models are merged. ``posterior``: matched units become posterior
            means, and rows of the output layer are averaged with weights from the class
            counts. ``mean``: matched units and output layers become plain means.
        fold_batch_norm: Whether BatchNorm is folded into the layer before it. This is
            done once, before the first layer is matched.
        retrain: Whether clients retrain the remaining layers after each matched layer.
            Otherwise all layers are matched at once ("one-shot matching").
        retrain_epochs: Epochs of retraining and of all training in later rounds. It
            requires `retrain`. None: the epochs of the config's local training.
        retrain_lr: Step size of retraining and of all training in later rounds. It
            requires `retrain`. None: ``local.lr``. The step size decays as ``local.lr``
            does.
        output_epochs_factor: Factor of the epochs (or of ``local.steps``) in the step
            that trains only the output layer.
        output_lr_factor: Factor of the step size in the step that trains only the
            output layer.
        output_weight_decay: Weight decay in the step that trains only the output layer.
    """

    gamma: float = 7.0
    widths: Literal["inferred", "fixed"] = "inferred"
    merge: Literal["posterior", "mean"] = "posterior"
    fold_batch_norm: bool = True
    retrain: bool = True
    retrain_epochs: int | None = None
    retrain_lr: float | None = None
    output_epochs_factor: int = 3
    output_lr_factor: float = 0.1
    output_weight_decay: float = 1e-4

    def __post_init__(self) -> None:
        self.matching()
        require_positive(
            self, "retrain_epochs", "retrain_lr", "output_epochs_factor", "output_lr_factor"
        )
        require_not_negative(self, "output_weight_decay")

        for name in ("retrain_epochs", "retrain_lr"):
            require(
                self.retrain or getattr(self, name) is None,
                f"{name} has no effect with retrain=false: set {name}=null, "
                f"and local.{name.removeprefix('retrain_')} for the clients' training",
            )

    def matching(self) -> BetaBernoulli:
        return replace(super().matching(), fixed=self.widths == "fixed")

    @property
    def needs(self) -> Needs:
        return Needs(same_architecture=True, class_counts=True, client_inputs=self.retrain)

    def check(self, spec: ModelSpec, input_shape: tuple[int, ...]) -> None:
        spec = self._matched(spec, input_shape)
        structure = structure_of(spec, input_shape)
        check_classes(
            spec,
            input_shape,
            "model",
            "choose another model, or a method that does not count classes (ot_fusion)",
        )

        if self.widths == "fixed" and not self.retrain:
            return

        norms = norm_layers(spec)
        tied = [group for group in structure.groups if len(group.layers) > 1]
        if norms or tied:
            obstacle = (
                f"'{norms[0]}' is a norm layer"
                if norms
                else f"{' and '.join(tied[0].layers)} share their units"
            )
            raise ConfigError(
                f"layers of this network cannot be matched one after the other: {obstacle}",
                where="model",
                expected="no norms except BatchNorm, which aggregator.fold_batch_norm=true folds, "
                "and no residual sums",
                got=spec.arch,
                do="set aggregator.fold_batch_norm=true"
                if norms and not self.fold_batch_norm
                else "choose another model, or set aggregator.widths=fixed "
                "aggregator.retrain=false aggregator.fold_batch_norm=false",
            )

        if self.widths == "inferred" and structure.groups:
            with_widths(spec, input_shape, {})

    def _matched(self, spec: ModelSpec, input_shape: tuple[int, ...]) -> ModelSpec:
        """Return the architecture that is matched.

        If `fold_batch_norm` is set, its BatchNorm layers are folded.
        """
        return folded_spec(spec, input_shape) if self.fold_batch_norm else spec

    def init(self, env: Env) -> FedMAState:
        keeps = overrides(env.trainer, "init_state") or overrides(env.trainer, "finish")
        if keeps and (self.retrain or self.widths == "inferred"):
            raise ConfigError(
                "the trainer stores a state at the clients or sends more than the model, "
                "and networks change between steps",
                where="trainer",
                got=type(env.trainer).__name__,
                do="set trainer=sgd, or aggregator.widths=fixed aggregator.retrain=false",
            )

        return {
            **super().init(env),
            "round": 0,
            "cohort": [],
            "units": {},
            "stage": 0,
            "matching": None,
        }

    def position(self, state: FedMAState, step: int) -> tuple[int, int]:
        return state["round"], state["stage"]

    def plan(self, state: FedMAState, env: Env) -> list[ClientJob]:
        matching = state["matching"]
        return self._training(state, env) if matching is None else self._retraining(matching, env)

    def _training(self, state: FedMAState, env: Env) -> list[ClientJob]:
        """Return the jobs of a round's first step, which trains whole models."""
        local_training = self._local_training(env) if self.retrain and env.round else None
        cohort = env.sample()
        return [
            env.job(
                client,
                start,
                {},
                probes=(ClassCounts(env.num_classes),),
                local_training=local_training,
            )
            for client, start in zip(cohort, self._starts(state, cohort, env), strict=True)
        ]

    def _starts(self, state: FedMAState, cohort: Sequence[int], env: Env) -> list[Weights]:
        fused: Weights = state["weights"]
        if env.first and env.init == "different":
            return [env.initial_weights(client) for client in cohort]
        if self.widths == "fixed" or not state["units"]:
            return [fused for _ in cohort]
        small = structure_of(self._matched(env.server_spec, env.input_shape), env.input_shape)
        large = structure_of(fused.spec, env.input_shape)
        return [
            Embedding(small, large, units_of(client, state["units"], state["cohort"])).cut_out(
                fused
            )
            for client in cohort
        ]

    def _retraining(self, matching: Matching, env: Env) -> list[ClientJob]:
        """Return the jobs that retrain the layers after the matched ones.

        Each client starts from its own model, in which the matched layers are replaced.
        """
        models = [stored.load() for stored in matching["models"]]
        structure = structure_of(models[0].spec, env.input_shape)
        common = common_layers(structure, set(matching["units"]))
        frozen = frozenset(
            name for layer in common for name in (layer.weight, layer.bias) if name is not None
        )
        local_training = self._local_training(
            env, only_output_layer=len(common) == len(structure.layers) - 1
        )

        return [
            env.job(client, model, {}, frozen=frozen, local_training=local_training)
            for client, model in zip(matching["cohort"], models, strict=True)
        ]

    def _local_training(self, env: Env, only_output_layer: bool = False) -> LocalTraining:
        """Return the local training of retraining steps and of later rounds."""
        local_training = env.local_training
        if self.retrain_lr is not None:
            local_training = replace(local_training, lr=self.retrain_lr)

        local_training = local_training.at_round(env.round, env.rounds)
        if self.retrain_epochs is not None:
            local_training = replace(local_training, epochs=self.retrain_epochs, steps=None)
        if not only_output_layer:
            return local_training

        return replace(
            local_training,
            epochs=None
            if local_training.epochs is None
            else local_training.epochs * self.output_epochs_factor,
            steps=None
            if local_training.steps is None
            else local_training.steps * self.output_epochs_factor,
            lr=local_training.lr * self.output_lr_factor,
            weight_decay=self.output_weight_decay,
        )

    def update(
        self, state: FedMAState, results: Iterable[ClientResult], env: Env
    ) -> tuple[FedMAState, Metrics]:
        arrived = list(results)
        ended: FedMAState = {**state, "round": state["round"] + 1, "stage": 0, "matching": None}
        # If every client was skipped, the round changes nothing
        if not arrived:
            return ended, {"clients": 0}

        cohort = [result.client for result in arrived]
        matched, counted = self._received(state["matching"], arrived, env)
        groups = len(structure_of(matched.models[0].spec, env.input_shape).groups)
        done = len(matched.units)
        again = self.retrain and done < groups
        options = self.matching()

        for number in range(done, done + 1 if again else groups):
            orders = visiting_orders(env, number, self.sweeps, len(arrived))
            matched = matched.match_next(env.input_shape, options, orders)

        matched = matched.laid_out(
            env.input_shape, replace(options, sigma0=inf) if self.merge == "mean" else options
        )
        structure = structure_of(matched.models[0].spec, env.input_shape)
        widths = [group.size for group in structure.groups]

        if again:
            matching = Matching(
                cohort=cohort,
                models=[env.store(model.to(env.device)) for model in matched.models],
                units=dict(matched.units),
                counted=counted,
            )
            metrics = {"clients": len(arrived), f"fusion/width_{done + 1}": float(widths[done])}
            return {**state, "stage": state["stage"] + 1, "matching": matching}, metrics

        shares = class_shares(counted if self.merge == "posterior" else torch.ones_like(counted))
        fused = _fused(matched.models, structure, shares).to(env.device)
        metrics = {"clients": len(arrived), **width_metrics(list(matched.units.values()), widths)}
        return {**ended, "weights": fused, "cohort": cohort, "units": dict(matched.units)}, metrics

    def _received(
        self, matching: Matching | None, arrived: list[ClientResult], env: Env
    ) -> tuple[PartlyMatched, Tensor]:
        """Return the trained models and the clients' class counts.

        Returns:
            The partly matched models, and each client's numbers of samples per class,
            of shape (models, classes).
        """
        if matching is not None:
            rows = [matching["cohort"].index(result.client) for result in arrived]
            units = {name: each[rows] for name, each in matching["units"].items()}
            models = placed([result.weights for result in arrived])
            return PartlyMatched(models, units), matching["counted"][rows]
        models = placed([result.weights for result in arrived])
        if self.fold_batch_norm:
            models = [fold_batch_norm(model, env.input_shape) for model in models]
        return PartlyMatched(models, {}), counts(arrived)


def _fused(models: Sequence[Weights], structure: Structure, shares: Tensor) -> Weights:
    """Merge models that agree on all hidden layers into one model.

    Tensors that belong to no layer are averaged, except frozen ones.

    Args:
        models: The models.
        structure: The common structure of the models.
        shares: Weight of each model in each row of the output layer, of shape (models,
            output rows), float64.
    """
    first = models[0]
    *hidden, output = structure.layers
    merged = {
        name: first.params[name]
        for layer in hidden
        for name in (layer.weight, layer.bias)
        if name is not None
    }

    for name in (output.weight, output.bias):
        if name is not None and name not in first.frozen:
            value = torch.stack([model.params[name].double() for model in models])
            share = shares.to(value.device).reshape(*shares.shape, *[1] * (value.dim() - 2))
            merged[name] = (share * value).sum(0).to(first.params[name])

    mean = averaged(models)
    return Weights(first.spec, {**mean.params, **merged}, mean.buffers)
