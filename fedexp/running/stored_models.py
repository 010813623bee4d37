"""Checks of a folder of stored models (``client_models.path``).

The models were trained earlier, one per client. They replace the local training of the
first round. Most checks run before any data are loaded. `check_clients` runs before the
first round.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from fedexp.config.keys import Config
from fedexp.core.build import build
from fedexp.core.data import POOLED, FederatedData, Partition, Samples
from fedexp.core.device import to_device
from fedexp.core.env import Specs
from fedexp.core.errors import ConfigError, nearest
from fedexp.core.jobs import ClientJob
from fedexp.core.kernel import overrides
from fedexp.core.needs import Needs
from fedexp.core.paths import user_path
from fedexp.core.seeds import seed_of
from fedexp.core.trainer import Trainer
from fedexp.core.weights import ModelSpec, Weights
from fedexp.data.dataset import Dataset, labels_of
from fedexp.data.feature_skew import NO_SKEW, FeatureSkew
from fedexp.data.federated import Division
from fedexp.data.partition import CutPartition, load_partition, validate
from fedexp.engines.stored_models import (
    FROM_FOLDER,
    SAMPLES,
    UNKNOWN,
    Fact,
    StoredModels,
    knows_samples,
)
from fedexp.storage.client_data import load_client_data
from fedexp.storage.files import read_json
from fedexp.storage.model_folder import CLIENTS, MODELS, SPLIT, ModelFolder, fingerprint
from fedexp.storage.stored_run import StoredRun

_CPU = torch.device("cpu")
_STORED = {torch.float32: "F32", torch.float64: "F64"}
_DTYPES = {"F32": "float32", "F64": "float64"}


def find_stored_models(path: str, sha256: str | None) -> StoredModels:
    """Open a folder of stored models.

    Args:
        path: Folder of the models.
        sha256: Expected hash of the folder's content, or None for any content.

    Raises:
        ConfigError: The folder is absent or has another content.
    """
    folder = user_path(path, "client_models.path")
    if not (folder / MODELS).is_file():
        raise ConfigError(
            "there are no models here"
            if folder.is_dir()
            else "the folder of the clients' models does not exist",
            where="client_models.path",
            expected=f"a folder with {MODELS}: "
            "a finished run's, or one that fedexp.save_models wrote",
            got=path,
            do=_nearest_folder_hint(folder),
        )

    found = fingerprint(folder)
    if sha256 is not None and found != sha256:
        raise ConfigError(
            "the folder contains other models",
            where="client_models.sha256",
            expected=sha256,
            got=found,
            do="remove it",
        )

    return StoredModels(ModelFolder.open(folder), load_client_data(folder))


def check_stored_models(
    models: StoredModels,
    clients: int,
    specs: Specs,
    dtype: torch.dtype,
    dataset: Dataset,
    trainer: Trainer,
) -> None:
    """Refuse stored models that do not fit the experiment.

    No data need to be loaded.

    Raises:
        ConfigError: The models do not fit.
    """
    if models.clients.num_clients != clients:
        raise ConfigError(
            "the folder's models are those of another number of clients",
            where="client_models.path",
            expected=f"{clients} (clients={clients})",
            got=f"{models.clients.num_clients}, {len(models.folder.specs)} of them with a model",
            do=f"set clients={models.clients.num_clients}",
        )

    for hook in ("init_state", "init_shared", "finish"):
        if overrides(trainer, hook):
            raise ConfigError(
                "the trainer stores a state at the clients or sends more than the model, "
                "which stored models lack",
                where="trainer",
                got=type(trainer).__name__,
                do="set trainer=sgd, or client_models.path=null",
            )

    rows = models.clients.class_counts
    if rows and len(rows[0]) != dataset.num_classes:
        raise ConfigError(
            "the folder's class counts are of another data set",
            where="client_models.path",
            expected=f"{dataset.num_classes} classes",
            got=f"{len(rows[0])} classes",
        )

    wanted = [specs.of(client) for client in models.clients.clients]
    for number, (stored, spec) in enumerate(zip(models.folder.specs, wanted, strict=True)):
        # Class names and arguments are compared before a class that the folder names is
        # imported.
        if stored.arch != spec.arch or stored.arguments != spec.arguments:
            raise ConfigError(
                f"model {number} of the folder, client {models.clients.clients[number]}'s, "
                "is another network",
                where="architectures.clients" if specs.clients else "model",
                expected=f"that of the folder: {_describe_difference(stored, spec)}",
                got=_describe_difference(spec, stored),
                do="choose the model and the data set that the folder's models were trained with",
            )

    for name in ("mean", "std"):
        known, used = getattr(models.clients, name), getattr(dataset, name)
        if known is not None and known != tuple(used):
            raise ConfigError(
                "the folder's models were trained on inputs of another normalisation",
                where=f"dataset.{name}",
                expected=f"{list(known)}, as in {CLIENTS}",
                got=list(used),
                do="set dataset.mean and dataset.std to what the models were trained with",
            )

    _check_tensors(models, wanted, dtype)


def _check_tensors(models: StoredModels, specs: Sequence[ModelSpec], dtype: torch.dtype) -> None:
    """Refuse tensors that do not fit the networks.

    The network's code may have changed since the models were trained, or other code may
    have written the file.
    """
    initial = {
        spec: Weights.init(spec, seed_of("check"), _CPU, dtype) for spec in dict.fromkeys(specs)
    }

    for number, (layout, spec) in enumerate(zip(models.folder.layouts(), specs, strict=True)):
        tensors = {**initial[spec].params, **initial[spec].buffers}
        wanted = {
            name: (_STORED.get(value.dtype), tuple(value.shape)) for name, value in tensors.items()
        }

        for name in [*wanted, *(name for name in layout if name not in wanted)]:
            kind, shape = wanted.get(name, (None, None))
            stored, stored_shape = layout.get(name, (None, None))
            if shape != stored_shape:
                raise ConfigError(
                    f"tensor '{name}' of model {number} does not fit the network",
                    where="client_models.path",
                    expected=f"shape {list(shape)}" if shape is not None else "no such tensor",
                    got=f"shape {list(stored_shape)}"
                    if stored_shape is not None
                    else "no such tensor",
                    do="the network's code is not the one these models were trained with",
                )

            if kind is not None and stored != kind:
                raise ConfigError(
                    "the folder's models have another type of numbers",
                    where="dtype",
                    expected=f"{stored}, as tensor '{name}' of model {number}",
                    got=f"{kind} (dtype={str(dtype).removeprefix('torch.')})",
                    do=f"set dtype={_DTYPES[stored]}"
                    if stored in _DTYPES
                    else f"save the models as {str(dtype).removeprefix('torch.')}",
                )


@dataclass(frozen=True)
class Requirement:
    """A fact about the clients that a run with stored models needs.

    Args:
        fact: The fact.
        why: The reason why the run needs the fact. It is a clause without a period that
            calls the fact "them", for example "rounds=2 trains the models on them".
        by_probe: Whether stored answers to probes may replace the fact. A probe is a
            function of a model and its client's data.
    """

    fact: Fact
    why: str
    by_probe: bool = False


def requirements(
    config: Config, plugins: Mapping[str, Needs], division: Division
) -> Iterator[Requirement]:
    """Yield the facts about the clients that a run with stored models needs.

    Args:
        config: Typed keys.
        plugins: Requirements of each plug-in, by the plug-in's name in messages.
        division: The configured division.
    """
    for name, needs in plugins.items():
        if needs.sample_counts:
            yield Requirement("numbers of samples", f"{name} weighs models by them")
        if needs.class_counts:
            yield Requirement("class counts", f"{name} uses them")
        if needs.client_inputs:
            yield Requirement("samples", f"{name} computes on them", by_probe=True)

    if config.rounds > 1:
        yield Requirement("samples", f"rounds={config.rounds} trains the models on them")
    if division.val_fraction:
        yield Requirement(
            "samples", f"partition.val_fraction={division.val_fraction:g} takes a share of them"
        )
    if division.held_out:
        yield Requirement(
            "samples", f"eval.held_out={division.held_out} must hold out other samples than them"
        )
    if division.proxy.takes_client_data:
        yield Requirement("samples", "proxy.source=train must take other samples than them")
    if config.eval.per_client:
        yield Requirement("samples", "eval.per_client=true evaluates on them")


def check_facts(
    models: StoredModels,
    required: Sequence[Requirement],
    has_samples: bool,
    unfit: str | None = None,
) -> None:
    """Refuse a folder that lacks a required fact about the clients.

    Args:
        models: The folder's models.
        required: Facts that the run needs.
        has_samples: Whether it is known which samples each client has.
        unfit: The reason why the folder's split cannot be used. None if the split can
            be used, or if the folder has no split.

    Raises:
        ConfigError: A fact is missing.
    """
    known = models.clients
    for one in required:
        present = (
            has_samples
            or {
                "numbers of samples": known.num_examples is not None,
                "class counts": known.class_counts is not None,
                "samples": one.by_probe and bool(models.data.answers),
            }[one.fact]
        )
        if not present:
            raise models.missing(
                one.fact,
                one.why,
                None if unfit is None else "use the data set, proxy and limits of its run",
                unfit,
            )


def has_samples(models: StoredModels, data: Literal["folder", "partition"]) -> bool:
    """Return whether it is known which samples each client has.

    They follow from the configured split (``client_models.data=partition``), or they
    are stored in the folder as samples, as positions of samples or as a split.
    """
    return (
        data == "partition"
        or bool(models.data.samples or models.data.indices)
        or (models.folder.path / SPLIT).is_file()
    )


def check_feature_skew(
    models: StoredModels, data: Literal["folder", "partition"], skew: FeatureSkew
) -> None:
    """Check that the models were trained on inputs with the configured feature skew.

    Args:
        models: The folder's models.
        data: The config key ``client_models.data``.
        skew: The configured feature skew.

    Raises:
        ConfigError: The clients may get the folder's split, although feature skew is
            configured. Or a run of fedexp trained the models with another feature skew.
    """
    if data == "folder":
        if skew != NO_SKEW:
            raise ConfigError(
                "feature_skew changes the inputs of the configured partition's clients, "
                "and client_models.path may contain another split",
                where="client_models.data",
                expected="partition",
                got="folder",
                do="set client_models.data=partition, or feature_skew.kind=none",
            )
        return

    trained = _feature_skew_of(models)
    if trained is not None and trained != skew:
        raise ConfigError(
            "the models of client_models.path were trained with another feature skew",
            where="feature_skew",
            expected=str(asdict(trained)),
            got=str(asdict(skew)),
            do=f"set feature_skew.kind={trained.kind} feature_skew.strength={trained.strength:g}",
        )


def _feature_skew_of(models: StoredModels) -> FeatureSkew | None:
    """Return the feature skew of the run that trained the models.

    The result is None if they do not come from a run of fedexp.
    """
    config = StoredRun(models.folder.path).config
    return build(FeatureSkew, config.get("feature_skew") or {}, "feature_skew") if config else None


def check_partition(models: StoredModels, data: FederatedData, division: Division) -> None:
    """Check that the models were trained on the configured partition.

    Nothing is known about models whose folder has no split.

    Args:
        models: The folder's models.
        data: Data with the configured partition.
        division: The configured division.

    Raises:
        ConfigError: The folder has another split.
    """
    if models.data.samples:
        return
    partition, unfit = _split_of_folder(models, data, division)
    if partition is None or partition.info.get(SAMPLES) == UNKNOWN:
        return
    if unfit is None and partition.sha256 != data.partition.sha256:
        unfit = "its clients have other samples"
    if unfit is not None:
        raise ConfigError(
            "client_models.data=partition, but the models were not trained on the configured "
            "partition",
            where="client_models.data",
            expected="a folder with the configured split",
            got=f"{models.folder.path}: {unfit}",
            do="set client_models.data=folder, or the keys of the run that trained the models",
        )


def place_clients(
    models: StoredModels, data: FederatedData, division: Division, required: Sequence[Requirement]
) -> FederatedData:
    """Replace the configured split by the split that the stored models were trained on.

    Args:
        models: The folder's models.
        data: Data with the configured split.
        division: The configured division.
        required: Facts about the clients that the run needs.

    Returns:
        The data with the folder's split. If the folder has no split, or a split that
        does not fit the data, the data keep the configured split. The ``info`` of their
        partition then marks the clients' samples as unknown.

    Raises:
        ConfigError: The run needs the folder's split, which cannot be used.
    """
    cut = isinstance(data.partition, CutPartition)
    if models.data.samples:
        if cut:
            raise _no_validation(models)
        if division.held_out or division.proxy.takes_client_data:
            raise _no_disjoint_samples(models)
        return _with_samples(models, data)
    partition, unfit = _split_of_folder(models, data, division)
    if partition is not None and _feature_skew_of(models) not in (None, NO_SKEW):
        unfit = "feature_skew changed the inputs that its models were trained on"

    if partition is None or partition.info.get(SAMPLES) == UNKNOWN or unfit is not None:
        check_facts(models, required, has_samples=False, unfit=unfit)
        info = data.partition.info | {SAMPLES: UNKNOWN}
        return replace(data, partition=replace(data.partition, info=info))

    if partition.sha256 == data.partition.sha256:
        return data
    info = partition.info | {SAMPLES: FROM_FOLDER}
    if not cut:
        whole = Partition(partition.indices, partition.offsets, info)
        return replace(data, partition=whole)

    if not isinstance(partition, CutPartition):
        raise _no_validation(models)
    train = data.train
    held = torch.from_numpy(partition.held).to(train.x.device)
    val = Samples(train.x[held], train.y[held], train.mean, train.std, None, train.dtype)
    return replace(data, partition=replace(partition, info=info), val=val)


def _no_validation(models: StoredModels) -> ConfigError:
    return ConfigError(
        "validation samples are cut from the clients' samples, "
        "and the folder's models were trained on all of them",
        where="partition.val_fraction",
        expected="0",
        got=f"models of {models.folder.path}",
        do="set partition.val_fraction=0",
    )


def _no_disjoint_samples(models: StoredModels) -> ConfigError:
    return ConfigError(
        "held-out samples and server data are taken from the data set's training samples, "
        "and the folder's models may have been trained on the same samples",
        where="eval.held_out, proxy.source",
        expected="0, and none, test or noise",
        got=f"models of {models.folder.path}, with samples of their own",
        do="set eval.held_out=0 proxy.source=none, or take server data from proxy.dataset",
    )


def _split_of_folder(
    models: StoredModels, data: FederatedData, division: Division
) -> tuple[Partition | None, str | None]:
    """Return the split that a folder contains, and the reason why it does not fit.

    The split is None if the folder has no split. The reason is None if the split fits
    or if there is no split.
    """
    path, server = models.folder.path, division.proxy
    pool = _pool(
        server.takes_client_data,
        server.size,
        division.limit_proxy,
        division.held_out,
        division.seed_data,
    )

    if models.data.indices:
        partition = Partition.from_lists([index.numpy() for index in models.data.indices])
        stored_sha256, stored_pool, size = models.data.data_sha256, None, None
        stored_split = None
    elif (path / SPLIT).is_file():
        partition = load_partition(path / SPLIT)
        facts = read_json(path / "data.json") or {}
        config = StoredRun(path).config
        proxy, limit = config.get("proxy") or {}, config.get("limit") or {}
        stored_sha256, stored_split = facts.get("data"), facts.get("partition")
        stored_pool = _pool(
            proxy.get("source") == "train" and proxy.get("dataset") is None,
            proxy.get("size", 0),
            limit.get("proxy"),
            (config.get("eval") or {}).get("held_out", 0),
            config.get("seed_data", 0),
        )
        size = partition.info.get("pool")
    else:
        return None, None

    if stored_split not in (None, partition.sha256):
        return partition, "it is not the split that the run began with"
    if stored_sha256 != data.fingerprint:
        return partition, "it is a split of other data"
    if stored_pool != pool:
        return partition, "proxy.*, eval.held_out or seed_data chose other training samples"
    if (size or len(data.train)) != len(data.train) or (
        models.data.indices and division.limit_train is not None
    ):
        return partition, f"this run has {len(data.train)} training samples"
    return validate(partition, len(data.train)) if models.data.indices else partition, None


def _pool(
    cut: bool, size: object, limit: object, held_out: int, seed: int
) -> tuple[object, ...] | None:
    """Return the values that decide which training samples clients may get.

    Server data (``proxy``) and ``eval.held_out`` can take away training samples. The
    result is None if clients may get all training samples.

    Args:
        cut: Whether server data are taken from the clients' training samples.
        size: Number or share of these server data.
        limit: Largest number of them, or None.
        held_out: Number of held-out samples.
        seed: Seed of both choices.
    """
    return (held_out, size if cut else 0, limit if cut else None, seed) if cut or held_out else None


def _with_samples(models: StoredModels, data: FederatedData) -> FederatedData:
    """Return `data` with the clients' stored samples as training data.

    Raises:
        ConfigError: The stored samples have other shapes than the data set's samples,
            or one of these two kinds of samples is 8-bit and the other is not.
    """
    parts, train = models.data.samples, data.train
    for x, y in parts:
        stored = (x.dtype == torch.uint8, x.shape[1:], y.shape[1:])
        wanted = (train.x.dtype == torch.uint8, train.x.shape[1:], train.y.shape[1:])
        if stored != wanted:
            raise ConfigError(
                "the folder's samples do not have the form of the data set's samples",
                where="client_models.path",
                expected=f"{train.x.dtype}, inputs {tuple(train.x.shape[1:])}, "
                f"targets {tuple(train.y.shape[1:])}",
                got=f"{x.dtype}, inputs {tuple(x.shape[1:])}, targets {tuple(y.shape[1:])}",
                do="save the models with raw samples like those of the data set "
                "(8-bit images with values 0 to 255)",
            )

    ends = np.cumsum([len(y) for _, y in parts])
    indices = np.split(np.arange(ends[-1]), ends[:-1])
    x, y = (torch.cat(list(part)) for part in zip(*parts, strict=True))

    return replace(
        data,
        train=replace(train, x=to_device(x, train.x.device), y=to_device(y, train.x.device)),
        partition=Partition.from_lists(list(indices), **{SAMPLES: FROM_FOLDER}),
        labels=labels_of(y),
        pool_sha256=None,
    )


def check_clients(
    models: StoredModels, jobs: Sequence[ClientJob], data: FederatedData
) -> list[str]:
    """Refuse jobs without a stored model, and stored models of clients without data.

    The jobs are those of the first round.

    Returns:
        Notes for the user.

    Raises:
        ConfigError: A job has no model, or the client of a model has no data.
    """
    for job in jobs:
        if job.client not in models:
            if job.client == POOLED:
                raise ConfigError(
                    "training on pooled data has no clients whose models could be given",
                    where="client_models.path",
                    expected="null",
                    got=str(models.folder.path),
                )

            raise ConfigError(
                f"the folder has no model of client {job.client}",
                where="client_models.path",
                expected="a model of every client that takes part in the first round",
                got=f"models of {len(models.number)} of {models.clients.num_clients} clients",
                do="use the partition, seed, clients_per_round and client_dropout "
                "that they were trained with",
            )

        for probe in job.probes:
            if not knows_samples(data) and models.answer(job.client, probe) is None:
                stored = models.data.answers
                raise models.missing(
                    "samples",
                    f"the answers in the folder are to other probes than {probe!r}"
                    if stored
                    else f"the method asks clients for {probe.name}, which follows from them",
                    "save the models with keep_data=True" if stored else None,
                )

    sizes = data.partition.sizes
    empty = [client for client in models.number if client >= len(sizes) or not sizes[client]]
    if empty:
        raise ConfigError(
            f"client {empty[0]} has a model in the folder and no data in this partition",
            where="partition",
            expected="samples at every client with a model, "
            "because methods weigh and evaluate the model by them",
            do="use the partition the models were trained on: "
            "partition=file partition.path=.../partition.safetensors",
        )

    notes = []
    if data.partition.info.get(SAMPLES) == FROM_FOLDER:
        notes.append(
            "client_models: the clients have the samples that the models of "
            f"{models.folder.path} were trained on, and not those of the configured partition"
        )

    rows = models.clients.class_counts
    chosen = list(models.clients.clients)
    known = knows_samples(data) and rows is not None
    if known and data.class_counts()[chosen].tolist() != [list(row) for row in rows or ()]:
        notes.append(
            f"client_models: the clients of {models.folder.path} have other classes than those of "
            "this partition. Counts come from the folder, and everything else about clients' data "
            "from this partition"
        )
    return notes


def _describe_difference(spec: ModelSpec, other: ModelSpec) -> str:
    """Describe `spec` by the arguments in which it differs from `other`."""
    if spec.arch != other.arch:
        return spec.arch
    own, others = spec.arguments, other.arguments
    differing = [name for name in {**own, **others} if own.get(name) != others.get(name)]
    return f"{spec.arch} with {', '.join(f'{name}={own.get(name)}' for name in differing)}"


def _nearest_folder_hint(folder: Path) -> str:
    """Return advice that names a folder inside `folder`, or one of a similar name."""
    if (folder / "result.json").is_file():
        return "restart that run with reuse=false, or name another folder"
    if folder.is_dir():
        inside = [child for child in sorted(folder.iterdir()) if (child / MODELS).is_file()]
        return (
            f"did you mean '{inside[0]}'?"
            if inside
            else "finish that run first, or name another folder"
        )

    missing = folder
    while not missing.parent.is_dir():
        missing = missing.parent
    names = [child.name for child in missing.parent.iterdir() if child.is_dir()]
    near = nearest(missing.name, names)

    return (
        f"did you mean '{missing.parent / near}'?"
        if near
        else "relative paths start at the working directory"
    )
