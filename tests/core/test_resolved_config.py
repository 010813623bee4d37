"""Tests that a resolved config keeps its stored form and its hash."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedexp.config.compose import compose, resolve_stored
from fedexp.core.errors import ConfigError
from fedexp.core.resolved_config import ResolvedConfig
from fedexp.storage.identity import config_hash

STORED = {
    "rounds": 3,
    "dataset": {"name": "digits"},
    "contents": {"trainer.teacher": "0a"},
    "choices": {"dataset": "digits"},
    "overrides": ["rounds=3"],
}


def test_stored_form_is_read_back_as_written() -> None:
    config = ResolvedConfig.from_stored(STORED)
    assert config.to_stored() == STORED and list(config.to_stored()) == list(STORED)
    assert config.values == {"rounds": 3, "dataset": {"name": "digits"}}
    assert (config["rounds"], config.choices["dataset"]) == (3, "digits")


def test_stored_form_of_an_earlier_version_lacks_facts() -> None:
    config = ResolvedConfig.from_stored({"rounds": 3})
    assert config == ResolvedConfig({"rounds": 3}) and not ResolvedConfig.from_stored({})


def test_with_values_leaves_the_original_and_the_facts() -> None:
    config = ResolvedConfig.from_stored(STORED)
    assert config.with_values(rounds=5).to_stored() == {**STORED, "rounds": 5}
    assert config["rounds"] == 3


def test_value_of_an_environment_variable_is_not_stored(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "s3cr3t").mkdir()
    monkeypatch.setenv("TOKEN", "s3cr3t")
    overrides = [
        f"data_root={tmp_path}/${{oc.env:TOKEN}}",
        "output_root=${data_root}/outputs",
        "logger=wandb",
        "logger.project=${oc.env:TOKEN}",
        "+logger.tags=[plain,'${oc.env:TOKEN}']",
    ]
    config = compose(overrides)
    stored = config.to_stored()
    assert config["data_root"] == f"{tmp_path}/s3cr3t"
    assert stored["data_root"] == f"{tmp_path}/${{oc.env:TOKEN}}"
    assert config["logger"]["tags"] == ["plain", "s3cr3t"]
    assert stored["logger"]["tags"] == ["plain", "${oc.env:TOKEN}"]
    assert "s3cr3t" not in json.dumps(stored)
    assert config_hash(config) == config_hash(compose([]))

    read = resolve_stored(ResolvedConfig.from_stored(stored))
    assert read == config
    moved = read.with_values(output_root="there")
    assert moved.to_stored() == {**stored, "output_root": "there"}
    monkeypatch.delenv("TOKEN")
    with pytest.raises(ConfigError, match="TOKEN"):
        resolve_stored(ResolvedConfig.from_stored(stored))


def test_value_of_fedexps_own_variable_and_of_science_are_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FEDEXP_DATA", "/anywhere")
    monkeypatch.setenv("DTYPE", "float64")
    stored = compose(["dtype=${oc.env:DTYPE}"]).to_stored()
    assert (stored["data_root"], stored["dtype"]) == ("/anywhere", "float64")


def test_config_hash_is_that_of_earlier_versions(monkeypatch) -> None:
    """The hashes are those of stored runs.

    The configs are the defaults, a method with its own data, and a proxy data set.
    """
    monkeypatch.setenv("FEDEXP_DATA", "/anywhere")
    for overrides, expected in (
        ([], "ca0a12f7e76ef1a6aa0c50aaeb0ecc56"),
        (
            ["method=scaffold", "dataset=mnist", "partition.alpha=0.1", "seed=3"],
            "6ff4e71b14c78825197499bd97296076",
        ),
        (
            ["method=feddf", "proxy.dataset=cifar100", "model=lenet"],
            "4762d0fd16eb9f68bbdf1bb2d9b6dbcb",
        ),
    ):
        assert config_hash(compose(overrides)) == expected, overrides
