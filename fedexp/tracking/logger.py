"""Logger interface: a tracker that receives the rows of a run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedexp.core.build import require
from fedexp.core.resolved_config import ResolvedConfig


@dataclass(frozen=True)
class RunInfo:
    """The description of a run for a tracker.

    Args:
        id: Identifier, the same for every attempt at this run.
        name: Name for people, from `title`.
        group: Name of the sweep, or None.
        config: Resolved config as plain values.
        folder: Folder of the run.
        tags: Chosen method, data set, partition and model.
        resumed: Whether rows of earlier attempts exist.
    """

    id: str
    name: str
    group: str | None
    config: dict[str, Any]
    folder: Path
    tags: tuple[str, ...]
    resumed: bool

    @classmethod
    def of(
        cls,
        config: ResolvedConfig,
        hashes: Mapping[str, str],
        folder: Path,
        group: str | None,
        resumed: bool,
    ) -> RunInfo:
        """Return the description of a run from its resolved config and its hashes."""
        choices = config.choices
        stored = config.to_stored()
        del stored["overrides"]
        return cls(
            id=f"{hashes['config'][:16]}{hashes['code'][:8]}",
            name=title(config),
            group=group,
            config=stored,
            folder=folder,
            tags=tuple(
                str(choices[key])
                for key in ("method", "dataset", "partition", "model")
                if choices.get(key)
            ),
            resumed=resumed,
        )


def title(config: ResolvedConfig) -> str:
    """Return a run's name for people: method, other overrides and seed."""
    own = ("output_root", "data_root", "logger", "hydra")
    shown = [override for override in config.overrides if not override.startswith(own)]
    if not any(override.startswith("method=") for override in shown):
        shown.insert(0, f"method={config['method']}")
    if not any(override.startswith("seed=") for override in shown):
        shown.append(f"seed={config['seed']}")
    return " ".join(shown)


@dataclass
class Logger(ABC):
    """A tracker that is built from YAML.

    Its methods are called from one background thread (`Feed`), which handles calls that
    raise or hang. After a failed or hanging ``log`` the same thread calls
    ``close("failed", None)``.

    Args:
        strict: Whether a failing tracker stops the run. Otherwise it is switched off.
        timeout: Maximum seconds of one call.

    Attributes:
        note: Callback, set by `Feed`, that shows the user one line.
    """

    strict: bool = False
    timeout: float = 60.0
    note: Callable[[str], None] = field(default=print, init=False, repr=False)

    def __post_init__(self) -> None:
        require(self.timeout > 0, f"timeout must be positive, got {self.timeout}")

    def check(self) -> None:
        """Raise an error before training for a setup that cannot work.

        An example is a tracker that is not installed.
        """

    @abstractmethod
    def open(self, run: RunInfo, history: list[dict[str, Any]]) -> None:
        """Begin logging.

        Args:
            run: Description of the run.
            history: Rows of earlier attempts that are still valid.
        """

    @abstractmethod
    def log(self, row: dict[str, Any]) -> None:
        """Log one step.

        The pictures of the step are on disk by then
        (`fedexp.tracking.pictures.pictures_of`).

        Args:
            row: Metrics of the step. ``row["round"]`` and ``row["step"]`` (the number
                of all finished steps) count from 1.
        """

    @abstractmethod
    def close(self, status: str, result: dict[str, Any] | None) -> None:
        """End logging.

        Args:
            status: ``done``, ``failed`` or ``interrupted``.
            result: Result of the run, or None.
        """

    def abandon(self) -> bool:
        """Stop at once everything that would keep the process from ending.

        It is called from the run's thread when the run has ended and a call hangs in
        the other thread.

        Returns:
            Whether the hanging call should return now.
        """
        return False
