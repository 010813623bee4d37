"""A plug-in's own YAML (of its module's name) and its class have the same defaults: neither can drift from the other."""

from __future__ import annotations

import inspect
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import yaml

from fedexp.config.compose import compose
from fedexp.config.folders import conf_dir
from fedexp.core.build import convert, locate

GROUPS = [path for path in sorted(conf_dir().iterdir()) if path.is_dir()]


def canonical() -> list[Path]:
    found = []
    for path in (path for group in GROUPS for path in sorted(group.glob("*.yaml"))):
        module = str((yaml.safe_load(path.read_text()) or {}).get("_target_", "")).rpartition(".")[0]
        if module.rpartition(".")[2] == path.stem:
            found.append(path)
    return found


def defaults_of(kind: type) -> dict[str, Any]:
    if not is_dataclass(kind):
        return {k: p.default for k, p in inspect.signature(kind).parameters.items() if p.default is not p.empty}
    made = {f.name: f.default_factory() for f in fields(kind) if f.default_factory is not MISSING}
    return made | {f.name: f.default for f in fields(kind) if f.default is not MISSING}


def plain(value: Any) -> Any:
    """As YAML would have it."""
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def test_the_registry_is_seen() -> None:
    names = {f"{path.parent.name}/{path.stem}" for path in canonical()}
    assert {
        "aggregator/ma_echo",
        "trainer/scaffold",
        "server_optimizer/fedadam",
        "engine/ray",
        "dataset/digits",
    } <= names
    assert {"partition/dirichlet", "model/mlp", "logger/wandb", "aggregator/ot_fusion", "task/cvae"} <= names


@pytest.mark.parametrize("path", canonical(), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_yaml_and_class_agree(path: Path) -> None:
    node = yaml.safe_load(path.read_text())
    kind = locate(node.pop("_target_"), object, path.stem)
    defaults = defaults_of(kind)
    hints = get_type_hints(kind if is_dataclass(kind) else kind.__init__)
    for key, value in node.items():
        interpolated = isinstance(value, str) and value.startswith("${")
        if key in defaults and defaults[key] != () and not interpolated:  # (): not set
            assert plain(convert(value, hints[key], key)) == plain(defaults[key]), f"{path.stem}.{key}"


def test_one_shot_methods_have_one_round_unless_an_experiment_or_the_user_says_more() -> None:
    for method in ("average", "ma_echo", "dense", "pfnm", "nafi", "gamf", "git_rebasin", "ot_fusion", "co_boosting"):
        assert compose([f"method={method}"])["rounds"] == 1
        assert compose([f"method={method}", "rounds=20"])["rounds"] == 20
    assert compose(["experiment=ma_echo/fig9", "method=ma_echo"])["rounds"] == 20
    assert compose(["method=fedavg"])["rounds"] == compose(["method=fedma"])["rounds"] == 20


@pytest.mark.parametrize("path", sorted(conf_dir().glob("experiment/**/*.yaml")), ids=lambda path: path.stem)
def test_an_experiment_says_its_rounds(path: Path) -> None:
    """Presets have their own, which no paper's table may follow."""
    assert "rounds" in yaml.safe_load(path.read_text())
