"""Shared fixtures: one thread, no network, no user settings."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

# Two spinning thread pools on two cores are a hundred times slower than one
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["WANDB_MODE"] = "offline"
os.environ.pop("FEDEXP_DATA", None)

import torch

torch.set_num_threads(1)
# A shell's background jobs ignore Ctrl-C, and their children would.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def unflushed(file: int) -> None:
    """Instead of `os.fsync`: a killed process loses nothing that it wrote, and no test
    survives the machine's end.
    """


os.fsync = unflushed  # on a busy disk half of the tests' time


TOGETHER = ("/test_ray.py", "/test_page_in_browser.py")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Ray's tests stay together, and the browser's: one cluster and one browser, not
    one in each of pytest's processes.

    pytest 9.2 has no marks for groups.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Together(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return file if file.endswith(TOGETHER) else nodeid

    return Together(config, log)


@pytest.fixture(autouse=True, scope="session")
def _no_picture() -> Iterator[None]:
    """Of runs in this process: drawing a curve takes longer than a tiny run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedexp.running.execute.draw_curve", lambda rows, path, title: None)
        yield


@pytest.fixture(autouse=True)
def _untouched_global_rng():
    """No code of ours may draw from, or leave changed, torch's global generator."""
    before = torch.random.get_rng_state()
    yield
    assert torch.equal(before, torch.random.get_rng_state()), "the global generator was used"
