"""The bare loop that fedexp's speed is measured against: what a researcher would write by hand, nothing else.

    python scripts/bare_loop.py DATA_ROOT W1|W2|W3 [threads] [rounds]

Images are normalised once and indexed; torch.optim.SGD; no evaluation, checkpoint or log. Prints seconds of every round as JSON.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


def mlp(*widths: int) -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten()]
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, 10),
    )  # fmt: skip


WORKLOADS = {  # model, clients, samples a client, clients a round, batch, lr, momentum
    "W1": (lambda: mlp(784, 200, 10), 1000, 60, 20, 20, 0.05, 0.0),
    "W2": (lambda: mlp(784, 400, 200, 100, 10), 10, 6000, 10, 64, 0.05, 0.5),
    "W3": (cnn, 100, 100, 10, 10, 0.05, 0.0),
}


def load(root: Path) -> tuple[torch.Tensor, torch.Tensor]:
    raw = root / "FashionMNIST" / "raw"
    x = np.frombuffer((raw / "train-images-idx3-ubyte").read_bytes(), np.uint8, offset=16).reshape(-1, 1, 28, 28)
    y = np.frombuffer((raw / "train-labels-idx1-ubyte").read_bytes(), np.uint8, offset=8)
    return torch.from_numpy((x.astype(np.float32) / 255 - 0.2860) / 0.3530), torch.from_numpy(y.astype(np.int64))


def main(root: str, workload: str, threads: str = "2", rounds: str = "8") -> None:
    build, clients, size, cohort, batch, lr, momentum = WORKLOADS[workload]
    torch.set_num_threads(int(threads))
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    x, y = load(Path(root))
    model = build()
    params = list(model.parameters())
    weights = [p.detach().clone() for p in params]
    seconds = []
    for _ in range(int(rounds)):
        start = time.perf_counter()
        total = [torch.zeros_like(w) for w in weights]
        for client in rng.choice(clients, cohort, replace=False).tolist():
            with torch.no_grad():
                torch._foreach_copy_(params, weights)
            optimizer = torch.optim.SGD(params, lr=lr, momentum=momentum)
            order = client * size + torch.randperm(size)
            for index in order.split(batch):
                loss = F.cross_entropy(model(x[index]), y[index])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            with torch.no_grad():
                torch._foreach_add_(total, params)
        with torch.no_grad():
            torch._foreach_copy_(weights, [t / cohort for t in total])
        seconds.append(time.perf_counter() - start)
    print(json.dumps(seconds))


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
