"""Tests that the needs of plug-ins are checked before any data is loaded.

They are checked against each other and against the config.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from fedexp.config.compose import compose
from fedexp.core.errors import ConfigError
from fedexp.core.layers import check_head
from fedexp.core.needs import SAME_INIT, SGD, Demand, Needs
from fedexp.core.weights import ModelSpec
from fedexp.data.federated import Proxy
from fedexp.methods import fedadam, fedexp
from fedexp.methods.fedavg import Mean, PlainServerStep, PlainTrainer
from fedexp.methods.fedyogi import FedYogi
from fedexp.models.mlp import MLP
from fedexp.running.experiment import Experiment
from fedexp.running.needs import check_needs
from fedexp.running.remarks import remarks

FEDDYN = "fedexp.methods.feddyn"
TRAINER = "trainer=feddyn"
SERVER = ("server_optimizer=feddyn",)
HERE = "tests.running.test_needs"


@dataclass(frozen=True)
class Asking(Mean):
    """An aggregator that needs a certain server optimizer."""

    @property
    def needs(self) -> Needs:
        return Needs((Demand("server_optimizer", fedadam.FedAdam, "adapts its steps"),))


@dataclass(frozen=True)
class Sampled(PlainTrainer):
    @property
    def needs(self) -> Needs:
        return Needs((Demand("aggregator.weights", "samples", "counts samples"),))


@dataclass(frozen=True)
class OnFeatures(PlainTrainer):
    """A trainer that needs a network with a head."""

    def check(self, spec: ModelSpec, input_shape: tuple[int, ...]) -> None:
        check_head(spec, input_shape)


class Bounded(MLP):
    """A network whose output differs from the output of its last layer."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x))


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        Experiment.of(compose([*overrides]))
    return str(error.value)


def test_a_trainer_refuses_a_model_that_it_cannot_train() -> None:
    trainer = f"trainer._target_={HERE}.OnFeatures"
    Experiment.of(compose([trainer]))
    assert "not that of 'output' alone" in refused(trainer, f"model._target_={HERE}.Bounded")


def test_a_trainer_and_its_server_optimizer_go_together() -> None:
    Experiment.of(compose([TRAINER, *SERVER, "aggregator.weights=uniform"]))
    assert "FedDynServer corrects the drift" in refused(*SERVER, "aggregator.weights=uniform")
    # FedAdam, which `Asking` demands, demands no other plug-in.
    asking = f"aggregator._target_={HERE}.Asking"
    Experiment.of(compose(["server_optimizer=fedadam", asking]))
    Experiment.of(compose(["server_optimizer=fedadam"]))


def test_a_trainer_without_its_server_optimizer_is_refused() -> None:
    said = refused(TRAINER, "aggregator.weights=uniform")
    for words in (
        "trainer FedDyn needs the server",
        "fedexp.methods.fedavg.PlainServerStep",
        f"{FEDDYN}.FedDynServer",
        "set server_optimizer=feddyn",
    ):
        assert words in said


def test_server_optimizer_without_its_aggregation_rule_is_refused() -> None:
    said = refused(TRAINER, *SERVER)
    assert (
        "server optimizer FedDynServer gives every client the same weight" in said
        and "set aggregator.weights=uniform" in said
    )
    assert "set another aggregator" in refused("method=local", *SERVER)


@pytest.mark.parametrize("rule", ["fednova", "krum", "median", "trimmed_mean", "normalized_mean"])
def test_feddyn_is_refused_with_an_aggregator_that_is_no_plain_mean(rule: str) -> None:
    """FedDyn's correction is the sum of the clients' updates, which other rules change."""
    said = refused("method=feddyn", f"aggregator={rule}", "aggregator.weights=uniform")
    assert "server optimizer FedDynServer needs the plain mean of the clients' updates" in said
    assert "set aggregator=mean" in said


def test_two_plugins_that_want_different_things_are_refused_by_name() -> None:
    said = refused(
        TRAINER, *SERVER, f"aggregator._target_={HERE}.Asking", "aggregator.weights=uniform"
    )
    for words in (
        "trainer FedDyn and aggregator Asking exclude each other",
        "needs the server that corrects its drift",
        "adapts its steps",
        f"{FEDDYN}.FedDynServer and fedexp.methods.fedadam.FedAdam",
        "set another trainer or another aggregator",
    ):
        assert words in said
    said = refused(f"trainer._target_={HERE}.Sampled", *SERVER)
    assert "trainer Sampled and server optimizer FedDynServer exclude each other" in said
    assert "samples and uniform" in said


def checked(*needs: Needs, server_optimizer=None, proxy=None, validation=False, **config) -> None:
    """Check three plug-ins with the given needs, which are empty by default."""
    kinds = [PlainTrainer, Mean, type(server_optimizer or PlainServerStep())]
    plugins = []
    for number, kind in enumerate(kinds):
        wanted = needs[number] if number < len(needs) else Needs()
        plugins.append(
            type(kind.__name__, (kind,), {"needs": property(lambda self, wanted=wanted: wanted)})()
        )
    base = Experiment.of(compose([]))
    check_needs(
        replace(base.config, **config),
        *plugins,
        proxy=proxy or Proxy(),
        validation=validation,
        specs=base.specs,
        task=base.task,
        dataset=base.dataset,
        images=True,
    )


def test_needs_that_agree_unite() -> None:
    derived, base = (
        Demand("server_optimizer", kind, "adapts") for kind in (FedYogi, fedadam.FedAdam)
    )
    checked(Needs((SGD,)), Needs((SGD, SAME_INIT)), Needs((SGD,)))
    checked(Needs((derived,)), Needs((base,)), server_optimizer=FedYogi())
    with pytest.raises(ConfigError, match="adapts"):
        checked(Needs((derived,)), Needs((base,)), server_optimizer=fedadam.FedAdam())
    with pytest.raises(ConfigError, match="exclude each other"):
        checked(
            Needs((derived,)), Needs((Demand("server_optimizer", fedexp.FedExP, "extrapolates"),))
        )


def test_plugin_without_the_data_it_needs_is_refused() -> None:
    for number, name in enumerate(
        ("trainer PlainTrainer", "aggregator Mean", "server optimizer PlainServerStep")
    ):

        def only(needs: Needs, number: int = number) -> list[Needs]:
            return [Needs()] * number + [needs]

        for needs in (Needs(proxy=True), Needs(proxy_labels=True)):
            with pytest.raises(ConfigError, match=f"{name} needs server data"):
                checked(*only(needs))
        unlabelled = Proxy(source="train", size=0.1, labelled=False)
        checked(*only(Needs(proxy=True)), proxy=unlabelled)
        with pytest.raises(ConfigError, match=f"{name} needs labelled server data"):
            checked(*only(Needs(proxy_labels=True)), proxy=unlabelled)
        with pytest.raises(ConfigError, match=f"{name} needs a validation share"):
            checked(*only(Needs(validation=True)))
        checked(*only(Needs(validation=True)), validation=True)


def test_samples_held_out_before_the_split_are_validation_samples() -> None:
    held = Experiment.of(compose(["eval.held_out=10", "headline.rule=best_on_val"]))
    assert held.metric_names[-2:] == ["val/global/acc", "val/global/loss"] and held.has_validation
    with pytest.raises(
        ConfigError, match="held out before the split, and also from the clients' own"
    ):
        Experiment.of(compose(["eval.held_out=10", "partition.val_fraction=0.1"]))


def test_numbers_of_local_steps_are_not_in_a_folder_of_models() -> None:
    stored = Experiment.of(compose([])).config.client_models
    checked(Needs(), Needs(local_steps=True))
    given = replace(stored, path="somewhere")
    with pytest.raises(
        ConfigError, match="aggregator Mean uses the clients' numbers of local steps"
    ) as error:
        checked(Needs(), Needs(local_steps=True), client_models=given)
    assert error.value.facts["to do"].startswith("set aggregator=mean, or")
    with pytest.raises(ConfigError, match="trainer PlainTrainer uses the clients'") as error:
        checked(Needs(local_steps=True), client_models=given)
    assert error.value.facts["to do"].startswith("set trainer=sgd, or")


def test_what_has_no_effect_or_another_one_is_said() -> None:
    def said(*overrides: str, given: bool = False) -> list[str]:
        experiment = Experiment.of(compose([*overrides]))
        return [*remarks(replace(experiment, stored_models=object()) if given else experiment)]  # type: ignore[arg-type]

    assert said("trainer=fedprox") == said(given=True) == said("clients_per_round=0.1") == []
    (one,) = said("trainer=fedprox", "rounds=1", given=True)
    assert "trainer FedProx and its keys take effect nowhere" in one
    (more,) = said("trainer=fedprox", given=True)
    assert "from the second round on" in more
    (few,) = said("clients_per_round=0.04")
    assert (
        few == "clients_per_round=0.04 of 10 clients is less than one client: one client takes "
        "part in every round"
    )
    assert Experiment.of(compose(["clients_per_round=0.04"])).extent.sampling.m == 1
    assert "drawn again until" in said("clients_per_round=0.04", "sampling=bernoulli")[0]


def test_hints_name_what_the_plugin_says() -> None:
    said = refused("method=scaffold", "local.momentum=0.9")
    assert (
        "set local.momentum=0, or trainer.correction=step, which corrects outside the buffer"
        in said
    )
    assert "trainer Scaffold corrects the gradient itself" in said


def test_limits_that_the_partition_ignores_are_named() -> None:
    def said(*overrides: str) -> list[str]:
        return [*remarks(Experiment.of(compose([*overrides])))]

    limits = ["limit.train=100", "limit.clients=4"]
    groups = ["partition=pathological", *limits]
    assert said(*groups) == [
        "limit.clients is ignored: partition pathological cannot be made for fewer clients",
        "limit.train is ignored: partition pathological cannot be made for fewer samples",
    ]
    assert said(*limits) == said(*groups, "debug=smoke") == []
    assert said("partition=pathological", "limit.clients=10", "limit.test=9") == []
