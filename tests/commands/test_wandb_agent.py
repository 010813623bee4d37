"""Tests of commands as ``wandb agent`` issues them, and of the name of a group.

There is no server.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

from fedexp.commands.run import run_command
from fedexp.commands.wandb_agent import without_dashes
from fedexp.config.compose import compose
from fedexp.config.sweep_expansion import sweep_title

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "wandb.md"
TINY = ["rounds=1", "clients=2", "limit.steps=1", "model.hidden=[4]", "engine=serial", "threads=1"]


@pytest.fixture(autouse=True)
def _somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def issued(command: list[str] | None, values: dict[str, Any]) -> list[str]:
    """Return the arguments that W&B's code makes for one trial."""
    args = {key: {"value": value} for key, value in values.items()}
    parts = {
        **create_sweep_command_args({"args": args}),
        "env": [],
        "interpreter": [],
        "program": [],
    }
    words: list[str] = []
    for chunk in create_sweep_command(command):
        words += parts[chunk[2:-1]] if chunk.startswith("${") else [chunk]
    return words


VALUES = {"local.lr": 0.0123, "model.hidden": [8, 4], "method": "scaffold", "local.momentum": 0.0}


def test_arguments_of_an_agent_are_overrides(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    words = issued(None, VALUES)
    assert words[0] == "--local.lr=0.0123" and "--model.hidden=[8, 4]" in words

    assert run_command(["--dry-run", *words]) == 2
    assert "keys have no dashes" in capfd.readouterr().err
    monkeypatch.setenv("WANDB_SWEEP_ID", "abc")
    assert run_command(["--dry-run", *words]) == 0
    config = compose(without_dashes(words))
    assert config["local"]["lr"] == 0.0123 and config["model"]["hidden"] == [8, 4]
    assert config["method"] == "scaffold"
    assert without_dashes(["--dry-run", "-m", "rounds=3"]) == ["--dry-run", "-m", "rounds=3"]


def test_sweep_of_the_guide_gives_a_valid_command(monkeypatch: pytest.MonkeyPatch) -> None:
    (text,) = re.findall(r"```yaml\n(# sweep.yaml.*?)```", GUIDE.read_text(), re.DOTALL)
    sweep = yaml.safe_load(text)
    first, *command = issued(sweep["command"], {"local.lr": 0.05, "local.momentum": 0.5})
    assert first == "fedexp" and "logger=wandb" in command
    monkeypatch.setenv("WANDB_SWEEP_ID", "abc")
    assert run_command(["--dry-run", *command]) == 0

    from fedexp.running.experiment import Experiment

    assert {*sweep["parameters"]} == {"local.lr", "local.momentum"}
    names = Experiment.of(compose(without_dashes(command))).metric_names
    assert sweep["metric"]["name"] in names and sweep["metric"]["name"].startswith("val/")


def test_stored_run_is_logged_again_under_the_id_of_the_agent(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_command(TINY) == 0
    assert run_command([*TINY, "logger=wandb"]) == 0
    # Nothing was trained, so nothing is logged
    assert not list(Path("outputs").rglob("*.wandb"))

    monkeypatch.setenv("WANDB_SWEEP_ID", "abc")
    monkeypatch.setenv("WANDB_RUN_ID", "agent01")
    # Without the W&B logger, nothing is logged either
    assert run_command(TINY) == 0
    assert not list(Path("outputs").rglob("*.wandb"))
    assert run_command([*TINY, "logger=wandb"]) == 0
    (path,) = Path("outputs").rglob("*.wandb")
    assert path.name == "run-agent01.wandb"
    assert b"test/global/acc" in path.read_bytes()
    assert "logged again as W&B run agent01" in capfd.readouterr().out


@pytest.mark.parametrize(("overrides", "title"), [
    (["rounds=3", "method=fedavg,scaffold", "seed=0,1"], "method=fedavg,scaffold seed=0,1 rounds=3 (ab)"),
    (["seed=0,1", "engine=serial", "output_root=x", "hydra/launcher=joblib"], "seed=0,1 (ab)"),
    (["a=" + "1" * 200], "a=" + "1" * 98 + " ... (ab)"),
])  # fmt: skip
def test_sweep_title_is_readable_and_short(overrides: list[str], title: str) -> None:
    assert sweep_title(overrides, "ab") == title
    assert len(title) <= 128
