"""The interface of loggers, which send the metrics of a run to a tracker (W&B etc.)."""

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
        name: Readable name, made by `title`.
        group: Name of the run's sweep, or None if the run is not part of a sweep.
        config: Resolved config as plain values, without the overrides.
        folder: Folder of the run.
        tags: Chosen options of ``method``, ``dataset``, ``partition`` and ``model``.
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
    """Return a readable name of a run: its overrides, method and seed.

    Overrides of folders, the logger and Hydra are left out.
    """
    own = ("output_root", "data_root", "logger", "hydra")
    shown = [override for override in config.overrides if not override.startswith(own)]
    if not any(override.startswith("method=") for override in shown):
        shown.insert(0, f"method={config['method']}")
    if not any(override.startswith("seed=") for override in shown):
        shown.append(f"seed={config['seed']}")
    return " ".join(shown)


@dataclass
class Logger(ABC):
    """A connection to a tracker such as W&B, built from the YAML key ``logger``.

    A background thread (`Feed`) calls `open`, `log` and `close`. If one of these calls
    raises an error or takes too long, the thread makes no more of them, with one
    exception. If `open` has returned and `close` has not been called, the thread calls
    ``close("failed", None)``.

    Args:
        strict: Whether a failing tracker stops the run. Otherwise the tracker is
            switched off, and the run goes on.
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
        """Raise an error if the tracker cannot work.

        For example, its package may not be installed. This method is called before
        training.
        """

    @abstractmethod
    def open(self, run: RunInfo, history: list[dict[str, Any]]) -> None:
        """Begin logging.

        Args:
            run: Description of the run.
            history: Rows of metrics that earlier attempts at the run logged and that
                are still valid.
        """

    @abstractmethod
    def log(self, row: dict[str, Any]) -> None:
        """Log one step.

        The pictures of the step are already on disk
        (`fedexp.tracking.pictures.pictures_of`).

        Args:
            row: Metrics of the step. ``row["round"]`` and ``row["step"]`` count from 1.
                The latter is the number of all steps that have finished in the run.
        """

    @abstractmethod
    def close(self, status: str, result: dict[str, Any] | None) -> None:
        """End logging.

        Args:
            status: ``done``, ``failed`` or ``interrupted``.
            result: Result of the run, or None if the run has no result.
        """

    def abandon(self) -> bool:
        """Stop at once everything that would keep the process from ending.

        The run's thread calls this method if the run has ended, but a call in the
        background thread has not returned.

        Returns:
            Whether that call will return soon. If so, `Feed` waits for it.
        """
        return False
