"""FedGen: tests of the generator's loss, the clients' terms and the heads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedexp.config.compose import compose
from fedexp.core.errors import ConfigError, FedexpError
from fedexp.core.kernel import StepNoise
from fedexp.core.runner import Snapshot, next_jobs
from fedexp.core.seeds import torch_generator
from fedexp.core.weights import ModelSpec
from fedexp.engines.serial import Serial
from fedexp.engines.vectorized import Vectorized
from fedexp.methods.fedgen.aggregator import FedGen, generator_spec, head_of
from fedexp.running.experiment import Experiment
from fedexp.server_training.optimizers import Sgd
from tests.engines.compare import assert_same_results, second_round_jobs
from tests.methods.server_world import models_near
from tests.methods.test_distilling import params_of, world_of
from tests.world import CPU, World, assert_same, make_data, make_world

SMALL = {"steps": 4, "hidden": 6, "noise": 3, "batch_size": 8, "lr": 0.05}


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("ensemble", ["losses", "logits"])
def test_the_generators_loss_is_the_sum_written_out(ensemble: Any) -> None:
    m, b, classes, noise, features = 3, 4, 5, 2, 6
    logits, eps, z = numbers(m, b, classes), numbers(b, noise, seed=1), numbers(b, features, seed=2)
    y, held = (
        torch.tensor([0, 2, 2, 4]),
        torch.tensor([[3, 0, 5, 1, 0], [0, 0, 1, 1, 9], [2, 2, 0, 0, 0]]),
    )
    expected = 0.0
    for i in range(b):
        if ensemble == "losses":
            for k in range(m):
                share = (int(held[k, y[i]]) + 1) / (int(held[:, y[i]].sum()) + m)
                expected -= share * float(logits[k, i].log_softmax(0)[y[i]]) / b
        else:
            expected -= float(logits[:, i].mean(0).log_softmax(0)[y[i]]) / b
    spread = 0.0
    for i in range(b):
        for j in range(b):
            msd = sum((float(eps[i, n]) - float(eps[j, n])) ** 2 for n in range(noise)) / noise
            mad = sum(abs(float(z[i, n]) - float(z[j, n])) for n in range(features)) / features
            spread += msd * mad / b**2
    method = FedGen(ensemble=ensemble, diversity=0.5)
    assert float(method.loss(logits, y, held, eps, z)) == pytest.approx(
        expected + 0.5 * 2.718281828459045**-spread, rel=1e-9
    )
    alike = float(method.loss(logits, y, held, eps, torch.ones_like(z)))
    assert alike == pytest.approx(expected + 0.5, rel=1e-9)


def trained(world: World, heads: list[int], held: list[list[int]]) -> dict[str, Tensor]:
    """Return the generator after the first round.

    The clients have the heads `heads` and the class counts `held`.
    """
    method: Any = world.aggregator
    state = method.init(world.env)
    models = models_near(state["weights"], max(heads) + 1, 2.0)
    names, _ = head_of(world.env.server_spec, world.env.input_shape)
    trees = [{name: models[number].params[name] for name in names} for number in heads]
    weights, _, metrics = method._trained(state, trees, torch.tensor(held), world.env)
    assert metrics["server/loss"] > 0
    return weights.params


COUNTS = [[3, 0, 5], [0, 4, 2], [6, 1, 0]]


def test_fedgen_generator_does_not_depend_on_client_order() -> None:
    world = world_of("fedgen", **SMALL)
    a = trained(world, [0, 1, 2], COUNTS)
    assert_same([trained(world, [2, 0, 1], [COUNTS[2], COUNTS[0], COUNTS[1]])], [a], 1e-9)
    with pytest.raises(AssertionError):
        assert_same([trained(world, [0, 1, 2], [COUNTS[1], COUNTS[0], COUNTS[2]])], [a], 1e-6)


def test_fedgen_generator_of_copied_clients_equals_that_of_one() -> None:
    world = world_of("fedgen", **SMALL)
    assert_same([trained(world, [0] * 3, [COUNTS[0]] * 3)], [trained(world, [0], COUNTS[:1])], 1e-9)


def test_the_generators_steps_are_those_of_a_loop_of_torchs() -> None:
    """The generator's steps equal those of a loop that is written with torch.

    The third and the fourth round share one Adam. Its step size has decayed two and
    three times. A class counts if a client has a sample of it. Heads are those
    that clients sent.
    """
    world = world_of("fedgen", lr_decay=0.5, **SMALL)
    method: Any = world.aggregator
    state = method.init(world.env)
    models, held = (
        models_near(state["weights"], 3, 2.0),
        torch.tensor([[3, 0, 0], [0, 1, 0], [6, 1, 0]]),
    )
    names, _ = head_of(world.env.server_spec, world.env.input_shape)
    heads = [{name: model.params[name] for name in names} for model in models]
    generator = state["generator"].module().double().train()
    adam = torch.optim.Adam(generator.parameters(), weight_decay=1e-2)
    for number in (2, 3):
        found, optimizer, metrics = method._trained(state, heads, held, world.env.at(number))
        state, losses = {**state, "generator": found, "optimizer": optimizer}, []
        adam.param_groups[0]["lr"] = 0.05 * 0.5**number
        for step in range(4):
            random = torch_generator(0, "generator", number, step)
            y = torch.randint(2, (8,), generator=random)
            eps = torch.rand(8, 3, generator=random, dtype=torch.float64)
            z = generator(y, eps)
            logits = [F.linear(z, head["output.weight"], head["output.bias"]) for head in heads]
            loss = method.loss(torch.stack(logits), y, held, eps, z)
            adam.zero_grad()
            loss.backward()
            adam.step()
            losses.append(loss.item())
        assert metrics["server/loss"] == pytest.approx(sum(losses) / 4)
        for name, value in generator.state_dict().items():
            torch.testing.assert_close(
                {**found.params, **found.buffers}[name], value, rtol=1e-7, atol=1e-9
            )


def test_the_generators_optimizer_outlives_a_round() -> None:
    world = world_of("fedgen", "rounds=2", **SMALL)
    assert world.run().state["optimizer"]["t"] == 2 * SMALL["steps"]


def test_clients_receive_the_classes_of_all_participants() -> None:
    world = world_of("fedgen", "rounds=1", **SMALL)
    labels = {int(y) for y in world.data.train.y}
    assert world.run().state["shared"]["labels"]["known"].tolist() == sorted(labels)


def test_the_first_round_is_fedavgs() -> None:
    plain, special = (
        make_world("method=fedavg", "rounds=1"),
        world_of("fedgen", "rounds=1", **SMALL),
    )
    assert_same(params_of(special.run().state), params_of(plain.run().state))


def second_round(*overrides: str, data: Any = None) -> tuple[World, list[Any]]:
    world = make_world(
        "method=fedgen", "aggregator.hidden=6", "aggregator.noise=3", "aggregator.steps=2", "trainer.batch_size=5",
        *overrides, **({"data": data} if data else {}),
    )  # fmt: skip
    return world, second_round_jobs(world)


def test_a_generator_that_diverges_ends_the_run_in_words() -> None:
    world = world_of("fedgen", **{**SMALL, "lr": 1e300, "optimizer": Sgd()})
    with pytest.raises(FedexpError, match="training on the server is not finite") as raised:
        trained(world, [0, 1, 2], COUNTS)
    assert "lower aggregator.lr" in str(raised.value)
    assert str(raised.value.facts["where"]).startswith("round 1, step 2 of ")


def test_a_clients_step_is_autograds() -> None:
    """A client's step equals the step that autograd gives.

    The loss has cross-entropy and two terms of generated features, with the factors
    alpha and beta. The reference uses torch's modules.
    """
    alpha, beta, size, noise_size = 2.0, 3.0, 5, 3
    world, jobs = second_round(
        "local.epochs=null",
        "local.steps=1",
        "local.batch_size=100",
        "trainer.alpha=2",
        "trainer.beta=3",
    )
    for job, result in zip(jobs, Serial().map(jobs, world.data), strict=True):
        index = torch.from_numpy(world.data.partition.of(job.client))
        x, y = world.data.train.inputs(index), world.data.train.y[index]
        order = torch.randperm(len(index), generator=torch_generator(job.seed, "order", 0))
        x, y = x[order], y[order]
        shared, noise = job.shared, StepNoise(job.seed, CPU)
        generator = generator_spec(3, noise_size, 6, 8).module().double().eval()
        generator.load_state_dict({**shared["generator"], **shared["generator_buffers"]})
        known = shared["labels"]["known"]
        drawn = known[(noise("drawn classes", (size,)) * len(known)).long()]
        model = job.start.module().train()
        features = [
            generator(c, noise(f"{s} features", (len(c), noise_size)).double())
            for c, s in ((drawn, "drawn"), (y, "own"))
        ]
        logits, made, own = model(x), model.output(features[0]), model.output(features[1]).detach()
        p, q = own.softmax(1), logits.softmax(1)
        loss = F.cross_entropy(logits, y) + 0.98 * alpha * size / 100 * F.cross_entropy(made, drawn)
        (loss + 0.98 * beta * (p * (p / q).log()).sum(1).mean()).backward()
        for name, value in model.named_parameters():
            torch.testing.assert_close(
                result.weights.params[name],
                (value - job.local_training.lr * value.grad).detach(),
                rtol=1e-9,
                atol=1e-12,
            )


def test_stacked_clients_draw_their_own_features() -> None:
    """Stacked clients draw different features.

    This holds during and after the epochs in which the terms are used.
    """
    world, jobs = second_round("trainer.epochs=1", "local.epochs=2", data=make_data((16,) * 4))
    engine = Vectorized(4, "vmap")
    found = list(engine.map(jobs, world.data))
    assert engine.stacked_steps == sum(r.num_steps for r in found)
    assert_same_results(found, list(Serial().map(jobs, world.data)), 1e-9)
    halves = {r.metrics["generated"] for r in found}
    assert len(halves) == 4
    late = [replace(job, trainer=replace(job.trainer, epochs=2)) for job in jobs]  # type: ignore[type-var]
    for once, twice in zip(found, Serial().map(late, world.data), strict=True):
        assert 0 < once.metrics["generated"] < twice.metrics["generated"]


class Maps(nn.Module):
    """A network whose head is a convolution."""

    head_module = "output"

    def __init__(self) -> None:
        super().__init__()
        self.output = nn.Conv2d(1, 3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(x)


def test_clients_that_have_no_use_for_the_generator_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="FedGen teaches a generator for clients that fit its features"
    ):
        Experiment.of(compose(["method=fedgen", "trainer=sgd"]))


def test_networks_without_a_head_on_vectors_are_refused() -> None:
    spec = make_world("method=fedgen").env.server_spec
    assert head_of(spec, (1, 2, 2)) == (("output.weight", "output.bias"), 8)
    for arch, shape, words in (
        ("tests.methods.test_fedgen.Maps", (1, 2, 2), "are maps"),
        ("tests.core.test_observe.Convolutional", (2, 8, 8), "no head"),
    ):
        with pytest.raises(ConfigError, match=words):
            FedGen().check(ModelSpec(arch, ()), shape)


def test_the_server_keeps_generator_and_optimizer_through_a_round_of_nobody() -> None:
    world = world_of("fedgen", **SMALL)
    method: Any = world.aggregator
    state = method.init(world.env)
    after, metrics = method.update(state, [], world.env)
    assert after is state and metrics == {"clients": 0}
    assert (
        next_jobs(method, world.env, Snapshot(0, after))[0].shared["generator"]
        is state["generator"].params
    )
