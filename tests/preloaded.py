"""The module that the fork server of `tests.fork_server` imports before it forks.

Importing it executes a small run. Everything that a run imports and reads is therefore
already loaded in the forked processes.
"""

from __future__ import annotations

import importlib.metadata
import os
import tempfile
import threading

import fedexp.commands.launching
import fedexp.commands.run
import fedexp.running.check
import fedexp.tracking.terminal  # noqa: F401 - this and the lines above: imports of the commands beyond those of a run
import tests.fork_server  # noqa: F401
from fedexp.config.compose import compose
from fedexp.running.execute import execute
from tests.conftest import unflushed

os.fsync = unflushed
# Runs with a plug-in read the files of all installed packages, which takes a second.
packages = importlib.metadata.packages_distributions()
importlib.metadata.packages_distributions = lambda: packages
with tempfile.TemporaryDirectory() as folder:
    execute(
        compose(["method=scaffold", "rounds=1", "threads=1", f"output_root={folder}"]), say=None
    )
# A fork copies the locks that a thread holds, but not the thread.
assert threading.active_count() == 1
