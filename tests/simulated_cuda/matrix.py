"""All methods on the simulated device: python -m tests.simulated_cuda.matrix.

Each method runs with ``debug=smoke``, once serially and once on a stack. It must raise
nothing that CUDA would raise, and use no other device than its own. The stack must train
all clients together.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from fedexp.config.folders import conf_dir
from tests.simulated_cuda.processes import ProcessFailedError, record_in_processes
from tests.simulated_cuda.runs import Recording, Run

LIMIT = 150  # seconds of one method
ENGINES = {
    "serial": ["engine=serial"],
    "stack": ["engine=vectorized", "engine.stack=4"],
}
# debug=smoke does not limit the server's steps within an epoch.
_GENERATOR = ["aggregator.T_G=3", "aggregator.ngf=8"]
_LESS = {
    "co_boosting": _GENERATOR,
    "dense": _GENERATOR,
    "dense_authors_readme": _GENERATOR,
    "dense_coboost": _GENERATOR,
    "dense_paper_literal": _GENERATOR,
    "fed_adi": ["aggregator.N_inv=5"],
    "fed_adi_full": ["aggregator.N_inv=5"],
    "fed_dafl": ["aggregator.iterations=5", "aggregator.ngf=8"],
}
# Methods that train one client at a time
_ALONE = {"centralized"}


def methods() -> list[str]:
    """Return the names of all methods."""
    return sorted(path.stem for path in (conf_dir() / "method").glob("*.yaml"))


def runs(method: str) -> list[Run]:
    """Return the runs of a method, one per engine."""
    common = ["debug=smoke", "partition=iid", f"method={method}", *_LESS.get(method, [])]
    return [([*common, *engine], "cuda:1") for engine in ENGINES.values()]


def problems(method: str, recordings: Sequence[Recording]) -> list[str]:
    """Return what is wrong with the recordings of a method's runs."""
    found = []
    for engine, recording in zip(ENGINES, recordings, strict=True):
        texts = [text for text in (recording.error, *recording.violations) if text]
        if set(recording.uses) != {1}:
            texts.append(f"it used the devices {sorted(recording.uses)}, but was given cuda:1")
        found += [f"{engine}: {text}" for text in texts]
    share = recordings[-1].result.get("stacked_share")
    if share != (0 if method in _ALONE else 1) and not found:
        found.append(f"stack: stacked_share is {share}")
    return found


def main() -> int:
    """Run the matrix. The exit code is 1 if a method failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("methods", nargs="*", help="names of methods, by default all")
    asked = parser.parse_args().methods or methods()

    failed = []
    began = time.monotonic()
    for method, recorded in record_in_processes({name: runs(name) for name in asked}, LIMIT):
        if isinstance(recorded, ProcessFailedError):
            failed.append(method)
            print(f"{method}: {recorded}", flush=True)
            continue
        numbers = []
        for engine, recording in zip(ENGINES, recorded, strict=True):
            total = recording.rows.total()
            numbers.append(f"{engine} {total.launches:.0f} launches, {total.syncs:.0f} waits")
        print(f"{time.monotonic() - began:4.0f} s {method:24} {'; '.join(numbers)}", flush=True)
        if found := problems(method, recorded):
            failed.append(method)
            print("".join(f"       {text}\n" for text in found), end="", flush=True)

    print(f"{len(asked) - len(failed)} of {len(asked)} methods passed")
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
