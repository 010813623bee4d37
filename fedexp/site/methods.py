"""One page per method: description, settings, needs, traffic, state and our results.

Nothing is written twice. Descriptions are the docstrings of the method's parts.
Settings are the YAML files of its preset. Traffic and state are counted in the first
step of one client, as a run counts them.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from fedexp.config.compose import compose
from fedexp.config.folders import conf_dir
from fedexp.core.aggregator import Aggregator
from fedexp.core.resolved_config import ResolvedConfig
from fedexp.core.server_optimizer import ServerOptimizer
from fedexp.core.trainer import Trainer
from fedexp.methods.bases.averaging import Averaging, Collecting
from fedexp.methods.bases.data_free import DataFree
from fedexp.methods.bases.fusion import FusionAggregator
from fedexp.methods.bases.server_trained import ServerTrained
from fedexp.methods.centralized import Centralized
from fedexp.methods.fedgen.aggregator import FedGen
from fedexp.methods.fedma import FedMA
from fedexp.methods.local import Local
from fedexp.running.experiment import Experiment
from fedexp.site import api, traffic
from fedexp.site.config_reference import about, header, link
from fedexp.site.page import Mention, Page
from fedexp.site.prose import code, docstring, escaped, fenced, first_sentence, table
from fedexp.storage.yaml_files import defaults_of, read_yaml
from fedexp.tables.report.configs import flat
from fedexp.tracking.terminal import size_text

_PARTS = {"trainer": Trainer, "aggregator": Aggregator, "server_optimizer": ServerOptimizer}

_KINDS: tuple[tuple[str, tuple[type, ...]], ...] = (
    ("Distillation of the clients' models without data", (DataFree,)),
    ("Training on the server", (ServerTrained, FedGen)),
    ("Fusion of trained models", (FusionAggregator, FedMA)),
    ("Byzantine-robust methods", (Collecting,)),
    ("Baselines", (Local, Centralized)),
    ("Averaging: local training, weights and the server's step", (Averaging,)),
)

# Explanations of the needs that a part may declare.
NEEDS = {
    "proxy": "data on the server: `proxy.source`",
    "proxy_labels": "labels of the server's data: `proxy.labelled`",
    "unseen_proxy": "in one round, server data that are not test data: `proxy.source`",
    "validation": "validation samples: `partition.val_fraction` or `eval.held_out`",
    "update_norms": "the lengths of the clients' updates, which averaging measures",
    "same_architecture": "one network for the server and all clients",
    "same_clients": "one network for all clients",
    "global_model": "clients that receive a model of several clients, and not the one that they "
    "trained last",
    "broadcasts": "in several rounds, one network for the server and all clients, and the server's "
    "model as their start",
    "images": "samples that are 8-bit images",
    "augmented": "training batches with a random transform: `dataset.augment`",
    "local_steps": "the numbers of local steps, so `client_models.path` cannot be set",
    "sample_counts": "the numbers of the clients' samples, if `client_models.path` is set",
    "class_counts": "the clients' samples of each class, if `client_models.path` is set",
    "client_inputs": "the clients' samples, if `client_models.path` is set",
}

_DELIVERS = {
    "global": "one model",
    "ensemble": "an ensemble",
    "local": "a model for each client",
}


@dataclass(frozen=True)
class _Method:
    """A preset, composed and built.

    Args:
        name: Name of the preset.
        choices: The option of each part.
        config: The config of a run.
        settings: The part of the config that the preset and its parts set, by dotted
            key.
        experiment: The experiment on the default data and model.
    """

    name: str
    choices: Mapping[str, str]
    config: ResolvedConfig
    settings: Mapping[str, Any]
    experiment: Experiment

    @property
    def parts(self) -> dict[str, Trainer | Aggregator | ServerOptimizer]:
        return {group: getattr(self.experiment, group) for group in _PARTS}

    @property
    def classes(self) -> tuple[type, ...]:
        return tuple(map(type, self.parts.values()))

    @property
    def particular(self) -> type:
        """The class of the part that is most particular to the method.

        It is the trainer's class if the trainer is not ``sgd``. Otherwise it is the
        server optimizer's class if the server optimizer is not ``sgd``. If both are
        ``sgd``, it is the aggregator's class.
        """
        own = [group for group in ("trainer", "server_optimizer") if self.choices[group] != "sgd"]
        return type(self.parts[[*own, "aggregator"][0]])

    @property
    def kind(self) -> str:
        return next(
            (name for name, bases in _KINDS if isinstance(self.experiment.aggregator, bases)),
            "Others",
        )


def pages(tables: Mapping[str, Sequence[Mention]]) -> list[Page]:
    """Return a page that lists the methods, then one page per method.

    Args:
        tables: Tables that contain our results of a method, by the method's name.
    """
    base = compose([])
    methods = [_method(path, base) for path in sorted((conf_dir() / "method").glob("*.yaml"))]

    families: dict[tuple[type, ...], list[_Method]] = {}
    for method in methods:
        families.setdefault(method.classes, []).append(method)

    links = {module: f"../{api.page_of(module)}" for module in api.MODULES}
    for family in families.values():
        first = _plain(family)
        for part in first.parts.values():
            links.setdefault(type(part).__module__, f"{first.name}.md")

    made = []
    for method in methods:
        parts = _page(method, families[method.classes], base, links, tables.get(method.name, ()))
        made.append(Page(f"methods/{method.name}.md", method.name, "\n\n".join(parts) + "\n"))
    return [_index(methods, tables), *made]


def _plain(family: Sequence[_Method]) -> _Method:
    """Return the preset with the shortest name, of which the others are variants."""
    return min(family, key=lambda method: len(method.name))


def composed(path: Path, base: ResolvedConfig) -> ResolvedConfig:
    """Compose ``method=<name>`` as Hydra does, in a fraction of the time.

    Parts are replaced first. The preset's keys are set next, and the keys that depend
    on the data set last.

    Args:
        path: Path of the preset.
        base: The config without a preset.
    """
    preset = read_yaml(path)
    config = deepcopy(base)
    for how, group, option in defaults_of(preset):
        if how == "override":
            config.values[group] = deepcopy(_option(group, option))
            config.choices[group] = option
    _set(config.values, {key: value for key, value in preset.items() if key != "defaults"})
    for name in by_dataset(path):
        if name.rpartition("/")[2] == base.choices["dataset"]:
            _set(config.values, _option(*name.rsplit("/", 1)))
    return config


def by_dataset(path: Path) -> list[str]:
    """Return the files of the preset at `path` that depend on the data set.

    Returns:
        Paths under ``conf``, without their suffix.
    """
    return [
        f"{group}/{file.stem}"
        for how, group, _ in defaults_of(read_yaml(path))
        if how == "optional"
        for file in sorted((conf_dir() / group).glob("*.yaml"))
    ]


@cache
def _option(group: str, option: str) -> dict[str, Any]:
    node: dict[str, Any] = read_yaml(conf_dir() / group / f"{option}.yaml")
    return node


def _method(path: Path, base: ResolvedConfig) -> _Method:
    config = composed(path, base)
    own = {key: config[key] for key in read_yaml(path) if key in config.values and key != "method"}
    settings = flat(own | {group: config[group] for group in _PARTS})
    choices = {group: config.choices[group] for group in _PARTS}
    return _Method(path.stem, choices, config, settings, Experiment.of(config))


def _set(config: dict[str, Any], values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, dict) and isinstance(config.get(key), dict):
            _set(config[key], value)
        else:
            config[key] = value


def _index(methods: Sequence[_Method], tables: Mapping[str, Sequence[Mention]]) -> Page:
    parts = [
        "# Methods",
        "`fedexp method=NAME` selects a method. It pairs a trainer, an aggregator and a server "
        "optimizer. Each of them can be replaced.",
    ]
    for kind in [*(name for name, _ in _KINDS), "Others"]:
        rows = [
            [
                f"[{code(method.name)}]({method.name}.md)",
                _does(method, methods),
                escaped(about("method", method.name)),
                "once" if method.config["rounds"] == 1 else "every round",
                str(len(tables.get(method.name, ()))) if tables.get(method.name) else "",
            ]
            for method in methods
            if method.kind == kind
        ]
        if rows:
            parts += [
                f"## {kind}",
                table(["method", "description", "preset", "applied", "our tables"], rows),
            ]
    return Page("methods/index.md", "Methods", "\n\n".join(parts) + "\n")


def _does(method: _Method, methods: Sequence[_Method]) -> str:
    """Describe a preset in one sentence.

    For a plain preset, this is the first sentence about its most particular part. For
    another preset, the sentence names the plain preset with the same classes.
    """
    plain = _plain([one for one in methods if one.classes == method.classes])
    if method is not plain:
        return f"as [{code(plain.name)}]({plain.name}.md)"
    paragraph = _module_doc(method.particular).partition("\n\n")[0]
    return escaped(first_sentence(" ".join(paragraph.split())))


def _page(
    method: _Method,
    family: Sequence[_Method],
    base: ResolvedConfig,
    links: Mapping[str, str],
    mentions: Sequence[Mention],
) -> Iterator[str]:
    yield f"# {method.name}"
    yield escaped(header(conf_dir() / "method" / f"{method.name}.yaml"), links)
    yield fenced(f"fedexp method={method.name}", "sh")

    if mentions:
        yield "## Our results"
        yield "\n".join(
            f"- [{escaped(one.label)}](../{one.link}): {escaped(one.text)}" for one in mentions
        )

    yield "## Parts"
    rows = [
        [
            f"[{code(f'{group}={option}')}](../config/{group}.md#{option})",
            escaped(about(group, option), links),
        ]
        for group, option in method.choices.items()
    ]
    yield table(["part", "description"], rows)

    if len(family) > 1:
        yield from _variants(method, family)

    shown: set[str] = set()
    for group, kind in zip(_PARTS, method.classes, strict=True):
        if group == "aggregator" or method.choices[group] != base.choices[group]:
            yield from _description(
                group, kind, {one.__module__ for one in method.classes}, links, shown
            )

    yield "## Needs"
    yield "\n".join(f"- {line}" for line in _needs(method)) or "It needs only the clients' data."
    yield "## Traffic and state"
    yield from _traffic(method)

    yield "## Settings"
    preset = f"method/{method.name}"
    parts = [f"{group}/{option}" for group, option in method.choices.items()]
    for path in [preset, *parts, *by_dataset(conf_dir() / f"{preset}.yaml")]:
        yield f"### conf/{path}.yaml {{#{path.replace('/', '-')}}}"
        yield fenced((conf_dir() / f"{path}.yaml").read_text(), "yaml")


def _variants(method: _Method, family: Sequence[_Method]) -> Iterator[str]:
    """Yield the other presets of the same classes.

    A preset that is not the plain one also gets a table of its differences.
    """
    plain = _plain(family)
    yield "## Presets of the same parts"
    yield "\n".join(
        f"- [{code(one.name)}]({one.name}.md): {escaped(about('method', one.name))}"
        for one in family
        if one is not method
    )
    if method is plain:
        return

    keys = [
        key
        for key in {**plain.settings, **method.settings}
        if _value(plain, key) != _value(method, key)
    ]
    rows = [[code(key), code(_value(method, key)), code(_value(plain, key))] for key in keys]
    yield (
        table(["key", code(method.name), code(plain.name)], rows)
        if rows
        else "It sets nothing differently."
    )


def _value(method: _Method, key: str) -> str:
    """Return a value of the method's config as YAML, or "-" if there is no such key."""
    value: Any = method.config.values
    for step in key.split("."):
        if not isinstance(value, Mapping) or step not in value:
            return "-"
        value = value[step]
    return (
        str(yaml.safe_dump(value, default_flow_style=True, width=10_000))
        .removesuffix("\n...\n")
        .strip()
    )


def _description(
    group: str, kind: type, own: set[str], links: Mapping[str, str], shown: set[str]
) -> Iterator[str]:
    """Yield the docstrings of a class, of its module and, folded, of its bases.

    Args:
        group: Group of the part.
        kind: Class of the part.
        own: Modules of the method's parts.
        links: Link targets of words in backticks.
        shown: Modules whose docstrings are on the page already. This function adds the
            modules whose docstrings it yields.
    """
    yield f"## {group.replace('_', ' ').capitalize()} {kind.__name__} {{#{group}}}"
    yield f"Class {code(f'{kind.__module__}.{kind.__qualname__}')}"
    if kind.__module__ not in shown:
        shown.add(kind.__module__)
        yield docstring(_module_doc(kind), links)
    yield docstring(_class_doc(kind), links)

    for base in kind.__mro__[1:]:
        if not base.__module__.startswith("fedexp.") or base is _PARTS[group]:
            continue
        module = "" if base.__module__ in shown | own else _module_doc(base)
        shown.add(base.__module__)
        texts = [docstring(text, links) for text in (module, _class_doc(base)) if text]
        if texts:
            name = code(f"{base.__module__}.{base.__qualname__}")
            inside = "\n\n".join(texts)
            yield (
                f'<details markdown="1">\n<summary>Derived from {name}</summary>\n\n'
                f"{inside}\n\n</details>"
            )


def _module_doc(kind: type) -> str:
    return inspect.cleandoc(sys.modules[kind.__module__].__doc__ or "")


def _class_doc(kind: type) -> str:
    """Return the class's own docstring.

    If a dataclass has no docstring, `dataclass` generates one from the signature. The
    result is then "".
    """
    text = vars(kind).get("__doc__") or ""
    return "" if text.startswith(f"{kind.__name__}(") else inspect.cleandoc(text)


def _needs(method: _Method) -> Iterator[str]:
    seen = set()
    keys = {
        key: f"../{link(key)}" for need in NEEDS.values() for key in re.findall(r"`(.+?)`", need)
    }
    for group, part in method.parts.items():
        name = f"{group.replace('_', ' ')} {code(type(part).__name__)}"
        for demand in part.needs.demands:
            value = (
                demand.value.__name__
                if isinstance(demand.value, type)
                else yaml.safe_dump(demand.value).split("\n")[0]
            )
            where = f"[{code(demand.key)}](../{link(demand.key)})"
            yield f"{where} = {code(value)}: the {name} {escaped(demand.why)}"

        for need in (need for need in NEEDS if getattr(part.needs, need) and need not in seen):
            seen.add(need)
            yield f"{escaped(NEEDS[need], keys)} (the {name})"

        for hook, what in (("check", "networks"), ("check_extent", "rounds or numbers of clients")):
            if getattr(type(part), hook, None) is not getattr(_PARTS[group], hook, None):
                yield (
                    f"before anything is loaded, the {name} refuses {what} that it cannot handle,"
                    " and gives the reason"
                )


def _traffic(method: _Method) -> Iterator[str]:
    """Yield the traffic and the state of the first client's first step."""
    counted = traffic.first_step(method.experiment)
    rows = [
        ["down, to a client", *_sizes("the model", counted.down, counted)],
        ["up, from a client", *_sizes("the model", counted.up, counted)],
    ]
    yield f"It delivers {_DELIVERS[method.experiment.aggregator.delivers]}."
    if not method.experiment.aggregator.communicates:
        rows = []
        yield "Clients and server exchange nothing, and no bytes are counted."

    rows += [
        ["stored at a client", *_sizes("", counted.client, counted)],
        ["stored at the server", *_sizes("", counted.server, counted)],
    ]
    yield table(["place", "size", "contents"], rows)

    chosen = ", ".join(
        code(f"{group}={method.config.choices[group]}") for group in ("dataset", "model")
    )
    yield (
        f"The sizes are those of the first step of one client with {chosen}, and at the server "
        f"those before it. The model has {size_text(counted.model)}. The descriptions above say "
        "what later steps change."
    )


def _sizes(first: str, trees: Mapping[str, int], counted: traffic.Counted) -> tuple[str, str]:
    """Return the total size and the sizes of the trees, both as text.

    Args:
        first: Words for the model if the model itself is sent, else "".
        trees: Sizes of the other trees in bytes, by name.
        counted: The counts, for the size of the model.
    """
    total = sum(trees.values()) + (counted.model if first else 0)
    of = [f"{code(name)} {_share(size, counted.model)}" for name, size in trees.items()]
    return size_text(total) if total else "nothing", ", ".join([*([first] if first else []), *of])


def _share(size: int, model: int) -> str:
    if size < model / 10:
        return f"({size_text(size)})"
    return "(as the model)" if size == model else f"({size / model:.2g} models)"
