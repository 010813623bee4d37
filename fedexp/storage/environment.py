"""Description of the software and hardware with which a result was computed."""

from __future__ import annotations

import contextlib
import functools
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from fedexp.core.device import hardware
from fedexp.storage.sources import git

_PACKAGES = ("fedexp", "torch", "numpy", "scipy", "hydra-core", "omegaconf", "safetensors")


def environment(device: torch.device | None = None) -> dict[str, Any]:
    """Return versions, platform, commit, command line, and the name of a run's GPU."""
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "packages": {name: version(name) for name in _PACKAGES},
        "commit": _commit(),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }
    gpu = device and hardware(device)
    return {**facts, "gpu": gpu} if gpu else facts


def _processor() -> str:
    """Return the name of the processor, or the architecture if the name is unknown.

    On Linux, the name is in ``/proc/cpuinfo``.
    """
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


@functools.cache
def _commit() -> str | None:
    """Return the Git commit of fedexp's checkout, or None for an installed package.

    If tracked files have changes, a ``+`` is appended to the commit. Git is called only
    once per process, because later changes of the checkout do not affect imported code.
    """
    home = Path(__file__).resolve().parents[2]
    if not (home / ".git").exists():
        return None
    return git(home, "describe", "--always", "--dirty=+", "--exclude=*") or None
