"""The experiment that a resolved config describes: its objects, checks and data.

This module does not train. It builds what `fedexp.running.steps` executes.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from fedexp.config.keys import Architectures, Config
from fedexp.core.aggregator import Aggregator
from fedexp.core.build import build
from fedexp.core.data import FederatedData
from fedexp.core.device import check_device, device_name, has_float64
from fedexp.core.engine import Engine
from fedexp.core.env import Env, Extent, Sampling, Specs
from fedexp.core.errors import ConfigError, DataError, suggest
from fedexp.core.model_check import check_model
from fedexp.core.needs import Needs
from fedexp.core.numerics import Numerics
from fedexp.core.paths import user_path
from fedexp.core.resolved_config import ResolvedConfig
from fedexp.core.server_optimizer import ServerOptimizer
from fedexp.core.task import Task
from fedexp.core.trainer import Trainer
from fedexp.core.weights import ModelSpec
from fedexp.data.dataset import Dataset
from fedexp.data.feature_skew import FeatureSkew
from fedexp.data.federated import Division, Proxy, check_scheme, check_validation, federate
from fedexp.data.partition import Partitioner
from fedexp.engines.stored_models import StoredModels
from fedexp.evaluation.breakdown import class_names, client_names
from fedexp.evaluation.evaluate import metric_names
from fedexp.running.needs import check_needs
from fedexp.running.stored_models import (
    Requirement,
    check_facts,
    check_feature_skew,
    check_partition,
    check_stored_models,
    find_stored_models,
    has_samples,
    place_clients,
    requirements,
)
from fedexp.runtime.random_numbers import class_path, forbid_global_random
from fedexp.runtime.resources import num_threads_of_run


@dataclass(frozen=True, eq=False)
class Experiment:
    """One checked experiment.

    Args:
        config: Typed keys, with ``limit.*`` applied.
        dataset: Data set of the clients.
        partitioner: Splits the data set among clients.
        proxy: Data of the server.
        feature_skew: The change of the clients' inputs.
        specs: Architectures of the networks of the server and the clients. If there is
            an `extractor`, they cover only the part of the model after the extractor.
        input_shape: Shape of one input sample of the networks in `specs`.
        extractor: Frozen first part of the model. Its features are computed once and
            are the inputs of the networks in `specs`. None if the model has no frozen
            part, or if training batches are augmented. Augmentation would change the
            features in every batch.
        task: Loss and metrics.
        trainer: Local training.
        aggregator: Work of the server.
        server_optimizer: Optimizer that applies the averaged client update on the
            server.
        engine: Engine that executes the clients' jobs.
        stored_models: Client models that were trained earlier. They replace the local
            training of the first round. None if the first round trains.
        ignored_limits: Keys of ``limit.*`` that are set but ignored, with the reason.
            Empty with ``debug=smoke``, which sets all limits.
    """

    config: Config
    dataset: Dataset
    partitioner: Partitioner
    proxy: Proxy
    feature_skew: FeatureSkew
    specs: Specs
    input_shape: tuple[int, ...]
    extractor: ModelSpec | None
    task: Task
    trainer: Trainer
    aggregator: Aggregator
    server_optimizer: ServerOptimizer
    engine: Engine
    stored_models: StoredModels | None
    ignored_limits: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, config: ResolvedConfig) -> Experiment:
        """Build an experiment and make all checks that need no data.

        Raises:
            ConfigError: An object cannot be built, or two objects do not fit each
                other.
        """
        partitioner = build(
            Partitioner,  # type: ignore[type-abstract]
            config["partition"],
            "partition",
        )
        full = Config.of(config)
        own = _apply_limits(full, partitioner)
        dataset = build(Dataset, config["dataset"], "dataset")  # type: ignore[type-abstract]
        task = build(Task, config["task"], "task")  # type: ignore[type-abstract]
        check_targets(task, dataset)
        outputs = task.output_shape(dataset.num_classes, dataset.shape)
        specs = _build_specs(
            config["model"], own.architectures, own.clients, dataset.shape, outputs[0]
        )
        parts = specs.server.split() if dataset.augment is None else None
        models = own.client_models
        extractor, spec, input_shape = parts or (None, specs.server, dataset.shape)
        experiment = cls(
            config=own,
            dataset=dataset,
            partitioner=partitioner,
            proxy=build(Proxy, own.proxy, "proxy"),
            feature_skew=build(FeatureSkew, own.feature_skew, "feature_skew"),
            specs=specs if extractor is None else Specs(spec),
            input_shape=input_shape,
            extractor=extractor,
            task=task,
            trainer=build(Trainer, config["trainer"], "trainer"),
            aggregator=build(
                Aggregator,  # type: ignore[type-abstract]
                config["aggregator"],
                "aggregator",
            ),
            server_optimizer=build(
                ServerOptimizer,  # type: ignore[type-abstract]
                config["server_optimizer"],
                "server_optimizer",
            ),
            engine=build(Engine, config["engine"], "engine"),  # type: ignore[type-abstract]
            stored_models=None
            if models.path is None
            else find_stored_models(models.path, models.sha256),
            ignored_limits={}
            if config.choices.get("debug") == "smoke"
            else _ignored_limits(full, partitioner),
        )

        experiment = experiment._with_limit_of_pool(full.limit.train)
        experiment._check()
        return experiment

    def _with_limit_of_pool(self, limit: int | None) -> Experiment:
        """Apply ``limit.train`` if the partition is of a pool with this limit.

        A higher limit is applied as well. It has no effect if the partition's file
        splits all training samples. Otherwise the file is refused when it is read.
        """
        size = None if limit is None else self.partitioner.pool_size()
        if limit is None or size is None:
            return self
        limits = replace(self.config.limit, train=limit)
        limited = replace(
            self,
            config=replace(self.config, limit=limits),
            ignored_limits={
                key: why for key, why in self.ignored_limits.items() if key != "limit.train"
            },
        )

        taken = limited.division.proxy_count(limit) if self.proxy.takes_client_data else 0
        return limited if size <= limit - taken - self.config.eval.held_out else self

    def _check(self) -> None:
        if self.config.device != "auto":
            check_device(self.config.device, self.config.dtype)
        self._check_float64()
        self._check_step_size()
        check_scheme(self.dataset, self.partitioner)
        self.partitioner.check(self.config.clients, self.dataset.num_classes)
        check_validation(self.config.eval.held_out, bool(self.partitioner.val_fraction))
        check_needs(
            self.config,
            self.trainer,
            self.aggregator,
            self.server_optimizer,
            proxy=self.proxy,
            validation=self.has_validation,
            specs=self.specs,
            task=self.task,
            dataset=self.dataset,
            images=self.dataset.pixels and self.extractor is None,
        )

        check_metrics(self)
        if self.config.eval.per_class:
            check_classes(self)
        outputs = self.task.output_shape(self.dataset.num_classes, self.dataset.shape)
        device = device_name(self.config.device).partition(":")[0]
        if self.extractor is not None:
            _check_model(self.extractor, self.dataset.shape, (math.prod(self.input_shape),), device)

        for spec in self.specs.distinct:
            with self._name_model_in_errors(spec):
                has_batch_norm = _check_model(spec, self.input_shape, outputs, device)
            if has_batch_norm and self.config.local.batch_size == 1 and spec in self.specs.trained:
                raise ConfigError(
                    "BatchNorm needs more than one sample, "
                    "and every training batch would have only one",
                    where="local.batch_size",
                    expected="2 or more",
                    got=1,
                    do="raise local.batch_size, or choose a model without BatchNorm (resnet18_gn)",
                )
            with self._name_model_in_errors(spec):
                self.trainer.check(spec, self.input_shape)
                self.aggregator.check(spec, self.input_shape)

        self.aggregator.check_extent(self.extent)
        if self.stored_models is not None:
            check_feature_skew(
                self.stored_models, self.config.client_models.data, self.feature_skew
            )
            check_stored_models(
                self.stored_models,
                self.config.clients,
                self.specs,
                getattr(torch, self.config.dtype),
                self.dataset,
                self.trainer,
            )
            check_facts(
                self.stored_models,
                self.client_requirements,
                has_samples(self.stored_models, self.config.client_models.data),
            )

        self.proxy.check(self.dataset)
        self.feature_skew.check(self.dataset, self.config.clients)
        for dataset in (self.dataset, self.proxy.dataset):
            if dataset is not None:
                dataset.check(
                    user_path(self.config.data_root, "data_root"),
                    self.dataset.download or dataset.download,
                )

    def _check_float64(self) -> None:
        device = device_name(self.config.device)
        if self.aggregator.computes_in_float64 and not has_float64(torch.device(device)):
            raise ConfigError(
                f"{type(self.aggregator).__name__} computes in float64, which '{device}' lacks",
                where="device",
                expected="cpu or cuda",
                got=device,
                do="set device=cpu",
            )

    def _check_step_size(self) -> None:
        local, rounds = self.config.local, self.config.rounds
        # From the end of the warm-up on, the step size only falls or only grows, so the
        # last round shows whether the limits of floating-point numbers are reached.
        try:
            last = local.lr * local.lr_factor(rounds - 1, rounds)
        except OverflowError:
            last = math.inf
        if last == 0 or math.isinf(last):
            raise ConfigError(
                f"the local step size is {'rounded to 0' if last == 0 else 'infinite'} "
                f"in round {rounds}",
                where="local.lr, local.lr_decay",
                expected=f"positive, finite step sizes in all {rounds} rounds",
                got=f"local.lr={local.lr:g}, local.lr_decay={local.lr_decay:g}",
                do="bring local.lr_decay nearer to 1, raise local.lr_step, or lower rounds",
            )

    @property
    def needs(self) -> Needs:
        return self.trainer.needs | self.aggregator.needs | self.server_optimizer.needs

    @contextlib.contextmanager
    def _name_model_in_errors(self, spec: ModelSpec) -> Iterator[None]:
        """Correct the key in errors about a model that ``architectures`` names.

        Errors about models name the key ``model``. If the model comes from
        ``architectures``, the error names its entry there instead.
        """
        chosen = self.config.architectures
        # The config may name a model for a range of clients. `_apply_limits` has
        # replaced the ranges by a list of names in the order of the clients.
        names = [str(name) for name in chosen.clients or ()]
        try:
            yield
        except ConfigError as error:
            if error.facts.get("where") == "model":
                if names and spec in self.specs.clients:
                    first = self.specs.clients.index(spec)
                    place = f"architectures.clients: '{names[first]}', the model of client {first}"
                    error.facts["where"] = place
                elif chosen.server and spec == self.specs.server:
                    error.facts["where"] = f"architectures.server: '{chosen.server}'"
            raise

    @property
    def client_requirements(self) -> list[Requirement]:
        """Facts about the clients that a run with stored models must know."""
        plugins = {
            f"{group.replace('_', ' ')} {type(plugin).__name__}": plugin.needs
            for group, plugin in (
                ("trainer", self.trainer),
                ("aggregator", self.aggregator),
                ("server_optimizer", self.server_optimizer),
            )
        }
        return list(requirements(self.config, plugins, self.division))

    @property
    def extent(self) -> Extent:
        """Rounds, clients and client sampling of the config.

        A split may drop clients. The run then has fewer clients than stated here.
        """
        config = self.config
        sampling = Sampling(config.sampling, config.expected_cohort_size(config.clients))
        return Extent(
            config.rounds,
            config.clients,
            sampling,
            limit_server_steps=config.limit.server_steps,
        )

    @property
    def has_validation(self) -> bool:
        """Whether training samples are set aside for validation.

        They are taken from the clients' samples, or from samples that no client has.
        """
        return bool(self.partitioner.val_fraction or self.config.eval.held_out)

    @property
    def metric_names(self) -> list[str]:
        """Names of the metrics on the test set and on the validation set, if any.

        The default headline metric is first. Metrics of ``eval.per_client`` on training
        data are left out, because runs must not be compared by them.
        """
        splits = ("test", "val") if self.has_validation else ("test",)
        delivers, classes = self.aggregator.delivers, self.dataset.num_classes
        names = [name for split in splits for name in metric_names(self.task, delivers, split)]

        if self.config.eval.per_class:
            names += [
                name
                for split in splits
                for name in class_names(self.task, delivers, split, classes)
            ]

        if self.config.eval.per_client and self.partitioner.val_fraction:
            names += client_names(self.task, "val")
        return names

    @property
    def headline(self) -> str:
        """The metric by which runs are compared."""
        name = self.config.headline.metric
        return self.metric_names[0] if name == "auto" else name

    @property
    def stop_metric(self) -> str:
        """The metric that ``stop.target`` refers to."""
        name = self.config.stop.metric
        return self.headline if name == "auto" else name

    def meets(self, metric: str, value: float | None, target: float) -> bool:
        """Return whether a value of `metric` reaches `target`."""
        if value is None:
            return False
        return value >= target if self.task.higher_is_better(metric) else value <= target

    @property
    def client_cache_folder(self) -> Path | None:
        """Folder of the client cache. None if this run does not use the cache."""
        config = self.config
        if not (config.memo.enabled and config.reuse):
            return None
        return user_path(config.output_root, "output_root").resolve() / "memo"

    @property
    def division(self) -> Division:
        """The division of the samples among clients."""
        config = self.config
        return Division(
            partitioner=self.partitioner,
            clients=config.clients,
            seed_data=config.seed_data,
            val_fraction=self.partitioner.val_fraction,
            held_out=config.eval.held_out,
            proxy=self.proxy,
            limit_train=config.limit.train,
            limit_proxy=config.limit.proxy,
            limit_test=config.limit.test,
        )

    def load(self, device: torch.device) -> FederatedData:
        """Load the data onto `device` and split it."""
        plugins = {"dataset": class_path(self.dataset), "partition": class_path(self.partitioner)}
        if self.proxy.dataset is not None:
            plugins["proxy.dataset"] = class_path(self.proxy.dataset)
        do = (
            "draw from the generator that `sample` is given, "
            "or from fedexp.core.seeds.numpy_generator(name, ...)"
        )

        with forbid_global_random(plugins, "reading and splitting the data", do, DataError):
            data = federate(
                self.dataset,
                self.division,
                root=user_path(self.config.data_root, "data_root"),
                download=self.dataset.download,
                device=device,
                dtype=getattr(torch, self.config.dtype),
                feature_skew=self.feature_skew,
            )
        self._check_dropped(data.partition.num_clients)
        if self.stored_models is None:
            return data
        if self.config.client_models.data == "partition":
            check_partition(self.stored_models, data, self.division)
            return data
        return place_clients(self.stored_models, data, self.division, self.client_requirements)

    def _check_dropped(self, left: int) -> None:
        """Refuse a split with fewer clients if they have different architectures.

        The clients that are left get new numbers. ``architectures.clients`` would then
        assign the architectures to other clients.
        """
        if left < self.config.clients and len({*self.specs.clients}) > 1:
            raise ConfigError(
                "the split has fewer clients, so the numbers of the clients in "
                "architectures.clients change",
                where="partition",
                expected=f"a split with all {self.config.clients} clients",
                got=f"{left} clients",
                do="set partition.on_small=repair, or lower partition.min_size"
                if self.partitioner.on_small == "drop"
                else f"set clients={left}",
            )

    def prepare(self, data: FederatedData, note: Callable[[str], None]) -> FederatedData:
        """Return the data that networks are trained on.

        These are `data`, or the extractor's features of `data` if there is an
        `extractor`.
        """
        if self.extractor is None:
            return data
        from fedexp.data.features import featured

        return featured(data, self.extractor, self.client_cache_folder, note)

    def server_work(self, where: str) -> contextlib.AbstractContextManager[None]:
        """Raise an error if the `with` block draws from a global random generator.

        The block executes the server's work, which calls plug-ins in the run's own
        process.

        Args:
            where: Description of the block's work, for messages.
        """
        plugins = {
            "aggregator": class_path(self.aggregator),
            "server_optimizer": class_path(self.server_optimizer),
            "trainer": class_path(self.trainer),
            "task": class_path(self.task),
            **{
                f"model {number}": spec.arch
                for number, spec in enumerate(self.specs.distinct, start=1)
            },
        }

        return forbid_global_random(
            plugins,
            where,
            "draw from fedexp.core.seeds.torch_generator(env.seed, name, env.round, ...)",
        )

    def env(self, data: FederatedData, device: torch.device) -> Env:
        """Build the environment that the aggregator receives.

        Args:
            data: Data as `prepare` returned them.
            device: Device that the run computes on.
        """
        config = self.config
        return Env(
            sizes=data.partition.sizes,
            specs=self.specs,
            seed=config.seed,
            trainer=self.trainer,
            server_optimizer=self.server_optimizer,
            task=self.task,
            local_training=replace(config.local, max_steps=config.limit.steps),
            rounds=config.rounds,
            sampling=Sampling(
                config.sampling, config.expected_cohort_size(data.partition.num_clients)
            ),
            init=config.init,
            device=device,
            dtype=getattr(torch, config.dtype),
            num_classes=data.num_classes,
            input_shape=self.input_shape,
            proxy=data.proxy,
            limit_server_steps=config.limit.server_steps,
            validation=data.val if self.needs.validation else None,
            domain=data.train.domain,
            client_dropout=config.client_dropout,
            legacy=data.after_split,
        )


def data_content(config: ResolvedConfig) -> list[str | None] | None:
    """Return the fingerprints of the clients' data set and of ``proxy.dataset``.

    A file is read again only if it has changed.

    Returns:
        The two fingerprints. Each is None if its data are absent. The second is also
        None if there is no ``proxy.dataset``. The whole result is None if the config
        determines all data, as for synthetic data sets.
    """
    own = Config.of(config)
    dataset = build(Dataset, config["dataset"], "dataset")  # type: ignore[type-abstract]
    other = build(Proxy, own.proxy, "proxy").dataset
    if dataset.pinned and (other is None or other.pinned):
        return None
    root = user_path(own.data_root, "data_root")

    return [dataset.content(root), None if other is None else other.content(root)]


def _build_specs(
    model: Mapping[str, Any],
    architectures: Architectures,
    clients: int,
    shape: tuple[int, ...],
    outputs: int,
) -> Specs:
    """Build the networks of the server and of the clients.

    Raises:
        ConfigError: There are several networks, and one of them has a frozen extractor.
    """
    known = {
        name: ModelSpec.of(node, shape, outputs) for name, node in architectures.models.items()
    }
    common = ModelSpec.of(model, shape, outputs)
    own = tuple(known[name] for name in architectures.names(clients))
    specs = (
        Specs(known[architectures.server], own or (common,))
        if architectures.server
        else Specs(common, own)
    )

    frozen = [spec for spec in specs.distinct if spec.split()] if len(specs.distinct) > 1 else []
    if frozen:
        raise ConfigError(
            "a frozen extractor's features are computed once, for one network that all have",
            where="architectures",
            expected="models without a frozen extractor, "
            "or one model for the server and all clients",
            got=frozen[0].arch,
        )

    return specs


def check_targets(task: Task, dataset: Dataset) -> None:
    """Refuse a task that needs other targets than the data set has."""
    if task.targets != dataset.targets:
        raise ConfigError(
            f"the task trains on {task.targets}, "
            f"and data set '{dataset.name}' has {dataset.targets}",
            where="task",
            expected=f"a task for {dataset.targets}",
            got=type(task).__name__,
            do="set task=segmentation model=unet"
            if dataset.targets == "masks"
            else "set task=classification, or a dataset with masks (shapes_masks, carvana)",
        )


def check_classes(experiment: Experiment) -> None:
    """Refuse metrics per class (``eval.per_class``) if they cannot be measured.

    They cannot be measured if samples do not have one class each, or if every client
    keeps its own model.

    Raises:
        ConfigError: The metrics cannot be measured.
    """
    if experiment.dataset.targets != "labels":
        raise ConfigError(
            f"samples of data set '{experiment.dataset.name}' do not have one class each",
            where="eval.per_class",
            expected="false, or a data set with labels",
            got=True,
        )

    if experiment.aggregator.delivers == "local":
        raise ConfigError(
            f"aggregator {type(experiment.aggregator).__name__} keeps one model per client, "
            "and none of them knows all classes",
            where="eval.per_class",
            expected="false",
            got=True,
            do="set eval.per_client=true: each model on its client's own data",
        )


def check_metrics(experiment: Experiment) -> None:
    """Refuse metrics that are not measured, and targets that cannot be reported.

    Raises:
        ConfigError: A metric or a target is invalid for the experiment.
    """
    measured = experiment.metric_names
    for key, name in (
        ("headline.metric", experiment.config.headline.metric),
        ("stop.metric", experiment.config.stop.metric),
    ):
        if name != "auto" and name not in measured:
            needs_validation = name.replace("val/", "test/", 1) in measured
            raise ConfigError(
                f"'{name}' is not measured here",
                where=key,
                expected=", ".join(["auto", *measured]),
                do="set eval.held_out or partition.val_fraction, which reserve validation data"
                if needs_validation
                else suggest(name, measured),
            )

    headline, stop = experiment.config.headline, experiment.config.stop
    for target in headline.targets:
        _check_target(experiment.task, "headline.targets", experiment.headline, target)
    if stop.target is not None:
        _check_target(experiment.task, "stop.target", experiment.stop_metric, stop.target)
    if not headline.targets:
        return

    if not experiment.headline.startswith("test/"):
        raise ConfigError(
            "targets need a metric of the test set",
            where="headline.targets",
            expected=", ".join(name for name in measured if name.startswith("test/")),
            got=f"headline.metric={experiment.headline}",
            do="set headline.metric=auto, or headline.targets=[]",
        )

    if stop.target is not None:
        raise ConfigError(
            "a run that stops early cannot report that it never reaches a target",
            where="headline.targets",
            expected="stop.target=null",
            got=f"stop.target={stop.target:g}",
            do="set one of the two",
        )


def _check_target(task: Task, key: str, metric: str, target: float) -> None:
    if task.higher_is_better(metric) and target > task.highest:
        raise ConfigError(
            f"'{metric}' never reaches {target:g}",
            where=key,
            expected=f"at most {task.highest:g}",
            got=f"{target:g}",
            do=f"write a percentage as a share: {target / 100:g}"
            if task.highest == 1 and target <= 100
            else None,
        )


@cache
def _check_model(
    spec: ModelSpec, input_shape: tuple[int, ...], output_shape: tuple[int, ...], device: str
) -> bool:
    do = (
        "initialise with torch only, whose generator is seeded for it. "
        "Random layers: fedexp.core.dropout.Dropout"
    )
    with forbid_global_random({"model": spec.arch}, "model", do, ConfigError):
        return check_model(spec, input_shape, output_shape, device)


def _apply_limits(config: Config, partitioner: Partitioner) -> Config:
    """Apply ``limit.*`` to the config, except `_impossible_limits`."""
    impossible = _impossible_limits(config, partitioner)
    limit = replace(config.limit, **{key.removeprefix("limit."): None for key in impossible})
    clients = min(config.clients, limit.clients or config.clients)
    # Architectures are assigned to all clients before the limit is applied. The limit
    # keeps the first clients.
    names = config.architectures.names(config.clients)
    m = config.clients_per_round

    return replace(
        config,
        limit=limit,
        rounds=min(config.rounds, limit.rounds or config.rounds),
        clients=clients,
        architectures=replace(config.architectures, clients=names or None),
        clients_per_round=min(m, clients) if isinstance(m, int) else m,
    )


def _impossible_limits(config: Config, partitioner: Partitioner) -> dict[str, str]:
    """Return the keys of the limits that cannot be applied, with the reason.

    Some splits, such as one from a file, cannot be drawn for fewer clients or samples.
    ``limit.train`` nevertheless applies to a file of a split with this limit.
    """
    if not partitioner.scales:
        split = f"partition {partitioner.name} cannot be made for fewer"
        return {"limit.clients": f"{split} clients", "limit.train": f"{split} samples"}
    if config.client_models.path is not None:
        return {"limit.clients": "client_models.path has the models of all clients"}
    return {}


def _ignored_limits(config: Config, partitioner: Partitioner) -> dict[str, str]:
    """Return the `_impossible_limits` that are set.

    ``limit.clients`` is left out if it is at least the number of clients. The number of
    samples is not known here, so ``limit.train`` is never left out.
    """
    limit = config.limit
    effective = {
        "limit.clients": limit.clients is not None and limit.clients < config.clients,
        "limit.train": limit.train is not None,
    }
    impossible = _impossible_limits(config, partitioner)
    return {key: why for key, why in impossible.items() if effective[key]}


def load_data(config: ResolvedConfig) -> FederatedData:
    """Load the data and split of a resolved config onto the CPU."""
    return Experiment.of(config).load(torch.device("cpu"))


def choose_numerics(config: Config) -> Numerics:
    """Choose device, threads and types for a first launch. The engine is chosen later.

    Raises:
        ConfigError: The device is absent.
    """
    device = device_name(config.device)
    check_device(device, config.dtype)
    return Numerics(
        engine={},
        threads=num_threads_of_run(config.threads),
        device=device,
        dtype=config.dtype,
        precision=config.precision,
        deterministic=config.deterministic,
        cudnn_benchmark=config.cudnn_benchmark,
    )
