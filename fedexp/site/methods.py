"""One page per method: description, settings, needs, traffic, state and our results.

The pages are generated from these sources, so nothing is written twice:

- Descriptions are the docstrings of the method's parts (trainer, aggregator and server
  optimizer).
- Settings are read from the YAML files of its preset, an option of ``method``.
- Traffic and state are counted as in a run, in the first step of one client.
"""

from __future__ import annotations

import html
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

from fedexp.config.comments import first_sentence, header, keys_of
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
from fedexp.site import config_reference, traffic
from fedexp.site.api_reference import MODULES
from fedexp.site.config_reference import about, link
from fedexp.site.docstrings import Parts, parts_of
from fedexp.site.markdown import code, escaped, fenced, table
from fedexp.site.page import Mention, Page
from fedexp.site.records import Result
from fedexp.site.results import figure
from fedexp.storage.yaml_files import defaults_of, read_yaml
from fedexp.tables.report import layout
from fedexp.tables.report.configs import flat
from fedexp.tables.report.shown_cells import ShownCell, shown_rows
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

# Values of keys of an aggregator in `Method.small`: numbers of optimizer steps, and the
# width of the generator. They do not change the names of the logged metrics.
_SHORT = {"T_G": 1, "N_inv": 1, "iterations": 1, "ngf": 4}

# Explanations of what a part of a method may declare as its needs.
NEEDS = {
    "proxy": "data on the server: `proxy.source`",
    "proxy_labels": "labels of the server's data: `proxy.labelled`",
    "unseen_proxy": "in one round, server data that are not test data: `proxy.source`",
    "validation": "validation samples: `partition.val_fraction` or `eval.held_out`",
    "plain_mean": "an aggregator that computes the mean of the clients' updates",
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

# Matches the names of public modules, and of objects in them, in docstrings.
_PUBLIC = re.compile(rf"(?<!`)`((?:{'|'.join(map(re.escape, MODULES))})(?:\.\w+)*)`(?!`)")

# Matches a web address. The regular expression's group is the host.
_ADDRESS = re.compile(r"https://([^/\s]+)\S*")

# Meanings of metrics.
METRICS = {
    "train/loss": "training loss, the mean over the steps and the clients' samples",
    "train/loss_last_epoch": "training loss of the last local epoch",
    "local_steps": "optimizer steps of all clients of the round",
    "bytes/down": "bytes that the server sends to all clients of the round",
    "bytes/up": "bytes that all clients of the round send to the server",
    "clients": "number of clients of the round",
}

_DELIVERS = {
    "global": "one model",
    "ensemble": "an ensemble",
    "local": "a model for each client",
}


@dataclass(frozen=True)
class Method:
    """A preset of ``method``, with its composed config and its built experiment.

    Args:
        name: Name of the preset.
        choices: The chosen option of each part (trainer, aggregator, server optimizer).
        config: The resolved config of a run with this preset.
        settings: The values that are set by the preset and its parts, by dotted key.
        experiment: The experiment with the default data set and model.
        small: The same experiment, with the limits of ``debug=smoke`` and other limits
            on the server's training.
    """

    name: str
    choices: Mapping[str, str]
    config: ResolvedConfig
    settings: Mapping[str, Any]
    experiment: Experiment
    small: Experiment

    @property
    def parts(self) -> dict[str, Trainer | Aggregator | ServerOptimizer]:
        return {group: getattr(self.experiment, group) for group in _PARTS}

    @property
    def classes(self) -> tuple[type, ...]:
        return tuple(map(type, self.parts.values()))

    @property
    def particular(self) -> type:
        """The class of the part that is most specific to the method.

        It is a class whose `formula_name` is a prefix of the method's name. If several
        parts have such a class, the trainer's is preferred, then the server
        optimizer's. If no part has one, the same order applies to all parts. A trainer
        or server optimizer that is plain SGD does not count.
        """
        groups = [
            group for group in ("trainer", "server_optimizer") if self.choices[group] != "sgd"
        ]
        kinds = [type(self.parts[group]) for group in (*groups, "aggregator")]
        named = [kind for kind in kinds if self.name.startswith(formula_name(kind))]
        return [*named, *kinds][0]

    @property
    def kind(self) -> str:
        return next(
            (name for name, bases in _KINDS if isinstance(self.experiment.aggregator, bases)),
            "Others",
        )


def pages(
    tables: Mapping[str, Sequence[Mention]],
    read: Mapping[str, Sequence[Result]],
    formulas: Mapping[str, str],
) -> list[Page]:
    """Return a page that lists the methods, then one page per method.

    Args:
        tables: Tables that contain our results of a method, by the method's name.
        read: The results, by the table's name.
        formulas: Markdown of the methods' formulas, by `formula_name`.
    """
    methods = presets()
    made = []
    for method in methods:
        parts = _page(
            method,
            [one for one in methods if one.classes == method.classes],
            tables.get(method.name, ()),
            read,
            formulas.get(formula_name(method.particular), ""),
        )
        made.append(Page(f"methods/{method.name}.md", method.name, "\n\n".join(parts) + "\n"))
    return [_index(methods, tables), *made]


def formula_names() -> list[str]:
    """Return the names of all formulas that the pages of methods contain."""
    return sorted({formula_name(method.particular) for method in presets()})


def formula_name(kind: type) -> str:
    """Return the name of a method's formula: the name of its module or package."""
    return kind.__module__.removeprefix("fedexp.methods.").partition(".")[0]


@cache
def presets() -> list[Method]:
    """Compose and build each option of ``method``, in alphabetic order."""
    # One step on the server logs the same metrics as two, in half the time.
    base, small = compose([]), compose(["debug=smoke", "limit.server_steps=1"])
    return [_method(path, base, small) for path in sorted((conf_dir() / "method").glob("*.yaml"))]


def needs(method: Method, counted: traffic.Counted) -> list[str]:
    """Return what a method needs besides the clients' data, in a few words each.

    Args:
        method: The method.
        counted: The sizes of its traffic and state.
    """
    own = [part.needs for part in method.parts.values()]
    found = {
        "same architecture": any(n.same_architecture or n.same_clients for n in own),
        "server data": any(n.proxy or n.validation for n in own),
        "labels of the server data": any(n.proxy_labels for n in own),
        "class counts": any(n.class_counts for n in own),
        "client inputs": any(n.client_inputs for n in own),
        "client state": bool(counted.client),
    }
    return [name for name, needed in found.items() if needed]


def _plain(family: Sequence[Method]) -> Method:
    """Return the preset with the shortest name. The other presets are its variants."""
    return min(family, key=lambda method: len(method.name))


def composed(path: Path, base: ResolvedConfig) -> ResolvedConfig:
    """Compose ``method=<name>`` as Hydra does, but in a fraction of the time.

    First, the parts that the preset overrides are replaced. Then the preset's keys are
    set. Last, the keys of the preset that depend on the data set are set.

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
    """Return the files with a preset's settings for particular data sets.

    Args:
        path: Path of the preset.

    Returns:
        Paths of the files under ``conf``, without their suffix.
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


def _method(path: Path, base: ResolvedConfig, small: ResolvedConfig) -> Method:
    config = composed(path, base)
    own = {key: config[key] for key in read_yaml(path) if key in config.values and key != "method"}
    settings = flat(own | {group: config[group] for group in _PARTS})
    choices = {group: config.choices[group] for group in _PARTS}
    short = composed(path, small)
    short["aggregator"].update((key, _SHORT[key]) for key in _SHORT if key in short["aggregator"])
    experiments = [Experiment.of(config), Experiment.of(short)]
    return Method(path.stem, choices, config, settings, *experiments)


def _set(config: dict[str, Any], values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, dict) and isinstance(config.get(key), dict):
            _set(config[key], value)
        else:
            config[key] = value


def _index(methods: Sequence[Method], tables: Mapping[str, Sequence[Mention]]) -> Page:
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


def _does(method: Method, methods: Sequence[Method]) -> str:
    """Describe a preset in one sentence.

    Presets whose parts have the same classes form a family. The one with the shortest
    name is the plain preset. For a plain preset, the result is the first sentence about
    its most specific part. For any other preset, the result refers to the plain preset
    of its family.
    """
    plain = _plain([one for one in methods if one.classes == method.classes])
    if method is not plain:
        return f"as [{code(plain.name)}]({plain.name}.md)"
    paragraph = _module_doc(method.particular).partition("\n\n")[0]
    return escaped(first_sentence(" ".join(paragraph.split())))


def _page(
    method: Method,
    family: Sequence[Method],
    mentions: Sequence[Mention],
    read: Mapping[str, Sequence[Result]],
    formula: str,
) -> Iterator[str]:
    described = [_Described(name, parts_of(_module_doc(kind))) for name, kind in _kinds(method)]
    first = described[0]

    yield f"# {method.name}"
    yield _linked(first.parts.idea)
    yield escaped(header(conf_dir() / "method" / f"{method.name}.yaml"))
    yield from _labelled("Reference", described, "## Reference")

    yield "## Update {#update}"
    if formula:
        yield formula
    update = list(_labelled("Update", described, ""))
    if formula and update:
        yield "### The update in the code's notation {#code-notation}"
    yield from update
    if first.parts.rest:
        yield _linked(first.parts.rest)

    yield from _usage(method)
    if len(family) > 1:
        yield from _variants(method, family)

    yield "## Communication and state {#communication}"
    yield from _labelled("Communication", described, "")
    yield from _labelled("State", described, "")
    yield from _traffic(method)

    yield from _metrics(method, described)
    yield from _options(method)

    yield "## Needs {#needs}"
    yield "\n".join(f"- {line}" for line in _needs(method)) or "It needs only the clients' data."

    for label in sorted({label for one in described for label in one.parts.labelled}, reverse=True):
        if label.startswith("Differences"):
            yield from _labelled(label, described, f"## {label}")

    yield from _numbers(method.name, mentions, read)


@dataclass(frozen=True)
class _Described:
    """A part of a method with the docstring of its module.

    Args:
        name: Name of the part in a text, such as "server optimizer".
        parts: The docstring.
    """

    name: str
    parts: Parts


def _kinds(method: Method) -> Iterator[tuple[str, type]]:
    """Yield the parts in which a method differs from FedAvg, the most specific first.

    If several parts are in one module, only the first of them is yielded. For FedAvg
    itself, only the aggregator is yielded.
    """
    plain = {"trainer": "sgd", "aggregator": "mean", "server_optimizer": "sgd"}
    own = [group for group in _PARTS if method.choices[group] != plain[group]]
    kinds = {group: type(method.parts[group]) for group in own or ["aggregator"]}
    modules: set[str] = set()
    for group, kind in sorted(kinds.items(), key=lambda item: item[1] is not method.particular):
        if kind.__module__ not in modules:
            modules.add(kind.__module__)
            yield group.replace("_", " "), kind


def _labelled(label: str, described: Sequence[_Described], title: str) -> Iterator[str]:
    """Yield the texts that the parts of a method have under a label.

    If several parts have one, each text begins with the name of its part.
    """
    texts = {
        one.name: one.parts.labelled[label] for one in described if label in one.parts.labelled
    }
    if texts and title:
        yield title
    for name, text in texts.items():
        if len(texts) > 1:
            yield f"**{name.capitalize()}**"
        yield _linked(text)


def _linked(text: str) -> str:
    """Turn web addresses and names of public modules in a docstring into links."""
    text = _ADDRESS.sub(lambda match: f"[{match[1]}]({match[0]})", text)
    return _PUBLIC.sub(lambda match: f"[{match[0]}][{match[1]}]", text)


def _usage(method: Method) -> Iterator[str]:
    yield "## Usage {#usage}"
    yield fenced(f"fedexp method={method.name}", "sh")
    yield fenced(
        f'import fedexp\n\nrun = fedexp.run(["method={method.name}"])\nprint(run.headline)',
        "python",
    )
    rows = [
        [
            f"[{code(f'{group}={option}')}](../{config_reference.FOLDER}/{group}.md#{option})",
            escaped(about(group, option)),
        ]
        for group, option in method.choices.items()
    ]
    yield "The preset chooses these parts. Each of them can be replaced."
    yield table(["part", "description"], rows)


def _metrics(method: Method, described: Sequence[_Described]) -> Iterator[str]:
    """Yield the metrics of the first round, and the parts Logged of the docstrings."""
    rows = [[code(name), escaped(METRICS.get(name, ""))] for name in traffic.logged(method.small)]
    yield "## Logged metrics {#metrics}"
    yield (
        "`metrics.jsonl` has these values after the first round. Evaluation adds `test/...`, and "
        "`val/...` if there are validation samples."
    )
    yield table(["metric", "meaning"], rows)

    texts = [one.parts.labelled.get("Logged", "") for one in described]
    for _, kind in _kinds(method):
        for base in kind.__mro__[1:]:
            if base.__module__.startswith("fedexp.methods."):
                texts.append(parts_of(_module_doc(base)).labelled.get("Logged", ""))
    yield from (_linked(text) for text in dict.fromkeys(filter(None, texts)))


def _options(method: Method) -> Iterator[str]:
    """Yield the options of the method's parts, and the files of the preset."""
    preset = f"method/{method.name}"
    yield "## Options {#options}"
    for group, option in method.choices.items():
        path = conf_dir() / group / f"{option}.yaml"
        rows = [
            [
                code(f"{group}.{key.name}"),
                "" if key.default is None else code(_value(method, f"{group}.{key.name}")),
                escaped(" ".join(filter(None, (key.note, key.comment)))),
            ]
            for key in keys_of(path)
            if key.name != "_target_" and (key.default is not None or key.comment)
        ]
        if rows:
            yield table(["key", "value", "meaning"], rows)

    for path_ in [preset, *by_dataset(conf_dir() / f"{preset}.yaml")]:
        yield f"`conf/{path_}.yaml`:"
        yield fenced((conf_dir() / f"{path_}.yaml").read_text(), "yaml")


def _numbers(
    method: str, mentions: Sequence[Mention], read: Mapping[str, Sequence[Result]]
) -> Iterator[str]:
    """Yield tables that compare our numbers with the papers', then one picture."""
    if not mentions:
        return
    yield "## Our numbers beside the papers' {#results}"
    yield "\n".join(
        f"- [{escaped(one.label)}](../{one.link}): {escaped(one.text)}" for one in mentions
    )

    pictures = []
    for name, own in read.items():
        result = own[0]
        columns = [key for key, choice in result.methods.items() if choice == method]
        rows = [
            [*map(escaped, row.conditions), escaped(cell.label), *_compared(cell)]
            for row in shown_rows(result.report)
            for column in columns
            for cell in row.cells.get(column, ())
            if cell.ours
        ]
        if not rows:
            continue
        report = result.report
        title = f"{report.paper.partition(',')[0]}, {report.source}: {report.title}"
        head = [*map(escaped, report.keys), "column", "paper", "ours", "verdict"]
        yield (
            f'<details markdown="1">\n<summary>{html.escape(title)} '
            f"({result.variant}, {report.metric}, {layout.unit(report)})</summary>\n\n"
            f"{table(head, rows)}\n\n[All numbers of this table](../results/{name}.md)\n\n"
            "</details>"
        )
        pictures += [(name, result, one) for one in report.pictures]

    if pictures:
        name, result, picture = pictures[0]
        yield figure(picture, f"../results/{name}/{result.variant}")


def _compared(cell: ShownCell) -> list[str]:
    verdict = f"{cell.mark} {cell.verdict_name}" if cell.paper else ""
    return [escaped(layout.minus(cell.published)), escaped(layout.minus(cell.measured)), verdict]


def _variants(method: Method, family: Sequence[Method]) -> Iterator[str]:
    """Yield the other presets of the family, whose parts have the same classes.

    For a preset that is not the plain preset (see `_plain`), a table shows how the two
    differ.
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


def _value(method: Method, key: str) -> str:
    """Return the value of a config key as YAML, or "-" if the key does not exist."""
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


def reference(method: Method) -> str:
    """Return the paper that a method's most specific module cites, "" if none."""
    return parts_of(_module_doc(method.particular)).labelled.get("Reference", "")


def _module_doc(kind: type) -> str:
    return inspect.cleandoc(sys.modules[kind.__module__].__doc__ or "")


def _needs(method: Method) -> Iterator[str]:
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


def _traffic(method: Method) -> Iterator[str]:
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

    A tree is a mapping of tensors by name.

    Args:
        first: Name for the model if the model itself is sent, otherwise "".
        trees: Sizes of the other trees in bytes, by name.
        counted: All sizes. Only the size of the model is used.
    """
    total = sum(trees.values()) + (counted.model if first else 0)
    of = [f"{code(name)} {_share(size, counted.model)}" for name, size in trees.items()]
    return size_text(total) if total else "nothing", ", ".join([*([first] if first else []), *of])


def _share(size: int, model: int) -> str:
    if size < model / 10:
        return f"({size_text(size)})"
    return "(as the model)" if size == model else f"({size / model:.2g} models)"
