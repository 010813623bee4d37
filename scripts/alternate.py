"""What the benchmarks share: the bare loop and fedexp as processes, one after the other, and the table's heading."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
# ray needs its extra and minutes to start: only on demand
ENGINES = sorted(
    path.stem for path in (HERE.parent / "conf" / "engine").glob("*.yaml") if path.stem != "ray"
)


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    made = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    made.add_argument("--threads", type=int, default=2)
    data = Path(os.environ.get("FEDEXP_DATA", "data")).resolve()
    made.add_argument("--data", default=str(data), help="holds FashionMNIST/raw, unpacked")
    made.add_argument("--write", type=Path, help="also write the table to this Markdown file")
    return made


def chosen(engine: str) -> list[str]:
    """Overrides of ``name[,key=value ...]``, e.g. ``vectorized,engine.stack=5``."""
    name, *more = engine.split(",")
    return [f"engine={name}", *more]


def bare(data: str, workload: str, threads: int, rounds: int, *more: str) -> dict[str, Any]:
    """Seconds and steps of every round of `bare_loop.py`, in a process of its own."""
    fixed = [data, workload, "--threads", str(threads), "--rounds", str(rounds)]
    return process([sys.executable, str(HERE / "bare_loop.py"), *fixed, *more])


def fedexp(
    data: str, threads: int, rounds: int, *overrides: str, home: Path = HERE.parent
) -> dict[str, Any]:
    """What `fedexp_rounds.py` of the checkout `home` prints, in a process of its own."""
    fixed = [
        f"data_root={data}",
        f"threads={threads}",
        f"rounds={rounds}",
        "dataset=fashion_mnist",
        "local.lr=0.05",
    ]
    return process(
        [sys.executable, str(home / "scripts" / "fedexp_rounds.py"), *fixed, *overrides], home
    )


def process(command: list[str], home: Path = HERE.parent) -> dict[str, Any]:
    """Run it with the package of the checkout `home`; its last line of output as JSON."""
    env = {**os.environ, "PYTHONPATH": str(home)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env, cwd=home)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def heading(facts: str) -> str:
    """When, what and on what was measured."""
    return (
        f"{datetime.date.today()}, commit {commit(HERE)}; {processor()}, {os.cpu_count()} cores; Python "
        f"{platform.python_version()}, torch {version('torch')}; {facts}"
    )


def commit(folder: Path) -> str:
    """The commit of the checkout that `folder` lies in, with a + where it was changed."""
    git = ["git", "-C", str(folder), "describe", "--always", "--dirty=+", "--exclude=*"]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or "none"


def processor() -> str:
    """The processor's name where the system tells it."""
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


class Table:
    """Markdown that is printed while it grows, and written as a whole."""

    def __init__(self, path: Path | None, heading: str, columns: list[str]) -> None:
        self._path, self._lines = path, [heading, ""]
        print(heading, end="\n\n")
        self.row(columns)
        self.row(["---"] * len(columns))

    def row(self, cells: list[str]) -> None:
        self.line(f"| {' | '.join(cells)} |")

    def line(self, text: str) -> None:
        self._lines.append(text)
        print(text, flush=True)
        if self._path is not None:  # at once: a long benchmark may be stopped
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text("\n".join(self._lines) + "\n")
