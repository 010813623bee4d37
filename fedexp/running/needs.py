"""Checks that the requirements (`Needs`) of all plug-ins are met.

The plug-ins are the trainer, the aggregator and the server optimizer. If a requirement
is not met, the config is refused before any data are loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations, product
from typing import Any

from fedexp.config.folders import conf_dirs
from fedexp.config.keys import Config
from fedexp.core.aggregator import Aggregator
from fedexp.core.env import Specs
from fedexp.core.errors import ConfigError
from fedexp.core.kernel import overrides
from fedexp.core.needs import Demand, Needs
from fedexp.core.server_optimizer import ServerOptimizer
from fedexp.core.task import Task
from fedexp.core.trainer import Trainer
from fedexp.data.dataset import Dataset
from fedexp.data.federated import Proxy

# Plug-ins by config group.
Plugins = Mapping[str, Trainer | Aggregator | ServerOptimizer]


def check_needs(
    config: Config,
    trainer: Trainer,
    aggregator: Aggregator,
    server_optimizer: ServerOptimizer,
    proxy: Proxy,
    validation: bool,
    specs: Specs,
    task: Task,
    dataset: Dataset,
    images: bool,
) -> None:
    """Check that plug-ins fit each other, the config and the data set.

    Args:
        config: Typed keys.
        trainer: Local training.
        aggregator: Work of the server.
        server_optimizer: Optimizer that applies the averaged client update on the
            server.
        proxy: Data of the server.
        validation: Whether there are validation samples.
        specs: Trained networks.
        task: Loss and metrics.
        dataset: Data set of the clients.
        images: Whether the inputs of the networks are 8-bit images of `dataset`. False
            if the samples are not 8-bit images, or if the inputs are features.

    Raises:
        ConfigError: A requirement is not met.
    """
    plugins: Plugins = {
        "trainer": trainer,
        "aggregator": aggregator,
        "server_optimizer": server_optimizer,
    }
    names = {
        group: f"{group.replace('_', ' ')} {type(plugin).__name__}"
        for group, plugin in plugins.items()
    }

    for one, other in combinations(plugins, 2):
        for a, b in product(plugins[one].needs.demands, plugins[other].needs.demands):
            if a.key == b.key and not _are_compatible(a.value, b.value):
                raise ConfigError(
                    f"{names[one]} and {names[other]} exclude each other: "
                    f"{names[one]} {a.why}, {names[other]} {b.why}",
                    where=a.key,
                    expected=f"{_as_written(a.value)} and {_as_written(b.value)}",
                    do=f"set another {one} or another {other}",
                )

    for group, plugin in plugins.items():
        for demand in plugin.needs.demands:
            _check_demand(names[group], demand, config, {**plugins, "task": task})
        _check_data(group, names[group], plugin.needs, config, proxy)
        _check_samples(names[group], plugin.needs, dataset, images)
        _check_specs(names[group], plugin.needs, config, specs)

    comparing = [names[group] for group, plugin in plugins.items() if plugin.needs.global_model]
    if comparing and (aggregator.delivers != "global" or not aggregator.communicates):
        raise ConfigError(
            f"{comparing[0]} compares a client's model with the one it receives, "
            f"and with {names['aggregator']} they are the same",
            where="aggregator",
            got=type(aggregator).__name__,
            do="set aggregator=mean, or trainer=sgd",
        )

    users = [names[group] for group, plugin in plugins.items() if plugin.needs.validation]
    users += ["headline.rule=best_on_val"] if config.headline.rule == "best_on_val" else []
    if users and not validation:
        raise ConfigError(
            f"{users[0]} needs a validation share and none is cut",
            where="partition.val_fraction",
            expected="a fraction, e.g. 0.1",
            got="0",
            do="set partition.val_fraction=0.1, or eval.held_out",
        )

    if not aggregator.averages_updates and overrides(trainer, "init_shared"):
        raise ConfigError(
            "the trainer sends trees to a server that averages, "
            f"and {names['aggregator']} does not average",
            where="trainer",
            got=type(trainer).__name__,
            do="set aggregator=mean, or another trainer",
        )

    if not aggregator.uses_server_step(config.rounds) and server_optimizer.changes_update:
        raise ConfigError(
            f"a server optimizer has no effect: {names['aggregator']} does not use its result",
            where="server_optimizer",
            got=type(server_optimizer).__name__,
            do="set server_optimizer=sgd, or aggregator=mean",
        )

    if not aggregator.is_plain_mean:
        for group, plugin in plugins.items():
            if plugin.needs.plain_mean:
                raise ConfigError(
                    f"{names[group]} needs the plain mean of the clients' updates, "
                    f"and {names['aggregator']} is not known to compute it",
                    where="aggregator",
                    expected="mean",
                    got=type(aggregator).__name__,
                    do=f"set aggregator=mean, or another {group}",
                )


def _check_data(group: str, name: str, needs: Needs, config: Config, proxy: Proxy) -> None:
    if (needs.proxy or needs.proxy_labels) and proxy.source == "none":
        raise ConfigError(
            f"{name} needs server data and none is configured",
            where="proxy.source",
            expected="train or test" if needs.proxy_labels else "train, test or noise",
            got="none",
            do="set proxy.source=train proxy.size=0.02",
        )

    if (
        needs.unseen_proxy
        and proxy.source == "test"
        and proxy.dataset is None
        and config.rounds == 1
    ):
        raise ConfigError(
            f"{name} in one shot would train on test data",
            where="proxy.source",
            expected="train (of proxy.dataset, or of the clients' data set before the split) "
            "or noise",
            got="test",
            do="set proxy.source=train proxy.size=0.02",
        )

    if needs.proxy_labels and not proxy.labelled:
        raise ConfigError(
            f"{name} needs labelled server data",
            where="proxy.labelled",
            expected="true",
            got="false",
            do="set proxy.labelled=true"
            + (" proxy.source=train: noise has no labels" if proxy.source == "noise" else ""),
        )

    if needs.local_steps and config.client_models.path is not None:
        other = "trainer=sgd" if group == "trainer" else "aggregator=mean"
        raise ConfigError(
            f"{name} uses the clients' numbers of local steps, which stored models do not have",
            where="client_models.path",
            expected="null",
            got=config.client_models.path,
            do=f"set {other}, or client_models.path=null",
        )


def _check_samples(name: str, needs: Needs, dataset: Dataset, images: bool) -> None:
    if needs.images and not images:
        raise ConfigError(
            f"{name} makes images on the server, "
            "and the inputs of the networks have no range of pixels",
            where="dataset",
            expected="8-bit images, and a model without a frozen extractor",
            got=f"data set '{dataset.name}'"
            + (", as features" if dataset.pixels else ", floating-point samples"),
            do="choose another data set or model, or another method",
        )

    if needs.augmented and dataset.augment is None:
        raise ConfigError(
            f"{name} applies the clients' random transform to its batches, "
            "and the clients have no transform",
            where="dataset.augment",
            expected="flips or crops, e.g. {flip: 0.5, crop_padding: 4}",
            got="null",
        )


def _check_specs(name: str, needs: Needs, config: Config, specs: Specs) -> None:
    if len(specs.distinct) == 1:
        return
    clients = config.architectures.clients or ("model",)
    server = config.architectures.server or "model"
    got = f"server: {server}; clients: {', '.join(dict.fromkeys(map(str, clients)))}"

    if needs.same_architecture:
        raise ConfigError(
            f"{name} averages or matches models: "
            "the server and all clients must have one architecture",
            where="architectures",
            expected="one model for all",
            got=got,
            do="set architectures.clients=null architectures.server=null"
            + (f", or {needs.lifted_by}" if needs.lifted_by else ""),
        )

    if needs.same_clients and len(set(specs.trained)) > 1:
        raise ConfigError(
            f"{name} runs the clients' models as one network, "
            "and the clients' models differ in architecture",
            where="aggregator.teachers",
            expected="auto or looped",
            got=got,
            do="set aggregator.teachers=auto, or architectures.clients=null",
        )

    if needs.broadcasts and config.rounds > 1:
        raise ConfigError(
            f"{name} starts clients from the server's model in the second round, "
            "and networks differ in architecture",
            where="rounds",
            expected="1",
            got=got,
            do="set rounds=1, or architectures.clients=null architectures.server=null",
        )


def _check_demand(name: str, demand: Demand, config: Config, plugins: Mapping[str, object]) -> None:
    group, *path = demand.key.split(".")
    found: Any = plugins[group] if group in plugins else getattr(config, group)
    for step in path:
        if group in plugins and not hasattr(found, step):
            raise ConfigError(
                f"{name} {demand.why}, and {type(plugins[group]).__name__} has no such key",
                where=demand.key,
                expected=_as_written(demand.value),
                do=f"set another {group}",
            )
        found = getattr(found, step)

    if isinstance(found, demand.value) if isinstance(demand.value, type) else found == demand.value:
        return
    do = f"set {demand.key}={_as_written(demand.value)}"

    if isinstance(demand.value, type):
        options = _options_with_class(demand.key, _as_written(demand.value))
        do = (
            f"set {demand.key}={'|'.join(options)}"
            if options
            else f"set {demand.key} to a {demand.value.__name__}"
        )

    raise ConfigError(
        f"{name} {demand.why}",
        where=demand.key,
        expected=_as_written(demand.value),
        got=_as_written(type(found) if isinstance(demand.value, type) else found),
        do=f"{do}, or {demand.instead}" if demand.instead else do,
    )


def _options_with_class(group: str, target: str) -> list[str]:
    """Return the options of config group `group` whose ``_target_`` is `target`."""
    files = [path for folder in conf_dirs() for path in sorted((folder / group).glob("*.yaml"))]
    return [path.stem for path in files if f"_target_: {target}" in path.read_text().splitlines()]


def _are_compatible(a: object, b: object) -> bool:
    if isinstance(a, type) and isinstance(b, type):
        return issubclass(a, b) or issubclass(b, a)
    return a == b


def _as_written(value: object) -> str:
    """Return the text of a value in a config. A class becomes its ``_target_``."""
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    return str(value).lower() if isinstance(value, bool) else str(value)
