"""Write the work that all frameworks of a comparison do, as fedexp would do it.

    python scripts/frameworks/prepare.py FOLDER WORKLOAD OVERRIDE ...

The work consists of the data, the split, the participants of every round, the order of
their samples, and the initial weights.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from work import Work

from fedexp.config.compose import compose
from fedexp.core.kernel import epoch_order
from fedexp.running.experiment import Experiment


def main(folder: Path, workload: str, overrides: list[str]) -> None:
    experiment = Experiment.of(compose(overrides))
    config = experiment.config
    data = experiment.load(torch.device("cpu"))
    env = experiment.env(data, torch.device("cpu"))
    start = env.initial_weights()

    cohorts = [env.at(round).sample() for round in range(config.rounds)]
    orders = [
        [epoch_order(env.at(round).job(c, start, {}), data.positions(c), 0) for c in cohort]
        for round, cohort in enumerate(cohorts)
    ]

    work = Work(
        workload=workload,
        lr=config.local.lr,
        batch_size=config.local.batch_size,
        clients=config.clients,
        threads=int(config.threads),
        names=list(start.params),
        x=data.train.inputs(slice(None)).numpy(),
        y=data.train.y.numpy(),
        cohorts=np.array(cohorts),
        orders=np.array([[order.numpy() for order in cohort] for cohort in orders]),
        weights=[value.numpy() for value in start.params.values()],
    )
    work.write(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
