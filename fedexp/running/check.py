"""Every job of a sweep composed and checked before the first starts."""

from __future__ import annotations

from typing import Any

from fedexp.config.compose import compose
from fedexp.core import users_code
from fedexp.core.build import build
from fedexp.core.errors import FedexpError
from fedexp.running.experiment import Experiment
from fedexp.tracking.logger import Logger


def checked(jobs: list[list[str]]) -> list[dict[str, Any]]:
    """Compose and check every job before the first starts; the error names the job."""
    configs = []
    for number, overrides in enumerate(jobs):
        try:
            config = compose(overrides)
            Experiment.of(config)
            build(Logger, config["logger"], "logger").check()  # type: ignore[type-abstract]
        except Exception as error:
            told = error if isinstance(error, FedexpError) else users_code.told(error)
            if told is None:
                raise
            if len(jobs) > 1:
                told.facts["where"] = f"job {number} ({' '.join(overrides)}): {told.facts.get('where') or 'config'}"
            raise told from (error if told is not error else error.__cause__)
        configs.append(config)
    return configs
