"""Guard the names that the identity of a run has in strings."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fedexp
from fedexp.core.aggregator import Aggregator
from fedexp.core.data import Samples
from fedexp.core.dropout import Dropout
from fedexp.core.env import Env
from fedexp.core.kernel import StepNoise, adjusted, epoch_order, take_step, train_client
from fedexp.core.local_optimizers import LocalOptimizer, adam_step, rmsprop_step, sgd_step
from fedexp.core.net import Net
from fedexp.core.runner import run
from fedexp.core.seeds import seed_of, torch_generator
from fedexp.core.server_optimizer import ServerOptimizer
from fedexp.core.task import Task
from fedexp.core.trainer import Trainer
from fedexp.core.weights import Weights
from fedexp.data.augment import Augment
from fedexp.data.federated import federate
from fedexp.engines.exactness import applied
from fedexp.engines.kernels.kernel import FusedKernel, StackKernel
from fedexp.engines.kernels.linear import Linear
from fedexp.engines.kernels.vmapped import Vmapped
from fedexp.engines.memo import Memo
from fedexp.engines.serial import Serial
from fedexp.engines.stack import train_stack
from fedexp.engines.stored_models import FromStoredModels
from fedexp.engines.vectorized import Vectorized
from fedexp.evaluation.evaluate import Evaluator
from fedexp.running.experiment import Experiment
from fedexp.running.steps import steps
from fedexp.running.summary import summarise
from fedexp.storage import identity

# Code that decides the numbers of local training. Its modules enter the hash of local models.
LOCAL_TRAINING = (
    Dropout, FusedKernel, Linear, LocalOptimizer, Net, Samples, Serial, StackKernel, StepNoise,
    Task, Trainer, Vectorized, Vmapped, Weights, adam_step, adjusted, applied, epoch_order,
    rmsprop_step, seed_of, sgd_step, take_step, torch_generator, train_client, train_stack,
)  # fmt: skip
# Further code that decides the results of each run. Its modules enter the hash of the run.
WHOLE_RUN = (
    Aggregator, Augment, Env, Evaluator, Experiment, FromStoredModels, Memo, ServerOptimizer,
    federate, run, steps, summarise,
)  # fmt: skip
NO_PLUGINS: dict[str, Any] = dict.fromkeys(("trainer", "task", "model", "architectures", "dataset"))


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Copy the package and let the hashes read the copy, as if the user's checkout were there."""
    original = Path(fedexp.__file__).parent
    copied = tmp_path / "fedexp"
    shutil.copytree(original, copied, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(fedexp.__spec__, "submodule_search_locations", [str(copied)])

    # Libraries may be installed outside this environment. Reading all of torch takes half a minute.
    site_packages = str(Path(torch.__file__).parents[1])
    monkeypatch.setattr(identity, "LIBRARIES", (*identity.LIBRARIES, site_packages))

    forget_sources()
    yield copied
    forget_sources()


def forget_sources() -> None:
    """Clear what a process remembers of sources."""
    identity._module.cache_clear()
    identity._fingerprint.cache_clear()


def source_of(package: Path, module: str) -> Path:
    """Return the file of a module of the package, or the place where it should be."""
    file = package.joinpath(*module.split(".")[1:])
    return file / "__init__.py" if file.is_dir() else file.with_suffix(".py")


def edit(source: Path) -> None:
    """Append a statement to a module and let this process read it."""
    source.write_text(f"{source.read_text()}\nADDED = 1\n")
    forget_sources()


@pytest.mark.parametrize("module", identity._ALWAYS)
def test_hashes_change_with_each_module_that_they_name(package: Path, module: str) -> None:
    whole, training = identity.code_hash(NO_PLUGINS), identity.training_code_hash(NO_PLUGINS)

    edit(source_of(package, module))

    assert identity.code_hash(NO_PLUGINS) != whole
    if module in identity._TRAINING:
        assert identity.training_code_hash(NO_PLUGINS) != training


@pytest.mark.parametrize(("named", "code"), [(identity._TRAINING, LOCAL_TRAINING), (identity._ALWAYS, WHOLE_RUN)])
def test_named_modules_reach_the_code_that_decides_results(
    package: Path, named: tuple[str, ...], code: tuple[Any, ...]
) -> None:
    deciding = {one.__module__ for one in code}
    assert deciding <= identity._walk(named).keys()


@pytest.mark.parametrize(
    ("hash_of", "named"),
    [(identity.code_hash, identity._ALWAYS), (identity.training_code_hash, identity._TRAINING)],
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
