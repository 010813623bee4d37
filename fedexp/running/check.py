"""Every job of a sweep composed and checked before the first starts."""

from __future__ import annotations

from typing import Any

from fedexp.config.compose import compose
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
        except FedexpError as error:
            if len(jobs) > 1:
                error.facts["where"] = f"job {number} ({' '.join(overrides)}): {error.facts.get('where') or 'config'}"
            raise
        configs.append(config)
    return configs
