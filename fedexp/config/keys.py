"""The types of the config keys that do not belong to a config group.

Config groups choose the parts of the method, the data set, the model and so on. The
objects of these groups are built elsewhere, each from its own node of the config.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from fedexp.core.build import build, require
from fedexp.core.errors import ConfigError
from fedexp.core.local_training import LocalTraining
from fedexp.core.numerics import Precision
from fedexp.core.resolved_config import ResolvedConfig

# Largest accepted number of threads. torch crashes if there are far more.
_MOST_THREADS = 1024

# Config groups of which every run needs an option.
GROUPS = (
    "dataset",
    "partition",
    "model",
    "task",
    "trainer",
    "aggregator",
    "server_optimizer",
    "engine",
    "logger",
)


@dataclass(frozen=True)
class Eval:
    """Keys ``eval.*``: when and on which data the models are evaluated.

    Args:
        every: Number of rounds from one evaluation to the next, at least 1.
        batch_size: Number of samples per forward pass, at least 1.
        held_out: Number of training samples that are used for validation. They are
            taken out before the data are divided among the clients.
        per_class: Whether the task's first metric is also measured on the samples of
            each class.
        per_client: Whether the task's first metric is also measured on each client's
            own data.
    """

    every: int
    batch_size: int
    held_out: int
    per_class: bool = False
    per_client: bool = False

    def __post_init__(self) -> None:
        require(self.every >= 1, f"eval.every must be at least 1, got {self.every}")
        require(self.batch_size >= 1, f"eval.batch_size must be at least 1, got {self.batch_size}")
        require(self.held_out >= 0, f"eval.held_out must not be negative, got {self.held_out}")


@dataclass(frozen=True)
class TraceConfig:
    """Keys ``trace.*``: recording of a method's intermediate models on the server.

    Some methods compute a model on the server in several iterations per round.

    Args:
        every: Number of iterations from one evaluation to the next. 0 means no
            evaluation.
        weights: Numbers of the iterations whose weights are stored.
    """

    every: int
    weights: tuple[int, ...]

    def __post_init__(self) -> None:
        require(self.every >= 0, f"trace.every must not be negative, got {self.every}")
        require(
            all(step >= 0 for step in self.weights),
            f"trace.weights must not be negative, got {list(self.weights)}",
        )


@dataclass(frozen=True)
class Architectures:
    """Keys ``architectures.*``: the model of each client and of the server.

    Args:
        clients: Names of models that are assigned to the clients in turn, or a mapping
            from each name to the clients that have this model. The clients are written
            as numbers (5) and ranges ("0-4"). None means that all clients have the
            model of the config key ``model``.
        server: Name of the server's model. None means the model of the key ``model``.
        models: Config node of each named model, by its name.
    """

    clients: tuple[str, ...] | dict[str, int | str | tuple[int | str, ...]] | None
    server: str | None
    models: dict[str, dict[str, Any]]

    def names(self, clients: int) -> tuple[str, ...]:
        """Return the names of the clients' models.

        If n names are returned, client c has the model with the index c modulo n.

        Args:
            clients: Number of clients.

        Returns:
            One name per client, or fewer names that are assigned in turn. Empty if all
            clients have the model of the config key ``model``.

        Raises:
            ConfigError: `clients` in the config is empty, or a mapping does not contain
                each client exactly once.
            ValueError: `models` contains a model that neither a client nor the server
                has.
        """
        if self.clients is not None and not len(self.clients):
            raise ConfigError(
                "architectures.clients names no model",
                where="architectures.clients",
                expected="null, names of models or ranges of clients",
                got="[]",
                do="set architectures.clients=null or architectures.clients=[mlp]",
            )
        names = self.clients or ()

        if isinstance(names, dict):
            owners = sorted(
                (client, name)
                for name, ranges in names.items()
                for part in (ranges if isinstance(ranges, tuple) else (ranges,))
                for client in _client_range(part, clients)
            )
            count = Counter(client for client, _ in owners)
            odd = [client for client in range(clients) if count[client] != 1]
            if odd:
                raise ConfigError(
                    f"architectures.clients gives client {odd[0]} {count[odd[0]]} architectures",
                    where="architectures.clients",
                    expected=f"each of the clients 0-{clients - 1} once (clients={clients})",
                    got=f"{count[odd[0]]} architectures for client {odd[0]}",
                    do=f"add client {odd[0]} to a range"
                    if not count[odd[0]]
                    else f"name client {odd[0]} in one range only",
                )

            names = tuple(name for _, name in owners)

        without_owner = self.models.keys() - {*names, self.server}
        require(
            not without_owner,
            "architectures.models: neither a client nor the server has "
            f"{', '.join(sorted(without_owner))}",
        )

        return names


def _client_range(part: int | str, clients: int) -> range:
    """Parse a client ``5`` or a range ``"0-4"``, which includes client 4."""
    ends = re.fullmatch(r"(\d+)(?:-(\d+))?", str(part))
    first, last = (int(ends[1]), int(ends[2] or ends[1])) if ends else (0, -1)
    if not first <= last < clients:
        last_client = clients - 1
        raise ConfigError(
            f"architectures.clients: '{part}' is not a range of clients",
            where="architectures.clients",
            expected=f"clients in 0-{last_client} (clients={clients})",
            got=part,
            do=f"write 0-{last_client}, or one client such as {last_client}"
            + (f", or set clients={last + 1}" if ends and first <= last else ""),
        )
    return range(first, last + 1)


def _hash_model_folder(folder: Path) -> str:
    """Return the hash of the content of a folder with models."""
    from fedexp.storage.model_folder import fingerprint

    return fingerprint(folder)


@dataclass(frozen=True)
class ClientModels:
    """Keys ``client_models.*``: models that replace the first round's local training.

    Args:
        path: Folder of the models, or None if clients train in the first round.
        sha256: Hash of the folder's content, or None.
        data: Source of the clients' samples and of counts of samples. ``folder`` means
            the folder. ``partition`` means the partition of the config. The models must
            have been trained on this partition. If the folder contains counts, they are
            used in both cases.
    """

    content_keys: ClassVar[Mapping[str, Callable[[Path], str]]] = {"path": _hash_model_folder}

    path: str | None
    sha256: str | None
    data: Literal["folder", "partition"] = "folder"


@dataclass(frozen=True)
class Headline:
    """Keys ``headline.*``: the number by which runs are compared.

    Args:
        rule: Rule that computes the number from the metric in the evaluated rounds.
        metric: Name of the metric, or ``auto`` for the first metric that is measured.
        targets: Distinct values of the metric. For each value, the first round whose
            metric reaches it is reported.
    """

    rule: Literal["last", "mean_last_10", "best_on_val"]
    metric: str
    targets: tuple[float, ...]

    def __post_init__(self) -> None:
        require(
            len(set(self.targets)) == len(self.targets),
            f"headline.targets: each once, got {list(self.targets)}",
        )


@dataclass(frozen=True)
class Stop:
    """Keys ``stop.*``: the optional early stop.

    Args:
        metric: Name of the metric, or ``auto`` for the metric of ``headline.metric``.
        target: The run stops when the metric reaches this value. None means no early
            stop.
    """

    metric: str
    target: float | None


@dataclass(frozen=True)
class Limit:
    """Keys ``limit.*``: upper bounds that shrink an experiment for a short test.

    ``debug=smoke`` sets them. Every bound is at least 1. None means no bound.

    Args:
        rounds: Bound on the number of communication rounds.
        clients: Bound on the number of clients.
        steps: Bound on the number of local steps per round.
        train: Bound on the number of training samples.
        test: Bound on the number of test samples.
        server_steps: Bound on the server's work per round, in a unit that depends on
            the method (see ``conf/config.yaml``).
        proxy: Bound on the number of server samples (proxy data).
    """

    rounds: int | None
    clients: int | None
    steps: int | None
    train: int | None
    test: int | None
    server_steps: int | None
    proxy: int | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            require(value is None or value >= 1, f"limit.{name} must be at least 1, got {value}")


@dataclass(frozen=True)
class CheckpointEvery:
    """Keys ``checkpoint.*``: how often a run writes a checkpoint.

    Args:
        every: Interval in seconds (``"30s"``) or in steps (``5``), or ``"off"``.
    """

    every: int | str

    def __post_init__(self) -> None:
        self.parsed()

    def parsed(self) -> tuple[float, Literal["steps", "seconds"]]:
        """Parse ``every``.

        Returns:
            The interval and its unit: (30, "seconds") for ``"30s"``, (5, "steps") for
            ``5`` and (inf, "steps") for ``"off"``.
        """
        text = str(self.every).strip()
        if text == "off":
            return float("inf"), "steps"
        try:
            value = float(text[:-1]) if text.endswith("s") else int(text)
        except ValueError:
            value = -1

        require(
            value > 0 or text == "0s",
            f"checkpoint.every must be seconds ('30s'), steps (5) or 'off', got '{self.every}'",
        )

        return value, "seconds" if text.endswith("s") else "steps"


@dataclass(frozen=True)
class ClientCacheConfig:
    """Keys ``memo.*``: the client cache, which stores results of client jobs.

    All runs with the same ``output_root`` share this cache.

    Args:
        enabled: Whether results of client jobs are cached.
        max_gb: Largest size of the cache in GB. If the cache is larger, the least
            recently used entries are deleted.
    """

    enabled: bool
    max_gb: float

    def __post_init__(self) -> None:
        require(self.max_gb >= 0, f"memo.max_gb must not be negative, got {self.max_gb}")


@dataclass(frozen=True)
class StateMemory:
    """Keys ``state.*``: memory for client states and stored models.

    Args:
        memory_gb: Largest size, in GB, of the client states and stored models that stay
            on the training device between rounds. ``auto`` is a quarter of the memory
            that is free on a GPU when the run starts, or 1 GB on a CPU.
    """

    memory_gb: Literal["auto"] | float

    def __post_init__(self) -> None:
        require(
            self.memory_gb == "auto" or self.memory_gb >= 0,
            f"state.memory_gb must be 'auto' or not negative, got {self.memory_gb}",
        )


def _check_options(config: ResolvedConfig) -> None:
    """Refuse chosen options whose files do not fit their config group.

    Raises:
        ConfigError: The file of an option is a list. Or the option is in one of
            `GROUPS`, and its file has no ``_target_``. Or the option is in another
            group, and its file has no ``# @package _global_``.
    """
    for group, option in config.choices.items():
        node: Any = config.values.get(group)
        if isinstance(node, list):
            raise ConfigError(
                f"the file of '{option}' is a list",
                where=f"{group}/{option}.yaml",
                expected="a mapping, key: value",
                got=node,
            )

        if group in GROUPS and "_target_" not in node:
            raise ConfigError(
                f"'{option}' does not name its class: its file has no '_target_'",
                where=f"{group}/{option}.yaml",
                expected="_target_: package.module.Class, then the class's fields",
                got=", ".join(map(str, node)) or "an empty file",
            )

        if group not in GROUPS and isinstance(node, Mapping):
            raise ConfigError(
                f"the keys of '{option}' are not set for the experiment but below '{group}'",
                where=f"{group}/{option}.yaml",
                expected="'# @package _global_' in its first line",
                got=f"{group}: {', '.join(map(str, node))}",
                do="add that line at the top of the file",
            )


@dataclass(frozen=True)
class Config:
    """The keys of ``conf/config.yaml`` that do not belong to one of `GROUPS`.

    The comments in ``conf/config.yaml`` document each key.
    """

    method: str
    seed: int
    seed_data: int
    clients: int
    clients_per_round: Literal["all"] | int | float
    sampling: Literal["fixed", "bernoulli"]
    rounds: int
    init: Literal["same", "different"]
    dtype: Literal["float32", "float64"]
    precision: Precision
    local: LocalTraining
    eval: Eval
    trace: TraceConfig
    architectures: Architectures
    client_models: ClientModels
    headline: Headline
    stop: Stop
    proxy: dict[str, Any]
    limit: Limit
    profile: bool
    checkpoint: CheckpointEvery
    memo: ClientCacheConfig
    state: StateMemory
    data_root: str
    output_root: str
    device: str
    threads: Literal["auto"] | int
    deterministic: bool
    reuse: bool
    on_running: Literal["wait", "fail"]
    on_nonfinite: Literal["raise", "skip_client"]
    # Configs that an earlier version stored do not have these keys.
    cudnn_benchmark: bool = False
    client_dropout: float = 0.0
    feature_skew: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(
            self.seed_data >= 0 and self.seed_data < 2**32,
            f"seed_data (by default it is seed) must be in [0, 2^32), got {self.seed_data}",
        )
        require(self.clients >= 1, f"clients must be at least 1, got {self.clients}")
        require(self.rounds >= 1, f"rounds must be at least 1, got {self.rounds}")
        require(
            self.threads == "auto" or 1 <= self.threads <= _MOST_THREADS,
            f"threads must be 'auto' or from 1 to {_MOST_THREADS}, got {self.threads}",
        )
        if self.precision != "float32" and self.dtype != "float32":
            raise ConfigError(
                f"precision={self.precision} rounds float32 "
                f"and cannot be combined with dtype={self.dtype}",
                where="precision",
                expected="dtype=float32, or precision=float32",
                got=f"precision={self.precision} dtype={self.dtype}",
                do="set dtype=float32, or precision=float32",
            )

        if self.cudnn_benchmark and self.deterministic:
            raise ConfigError(
                "cudnn_benchmark chooses algorithms by their times, which differ from run to run",
                where="cudnn_benchmark",
                expected="deterministic=false, or cudnn_benchmark=false",
                got="cudnn_benchmark=true deterministic=true",
                do="set cudnn_benchmark=false, or deterministic=false",
            )

        require(
            0 <= self.client_dropout < 1,
            f"client_dropout must be in [0, 1), got {self.client_dropout}",
        )
        self.architectures.names(self.clients)
        per_round = self.clients_per_round
        if isinstance(per_round, int):
            require(
                1 <= per_round <= self.clients,
                f"clients_per_round={per_round} does not fit clients={self.clients}: "
                f"choose 1 to {self.clients}, a fraction between 0 and 1 (written 0.1), or 'all'",
            )
        elif isinstance(per_round, float):
            require(
                0 < per_round <= 1,
                f"clients_per_round={per_round} is not a fraction: "
                "choose a number in (0, 1], a count, or 'all'",
            )

    @classmethod
    def of(cls, config: ResolvedConfig) -> Config:
        """Check the keys of a resolved config and build a `Config` from them.

        Raises:
            ConfigError: A key is unknown, or a value has the wrong type or is out of
                range.
        """
        _check_options(config)
        return build(
            cls, {key: value for key, value in config.values.items() if key not in GROUPS}, ""
        )

    def expected_cohort_size(self, clients: int) -> float:
        """Return the expected number of clients per round (m).

        Args:
            clients: Number of clients. A split may have dropped some of the config's.
        """
        per_round = self.clients_per_round
        if per_round == "all":
            return float(clients)
        if isinstance(per_round, float):
            expected = per_round * clients
            return expected if self.sampling == "bernoulli" else float(max(1, round(expected)))
        return float(min(per_round, clients))
