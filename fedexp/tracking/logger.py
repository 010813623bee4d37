"""The logger interface: a tracker that is fed with a run's rows."""

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
    """What a tracker may want to know of a run.

    Args:
        id: the same for every attempt at this run; name: short overrides and the seed; group: the sweep, or None.
        config: resolved, plain values; folder: the run's; resumed: rows of earlier attempts exist.
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
        """What a run's resolved config says, under the id of its hashes."""
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
    """A run's name for people: short overrides and the seed."""
    own = ("output_root", "data_root", "logger", "hydra")
    shown = [override for override in config.overrides if not override.startswith(own)]
    if not any(override.startswith("method=") for override in shown):
        shown.insert(0, f"method={config['method']}")
    if not any(override.startswith("seed=") for override in shown):
        shown.append(f"seed={config['seed']}")
    return " ".join(shown)


@dataclass
class Logger(ABC):
    """A tracker, built from YAML. Its calls come from one background thread (`Feed`), which deals with what raises or
    hangs; after a failed or hanging ``log`` the same thread calls ``close("failed", None)``.

    Args:
        strict: a failing tracker stops the run instead of being switched off.
        timeout: seconds one call may take.

    Attributes:
        say: tells the user one line; set by `Feed`.
    """

    strict: bool = False
    timeout: float = 60.0
    say: Callable[[str], None] = field(default=print, init=False, repr=False)

    def __post_init__(self) -> None:
        require(self.timeout > 0, f"timeout must be positive, got {self.timeout}")

    def check(self) -> None:
        """Refuse before training what could never work, such as a tracker that is not installed."""

    @abstractmethod
    def open(self, run: RunInfo, history: list[dict[str, Any]]) -> None:
        """Begin; `history` are the rows of earlier attempts that stand."""

    @abstractmethod
    def log(self, row: dict[str, Any]) -> None:
        """One step; ``row["round"]`` and ``row["step"]`` (finished steps in all) count from 1.

        Its pictures are on disk by then: `fedexp.tracking.pictures.pictures_of`.
        """

    @abstractmethod
    def close(self, status: str, result: dict[str, Any] | None) -> None:
        """End with status done, failed or interrupted, and the result if there is one."""

    def abandon(self) -> bool:
        """A call hangs and the run has ended: end, at once, what would keep the process from ending.

        Called from the run's thread while the call is under way in the other. Returns whether that one should come back now.
        """
        return False
