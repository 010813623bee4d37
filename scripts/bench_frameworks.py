"""Compare the seconds per round of fedexp with those of other frameworks.

    python scripts/bench_frameworks.py --envs FOLDER [--data DATA] [--write FILE.md]
        [--only NAME ...] [--workloads W1 W3] [--repeats 6]

Every framework has a Python environment in FOLDER. pip installs it from the pinned
versions in scripts/frameworks. The workloads W1 and W3 are those of bench_rounds.py.
All frameworks do the same federated averaging: the same samples, split, participants,
order of samples, initial weights, batch size and step size. Each process reports its
steps, its samples and its final weights. The script compares them with those of the
bare loop (frameworks/run_bare.py, a loop written by hand). Each repeat runs one process
per framework, one after the other. The first round of every process is left out.
--write also writes a CSV file with one row per process.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import alternate
import numpy as np
from bench_rounds import WORKLOADS, interval

ROOT = alternate.HERE.parent
SCRIPTS = alternate.HERE / "frameworks"
sys.path.insert(0, str(SCRIPTS))

from work import read_weights  # noqa: E402

ROUNDS = {"W1": 12, "W3": 4}
# W3's usual step size of 0.05 is not used, because it amplifies rounding errors. With
# it, if the initial weights are multiplied by 1 + 1e-6, the final weights after two
# rounds are at a distance of 0.02 from the original ones.
LEARNING_RATES = {"W1": 0.05, "W3": 0.01}
# Largest accepted distance to the bare loop's final weights, divided by the distance by
# which the bare loop moved the weights. Rounding errors cause up to 6e-3 on W3. A
# reversed order of samples causes 4e-2 on W1 and 6e-2 on W3.
TOLERANCE = 2e-2

# Selects XLA's former CPU runtime. The default runtime of JAX 0.4.38 is slower on W3
FORMER_RUNTIME = "--xla_cpu_use_thunk_runtime=false"


@dataclass(frozen=True)
class Entry:
    """One row of the comparison.

    Args:
        package: Name of the environment and of its requirements file.
        version: Name of the package whose version is shown.
        setup: Description of how the simulation is set up.
        arguments: Arguments of the framework's script.
        variables: Environment variables of the framework's process.
    """

    package: str
    version: str
    setup: str
    arguments: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)


ENTRIES = {
    "bare loop": Entry("bare", "torch", "the loop of scripts/bare_loop.py"),
    "fedexp": Entry("fedexp", "fedexp", "engine=auto", ("engine=auto",)),
    "FedJAX": Entry(
        "fedjax",
        "fedjax",
        "fedjax.algorithms.fed_avg, for_each_client with the default backend jit. XLA's former "
        "CPU runtime and pooling by reshaping, both faster on W3 than the defaults",
        ("jit",),
        {"XLA_FLAGS": FORMER_RUNTIME},
    ),
    "FedJAX (pmap)": Entry(
        "fedjax",
        "fedjax",
        "the same with the backend pmap over two devices made of the cores",
        ("pmap",),
        {
            "XLA_FLAGS": f"{FORMER_RUNTIME} --xla_force_host_platform_device_count=2",
            # FedJAX expects the shards of pmap without the axis of the devices
            "JAX_PMAP_NO_RANK_REDUCTION": "0",
        },
    ),
    "pfl-research": Entry(
        "pfl",
        "pfl",
        "FederatedAveraging and SimulatedBackend in one process of two threads",
        ("1",),
    ),
    "pfl-research (2 processes)": Entry(
        "pfl",
        "pfl",
        "the same in two processes of one thread, as in its guide to fast simulations",
        ("2",),
    ),
    "Flower": Entry(
        "flower",
        "flwr",
        "simulation runtime with Ray, client_resources num_cpus=1, so two actors",
        ("1",),
    ),
    "Flower (num_cpus=2)": Entry(
        "flower",
        "flwr",
        "the same with the default num_cpus=2, so one actor of two threads",
        ("2",),
    ),
}


class NotEqualError(Exception):
    """A framework did not do the same work as the bare loop."""


@dataclass(frozen=True)
class Record:
    """The record of one process, as `work.write_record` describes it."""

    seconds: list[float]
    steps: list[int]
    samples: list[int]
    weights: list[np.ndarray]

    @classmethod
    def read(cls, path: Path) -> Record:
        """Read the record that a framework's script wrote."""
        facts = json.loads(path.with_suffix(".json").read_text())
        return cls(**facts, weights=read_weights(path.with_suffix(".npz")))

    @property
    def seconds_per_round(self) -> float:
        """Median of all rounds except the first, which compiles and starts workers."""
        return statistics.median(self.seconds[1:])


def distance(a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> float:
    """Return the Euclidean distance between two lists of arrays."""
    pairs = zip(a, b, strict=True)
    return float(np.sqrt(sum(np.square(x.astype(float) - y).sum() for x, y in pairs)))


def check_equal(record: Record, bare: Record, start: Sequence[np.ndarray]) -> float:
    """Check that a framework did the same work as the bare loop.

    Args:
        record: The framework's record.
        bare: The bare loop's record.
        start: Initial weights.

    Returns:
        Distance between the final weights of both, divided by the distance by which the
        bare loop moved the weights.

    Raises:
        NotEqualError: Steps, samples, shapes or weights differ.
    """
    for name in ("steps", "samples"):
        own, expected = getattr(record, name), getattr(bare, name)
        if own != expected:
            raise NotEqualError(f"{name} per round differ: expected {expected}, got {own}")

    shapes, expected = [[w.shape for w in each.weights] for each in (record, bare)]
    if shapes != expected:
        raise NotEqualError(f"shapes of the weights differ: expected {expected}, got {shapes}")

    relative = distance(record.weights, bare.weights) / distance(bare.weights, start)
    # This form also rejects NaN, because a comparison with NaN is false
    if not relative <= TOLERANCE:
        raise NotEqualError(
            f"final weights differ by {relative:.1e} of the training, more than {TOLERANCE:.0e}"
        )
    return relative


def interpreter(package: str, envs: Path) -> Path:
    """Return the Python interpreter of a package's environment.

    The environment is created if it is missing, and created again if its requirements
    have changed.

    Raises:
        subprocess.CalledProcessError: pip failed.
    """
    requirements = SCRIPTS / f"{package}.txt"
    digest = hashlib.sha256(requirements.read_bytes()).hexdigest()
    folder = envs / package
    python, stamp = folder / "bin" / "python", folder / "requirements.sha256"

    if not stamp.exists() or stamp.read_text() != digest:
        print(f"making the environment {folder}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*pip, "-r", requirements], check=True, cwd=ROOT, stdout=sys.stderr)
        stamp.write_text(digest)
    return python


def run(python: Path, script: str, *arguments: str | Path, **variables: str) -> None:
    """Run a script of scripts/frameworks.

    Raises:
        subprocess.CalledProcessError: The script failed.
        subprocess.TimeoutExpired: The script took more than five minutes.
    """
    paths = os.pathsep.join(map(str, [alternate.HERE, SCRIPTS, ROOT]))
    own = {"PYTHONPATH": paths, "FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    subprocess.run(
        [python, SCRIPTS / script, *arguments],
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env={**os.environ, **own, **variables},
    )


def reason_of(error: Exception) -> str:
    """Return the last line that a failed process wrote, or the error's message."""
    lines = (getattr(error, "stderr", None) or "").strip().splitlines()
    return lines[-1] if lines else str(error)


def installed(python: Path, package: str) -> str:
    """Return the version of an installed package."""
    code = f"from importlib.metadata import version; print(version({package!r}))"
    done = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def main() -> None:
    parser = alternate.parser(__doc__)
    parser.add_argument(
        "--envs", type=Path, required=True, help="folder of the environments, made if missing"
    )
    parser.add_argument("--workloads", nargs="+", default=list(ROUNDS), choices=ROUNDS)
    parser.add_argument("--only", nargs="+", default=list(ENTRIES), choices=ENTRIES, metavar="NAME")
    parser.add_argument("--rounds", type=alternate.several, help="rounds of every process")
    # With fewer repeats, the confidence interval of the median is unbounded
    parser.add_argument("--repeats", type=int, default=6)
    options = parser.parse_args()

    envs = options.envs.resolve()
    missing: dict[str, str] = {}
    pythons: dict[str, Path] = {}
    names = [name for name in ENTRIES if name in {"bare loop", "fedexp", *options.only}]
    for name in names:
        try:
            pythons[name] = interpreter(ENTRIES[name].package, envs)
        except subprocess.CalledProcessError as error:
            missing[name] = f"could not be installed: {reason_of(error)}"
    for name in ("bare loop", "fedexp"):  # every comparison needs both
        if name in missing:
            sys.exit(f"the environment of {name} {missing[name]}")

    facts = (
        f"{options.threads} threads, {options.repeats} processes per framework and workload, "
        "strictly alternating, medians"
    )
    columns = ["workload", "framework", "version", "steps per round", "s/round"]
    columns += ["ratio to the bare loop", "95 % interval of the median", "distance of weights"]
    table = alternate.Table(options.write, alternate.heading(facts), columns)

    rows = []
    for workload in options.workloads:
        rows += compare(workload, pythons, missing, options)
        write_rows(rows, workload, pythons, table)
        if options.write:
            with options.write.with_suffix(".csv").open("w", newline="") as file:
                writer = csv.DictWriter(file, rows[0], lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)

    write_notes(pythons, missing, options.workloads, table)


def write_notes(
    names: Sequence[str],
    missing: dict[str, str],
    workloads: Sequence[str],
    table: alternate.Table,
) -> None:
    """Write notes: the setups, what was equal, and what was not measured."""
    table.line("")
    for name in names:
        table.line(f"- {name}: {ENTRIES[name].setup}.")
    for name, reason in missing.items():
        table.line(f"- {name}: not measured: {reason}")
    table.line("")
    rates = ", ".join(f"{LEARNING_RATES[name]} on {name}" for name in workloads)
    for line in (
        "Samples, split, participants, order of samples, initial weights and batch size are the",
        f"same in all rows. The step size is {rates}.",
        "Steps and samples of every round were equal. fedexp's samples follow from the split.",
        f"Final weights were within {TOLERANCE:g} of the bare loop's, relative to how far it moved",
        "them. The frameworks' own sampling of participants and shuffling of samples are not used.",
    ):
        table.line(line)


def compare(
    workload: str, pythons: dict[str, Path], missing: dict[str, str], options: object
) -> list[dict[str, object]]:
    """Measure one workload.

    If a framework fails or does not do the same work as the bare loop, it is added to
    `missing` and left out.

    Returns:
        One row per process.
    """
    rows = []
    overrides = [
        *WORKLOADS[workload],
        "dataset=fashion_mnist",
        "method=fedavg",
        f"local.lr={LEARNING_RATES[workload]}",
        f"data_root={options.data}",
        f"threads={options.threads}",
        f"rounds={options.rounds or ROUNDS[workload]}",
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(pythons["fedexp"], "prepare.py", folder, workload, *overrides)
        start = read_weights(folder / "weights.npz")

        for repetition in range(options.repeats):
            bare = None
            for framework, python in pythons.items():
                if f"{framework} on {workload}" in missing:
                    continue
                entry, path = ENTRIES[framework], folder / "record"
                more = [*entry.arguments, *(overrides if framework == "fedexp" else ())]

                try:
                    run(python, f"run_{entry.package}.py", folder, path, *more, **entry.variables)
                    record = Record.read(path)
                    bare = bare or record
                    relative = check_equal(record, bare, start)
                except (subprocess.SubprocessError, NotEqualError) as error:
                    if bare is None:
                        sys.exit(f"the bare loop failed: {reason_of(error)}")
                    missing[f"{framework} on {workload}"] = reason_of(error)
                    rows = [row for row in rows if row["framework"] != framework]
                    continue

                rows.append(
                    {
                        "workload": workload,
                        "framework": framework,
                        "version": installed(python, entry.version),
                        "repetition": repetition,
                        "steps_per_round": record.steps[-1],
                        "samples_per_round": record.samples[-1],
                        "seconds_per_round": record.seconds_per_round,
                        "ratio": record.seconds_per_round / bare.seconds_per_round,
                        "distance_of_weights": relative,
                    }
                )
    return rows


def write_rows(
    rows: list[dict[str, object]], workload: str, names: Sequence[str], table: alternate.Table
) -> None:
    """Write the medians of one workload to the table."""
    for name in names:
        own = [r for r in rows if r["workload"] == workload and r["framework"] == name]
        if not own:
            continue
        ratios = [row["ratio"] for row in own]
        table.row(
            [
                *(workload, name, own[0]["version"], str(own[0]["steps_per_round"])),
                f"{statistics.median(row['seconds_per_round'] for row in own):.4f}",
                f"{statistics.median(ratios):.3f}",
                "1" if name == "bare loop" else interval(ratios),
                f"{max(row['distance_of_weights'] for row in own):.0e}",
            ]
        )


if __name__ == "__main__":
    main()
