"""The client of `run_flower.py`, which Ray's actors import."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from bare_loop import WORKLOADS
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn
from work import Work

app = ClientApp()


@cache
def loaded(folder: str, threads: int) -> tuple[Work, Tensor, Tensor, nn.Module]:
    """Load the work (data, orders and settings) and build the model, once per actor."""
    torch.set_num_threads(threads)
    work = Work.read(Path(folder))
    model = WORKLOADS[work.workload][0]()
    return work, torch.from_numpy(work.x), torch.from_numpy(work.y), model


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train one client for an epoch."""
    config = message.content["config"]
    work, x, y, model = loaded(config["folder"], config["threads"])
    order = work.orders[config["server-round"] - 1, config["participant"]]
    inputs, targets = x[order], y[order]

    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=work.lr)
    steps = 0
    for a, b in zip(inputs.split(work.batch_size), targets.split(work.batch_size), strict=True):
        optimizer.zero_grad()
        F.cross_entropy(model(a), b).backward()
        optimizer.step()
        steps += 1

    metrics = MetricRecord({"num-examples": len(order), "steps": steps})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)
