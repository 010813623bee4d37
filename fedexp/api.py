"""fedexp in Python: run what the command line would run, and look at stored runs. Exported by the package itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fedexp.core.errors import ConfigError, StorageError
from fedexp.storage.files import read_json
from fedexp.storage.run_folder import rows_of
from fedexp.storage.stored_run import StoredRun, find_run

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fedexp.core.data import Partition
    from fedexp.core.weights import Weights

T = TypeVar("T")


@dataclass(frozen=True)
class Run:
    """A run as it lies on disk; what is asked for is read then, once.

    Args:
        folder: ``<output_root>/runs/<method>-<dataset>-<config hash>/<code hash>``.

    Every property raises `StorageError` where its file is not there: of a run that is not finished, `result` and `models`.
    """

    folder: Path

    @property
    def status(self) -> str:
        """done, running, failed, interrupted or stale (it says running and nobody works on it)."""
        return StoredRun(self.folder).status

    @cached_property
    def config(self) -> dict[str, Any]:
        """The resolved config, with what was chosen for each group (``choices``) and the ``overrides``."""
        config: dict[str, Any] | None = StoredRun(self.folder).config or None
        return self._require(config, "config.yaml")

    @cached_property
    def result(self) -> dict[str, Any]:
        """``result.json``: headline, metrics, costs, hashes."""
        result: dict[str, Any] | None = read_json(self.folder / "result.json")
        return self._require(result, "result.json")

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """A row a step, most methods' rounds: ``round``, ``step``, ``train/loss``, ``test/global/acc`` ..."""
        return rows_of(self.folder, StoredRun(self.folder).result)

    @cached_property
    def models(self) -> tuple[Weights, ...]:
        """What the run delivered, on the CPU: one global model, an ensemble's members, or one model a client."""
        from fedexp.storage.model_folder import MODELS, ModelFolder

        self._require((self.folder / MODELS).is_file() or None, MODELS)
        stored = ModelFolder.open(self.folder)
        return tuple(stored.weights(number) for number in range(len(stored.specs)))

    @cached_property
    def partition(self) -> Partition:
        """Which training samples each client had: ``partition.of(client)`` are indices into the data set."""
        from fedexp.data.partition import load_partition

        self._require(
            (self.folder / "partition.safetensors").is_file() or None, "partition.safetensors"
        )
        return load_partition(self.folder / "partition.safetensors")

    def module(self, index: int = 0) -> nn.Module:
        """Model `index` as a ``torch.nn.Module`` of its own, in evaluation mode; its inputs are normalised samples.

        Raises:
            IndexError: there are not as many models.
        """
        return self.models[index].module()

    def _require(self, value: T | None, name: str) -> T:
        if value is None:
            raise StorageError(
                f"the run has no {name}: its status is {self.status}",
                where=str(self.folder),
                do="run it to its end: the same overrides resume it",
            )
        return value


def run(overrides: Sequence[str] = (), *, say: Callable[[str], None] | None = None) -> Run:
    """Do what ``fedexp <overrides>`` does: check, then return the stored run, resume it, or run it.

    Args:
        overrides: as on the command line, e.g. ``["method=scaffold", "rounds=50"]``; one run, no sweep.
        say: where notes go; with `print`, progress is shown as on the command line. None: nothing is printed.

    Raises:
        FedexpError: the config cannot be run (`ConfigError`, before anything starts), or the run failed.
    """
    if isinstance(overrides, str | Mapping) or not all(isinstance(one, str) for one in overrides):
        as_mapping = (
            [f"{key}={value}" for key, value in overrides.items()]
            if isinstance(overrides, Mapping)
            else None
        )
        meant = (
            overrides.split()
            if isinstance(overrides, str)
            else as_mapping or [str(one) for one in overrides]
        )
        raise ConfigError(
            "overrides are a list of texts, one a key",
            got=repr(overrides),
            do=f"fedexp.run({meant})",
        )
    from fedexp.config.messages import refuse_flags
    from fedexp.running.check import check_jobs, check_split
    from fedexp.running.execute import execute

    refuse_flags([*overrides])  # of a sweep, too: this is one run
    (job,) = check_jobs([list(overrides)])
    check_split(job)
    return Run(Path(execute(job.config, experiment=job.experiment, say=say)["folder"]))


def load(run: str | Path, *, output_root: str | Path = "outputs") -> Run:
    """A stored run, by its folder or the part of its name that no other run under `output_root` has.

    Raises:
        FedexpError: there is none, or more than one; names the nearest.
    """
    return Run(find_run(Path(output_root).expanduser(), str(run)).path.resolve())


def save_models(
    folder: str | Path,
    state_dicts: Sequence[Mapping[str, Tensor]],
    model: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]],
    *,
    input_shape: Sequence[int],
    num_classes: int,
    class_counts: Sequence[Sequence[int]] | Tensor | None = None,
    num_examples: Sequence[int] | Tensor | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> None:
    """Bring models trained elsewhere into the form that ``client_models.path`` takes; model i is client i's.

    Args:
        folder: ``model.safetensors`` and ``clients.json`` are written there.
        state_dicts: one a client, each with all of the network's names (as `torch.nn.Module.state_dict` gives them).
        model: class path (``mypackage.Net``), or a ``model`` config node: ``{"_target_": "...", "hidden": [200]}``; or a
            list with one of these for each client.
        input_shape: of one sample, e.g. (1, 28, 28); num_classes: both are passed to constructors that take them.
        class_counts: (models, classes) training samples of each class; without them, those of the run's partition count.
        num_examples: training samples of each client; by default what `class_counts` sum to.
        mean, std: per channel, of the inputs' normalisation (``[]``: none), as ``dataset.mean`` and ``dataset.std``; a run whose
            data set has others is refused. None: nothing is checked.

    Raises:
        ConfigError: a state dict does not fit its network, or the counts or networks do not fit the models.
    """
    import torch

    from fedexp.core.build import build
    from fedexp.core.outcome import Outcome
    from fedexp.core.weights import ModelSpec, Weights
    from fedexp.storage.model_folder import Clients, save_outcome

    if not state_dicts:
        raise ConfigError(
            "there are no models to save", where="state_dicts", expected="one state dict a client"
        )
    counts = None if class_counts is None else torch.as_tensor(class_counts).tolist()
    examples = None if num_examples is None else torch.as_tensor(num_examples).tolist()
    if examples is None and counts is not None:
        examples = [sum(row) for row in counts]
    number = len(state_dicts)
    facts = {
        "num_clients": number,
        "clients": list(range(number)),
        "num_examples": examples,
        "class_counts": counts,
    }
    inputs = {
        name: None if value is None else list(value)
        for name, value in (("mean", mean), ("std", std))
    }
    clients = build(Clients, {**facts, **inputs}, "")
    given = [model] * number if isinstance(model, str | Mapping) else model
    if len(given) != number:
        raise ConfigError(
            "every model needs its network",
            where="model",
            expected=f"{number}, or one for all",
            got=len(given),
        )
    nodes = [{"_target_": one} if isinstance(one, str) else one for one in given]
    specs = [ModelSpec.of(node, tuple(input_shape), num_classes) for node in nodes]
    pairs = enumerate(zip(specs, state_dicts, strict=True))
    models = tuple(
        Weights.of_state_dict(spec, state, f"state_dicts[{i}]") for i, (spec, state) in pairs
    )
    save_outcome(
        Outcome(models, "local", clients=clients.clients), clients, Path(folder).expanduser()
    )
