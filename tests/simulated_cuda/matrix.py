"""Run all methods on the simulated device: python -m tests.simulated_cuda.matrix.

Each method runs with ``debug=smoke`` in three settings: serially, on a stack, and on a
stack of networks with convolutions. It must raise no error that CUDA would raise, and
use only the device that it was given. A stack must train all clients together.
"""

from __future__ import annotations

import argparse
import time

from fedexp.config.folders import conf_dir
from tests.simulated_cuda.processes import ProcessFailedError, record_in_processes
from tests.simulated_cuda.runs import Recording, Run

LIMIT = 150  # seconds per method
_STACK = ["engine=vectorized", "engine.stack=4"]
_CNN = ["model=cnn_mcmahan", "model.channels=[4,8]", "model.hidden=[16]"]
SETTINGS = {
    "serial": ["engine=serial"],
    "stack": _STACK,
    "CNN": [*_STACK, *_CNN],
}
# ``debug=smoke`` does not limit the server's steps within an epoch.
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
# These methods train one client at a time.
_ALONE = {"centralized"}


def methods() -> list[str]:
    """Return the names of all methods."""
    return sorted(path.stem for path in (conf_dir() / "method").glob("*.yaml"))


def overrides(method: str, setting: str) -> list[str]:
    """Return the overrides of a method's run in a setting."""
    common = ["debug=smoke", "partition=iid", f"method={method}", *_LESS.get(method, [])]
    return [*common, *SETTINGS[setting]]


def runs(method: str) -> list[Run]:
    """Return the runs of a method, one per setting."""
    return [(overrides(method, setting), "cuda:1") for setting in SETTINGS]


def problems(method: str, setting: str, recording: Recording) -> list[str]:
    """Return the problems of a run."""
    if is_refused(setting, recording):
        return []
    found = [text for text in (recording.error, *recording.violations) if text]
    if set(recording.uses) != {1}:
        found.append(f"it used the devices {sorted(recording.uses)}, but was given cuda:1")
    expected = 0 if setting == "serial" or method in _ALONE else 1
    if not found and recording.stacked_share != expected:
        found.append(f"stacked_share is {recording.stacked_share}, not {expected}")
    return found


def is_refused(setting: str, recording: Recording) -> bool:
    """Return whether the method refuses networks with convolutions."""
    return setting == "CNN" and recording.error.startswith("ConfigError")


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
        found = []
        numbers = []
        for setting, recording in zip(SETTINGS, recorded, strict=True):
            found += [f"{setting}: {text}" for text in problems(method, setting, recording)]
            total = recording.rows.total()
            numbers.append(
                f"{setting} refused"
                if is_refused(setting, recording)
                else f"{setting} {total.launches:.0f} launches, {total.syncs:.0f} waits"
            )
        print(f"{time.monotonic() - began:4.0f} s {method:22} {'; '.join(numbers)}", flush=True)
        if found:
            failed.append(method)
            print("".join(f"       {text}\n" for text in found), end="", flush=True)

    print(f"{len(asked) - len(failed)} of {len(asked)} methods passed")
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
