"""Count launches, synchronisations and copies: python -m tests.simulated_cuda.count.

Every number is the difference between two run lengths, or between two methods with the
same training. Engine and kernel are fixed, so that no timing chooses them. The split is
IID. There is no checkpoint, and evaluation is not counted.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from fedexp.server_training.optimizers import Adam
from tests.simulated_cuda.counts import FIELDS, Count
from tests.simulated_cuda.device import simulate
from tests.simulated_cuda.pictures import pictures
from tests.simulated_cuda.processes import ProcessFailedError, record_in_processes
from tests.simulated_cuda.runs import ROUND, Recording

SERIAL = ["engine=serial"]
STACKED = ["engine=vectorized", "engine.stack=20"]
_IID = ["partition=iid", "rounds=1", "eval.every=1000"]
_W1 = [
    *("model=mlp_784_200", "clients=100", "clients_per_round=20", "local.batch_size=32"),
    *(*_IID, *pictures(1, 28, 28, 20_000)),
]
_CNN = [
    *("model=cnn_mcmahan", "clients=20", "local.batch_size=4"),
    *(*_IID, *pictures(1, 28, 28, 800)),
]
_RESNET = [
    *("model=resnet18_bn_cifar", "clients=2", "local.batch_size=2"),
    *(*_IID, *pictures(3, 8, 8, 40)),
]
_MATCHING = [*_IID, "local.steps=2", "engine=serial"]
_DENSE = [
    *(
        "method=dense",
        "aggregator.teachers=looped",
        "trace.every=0",
        "clients=4",
        "local.steps=1",
        "local.batch_size=4",
    ),
    *("aggregator.b=8", "aggregator.B=8", *_IID, *SERIAL, *pictures(3, 32, 32, 80)),
]


@dataclass(frozen=True)
class Interval:
    """Two runs that differ in one number.

    Args:
        overrides: Overrides of both runs.
        key: Key of the number.
        short: Its value in the first run.
        long: Its value in the second run.
    """

    overrides: Sequence[str]
    key: str
    short: int
    long: int

    def runs(self) -> list[tuple[list[str], str]]:
        return [
            ([*self.overrides, f"{self.key}={number}"], "cuda")
            for number in (self.short, self.long)
        ]

    def step(self, recordings: Sequence[Recording], file: str = "", operator: str = "") -> Count:
        """Return the counts that an increase of the number by one adds.

        This is the difference of the runs' counts, divided by that of their numbers.

        Args:
            recordings: Recordings of the two runs.
            file: Beginning of the path of the lines that are counted.
            operator: Beginning of the names of the operators that are counted.
        """
        short, long = (each.rows.total(ROUND, file, operator) for each in recordings)
        return (long - short) * (1 / (self.long - self.short))

    def rest(self, recordings: Sequence[Recording]) -> Count:
        """Return the counts of the first run that do not depend on the number."""
        first: Count = recordings[0].rows.total(ROUND)
        return first - self.step(recordings) * self.short


def _steps(overrides: Sequence[str], short: int, long: int) -> Interval:
    return Interval(overrides, "local.steps", short, long)


INTERVALS = {
    "cnn": _steps([*_CNN, *STACKED, "engine.kernel=vmap"], 2, 6),
    "w1 stacked": _steps([*_W1, *STACKED, "engine.kernel=linear"], 4, 12),
    "w1 serial": _steps([*_W1, *SERIAL], 4, 12),
    "resnet stacked": _steps([*_RESNET, *STACKED, "engine.kernel=vmap"], 1, 3),
    "resnet serial": _steps([*_RESNET, *SERIAL], 1, 3),
    "scaffold": Interval([*_RESNET, *SERIAL, "method=scaffold", "local.steps=1"], "rounds", 2, 3),
    "dense lenet": Interval([*_DENSE, "model=lenet", "aggregator.T_G=1"], "aggregator.T", 1, 2),
    "dense wrn": Interval([*_DENSE, "model=wrn_16_1", "aggregator.T_G=1"], "aggregator.T", 1, 2),
    "generator": Interval([*_DENSE, "model=lenet", "aggregator.T=1"], "aggregator.T_G", 1, 3),
    "fedmrur": _steps([*_W1, *SERIAL, "method=fedmrur"], 2, 6),
}
# Each entry has one run of the method and one run of FedAvg.
AGGREGATIONS = {
    "pfnm": [*_MATCHING, "clients=8"],
    "gamf": [*_MATCHING, "clients=4"],
}


@dataclass(frozen=True)
class Line:
    """A line of the table.

    Args:
        what: Name of the count.
        case: Name of the interval or aggregation. Empty if no run is needed.
        before: The count at commit 7a6dd933. SGD steps of stacked convolutions were
            counted at b1b330a6, because no such network was stacked before.
        target: The count to reach.
        measure: Computes the count.
        field: The field of `Count` that is shown.
    """

    what: str
    case: str
    before: float
    target: float
    measure: Callable[[str, Sequence[Recording]], Count]
    field: str = "launches"


def _step(
    file: str = "", operator: str = "", clients: int = 1
) -> Callable[[str, Sequence[Recording]], Count]:
    return lambda case, runs: INTERVALS[case].step(runs, file, operator) * (1 / clients)


def _rest(clients: int = 1) -> Callable[[str, Sequence[Recording]], Count]:
    return lambda case, runs: INTERVALS[case].rest(runs) * (1 / clients)


def _difference(case: str, runs: Sequence[Recording]) -> Count:
    first: Count = runs[0].rows.total(ROUND)
    return first - runs[1].rows.total(ROUND)


def _adam(case: str, runs: Sequence[Recording]) -> Count:
    """Count the second step of the server's Adam."""
    optimizer = Adam()
    with simulate() as device:
        params = {str(i): torch.zeros(8, 4, device="cuda") for i in range(12)}
        params, state = optimizer.step(params, params, optimizer.init(params), 0.1)
        device.counter.reset()
        optimizer.step(params, params, state, 0.1)
        counted: Count = device.counter.rows().total()
    return counted


_OPTIMIZER = "core/local_optimizers.py"
LINES = [
    Line("CNN, 20 clients: launches per step of all", "cnn", 680, 80, _step()),
    Line("W1, 20 clients stacked: launches per stack step", "w1 stacked", 41.5, 28, _step()),
    Line("  synchronisations per round", "w1 stacked", 57, 22, _rest(), "syncs"),
    Line("  other launches per round", "w1 stacked", 171, 90, _rest()),
    Line("W1 serial: synchronisations per round", "w1 serial", 96, 22, _rest(), "syncs"),
    Line("SGD step of a stacked CNN", "cnn", 8, 3, _step(_OPTIMIZER)),
    Line("SGD step of a stacked ResNet-18", "resnet stacked", 62, 4, _step(_OPTIMIZER)),
    Line("ResNet-18 BN: launches per client outside steps", "resnet serial", 414.5, 30, _rest(2)),
    Line(
        "SCAFFOLD, ResNet-18: subtractions per client",
        "scaffold",
        67,
        6,
        _step(operator="_foreach_sub", clients=2),
    ),
    Line("DENSE, LeNet: synchronisations per epoch", "dense lenet", 79, 35, _step(), "syncs"),
    Line("DENSE, WRN-16-1: synchronisations per epoch", "dense wrn", 301, 35, _step(), "syncs"),
    Line("DENSE, LeNet: launches per generator step", "generator", 283, 250, _step()),
    Line("Adam of the server: launches for 12 tensors", "", 43, 12, _adam),
    Line("PFNM, 8 clients: synchronisations", "pfnm", 912, 20, _difference, "syncs"),
    Line("GAMF, 4 clients: synchronisations", "gamf", 867, 100, _difference, "syncs"),
    Line("FedMRUR serial: launches per client step", "fedmrur", 137, 90, _step(clients=20)),
]


def cases(names: Sequence[str] = ()) -> dict[str, list[tuple[list[str], str]]]:
    """Return the runs of the named cases, or of all cases by default."""
    chosen = {name: interval.runs() for name, interval in INTERVALS.items()}
    for method, overrides in AGGREGATIONS.items():
        chosen[method] = [([*overrides, f"method={each}"], "cuda") for each in (method, "fedavg")]
    return {name: runs for name, runs in chosen.items() if not names or name in names}


def table(recordings: Mapping[str, Sequence[Recording]]) -> str:
    """Return the table of all lines whose cases were recorded."""
    head = f"{'what':50} {'before':>7} {'now':>7} {'target':>7}   all counts now"
    lines = [head]
    for line in LINES:
        if line.case and line.case not in recordings:
            continue
        count = line.measure(line.case, recordings.get(line.case, []))
        every = ", ".join(f"{name} {getattr(count, name):.4g}" for name in FIELDS)
        now = getattr(count, line.field)
        lines.append(f"{line.what:50} {line.before:7.4g} {now:7.4g} {line.target:7.4g}   {every}")
    return "\n".join(lines)


def main() -> int:
    """Print the table. The exit code is 1 if a run failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", help="names of cases, by default all")
    parser.add_argument("--lines", action="store_true", help="print the costliest lines too")
    asked = parser.parse_args()

    recordings: dict[str, list[Recording]] = {}
    failed = False
    for name, recorded in record_in_processes(cases(asked.cases), limit=300):
        if isinstance(recorded, ProcessFailedError):
            print(f"{name}: {recorded}")
            failed = True
            continue
        for recording in recorded:
            for problem in filter(None, [recording.error, *recording.violations]):
                print(f"{name}: {problem}")
                failed = True
        if all(not recording.error for recording in recorded):
            recordings[name] = recorded

    print(table(recordings))
    if asked.lines:
        for name, recorded in recordings.items():
            print(f"\n{name}")
            print(_costliest(recorded))
    return int(failed)


def _costliest(recorded: Sequence[Recording]) -> str:
    """Return the source lines whose counts differ most between the two runs."""
    before, after = (each.rows.by_line(ROUND) for each in (recorded[0], recorded[-1]))
    rows = {line: count - before.get(line, Count()) for line, count in after.items()}
    ordered = sorted(rows.items(), key=lambda row: -abs(row[1].launches) - abs(row[1].syncs))
    return "\n".join(
        f"  {line:70} launches {count.launches:7.0f} syncs {count.syncs:6.0f}"
        for line, count in ordered[:20]
    )


if __name__ == "__main__":
    raise SystemExit(main())
