"""Fixtures that all tests share: one thread, no network, and no user settings."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

# Two spinning thread pools on two cores are a hundred times slower than one.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["WANDB_MODE"] = "offline"
os.environ.pop("FEDEXP_DATA", None)

import torch

torch.set_num_threads(1)
# Background jobs of a shell ignore Ctrl-C, and their child processes would inherit
# this.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def unflushed(file: int) -> None:
    """Replace `os.fsync` by a function that does nothing.

    The system keeps the data that a killed process wrote. They would only be lost if
    the machine went down, and no test simulates this.
    """


# On a busy disk, flushing took half of the tests' time.
os.fsync = unflushed


TOGETHER = (
    "/test_ray.py",
    "/test_ray_cluster.py",
    "/test_page_in_browser.py",
    "/site/test_docs.py",
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Return a scheduler that runs each file in `TOGETHER` in one process.

    Then there is one Ray cluster, one browser and one set of the documentation's pages,
    instead of one per process of pytest.
    pytest 9.2 has no marks for groups.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Together(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return file if file.endswith(TOGETHER) else nodeid

    return Together(config, log)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print how long the code blocks of the documentation took."""
    from tests.docs.blocks import documents, duration

    seconds = [
        report.duration
        for outcome in ("passed", "failed")
        for report in terminalreporter.stats.get(outcome, [])
        if "test_blocks_run_and_print_what_is_written" in report.nodeid
    ]
    # The time is printed only if no document was deselected.
    if len(seconds) >= len(documents()):
        terminalreporter.write_line(duration(sum(seconds)))


@pytest.fixture(autouse=True, scope="session")
def _no_picture() -> Iterator[None]:
    """Switch off the curve of runs in this process.

    Drawing it takes longer than a tiny run.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedexp.running.execute.draw_curve", lambda rows, path, title: None)
        yield


@pytest.fixture(autouse=True)
def _untouched_global_rng():
    """Check that a test leaves the state of torch's global generator unchanged."""
    before = torch.random.get_rng_state()
    yield
    assert torch.equal(before, torch.random.get_rng_state()), "the global generator was used"


@pytest.fixture(autouse=True)
def _untouched_threads():
    """Check that a test leaves the number of torch's threads unchanged.

    The bits of some sums, such as those of BatchNorm, depend on this number.
    """
    before = torch.get_num_threads()
    yield
    after = torch.get_num_threads()
    torch.set_num_threads(before)
    assert after == before, "the number of threads was changed"


@pytest.fixture
def channels_last_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Store 4-D tensors of networks channels last on the CPU, too."""
    from fedexp.core import device

    monkeypatch.setattr(device, "_CHANNELS_LAST_ON", ("cpu", "cuda"))
