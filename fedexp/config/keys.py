"""The typed keys of an experiment that are not groups.

The objects of groups (parts of the method, data, model and so on) are built elsewhere,
each from its own node.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from fedexp.core.build import build, require
from fedexp.core.errors import ConfigError
from fedexp.core.local_training import LocalTraining
from fedexp.core.numerics import Precision
from fedexp.core.resolved_config import ResolvedConfig

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
    """Keys ``eval.*``: when the models are evaluated, and on what.

    Args:
        every: Rounds between evaluations, at least 1.
        batch_size: Samples evaluated at once, at least 1.
        held_out: Training samples that are kept for validation before the split.
        per_class: Whether the accuracy of each class is measured.
        per_client: Whether accuracy is measured on each client's own data.
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
    """Keys ``trace.*``: which iterations of a method on the server are traced.

    Args:
        every: Iterations between evaluations. 0 means no evaluation.
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
        clients: Names that are assigned to the clients in turn, or a mapping from each
            name to the clients that have it. The clients are numbers (5) and ranges
            ("0-4"). None means that all clients have ``model``.
        server: Name of the server's architecture. None means ``model``.
        models: The ``model`` node of every name.
    """

    clients: tuple[str, ...] | dict[str, int | str | tuple[int | str, ...]] | None
    server: str | None
    models: dict[str, dict[str, Any]]

    def names(self, clients: int) -> tuple[str, ...]:
        """Return the name of each client's architecture.

        Client c has the architecture at index c modulo the number of returned names.

        Args:
            clients: Number of clients.

        Returns:
            One name per client, or fewer names that repeat. Empty if all clients have
            ``model``.

        Raises:
            ConfigError: There is no name, or a client does not occur exactly once.
            ValueError: A model is not used.
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
    """Parse ``5`` or ``"0-4"``, both ends included."""
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
    """Hash the content of a folder of models."""
    from fedexp.storage.model_folder import fingerprint

    return fingerprint(folder)


@dataclass(frozen=True)
class ClientModels:
    """Keys ``client_models.*``: models that replace the first round's local training.

    Args:
        path: Folder of the models, or None.
        sha256: Hash of the folder's content, or None.
        data: Source of the clients' samples and counts. ``folder``: the folder.
            ``partition``: the configured partition, which must be the one that the
            models were trained on. Counts in the folder are used in both cases.
    """

    content_keys: ClassVar[Mapping[str, Callable[[Path], str]]] = {"path": _hash_model_folder}

    path: str | None
    sha256: str | None
    data: Literal["folder", "partition"] = "folder"


@dataclass(frozen=True)
class Headline:
    """Keys ``headline.*``: the number by which runs are compared.

    Args:
        rule: How the number is taken from the evaluated rounds.
        metric: Name of the metric, or ``auto`` for the first metric that is measured.
        targets: Values of the metric, without repetition. For each value, the first
            round that reaches it is reported.
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
        metric: Name of the metric, or ``auto`` for the headline's metric.
        target: Value that stops the run, or None for no early stop.
    """

    metric: str
    target: float | None


@dataclass(frozen=True)
class Limit:
    """Keys ``limit.*``: upper bounds that shrink an experiment (``debug=smoke``).

    Every bound is at least 1. None means no bound.

    Args:
        rounds: Communication rounds.
        clients: Clients of the federation.
        steps: Local steps per round.
        train: Training samples.
        test: Test samples.
        server_steps: Steps of the server's work per round.
        proxy: Samples of the server.
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
    """Keys ``checkpoint.*``: how often a run is saved.

    Args:
        every: Seconds (``"30s"``), a number of steps, or ``"off"``.
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
    """Keys ``memo.*``: the cache of client work that runs share.

    Args:
        enabled: Whether client work is cached.
        max_gb: Size in GB beyond which the least recently used entries are deleted.
    """

    enabled: bool
    max_gb: float

    def __post_init__(self) -> None:
        require(self.max_gb >= 0, f"memo.max_gb must not be negative, got {self.max_gb}")


@dataclass(frozen=True)
class StateMemory:
    """Keys ``state.*``: memory for client states and stored models.

    Args:
        memory_gb: GB of client states and stored models that may stay on the training
            device between rounds. ``auto`` is a quarter of the memory that is free on a
            GPU when the run starts, or 1 GB on a CPU.
    """

    memory_gb: Literal["auto"] | float

    def __post_init__(self) -> None:
        require(
            self.memory_gb == "auto" or self.memory_gb >= 0,
            f"state.memory_gb must be 'auto' or not negative, got {self.memory_gb}",
        )


def _check_options(config: ResolvedConfig) -> None:
    """Refuse options whose files do not fit their group.

    Raises:
        ConfigError: A file is a list, a file of `GROUPS` has no ``_target_``, or a file
            of another group has no ``# @package _global_``.
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
    """Every key of ``conf/config.yaml`` that is not a group.

    ``conf/config.yaml`` documents each key.
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
    # Absent in configs that were stored before the key existed.
    cudnn_benchmark: bool = False

    def __post_init__(self) -> None:
        require(
            self.seed_data >= 0 and self.seed_data < 2**32,
            f"seed_data (or seed if it is null) must be in [0, 2^32), got {self.seed_data}",
        )
        require(self.clients >= 1, f"clients must be at least 1, got {self.clients}")
        require(self.rounds >= 1, f"rounds must be at least 1, got {self.rounds}")
        require(
            self.threads == "auto" or self.threads >= 1,
            f"threads must be 'auto' or at least 1, got {self.threads}",
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
        """Build the typed keys of a resolved config.

        Raises:
            ConfigError: A key is unknown, or a value has the wrong type or is out of
                range.
        """
        _check_options(config)
        return build(
            cls, {key: value for key, value in config.values.items() if key not in GROUPS}, ""
        )

    @property
    def expected_cohort_size(self) -> float:
        """Return the expected number of clients per round (m)."""
        per_round = self.clients_per_round
        if per_round == "all":
            return float(self.clients)
        if isinstance(per_round, float):
            expected = per_round * self.clients
            return expected if self.sampling == "bernoulli" else float(max(1, round(expected)))
        return float(per_round)
