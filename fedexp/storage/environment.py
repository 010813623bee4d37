"""Description of the software and hardware that a result was made with."""

from __future__ import annotations

import functools
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch


def environment() -> dict[str, Any]:
    """Return versions, platform, commit and command line."""
    names = ("fedexp", "torch", "numpy", "scipy", "hydra-core", "omegaconf", "safetensors")
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "packages": {name: version(name) for name in names},
        "commit": _commit(),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def _processor() -> str:
    """Return the name of the processor, or the architecture if the name is unknown.

    On Linux, the name is in ``/proc/cpuinfo``.
    """
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.machine()
    names = [
        line.partition(":")[2].strip()
        for line in text.splitlines()
        if line.startswith("model name")
    ]
    return names[0] if names else platform.machine()


@functools.cache
def _commit() -> str | None:
    """Return the Git commit of fedexp's checkout, or None for an installed package.

    A ``+`` follows if tracked files have changes. Git is asked once per process,
    because imported code does not change with the checkout.
    """
    home = Path(__file__).resolve().parents[2]
    if not (home / ".git").exists():
        return None
    command = ["git", "-C", str(home), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
