"""Federated averaging by Flower's simulation runtime.

    python scripts/frameworks/run_flower.py WORK RECORD CPUS

CPUS is the number of cores per client. On two cores, 1 gives two actors (worker
processes) of one thread each, and 2 gives one actor of two threads.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable

import torch
from bare_loop import WORKLOADS
from flower_client import app
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from work import Work, arguments, write_record


class GivenParticipants(FedAvg):
    """Flower's FedAvg with the prescribed participants, timed per round."""

    def __init__(self, work: Work, folder: str, threads: int) -> None:
        super().__init__(
            fraction_train=1.0,
            fraction_evaluate=0.0,
            min_train_nodes=work.orders.shape[1],
            min_available_nodes=work.clients,
        )
        self.work, self.folder, self.threads = work, folder, threads
        self.seconds: list[float] = []
        self.steps: list[int] = []
        self.samples: list[int] = []

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        nodes = sorted(grid.get_node_ids())
        self._start = time.perf_counter()
        messages = []
        for i, client in enumerate(self.work.cohorts[server_round - 1].tolist()):
            own = ConfigRecord(
                {
                    "server-round": server_round,
                    "participant": i,
                    "folder": self.folder,
                    "threads": self.threads,
                }
            )
            content = RecordDict({"arrays": arrays, "config": own})
            messages.append(Message(content, dst_node_id=nodes[client], message_type="train"))
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        replies = list(replies)
        result = super().aggregate_train(server_round, replies)
        self.seconds.append(time.perf_counter() - self._start)
        metrics = [reply.content["metrics"] for reply in replies]
        self.steps.append(sum(m["steps"] for m in metrics))
        self.samples.append(sum(m["num-examples"] for m in metrics))
        return result


def main() -> None:
    work, record, (cpus,) = arguments()
    folder, threads = sys.argv[1], int(cpus)
    server = ServerApp()

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        while len(list(grid.get_node_ids())) < work.clients:
            time.sleep(0.1)
        model = WORKLOADS[work.workload][0]()
        names = list(model.state_dict())
        start = dict(zip(names, (torch.from_numpy(w) for w in work.weights), strict=True))
        strategy = GivenParticipants(work, folder, threads)

        result = strategy.start(grid, ArrayRecord(start), num_rounds=len(work.orders))
        final = result.arrays.to_torch_state_dict()
        write_record(
            record,
            strategy.seconds,
            strategy.steps,
            strategy.samples,
            [final[name].numpy() for name in names],
        )

    run_simulation(
        server,
        app,
        num_supernodes=work.clients,
        backend_config={
            "client_resources": {"num_cpus": threads, "num_gpus": 0.0},
            "init_args": {"num_cpus": os.cpu_count(), "include_dashboard": False},
        },
    )


if __name__ == "__main__":
    main()
