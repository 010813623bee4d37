"""Tests that Hydra's private interfaces still work as fedexp needs them."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import hydra
import pytest
from hydra import compose as hydra_compose
from hydra._internal import utils
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException
from omegaconf import OmegaConf

from fedexp.config import hydra_private
from fedexp.config.folders import conf_dir
from fedexp.config.hydra_composition import use_hydra

ROOT = Path(__file__).resolve().parents[2]


def test_only_one_module_imports_hydras_private_modules() -> None:
    users = set()
    for path in (ROOT / "fedexp").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            if any(module.startswith("hydra._internal") for module in modules):
                users.add(path.name)
    assert users == {"hydra_private.py"}


def test_apply_overrides_sets_adds_and_deletes_keys_in_place() -> None:
    config = OmegaConf.create({"rounds": 1, "local": {"lr": 0.1, "momentum": 0.9}})
    OmegaConf.set_struct(config, True)
    texts = ["rounds=2", "local.lr=0.5", "+local.clip=1", "~local.momentum"]
    hydra_private.apply_overrides(OverridesParser.create().parse_overrides(texts), config)
    assert OmegaConf.to_container(config) == {"rounds": 2, "local": {"lr": 0.5, "clip": 1}}


def test_apply_overrides_refuses_an_unknown_key() -> None:
    config = OmegaConf.create({"rounds": 1})
    OmegaConf.set_struct(config, True)
    with pytest.raises(HydraException, match="Could not override 'round'"):
        hydra_private.apply_overrides(OverridesParser.create().parse_overrides(["round=2"]), config)


def test_uses_basic_sweeper_knows_hydras_default() -> None:
    with use_hydra([]):
        sweeper = hydra_compose("config", return_hydra_config=True).hydra.sweeper
    assert hydra_private.uses_basic_sweeper(sweeper)
    assert not hydra_private.uses_basic_sweeper(OmegaConf.create({"_target_": "other.Sweeper"}))


def test_multirun_launcher_runs_each_job(tmp_path: Path) -> None:
    seeds = []

    def task(config: Any) -> None:
        seeds.append(config.seed)

    overrides = [f"output_root={tmp_path}", f"hydra.sweep.dir={tmp_path}"]
    with use_hydra(overrides):
        config = hydra_private.compose_for_multirun(overrides)
        assert config.hydra.mode.name == "MULTIRUN"
        with hydra_private.multirun_launcher(config, task) as launch:
            returns = launch([["seed=3"], ["seed=5"]])
    assert seeds == [3, 5]
    assert [job.status for job in returns] == [JobStatus.COMPLETED] * 2


class ReportedError(Exception):
    """An error that was already printed."""


def failed(error: Exception) -> JobReturn:
    return JobReturn(overrides=["seed=1"], status=JobStatus.FAILED, _return_value=error)


def test_quiet_failures_prints_nothing_of_a_reported_failure(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In the block, Hydra prints nothing about a failure that was already reported.

    For any other failed job, Hydra prints the overrides. Outside the block, it prints
    them for every failed job.
    """
    with hydra_private.quiet_failures(ReportedError, lambda function: function()):
        with pytest.raises(ReportedError):
            _ = failed(ReportedError()).return_value
        assert capsys.readouterr().err == ""
        with pytest.raises(ValueError):
            _ = failed(ValueError()).return_value
        assert "seed=1" in capsys.readouterr().err
    with pytest.raises(ReportedError):
        _ = failed(ReportedError()).return_value
    assert "seed=1" in capsys.readouterr().err


def test_quiet_failures_wraps_what_hydra_main_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = []

    def call(function: Any) -> Any:
        calls.append(function)
        return function()

    monkeypatch.setattr(sys, "argv", ["fedexp", "--cfg", "job"])
    main = hydra.main(config_path=str(conf_dir()), config_name="config", version_base="1.3")
    before = utils.run_and_report
    with hydra_private.quiet_failures(ReportedError, call):
        main(lambda config: None)()
    assert calls
    assert "clients_per_round:" in capsys.readouterr().out
    assert utils.run_and_report is before
