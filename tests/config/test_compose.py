"""Tests that compositions with shared groups equal Hydra's results and errors."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra import compose as hydra_compose

from fedexp.config.compose import compose, resolve
from fedexp.config.hydra_composition import use_hydra
from fedexp.core.errors import ConfigError
from fedexp.core.resolved_config import ResolvedConfig


def by_hydra(overrides: list[str]) -> ResolvedConfig:
    """Compose all overrides with Hydra at once."""
    with use_hydra(overrides):
        choices = hydra_compose(
            "config", overrides=overrides, return_hydra_config=True
        ).hydra.runtime.choices
        return resolve(hydra_compose("config", overrides=overrides), choices, overrides)


@pytest.mark.parametrize("overrides", [
    ["method=local", "clients=5", "partition.alpha=0.1", "seed=3"],
    ["experiment=demo/digits", "method=fedprox", "local.lr=1.e-2"],
    ["+engine.note=1", "logger=wandb", "model.hidden=[3,4]", "local={lr: 3}"],
    ["dataset=mnist", "~partition.alpha", "seed_data=3"],
    ["clients=3", "++partition.alpha=7", "++clients=4", "clients=5"],
    ["model.hidden=[4]", "model={hidden: [3]}", "~model.bias", "+model.bias=false"],
    ["local.betas=[0.1,0.2]", "+local.betas=[0.3,0.4]", "hydra.job.chdir=true"],
])  # fmt: skip
def test_shared_compositions_are_hydras(overrides: list[str]) -> None:
    expected = by_hydra(overrides)
    for later in ([], ["seed=9", "model.hidden=[1]"]):  # calls do not affect each other
        compose([*overrides[:1], *later])
        assert compose(overrides) == compose(overrides) == expected
        assert compose([*overrides, *later]) == by_hydra([*overrides, *later])


@pytest.mark.parametrize("overrides", [
    ["sed=1"], ["method=lcal"], ["local.batchsize=1"], ["rounds=[1"], ["seed=0,1"], ["+seed=1"], ["~sed"], ["~seed=7"],
    ["seed=1", "~seed", "seed=2"], ["++method=local"], ["trainer.mu@x=3"], ["seed.x=1"],
])  # fmt: skip
def test_what_hydra_refuses_is_refused_in_the_same_words(overrides: list[str]) -> None:
    texts = []
    for function in (by_hydra, compose, compose):
        with pytest.raises(ConfigError) as error:
            function(overrides)
        texts.append(str(error.value))
    assert len(set(texts)) == 1


@pytest.mark.parametrize(
    "text", ["defaults:\n  - override /dataset: mnist\n", "dataset:\n  mean: [0.5]\n"]
)
def test_a_method_says_nothing_of_the_data(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data sets are composed after methods, and an experiment's file may set them."""
    monkeypatch.chdir(tmp_path)
    for group in ("method", "experiment"):
        Path(f"conf/{group}").mkdir(parents=True)
    Path("conf/method/mine.yaml").write_text(f"# @package _global_\n{text}method: mine\n")
    with pytest.raises(ConfigError, match="cannot set keys of the data set") as refused:
        compose(["method=mine"])
    assert "conf/experiment/mine.yaml" in str(refused.value)
    Path("conf/method/mine.yaml").write_text("# @package _global_\nmethod: mine\n")
    moved = text if "defaults" in text else f"defaults:\n  - override /method: mine\n{text}"
    Path("conf/experiment/mine.yaml").write_text(f"# @package _global_\n{moved}")
    config = compose(["experiment=mine"])
    assert config["dataset"]["mean"] == [0.5] or config.choices["dataset"] == "mnist"


def test_a_changed_file_of_the_users_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    here, there = Path("conf/debug"), tmp_path / "elsewhere" / "debug"
    for folder, search in ((here, []), (there, [f"hydra.searchpath=[file://{there.parent}]"])):
        folder.mkdir(parents=True)
        for rounds in (3, 4):
            (folder / f"{folder.parent.name}.yaml").write_text(
                f"# @package _global_\nrounds: {rounds}\n"
            )
            assert compose([*search, f"debug={folder.parent.name}"])["rounds"] == rounds
    monkeypatch.chdir(there)
    with pytest.raises(ConfigError, match="unknown debug 'conf'"):
        compose(["debug=conf"])
