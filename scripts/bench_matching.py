"""Measure the matching of hidden units at the sizes of published experiments.

    python scripts/bench_matching.py [CASE ...] [--threads 2] [--write FILE] [--help]

The experiments are those of NAFI, GAMF and FedMA. PFNM is compared with plain loops
over its formulas (`tests/reference/matching_loops.py`). Everything runs in one process
on generated units. Each model has some units of a common set plus separate noise, so a
part of the units of two models matches. `--common` (size of the set) and `--noise`
determine how many global units are found. The loops take minutes for the first pass
over the models alone. Without `--whole`, both sides are therefore timed only on this
pass. The cases are:

- `pfnm`: PFNM compared with the loops.
- `wide`: PFNM with wide layers.
- `grid`: NAFI with 12 values of lambda at once, on the models of `pfnm`. Each result is
  compared bit by bit with a separate run of its lambda. The fastest of three turns
  counts.
- `gamf`: GAMF on five MLPs with three hidden layers of 100 units. Sinkhorn's iterations
  stop early. With `--whole`, a second run does all iterations of the authors' schedule.
- `fedma`: FedMA on the first dense layer after convolutions.
- `gpu`: PFNM with its cost matrices computed on a GPU.

Seconds are those of one call, after a small call that is not measured. Memory is the
peak minus the memory in use before the call.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import alternate
import numpy as np
import torch
from torch import Tensor

from fedexp.core.seeds import numpy_generator, torch_generator
from fedexp.core.weights import ModelSpec, Weights
from fedexp.matching.beta_bernoulli import BetaBernoulli, UnitAssignment, match, match_each
from fedexp.matching.graduated_assignment import Joint, match_jointly, random_start
from fedexp.matching.structure import structure_of
from fedexp.running.peak_memory import peak_memory, reset_peak

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.reference import matching_loops

CPU = torch.device("cpu")
# Values of lambda: zero, and the eleven values in the logs of NAFI's authors
LAMBDAS = (0.0, 1e-4, 1e-3, 5e-3, 0.01, 0.05, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0)
NAFI = BetaBernoulli(sigma=0.9, sigma0=3.0, caps=False)
SWEEPS = 5
TURNS = 3  # number of turns of the case `grid`


def units(
    models: int, width: int, dims: int, common: int, noise: float, *names: object
) -> list[Tensor]:
    """Return random units of several models, with the scale of trained weights.

    Each model has `width` random units of a common set of `common` units, plus noise.

    Returns:
        For each model, units of shape (width, dims), float64.
    """
    generator = torch_generator("bench", *names)
    shared = 0.25 * torch.randn(common, dims, generator=generator, dtype=torch.float64)

    def draw() -> Tensor:
        own = shared[torch.randperm(common, generator=generator)[:width]]
        return own.add_(
            torch.randn(own.shape, generator=generator, dtype=torch.float64), alpha=noise
        )

    return [draw() for _ in range(models)]


def arguments(models: Sequence[Tensor], sigma: float) -> tuple[Tensor, Tensor, np.ndarray]:
    """Return the arguments of `match`: precisions, prior mean and visiting orders."""
    dims = models[0].shape[1]
    q, mu0 = models[0].new_full((len(models), dims), 1 / sigma), models[0].new_zeros(dims)
    mu0[-1] = 0.1
    rng = numpy_generator("bench", "orders")
    return q, mu0, np.array([rng.permutation(len(models)) for _ in range(SWEEPS)])


def measured(call: Callable[[], Any]) -> tuple[float, float, Any]:
    """Call `call` and measure it.

    Returns:
        Seconds, peak memory minus the memory before the call in MB, and the return
        value of `call`.
    """
    reset_peak(CPU)
    before = peak_memory(CPU)["ram"]
    seconds, _, value = timed(call)
    return seconds, (peak_memory(CPU)["ram"] - before) / 1e6, value


def timed(call: Callable[[], Any]) -> tuple[float, float, Any]:
    """Call `call` and time it.

    Returns:
        Elapsed seconds, CPU seconds of all threads, and the return value of `call`.
    """
    began, computing = time.perf_counter(), time.process_time()
    value = call()
    return time.perf_counter() - began, time.process_time() - computing, value


def size(models: Sequence[Tensor]) -> str:
    return f"{len(models)} x {len(models[0]):,} x {models[0].shape[1]:,}"


def bench_pfnm(options: argparse.Namespace) -> Iterator[str]:
    """Compare PFNM with the loops, in time and in results."""
    models = units(options.nets, options.width, options.dims, options.common, options.noise, "pfnm")
    q, mu0, orders = arguments(models, NAFI.sigma)
    plain = [model.numpy() for model in models], q.numpy(), mu0.numpy(), matching_loops.Constants()

    for sweeps in (SWEEPS, *([0] if not options.whole else [])):
        seconds, memory, found = measured(lambda n=sweeps: match(models, q, mu0, NAFI, orders[:n]))
        row = (
            f"| PFNM, {sweeps} sweeps | {size(models)} | {len(found.members):,} "
            f"| {seconds:.2f} | {memory:,.0f} |"
        )
        if sweeps and not options.whole:
            yield f"{row} bound 5 s |"
            continue

        slow, _, (places, means) = measured(
            lambda n=sweeps: matching_loops.matched(*plain, orders[:n])
        )

        alike = all(a.tolist() == b.tolist() for a, b in zip(found.units, places, strict=True))
        apart = float(np.abs(found.mean.numpy() - means).max()) if alike else float("nan")
        said = (
            f"loops {slow:.1f} s, ratio {slow / seconds:.0f} (bound 10), "
            f"same units: {alike}, means within {apart:.0e}"
        )
        yield f"{row} {said} |"


def bench_wide(options: argparse.Namespace) -> Iterator[str]:
    models = units(10, options.wide, options.dims, 10 * options.wide // 2, options.noise, "wide")
    q, mu0, orders = arguments(models, NAFI.sigma)
    seconds, memory, found = measured(lambda: match(models, q, mu0, NAFI, orders))
    row = (
        f"| PFNM, {SWEEPS} sweeps | {size(models)} | {len(found.members):,} "
        f"| {seconds:.2f} | {memory:,.0f} |"
    )
    yield f"{row} bounds 60 s, 2,000 MB |"


def bench_grid(options: argparse.Namespace) -> Iterator[str]:
    models = units(options.nets, options.width, options.dims, options.common, options.noise, "pfnm")
    q, mu0, orders = arguments(models, NAFI.sigma)

    for kind in options.penalties:
        how = replace(NAFI, penalty=kind)
        each = orders[None].repeat(len(LAMBDAS), 0)
        _, memory, found = measured(
            lambda how=how, each=each: match_each(models, q, mu0, how, LAMBDAS, each)
        )

        # Rows: elapsed seconds and CPU seconds. Columns: all lambdas at once, then each
        # lambda in a separate run
        least = np.full((2, 1 + len(LAMBDAS)), math.inf)
        equal = 0

        for _ in range(TURNS):
            turns = [
                timed(lambda how=how, each=each: match_each(models, q, mu0, how, LAMBDAS, each)),
                *(
                    timed(
                        lambda how=how, lam=lam: match(
                            models, q, mu0, replace(how, strength=lam), orders
                        )
                    )
                    for lam in LAMBDAS
                ),
            ]
            least = np.minimum(least, np.array([turn[:2] for turn in turns]).T)
            equal = sum(_same(a, b) for a, (_, _, b) in zip(found, turns[1:], strict=True))

        (seconds, *one), (computing, *computing_one) = least.tolist()

        widths = f"{min(len(f.members) for f in found):,} to {max(len(f.members) for f in found):,}"
        said = (
            f"{seconds / mean(one):.2f} times one lambda's mean, "
            f"{seconds / max(one):.2f} times the slowest's (bound 6); "
            f"computing time {computing / mean(computing_one):.2f} "
            f"and {computing / max(computing_one):.2f} times; "
            f"{equal} of {len(LAMBDAS)} bit-identical"
        )
        yield (
            f"| {len(LAMBDAS)} lambdas, {kind} | {size(models)} | {widths} "
            f"| {seconds:.2f} | {memory:,.0f} | {said} |"
        )


def _same(a: UnitAssignment, b: UnitAssignment) -> bool:
    alike = all(torch.equal(x, y) for x, y in zip(a.units, b.units, strict=True))
    return alike and torch.equal(a.mean, b.mean)


def bench_gamf(options: argparse.Namespace) -> Iterator[str]:
    node = {"_target_": "fedexp.models.mlp.MLP", "hidden": [options.hidden] * 3, "bias": False}
    spec = ModelSpec.of(node, (784,), 10)
    structure, base = structure_of(spec, (784,)), Weights.init(spec, 0, CPU, torch.float64)

    models = []
    for number in range(5):
        moved = structure.permute_weights(base, structure.random(number))
        generator = torch_generator("bench", "gamf", number)
        noisy = {
            name: value
            + 0.5 * value.std() * torch.randn(value.shape, generator=generator, dtype=value.dtype)
            for name, value in moved.params.items()
        }
        models.append(Weights(spec, noisy, {}))

    for title, early_stop in (
        ("early stop 1e-9", 1e-9),
        *([("all half-steps", None)] if options.whole else []),
    ):
        start = random_start(structure.groups, len(models), Joint().noise, CPU, "bench", "gamf")

        call = partial(
            match_jointly, models, structure, structure.groups, Joint(), early_stop, start
        )
        seconds, memory, (_, sweeps) = measured(call)
        said = f"{sweeps} sweeps" + ("; bound 60 s" if early_stop else "")
        yield (
            f"| GAMF, {title} | 5 nets, 3 x {options.hidden} | "
            f"| {seconds:.1f} | {memory:,.0f} | {said} |"
        )


def bench_fedma(options: argparse.Namespace) -> Iterator[str]:
    """Match the 512 units of a dense layer after convolutions.

    Each unit has 64 incoming weights (positions) per global channel, and a bias. The
    number K of global channels is --channels.
    """
    how = BetaBernoulli(gamma=7.0)
    models = units(10, 512, 64 * options.channels + 1, 2048, options.noise, "fedma")
    q, mu0, orders = arguments(models, how.sigma)
    seconds, memory, found = measured(lambda: match(models, q, mu0, how, orders))
    said = f"K = {options.channels}, caps; bound 30 s"
    yield (
        f"| FedMA, dense after conv | {size(models)} | {len(found.members):,} "
        f"| {seconds:.1f} | {memory:,.0f} | {said} |"
    )


def bench_gpu(options: argparse.Namespace) -> Iterator[str]:
    """Compute the cost matrices on the GPU, and the assignment problems on the CPU."""
    models = units(options.nets, options.width, options.dims, options.common, options.noise, "pfnm")
    q, mu0, orders = arguments(models, NAFI.sigma)

    for device in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
        there = [model.to(device) for model in models], q.to(device), mu0.to(device)
        match(*there, NAFI, orders[:1])
        seconds, memory, found = measured(lambda there=there: match(*there, NAFI, orders))
        name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
        yield (
            f"| PFNM on {name} | {size(models)} | {len(found.members):,} "
            f"| {seconds:.2f} | {memory:,.0f} | |"
        )
    if not torch.cuda.is_available():
        yield "| no GPU here | | | | | |"


CASES = {
    "pfnm": bench_pfnm,
    "wide": bench_wide,
    "grid": bench_grid,
    "gamf": bench_gamf,
    "fedma": bench_fedma,
    "gpu": bench_gpu,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "cases", nargs="*", metavar="CASE", help=f"{', '.join(CASES)} (default: all)"
    )

    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--nets", type=int, default=30)
    parser.add_argument(
        "--width", type=int, default=100, help="units per model of pfnm, grid and gpu"
    )
    parser.add_argument("--wide", type=int, default=1000, help="units per model of wide")
    parser.add_argument("--dims", type=int, default=795)
    parser.add_argument(
        "--common",
        type=int,
        default=3300,
        help="units that models of pfnm, grid and gpu are drawn from",
    )
    parser.add_argument("--noise", type=float, default=0.1)
    parser.add_argument("--hidden", type=int, default=100, help="units per layer of gamf")
    parser.add_argument("--channels", type=int, default=400, help="K of fedma")
    parser.add_argument("--penalties", nargs="+", default=["paper", "code2020", "code2022"])
    parser.add_argument(
        "--whole",
        action="store_true",
        help="loops with all sweeps, GAMF with all half-steps: minutes to hours",
    )
    parser.add_argument("--write", type=Path, help="Markdown file for the table")

    options = parser.parse_args()

    unknown = [case for case in options.cases if case not in CASES]
    if unknown:
        parser.error(f"unknown case {unknown[0]}: choose from {', '.join(CASES)}")
    torch.set_num_threads(options.threads)

    facts = f"{options.threads} threads, float64"
    heading = (
        f"# Matching of hidden units\n\n{alternate.heading(facts)}. `scripts/bench_matching.py`."
    )
    columns = ["what", "models x units x dimensions", "global units", "seconds", "memory, MB", ""]
    table = alternate.Table(options.write, heading, columns)

    small = units(3, 4, 5, 6, 0.1, "warm")
    q, mu0, orders = arguments(small, 1.0)
    # Imports and first uses happen in this call, which is not measured
    match_each(small, q, mu0, NAFI, [0.0, 0.1], orders[None].repeat(2, 0))

    for case in options.cases or CASES:
        for row in CASES[case](options):
            table.line(row)


if __name__ == "__main__":
    main()
