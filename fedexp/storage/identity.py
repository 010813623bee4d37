"""Identity of a run: a hash of its scientific config and a fingerprint of its code."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedexp.core.errors import ConfigError
from fedexp.core.resolved_config import ResolvedConfig
from fedexp.core.user_code import is_installed, is_ours

# Keys that do not change the numbers of a result. They decide only where and how fast a
# run computes, and what it shows. Increase `NON_SCIENTIFIC_VERSION` when you change the
# list.
NON_SCIENTIFIC_VERSION = 4
NON_SCIENTIFIC = (
    "checkpoint",
    "data_root",
    "dataset.download",
    "deterministic",
    "device",
    "engine",
    "logger",
    "memo",
    "on_running",
    "output_root",
    "proxy.dataset.download",
    "reuse",
    "state",
    "threads",
)
# Keys that later versions of fedexp added, with the value that gives the earlier
# behaviour. A key with this value is left out of the hash. Results of earlier versions
# thus keep their run ID.
_LATER: Mapping[str, object] = {
    "aggregator.tv": "l2",
    "client_dropout": 0.0,
    "client_models.data": "folder",
    "cudnn_benchmark": False,
    "eval.per_class": False,
    "eval.per_client": False,
    "feature_skew": {"kind": "none", "strength": 0.0},
    "limit.proxy": None,
    "local.epochs_drawn": "round",
    "local.epochs_min": None,
    "local.lr_schedule": "exponential",
    "local.lr_step": None,
    "local.lr_warmup": 0,
    "local.stragglers": 1.0,
    "proxy.resize": False,
}
# Arguments of plug-ins that later versions added. They are left out of the hash as the
# keys in `_LATER` are. They are listed by class, because another class may have had an
# argument of the same name from the start. Names are relative to the plug-in's node in
# the config.
_LATER_ARGUMENTS: Mapping[str, Mapping[str, object]] = {
    "fedexp.methods.dense.Dense": {"reestimate_batch_norm": False},
    "fedexp.methods.fedcda.FedCDA": {
        "chosen_weights": "uniform",
        "loss_reduction": "mean",
        "random_over": "participants",
    },
    "fedexp.methods.git_rebasin.GitRebasin": {"matching.restarts": 1},
    "fedexp.methods.mofedsam.MoFedSAM": {"momentum_from": "normalised"},
    "fedexp.methods.ot_fusion.OTFusion": {"alignment.support": "weights"},
}
_TRAINING = (
    "fedexp.runtime.numerics",
    "fedexp.core.kernel",
    "fedexp.engines.serial",
    "fedexp.engines.vectorized",
)
_ALWAYS = (
    *_TRAINING,
    "fedexp.running.experiment",
    "fedexp.running.steps",
    "fedexp.engines.client_cache",
    "fedexp.running.summary",
)
_FRAMEWORKS = ("torch", "torchvision")
# Config keys that differ between repetitions of an experiment with other seeds.
SEEDS = ("seed", "seed_data")


def scientific(config: ResolvedConfig) -> dict[str, Any]:
    """Return the part of a resolved config that decides the result.

    A file that the config names is represented by its hash in ``contents``, not by its
    path.
    """
    left_out = {*NON_SCIENTIFIC, *config.contents}
    return {**_without(left_out, config.values), "contents": dict(config.contents)}


def _without(
    left_out: Collection[str],
    config: Mapping[str, Any],
    prefix: str = "",
    later: Mapping[str, object] = _LATER,
) -> dict[str, Any]:
    """Return the nested values of `config` without the dotted keys in `left_out`.

    Keys in `later` and `_LATER_ARGUMENTS` are also left out if they have the value that
    is listed there.

    Args:
        left_out: Dotted keys, from the top of the config.
        config: The config, or a node of it.
        prefix: Dotted key of the node with a final dot. Empty for the whole config.
        later: Values by dotted key, from the top of the config. A key with the listed
            value is left out.
    """
    arguments = _LATER_ARGUMENTS.get(str(config.get("_target_")), {})
    later = {**later, **{f"{prefix}{name}": value for name, value in arguments.items()}}
    return {
        key: _without(left_out, value, f"{name}.", later) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if (name := f"{prefix}{key}") not in left_out
        and not (name in later and value == later[name])
    }


def config_hash(config: ResolvedConfig) -> str:
    """Return the hex digest of the scientific config.

    The order of the keys does not matter.
    """
    text = json.dumps([NON_SCIENTIFIC_VERSION, scientific(config)], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def code_hash(config: Mapping[str, Any]) -> str:
    """Return the fingerprint of the modules that a run uses, plug-ins included.

    It covers the syntax trees of the modules, without docstrings and comments. Imports
    are followed inside fedexp and inside the packages of plug-ins. They are also
    followed into modules that are not installed, such as a plug-in's own helpers. An
    installed package that such a module imports is represented by its version. The
    versions of torch and torchvision are part of every fingerprint.

    Raises:
        ConfigError: A plug-in is not in a file, or its file changed after this process
            had read it.
    """
    plugins = frozenset(targets(_without(NON_SCIENTIFIC, config)))
    _refuse_unknown_code(plugins)
    return _fingerprint(frozenset({*_ALWAYS, *plugins}))


def _refuse_unknown_code(plugins: Collection[str]) -> None:
    """Refuse plug-ins whose code may differ from the code of their files.

    Python imports a module once. The code of a file that was edited later does not run,
    and its fingerprint would name the wrong code.
    """
    if "__main__" in plugins:
        raise ConfigError(
            "a class of a script or notebook is not part of a run's code",
            where="_target_",
            expected="a class in a module",
            got="__main__",
            do="write the class to a file, such as mymethod.py, and name it mymethod.CLASS",
        )
    for name, source in _walk(plugins, ours=False).items():
        if source.has_changed():
            raise ConfigError(
                f"the module '{name}' changed after this process had read it",
                where=str(source.file),
                do="start Python again, in a notebook by restarting the kernel",
            )


def training_hash(config: Mapping[str, Any], contents: Mapping[str, str]) -> str:
    """Return a hash of the code and the files with which local models are trained.

    The code is what turns a job and a client's data into the model, without aggregators
    and evaluation. The files are those whose content a plug-in of the trainer, task,
    model or architectures uses (`content_keys`). Files of a user's aggregator are
    included, because the aggregator may make trainers that read them.

    Args:
        config: Values of the resolved config.
        contents: Hash of every file whose content is part of the config, by the dotted
            key that names the file.
    """
    names = ["trainer", "task", "model", "architectures"]
    groups = {group: config[group] for group in (*names, "dataset")}
    code = _fingerprint(frozenset({*_TRAINING, *targets(_without(NON_SCIENTIFIC, groups))}))

    # The samples of the data set are part of the keys of the client cache.
    if not is_ours(str(config["aggregator"].get("_target_"))):
        names.append("aggregator")
    files = {key: one for key, one in sorted(contents.items()) if key.partition(".")[0] in names}
    if not files:
        return code
    return hashlib.blake2b(json.dumps([code, files]).encode(), digest_size=16).hexdigest()


def plugin_code_hash(plugin: object) -> str:
    """Return the fingerprint of the code of a plug-in's class."""
    return _fingerprint(frozenset({type(plugin).__module__}))


def own_modules(config: Mapping[str, Any]) -> dict[str, Source]:
    """Return the modules outside fedexp that `code_hash` covers, by name."""
    return _walk(targets(_without(NON_SCIENTIFIC, config)), ours=False)


@functools.cache
def imports_random(modules: tuple[str, ...]) -> bool:
    """Return whether user code imports Python's `random`.

    Args:
        modules: Modules of plug-ins. The user's modules that they import are searched
            too. Modules of fedexp are not searched.
    """
    return any(
        name.partition(".")[0] == "random"
        for source in _walk(modules, ours=False).values()
        for name in source.imported
    )


def _walk(modules: Iterable[str], ours: bool = True) -> dict[str, Source]:
    """Return the sources of `modules` and of the modules that they import, by module.

    Args:
        modules: Names of modules.
        ours: Whether modules of fedexp are included and their imports followed.
    """
    waiting = sorted(modules)
    tops = {name.partition(".")[0] for name in waiting} - set(_FRAMEWORKS)

    seen: dict[str, Source] = {}
    while waiting:
        name = waiting.pop()
        if name in seen or (is_ours(name) and not ours):
            continue
        found = _module(name, name.partition(".")[0] in tops)
        if found is not None:
            seen[name] = found
            waiting.extend(found.imported)
    return seen


@functools.cache
def _fingerprint(modules: frozenset[str]) -> str:
    seen = _walk(modules)

    # Without this check, a module that was moved would no longer be part of the hash.
    # After changes to it, stored results of the earlier code would be returned.
    lost = sorted((modules & {*_ALWAYS}) - seen.keys())
    if lost:
        raise RuntimeError(f"the code hash names modules that have no source: {', '.join(lost)}")

    state = hashlib.blake2b(digest_size=16)
    state.update(versions().encode())
    state.update(_versions_used(seen).encode())
    for name in sorted(seen):
        state.update(f"{name} {seen[name].fingerprint}\n".encode())
    return state.hexdigest()


def versions() -> str:
    """Return the versions that are part of every code hash."""
    found = (f"{name} {importlib.metadata.version(name).partition('+')[0]}" for name in _FRAMEWORKS)
    return f"{' '.join(found)} python {sys.version_info[:2]}"


def _versions_used(sources: Mapping[str, Source]) -> str:
    """Return the versions of the installed packages that a user's modules import.

    The text is empty if these modules import no installed packages. torch and
    torchvision are left out, because `versions` already contains them.

    Args:
        sources: Sources by module.
    """
    read = {name.partition(".")[0] for name in sources}
    imported = {
        name.partition(".")[0]
        for module, source in sources.items()
        if not is_ours(module)
        for name in source.imported
    }
    packages = imported - read - {"fedexp", *_FRAMEWORKS} - sys.stdlib_module_names
    if not packages:
        return ""
    owners = importlib.metadata.packages_distributions()
    names = sorted({owner for package in packages for owner in owners.get(package, ())})
    return " ".join(f" {name} {importlib.metadata.version(name)}" for name in names)


def targets(node: Any) -> Iterator[str]:
    """Yield the modules of the plug-ins that a config names."""
    if isinstance(node, Mapping):
        if isinstance(node.get("_target_"), str):
            yield node["_target_"].rpartition(".")[0]
        for value in node.values():
            yield from targets(value)


class Source(NamedTuple):
    """The source of a module.

    Args:
        fingerprint: Hash of the syntax tree without docstrings and comments.
        imported: Names of the imported modules, and dotted names of the objects that
            are imported from them.
        file: Path of the file.
        text: Text at the time of the fingerprint, or None for a module of fedexp.
        modified: Time at which the file was modified before the text was read, in
            nanoseconds.
    """

    fingerprint: str
    imported: tuple[str, ...]
    file: Path
    text: str | None
    modified: int

    def has_changed(self) -> bool:
        """Return whether the file has another text now. A file may also be absent."""
        try:
            is_same = self.file.stat().st_mtime_ns == self.modified
            return not is_same and importlib.util.decode_source(self.file.read_bytes()) != self.text
        except FileNotFoundError:
            return False
        except (SyntaxError, UnicodeDecodeError):  # the new text cannot be decoded
            return True


@functools.cache
def _module(name: str, even_installed: bool) -> Source | None:
    """Return the source of a module, or None if it has no Python file.

    If `even_installed` is False, the result is also None for a module of an installed
    library.
    """
    spec = find_module(name)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    if not even_installed and is_installed(Path(spec.origin)):
        return None
    file = Path(spec.origin)
    modified = file.stat().st_mtime_ns
    content = file.read_bytes()

    # The bytes are parsed, as Python does. A file may have a byte-order mark or declare
    # another encoding than UTF-8.
    tree = ast.parse(content, filename=str(file))
    package = name if spec.submodule_search_locations else name.rpartition(".")[0]
    imported = tuple(dict.fromkeys(_imports(tree, package)))
    _strip_docstrings(tree)
    fingerprint = hashlib.blake2b(ast.dump(tree).encode(), digest_size=16).hexdigest()
    text = None if is_ours(name) else importlib.util.decode_source(content)
    return Source(fingerprint, imported, file, text, modified)


def find_module(name: str) -> importlib.machinery.ModuleSpec | None:
    """Return the spec of a module without importing its parents.

    `importlib.util.find_spec` would import them.
    """
    parent = name.rpartition(".")[0]
    if not parent:
        try:
            return importlib.util.find_spec(name)
        except (ImportError, ValueError):
            # The module has no spec (__main__), or no module can have this name.
            return None
    locations = _locations(parent)
    try:
        return importlib.machinery.PathFinder.find_spec(name, locations) if locations else None
    except KeyError:  # `name` is a namespace package whose parent is not imported
        return None


def _locations(package: str) -> list[str]:
    """Return the folders that contain the modules of a package."""
    spec = find_module(package)
    if spec is not None:
        return list(spec.submodule_search_locations or ())
    parent, _, name = package.rpartition(".")
    folders = [Path(base) / name for base in _locations(parent)] if parent else []
    return [str(folder) for folder in folders if folder.is_dir()]


def _imports(tree: ast.AST, package: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _strip_docstrings(tree: ast.AST) -> None:
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and ast.get_docstring(node, clean=False) is not None
        ):
            node.body = node.body[1:] or [ast.Pass()]
