"""Tests of the table of old and new names, and of the errors for old names."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from fedexp.config.compose import compose
from fedexp.core.build import build, locate
from fedexp.core.errors import ConfigError
from fedexp.core.renames import renames
from fedexp.core.trainer import Trainer
from fedexp.core.user_code import describe_exception
from fedexp.running.check import CheckedJob
from tests.world import make_world

ROOT = Path(__file__).resolve().parents[2]
NAMES = [*renames().names.items(), *renames().modules.items()]


def find(path: str) -> Any:
    """Import the module, class or attribute at a dotted path, or return None."""
    try:
        return importlib.import_module(path)
    except ImportError:
        parent, _, name = path.rpartition(".")
        return None if not parent else getattr(find(parent), name, None)


def parts(error: ConfigError) -> tuple[str, str, str]:
    """Return the parts `where`, `expected` and `got` of an error with five parts."""
    assert error.what and all(error.facts.values())
    return str(error.facts["where"]), str(error.facts["expected"]), str(error.facts["got"])


@pytest.mark.parametrize(("old", "new"), NAMES)
def test_old_path_is_gone_and_new_path_exists(old: str, new: str) -> None:
    assert find(old) is None
    assert find(new) is not None


def test_old_members_are_gone_and_new_members_exist() -> None:
    for path, members in renames().members.items():
        kind = find(path)
        has_fields = dataclasses.is_dataclass(kind)
        fields = {field.name for field in dataclasses.fields(kind)} if has_fields else set()
        for old, new in members.items():
            method, _, argument = old.rpartition(".")
            if method:
                hints = get_type_hints(getattr(kind, method))
                assert argument not in hints and new.partition(".")[2] in hints
            else:
                assert not hasattr(kind, old) and old not in fields
                assert hasattr(kind, first := new.partition(".")[0]) or first in fields


def test_old_values_are_refused_by_the_type() -> None:
    for path, attributes in renames().values.items():
        for name, values in attributes.items():
            hint = get_type_hints(find(path))[name]
            allowed = {value for part in (hint, *get_args(hint)) for value in get_args(part)}
            assert not allowed & {*values} and allowed >= {*values.values()}


def test_new_keys_are_keys_of_their_options() -> None:
    for old, key in renames().keys.items():
        group, _, name = key.new.partition(".")
        for option in key.options:
            node = compose([f"{group}={option}"])[group]
            assert name in node and old.partition(".")[2] not in node


def test_new_path_of_unknown_module_is_none() -> None:
    assert renames().new_path("fedexp.aggregators.unknown.Mean") is None
    assert renames().new_path("fedexp.aggregators.mean.Mean") == "fedexp.methods.fedavg.Mean"
    assert renames().new_path("fedexp.methods.fedavg.Mean") is None


def test_moved_class_raises_config_error_with_new_path() -> None:
    with pytest.raises(ConfigError, match=r"fedexp\.trainers\.sgd\.Sgd") as refused:
        build(Trainer, {"_target_": "fedexp.trainers.sgd.Sgd"}, "trainer")
    assert parts(refused.value) == (
        "trainer._target_",
        "fedexp.methods.fedavg.PlainTrainer",
        "fedexp.trainers.sgd.Sgd",
    )


KEY = "aggregator.last_lr"


def write_configs(folder: Path) -> None:
    """Write configs of version 0.1 that set the old key."""
    files = {
        "aggregator/mine.yaml": "defaults: [fedma]\nlast_lr: 0.2\n",
        "method/mine.yaml": (
            "# @package _global_\ndefaults:\n  - override /trainer: sgd\n"
            "  - override /aggregator: fedma\nmethod: mine\naggregator:\n  last_lr: 0.2\n"
        ),
    }
    for name, text in files.items():
        path = folder / "conf" / name
        path.parent.mkdir(parents=True)
        path.write_text(text)


@pytest.mark.parametrize(
    ("overrides", "where"),
    [
        (["method=fedma", f"{KEY}=0.2"], f"{KEY}=0.2"),
        (["method=fedma", f"+{KEY}=0.2"], KEY),
        (["method=fedma", "aggregator=mine"], KEY),
        (["method=mine"], KEY),
    ],
)
def test_renamed_key_raises_config_error_with_new_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], where: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_configs(tmp_path)
    with pytest.raises(ConfigError, match="unknown key") as refused:
        CheckedJob.of(compose(overrides))
    assert parts(refused.value) == (where, "aggregator.output_lr_factor", KEY)


def test_old_key_of_another_option_is_not_called_renamed() -> None:
    with pytest.raises(ConfigError, match="unknown key") as refused:
        compose(["aggregator=mean", f"{KEY}=0.2"])
    assert "output_lr_factor" not in str(refused.value)
    with pytest.raises(ConfigError, match="unknown key") as refused:
        CheckedJob.of(compose(["aggregator=mean", f"+{KEY}=0.2"]))
    assert "output_lr_factor" not in str(refused.value)


def locate_in(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    """Write a user module and locate its class `Mine`."""
    (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, name, raising=False)
    locate(f"{name}.Mine", object, "aggregator")


@pytest.mark.parametrize(
    ("name", "statement", "new"),
    [
        (
            "moved_module",
            "from fedexp.aggregators.mean import (\n    Mean,\n)",
            "fedexp.methods.fedavg.Mean",
        ),
        ("moved_name", "from fedexp.tasks.cvae import Cvae", "fedexp.tasks.cvae.CvaeTask"),
        ("moved_package", "import fedexp.engines.shares", "fedexp.runtime.resources"),
        ("moved_inside", "from fedexp.trainers import sgd", "fedexp.methods.fedavg"),
    ],
)
def test_failed_import_of_old_name_raises_config_error_with_new_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, statement: str, new: str
) -> None:
    with pytest.raises(ConfigError, match=f"module '{name}' imports") as refused:
        locate_in(tmp_path, monkeypatch, name, f'"""Mine."""\n{statement}\n')
    where, expected, _ = parts(refused.value)
    assert where == f"{tmp_path / name}.py:2 (aggregator._target_)"
    assert expected == new


def test_failed_import_of_another_name_keeps_its_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="cannot be imported: ImportError"):
        locate_in(tmp_path, monkeypatch, "other_import", "from fedexp.tasks.cvae import Other\n")


def hook_error(aggregator: str, code: str, module: str) -> ConfigError:
    """Return the error of a plug-in that derives from a built-in aggregator."""
    base, _, name = aggregator.rpartition(".")
    Path(f"{module}.py").write_text(
        "from dataclasses import dataclass\n"
        f"from {base} import {name}\n\n"
        f"@dataclass(frozen=True)\nclass Mine({name}):\n    {code}\n"
    )
    importlib.invalidate_caches()
    with pytest.raises(ConfigError, match=r"since version 0\.2") as refused:
        build(find("fedexp.core.aggregator.Aggregator"), {"_target_": f"{module}.Mine"}, "x")
    return refused.value


@pytest.mark.parametrize(
    ("module", "code", "expected"),
    [
        ("old_hook", "def taught(self): ...", "targets"),
        ("old_inherited_hook", "def stretch(self, env): ...", "steps_per_stage"),
        ("old_value", "delivers = 'per_client'", "delivers = 'local'"),
    ],
)
def test_plugin_with_old_hook_raises_config_error_with_new_hook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, code: str, expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    error = hook_error("fedexp.methods.feddf.FedDF", code, module)
    assert str(error.facts["where"]).startswith(str(tmp_path / f"{module}.py"))
    assert str(error.facts["expected"]).startswith(expected)


def test_plugin_with_new_hook_and_a_helper_of_the_old_name_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "both_hooks.py").write_text(
        "from dataclasses import dataclass\n"
        "from fedexp.methods.feddf import FedDF\n\n"
        "@dataclass(frozen=True)\nclass Mine(FedDF):\n"
        "    def stretch(self): ...\n    def steps_per_stage(self, env): return 1\n"
    )
    node: Mapping[str, Any] = compose(["method=feddf", "proxy.dataset=digits"])["aggregator"]
    build(find("fedexp.core.aggregator.Aggregator"), {**node, "_target_": "both_hooks.Mine"}, "x")


def test_missing_attribute_with_another_name_is_named_in_the_message() -> None:
    env = make_world("method=fedavg").env
    with pytest.raises(AttributeError) as refused:
        _ = env.budget  # type: ignore[attr-defined]
    assert describe_exception(refused.value).endswith("'budget' (local_training since version 0.2)")


def test_page_of_old_names_is_current() -> None:
    script = ROOT / "scripts" / "make_migration_page.py"
    checked = subprocess.run([sys.executable, script, "--check"], check=False)
    assert checked.returncode == 0, "run python scripts/make_migration_page.py"
