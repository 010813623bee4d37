"""Federated averaging by a loop like `bare_loop.py`, with a given order of samples.

python scripts/frameworks/run_bare.py WORK RECORD
"""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from bare_loop import WORKLOADS
from work import arguments, write_record


def main() -> None:
    work, record, _ = arguments()
    torch.set_num_threads(work.threads)
    x, y, orders = (torch.from_numpy(array) for array in (work.x, work.y, work.orders))
    model = WORKLOADS[work.workload][0]()
    params = list(model.parameters())
    weights = [torch.from_numpy(array).clone() for array in work.weights]
    seconds, steps, samples = [], [], []

    for cohort in orders:
        start = time.perf_counter()
        total = [torch.zeros_like(w) for w in weights]
        mass = taken = seen = 0

        for order in cohort:
            with torch.no_grad():
                torch._foreach_copy_(params, weights)
            optimizer = torch.optim.SGD(params, lr=work.lr)
            for index in order.split(work.batch_size):
                loss = F.cross_entropy(model(x[index]), y[index])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                taken, seen = taken + 1, seen + len(index)

            with torch.no_grad():
                torch._foreach_add_(total, params, alpha=float(len(order)))
            mass += len(order)

        with torch.no_grad():
            torch._foreach_copy_(weights, [t / mass for t in total])
        seconds.append(time.perf_counter() - start)
        steps.append(taken)
        samples.append(seen)

    write_record(record, seconds, steps, samples, [w.numpy() for w in weights])


if __name__ == "__main__":
    main()
