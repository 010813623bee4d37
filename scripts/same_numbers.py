"""Record the numbers of every preset and some longer runs, and compare with the record.

    python scripts/same_numbers.py                        # compare with the record
    python scripts/same_numbers.py --only fedavg resumed  # compare some runs
    python scripts/same_numbers.py --write FILE           # store a new record

Each run has one line in the output: ``equal``, ``different`` (with the first metric
that changed), ``missing`` (the run failed) or ``skipped`` (the machine lacks what it
needs). Presets that have no record yet are listed as ``new``. The exit code is 1 if a
run is different or missing.

The script compares every value of ``metrics.jsonl``, the headline and the summary of
``result.json``, and the tensors of the models, the partition and the traces. Tensors
are compared by name, dtype, shape and bytes. The bytes of whole files, hashes of
configs and times are not compared.

The script uses only the command line, `fedexp.run` and the files of a run folder. It
imports nothing else from fedexp, so that it need not change in a refactoring.

How to extend it:

- A new preset in ``conf/method`` is found on its own. If it needs overrides beyond
  ``debug=smoke``, add them to `EXTRA`.
- A new longer run is a function in `LONGER`. It gets an empty folder and returns a run
  folder.
- If a config key, a preset or a class is renamed, add the old and the new name to
  `RENAMED`. Do not edit the overrides of the runs and do not write a new record.
- After an intended change, store the lines of the affected runs:
  ``--only NAME --write scripts/results/same_numbers.json``. Explain the change in the
  commit message.

The last bits of numbers depend on the CPU and on library versions. The record contains
the CPU's instruction set and these versions. If they differ from the record, a warning
is printed.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
PRESETS = REPOSITORY / "conf" / "method"
RECORD = REPOSITORY / "scripts" / "results" / "same_numbers.json"

# Old name -> new name, applied to the overrides before a run. A name is a whole
# override ("method=fedavg"), a key ("memo.enabled") or a group of keys ("memo"). The
# longest match wins.
RENAMED: dict[str, str] = {}

# Overrides of every run. A run that sets the same key replaces them.
FIXED = ["threads=1", "device=cpu", "engine=serial", "memo.enabled=false"]

# Methods that match units. By default, clients start from one model. After only two
# local steps, their units still correspond, and a matching method gives the same
# numbers as averaging.
MATCHING = (
    *("fedma", "fedma_fixed", "gamf", "git_rebasin", "ma_echo_ot", "nafi", "nafi_layerwise"),
    *("nafi_paper", "ot_fusion", "ot_fusion_nafi", "pfnm", "pfnm_nafi"),
)

# Overrides of presets in addition to ``debug=smoke``. Every preset also runs without
# them, but its numbers would then equal those of a simpler method.
EXTRA: dict[str, list[str]] = {
    **{name: ["init=different"] for name in MATCHING},
    # FedNova is FedAvg if all clients take equally many steps.
    "fednova": ["local.batch_size=128"],
    # With four clients the trimmed mean is the median.
    "trimmed_mean": ["limit.clients=7"],
}

# Keys of ``result.json`` that contain numbers of the method. The other keys contain
# costs and identifiers.
SUMMARY = (
    *("metrics", "best", "mean_last_10", "std_last_10", "last_10", "traced", "per_client"),
    *("rounds", "rounds_to_target", "rounds_to", "bytes", "local_steps"),
)

# Without these variables, libraries would use as many threads as there are cores.
THREADS = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}

Record = dict[str, Any]


class SkippedError(Exception):
    """The machine lacks what a run needs."""


# ---- launching


def renamed(override: str) -> str:
    """Translate an override to the current names (see `RENAMED`)."""
    if override in RENAMED:
        return RENAMED[override]

    key, equals, value = override.partition("=")
    sign = key[: len(key) - len(key.lstrip("+"))]
    parts = key.lstrip("+").split(".")
    for length in range(len(parts), 0, -1):
        new = RENAMED.get(".".join(parts[:length]))
        if new is not None:
            return f"{sign}{'.'.join([new, *parts[length:]])}{equals}{value}"
    return override


def all_overrides(root: Path, own: Sequence[str]) -> list[str]:
    """Return all overrides of a run whose results are written to `root`."""
    keys = {override.partition("=")[0] for override in own}
    fixed = [override for override in FIXED if override.partition("=")[0] not in keys]
    return [*map(renamed, [*own, *fixed]), f"output_root={root}"]


def run(root: Path, *own: str) -> Path:
    """Run in this process.

    Returns:
        The run folder.
    """
    import fedexp

    return fedexp.run(all_overrides(root, own)).folder


def command(root: Path, own: Sequence[str]) -> list[str]:
    """Return the command line of a run in a separate process."""
    return [sys.executable, "-m", "fedexp", *all_overrides(root, own)]


def ended(arguments: Sequence[str]) -> tuple[int, str]:
    """Run a command until it ends.

    Returns:
        The exit code, and the last 500 characters of its error output.
    """
    process = subprocess.run(arguments, capture_output=True, text=True, check=False)
    return process.returncode, process.stderr.strip()[-500:]


def run_apart(root: Path, *own: str) -> Path:
    """Run in a separate process.

    Returns:
        The run folder.

    Raises:
        RuntimeError: The process failed.
    """
    code, errors = ended(command(root, own))
    if code:
        raise RuntimeError(f"exit code {code}: {errors}")
    (path,) = root.glob("runs/*/*/result.json")
    return path.parent


def require(holds: bool, message: str) -> None:
    """Check that a run did what its comparison needs, or raise a `RuntimeError`."""
    if not holds:
        raise RuntimeError(message)


def result_of(folder: Path) -> Record:
    """Read ``result.json``."""
    result: Record = json.loads((folder / "result.json").read_text())
    return result


def lines_of(path: Path) -> list[Record]:
    """Read the complete lines of a JSONL file. A missing file has none."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


# ---- the runs

FEDAVG = ["method=fedavg", "rounds=5", "clients=6", "local.momentum=0.5"]
SCAFFOLD = [
    *("method=scaffold", "rounds=12", "clients=8", "clients_per_round=3"),
    "checkpoint.every=1",
]


def preset(root: Path, name: str) -> Path:
    """Run the smoke test of a preset."""
    return run(root, "debug=smoke", f"method={name}", *EXTRA.get(name, []))


def serial(root: Path) -> Path:
    """Run FedAvg with the serial engine."""
    return run(root, *FEDAVG, "engine=serial")


def vectorized(root: Path, kernel: str) -> Path:
    """Run FedAvg with stacked clients."""
    stacking = ["engine=vectorized", "engine.stack=3", f"engine.kernel={kernel}"]

    # The kernel vmap stacks clients with equally many samples.
    folder = run(root, *FEDAVG, "partition=iid", *stacking)
    require(result_of(folder)["stacked_share"] > 0, "no clients were stacked")
    return folder


def workers(root: Path) -> Path:
    """Run FedAvg with two worker processes."""
    return run_apart(root, *FEDAVG, "engine=workers", "engine.workers=2")


def ray(root: Path) -> Path:
    """Run FedAvg with a local Ray cluster.

    Raises:
        SkippedError: Ray is not installed or cannot start on this machine.
    """
    if importlib.util.find_spec("ray") is None:
        raise SkippedError("ray is not installed")

    try:
        return run_apart(root, *FEDAVG, "engine=ray", "engine.address=local", "engine.actors=1")
    except RuntimeError:
        # If Ray also fails without fedexp, the machine is the cause.
        start = "import ray; ray.init(address='local', num_cpus=1)"
        code, errors = ended([sys.executable, "-c", start])
        if code:
            raise SkippedError(f"ray cannot start: {errors}") from None
        raise


def client_state(root: Path) -> Path:
    """Run SCAFFOLD, whose clients keep a state, with client sampling."""
    return run(root, *SCAFFOLD)


def resumed(root: Path) -> Path:
    """Run the same as `client_state`, kill the run after three rounds and resume it."""
    silent = subprocess.DEVNULL
    killed = subprocess.Popen(command(root, SCAFFOLD), stdout=silent, stderr=silent)

    # Checkpoints are written after every round. When three rounds are in the file,
    # there are at least two checkpoints.
    while killed.poll() is None:
        if any(len(lines_of(path)) >= 3 for path in root.glob("runs/*/*/metrics.jsonl")):
            killed.kill()
            break
        time.sleep(0.002)
    code = killed.wait()
    require(code == -signal.SIGKILL, f"the run ended with exit code {code} before the kill")

    folder = run_apart(root, *SCAFFOLD)
    steps = [row["step"] for row in lines_of(folder / "timing.jsonl") if row["attempt"] == 2]
    require(bool(steps) and steps[0] > 1, "the run was not resumed from a checkpoint")
    return folder


def stored_models(root: Path) -> Path:
    """Fuse stored models with MA-Echo, and trace its iterations and their weights."""
    clients = ["rounds=1", "clients=4", "init=different"]
    local = run(root, "method=local", *clients, "local.epochs=3")
    trace = ["trace.every=5", "trace.weights=[5,10]"]
    return run(root, "method=ma_echo", *clients, f"client_models.path={local}", *trace)


def generator(root: Path) -> Path:
    """Distill with DENSE: five epochs of its generator and student."""
    small = ["aggregator.T=5", "aggregator.T_G=4", "aggregator.b=32", "aggregator.B=32"]
    return run(root, "method=dense", "clients=4", *small, "aggregator.nz=16", "aggregator.ngf=8")


def segmentation(root: Path) -> Path:
    """Train U-Nets on images with masks and match them layer by layer."""
    data = ["task=segmentation", "dataset=shapes_masks", "dataset.shape=[3,16,16]"]
    net = ["model=unet", "model.down=[[4,4],[8,8],[8,8]]", "model.up=[[8,8],[4,4]]"]
    sizes = ["clients=3", "limit.train=128", "limit.test=32", "local.batch_size=8"]
    training = ["local.epochs=2", "local.optimizer=adam", "local.lr=0.02"]
    return run(root, "method=nafi_layerwise", *data, *net, *sizes, *training)


def client_cache(root: Path) -> Path:
    """Run two methods that share their local training: the second trains nothing."""
    shared = ["rounds=1", "clients=5", "memo.enabled=true"]
    run(root, "method=fedavg", *shared)
    folder = run(root, "method=git_rebasin", *shared)
    result = result_of(folder)

    # ``local_steps`` counts all steps with which the models were trained, including
    # those of another run. ``steps_per_second`` is null if this run took no steps.
    took_none = result["local_steps"] > 0 and result["steps_per_second"] is None
    require(took_none, "the client cache was not hit")
    return folder


LONGER: dict[str, Callable[[Path], Path]] = {
    "client_cache": client_cache,
    "client_state": client_state,
    "generator": generator,
    "ray": ray,
    "resumed": resumed,
    "segmentation": segmentation,
    "serial": serial,
    "stored_models": stored_models,
    "vectorized": partial(vectorized, kernel="linear"),
    "vectorized_vmap": partial(vectorized, kernel="vmap"),
    "workers": workers,
}


# ---- recording


def digest(value: Any) -> str:
    """Hash a JSON value. The order of keys in mappings does not matter."""
    text = json.dumps(value, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def tensors_of(path: Path) -> dict[str, list[Any]]:
    """Read dtype, shape and hash of every tensor of a safetensors file.

    The metadata is left out, since it contains class paths.
    """
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    header.pop("__metadata__", None)

    tensors = {}
    for name, tensor in header.items():
        begin, end = (8 + length + offset for offset in tensor["data_offsets"])
        hashed = hashlib.blake2b(content[begin:end], digest_size=12).hexdigest()
        tensors[name] = [tensor["dtype"], tensor["shape"], hashed]
    return tensors


def record_of(folder: Path) -> Record:
    """Collect everything about a run that is compared.

    Returns:
        ``headline`` and ``rows`` as stored, and digests of the ``summary``, ``models``,
        ``partition`` and ``traces``.
    """
    result = result_of(folder)
    traces: dict[str, Any] = {}
    for path in (folder / "trace").glob("*"):
        is_json = path.suffix == ".json"
        traces[path.name] = json.loads(path.read_text())["rows"] if is_json else tensors_of(path)

    return {
        "headline": result["headline"],
        "models": digest(tensors_of(folder / "model.safetensors")),
        "partition": digest(tensors_of(folder / "partition.safetensors")),
        "rows": lines_of(folder / "metrics.jsonl"),
        "summary": digest({key: result[key] for key in SUMMARY if key in result}),
        "traces": digest(traces) if traces else None,
    }


def environment() -> dict[str, str]:
    """Return everything besides the code on which the last bits of numbers depend."""
    import torch

    versions = {name: importlib.metadata.version(name) for name in ("torch", "numpy", "scipy")}
    return {
        "architecture": platform.machine(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        **versions,
    }


def write(path: Path, runs: dict[str, Record]) -> None:
    """Store the record, one line per run."""
    lines = [f'"{name}": {json.dumps(runs[name], sort_keys=True)}' for name in sorted(runs)]
    head = json.dumps(environment(), sort_keys=True)
    text = f'{{\n "environment": {head},\n "runs": {{\n  ' + ",\n  ".join(lines) + "\n }\n}\n"

    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


# ---- comparing


def row_differences(old: Sequence[Record], new: Sequence[Record]) -> Iterator[str]:
    """Name each value of ``metrics.jsonl`` that changed."""
    for before, after in zip(old, new, strict=False):
        for metric in {**before, **after}:
            # As text, NaN equals NaN, and 1 differs from 1.0.
            values = [json.dumps(row.get(metric)) for row in (before, after)]
            if values[0] != values[1]:
                place = f"round {before['round']}, step {before['step']}"
                yield f"{metric}, {place}: {values[0]} -> {values[1]}"
    if len(old) != len(new):
        yield f"number of rows: {len(old)} -> {len(new)}"


def differences(old: Record, new: Record) -> list[str]:
    """List what changed between two records of a run, the most readable first."""
    found = list(row_differences(old["rows"], new["rows"]))
    for key in ("headline", "summary", "models", "partition", "traces"):
        before, after = (json.dumps(record[key], sort_keys=True) for record in (old, new))
        if before != after:
            found.append(f"{key}: {before} -> {after}")
    return found


def attempt(name: str) -> Record | str:
    """Run `name` in a temporary folder.

    Returns:
        The record, or the reason why there is none.
    """
    launch = LONGER.get(name) or partial(preset, name=name)
    with tempfile.TemporaryDirectory(prefix="same_numbers_") as root:
        try:
            return record_of(launch(Path(root)))
        except SkippedError as reason:
            return f"skipped    {name}: {reason}"
        except Exception as error:  # noqa: BLE001 (one failed run must not end the comparison)
            message = " ".join(str(error).split())[:400]
            return f"missing    {name}: {type(error).__name__}: {message}"


def shown(headline: Record) -> str:
    """Format the headline metric."""
    value = headline["value"]
    exact = isinstance(value, float) and math.isfinite(value)
    return f"{headline['metric']} {value:.4f}" if exact else f"{headline['metric']} {value}"


def compared(name: str, old: Record | None) -> tuple[str, bool]:
    """Run `name` and compare it with its record.

    Returns:
        The line to print, and whether the run is as recorded.
    """
    new = attempt(name)
    if isinstance(new, str):
        return new, new.startswith("skipped")
    if old is None:
        return f"new        {name}: {shown(new['headline'])}", True

    found = differences(old, new)
    if found:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        return f"different  {name}: {found[0]}{more}", False
    return f"equal      {name}: {shown(new['headline'])}", True


def main() -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(description="Compare the numbers of all runs with a record.")
    parser.add_argument("--against", type=Path, default=RECORD, metavar="FILE", help="the record")
    parser.add_argument("--write", type=Path, metavar="FILE", help="store a record instead")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="presets or longer runs")
    options = parser.parse_args()
    os.environ.update(THREADS)

    path = options.write or options.against
    keep = options.only or not options.write
    stored = json.loads(path.read_text()) if keep and path.exists() else {"runs": {}}
    if not options.write and not stored["runs"]:
        parser.error(f"{path} does not exist or is empty: store a record with --write")

    # The record of a renamed preset has the old name.
    there = {renamed(f"method={name}") for name in stored["runs"]}
    found = [path.stem for path in PRESETS.glob("*.yaml") if f"method={path.stem}" not in there]
    names = sorted({*stored["runs"], *found, *LONGER})
    if unknown := set(options.only or []) - set(names):
        parser.error(f"unknown runs: {', '.join(sorted(unknown))}")
    chosen = options.only or names

    began = time.perf_counter()
    fine = record(path, chosen, stored["runs"]) if options.write else compare(chosen, stored)
    print(f"{len(chosen)} runs, {time.perf_counter() - began:.0f} s")
    return 0 if fine else 1


def record(path: Path, names: Sequence[str], runs: dict[str, Record]) -> bool:
    """Run the named runs and store their records. The other runs' records are kept.

    Returns:
        Whether every run could be recorded. If not, nothing is stored.
    """
    failed = False
    for name in names:
        new = attempt(name)
        if isinstance(new, str):
            print(new, flush=True)
            failed = True
        else:
            print(f"recorded   {name}: {shown(new['headline'])}", flush=True)
            runs[name] = new
    if not failed:
        write(path, runs)
    return not failed


def compare(names: Sequence[str], stored: Record) -> bool:
    """Compare the named runs with the record, and print one line per run.

    Returns:
        Whether all runs are as recorded.
    """
    now = environment()
    for key, value in stored["environment"].items():
        if now[key] != value:
            print(f"warning: {key} was {value} and is {now[key]}: bits may differ for this reason")

    fine = True
    for name in names:
        line, same = compared(name, stored["runs"].get(name))
        print(line, flush=True)
        fine = fine and same
    return fine


if __name__ == "__main__":
    sys.exit(main())
