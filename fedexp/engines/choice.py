"""Settling on an engine, once: runs alike on one machine share the choice that the first of them timed.

So a sweep's runs and a repeated run have the same numerics, and nothing is timed twice.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from fedexp.core.build import build
from fedexp.core.engine import Engine, Trial, describe
from fedexp.engines.timing import WORTH_TIMING, work
from fedexp.storage.files import read_json, write_json


@dataclass(frozen=True)
class ChoiceStore:
    """Timed choices under ``<output_root>/engines``.

    Args:
        fresh: time again, whatever is stored.
    """

    root: Path
    code: str
    fresh: bool

    def settle(self, wanted: Engine, trial: Trial) -> Engine:
        """`wanted`, settled: as it was for the first run like this one, else by `Engine.settle`."""
        path = self.root / f"{self._key(wanted, trial)}.json"
        if not self.fresh and (stored := read_json(path)) is not None:
            return _adopted(wanted, stored, trial)
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(self.root / "lock"):  # who times alone, times right
            if not self.fresh and (stored := read_json(path)) is not None:
                return _adopted(wanted, stored, trial)
            told: list[str] = []

            def note(text: str) -> None:
                told.append(text)
                trial.note(text)

            engine = wanted.settle(replace(trial, note=note))
            if told:  # a choice by rule needs no memory
                facts = {"engine": describe(engine.computing), "threads": engine.threads_each(trial.threads)}
                write_json(path, {**facts, "timed": told})
        return engine

    def _key(self, wanted: Engine, trial: Trial) -> str:
        jobs = trial.jobs
        first = jobs[0] if jobs else None
        parts = [describe(wanted), {**asdict(trial.numerics), "engine": {}}, trial.threads, trial.rounds, len(jobs)]
        if first is not None:
            parts += [repr(first.start.spec), repr(first.trainer), repr(first.task), repr(first.budget)]
        sizes = [trial.data.partition.size(job.client) for job in jobs]
        spread = [int(math.log2(max(1, size))) for size in (min(sizes), max(sizes), sum(sizes))] if sizes else []
        parts += [spread, work(trial) < WORTH_TIMING]
        parts += [self.code, platform.node(), platform.processor(), os.cpu_count(), torch.__version__]
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=12).hexdigest()


def _adopted(wanted: Engine, stored: dict[str, Any], trial: Trial) -> Engine:
    computing = build(Engine, stored["engine"], "engine")  # type: ignore[type-abstract]
    trial.note("engine: chosen by an earlier run like this one: " + "; ".join(stored["timed"]))
    return wanted.adopt(computing, stored["threads"], trial.threads)
