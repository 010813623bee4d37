"""Federated averaging by pfl-research.

    python scripts/frameworks/run_pfl.py WORK RECORD [WORKERS]

With two workers, users (clients) are divided among two processes of one thread each, as
in pfl-research's guide "Fast distributed simulations".
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from bare_loop import WORKLOADS
from torch import Tensor, nn
from work import Work, arguments, write_record

PORT = 45117


def main() -> None:
    work, record, more = arguments()
    workers = int(more[0]) if more else 1
    torch.set_num_threads(max(1, work.threads // workers))

    if workers == 1:
        train(work, record)
    elif "PFL_WORKER_RANK" in os.environ:
        train(work, record.with_name(f"{record.name}_{os.environ['PFL_WORKER_RANK']}"))
    else:
        addresses = ",".join(f"localhost:{PORT + rank}" for rank in range(workers))
        processes = [
            subprocess.Popen(
                [sys.executable, *sys.argv],
                env={
                    **os.environ,
                    "PFL_WORKER_ADDRESSES": addresses,
                    "PFL_WORKER_RANK": str(rank),
                    "OMP_NUM_THREADS": "1",
                },
            )
            for rank in range(workers)
        ]
        if any([process.wait() for process in processes]):
            sys.exit("a worker of pfl failed")
        join_records(record, workers)


def train(work: Work, record: Path) -> None:
    """Train and write the record of this process."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByDatapoints
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.hyperparam.base import NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    x, y = torch.from_numpy(work.x), torch.from_numpy(work.y)
    rounds, participants, size = work.orders.shape
    orders = torch.from_numpy(work.orders).reshape(rounds * participants, size)
    steps, samples, ends = [], [], []

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = WORKLOADS[work.workload][0]()
            self.steps = self.samples = 0
            with torch.no_grad():
                for p, array in zip(self.parameters(), work.weights, strict=True):
                    p.copy_(torch.from_numpy(array))

        def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
            self.steps += 1
            self.samples += len(targets)
            return F.cross_entropy(self.net(inputs), targets)

        def metrics(self, *_: Tensor) -> dict[str, float]:
            return {}

    class Clock(TrainingProcessCallback):
        def on_train_begin(self, *, model: PyTorchModel) -> Metrics:
            ends.append(time.perf_counter())
            return Metrics()

        def after_central_iteration(
            self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
        ) -> tuple[bool, Metrics]:
            ends.append(time.perf_counter())
            steps.append(net.steps)
            samples.append(net.samples)
            net.steps = net.samples = 0
            return False, Metrics()

    net = Net()
    model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0))
    # Each participant of each round is a separate user, because the order of a client's
    # samples differs between rounds
    queue = itertools.chain(range(len(orders)), itertools.repeat(0))
    users = FederatedDataset(
        lambda user: Dataset([x[orders[user]], y[orders[user]]]), lambda: next(queue)
    )
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=rounds + 1,
            train_cohort_size=participants,
            val_cohort_size=0,
        ),
        SimulatedBackend(users, users, [WeightByDatapoints()]),
        model,
        NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=work.lr, local_batch_size=work.batch_size
        ),
        None,
        callbacks=[Clock()],
        send_metrics_to_platform=False,
    )
    seconds = [b - a for a, b in itertools.pairwise(ends)]
    write_record(record, seconds, steps, samples, [p.detach().numpy() for p in net.parameters()])


def join_records(record: Path, workers: int) -> None:
    """Join the workers' records: longest times, and sums of steps and samples."""
    parts = [record.with_name(f"{record.name}_{rank}") for rank in range(workers)]
    rows = [json.loads(part.with_suffix(".json").read_text()) for part in parts]
    with np.load(parts[0].with_suffix(".npz")) as final:
        weights = [final[name] for name in final.files]
    write_record(
        record,
        np.max([row["seconds"] for row in rows], axis=0).tolist(),
        np.sum([row["steps"] for row in rows], axis=0).tolist(),
        np.sum([row["samples"] for row in rows], axis=0).tolist(),
        weights,
    )


if __name__ == "__main__":
    main()
