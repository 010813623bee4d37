"""What `tests.fork_server` has before it forks: importing this makes a run, so that all
that a run imports and reads is there.
"""

from __future__ import annotations

import os
import tempfile
import threading

import fedexp.commands.launching
import fedexp.commands.run
import fedexp.running.check
import fedexp.tracking.terminal  # noqa: F401 - with the lines above: what commands import beyond the run itself
import tests.fork_server  # noqa: F401
from fedexp.config.compose import compose
from fedexp.running.execute import execute
from tests.conftest import unflushed

os.fsync = unflushed
with tempfile.TemporaryDirectory() as folder:
    execute(
        compose(["method=scaffold", "rounds=1", "threads=1", f"output_root={folder}"]), say=None
    )
assert threading.active_count() == 1  # a thread would not be in the children, what it holds would
