"""MA-Echo equals its formulas in plain form and closed forms, and is equivariant."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedexp.config.compose import compose
from fedexp.core.errors import ConfigError
from fedexp.core.jobs import ClientResult
from fedexp.core.layers import Layer
from fedexp.core.net import Net
from fedexp.core.runner import run
from fedexp.engines.serial import Serial
from fedexp.evaluation.evaluate import Evaluator
from fedexp.evaluation.tracing import Tracer
from fedexp.matching.alignment import Alignment
from fedexp.matching.simplex_qp import capped_simplex_qp
from fedexp.methods.ma_echo.null_space import LayerRule, NullSpace
from fedexp.methods.ma_echo.projections import Projections
from fedexp.methods.ot_fusion import aligned
from fedexp.models import mlp
from fedexp.running.experiment import Experiment
from tests.world import CPU, MLP, World, answers, assert_same, make_data, make_world

RELEASED = LayerRule(eta=1.6, step=1.6, shrinkage=1.0, anchored=False, norm=False, C=None)
ALGORITHM_1 = LayerRule(eta=1.0, step=1.0, shrinkage=0.5, anchored=False, norm=False, C=0.4)
PRINTED = replace(ALGORITHM_1, C=1.0)
RULES = {
    "released": RELEASED,
    "normed": replace(RELEASED, norm=True, eta=0.05, step=0.05),
    "anchored": replace(RELEASED, anchored=True, shrinkage=0.5),
    "algorithm 1": ALGORITHM_1,
    "algorithm 1 normed": replace(ALGORITHM_1, norm=True),
}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def factor(d: int, rank: int, seed: int) -> Tensor:
    """Return K such that the eigenvalues of K K^T are in [0, 1]."""
    Q, _ = torch.linalg.qr(random(d, rank, seed=seed))
    return Q * torch.linspace(0.2, 1.0, rank, dtype=torch.float64).sqrt()


def plain(
    local: list[Tensor], P: list[Tensor], start: Tensor, rule: LayerRule, T: int
) -> tuple[Tensor, list[Tensor]]:
    """Iterate as the formulas are written, with dense matrices."""
    N, d = len(local), start.shape[1]
    W, V, eye = start.clone(), [w.clone() for w in local], torch.eye(d, dtype=torch.float64)
    for _ in range(T):
        moves = [(W - v) @ p for v, p in zip(V, P, strict=True)]
        a = torch.full((N,), 1 / N, dtype=torch.float64)
        if rule.C is not None:
            gram = torch.tensor(
                [[float((x * y).sum()) for x in moves] for y in moves], dtype=torch.float64
            )
            a = capped_simplex_qp(gram, rule.C)
        W = W - rule.eta * sum(a[i] * moves[i] for i in range(N))
        for i in range(N):
            if rule.anchored:
                V[i] = local[i] + (W - local[i]) @ (eye - rule.shrinkage * P[i])
                continue
            D = (W - V[i]) @ (eye - rule.shrinkage * P[i])
            V[i] = V[i] + rule.step * (D / D.norm(dim=1, keepdim=True) if rule.norm else D)
    return W, V


@pytest.mark.parametrize("ranks", [(3, 1, 7, 12), (3, 1, 2, 4)], ids=["wide", "narrow"])
@pytest.mark.parametrize("name", RULES)
def test_the_iteration_is_its_plain_form(name: str, ranks: tuple[int, ...]) -> None:
    rule, out, d = RULES[name], 5, 12
    local = [random(out, d, seed=i) for i in range(4)]
    factors = [factor(d, rank, seed=10 + rank) for rank in ranks]
    start = torch.stack(local).mean(0)
    space = NullSpace(local, factors, start, rule)
    for _ in range(15):
        space.iterate()
    W, V = plain(local, [K @ K.T for K in factors], start, rule, 15)
    torch.testing.assert_close(space.W, W, rtol=1e-9, atol=1e-9)
    for i in range(4):
        torch.testing.assert_close(space.v(i), V[i], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(space.mean_v(), torch.stack(V).mean(0), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["released", "anchored", "algorithm 1"])
def test_copies_of_one_model_stay(name: str) -> None:
    local = [random(4, 6)] * 3
    space = NullSpace(local, [factor(6, r, seed=r) for r in (2, 4, 6)], local[0], RULES[name])
    for _ in range(10):
        space.iterate()
    torch.testing.assert_close(space.mean_v(), local[0])
    torch.testing.assert_close(space.W, local[0])


@pytest.mark.parametrize("step", [0.5, 1.0, 1.6, 1.9])
def test_without_projections_or_with_full_ones_it_is_the_average(step: float) -> None:
    local = [random(4, 6, seed=i) for i in range(3)]
    average = torch.stack(local).mean(0)
    for K in (torch.zeros(6, 1, dtype=torch.float64), torch.eye(6, dtype=torch.float64)):
        space = NullSpace(local, [K] * 3, average, replace(RELEASED, eta=step, step=step))
        for _ in range(400):
            space.iterate()
        torch.testing.assert_close(space.mean_v(), average)


@pytest.mark.parametrize("step", [0.5, 1.0, 1.6, 1.9])
def test_complementary_subspaces_keep_both_models(step: float) -> None:
    """The fixed point is W_1 P_1 + W_2 P_2 if P_1 + P_2 = I.

    Thus each client's outputs on its inputs do not change.
    """
    Q, _ = torch.linalg.qr(random(8, 8))
    K = [Q[:, :3], Q[:, 3:]]
    local = [random(4, 8, seed=1), random(4, 8, seed=2)]
    space = NullSpace(local, K, torch.stack(local).mean(0), replace(RELEASED, eta=step, step=step))
    for _ in range(400):
        space.iterate()
    torch.testing.assert_close(
        space.mean_v(), local[0] @ K[0] @ K[0].T + local[1] @ K[1] @ K[1].T, rtol=0, atol=1e-13
    )
    for W_i, K_i in zip(local, K, strict=True):
        torch.testing.assert_close(space.mean_v() @ K_i, W_i @ K_i)


def test_too_long_a_step_diverges() -> None:
    Q, _ = torch.linalg.qr(random(8, 8))
    local = [random(4, 8, seed=1), random(4, 8, seed=2)]
    rule = replace(RELEASED, eta=2.1, step=2.1)
    space = NullSpace(local, [Q[:, :3], Q[:, 3:]], torch.stack(local).mean(0), rule)
    for _ in range(400):
        space.iterate()
    assert space.mean_v().abs().max() > 1e3


@pytest.mark.parametrize("name", RULES)
def test_rotated_inputs_rotate_the_result(name: str) -> None:
    rotation, _ = torch.linalg.qr(random(6, 6, seed=9))
    local = [random(4, 6, seed=i) for i in range(3)]
    factors = [factor(6, r, seed=r) for r in (2, 4, 6)]
    start = torch.stack(local).mean(0)
    straight = NullSpace(local, factors, start, RULES[name])
    rotated = NullSpace(
        [w @ rotation for w in local],
        [rotation.T @ K for K in factors],
        start @ rotation,
        RULES[name],
    )
    for _ in range(12):
        straight.iterate()
        rotated.iterate()
    torch.testing.assert_close(rotated.mean_v(), straight.mean_v() @ rotation, rtol=1e-8, atol=1e-8)


def test_norm_moves_every_row_by_the_step() -> None:
    local = [random(4, 6, seed=i) for i in range(3)]
    rule = replace(RELEASED, norm=True, eta=0.05, step=0.05)
    space = NullSpace(
        local, [factor(6, 2, seed=i) for i in range(3)], torch.stack(local).mean(0), rule
    )
    space.iterate()
    for i in range(3):
        torch.testing.assert_close(
            (space.v(i) - local[i]).norm(dim=1), torch.full((4,), 0.05, dtype=torch.float64)
        )


class TestQuadraticProgram:
    def test_meets_the_conditions_of_optimality(self) -> None:
        """The weights satisfy the optimality conditions of Proposition 1 for C = 1.

        The condition is <g_i, g*> >= ||g*||^2, with equality where a_i > 0.
        """
        g = random(6, 20)
        a = capped_simplex_qp(g @ g.T, 1.0)
        star = a @ g
        slack = g @ star - star @ star
        assert float(a.sum()) == pytest.approx(1.0) and float(a.min()) >= 0
        assert float(slack.min()) > -1e-6
        assert float(slack[a > 1e-4].abs().max()) < 1e-5

    @pytest.mark.parametrize("C", [0.4, 0.6, 1.0])
    def test_is_the_best_of_a_grid(self, C: float) -> None:
        g = random(3, 5, seed=3)
        G = g @ g.T
        a = capped_simplex_qp(G, C)
        grid = np.linspace(0, 1, 201)
        candidates = [
            (x, y, 1 - x - y)
            for x, y in itertools.product(grid, grid)
            if x <= C and y <= C and 0 <= 1 - x - y <= C
        ]
        points = torch.tensor(candidates, dtype=torch.float64)
        best = float(((points @ G) * points).sum(1).min())
        assert float(a @ G @ a) <= best + 1e-9
        assert float(a.max()) <= C + 1e-9

    def test_the_smallest_bound_is_uniform_and_scale_does_not_matter(self) -> None:
        g = random(4, 7)
        G = g @ g.T
        torch.testing.assert_close(
            capped_simplex_qp(G, 0.25), torch.full((4,), 0.25, dtype=torch.float64)
        )
        torch.testing.assert_close(
            capped_simplex_qp(G * 1e-8, 0.5), capped_simplex_qp(G, 0.5), rtol=1e-5, atol=1e-6
        )
        assert torch.equal(capped_simplex_qp(torch.zeros(3, 3), 1.0), torch.full((3,), 1 / 3))


def probed(world: World, probe: Projections, model: Any = None) -> dict[str, Tensor]:
    weights = model or world.env.initial_weights()
    net = Net(weights.spec, CPU, torch.float64)
    net.train(False)
    index = torch.from_numpy(world.data.partition.of(0))
    with torch.no_grad():
        return probe(net, weights, world.env.task, world.data.train, index, 0)


def batch_means(world: World, name: str, batch_size: int) -> Tensor:
    """Return one row per batch, in the probe's order."""
    from fedexp.core.seeds import torch_generator

    weights = world.env.initial_weights()
    net = Net(weights.spec, CPU, torch.float64)
    net.train(False)
    index = torch.from_numpy(world.data.partition.of(0))
    index = index[torch.randperm(len(index), generator=torch_generator(0, "order"))]
    rows = []
    for part in index.split(batch_size):
        x = net.observe(
            weights.params, weights.buffers, world.data.train.inputs(part), layers=[name]
        ).layers[name]
        rows.append(torch.cat([x.mean(0), torch.ones(1, dtype=torch.float64)]))
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("hidden", "batch_size"), [(40, 8), (4, 8), (40, 3)], ids=["low rank", "dense", "unequal"]
)
@pytest.mark.parametrize("damping", [1.0, 0.5])
def test_the_recursion_is_its_plain_form(hidden: int, batch_size: int, damping: float) -> None:
    world = make_world("method=ma_echo", model={**MLP, "hidden": [hidden, 5]})
    name, d = "layers.1.weight", hidden + 1
    name = world.env.layers[1].weight
    K = probed(world, Projections((name,), damping=damping, batch_size=batch_size))[name]
    X = batch_means(world, name, batch_size)
    Q, alpha = torch.eye(d, dtype=torch.float64), 0.01**0.8
    for r in X:
        k = Q @ r
        Q = Q - damping * torch.outer(k, k) / (alpha + r @ k)
    torch.testing.assert_close(K @ K.T, torch.eye(d, dtype=torch.float64) - Q, rtol=0, atol=1e-9)
    values = torch.linalg.eigvalsh(K @ K.T)
    assert float(values.min()) > -1e-12 and float(values.max()) < 1 + 1e-12
    if damping == 1.0:  # the closed form for the stacked means
        closed = X.T @ torch.linalg.solve(
            X @ X.T + alpha * torch.eye(len(X), dtype=torch.float64), X
        )
        torch.testing.assert_close(K @ K.T, closed, rtol=0, atol=1e-9)


def test_the_exact_projector_is_the_papers_formula() -> None:
    world = make_world("method=ma_echo")
    name = world.env.layers[0].weight
    K = probed(world, Projections((name,), variant="exact", z=0.3))[name]
    x = world.data.train.inputs(torch.from_numpy(world.data.partition.of(0))).flatten(1)
    X = torch.cat([x, torch.ones(len(x), 1, dtype=torch.float64)], 1)
    P = X.T @ torch.linalg.inv(X @ X.T + 0.3 * torch.eye(len(X), dtype=torch.float64)) @ X
    torch.testing.assert_close(K @ K.T, P, rtol=0, atol=1e-9)


def test_a_convolutions_updates_are_patches_of_the_mean_map() -> None:
    """The updates of a convolution are the patches of the mean map, row by row.

    Kernel windows have no padding and stride 2. Each patch is flattened as (channel,
    row, column).
    """
    x = random(10, 2, 6, 6)
    layer = Layer("w", None, "conv", (3, 3), (1, 1), (1, 1))
    recursion = Projections(("w",), batch_size=10)._begin(layer, x, 1)
    recursion.add(layer, x)
    mean = x.mean(0)
    Q = torch.eye(18, dtype=torch.float64)
    for row, column in itertools.product((0, 2), (0, 2)):
        r = mean[:, row : row + 3, column : column + 3].reshape(-1)
        k = Q @ r
        Q = Q - 0.5 * torch.outer(k, k) / (0.00001**0.8 + r @ k)
    K = recursion.factor()
    torch.testing.assert_close(K @ K.T, torch.eye(18, dtype=torch.float64) - Q, rtol=0, atol=1e-9)


def test_the_exact_projector_of_a_convolution_sees_what_it_multiplies() -> None:
    x, weight = random(3, 2, 5, 5), random(4, 2, 3, 3, seed=1)
    layer = Layer("w", None, "conv", (3, 3), (2, 2), (1, 1))
    gram = Projections(("w",), variant="exact", z=1e-9)._begin(layer, x, 1)
    gram.add(layer, x)
    K = gram.factor()
    kept = (weight.flatten(1) @ K @ K.T).reshape(weight.shape)
    args = {"stride": 2, "padding": 1}
    torch.testing.assert_close(
        F.conv2d(x, kept, **args), F.conv2d(x, weight, **args), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("rank", [1, 3, 100])
def test_rank_keeps_the_largest_eigenpairs(rank: int) -> None:
    world = make_world("method=ma_echo")
    name = world.env.layers[0].weight
    full = probed(world, Projections((name,)))[name]
    cut = probed(world, Projections((name,), rank=(rank,)))[name]
    values, vectors = torch.linalg.eigh(full @ full.T)
    values, vectors = values[-rank:], vectors[:, -rank:]
    torch.testing.assert_close(cut @ cut.T, (vectors * values) @ vectors.T, rtol=0, atol=1e-9)
    assert cut.shape[1] <= rank


def cohort(world: World) -> list[ClientResult]:
    """Return the results of the first round with the answers of their probes."""
    jobs = world.aggregator.plan(world.aggregator.init(world.env), world.env)
    engine = Serial()
    results = engine.map(jobs, world.data)
    return [
        replace(r, probes=answers(engine, job, r.weights, world.data))
        for job, r in zip(jobs, results, strict=True)
    ]


@pytest.mark.parametrize(
    ("method", "rule"), [("ma_echo", RELEASED), ("ma_echo_algorithm1", PRINTED)]
)
def test_a_whole_fusion_is_the_plain_form(method: str, rule: LayerRule) -> None:
    """A whole fusion equals the iteration in plain form.

    Every hidden layer is the dense iteration with the bias as a column. The output
    layer is averaged over the clients that have a class. Algorithm 1 returns W, and its
    output layer is the plain mean.
    """
    world = make_world(f"method={method}", "aggregator.T=7", model={**MLP, "hidden": [9, 6]})
    results = cohort(world)
    fused, _ = world.aggregator.fuse(results, world.env)  # type: ignore[attr-defined]
    for layer in world.env.layers[:-1]:
        assert layer.bias is not None
        local = [
            torch.cat([r.weights.params[layer.weight], r.weights.params[layer.bias][:, None]], 1)
            for r in results
        ]
        P = [K @ K.T for K in (r.probes["projections"][layer.weight] for r in results)]
        W, V = plain(local, P, torch.stack(local).mean(0), rule, 7)
        expected = W if rule is PRINTED else torch.stack(V).mean(0)
        torch.testing.assert_close(
            fused.params[layer.weight], expected[:, :-1], rtol=1e-9, atol=1e-9
        )
        torch.testing.assert_close(fused.params[layer.bias], expected[:, -1], rtol=1e-9, atol=1e-9)
    counts = world.data.class_counts()
    output = world.env.layers[-1].weight
    for c in range(world.data.num_classes):
        rows = [
            r.weights.params[output][c]
            for r, n in zip(results, counts, strict=True)
            if n[c] > 1 or rule is PRINTED
        ]
        expected = torch.stack(rows).mean(0) if rows else torch.zeros_like(fused.params[output][c])
        torch.testing.assert_close(fused.params[output][c], expected)


def test_damping_is_in_the_recursion_or_in_the_update() -> None:
    for damping, of_recursion in (("recursion", 0.5), ("update", 1.0)):
        world = make_world("method=ma_echo", "aggregator.mu=1.0", f"aggregator.damping={damping}")
        projections = world.aggregator.probes(world.env)[0]  # type: ignore[attr-defined]
        assert projections.damping == of_recursion


def test_last_layer_rules() -> None:
    def output(*overrides: str) -> Tensor:
        world = make_world("method=ma_echo", *overrides, data=make_data((20, 12), copies=True))
        fused, _ = world.aggregator.fuse(cohort(world), world.env)  # type: ignore[attr-defined]
        return fused.params[world.env.layers[-1].weight]

    masked, plain_mean = output(), output("aggregator.last_layer=plain")
    torch.testing.assert_close(masked, plain_mean)  # both clients have every class
    assert not torch.allclose(output("aggregator.last_layer=projected"), plain_mean)


def test_start_and_returned_model() -> None:
    """Without an iteration, W equals the start and the mean of V equals the average."""
    for start in ("average", "first", "random"):
        world = make_world(
            "method=ma_echo", "aggregator.T=0", "aggregator.returns=W", f"aggregator.start={start}"
        )
        results = cohort(world)
        fused, _ = world.aggregator.fuse(results, world.env)  # type: ignore[attr-defined]
        name = world.env.layers[0].weight
        average = torch.stack([r.weights.params[name] for r in results]).mean(0)
        first = results[0].weights.params[name]
        assert torch.allclose(fused.params[name], average) == (start == "average")
        assert torch.equal(fused.params[name], first) == (start == "first")


def test_layers_that_match_no_pattern_are_averaged() -> None:
    world = make_world("method=ma_echo", model={**MLP, "hidden": [9, 6]})
    second = world.env.layers[1].weight
    overrides = ("method=ma_echo", f"aggregator.layers=[{second}]", "model.hidden=[9,6]")
    part = make_world(*overrides, model={**MLP, "hidden": [9, 6]})
    results = cohort(part)
    assert list(results[0].probes["projections"]) == [second]
    fused, _ = part.aggregator.fuse(results, part.env)  # type: ignore[attr-defined]
    whole, _ = world.aggregator.fuse(cohort(world), world.env)  # type: ignore[attr-defined]
    first = world.env.layers[0].weight
    torch.testing.assert_close(
        fused.params[first], torch.stack([r.weights.params[first] for r in results]).mean(0)
    )
    torch.testing.assert_close(fused.params[second], whole.params[second])


def test_permuted_models_give_the_permuted_model() -> None:
    """Permuted models give the permuted model.

    The same permutation of hidden units in all clients permutes the result. The
    function does not change.
    """
    world = make_world("method=ma_echo", model={**MLP, "hidden": [9, 6]})
    results = cohort(world)
    first, second = world.env.layers[:2]
    order = torch.tensor([3, 1, 0, 2, 8, 7, 4, 6, 5])
    moved = []
    for result in results:
        params = dict(result.weights.params)
        assert first.bias is not None
        params |= {first.weight: params[first.weight][order], first.bias: params[first.bias][order]}
        params[second.weight] = params[second.weight][:, order]
        K = result.probes["projections"][second.weight]
        probes = {
            **result.probes["projections"],
            second.weight: K[torch.cat([order, torch.tensor([9])])],
        }
        weights = replace(result.weights, params=params)
        moved.append(
            replace(result, weights=weights, probes={**result.probes, "projections": probes})
        )
    fused, _ = world.aggregator.fuse(results, world.env)  # type: ignore[attr-defined]
    other, _ = world.aggregator.fuse(moved, world.env)  # type: ignore[attr-defined]
    torch.testing.assert_close(other.params[first.weight], fused.params[first.weight][order])
    torch.testing.assert_close(other.params[second.weight], fused.params[second.weight][:, order])


def test_trace_is_the_run_stopped_there() -> None:
    """The trace at iteration t equals the model of a run with t iterations."""
    overrides = ("method=ma_echo", "rounds=1")
    world = make_world(*overrides, "aggregator.T=6")
    tracer = Tracer(Evaluator(world.experiment.task, 100), world.data, every=3, weights=(3,))
    next(iter(run(world.aggregator, replace(world.env, trace=tracer), Serial(), world.data)))
    traced = tracer.take()
    assert [row["iteration"] for row in traced.rows] == [0, 3, 6]
    assert all(len(row["V/acc"]) == len(row["V/train/acc"]) == 4 for row in traced.rows)
    short = make_world(*overrides, "aggregator.T=3")
    (model,) = short.models(short.run())
    assert_same([{name: traced.weights[f"3/mean_v/0/{name}"] for name in model}], [model])


def test_what_a_trace_keeps_is_not_iterated_further() -> None:
    """Traced weights do not change in later iterations.

    Without a bias, the matrix that is iterated is the model's tensor.
    """
    model = {"_target_": "fedexp.models.mlp.MLP", "hidden": [5, 4], "bias": False}
    overrides = ("method=ma_echo", "rounds=1", "aggregator.returns=W")
    world = make_world(*overrides, "aggregator.T=6", model=model)
    tracer = Tracer(Evaluator(world.experiment.task, 100), world.data, every=0, weights=(3,))
    next(iter(run(world.aggregator, replace(world.env, trace=tracer), Serial(), world.data)))
    weights = tracer.take().weights
    short = make_world(*overrides, "aggregator.T=3", model=model)
    (W,) = short.models(short.run())
    assert_same([{name: weights[f"3/W/0/{name}"] for name in W}], [W])


def test_a_map_smaller_than_the_kernel_is_padded_as_the_layer_pads() -> None:
    x = random(4, 2, 2, 2)
    layer = Layer("w", None, "conv", (3, 3), (2, 2), (1, 1))
    recursion = Projections(("w",), batch_size=4)._begin(layer, x, 1)
    recursion.add(layer, x)
    r = F.pad(x.mean(0), (1, 1, 1, 1))[:, :3, :3].reshape(-1)
    P = 0.5 * torch.outer(r, r) / (0.00001**0.8 + r @ r)
    K = recursion.factor()
    torch.testing.assert_close(K @ K.T, P, rtol=0, atol=1e-9)


class HalfFrozen(mlp.MLP):
    """A network whose first layer is frozen."""

    frozen_parameters = ("hidden.0.*",)


@pytest.mark.parametrize("norm", [False, True])
def test_frozen_layers_keep_their_bits(norm: bool) -> None:
    model = {"_target_": "tests.methods.test_ma_echo.HalfFrozen", "hidden": [9, 6]}
    world = make_world("method=ma_echo", f"aggregator.norm={norm}", "aggregator.T=20", model=model)
    results = cohort(world)
    assert list(results[0].probes["projections"]) == ["hidden.1.weight"]
    fused, _ = world.aggregator.fuse(results, world.env)  # type: ignore[attr-defined]
    start = world.env.initial_weights().params
    assert all(
        torch.equal(fused.params[name], start[name])
        for name in ("hidden.0.weight", "hidden.0.bias")
    )


class BiasFrozen(mlp.MLP):
    frozen_parameters = ("hidden.0.bias",)


@pytest.mark.parametrize(("overrides", "said"), [
    (["aggregator.layers=[hiden.*]"], "hidden.0.weight"),
    (["aggregator.layers=[output.*]"], "no layer is left"),
    (["model._target_=tests.methods.test_ma_echo.BiasFrozen"], "hidden.0.bias"),
])  # fmt: skip
def test_layers_that_cannot_be_iterated_are_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        Experiment.of(
            compose(
                [
                    "method=ma_echo",
                    "rounds=1",
                    "model.bias=true",
                    "aggregator.last_layer=masked",
                    *overrides,
                ]
            )
        )
    assert said in str(error.value)


def test_mistakes_are_refused_before_training() -> None:
    with pytest.raises(ConfigError, match="norm requires"):
        Experiment.of(
            compose(["method=ma_echo", "aggregator.norm=true", "aggregator.v_update=anchored"])
        )
    with pytest.raises(ConfigError, match="set damping=update"):
        Experiment.of(compose(["method=ma_echo", "aggregator.projector=exact"]))
    with pytest.raises(ConfigError, match="needs one number per layer"):
        Experiment.of(compose(["method=ma_echo", "aggregator.rank=[3]"]))
    for override, said in {
        "alpha=0": "alpha must be positive, got 0",
        "alpha_conv=-1": "alpha_conv must be positive",
        "z=0": "z must be positive",
        "probe_batch_size=0": "probe_batch_size must be at least 1, got 0",
        "rank=[3,0]": r"rank must contain positive numbers, got \[3, 0\]",
    }.items():
        with pytest.raises(ConfigError, match=said):
            Experiment.of(compose(["method=ma_echo", f"aggregator.{override}"]))


@pytest.mark.parametrize(("method", "key", "instead"), [
    ("ma_echo", "last_layer", "projected"),
    ("average", "last_layer", "plain"),
    ("ensemble", "combine", "logits"),
])  # fmt: skip
def test_a_mask_of_classes_needs_a_row_a_class(method: str, key: str, instead: str) -> None:
    generative = ["task=cvae", "model=cvae", f"method={method}"]
    with pytest.raises(ConfigError, match="one row per class") as error:
        Experiment.of(compose([*generative, f"aggregator.{key}=masked"]))
    assert "64 rows" in str(error.value) and f"aggregator.{key}={instead}" in str(error.value)
    Experiment.of(compose([*generative, f"aggregator.{key}={instead}"]))
    Experiment.of(compose([f"method={method}", f"aggregator.{key}=masked"]))


def test_alignment_first_is_fusing_the_aligned_models() -> None:
    """Aligning first equals fusing the aligned models.

    The factors are permuted with the models. New probes of the aligned models give the
    same fused function.
    """
    model = {**MLP, "hidden": [9, 6]}
    world = make_world("method=ma_echo_ot", "init=different", model=model)
    results = cohort(world)
    moved, *_ = aligned([r.weights for r in results], world.env, Alignment())
    assert any(
        not torch.equal(a.params[n], r.weights.params[n])
        for a, r in zip(moved, results, strict=True)
        for n in a.params
    )
    plain_world = make_world("method=ma_echo", model=model)
    jobs = world.aggregator.plan(world.aggregator.init(world.env), world.env)
    engine = Serial()
    again = [
        replace(r, weights=w, probes=answers(engine, job, w, world.data))
        for job, r, w in zip(jobs, results, moved, strict=True)
    ]
    expected, _ = plain_world.aggregator.fuse(again, world.env)  # type: ignore[attr-defined]
    got, metrics = world.aggregator.fuse(results, world.env)  # type: ignore[attr-defined]
    assert metrics["ot/moved"] > 0
    assert_same([got.params], [expected.params], 1e-9)


def test_alignment_of_models_that_agree_changes_nothing() -> None:
    data = make_data((20, 12, 9), copies=True)
    aligned_first, straight = (
        make_world(f"method={m}", data=data, m=3) for m in ("ma_echo_ot", "ma_echo")
    )
    a, _ = aligned_first.aggregator.fuse(cohort(aligned_first), aligned_first.env)  # type: ignore[attr-defined]
    b, _ = straight.aggregator.fuse(cohort(straight), straight.env)  # type: ignore[attr-defined]
    assert_same([a.params], [b.params], 1e-9)
