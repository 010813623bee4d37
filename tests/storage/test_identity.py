"""Guard the names that the identity of a run contains as strings."""

from __future__ import annotations

import copy
import pkgutil
import shutil
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

import fedexp
from fedexp.config.compose import compose
from fedexp.core.aggregator import Aggregator
from fedexp.core.data import Samples
from fedexp.core.dropout import Dropout
from fedexp.core.env import Env
from fedexp.core.kernel import StepNoise, adjusted, epoch_order, take_step, train_client
from fedexp.core.local_optimizers import LocalOptimizer, adam_step, rmsprop_step, sgd_step
from fedexp.core.net import Net
from fedexp.core.resolved_config import ResolvedConfig
from fedexp.core.runner import run
from fedexp.core.seeds import seed_of, torch_generator
from fedexp.core.server_optimizer import ServerOptimizer
from fedexp.core.task import Task
from fedexp.core.trainer import Trainer
from fedexp.core.weights import Weights
from fedexp.data.augment import Augment
from fedexp.data.federated import federate
from fedexp.engines.client_cache import ClientCache
from fedexp.engines.kernels.kernel import FusedKernel, StackKernel
from fedexp.engines.kernels.linear import Linear
from fedexp.engines.kernels.vmapped import Vmapped
from fedexp.engines.serial import Serial
from fedexp.engines.stack import train_stack
from fedexp.engines.stored_models import FromStoredModels
from fedexp.engines.vectorized import Vectorized
from fedexp.evaluation.evaluate import Evaluator
from fedexp.running.experiment import Experiment
from fedexp.running.steps import steps
from fedexp.running.summary import summarise
from fedexp.runtime.numerics import use_numerics
from fedexp.storage import identity

# Code that decides the numbers of local training. Its modules enter the hash of local
# models.
LOCAL_TRAINING = (
    Dropout, FusedKernel, Linear, LocalOptimizer, Net, Samples, Serial, StackKernel, StepNoise,
    Task, Trainer, Vectorized, Vmapped, Weights, adam_step, adjusted, use_numerics, epoch_order,
    rmsprop_step, seed_of, sgd_step, take_step, torch_generator, train_client, train_stack,
)  # fmt: skip
# Further code that decides the results of each run. Its modules enter the hash of the
# run.
WHOLE_RUN = (
    Aggregator, Augment, Env, Evaluator, Experiment, FromStoredModels, ClientCache, ServerOptimizer,
    federate, run, steps, summarise,
)  # fmt: skip
# Config hashes of presets from before their plug-ins got further arguments.
PRESETS = {
    "dense": "059e89fe0c32579e62e548ed4693473f",
    "dense_authors_readme": "dc6e2b75f808f1761f4c59678f4380f7",
    "dense_paper_literal": "4988d482b6936b13978234b32a5e9992",
    "fedcda": "28b96acdff994b5b2d5c483c1f059ac7",
    "fedmrur": "44d81da2bd7c8cd3ccf4bed01dc10bd9",
    "fedmrur_n": "7dc808cfd0cfd804dc94310f1b18412f",
    "git_rebasin": "eed1ff5ab059f9e342ae2fc4d2dfffe9",
    "ma_echo_ot": "0df28d7dbeae92c46fd01cb01148d511",
    "mofedsam": "cc7c8d443ee91b74bb01a23de39f3319",
    "ot_fusion": "bd446b2aaa40df00a4068f0e1db26a07",
    "ot_fusion_nafi": "5b204297149ef8e588ac433a734426ff",
}
NO_PLUGINS: dict[str, Any] = {
    group: {} for group in ("trainer", "task", "model", "architectures", "dataset", "aggregator")
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Copy the package, and let the hashes read the copy like a user's checkout."""
    original = Path(fedexp.__file__).parent
    copied = tmp_path / "fedexp"
    shutil.copytree(original, copied, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(fedexp.__spec__, "submodule_search_locations", [str(copied)])

    forget_sources()
    yield copied
    forget_sources()


def config_hash(stored: dict[str, Any]) -> str:
    """Hash a config in the form in which ``config.yaml`` stores it."""
    return identity.config_hash(ResolvedConfig.from_stored(stored))


def forget_sources() -> None:
    """Clear the sources that this process has cached."""
    identity._module.cache_clear()
    identity._fingerprint.cache_clear()


def source_of(package: Path, module: str) -> Path:
    """Return the file of a module of the package, or the place where it should be."""
    file = package.joinpath(*module.split(".")[1:])
    return file / "__init__.py" if file.is_dir() else file.with_suffix(".py")


def edit(source: Path) -> None:
    """Append a statement to a module and clear the cached sources."""
    source.write_text(f"{source.read_text()}\nADDED = 1\n")
    forget_sources()


@pytest.mark.parametrize("module", identity._ALWAYS)
def test_hashes_change_with_each_module_that_they_name(package: Path, module: str) -> None:
    whole, training = identity.code_hash(NO_PLUGINS), identity.training_hash(NO_PLUGINS, {})

    edit(source_of(package, module))

    assert identity.code_hash(NO_PLUGINS) != whole
    if module in identity._TRAINING:
        assert identity.training_hash(NO_PLUGINS, {}) != training


@pytest.mark.parametrize(
    ("named", "code"), [(identity._TRAINING, LOCAL_TRAINING), (identity._ALWAYS, WHOLE_RUN)]
)
def test_named_modules_reach_the_code_that_decides_results(
    package: Path, named: tuple[str, ...], code: tuple[Any, ...]
) -> None:
    deciding = {one.__module__ for one in code}
    assert deciding <= identity._walk(named).keys()


@pytest.mark.parametrize(
    ("hash_of", "named"),
    [
        (identity.code_hash, identity._ALWAYS),
        (lambda config: identity.training_hash(config, {}), identity._TRAINING),
    ],
)
def test_hash_without_the_sources_of_named_modules_raises(
    package: Path, hash_of: Callable[[dict[str, Any]], str], named: tuple[str, ...]
) -> None:
    for module in named:
        source = source_of(package, module)
        source.rename(source.with_name(f"moved_{source.name}"))

    with pytest.raises(RuntimeError, match="no source") as raised:
        hash_of(NO_PLUGINS)
    assert all(module in str(raised.value) for module in named)


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    """Compose a config that has every key that the identity names."""
    return compose(["method=fed_adi", "proxy.dataset=digits"]).to_stored()


def parent_of(config: dict[str, Any], key: str) -> dict[str, Any]:
    """Return the node that contains the last part of a dotted key."""
    *nodes, last = key.split(".")
    for node in nodes:
        config = config[node]
    assert last in config, f"the composed config has no key '{key}'"
    return config


def with_value(config: dict[str, Any], key: str, value: object) -> dict[str, Any]:
    """Return a copy of a config in which a dotted key has another value."""
    changed = copy.deepcopy(config)
    parent_of(changed, key)[key.rpartition(".")[2]] = value
    return changed


def without(config: dict[str, Any], key: str) -> dict[str, Any]:
    """Return a copy of a config that lacks a dotted key."""
    changed = copy.deepcopy(config)
    del parent_of(changed, key)[key.rpartition(".")[2]]
    return changed


def keys_of(node: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of all values that are not nodes."""
    for key, value in node.items():
        if isinstance(value, Mapping):
            yield from keys_of(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


@pytest.mark.parametrize("key", identity.NON_SCIENTIFIC)
def test_config_hash_stays_with_each_non_scientific_key(config: dict[str, Any], key: str) -> None:
    before = config_hash(config)
    assert config_hash(with_value(config, key, "changed")) == before
    assert config_hash(without(config, key)) == before


def test_config_hash_changes_with_each_scientific_key(config: dict[str, Any]) -> None:
    before = config_hash(config)
    facts = ("choices", "overrides")
    left_out = tuple(f"{key}." for key in (*identity.NON_SCIENTIFIC, *facts))
    scientific = [key for key in keys_of(config) if not f"{key}.".startswith(left_out)]

    unseen = [
        key for key in scientific if config_hash(with_value(config, key, "changed")) == before
    ]

    assert {"method", "rounds", "local.lr", "dataset._target_"} <= {*scientific}
    assert not unseen


@pytest.mark.parametrize("key", identity.SEEDS)
def test_config_hash_changes_with_each_seed(config: dict[str, Any], key: str) -> None:
    assert config_hash(with_value(config, key, 1)) != config_hash(config)


@pytest.mark.parametrize(("key", "neutral"), identity._LATER.items())
def test_config_hash_has_a_later_key_only_at_another_value(
    config: dict[str, Any], key: str, neutral: object
) -> None:
    earlier = config_hash(without(config, key))
    assert config_hash(with_value(config, key, neutral)) == earlier
    assert config_hash(with_value(config, key, "changed")) != earlier


def test_config_hash_has_a_later_argument_only_of_its_class_and_at_another_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    added = {"method.Method": {"new": 1, "options.new": None}}
    monkeypatch.setattr(identity, "_LATER_ARGUMENTS", added)

    def hash_of(target: str, options: dict[str, Any], **arguments: object) -> str:
        return config_hash({"group": {"_target_": target, "options": options, **arguments}})

    earlier = hash_of("method.Method", {"old": 1})
    assert hash_of("method.Method", {"old": 1, "new": None}, new=1) == earlier
    assert hash_of("method.Method", {"old": 1}, new=2) != earlier
    assert hash_of("method.Method", {"old": 1, "new": 1}) != earlier
    assert hash_of("method.Other", {"old": 1}, new=1) != hash_of("method.Other", {"old": 1})


@pytest.mark.parametrize(
    ("target", "key"),
    [(target, key) for target, keys in identity._LATER_ARGUMENTS.items() for key in keys],
)
def test_default_of_a_later_argument_is_its_neutral_value(target: str, key: str) -> None:
    """The default of an argument that was added later is its neutral value.

    Otherwise runs of presets would get other run IDs.
    """
    plugin = pkgutil.resolve_name(target)()
    assert attrgetter(key)(plugin) == identity._LATER_ARGUMENTS[target][key]


@pytest.mark.parametrize(("method", "expected"), PRESETS.items())
def test_config_hash_of_a_preset_keeps_its_value(method: str, expected: str) -> None:
    """The config hash of a preset does not change.

    An argument that is added to a plug-in must not change the preset's run ID.
    """
    assert identity.config_hash(compose([f"method={method}"])) == expected


def test_config_hash_of_a_stored_config_keeps_its_value() -> None:
    """The config hash of a stored config does not change.

    Stored runs are found by this hash. So neither its form nor the keys that it omits
    may change.
    """
    left_out = dict.fromkeys([
        "checkpoint", "choices", "data_root", "deterministic", "device", "engine", "logger",
        "memo", "on_running", "output_root", "overrides", "reuse", "state", "threads",
    ])  # fmt: skip
    stored = left_out | {
        "aggregator": {"_target_": "method.Method", "tv": "l2"},
        "contents": {"model.path": "file hash"},
        "dataset": {"_target_": "data.Data", "download": False},
        "eval": {"every": 1, "per_class": False, "per_client": False},
        "limit": {"proxy": None},
        "model": {"path": "place of the file"},
        "proxy": {"dataset": {"download": True}, "resize": False},
        "seed": 0,
    }

    assert config_hash(stored) == "f78bf488c548ec962b5314d50f1c3fe3"
