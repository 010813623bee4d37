"""kill -9 at random moments, resume, compare: final weights and metrics.jsonl must be those of an uninterrupted run.

    python scripts/kill_and_resume.py [--kills 20] [--seed 0] [overrides ...]

Every run gets an output folder of its own; each is killed once at a random moment of its life (start-up, training,
checkpointing, finishing) and launched again. Prints one line a kill; exits 1 if any byte differs.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

DEFAULT = [
    "method=scaffold",
    "rounds=40",
    "clients_per_round=5",
    "checkpoint.every=1",
    "memo.enabled=false",
    "threads=1",
]


def launch(overrides: list[str], outputs: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "fedexp", *overrides, f"output_root={outputs}"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def fingerprint(outputs: Path) -> dict[str, str]:
    """Hashes of the two files that must agree."""
    files = {}
    for name in ("metrics.jsonl", "model.safetensors"):
        (path,) = outputs.glob(f"runs/*/*/{name}")
        files[name] = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return files


def rounds_on_disk(outputs: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in outputs.glob("runs/*/*/metrics.jsonl"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    overrides = options.overrides or DEFAULT
    rng = random.Random(options.seed)
    work = Path(tempfile.mkdtemp())
    began = time.monotonic()
    straight = launch(overrides, work / "straight")
    if straight.wait():
        sys.exit("the uninterrupted run failed")
    life = time.monotonic() - began
    expected = fingerprint(work / "straight")
    print(f"uninterrupted: {life:.1f} s, {expected}", flush=True)
    different = 0
    for number in range(options.kills):
        outputs = work / f"killed{number}"
        process = launch(overrides, outputs)
        moment = rng.uniform(0.3, 1.0) * life
        try:
            process.wait(timeout=moment)
            seen = "had finished"
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            seen = f"killed with {rounds_on_disk(outputs)} rounds on disk"
        if launch(overrides, outputs).wait():
            sys.exit(f"run {number}: resuming failed; see {outputs}")
        same = fingerprint(outputs) == expected
        different += not same
        print(
            f"{number + 1:2d}: after {moment:4.1f} s {seen}, resumed: {'identical' if same else 'DIFFERENT'}",
            flush=True,
        )
        if same:
            shutil.rmtree(outputs)
    print(f"{options.kills - different} of {options.kills} identical")
    if different:
        sys.exit(1)
    shutil.rmtree(work)


if __name__ == "__main__":
    main()
