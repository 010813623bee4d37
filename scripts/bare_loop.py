"""The bare loop that fedexp's speed is measured against.

    python scripts/bare_loop.py DATA_ROOT W1|W2|W3|W4
        [--method fedavg|fedprox|scaffold|fedsam] [--threads 2] [--rounds 8]
        [--device cpu|cuda]

It is the federated training loop that a researcher would write by hand, and nothing
else. Images are normalised once, and batches are taken from them by index. The
optimizer is torch.optim.SGD. There is no evaluation, checkpoint or log. The script
prints the seconds and the local steps of every round as JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

MU = 0.1  # FedProx's coefficient
RHO = 0.05  # FedSAM's radius


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


class Block(nn.Module):
    def __init__(self, a: int, b: int, stride: int) -> None:
        super().__init__()
        self.main = nn.Sequential(*normed(a, b, 3, stride), nn.ReLU(), *normed(b, b, 3, 1))
        self.short = nn.Sequential(*(normed(a, b, 1, stride) if stride > 1 else ()))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.main(x) + self.short(x))


def normed(a: int, b: int, size: int, stride: int) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(a, b, size, stride, padding=size // 2, bias=False), nn.GroupNorm(2, b)


def resnet18() -> nn.Module:
    blocks = [
        Block(a, b, stride)
        for a, b, stride in ((64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2))
    ]
    again = [Block(b, b, 1) for b in (64, 128, 256, 512)]
    pairs = itertools.chain.from_iterable(zip(blocks, again, strict=True))
    stem = *normed(1, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)
    return nn.Sequential(*stem, *pairs, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


# Model, clients, samples per client, clients per round, batch, lr, momentum
WORKLOADS = {
    "W1": (lambda: mlp(784, 200, 10), 1000, 60, 20, 20, 0.05, 0.0),
    "W2": (lambda: mlp(784, 400, 200, 100, 10), 10, 6000, 10, 64, 0.05, 0.5),
    "W3": (cnn, 100, 100, 10, 10, 0.05, 0.0),
    "W4": (resnet18, 10, 40, 10, 20, 0.05, 0.0),
}


def load(root: Path) -> tuple[Tensor, Tensor]:
    raw = root / "FashionMNIST" / "raw"
    x = np.frombuffer((raw / "train-images-idx3-ubyte").read_bytes(), np.uint8, offset=16).reshape(
        -1, 1, 28, 28
    )
    y = np.frombuffer((raw / "train-labels-idx1-ubyte").read_bytes(), np.uint8, offset=8)
    return torch.from_numpy((x.astype(np.float32) / 255 - 0.2860) / 0.3530), torch.from_numpy(
        y.astype(np.int64)
    )


def unequal(folder: Path) -> tuple[list[Tensor], list[list[int]]]:
    """Return the samples of every client and the clients of every round.

    They are read from files in which `bench_rounds.py` stored fedexp's partition and
    participants.
    """
    from safetensors.torch import load_file

    split = load_file(folder / "partition.safetensors")
    members = split["indices"].tensor_split(split["offsets"][1:-1])
    return list(members), json.loads((folder / "cohorts.json").read_text())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument(
        "--method", choices=("fedavg", "fedprox", "scaffold", "fedsam"), default="fedavg"
    )

    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--split",
        type=Path,
        help="folder with partition.safetensors and cohorts.json to use instead",
    )
    parser.add_argument("--momentum", type=float, help="momentum instead of the workload's")
    parser.add_argument(
        "--cohort", type=int, help="number of clients per round instead of the workload's"
    )
    parser.add_argument(
        "--hidden", type=int, nargs="+", help="an MLP with these hidden widths instead"
    )

    return parser.parse_args()


def main() -> None:
    options = arguments()
    build, clients, size, cohort, batch, lr, momentum = WORKLOADS[options.workload]
    if options.method == "scaffold":
        # The paper has no momentum. With momentum, the corrected gradients make
        # training diverge
        momentum = 0.0
    momentum = momentum if options.momentum is None else options.momentum

    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    x, y = (tensor.to(options.device) for tensor in load(options.data))

    if options.split:
        members, cohorts = unequal(options.split)
    else:
        members = list(torch.arange(clients * size).split(size))
        m = options.cohort or cohort
        cohorts = [rng.choice(clients, m, replace=False).tolist() for _ in range(options.rounds)]

    model = (mlp(784, *options.hidden, 10) if options.hidden else build()).to(options.device)
    loop = rounds(
        model, x, y, members, cohorts[: options.rounds], options.method, batch, lr, momentum
    )
    seconds, steps = zip(*loop, strict=True)
    print(json.dumps({"seconds": seconds, "steps": steps}))


def rounds(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    members: list[Tensor],
    cohorts: list[list[int]],
    method: str,
    batch: int,
    lr: float,
    momentum: float,
) -> Iterator[tuple[float, int]]:
    """Train, and yield seconds and local steps of every round."""
    params = list(model.parameters())
    weights = [p.detach().clone() for p in params]
    # SCAFFOLD's control variates: c of the server, and c_i of each client
    c = [torch.zeros_like(w) for w in weights]

    c_i: dict[int, list[Tensor]] = {}

    for cohort in cohorts:
        start = time.perf_counter()
        total = [torch.zeros_like(w) for w in weights]
        change = [torch.zeros_like(w) for w in weights]
        steps, mass = 0, 0.0

        for client in cohort:
            with torch.no_grad():
                torch._foreach_copy_(params, weights)
            optimizer = torch.optim.SGD(params, lr=lr, momentum=momentum)
            if method == "scaffold":
                own = c_i.get(client) or [torch.zeros_like(w) for w in weights]
                drift = [a - b for a, b in zip(c, own, strict=True)]

            order = members[client][torch.randperm(len(members[client]))].to(x.device)
            batches = order.split(batch)
            for index in batches:
                loss = F.cross_entropy(model(x[index]), y[index])
                optimizer.zero_grad()
                loss.backward()

                with torch.no_grad():
                    if method == "fedprox":
                        for p, w in zip(params, weights, strict=True):
                            p.grad.add_(p - w, alpha=MU)
                    elif method == "scaffold":
                        for p, d in zip(params, drift, strict=True):
                            p.grad.add_(d)
                if method == "fedsam":
                    ascend(model, params, x[index], y[index], optimizer)
                optimizer.step()

            share = 1.0 if method == "scaffold" else float(len(order))
            steps, mass = steps + len(batches), mass + share
            with torch.no_grad():
                torch._foreach_add_(total, params, alpha=share)
                if method == "scaffold":  # option II of the paper for the new c_i
                    tau = len(batches) * lr
                    new = [
                        (w - p) / tau - d for w, p, d in zip(weights, params, drift, strict=True)
                    ]
                    torch._foreach_add_(change, [a - b for a, b in zip(new, own, strict=True)])
                    c_i[client] = new
        with torch.no_grad():
            torch._foreach_copy_(weights, [t / mass for t in total])
            torch._foreach_add_(c, change, alpha=1 / len(members))
        if x.is_cuda:
            torch.cuda.synchronize()
        yield time.perf_counter() - start, steps


def ascend(
    model: nn.Module, params: list[Tensor], x: Tensor, y: Tensor, optimizer: torch.optim.SGD
) -> None:
    """Replace the gradient g at the weights w by the gradient at ``w + rho g / ||g||``.

    This is the step of FedSAM with radius rho (RHO). The weights are restored.
    """
    with torch.no_grad():
        norm = torch.stack([p.grad.square().sum() for p in params]).sum().sqrt() + 1e-7
        e = [p.grad * (RHO / norm) for p in params]
        torch._foreach_add_(params, e)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    with torch.no_grad():
        torch._foreach_sub_(params, e)


if __name__ == "__main__":
    main()
