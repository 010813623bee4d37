"""Helpers of the benchmarks.

They run the bare loop (bare_loop.py) and fedexp in separate processes, one after the
other, and write tables with a heading.
"""

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
# The engine ray needs an optional dependency and takes minutes to start. It is
# therefore not in this list, and runs only if an option names it
ENGINES = sorted(
    path.stem for path in (HERE.parent / "conf" / "engine").glob("*.yaml") if path.stem != "ray"
)


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that every benchmark has."""
    made = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    made.add_argument("--threads", type=int, default=2)
    made.add_argument(
        "--data",
        type=absolute,
        default=os.environ.get("FEDEXP_DATA", "data"),
        help="folder that contains FashionMNIST/raw, unpacked",
    )
    made.add_argument("--write", type=Path, help="also write the table to this Markdown file")
    return made


def absolute(path: str) -> str:
    """Return a path that is also valid in another working directory."""
    return str(Path(path).resolve())


def several(rounds: str) -> int:
    """Return a number of rounds of which one can be left out."""
    if int(rounds) < 2:
        raise argparse.ArgumentTypeError("at least 2, because the first round is left out")
    return int(rounds)


def chosen(engine: str) -> list[str]:
    """Return the overrides that select an engine, given as ``name[,key=value ...]``.

    An example is ``vectorized,engine.stack=5``.
    """
    name, *more = engine.split(",")
    return [f"engine={name}", *more]


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add the option --device to a parser."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")


def bare(
    data: str, workload: str, threads: int, rounds: int, *more: str, device: str = "cpu"
) -> dict[str, Any]:
    """Run `bare_loop.py` in a separate process.

    Returns:
        Seconds and steps of every round.
    """
    fixed = [data, workload, "--threads", str(threads), "--rounds", str(rounds)]
    fixed += ["--device", device]
    return process([sys.executable, str(HERE / "bare_loop.py"), *fixed, *more])


def fedexp(
    data: str,
    threads: int,
    rounds: int,
    *overrides: str,
    home: Path = HERE.parent,
    device: str = "cpu",
) -> dict[str, Any]:
    """Run `fedexp_rounds.py` of the checkout `home` in a separate process.

    Returns:
        The values that it prints.
    """
    fixed = [
        f"data_root={data}",
        f"threads={threads}",
        f"rounds={rounds}",
        f"device={device}",
        "dataset=fashion_mnist",
        "local.lr=0.05",
    ]
    return process(
        [sys.executable, str(home / "scripts" / "fedexp_rounds.py"), *fixed, *overrides], home
    )


def process(command: list[str], home: Path = HERE.parent) -> dict[str, Any]:
    """Run a command with the package of the checkout `home`.

    Returns:
        The last line of its output, decoded from JSON.
    """
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=variables(home), cwd=home
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def variables(home: Path = HERE.parent) -> dict[str, str]:
    """Return the environment variables of a process that runs the checkout `home`."""
    return {**os.environ, "PYTHONPATH": str(home)}


def heading(facts: str, device: str = "cpu") -> str:
    """Return a line with date, commit, machine, versions and the given facts."""
    computer = f"{processor()}, {os.cpu_count()} cores"
    if device != "cpu":
        import torch

        computer = f"{torch.cuda.get_device_name(device)}; {computer}"
    return (
        f"{datetime.date.today()}, commit {commit(HERE)}; {computer}; "
        f"Python {platform.python_version()}, torch {version('torch')}; {facts}"
    )


def commit(folder: Path) -> str:
    """Return the commit of the checkout that contains `folder`.

    A + is appended if the checkout has uncommitted changes.
    """
    git = ["git", "-C", str(folder), "describe", "--always", "--dirty=+", "--exclude=*"]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or "none"


def processor() -> str:
    """Return the processor's name if the system reports it."""
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


class Document:
    """A Markdown text that is printed and written to its file after every line."""

    def __init__(self, path: Path | None, heading: str) -> None:
        self._path = path
        self._lines: list[str] = []
        self.line(heading)

    def line(self, text: str) -> None:
        self._lines.append(text)
        print(text, flush=True)
        # The file is written after every line, because a long benchmark may be stopped
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text("\n".join(self._lines) + "\n")


class Table(Document):
    """A document that is one table below a heading."""

    def __init__(self, path: Path | None, heading: str, columns: list[str]) -> None:
        super().__init__(path, heading)
        self.line("")
        self.row(columns)
        self.row(["---"] * len(columns))

    def row(self, cells: list[str]) -> None:
        self.line(f"| {' | '.join(cells)} |")
