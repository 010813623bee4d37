"""Tests that the YAML file and the class of a plug-in have the same defaults."""

from __future__ import annotations

import inspect
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import yaml

from fedexp.config.compose import compose
from fedexp.config.folders import conf_dir
from fedexp.core.build import build, convert, locate
from fedexp.data.dataset import Dataset
from fedexp.data.federated import Proxy

GROUPS = [path for path in sorted(conf_dir().iterdir()) if path.is_dir()]


def canonical() -> list[Path]:
    found = []
    for path in (path for group in GROUPS for path in sorted(group.glob("*.yaml"))):
        target = str((yaml.safe_load(path.read_text()) or {}).get("_target_", ""))
        # The class of a method is in its file or in a module of its folder.
        if path.stem in target.split(".")[-3:-1]:
            found.append(path)
    return found


def defaults_of(kind: type) -> dict[str, Any]:
    if not is_dataclass(kind):
        return {
            k: p.default
            for k, p in inspect.signature(kind).parameters.items()
            if p.default is not p.empty
        }
    made = {f.name: f.default_factory() for f in fields(kind) if f.default_factory is not MISSING}
    return made | {f.name: f.default for f in fields(kind) if f.default is not MISSING}


def plain(value: Any) -> Any:
    """Return a value as YAML represents it."""
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def test_config_groups_with_classes_are_found() -> None:
    names = {f"{path.parent.name}/{path.stem}" for path in canonical()}
    assert {
        "aggregator/ma_echo",
        "trainer/scaffold",
        "server_optimizer/fedadam",
        "engine/ray",
        "dataset/digits",
    } <= names
    assert {
        "partition/dirichlet",
        "model/mlp",
        "logger/wandb",
        "aggregator/ot_fusion",
        "task/cvae",
    } <= names


@pytest.mark.parametrize("path", canonical(), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_yaml_defaults_equal_class_defaults(path: Path) -> None:
    node = yaml.safe_load(path.read_text())
    kind = locate(node.pop("_target_"), object, path.stem)
    defaults = defaults_of(kind)
    hints = get_type_hints(kind if is_dataclass(kind) else kind.__init__)
    for key, value in node.items():
        interpolated = isinstance(value, str) and value.startswith("${")
        # The default () means that the key is not set.
        if key in defaults and defaults[key] != () and not interpolated:
            assert plain(convert(value, hints[key], key)) == plain(defaults[key]), (
                f"{path.stem}.{key}"
            )


def test_one_shot_methods_have_one_round_unless_an_experiment_or_the_user_says_more() -> None:
    for method in (
        "average",
        "ma_echo",
        "dense",
        "pfnm",
        "nafi",
        "gamf",
        "git_rebasin",
        "ot_fusion",
        "co_boosting",
        "feddf_paper",
    ):
        assert compose([f"method={method}"])["rounds"] == 1
        assert compose([f"method={method}", "rounds=20"])["rounds"] == 20
    assert compose(["experiment=ma_echo/fig9", "method=ma_echo"])["rounds"] == 20
    assert compose(["method=fedavg"])["rounds"] == compose(["method=fedma"])["rounds"] == 20


@pytest.mark.parametrize(
    "path", sorted(conf_dir().glob("experiment/**/*.yaml")), ids=lambda path: path.stem
)
def test_an_experiment_says_its_rounds(path: Path) -> None:
    """Presets have their own rounds, which the table of a paper must not inherit."""
    assert "rounds" in yaml.safe_load(path.read_text())


@pytest.mark.parametrize(("dataset", "proxy"), [
    ("mnist", "fashion_mnist"), ("fashion_mnist", "mnist"), ("cifar10", "cifar100"), ("cifar100", "cifar10"),
    ("svhn", "cifar10"), ("tiny_imagenet", "cifar100"), ("digits", None), ("femnist", None),
])  # fmt: skip
def test_one_shot_feddf_has_another_data_sets_images(dataset: str, proxy: str | None) -> None:
    """One-shot FedDF uses images of another data set as proxy data.

    The command line or an experiment can choose the data set. A value that the user
    sets has priority. Some data sets have no such proxy.
    """
    for method in ("feddf_matched", "feddf_paper"):
        config = compose([f"method={method}", f"dataset={dataset}"])
        assert config.choices.get("proxy.dataset") == proxy
        assert config["proxy"]["source"] == ("noise" if dataset == "digits" else "train")
        assert config["proxy"]["resize"] == (dataset == "tiny_imagenet")
        build(Proxy, config["proxy"], "proxy").check(build(Dataset, config["dataset"], "dataset"))  # type: ignore[type-abstract]
    of_experiment = compose(["experiment=fedsyn/table1", "method=feddf_matched", "proxy.size=7"])
    assert (
        of_experiment.choices["proxy.dataset"] == "cifar100" and of_experiment["proxy"]["size"] == 7
    )
    assert (
        compose(["experiment=fedsyn/table1", "method=feddf_matched", "proxy.dataset=svhn"]).choices[
            "proxy.dataset"
        ]
        == "svhn"
    )


@pytest.mark.parametrize(("datasets", "weights"), [
    (("mnist", "fashion_mnist", "digits"), (1.0, 5.0, 0.1)),
    (("cifar10", "svhn", "cifar10_jpeg"), (0.05, 5.0, 0.01)),
    (("cifar100", "tiny_imagenet"), (0.5, 20.0, 0.1)),
])  # fmt: skip
def test_dafls_weights_are_those_of_the_data_set(
    datasets: tuple[str, ...], weights: tuple[float, ...]
) -> None:
    for dataset in datasets:
        of = compose(["method=fed_dafl", f"dataset={dataset}"])["aggregator"]
        assert (of["w_oh"], of["w_ie"], of["w_a"]) == weights
    assert (
        compose(["method=fed_dafl", f"dataset={datasets[0]}", "aggregator.w_ie=7"])["aggregator"][
            "w_ie"
        ]
        == 7
    )
