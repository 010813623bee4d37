"""The Python interface of fedexp: `run`, `load`, `runs`, `Run` and `save_models`.

The package `fedexp` exports these names. `run` does what the command ``fedexp`` does.
`load` reads one stored run, and `runs` reads many runs as a data frame. `save_models`
stores models that were trained without fedexp. A run uses such models if the config key
``client_models.path`` names their folder.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fedexp.core.errors import ConfigError, StorageError
from fedexp.core.paths import user_path
from fedexp.storage.files import read_json
from fedexp.storage.run_folder import rows_of
from fedexp.storage.stored_run import StoredRun, find_run, resume_condition

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fedexp.analysis.frame import Runs
    from fedexp.core.data import Partition
    from fedexp.core.probe import Probe
    from fedexp.core.weights import Weights
    from fedexp.storage.client_data import ClientData
    from fedexp.storage.model_folder import Clients

T = TypeVar("T")


@dataclass(frozen=True)
class Run:
    """A stored run. Each property is read from the run's folder when it is first used.

    `config`, `result`, `models` and `partition` raise `StorageError` if their file is
    absent. Unfinished runs have no `result` and no `models`.

    Args:
        folder: ``<output_root>/runs/<method>-<dataset>-<config hash>/<code hash>``.
        allow_classes: Classes of networks that may be imported to load the models.
            `load` explains the reason.
    """

    folder: Path
    allow_classes: tuple[str, ...] = field(default=(), compare=False, repr=False)

    @property
    def status(self) -> str:
        """One of done, running, failed, interrupted, stale, damaged and unknown.

        ``stale`` means that the run is marked as running, but no process works on it.
        ``unknown`` means that there is no result, and that the stored status is done or
        absent.
        """
        return StoredRun(self.folder).status

    @cached_property
    def config(self) -> dict[str, Any]:
        """The resolved config: the value of every key.

        The chosen options of the config groups are under the key ``choices``. The
        overrides of the run are under ``overrides``.
        """
        return self._require(StoredRun(self.folder).read_config() or None, "config.yaml")

    @cached_property
    def result(self) -> dict[str, Any]:
        """The content of ``result.json``: headline metric, metrics, costs, hashes."""
        result: dict[str, Any] | None = read_json(self.folder / "result.json")
        return self._require(result, "result.json")

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """One row per step. For most methods, a step is a round.

        A row has ``round``, ``step``, ``train/loss``, ``test/global/acc`` and so on.
        """
        return rows_of(self.folder, StoredRun(self.folder).result)

    @cached_property
    def models(self) -> tuple[Weights, ...]:
        """The models that the run delivered, on the CPU.

        The run's method decides how many there are: one global model, one model per
        member of an ensemble, or one model per client. If the class of a model is not
        allowed (see `load`), the property raises `StorageError`.
        """
        from fedexp.storage.model_folder import MODELS, ModelFolder, refuse_other_classes

        self._require((self.folder / MODELS).is_file() or None, MODELS)
        stored = ModelFolder.open(self.folder)
        refuse_other_classes(
            [spec.arch for spec in stored.specs],
            self.allow_classes,
            self.folder / MODELS,
            "if you trust its code, fedexp.load(..., allow_classes=['{name}'])",
        )
        return tuple(stored.weights(number) for number in range(len(stored.specs)))

    @cached_property
    def partition(self) -> Partition:
        """The assignment of training samples to clients.

        ``partition.of(client)`` returns the positions of a client's samples in the
        training pool.
        """
        from fedexp.data.partition import load_partition

        self._require(
            (self.folder / "partition.safetensors").is_file() or None, "partition.safetensors"
        )
        return load_partition(self.folder / "partition.safetensors")

    def module(self, index: int = 0) -> nn.Module:
        """Return model `index` as a new ``torch.nn.Module`` in evaluation mode.

        Its inputs are normalised samples.

        Raises:
            IndexError: The run has no model with this index.
        """
        return self.models[index].module()

    def _require(self, value: T | None, name: str) -> T:
        if value is None:
            status = self.status
            same = f"the same overrides{resume_condition(StoredRun(self.folder).config)}"
            raise StorageError(
                f"the run has no {name}: its status is {status}",
                where=str(self.folder),
                do="restart the run: the same overrides with reuse=false"
                if status == "done"
                else f"finish the run: {same} resume it",
            )
        return value


def run(overrides: Sequence[str] = (), *, say: Callable[[str], None] | None = None) -> Run:
    """Run an experiment and return the stored run.

    This does what the command ``fedexp <overrides>`` does. The config is checked first.
    By default, a finished run is only read, and an interrupted run is resumed.

    Args:
        overrides: Overrides as on the command line, e.g. ``["method=scaffold",
            "rounds=50"]``. They describe one run, not a sweep.
        say: Function that is called with each line of text for the user. With `print`,
            progress is shown as on the command line. If None, nothing is printed.

    Raises:
        FedexpError: The config cannot be run (`ConfigError`, before anything starts),
            or the run failed.
    """
    given = _listed(overrides)
    if given is None or not all(isinstance(one, str) for one in given):
        if isinstance(overrides, str):
            meant = overrides.split()
        elif isinstance(overrides, Mapping):
            meant = [f"{key}={value}" for key, value in overrides.items()]
        else:
            meant = [str(one) for one in given or []]

        raise ConfigError(
            "overrides are a list of texts, one per key",
            got=repr(overrides),
            do=f"fedexp.run({meant})" if meant else 'write fedexp.run(["key=value"])',
        )

    from fedexp.config.messages import refuse_flags
    from fedexp.running.check import check_jobs, check_split
    from fedexp.running.execute import execute
    from fedexp.runtime.numerics import torch_defaults
    from fedexp.storage.identity import targets

    # Overrides that begin with a dash are flags of the command line. They are refused,
    # also those of a sweep, because this function starts only one run.
    refuse_flags(given)
    with torch_defaults():
        (job,) = check_jobs([given])
        check_split(job)
        folder = Path(execute(job.config, experiment=job.experiment, say=say)["folder"])
    return Run(folder, tuple(dict.fromkeys(targets(job.config.values))))


def load(
    run: str | Path,
    *,
    output_root: str | Path = "outputs",
    allow_classes: Sequence[str] = (),
) -> Run:
    """Load a stored run.

    The stored models name the classes of their networks. A folder from an untrusted
    source could name a class whose module runs harmful code. Therefore only classes of
    fedexp and the classes in `allow_classes` are imported.

    Args:
        run: Folder of the run, or a part of the folder's name that no other run has.
        output_root: Folder that contains the runs.
        allow_classes: Classes of your networks (``["mymodels.Net"]``). The name of a
            module or package allows all its classes.

    Raises:
        FedexpError: No run, or more than one, fits `run`. If none fits, the error names
            the run with the most similar name.
        ConfigError: `allow_classes` is not a list of texts.
    """
    allowed = _listed(allow_classes)
    if allowed is None or not all(isinstance(one, str) for one in allowed):
        raise ConfigError(
            "allow_classes is a list of texts",
            where="allow_classes",
            expected='for example ["mymodels.Net"]',
            got=repr(allow_classes),
            do=f"fedexp.load(..., allow_classes=[{allow_classes!r}])"
            if isinstance(allow_classes, str)
            else None,
        )
    found = find_run(user_path(output_root, "output_root"), str(run))
    return Run(found.path.resolve(), tuple(allowed))


def runs(*conditions: str, output_root: str | Path = "outputs", unfinished: bool = False) -> Runs:
    """Return stored runs as a `pandas.DataFrame`, one row per run, the newest first.

    The method ``curves()`` of the data frame returns one row per run and round. pandas
    is in the extra ``analysis``. The columns are those of
    `fedexp.analysis.frame.Runs`.

    Only the newest finished run of each config is included, as in ``fedexp-runs table``
    and ``fedexp-runs plot``. A run whose stored config cannot be read is named in a
    warning.

    Args:
        *conditions: Conditions that all runs meet, as in ``fedexp-runs list``, e.g.
            ``"method=fedavg,scaffold", "partition.alpha<0.5"``.
        output_root: Folder that contains the runs.
        unfinished: Whether all runs are included: also unfinished runs, runs that
            ``reuse=false`` moved aside, and earlier runs of the same config.

    Raises:
        ConfigError: The folder contains no runs, a condition is not valid, or pandas is
            not installed.
    """
    if wrong := [one for one in conditions if not isinstance(one, str)]:
        first = wrong[0]
        meant: list[str] = [str(one) for one in first] if isinstance(first, list | tuple) else []
        raise ConfigError(
            "conditions are texts",
            got=repr(first),
            do=f"fedexp.runs({', '.join(map(repr, meant))})",
        )
    try:
        from fedexp.analysis.frame import runs_frame
    except ModuleNotFoundError as error:
        raise ConfigError(
            "fedexp.runs needs pandas", do="pip install 'fedexp[analysis]'"
        ) from error

    from fedexp.analysis.groups import finished, newest_by_config
    from fedexp.storage.selection import select
    from fedexp.storage.stored_run import find_runs, warnings_of_configs

    root = user_path(output_root, "output_root").resolve()
    there = find_runs(root)
    if not there:
        raise ConfigError(
            "there are no runs",
            where=str(root / "runs"),
            do="set output_root to the folder that contains the folder 'runs'",
        )
    for text in warnings_of_configs(there):
        warnings.warn(text, stacklevel=2)
    chosen = select(there, conditions)
    return runs_frame(chosen if unfinished else newest_by_config(finished(chosen)))


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
    data: Sequence[tuple[Tensor, Tensor]] | Sequence[Sequence[int] | Tensor] | None = None,
    keep_data: bool = False,
    data_sha256: str | None = None,
    probes: Sequence[Probe] | None = None,
) -> None:
    """Save models that were trained without fedexp, so that a run can aggregate them.

    Model i belongs to client i. A run reads the models if ``client_models.path`` names
    their folder. The run is refused if its method needs facts about the clients that
    the folder does not contain. With ``client_models.data=partition`` you declare that
    the models were trained on the partition of the run's config.

    Args:
        folder: Folder to which ``model.safetensors`` and ``clients.json`` are written.
        state_dicts: One state dict per client, each with all names of the network (as
            `torch.nn.Module.state_dict` returns them).
        model: Class path (``mypackage.Net``), or a ``model`` config node, such as
            ``{"_target_": "...", "hidden": [200]}``. If clients have different
            networks, a list with one path or node per client.
        input_shape: Shape of one sample, e.g. (1, 28, 28). It is passed to the
            constructor of a network that has an argument of this name.
        num_classes: Number of classes. It is passed in the same way.
        class_counts: Number of training samples of each client and class, of shape
            (clients, classes). If None and `data` has labels, the labels are counted.
        num_examples: Number of training samples of each client. By default it is the
            number of samples in `data`. Without `data` it is the sum of the client's
            `class_counts`.
        mean: Mean per channel of the inputs' normalisation, like ``dataset.mean``.
            ``[]`` means no normalisation. A run whose data set has another mean is
            refused. If None, the mean is not checked.
        std: Standard deviation per channel, like ``dataset.std``. It is treated like
            `mean`.
        data: Training samples of each client, one entry per client. An entry is a pair
            of raw inputs (n, ...), uint8 or floating point, and targets (n, ...).
            Alternatively each entry has the positions of the client's samples in the
            training split of a data set, like ``run.partition.of(i)``.
        keep_data: Whether the samples themselves are stored. By default only the
            answers to `probes` are stored.
        data_sha256: Fingerprint of the data set to which positions in `data` refer,
            like ``run.result["partition"]["data_sha256"]``.
        probes: Functions of a client's model and data whose results (answers) a method
            uses. They are computed here if `data` has samples, unless `keep_data` is
            true. The default is the probe of ``method=ma_echo`` with its default keys.

    Raises:
        ConfigError: A state dict does not fit its network or has NaN or infinity, or
            the counts, networks or data do not fit the models.
    """
    import torch

    from fedexp.core.build import build, convert
    from fedexp.core.data import check_normalisation
    from fedexp.core.outcome import Outcome
    from fedexp.core.weights import ModelSpec, Weights
    from fedexp.storage.client_data import CLIENT_DATA, save_client_data
    from fedexp.storage.model_folder import Clients, save_outcome

    place = user_path(folder, "folder")
    shape: tuple[int, ...] = convert(_plain(input_shape), tuple[int, ...], "input_shape")
    num_classes = convert(_plain(num_classes), int, "num_classes")
    means: tuple[float, ...] | None = convert(_plain(mean), tuple[float, ...] | None, "mean")
    stds: tuple[float, ...] | None = convert(_plain(std), tuple[float, ...] | None, "std")
    if means is not None and stds is not None:
        try:
            check_normalisation(means, stds, shape)
        except ValueError as error:
            raise ConfigError(
                f"mean and std do not fit the inputs: {error}",
                where="mean, std",
                got=f"{means} and {stds}",
            ) from error
    states = _state_dicts(state_dicts)
    counts = convert(_plain(class_counts), tuple[tuple[int, ...], ...] | None, "class_counts")
    examples = convert(_plain(num_examples), tuple[int, ...] | None, "num_examples")
    number = len(states)
    content = None
    if data is not None:
        content = _client_data(data, number, shape, num_classes, data_sha256)
        sizes = [len(y) for _, y in content.samples] or [len(i) for i in content.indices]
        if counts is None and content.samples and content.samples[0][1].dim() == 1:
            counts = [torch.bincount(y, minlength=num_classes).tolist() for _, y in content.samples]
        examples = examples or sizes
    if examples is None and counts is not None:
        examples = [sum(row) for row in counts]
    facts = {
        "num_clients": number,
        "clients": list(range(number)),
        "num_examples": examples,
        "class_counts": counts,
        "mean": means,
        "std": stds,
    }

    clients = build(Clients, facts, "")
    _check_counts(clients, num_classes)
    given = [model] * number if isinstance(model, str | Mapping) else _listed(model)
    if given is None or len(given) != number:
        raise ConfigError(
            "every model needs its network",
            where="model",
            expected=f"one class path or config node, or a list of {number}",
            got=repr(model) if given is None else f"a list of {len(given)}",
        )
    for i, one in enumerate(given):
        convert(one, str | dict[str, Any], f"model[{i}]")

    specs = [
        ModelSpec.of({"_target_": one} if isinstance(one, str) else one, shape, num_classes)
        for one in given
    ]
    models = tuple(
        Weights.of_state_dict(spec, state, f"state_dicts[{i}]")
        for i, (spec, state) in enumerate(zip(specs, states, strict=True))
    )
    _check_finite(models)
    if content is not None and content.samples and not keep_data:
        if means is None or stds is None:
            raise ConfigError(
                "probes need to know how inputs were normalised",
                where="mean, std",
                expected="numbers per channel, or [] for inputs that are not normalised",
                got="null",
            )
        content = _answered(content, models, means, stds, probes, shape)

    # The folder may contain client data of models that an earlier call saved.
    (place / CLIENT_DATA).unlink(missing_ok=True)
    save_outcome(Outcome(models, "local", clients=clients.clients), clients, place)
    if content is not None:
        save_client_data(content, place)


def _check_counts(clients: Clients, num_classes: int) -> None:
    """Refuse class counts of another number of classes, or with other sums."""
    sums = clients.num_examples or ()
    for i, row in enumerate(clients.class_counts or ()):
        if len(row) != num_classes:
            raise ConfigError(
                "class_counts needs one number per class",
                where=f"class_counts[{i}]",
                expected=f"{num_classes} numbers (num_classes)",
                got=f"{len(row)} numbers",
            )
        if sum(row) != sums[i]:
            raise ConfigError(
                "class_counts and num_examples disagree",
                where=f"class_counts[{i}]",
                expected=f"a sum of {sums[i]} (num_examples)",
                got=f"a sum of {sum(row)}",
                do="count the same samples for both, or leave out num_examples",
            )


def _check_finite(models: Sequence[Weights]) -> None:
    """Refuse models with NaN or infinity."""
    from fedexp.core.trees import nonfinite

    for i, model in enumerate(models):
        bad = nonfinite({**model.params, **model.buffers})
        if bad is not None:
            raise ConfigError(
                f"a parameter or buffer of a model has NaN or infinity: {bad}",
                where=f"state_dicts[{i}]",
                expected="finite numbers",
                do="train the model again, or leave the client out",
            )


def _listed(value: Any) -> list[Any] | None:
    """Return the entries of a list, tuple, array or other collection in order.

    The result is None for a text, a mapping or a value that is not a collection.
    """
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Collection):
        return None
    return list(value)


def _plain(value: Any) -> Any:
    """Return a value with lists of Python numbers instead of arrays and tensors."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, str) or not isinstance(value, Sequence):
        return value
    return [_plain(entry) for entry in value]


def _state_dicts(state_dicts: Any) -> list[Mapping[str, Tensor]]:
    """Return the argument `state_dicts` of `save_models` as a list, after checks.

    Raises:
        ConfigError: It is something else, or it is empty.
    """
    from torch import Tensor
    from torch.nn import Module

    states = _listed(state_dicts)
    if states is None:
        raise ConfigError(
            "the models are not in a list",
            where="state_dicts",
            expected="a list with one state dict per client",
            got=type(state_dicts).__name__,
        )
    if not states:
        raise ConfigError(
            "there are no models to save", where="state_dicts", expected="one state dict per client"
        )
    for i, state in enumerate(states):
        if not isinstance(state, Mapping) or not all(
            isinstance(key, str) and isinstance(value, Tensor) for key, value in state.items()
        ):
            raise ConfigError(
                f"the model of client {i} is not a state dict",
                where=f"state_dicts[{i}]",
                expected="tensors by name",
                got=type(state).__name__,
                do="give the result of its method state_dict()"
                if isinstance(state, Module)
                else None,
            )
    return states


def _client_data(
    data: Sequence[Any],
    number: int,
    input_shape: tuple[int, ...],
    num_classes: int,
    data_sha256: str | None,
) -> ClientData:
    """Check the argument `data` of `save_models` and return it in its stored form.

    Raises:
        ConfigError: `data` does not fit the models.
    """
    import torch

    from fedexp.core.build import convert
    from fedexp.storage.client_data import ClientData

    entries = _listed(data)
    if entries is None or len(entries) != number:
        raise ConfigError(
            "every model needs its samples",
            where="data",
            expected=f"a list of {number} entries",
            got=repr(data) if entries is None else f"a list of {len(entries)}",
        )

    def is_pair(one: Any) -> bool:
        return isinstance(one, tuple) and len(one) == 2 and hasattr(one[0], "__len__")

    if not all(map(is_pair, entries)):
        indices = [
            torch.tensor(convert(_plain(one), tuple[int, ...], f"data[{i}]"), dtype=torch.int64)
            for i, one in enumerate(entries)
        ]
        if data_sha256 is None:
            raise ConfigError(
                "positions of samples need the fingerprint of their data set",
                where="data_sha256",
                expected="data_sha256 as in the result of a run",
                got="null",
                do='give run.result["partition"]["data_sha256"], or pairs of inputs and targets',
            )
        return ClientData(indices=indices, data_sha256=data_sha256)

    # The models are on the CPU, too
    samples = [(torch.as_tensor(x).cpu(), torch.as_tensor(y).cpu()) for x, y in entries]
    for client, (x, y) in enumerate(samples):
        labels = y.dim() == 1 and not y.is_floating_point()
        # Integers of other types would be taken for values that are not divided by 255
        readable = x.dtype == torch.uint8 or (
            x.is_floating_point() and bool(torch.isfinite(x).all())
        )
        fits = (
            readable
            and len(x) == len(y) > 0
            and tuple(x.shape[1:]) == input_shape
            and (labels or y.dim() > 1)
            and not (labels and not 0 <= int(y.min()) <= int(y.max()) < num_classes)
        )
        if not fits:
            raise ConfigError(
                f"the samples of client {client} do not fit the network",
                where=f"data[{client}]",
                expected=f"inputs (n, {', '.join(map(str, input_shape))}) of type uint8 or of "
                f"finite floating-point numbers, and n targets, labels in 0 .. {num_classes - 1}",
                got=f"inputs {tuple(x.shape)} of type {x.dtype}"
                + (", with NaN or infinity" if x.is_floating_point() and not readable else "")
                + f", and targets {tuple(y.shape)}"
                + (f", labels in {int(y.min())} .. {int(y.max())}" if labels and len(y) else ""),
                do="give raw inputs, before normalisation, and the targets of the same samples",
            )
    return ClientData(samples=[(x, y.long() if y.dim() == 1 else y) for x, y in samples])


def _answered(
    data: ClientData,
    models: Sequence[Weights],
    mean: tuple[float, ...],
    std: tuple[float, ...],
    probes: Sequence[Probe] | None,
    input_shape: tuple[int, ...],
) -> ClientData:
    """Run the probes on the samples of `data`, and return only their answers."""
    import torch

    from fedexp.core.data import Samples
    from fedexp.core.layers import layers_of
    from fedexp.core.net import Net
    from fedexp.methods.ma_echo.aggregator import MAEcho
    from fedexp.storage.client_data import ClientData, probe_name
    from fedexp.tasks.classification import Classification

    answers = []
    for number, (weights, (x, y)) in enumerate(zip(models, data.samples, strict=True)):
        dtype = next(iter(weights.params.values())).dtype
        net = Net.for_evaluation(weights)
        samples = Samples(x, y, mean, std, dtype=dtype)
        asked = probes
        if asked is None:
            asked = (MAEcho().projections(weights.spec, layers_of(weights.spec, input_shape)),)
        with torch.no_grad():
            answers.append(
                {
                    probe_name(probe): probe(
                        net, weights, Classification(), samples, torch.arange(len(y)), number
                    )
                    for probe in asked
                }
            )
    return ClientData(answers=answers)
