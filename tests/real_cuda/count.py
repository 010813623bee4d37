"""Count launches and synchronisations on a GPU: python -m tests.real_cuda.count [CASE ...].

Every number is that of one local step of all clients. It is the difference between two
run lengths. The runs are those of ``tests/simulated_cuda/cases.py``. The simulated
number is the ceiling of the tests on the simulated device.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.real_cuda.runs import count_launches, count_synchronisations, run
from tests.simulated_cuda.cases import CASES, LONG, SHORT, Case


def per_step(case: Case, count: Callable[[Path, Sequence[str]], int]) -> float:
    """Return what `count` returns for one local step of all clients."""
    with tempfile.TemporaryDirectory() as folder:
        # This run creates networks and handles.
        run(Path(folder, "first"), case.run(SHORT)[0])
        short, long = (
            count(Path(folder, str(steps)), case.run(steps)[0]) for steps in (SHORT, LONG)
        )
    return (long - short) / (case.rounds * (LONG - SHORT))


def main() -> None:
    """Print the table."""
    print("| case | launches, simulated | launches, counted | synchronisations, counted |")
    print("|---|---|---|---|")
    for name in sys.argv[1:] or CASES:
        case = CASES[name]
        if case.ceiling is not None:
            launches, synchronisations = (
                per_step(case, count) for count in (count_launches, count_synchronisations)
            )
            print(
                f"| {name} | {case.ceiling:g} | {launches:g} | {synchronisations:g} |", flush=True
            )


if __name__ == "__main__":
    main()
