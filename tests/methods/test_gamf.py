"""Tests of GAMF.

Sinkhorn's method, affinities and schedules equal their formulas. Planted permutations
are found.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest
import torch

from fedexp.config.compose import compose
from fedexp.core.errors import ConfigError
from fedexp.matching import graduated_assignment
from fedexp.matching.doubly_stochastic import doubly_stochastic
from fedexp.matching.graduated_assignment import (
    Affinity,
    Joint,
    Pairwise,
    identities,
    match_jointly,
    match_pairwise,
    permutation_matrices,
    random_start,
)
from fedexp.matching.structure import same_function, structure_of
from fedexp.matching.unit_graphs import edges_of
from fedexp.running.experiment import Experiment
from tests.matching.nets import IMAGE, MODELS, spec_of, weights_of
from tests.methods.fusion_world import (
    average_of_units_that_stay,
    fused,
    models_of,
    results_of,
    tensors,
    world_of,
)
from tests.world import CPU, assert_same

NETS = ["mlp", "cnn", "concatenated", "gated"]
EARLY = 1e-9
SHORT = Joint(sweeps=6, final=4)  # the Hungarian method starts early


def start_of(structure, count: int, seed: int = 0):
    return random_start(structure.groups, count, 0.05, CPU, seed)


def rows(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def plain(V: torch.Tensor, tau: float, iterations: int) -> torch.Tensor:
    S = V / tau
    for step in range(iterations):
        S = S.log_softmax(2 - step % 2)
    return S.exp()


# Sinkhorn


@pytest.mark.parametrize("iterations", [1, 2, 3, 22, 67, 200])
@pytest.mark.parametrize("tau", [10.0, 0.5, 0.05, 0.002])
def test_products_are_the_logarithms_half_steps(tau: float, iterations: int) -> None:
    """The products equal the half-steps in logarithms.

    At the last temperature the logits differ by hundreds.
    """
    V = rows(3, 9, 9)
    torch.testing.assert_close(
        doubly_stochastic(V, tau, iterations), plain(V, tau, iterations), rtol=1e-9, atol=1e-13
    )


def test_scalings_beyond_the_range_are_done_with_logarithms(monkeypatch) -> None:
    V, module = rows(2, 8, 8), "fedexp.matching.doubly_stochastic"
    expected = plain(V, 0.01, 300)
    monkeypatch.setattr(f"{module}._RANGE", 1.0)
    torch.testing.assert_close(doubly_stochastic(V, 0.01, 300), expected, rtol=1e-12, atol=1e-14)


def test_a_matrix_that_underflows_is_normalised_with_logarithms() -> None:
    """A matrix that underflows is normalised with logarithms.

    In float64 exp(-800) is zero. Without logarithms, the sums of the rows would be zero
    too.
    """
    from fedexp.matching.doubly_stochastic import _with_products

    S = rows(2, 6, 6) - 800
    for steps in (4, 5):
        found = _with_products(S, steps)
        assert bool(found.isfinite().all())
        torch.testing.assert_close(found.exp(), plain(S, 1.0, steps), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("iterations", [199, 200])
def test_rows_and_columns_sum_to_one(iterations: int) -> None:
    S = doubly_stochastic(rows(4, 10, 10), 0.5, iterations)
    one = torch.ones(4, 10, dtype=torch.float64)
    # The sums of the last half-step are exact.
    exact, near = (S.sum(2), S.sum(1)) if iterations % 2 else (S.sum(1), S.sum(2))
    torch.testing.assert_close(exact, one, rtol=0, atol=1e-14)
    torch.testing.assert_close(near, one, rtol=0, atol=1e-6)


def test_early_stop_ends_where_the_sums_are_right(monkeypatch) -> None:
    V, made = rows(4, 10, 10), []
    from fedexp.matching import doubly_stochastic as module

    products = module._with_products
    monkeypatch.setattr(
        module, "_with_products", lambda S, steps: made.append(steps) or products(S, steps)
    )
    stopped = doubly_stochastic(V, 1.0, 100_000, EARLY)
    assert 0 < sum(made) < 1000 and (stopped.sum(2) - 1).abs().max() <= EARLY
    torch.testing.assert_close(stopped, plain(V, 1.0, 2000), rtol=1e-7, atol=1e-9)
    made.clear()
    doubly_stochastic(V, 1.0, 1002)
    assert sum(made) == 1000


def test_sinkhorn_at_low_temperature_is_the_best_permutation() -> None:
    V = rows(6, 5, 5)
    hard = permutation_matrices(V)
    torch.testing.assert_close(doubly_stochastic(V, 1e-3, 20_000, EARLY), hard, rtol=0, atol=1e-3)
    for value, matrix in zip(V, hard, strict=True):
        best = max(
            permutations(range(5)), key=lambda p: float(sum(value[a, b] for a, b in enumerate(p)))
        )
        assert matrix.argmax(1).tolist() == list(best)


# affinities


def four_norm_kernel(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (-0.5 * (x[:, None] - y[None]).abs().pow(4).sum(2).pow(0.25)).exp()


@pytest.mark.parametrize("divide", [True, False])
def test_affinities_of_an_mlp_written_out(divide: bool) -> None:
    """The affinities of an MLP equal a separate implementation.

    The MLP has two hidden layers, and the maps are soft. Rows have moved inputs.
    Columns have the moved units of the next layer.
    """
    spec = spec_of("fedexp.models.mlp.MLP", hidden=[7, 5], bias=False)
    structure, models = structure_of(spec, IMAGE), [weights_of(spec, i) for i in range(3)]
    U, first, second, last = (
        start_of(structure, 3),
        "hidden.0.weight",
        "hidden.1.weight",
        "output.weight",
    )
    affinity = Affinity(edges_of(models, structure, structure.groups), divide)

    def scaled(K: torch.Tensor) -> torch.Tensor:
        return K / K.mean() if divide else K

    def between(i: int, j: int) -> dict[str, torch.Tensor]:
        W, Z = models[i].params, models[j].params
        M, R = (U[name][i] @ U[name][j].T for name in (first, second))
        return {
            first: scaled(four_norm_kernel(W[first], Z[first]))
            + scaled(four_norm_kernel(W[second].T @ R, Z[second].T)),
            second: scaled(four_norm_kernel(W[second] @ M, Z[second]))
            + scaled(four_norm_kernel(W[last].T, Z[last].T)),
        }

    for i in range(3):
        others = [j for j in range(3) if j != i]
        for name in (first, second):
            expected = torch.stack([between(i, j)[name] for j in others])
            torch.testing.assert_close(
                affinity.between(name, U, i), expected, rtol=1e-8, atol=1e-10
            )
            V = sum(between(i, j)[name] @ U[name][j] for j in others)
            torch.testing.assert_close(affinity.votes(name, U)[i], V, rtol=1e-8, atol=1e-10)


def test_affinities_after_flattening_written_out() -> None:
    """The affinities after flattening equal a separate implementation.

    The outgoing weights of a channel are its block of h * w columns for every unit of
    the next layer.
    """
    spec = spec_of("fedexp.models.cnn.ConvNet", channels=[4], kernel=3, hidden=[6], bias=False)
    structure, (a, b) = structure_of(spec, IMAGE), [weights_of(spec, i) for i in range(2)]
    conv, dense = (group.name for group in structure.groups)
    U = start_of(structure, 2)
    M, R = (U[name][0] @ U[name][1].T for name in (conv, dense))
    x, y = (m.params[dense].reshape(6, 4, -1) for m in (a, b))
    found = Affinity(edges_of([a, b], structure, structure.groups), True)
    K = four_norm_kernel(a.params[conv].flatten(1), b.params[conv].flatten(1))
    N = four_norm_kernel(torch.einsum("rcs,rq->cqs", x, R).flatten(1), y.transpose(0, 1).flatten(1))
    torch.testing.assert_close(
        found.between(conv, U, 0)[0], K / K.mean() + N / N.mean(), rtol=1e-8, atol=1e-10
    )
    K = four_norm_kernel(torch.einsum("rcs,cd->rds", x, M).flatten(1), y.flatten(1))
    out = structure.output.name
    N = four_norm_kernel(a.params[out].T, b.params[out].T)
    torch.testing.assert_close(
        found.between(dense, U, 0)[0], K / K.mean() + N / N.mean(), rtol=1e-8, atol=1e-10
    )


@pytest.mark.parametrize("name", [name for name in MODELS if name != "linear"])
def test_affinities_do_not_depend_on_the_order_of_units(name: str) -> None:
    """If a model and its U are permuted alike, the affinities are permuted with them.

    The test covers every network whose structure is known.
    """
    structure, models = (
        structure_of(MODELS[name], IMAGE),
        [weights_of(MODELS[name], i) for i in range(2)],
    )
    U, maps = start_of(structure, 2), structure.random(3)
    turned = [structure.permute_weights(models[0], maps), models[1]]
    V = {group: torch.stack([u[0][maps[group]], u[1]]) for group, u in U.items()}
    for group in structure.groups[:4]:
        a, b = (
            Affinity(edges_of(m, structure, structure.groups), True).between(group.name, u, 0)
            for m, u in ((models, U), (turned, V))
        )
        torch.testing.assert_close(a[:, maps[group.name]], b, rtol=1e-7, atol=1e-9)


# the schedules


def recorded(monkeypatch) -> list[tuple]:
    calls: list[tuple] = []

    def soft(V, tau, iterations, tolerance=None):
        calls.append((tau, iterations))
        return doubly_stochastic(V, tau, 20)

    def hard(V):
        calls.append(("hungarian",))
        return permutation_matrices(V)

    monkeypatch.setattr(graduated_assignment, "doubly_stochastic", soft)
    monkeypatch.setattr(graduated_assignment, "permutation_matrices", hard)
    return calls


ONE = spec_of("fedexp.models.mlp.MLP", hidden=[5])


def test_the_joint_schedule(monkeypatch) -> None:
    """The joint schedule has the published values of tau and numbers of half-steps.

    Each stage has one sweep. The Hungarian method is used below 0.005.
    """
    calls = recorded(monkeypatch)
    structure, models = structure_of(ONE, IMAGE), models_of(ONE, 3)
    _, sweeps = match_jointly(
        models, structure, structure.groups, Joint(tolerance=1e9), None, start_of(structure, 3)
    )
    expected = [(0.05 * 0.9**stage, 200 + 100 * stage) for stage in range(23)]
    assert [c[1] for c in calls[:-1]] == [e[1] for e in expected] and calls[-1] == ("hungarian",)
    assert [c[0] for c in calls[:-1]] == pytest.approx([e[0] for e in expected])
    assert calls[-2][0] <= 0.005 < calls[-3][0] and sweeps == 24


def test_a_stage_that_does_not_settle_ends_by_patience(monkeypatch) -> None:
    """A stage that does not settle ends after more than 50 counted sweeps.

    In any case, the Hungarian method starts 75 sweeps before the end.
    """
    calls = recorded(monkeypatch)
    monkeypatch.setattr(graduated_assignment, "_change", lambda *_: torch.tensor(1.0))
    structure, models = structure_of(ONE, IMAGE), models_of(ONE, 3)
    _, sweeps = match_jointly(
        models, structure, structure.groups, Joint(sweeps=300), None, start_of(structure, 3)
    )
    # Each temperature takes 52 sweeps. The count goes from 0 to 51, and only 51 is
    # above 50. The count continues when the Hungarian method is forced.
    assert [calls.count(call) for call in dict.fromkeys(calls)] == [
        52,
        52,
        52,
        52,
        18,
        34,
    ] and sweeps == 260
    assert calls[225] != ("hungarian",) == calls[226]  # sweep 227


def test_change_of_cycles_of_two_is_zero() -> None:
    a, b, c = rows(3, 4, 5, 5)
    change = graduated_assignment._change
    assert change(a, b, a) == change(a, a, b) == 0
    expected = torch.minimum((a - b).square().sum((1, 2)), (a - c).square().sum((1, 2))).mean()
    torch.testing.assert_close(change(a, b, c), expected)


def test_two_sweeps_written_out() -> None:
    """Two sweeps equal a separate implementation with the votes written out.

    The first sweep uses Sinkhorn's method. The second one uses the Hungarian method.
    """
    spec = MODELS["mlp"]
    structure, models = structure_of(spec, IMAGE), models_of(spec, 3)
    U = start_of(structure, 3)
    affinity = Affinity(edges_of(models, structure, structure.groups), True)
    soft = {name: plain(affinity.votes(name, U), 0.05, 200) for name in U}
    hard = {name: permutation_matrices(affinity.votes(name, soft)) for name in U}
    options = Joint(sweeps=3, final=2, tolerance=1e9, floor=0.05)  # one sweep each
    maps, sweeps = match_jointly(models, structure, structure.groups, options, None, U)
    assert sweeps == 2
    for name, u in hard.items():
        for i in range(3):
            # The common unit b holds the old unit u[:, b].
            moved = u[i].T @ torch.arange(float(u.shape[1])).double()
            first = u[0].argmax(1)  # named after the first model's units
            assert maps[i][name].tolist() == moved[first].tolist()


def test_the_pairwise_schedules(monkeypatch) -> None:
    structure, (a, b) = structure_of(ONE, IMAGE), models_of(ONE, 2)
    newer = Pairwise(sweeps=75, cooling=0.9, floor=0.05, divide=False)
    for options, cooled in ((Pairwise(), 31), (newer, 51)):
        calls = recorded(monkeypatch)
        match_pairwise(b, a, structure, structure.groups, options, None, 0)
        assert calls[0] == (10.0, 1) and len(calls) == 1 + options.sweeps
        taus, iterations = zip(*calls[1:], strict=True)
        stages = [min(k, cooled) for k in range(options.sweeps)]
        assert list(taus) == pytest.approx(
            [max(10 * options.cooling**k, options.floor) for k in stages]
        )
        assert list(iterations) == [20 + 50 * k for k in stages]


# matching


@pytest.mark.parametrize(("name", "count"), [("mlp", 2), ("mlp", 3), ("cnn", 5)])
def test_planted_permutations_come_back_in_18_of_20_seeds(name: str, count: int) -> None:
    structure, model = structure_of(MODELS[name], IMAGE), weights_of(MODELS[name], 0)
    recovered = 0
    for seed in range(20):
        shuffles = [structure.random(100 * seed + i) for i in range(1, count)]
        copies = [model, *(structure.permute_weights(model, maps) for maps in shuffles)]
        start = start_of(structure, count, seed)
        maps = match_jointly(copies, structure, structure.groups, Joint(), EARLY, start)[0]
        still = {g.name: torch.arange(g.size) for g in structure.groups}
        expected = [still, *({k: v.argsort() for k, v in shuffle.items()} for shuffle in shuffles)]
        recovered += all(
            torch.equal(m[k], e[k]) for m, e in zip(maps, expected, strict=True) for k in e
        )
    assert recovered >= 18


@pytest.mark.parametrize("mode", ["joint", "pairwise"])
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("name", ["linear", *NETS])
def test_copies_give_the_model(name: str, count: int, mode: str) -> None:
    """Fusing copies of a model gives the model.

    In the pairwise mode, the soft assignments leave a trace of other units.
    """
    world, model = (
        world_of(MODELS[name], "method=gamf", f"aggregator.mode={mode}"),
        models_of(MODELS[name], 1)[0],
    )
    close = 1e-14 if mode == "joint" or name == "linear" or count == 1 else 2e-2
    assert_same(tensors(fused(world, [model] * count)), tensors(model), close)


@pytest.mark.parametrize("name", NETS)
def test_permuted_copies_give_the_first_model_pairwise(name: str) -> None:
    structure, model = structure_of(MODELS[name], IMAGE), weights_of(MODELS[name], 0)
    shuffle = structure.random(1)
    moves = match_pairwise(
        structure.permute_weights(model, shuffle),
        model,
        structure,
        structure.groups,
        Pairwise(),
        EARLY,
        0,
    )
    for group, T in moves.items():
        torch.testing.assert_close(T.sum(0), torch.ones(len(T), dtype=torch.float64))
        assert torch.equal(T.argmax(0), shuffle[group].argsort()) and (T.amax(0) > 0.9).all()


@pytest.mark.parametrize("name", [*NETS, "cnn, BatchNorm"])
def test_moved_models_compute_what_they_did(name: str) -> None:
    structure, models = (
        structure_of(MODELS[name], IMAGE),
        [weights_of(MODELS[name], i) for i in range(3)],
    )
    start = start_of(structure, 3)
    maps, _ = match_jointly(models, structure, structure.groups, SHORT, EARLY, start)
    assert all(torch.equal(order, torch.arange(len(order))) for order in maps[0].values())
    assert not all(torch.equal(order, torch.arange(len(order))) for order in maps[1].values())
    for model, own in zip(models, maps, strict=True):
        moved = structure.permute_weights(model, own)
        assert same_function(model, moved, IMAGE, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_a_common_permutation_permutes_the_result(name: str) -> None:
    """A common permutation of the models permutes the result.

    The initial assignments are permuted with the models.
    """
    structure, models = structure_of(MODELS[name], IMAGE), models_of(MODELS[name], 3)
    U, maps = start_of(structure, 3), structure.random(2)
    turned = [structure.permute_weights(model, maps) for model in models]
    V = {group: u[:, maps[group]] for group, u in U.items()}

    def merged(cohort, start):
        found, _ = match_jointly(cohort, structure, structure.groups, Joint(), EARLY, start)
        return [
            structure.permute_weights(model, own) for model, own in zip(cohort, found, strict=True)
        ]

    for a, b in zip(merged(models, U), merged(turned, V), strict=True):
        assert_same(tensors(structure.permute_weights(a, maps)), tensors(b))


def test_one_model_is_returned_as_it_is() -> None:
    model = weights_of(MODELS["cnn"], 0)
    for mode in ("joint", "pairwise"):
        world = world_of(MODELS["cnn"], "method=gamf", f"aggregator.mode={mode}")
        assert_same(tensors(fused(world, [model])), tensors(model))


@pytest.mark.parametrize("count", [2, 4])
def test_gamf_without_hidden_units_equals_average(count: int) -> None:
    average_of_units_that_stay("gamf", count)


def test_later_rounds_start_from_the_identity_with_fewer_sweeps(monkeypatch) -> None:
    spec, seen = MODELS["mlp"], []
    world, models = world_of(spec, "method=gamf", "aggregator.later_sweeps=99"), models_of(spec, 3)
    matched = match_jointly

    def spy(models, structure, groups, options, early_stop, start):
        still = identities(groups, len(models), CPU)
        seen.append(
            (options.sweeps, early_stop, all(torch.equal(start[k], still[k]) for k in still))
        )
        return matched(models, structure, groups, options, early_stop, start)

    monkeypatch.setattr("fedexp.methods.gamf.match_jointly", spy)
    world.aggregator.fuse(results_of(models), world.env)
    world.aggregator.fuse(results_of(models), world.env.at(1))
    replace(world.aggregator, start="identity", early_stop=1e-6).fuse(results_of(models), world.env)
    assert seen == [(2000, EARLY, False), (99, EARLY, True), (2000, 1e-6, True)]


def test_starts_are_uniform_about_one_over_n() -> None:
    structure = structure_of(MODELS["mlp"], IMAGE)
    start = start_of(structure, 50)
    for name, u in start.items():
        noise = u - 1 / u.shape[1]
        assert (
            noise.abs().max() <= 0.05
            and noise.max() > 0.049
            and noise.min() < -0.049
            and abs(noise.mean()) < 2e-3
        )
        assert torch.equal(u, start_of(structure, 50)[name]) and not torch.equal(
            u, start_of(structure, 50, 1)[name]
        )


def test_what_was_found_is_logged() -> None:
    spec = MODELS["cnn"]
    structure, model = structure_of(spec, IMAGE), weights_of(spec, 0)
    turned = structure.permute_weights(
        model, {g.name: torch.arange(g.size).roll(1) for g in structure.groups}
    )
    for mode in ("joint", "pairwise"):
        world = world_of(spec, "method=gamf", f"aggregator.mode={mode}")
        metrics = world.aggregator.fuse(results_of([model, model, turned]), world.env)[1]
        assert metrics["gamf/moved"] == pytest.approx(0.5, abs=0 if mode == "joint" else 0.02)
        assert ("gamf/sweeps" in metrics) == (mode == "joint")


def test_frozen_layers_keep_their_bits_and_their_order() -> None:
    spec = spec_of("PartlyFrozen")
    structure, base = structure_of(spec, IMAGE), models_of(spec, 1)[0]
    models = []
    for number in range(4):
        moves = {"hidden.weight": structure.random(number)["hidden.weight"]} if number else {}
        models.append(structure.permute_weights(base, moves))
    result = fused(world_of(spec, "method=gamf"), models)
    assert_same(tensors(result), tensors(base), 1e-14)
    for name in base.frozen:
        assert torch.equal(
            {**result.params, **result.buffers}[name], {**base.params, **base.buffers}[name]
        )


@pytest.mark.parametrize("mode", ["joint", "pairwise"])
def test_unequal_widths_are_refused(mode: str) -> None:
    wide, narrow = (spec_of("fedexp.models.mlp.MLP", hidden=[n]) for n in (7, 6))
    with pytest.raises(ConfigError, match="different widths") as error:
        fused(
            world_of(wide, "method=gamf", f"aggregator.mode={mode}"),
            [weights_of(wide, 0), weights_of(narrow, 0)],
        )
    assert (
        "hidden.0.weight" in error.value.facts["expected"] and "model 1" in error.value.facts["got"]
    )


@pytest.mark.parametrize(
    "override",
    [
        "mode=both",
        "early_stop=0",
        "later_sweeps=75",
        "joint.final=1",
        "joint.final=2000",
        "joint.floor=0",
        "joint.floor=0.06",
        "joint.cooling=1",
        "joint.iterations=0",
        "joint.tolerance=0",
        "joint.patience=-1",
        "joint.noise=0",
        "pairwise.sweeps=0",
        "pairwise.cooling=0",
    ],
)
def test_settings_without_meaning_are_refused(override: str) -> None:
    key = override.partition("=")[0].rpartition(".")[2]
    with pytest.raises(ConfigError, match=rf"({key}|half-steps) must |'both' is not a choice"):
        Experiment.of(compose(["method=gamf", f"aggregator.{override}"]))
