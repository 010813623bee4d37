"""Commands that ``wandb agent`` starts, one per trial of a sweep of W&B.

The agent sets environment variables with the IDs of the sweep and of the run.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from fedexp.core.errors import FedexpError
from fedexp.core.resolved_config import ResolvedConfig

_SWEEP, _RUN = "WANDB_SWEEP_ID", "WANDB_RUN_ID"
# An override in the form that the agent writes by default.
_DASHED = re.compile(r"--(?P<override>[\w./@]+=.*)", re.DOTALL)


def without_dashes(arguments: list[str]) -> list[str]:
    """Return the arguments with ``key=value`` in place of ``--key=value``.

    Only a command of an agent is changed. Flags of fedexp have no value after an equals
    sign, except Hydra's ``--cfg=job``, which an agent does not use.
    """
    if _SWEEP not in os.environ:
        return arguments
    found = [(_DASHED.fullmatch(argument), argument) for argument in arguments]
    return [argument if match is None else match["override"] for match, argument in found]


def log_stored_run(config: ResolvedConfig, folder: Path) -> None:
    """Log a stored run again, under the ID that the agent gave.

    Nothing was trained, so the logger of the run was not called. Without its rows, the
    agent's run would be empty, and the sweep would have no value for it.

    Args:
        config: Config of the run.
        folder: Folder of the run.

    Raises:
        FedexpError: The logger failed.
    """
    if _SWEEP not in os.environ or _RUN not in os.environ:
        return
    from fedexp.commands.export import send_run
    from fedexp.core.build import build
    from fedexp.storage.stored_run import StoredRun
    from fedexp.tracking.logger import Logger
    from fedexp.tracking.wandb import Wandb

    logger = build(Logger, config["logger"], "logger")  # type: ignore[type-abstract]
    if not isinstance(logger, Wandb):
        return
    notes, failure = send_run(StoredRun(folder), logger, None)
    for note in notes:
        print(note)
    if failure is not None:
        raise FedexpError("the stored run was not logged again", where=str(folder), got=failure)
    print(f"logged again as W&B run {os.environ[_RUN]}")
