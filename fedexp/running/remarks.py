"""Notes on allowed settings whose effect is smaller than expected, or different.

They are shown once when a run begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from fedexp.running.experiment import Experiment


def remarks(experiment: Experiment) -> Iterator[str]:
    """Yield one line per setting whose effect is smaller than expected, or differs."""
    config = experiment.config
    if experiment.stored_models is not None and fields(experiment.trainer):
        when = (
            "from the second round on"
            if config.rounds > 1
            else "nowhere: the one round trains nothing"
        )
        yield (
            "client_models.path gives the first round's models: "
            f"trainer {type(experiment.trainer).__name__} and its keys take effect {when}"
        )

    yield from limit_remarks(experiment)

    share = config.clients_per_round
    if isinstance(share, float) and share * config.clients < 1:
        does = (
            "one client takes part in every round"
            if config.sampling == "fixed"
            else "a round without a client is drawn again until one takes part"
        )
        yield (
            f"clients_per_round={share:g} of {config.clients} clients "
            f"is less than one client: {does}"
        )


def limit_remarks(experiment: Experiment) -> Iterator[str]:
    """Yield one line per limit that is ignored."""
    for key, why in experiment.ignored_limits.items():
        yield f"{key} is ignored: {why}"
