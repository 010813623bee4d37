"""Measure the server time of MA-Echo, OT fusion and averaging for 5 to 50 MLPs.

    python scripts/bench_aggregators.py [5 10 20 50] [--threads 2] [--repeats 3]
        [--write FILE]

MA-Echo is compared with its plain form, which writes out its formulas literally.
Everything runs in one process, on the same N models (784-400-200-100-10 without biases)
and the same projections. The projection of client i is stored as a factor K_i. It
results from one rank-one update per batch of 64 of the client's 60,000 / N inputs. The
plain form uses a dense d x d projector for a layer with d inputs, and a loop over
clients. With weights=qp, it also computes the N^2 inner products of the quadratic
program for the weights. Otherwise the weights are uniform. Seconds are medians over
repeats, but the plain form runs only once. Memory is the peak minus the memory before
the call. The memory before the call includes the models and, for the plain form, the
dense projectors.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import alternate
import torch
from torch import Tensor

from fedexp.config.compose import compose
from fedexp.core.env import Env
from fedexp.core.jobs import ClientResult
from fedexp.core.seeds import torch_generator
from fedexp.core.weights import Weights
from fedexp.matching.simplex_qp import capped_simplex_qp
from fedexp.methods.bases.fusion import FusionAggregator
from fedexp.methods.ma_echo.aggregator import MAEcho
from fedexp.running.experiment import Experiment
from fedexp.running.peak_memory import peak_memory, reset_peak

CPU = torch.device("cpu")
SAMPLES, BATCH = 60_000, 64


def method(name: str, *overrides: str) -> tuple[FusionAggregator, Env]:
    """Return a method and its environment, with the MLP of MA-Echo's tables."""
    config = compose(
        [
            f"method={name}",
            "dataset=synthetic",
            "dataset.features=784",
            "dataset.samples=600",
            "model=mlp_784_400_200_100",
            *overrides,
        ]
    )

    experiment = Experiment.of(config)
    env = experiment.env(experiment.load(CPU), CPU)
    assert isinstance(experiment.aggregator, FusionAggregator)
    return experiment.aggregator, env


def cohort(N: int, env: Env) -> list[ClientResult]:
    """Return the results of N clients: models near one start, and projection factors.

    The factors have the shapes of real factors. They are computed from random batch
    means with MA-Echo's damped recursion.
    """
    start, names = env.initial_weights(), [layer.weight for layer in env.layers[:-1]]

    results = []
    for client in range(N):
        generator = torch_generator("bench", client)
        params = {
            name: value + 0.05 * value.std() * torch.randn(value.shape, generator=generator)
            for name, value in start.params.items()
        }

        factors = {
            name: _factor(start.params[name].shape[1], SAMPLES // N // BATCH, generator)
            for name in names
        }

        weights = Weights(start.spec, params, {})
        counts = torch.randint(0, 3, (10,), generator=generator)
        results.append(
            ClientResult(
                client,
                weights,
                SAMPLES // N,
                1,
                {},
                None,
                {},
                {"projections": factors, "class_counts": {"n": counts}},
            )
        )
    return results


def _factor(d: int, updates: int, generator: torch.Generator) -> Tensor:
    K = torch.zeros(d, 0, dtype=torch.float64)
    base = torch.rand(d, generator=generator, dtype=torch.float64)
    for _ in range(updates):
        r = base + 0.3 * torch.randn(d, generator=generator, dtype=torch.float64)
        k = r - K @ (K.T @ r)
        K = torch.cat([K, (k * (0.5 / (0.01**0.8 + r @ k)).sqrt())[:, None]], 1)
    return K.float()


def plain(
    results: Sequence[ClientResult], Q: list[dict[str, Tensor]], how: MAEcho
) -> dict[str, Tensor]:
    """Compute the iteration of the authors' code in its plain form."""
    N = len(results)
    fused: dict[str, Tensor] = {}
    for name in Q[0]:
        V = [result.weights.params[name].clone() for result in results]
        W = sum(V) / N

        eye = torch.eye(W.shape[1])
        for _ in range(how.T):
            moves = [(W - V[i]) @ (eye - Q[i][name]) for i in range(N)]
            a = torch.full((N,), 1 / N)
            if how.weights == "qp":
                gram = torch.tensor([[float((x * y).sum()) for y in moves] for x in moves])
                a = capped_simplex_qp(gram, how.C)
            W = W - how.eta * sum(a[i] * moves[i] for i in range(N))
            for i in range(N):
                V[i] = V[i] + how.step * ((W - V[i]) @ Q[i][name])

        fused[name] = sum(V) / N
    return fused


def measured(call: Callable[[], object], repeats: int = 1) -> tuple[float, float, object]:
    """Call `call` and measure it.

    Returns:
        Median seconds, peak memory minus the memory before the call in MB, and the
        return value of `call`.
    """
    seconds, most, value = [], 0.0, None
    for _ in range(repeats):
        del value
        reset_peak(CPU)
        before = peak_memory(CPU)["ram"]
        began = time.perf_counter()
        value = call()
        seconds.append(time.perf_counter() - began)
        most = max(most, (peak_memory(CPU)["ram"] - before) / 1e6)
    return statistics.median(seconds), most, value


def furthest(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Return the largest relative difference between two models over all layers.

    The difference of a layer is the norm of the difference of its weights, divided by
    the norm of its weights in `b`.
    """
    return max(float((a[name] - b[name]).norm() / b[name].norm()) for name in b)


def compare(N: int, repeats: int) -> Iterator[str]:
    """Yield the rows of the table for N models."""
    echo, env = method("ma_echo")

    results = cohort(N, env)

    models = 4e-6 * sum(
        value.numel() for result in results for value in result.weights.params.values()
    )
    factors = 4e-6 * sum(
        K.numel() for result in results for K in result.probes["projections"].values()
    )

    for title, variant in (("MA-Echo", {}), ("MA-Echo, weights=qp", {"weights": "qp"})):
        assert isinstance(echo, MAEcho)
        how = replace(echo, **variant)  # type: ignore[arg-type]
        seconds, memory, fused = measured(lambda how=how: how.fuse(results, env)[0].params, repeats)

        dense = [
            {name: torch.eye(len(K)) - K @ K.T for name, K in result.probes["projections"].items()}
            for result in results
        ]
        plain_seconds, plain_memory, expected = measured(
            lambda how=how, Q=dense: plain(results, Q, how)
        )

        assert isinstance(fused, dict) and isinstance(expected, dict)
        yield (
            f"| {N} | {title} | {seconds:.3f} | {plain_seconds:.2f} "
            f"| {plain_seconds / seconds:.1f} | {furthest(fused, expected):.1e} "
            f"| {memory:.0f} | {plain_memory:.0f} | {models:.0f} | {factors:.0f} |"
        )
        del dense, expected, fused

    for name in ("ot_fusion", "average"):
        aggregator, env = method(name)
        seconds, memory, _ = measured(lambda a=aggregator, env=env: a.fuse(results, env), repeats)
        yield f"| {N} | {name} | {seconds:.3f} | | | | {memory:.0f} | | | |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("N", type=int, nargs="*", default=[5, 10, 20, 50])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--write", type=Path, help="Markdown file for the table")

    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    facts = f"{options.threads} threads. MLPs 784-400-200-100-10, T = 60"
    heading = (
        f"# Server time of aggregation\n\n{alternate.heading(facts)}. "
        "`scripts/bench_aggregators.py`."
    )
    columns = ["N", "method", "seconds", "plain form, seconds", "ratio", "relative difference"]
    columns += ["memory, MB", "plain form, MB", "models, MB", "factors, MB"]
    table = alternate.Table(options.write, heading, columns)

    for N in options.N:
        for row in compare(N, options.repeats):
            table.line(row)


if __name__ == "__main__":
    main()
