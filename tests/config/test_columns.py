"""Tests of the presets of one-shot distillation, except DENSE's.

Their numbers are those of the papers and codes. If these state none, they are FedSyn's.
"""

from __future__ import annotations

from typing import Any

import pytest

from fedexp.config.compose import compose

SGD, ADAM = (f"fedexp.server_training.optimizers.{name}" for name in ("Sgd", "Adam"))
FEDSYNS_STUDENT = {"lr_student": 0.01, "schedule": "constant", "student": {
    "_target_": SGD, "momentum": 0.9, "nesterov": False, "weight_decay": 0, "clip": None,
}}  # fmt: skip
ONCE = {
    "weights": "uniform",
    "student_start": "fedavg",
    "average": "logits",
    "temperature": 1,
    "batch_size": 128,
}
# A one-shot method has no validation data, so it returns the student of the last step.
LAST = {"validate_every": None, "patience": None}

COLUMNS: dict[str, dict[str, Any]] = {
    # The values are those of FedDF's paper. Adam with a clipped gradient is from its
    # code. The cosine schedule of N_max steps ends at 0.
    "feddf_paper": {
        **ONCE, **LAST, "steps": 10_000, "epochs": None, "lr": 1e-3, "schedule": "cosine",
        "optimizer": {"_target_": ADAM, "clip": 5},
    },
    # FedSyn states "same setting". The preset takes this literally and uses FedSyn's
    # student.
    "feddf_matched": {
        **ONCE, **LAST, "steps": None, "epochs": 200, "lr": 0.01, "schedule": "constant",
        "optimizer": {"_target_": SGD, "momentum": 0.9},
    },
    # The amount of training is matched to FedSyn's. `test_defaults` checks the weights
    # of the losses, which depend on the data set.
    "fed_dafl": {
        **FEDSYNS_STUDENT, "T": 200, "iterations": 120, "b": 128, "nz": 256, "ngf": 64, "lr_generator": 1e-3, "tau": 1,
        "generator": {"_target_": ADAM, "clip": None},
    },
    # The amount of training is matched to FedSyn's. Bank and distillation are those of
    # FedSyn.
    "fed_adi": {
        **FEDSYNS_STUDENT, "T": 200, "N_inv": 30, "b": 128, "B": 128, "lr_pixels": 0.1, "w_f": 1, "w_tv": 2.5e-5, "tv": "l2",
        "w_2": 0, "w_c": 1, "shift": 2, "tau": 20, "pixels": {"_target_": ADAM, "betas": [0.9, 0.999]}, "views": "clients",
    },
    "fed_adi_full": {"N_inv": 2000},  # all other values equal those of fed_adi
    # The values are from Co-Boosting's code. There epsilon is 8 / 255, because pixels
    # are in [-1, 1].
    "co_boosting": {
        "T": 200, "T_G": 30, "b": 128, "B": 128, "nz": 256, "lr_generator": 1e-3, "h": 1, "lambda_a": 1, "lambda_bn": 0,
        "tau_a": 3, "mu": 0.01, "mu_decay": 0.99, "epsilon": 4 / 255, "tau_epsilon": 4, "tau": 4,
        "generator": {"_target_": ADAM, "betas": [0.5, 0.999], "clip": 10}, "lr_student": 0.01, "schedule": "cosine",
        "student": {"_target_": SGD, "momentum": 0.9, "weight_decay": 1e-4, "clip": 10}, "views": "clients",
    },
}  # fmt: skip


def leaves(node: Any, above: str = "") -> dict[str, Any]:
    """Return the values of a config by their dotted names."""
    if not isinstance(node, dict) or not node:
        return {above: node}
    return {
        name: v
        for key, value in node.items()
        for name, v in leaves(value, f"{above}.{key}".strip(".")).items()
    }


def differing(*overrides: list[str]) -> dict[str, tuple[Any, Any]]:
    """Return the values that differ between two compositions, by dotted name.

    The overrides themselves are left out.
    """
    one, other = (
        leaves({**config.values, "contents": config.contents}) for config in map(compose, overrides)
    )
    return {
        name: (one.get(name), other.get(name))
        for name in {*one, *other}
        if one.get(name) != other.get(name)
    }


@pytest.mark.parametrize("method", COLUMNS)
def test_profile_equals_the_column_of_the_paper(method: str) -> None:
    config = compose([f"method={method}"])
    found, expected = leaves(config["aggregator"]), leaves(COLUMNS[method])
    assert {name: found[name] for name in expected} == expected
    assert config["method"] == method and config["rounds"] == 1 and config["trace"]["every"] == 1


def test_the_full_inversion_differs_in_its_steps_alone() -> None:
    assert differing(["method=fed_adi"], ["method=fed_adi_full"]) == {
        "method": ("fed_adi", "fed_adi_full"),
        "aggregator.N_inv": (30, 2000),
    }


def test_unequal_networks_train_by_the_printed_step_size_or_by_the_scripts() -> None:
    """DENSE with unequal networks has two presets that differ in the learning rate.

    One uses the printed rate. The other follows the authors' script, which trains all
    clients at the rate of client 0. There are five client networks and one student.
    """
    printed = compose(["experiment=fedsyn/table3", "method=dense"])
    assert printed["local"]["optimizer"] == "sgd" and printed["local"]["momentum"] == 0.9
    assert (printed["local"]["epochs"], printed["local"]["batch_size"], printed["clients"]) == (
        200,
        128,
        5,
    )
    assert printed["architectures"]["clients"] == [
        "resnet18_bn_cifar",
        "cnn1",
        "cnn2",
        "wrn_16_1",
        "wrn_40_1",
    ]
    assert printed["architectures"]["server"] == "resnet18_bn_cifar" and printed["rounds"] == 1
    assert printed["init"] == "different"
    names = ("fedsyn/table3", "fedsyn/table3_authors_hetero_lr")
    assert differing(*([f"experiment={name}", "method=dense"] for name in names)) == {
        "local.lr": (0.01, 0.001)
    }
