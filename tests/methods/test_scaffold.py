"""SCAFFOLD: tests of the unbiased fixed point, controls, options and momentum."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fedexp.core import trees
from fedexp.core.errors import ConfigError
from fedexp.core.runner import next_jobs
from fedexp.engines.serial import Serial
from tests.world import SOFTMAX, assert_same, make_data, make_world


def mean_gradient_norm(world, weight: torch.Tensor, by_samples: bool = False) -> float:
    """Return the norm of the gradient of the clients' mean objective.

    It is taken at softmax weights (classes, features).
    """
    total = torch.zeros_like(weight)
    for client, n in enumerate(world.env.sizes):
        at = weight.clone().requires_grad_()
        index = torch.from_numpy(world.data.partition.of(client))
        loss = F.cross_entropy(
            world.data.train.x[index].flatten(1) @ at.T, world.data.train.y[index]
        )
        share = n / world.env.sizes.sum() if by_samples else 1 / len(world.env.sizes)
        total += torch.autograd.grad(loss, at)[0] * float(share)
    return float(total.norm())


def two_clients(method: str, *overrides: str, sizes: tuple[int, int] = (32, 32)):
    """Return full-batch softmax regression of two clients with different label mixes.

    FedAvg's fixed point is biased on this problem.
    """
    return make_world(
        f"method={method}",
        "aggregator.weights=uniform",
        "local.batch_size=100",
        "local.epochs=null",
        "local.steps=10",
        "local.lr=0.6",
        "rounds=140",
        *overrides,
        data=make_data(sizes, num_classes=2, seed=3),
        model=SOFTMAX,
    )


def test_reaches_the_optimum_where_fedavg_does_not() -> None:
    fedavg, scaffold = two_clients("fedavg"), two_clients("scaffold")
    assert mean_gradient_norm(fedavg, fedavg.models(fedavg.run())[0]["fc.weight"]) > 1e-2
    assert mean_gradient_norm(scaffold, scaffold.models(scaffold.run())[0]["fc.weight"]) < 1e-6


def test_weights_by_samples_reach_the_weighted_optimum() -> None:
    world = two_clients("fedavg", "trainer=scaffold", "aggregator.weights=samples", sizes=(16, 64))
    fixed = world.models(world.run())[0]["fc.weight"]
    assert mean_gradient_norm(world, fixed) > 1e-2
    assert mean_gradient_norm(world, fixed, by_samples=True) < 1e-6


def test_option_one_reaches_the_optimum() -> None:
    world = two_clients("scaffold", "trainer.option=I")
    assert mean_gradient_norm(world, world.models(world.run())[0]["fc.weight"]) < 1e-6


@pytest.mark.parametrize("momentum", ["0.0", "0.5"])
def test_correction_after_the_step_beats_fedavg_with_momentum(momentum: str) -> None:
    world = two_clients(
        "scaffold", "trainer.correction=step", f"local.momentum={momentum}", "local.lr=0.2"
    )
    plain = two_clients("fedavg", f"local.momentum={momentum}", "local.lr=0.2")
    corrected = mean_gradient_norm(world, world.models(world.run())[0]["fc.weight"])
    assert corrected < 0.5 * mean_gradient_norm(plain, plain.models(plain.run())[0]["fc.weight"])


def test_correction_after_the_step_stays_bounded_where_the_gradients_would_diverge() -> None:
    world = two_clients(
        "scaffold", "trainer.correction=step", "local.momentum=0.9", "local.lr=0.05"
    )
    start = mean_gradient_norm(world, torch.zeros(2, 4, dtype=torch.float64))
    assert mean_gradient_norm(world, world.models(world.run())[0]["fc.weight"]) < 0.2 * start


@pytest.mark.parametrize("option", ["I", "II"])
def test_under_constant_gradients_momentum_leaves_no_drift(option: str) -> None:
    """Under constant gradients, momentum leaves no drift between clients.

    The steps are so small that gradients do not change. With the controls of the last
    round, all clients end in the same point.
    """
    world = two_clients(
        "scaffold",
        f"trainer.option={option}",
        "trainer.correction=step",
        "local.momentum=0.9",
        "local.lr=1e-7",
        "rounds=1",
    )
    after = world.run()
    jobs = next_jobs(world.aggregator, world.env, after)
    moved = [
        trees.sub(result.weights.params, job.start.params)["fc.weight"]
        for job, result in zip(jobs, Serial().map(jobs, world.data), strict=True)
    ]
    torch.testing.assert_close(moved[0], moved[1], rtol=1e-4, atol=0)


def test_both_corrections_coincide_without_momentum() -> None:
    """Both corrections coincide without momentum.

    This also holds if the step size decays from round to round.
    """
    rounds = ("method=scaffold", "rounds=4", "local.lr_decay=0.5")
    a, b = make_world(*rounds), make_world(*rounds, "trainer.correction=step")
    assert_same(a.models(a.run()), b.models(b.run()), 1e-12)


def test_momentum_inside_the_gradient_is_refused() -> None:
    with pytest.raises(ConfigError, match="diverges"):
        make_world("method=scaffold", "local.momentum=0.9")


@pytest.mark.parametrize("m", [4, 2])
def test_server_control_is_the_mean_of_the_clients(m: int) -> None:
    world = make_world("method=scaffold", "rounds=6", m=m)
    after = world.run()
    total = trees.zeros_like(after.state["shared"]["c"])
    for memory in after.clients.values():
        total = trees.add(total, memory["c_i"], alpha=1 / world.env.num_clients)
    assert_same([after.state["shared"]["c"]], [total], 1e-10)


@pytest.mark.parametrize("m", [4, 2])
def test_weighted_by_samples_it_is_their_weighted_mean(m: int) -> None:
    data = make_data((20, 12, 5, 27))
    world = make_world("method=scaffold", "aggregator.weights=samples", "rounds=6", m=m, data=data)
    after = world.run()
    total = trees.zeros_like(after.state["shared"]["c"])
    for client, memory in after.clients.items():
        total = trees.add(total, memory["c_i"], alpha=float(world.env.sizes[client]) / 64)
    assert_same([after.state["shared"]["c"]], [total], 1e-10)


def test_one_client_is_fedavg() -> None:
    data = make_data((20,))
    a, b = make_world("method=scaffold", data=data), make_world("method=fedavg", data=data)
    assert_same(a.models(a.run()), b.models(b.run()), 1e-12)


def test_one_full_batch_step_makes_both_options_the_gradient() -> None:
    one = (
        "local.batch_size=100",
        "local.epochs=null",
        "local.steps=1",
        "rounds=1",
        "method=scaffold",
    )
    first, second = make_world(*one, "trainer.option=I"), make_world(*one, "trainer.option=II")
    a, b = first.run(), second.run()
    for client in a.clients:
        assert_same([a.clients[client]["c_i"]], [b.clients[client]["c_i"]], 1e-10)


def test_one_step_with_everyone_is_fedavg_because_corrections_cancel() -> None:
    one = (
        "local.batch_size=100",
        "local.epochs=null",
        "local.steps=1",
        "rounds=5",
        "aggregator.weights=uniform",
    )
    for sizes in ((20, 20, 20, 20), (20, 0, 13, 0, 20)):  # empty ones never take part
        data = make_data(sizes)
        a, b = (
            make_world("method=scaffold", *one, data=data),
            make_world("method=fedavg", *one, data=data),
        )
        assert_same(a.models(a.run()), b.models(b.run()), 1e-10)


def test_option_two_divides_by_the_lr_of_its_own_round() -> None:
    """Option II divides by the learning rate of its round.

    After rounds with one full-batch step, its controls equal the gradients of option I.
    This holds for every schedule of the step size.
    """
    one = (
        "local.batch_size=100",
        "local.epochs=null",
        "local.steps=1",
        "local.lr_decay=0.5",
        "method=scaffold",
    )
    first, second = make_world(*one, "trainer.option=I"), make_world(*one, "trainer.option=II")
    assert second.env.at(2).local_training_this_round.lr == pytest.approx(
        second.env.local_training.lr / 4
    )
    a, b = first.run(), second.run()
    for client in a.clients:
        assert_same([a.clients[client]["c_i"]], [b.clients[client]["c_i"]], 1e-10)
