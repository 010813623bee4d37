"""Runs of fedexp on the simulated device."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import fedexp.core.phases
import fedexp.core.torch_private
import fedexp.running.execute
from fedexp.config.compose import compose
from fedexp.core.phases import PREFIX
from fedexp.running.execute import execute
from tests.simulated_cuda.counts import Rows
from tests.simulated_cuda.device import CAPACITY, SimulatedCuda, simulate

# These overrides switch off everything that is not part of the run.
ALONE = ["memo.enabled=false", "checkpoint.every=off", "logger=local", "threads=1"]
# This is the phase of a round's work that a run repeats.
ROUND = "aggregate"
# These are the arguments of `record`.
Run = tuple[Sequence[str], str] | tuple[Sequence[str], str, int]


@dataclass(frozen=True)
class Recording:
    """A run on a simulated device.

    Args:
        result: Content of ``result.json``, {} if the run failed.
        rows: Counts of the run.
        violations: Messages of the errors that CUDA would raise.
        uses: Uses of each device, by index.
        error: Message of the error that ended the run, empty if none did.
    """

    result: dict[str, Any]
    rows: Rows
    violations: list[str]
    uses: dict[int, int]
    error: str = ""

    @property
    def stacked_share(self) -> float:
        share: float = self.result["stacked_share"]
        return share

    @property
    def bits(self) -> tuple[Any, ...]:
        """The digests of the models and metrics."""
        return self.result["models_sha256"], self.result["metrics_sha256"]

    def plain(self) -> dict[str, Any]:
        """Return a value that JSON can store."""
        return {**vars(self), "rows": self.rows.plain()}

    @classmethod
    def of_plain(cls, plain: dict[str, Any]) -> Recording:
        """Return the recording that `plain` returned."""
        uses = {int(index): number for index, number in plain["uses"].items()}
        return cls(**{**plain, "rows": Rows.of_plain(plain["rows"]), "uses": uses})


class StoppedError(Exception):
    """A run that the test interrupted."""


def record(
    simulated: SimulatedCuda,
    overrides: Sequence[str],
    device: str = "cuda",
    interrupt_after: int | None = None,
) -> Recording:
    """Execute a run in this process, on a simulated device or on the CPU.

    Args:
        simulated: The simulation. It is active.
        overrides: Overrides of the run. The run folder is temporary unless they name
            ``output_root``.
        device: Device of the run.
        interrupt_after: Number of checkpoints after which the run is interrupted.
    """
    result: dict[str, Any] = {}
    error = ""
    simulated.violations.clear()
    with ExitStack() as stack:
        root = stack.enter_context(tempfile.TemporaryDirectory())
        for each in _patches(simulated, interrupt_after):
            stack.enter_context(each)
        config = compose([*ALONE, f"output_root={root}", *overrides, f"device={device}"])
        simulated.counter.reset()
        try:
            result = execute(config, say=None)
        # The error that ended the run is part of the recording.
        except Exception as raised:  # noqa: BLE001
            error = f"{type(raised).__name__}: {raised}"

    rows, uses = simulated.counter.rows(), dict(simulated.counter.uses)
    return Recording(result, rows, list(simulated.violations), uses, error)


def record_all(path: str, runs: Sequence[Run], capacity: int = CAPACITY) -> None:
    """Execute runs in this process and write their recordings.

    All runs use one simulated device, because fedexp's caches may hold tensors of the
    device between runs.

    Args:
        path: JSON file to write.
        runs: Arguments of `record` for each run.
        capacity: Bytes of memory of the device.
    """
    with simulate(capacity=capacity) as simulated:
        recordings = [record(simulated, *run).plain() for run in runs]
    Path(path).write_text(json.dumps(recordings))


def _patches(
    device: SimulatedCuda, interrupt_after: int | None
) -> list[AbstractContextManager[Any]]:
    """Return the patches that make fedexp count by phase and place gradients."""
    checkpoints = 0

    @contextlib.contextmanager
    def named(name: str) -> Iterator[None]:
        nonlocal checkpoints
        name = name.removeprefix(PREFIX)
        with device.counter.phase(name):
            yield
        checkpoints += name == "checkpoint"
        if checkpoints == interrupt_after:
            raise StoppedError

    engine = torch.autograd.Variable._execution_engine
    return [
        patch.object(fedexp.core.phases, "is_profiler_enabled", lambda: True),
        patch.object(torch.profiler, "record_function", named),
        # fedexp bound the real engine's method when it was imported.
        patch.object(fedexp.core.torch_private, "_run_backward", engine.run_backward),
        # Drawing a picture takes longer than a tiny run.
        patch.object(fedexp.running.execute, "draw_curve", lambda rows, path, title: None),
    ]
