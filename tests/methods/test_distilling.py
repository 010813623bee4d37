"""FedDF and FedBE: targets, students, and the state between the server's steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedexp.config.compose import compose
from fedexp.core.env import Specs
from fedexp.core.errors import ConfigError, FedexpError
from fedexp.core.net import Net
from fedexp.core.seeds import seed_of
from fedexp.core.trace import Trace
from fedexp.core.weights import ModelSpec, Weights
from fedexp.methods import feddf
from fedexp.running.experiment import Experiment
from fedexp.server_training.forward import recomputed_statistics
from fedexp.server_training.optimizers import Sgd
from tests.methods.server_world import models_near, module_of, round_of, stored_after_every_step
from tests.world import CPU, MLP, World, assert_same, make_data, make_world

NORMED = {"_target_": "tests.methods.test_distilling.Normed"}
MIXED = ["architectures.clients=[mlp,mlp_nafi_100]"]
VALIDATED = ("partition.val_fraction=0.1", "aggregator.validate_every=100")
MASKS = ["task=segmentation", "partition=iid", "dataset=shapes_masks", "model=unet"]


class Normed(nn.Module):
    """A network with BatchNorm after and before a linear layer."""

    def __init__(self, *, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        size = math.prod(input_shape)
        self.first, self.norm = nn.Linear(size, 5), nn.BatchNorm1d(5)
        self.second, self.output = nn.BatchNorm1d(5), nn.Linear(5, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.output(self.second(torch.relu(self.norm(self.first(x.flatten(1))))))
        return logits


def world_of(
    method: str, *overrides: str, model: dict[str, Any] | None = None, **changes: Any
) -> World:
    """Return a world of `overrides` whose aggregator has the fields in `changes`."""
    world = make_world(f"method={method}", *overrides, **({"model": model} if model else {}))
    world.experiment = replace(world.experiment, aggregator=replace(world.aggregator, **changes))
    return world


def proxy_inputs(world: World) -> Tensor:
    assert world.env.proxy is not None
    return world.env.proxy.inputs(slice(None))


def params_of(state: dict[str, Any]) -> list[dict[str, Tensor]]:
    return [state["weights"].params]


@pytest.mark.parametrize("average", ["logits", "probs"])
def test_a_step_towards_the_teachers_is_autograds(average: str) -> None:
    """A step towards the teachers equals the step that autograd gives.

    The step is w - lr grad KL(target || student). Torch's modules compute the target.
    The temperature divides the logits of both the target and the student.
    """
    world = world_of("feddf", average=average, temperature=2.0, epochs=1, optimizer=Sgd(), lr=0.7)
    teachers = models_near(world.env.initial_weights(), 3)
    state, _ = round_of(world, teachers, [10, 20, 30])
    x = proxy_inputs(world)
    said = [module_of(teacher)(x).detach() / 2 for teacher in teachers]
    target = torch.stack(said).mean(0).softmax(1)
    if average == "probs":
        target = torch.stack([z.softmax(1) for z in said]).mean(0)
    mean = {
        name: sum(k * t.params[name] for k, t in zip((1, 2, 3), teachers, strict=True)) / 6
        for name in teachers[0].params
    }
    student = module_of(replace(teachers[0], params=mean))
    q = (student(x) / 2).log_softmax(1)
    (target * (target.log() - q)).sum(1).mean().backward()
    expected = {
        name: (value - 0.7 * value.grad).detach() for name, value in student.named_parameters()
    }
    assert_same(params_of(state), [expected], 1e-9)


def test_a_students_step_size_follows_half_a_cosine() -> None:
    """The step size in step t of T is lr (1 + cos(pi t / T)) / 2, or constant.

    The results are compared with a torch loop on the whole proxy.
    """
    for schedule in ("cosine", "constant"):
        world = world_of(
            "feddf", epochs=4, batch_size=100, optimizer=Sgd(), lr=0.7, schedule=schedule
        )
        teachers = models_near(world.env.initial_weights(), 3)
        state, _ = round_of(world, teachers)
        x = proxy_inputs(world)
        target = (
            torch.stack([module_of(teacher)(x).detach() for teacher in teachers])
            .mean(0)
            .log_softmax(1)
        )
        mean = {name: sum(t.params[name] for t in teachers) / 3 for name in teachers[0].params}
        student = module_of(replace(teachers[0], params=mean))
        for step in range(4):
            lr = 0.7 * (1 + math.cos(math.pi * step / 4)) / 2 if schedule == "cosine" else 0.7
            loss = F.kl_div(
                student(x).log_softmax(1), target, reduction="batchmean", log_target=True
            )
            for value, grad in zip(
                student.parameters(),
                torch.autograd.grad(loss, list(student.parameters())),
                strict=True,
            ):
                value.data -= lr * grad
        assert_same(params_of(state), [dict(student.named_parameters())], 1e-9)


@pytest.mark.parametrize("method", ["feddf", "fedbe"])
def test_teachers_like_the_student_leave_it_alone(method: str) -> None:
    """If teachers equal the student, there is no gradient. Teachers do not change."""
    changes = {"samples": 0, "temperature": 1.0} if method == "fedbe" else {}
    world = world_of(method, optimizer=Sgd(momentum=0.9), lr=1.0, epochs=5, **changes)
    start = world.env.initial_weights()
    state, logged = round_of(world, [start] * 3)
    assert_same(params_of(state), [start.params], 1e-12)
    assert len(logged) == 6 and all(abs(row["server/loss"]) < 1e-12 for row in logged[1:])
    teachers = models_near(start, 3)
    held = [{name: value.clone() for name, value in t.params.items()} for t in teachers]
    moved, _ = round_of(world, teachers)
    with pytest.raises(AssertionError):
        assert_same(params_of(moved), [start.params], 1e-3)
    assert_same([t.params for t in teachers], held)


def test_of_a_static_proxy_every_teacher_sees_each_sample_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every teacher sees each sample of a static proxy once.

    The student sees each sample once per pass, in another order per pass.
    """
    seen: dict[bool, list[Tensor]] = {True: [], False: []}
    run = Net.__call__

    def collect(net: Net, params: Any, buffers: Any, x: Tensor) -> Tensor:
        seen[net._module.training].append(x)
        return run(net, params, buffers, x)

    # `world_of` runs a new network once to check it. Therefore it precedes the patch.
    world = world_of("feddf", epochs=3, batch_size=4)
    monkeypatch.setattr(Net, "__call__", collect)
    round_of(world, models_near(world.env.initial_weights(), 3))
    assert [len(x) for x in seen[False]] == [9, 9, 9]
    assert [len(x) for x in seen[True]] == [4, 4, 1] * 3
    passes = [torch.cat(seen[True][i : i + 3])[:, 0, 0, 0].tolist() for i in (0, 3, 6)]
    assert all(sorted(each) == sorted(proxy_inputs(world)[:, 0, 0, 0].tolist()) for each in passes)
    assert len({tuple(each) for each in passes}) == 3


def test_every_round_orders_the_proxy_anew() -> None:
    world = world_of("feddf", epochs=2, batch_size=4)
    method: Any = world.aggregator
    net = Net(world.env.server_spec, CPU, torch.float64)
    orders = [
        [index.tolist() for _, index, _ in method._parts(0, 6, net, world.env.at(r, 1))]
        for r in (0, 1)
    ]
    assert orders[0] != orders[1]


@pytest.mark.parametrize("method", ["feddf", "fedbe", "fedlaw"])
def test_losses_that_are_not_finite_name_the_step_and_who_diverged(method: str) -> None:
    world = world_of(method, epochs=3, batch_size=4, optimizer=Sgd())
    teachers = models_near(world.env.initial_weights(), 3)
    huge = [
        replace(t, params={name: 1e308 * value for name, value in t.params.items()})
        for t in teachers
    ]
    with pytest.raises(FedexpError, match="not finite") as clients:
        round_of(world, huge)
    assert "step 1 of 9" in str(clients.value) and "local.lr" in str(clients.value)
    if method == "fedlaw":  # so large a step makes the factor 0 and the loss log 3
        return
    fast = world_of(method, epochs=3, batch_size=4, optimizer=Sgd(), lr=1e300)
    with pytest.raises(FedexpError, match="not finite") as student:
        round_of(fast, teachers)
    assert "step 2 of 9" in str(student.value) and "aggregator.lr" in str(student.value)


@dataclass(frozen=True)
class Same:
    """A transform that leaves a batch unchanged."""

    def __call__(self, x: Tensor, noise: Any) -> Tensor:
        return x


@dataclass(frozen=True)
class Shifted(Same):
    def __call__(self, x: Tensor, noise: Any) -> Tensor:
        return x + noise("shift", (len(x), 1, 1, 1)).to(x)


def test_teachers_that_see_every_batch_say_the_same_of_the_same() -> None:
    states = {}
    for augment in (None, Same(), Shifted()):
        world = world_of("feddf", augment=augment is not None, epochs=3, batch_size=4)
        world.env = replace(world.env, domain=replace(world.env.domain, augment=augment))
        states[type(augment)] = round_of(world, models_near(world.env.initial_weights(), 3))[0]
    assert_same(params_of(states[Same]), params_of(states[type(None)]), 1e-12)
    with pytest.raises(AssertionError):
        assert_same(params_of(states[Shifted]), params_of(states[Same]), 1e-6)
    # The student and the teachers see the same samples.
    world = world_of("feddf", augment=True, epochs=2, optimizer=Sgd())
    world.env = replace(world.env, domain=replace(world.env.domain, augment=Shifted()))
    start = world.env.initial_weights()
    assert_same(params_of(round_of(world, [start] * 2)[0]), [start.params], 1e-12)


@pytest.mark.parametrize("augment", [False, True])
def test_of_networks_that_differ_a_fresh_student_follows_all(augment: bool) -> None:
    """A fresh student learns from clients whose architectures differ.

    The student has yet another architecture. It takes autograd's step towards the
    teachers' mean.
    """
    changes = {
        "student_start": "fresh",
        "augment": augment,
        "epochs": 1,
        "optimizer": Sgd(),
        "lr": 0.7,
    }
    world = world_of("feddf_matched", "rounds=1", **changes)
    kinds = [ModelSpec.of({**MLP, "hidden": widths}, (1, 2, 2), 3) for widths in ([], [6, 5])]
    env = replace(world.env, specs=Specs(world.env.server_spec, tuple(kinds)))
    world.env = replace(env, domain=replace(env.domain, augment=Same() if augment else None))
    begun = world.aggregator.init(world.env)
    starts = [job.start for job in world.aggregator.plan(begun, world.env)]
    assert [start.spec for start in starts] == [*kinds, *kinds]
    teachers = [models_near(start, 1)[0] for start in starts]
    state, logged = round_of(world, teachers)
    x = proxy_inputs(world)
    target = (
        torch.stack([module_of(teacher)(x).detach() for teacher in teachers]).mean(0).softmax(1)
    )
    student = module_of(
        Weights.init(world.env.server_spec, seed_of(0, "student", 0), CPU, torch.float64)
    )
    (target * (target.log() - student(x).log_softmax(1))).sum(1).mean().backward()
    expected = {
        name: (value - 0.7 * value.grad).detach() for name, value in student.named_parameters()
    }
    assert_same(params_of(state), [expected], 1e-9)
    assert logged[0]["clients"] == 4 and len(logged) == 2
    unchanged, metrics = world.aggregator.update(begun, [], world.env)
    assert unchanged["weights"] is begun["weights"] and metrics == {"clients": 0}


def test_on_a_clients_own_samples_a_fresh_student_becomes_that_client() -> None:
    """On the samples of one client, a fresh student becomes like that client.

    The student approaches the client with the number of steps. In the end it agrees
    with the client most often.
    """
    alone = make_world("method=fedavg", "rounds=10", data=make_data((60,)))
    teacher = alone.run().state["weights"]
    said = module_of(teacher)(alone.data.train.inputs(slice(None))).detach()
    distances, agreement = [], []
    for epochs in (1, 5, 25, 125):
        world = world_of(
            "feddf", student_start="fresh", epochs=epochs, optimizer=Sgd(momentum=0.9), lr=0.3
        )
        world.env = replace(world.env, proxy=alone.data.train)
        student = module_of(round_of(world, [teacher])[0]["weights"])
        answers = student(alone.data.train.inputs(slice(None))).detach()
        p = torch.distributions.Categorical(logits=said)
        distances.append(
            torch.distributions.kl_divergence(
                p, torch.distributions.Categorical(logits=answers)
            ).mean()
        )
        agreement.append((answers.argmax(1) == said.argmax(1)).double().mean())
    assert distances == sorted(distances, reverse=True)
    assert agreement[-1] == max(agreement) > agreement[0]


def test_the_student_is_traced_after_every_stretch() -> None:
    world = world_of("feddf", "rounds=1", epochs=3, batch_size=4)
    seen: dict[int, Any] = {}

    class Watching(Trace):
        def wants(self, iteration: int) -> bool:
            return iteration != 2

        def __call__(
            self, iteration: int, outcomes: Any, clients: Any = (), values: Any = None
        ) -> None:
            seen[iteration] = outcomes["student"].models[0], values

    world.env = replace(world.env, trace=Watching())
    state, logged = round_of(world, models_near(world.env.initial_weights(), 2))
    assert list(seen) == [1, 3] and seen[3][0] is state["weights"] and seen[1][1] == logged[1]


def test_the_best_student_is_delivered_and_patience_ends_the_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accuracies = iter([0.2, 0.5, 0.5, 0.4, 0.3])
    students: list[Weights] = []

    class Scripted:
        def __init__(self, *_: Any) -> None:
            pass

        def __call__(self, outcome: Any, *_: Any) -> dict[str, float]:
            students.append(outcome.models[0])
            return {"server/global/acc": next(accuracies)}

    monkeypatch.setattr(feddf, "Evaluator", Scripted)
    world = world_of("feddf_paper", *VALIDATED, validate_every=2, patience=4, steps=20)
    state, logged = round_of(world, models_near(world.env.initial_weights(), 2))
    assert [row["server/val_acc"] for row in logged[1:]] == [0.2, 0.5, 0.5, 0.4]
    assert_same(params_of(state), [students[1].params])
    assert state["evaluated"] is state["weights"]


@pytest.mark.parametrize(("method", "steps", "changes"), [
    ("feddf", 4, {"batch_size": 4, "epochs": 3}),
    ("feddf_paper", 5, {"batch_size": 4, "validate_every": 2, "patience": None, "steps": 7}),
    ("fedbe", 4, {"batch_size": 4, "epochs": 3, "samples": 2, "swa_start": 2, "swa_every": 2}),
    ("fedlaw", 5, {"batch_size": 4, "epochs": 4, "learn": "swa"}),
    ("fedgen", 1, {"steps": 3, "hidden": 6, "noise": 3}),
])  # fmt: skip
def test_interrupted_after_any_step_it_is_the_straight_run(
    method: str, steps: int, changes: dict[str, Any], tmp_path: Path
) -> None:
    share = VALIDATED if "validate_every" in changes else ()
    world = world_of(method, "rounds=2", "local.steps=2", "local.epochs=null", *share, **changes)
    straight = world.run()
    again = stored_after_every_step(world, tmp_path)
    assert again.step == straight.step == 2 * steps
    assert_same(params_of(again.state), params_of(straight.state))


@pytest.mark.parametrize("method", ["feddf", "fedbe", "fedlaw"])
def test_batch_norms_statistics_come_from_the_proxy_and_one_sample_has_none(method: str) -> None:
    # There are 9 samples. The batch of one sample is left out.
    world = world_of(method, model=NORMED, epochs=2, batch_size=8)
    start = world.env.initial_weights()
    state, _ = round_of(world, models_near(start, 2))
    assert int(state["weights"].buffers["norm.num_batches_tracked"]) == 2
    assert not torch.equal(
        state["weights"].buffers["norm.running_mean"], start.buffers["norm.running_mean"]
    )
    assert world.env.proxy is not None
    world.env = replace(
        world.env, proxy=replace(world.env.proxy, x=world.env.proxy.x[:1], y=world.env.proxy.y[:1])
    )
    with pytest.raises(ConfigError, match="BatchNorm"):
        world.aggregator.init(world.env)


@pytest.mark.parametrize("method", ["feddf", "fedbe", "fedlaw"])
def test_batches_of_one_proxy_sample_are_refused_with_batch_norm(method: str) -> None:
    """Such batches are left out, so the server would train nothing, without a message."""
    world = world_of(method, model=NORMED, batch_size=1)
    with pytest.raises(ConfigError, match="only one") as error:
        world.aggregator.init(world.env)
    assert "aggregator.batch_size" in str(error.value)
    untrained = world_of(method, model=NORMED, batch_size=1, epochs=0)
    untrained.aggregator.init(untrained.env)
    plain = world_of(method, batch_size=1, epochs=1)
    _, logged = round_of(plain, models_near(plain.env.initial_weights(), 2))
    assert "server/loss" in logged[-1]


# ---------------------------------------------------------------- FedBE


def test_fedbes_teachers_count_alike() -> None:
    """All teachers of FedBE have the same weight.

    The teachers are the mean, the clients and the sampled models. The target is the
    mean of their probabilities to the power of 1 / T, normalised.
    """
    world = world_of("fedbe", samples=2, temperature=0.5)
    start, x = world.env.initial_weights(), proxy_inputs(world)
    models, p = models_near(start, 3), torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    mean = replace(
        start,
        params={
            k: sum(w * m.params[k] for w, m in zip(p, models, strict=True)) for k in start.params
        },
    )
    aggregator: Any = world.aggregator
    drawn = list(aggregator.drawn(models, p, start, mean, world.env))
    teachers = [mean, *models, *drawn]
    probabilities = torch.stack([module_of(t)(x).softmax(1) for t in teachers]).mean(0).detach()
    expected = probabilities.square() / probabilities.square().sum(1, keepdim=True)
    found = aggregator.targets({"models": models, "p": p.tolist()}, start, mean, world.env)[
        "target"
    ]
    torch.testing.assert_close(found.exp(), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("distribution", ["directions", "gaussian", "dirichlet"])
def test_drawn_models_have_their_distributions_moments(distribution: str) -> None:
    world = world_of("fedbe", distribution=distribution, samples=300, alpha=1.5)
    start = world.env.initial_weights()
    models, p = models_near(start, 3), torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    name = "output.bias"
    aggregator: Any = world.aggregator
    drawn = torch.stack(
        [m.params[name] for m in aggregator.drawn(models, p, start, start, world.env)]
    )
    y = torch.stack([m.params[name] for m in models])
    if distribution == "gaussian":
        centre = p @ y
        spread = (p @ (y - centre).square()).sqrt()
    elif distribution == "directions":
        u = y - start.params[name]
        norms = u.norm(dim=1)
        d = u / norms[:, None]
        centre = start.params[name] + norms.mean() * d.mean(0)
        spread = norms.mean() * 0.1 * d.std(0, correction=0)
    else:
        shares = torch.from_numpy(np.random.default_rng(0).dirichlet([1.5] * 3, 20000)) * p
        mixed = shares / shares.sum(1, keepdim=True) @ y
        centre, spread = mixed.mean(0), mixed.std(0)
        assert bool((drawn <= y.amax(0) + 1e-12).all() and (drawn >= y.amin(0) - 1e-12).all())
    torch.testing.assert_close(drawn.mean(0), centre, rtol=0, atol=float(spread.max()) * 0.15)
    torch.testing.assert_close(drawn.std(0), spread, rtol=0.15, atol=1e-4)


def test_the_students_average_is_that_of_every_second_one() -> None:
    """After the first two steps, every second student enters the average."""
    steps = {"samples": 0, "epochs": None, "batch_size": 4}
    start = world_of("fedbe", **steps, steps=1).env.initial_weights()
    teachers = models_near(start, 2)

    def student(**changes: Any) -> dict[str, Tensor]:
        world = world_of("fedbe", **{**steps, "lr": 1.0, "swa_start": 1000, **changes})
        return params_of(round_of(world, teachers)[0])[0]

    four, six = student(steps=4), student(steps=6)
    averaged = student(steps=7, swa_start=2, swa_every=2)
    assert_same([averaged], [{name: (four[name] + six[name]) / 2 for name in four}], 1e-12)


def test_recomputed_statistics_are_torchs() -> None:
    """The recomputed statistics equal those of `torch.optim.swa_utils.update_bn`.

    All batches have the same size. Parameters and counters do not change.
    """
    spec = ModelSpec.of(NORMED, (1, 2, 2), 3)
    weights = Weights.init(spec, 3, CPU, torch.float64)
    samples = make_data((12,)).train
    found = recomputed_statistics(Net(spec, CPU, torch.float64), weights, samples, 4)
    module = weights.module()
    torch.optim.swa_utils.update_bn([samples.inputs(slice(i, i + 4)) for i in (0, 4, 8)], module)
    for name, value in module.named_buffers():
        expected = value if "running" in name else weights.buffers[name]
        torch.testing.assert_close(found.buffers[name], expected, rtol=1e-9, atol=1e-12)
    assert_same([found.params], [weights.params])


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(("method", "overrides", "words"), [
    *((method, MASKS, "Classification") for method in ("feddf", "fedbe", "fedgen", "moon")),
    ("feddf", ["proxy.source=none", "proxy.size=0"], "needs server data"),
    ("feddf", ["aggregator.augment=true"], "the clients have no transform"),
    ("feddf", MIXED, "must have one architecture"),
    ("feddf", [*MIXED, "aggregator.student_start=fresh"], "in the second round, and networks differ"),
    ("feddf", ["aggregator.student_start=fresh", "server_optimizer=fedadam"], "server optimizer has no effect"),
    ("feddf", ["aggregator.temperature=0"], "temperature must be positive"),
    ("feddf", ["aggregator.steps=10"], "set one of steps and epochs"),
    ("feddf", ["aggregator.patience=10"], "patience has no effect"),
    ("feddf_paper", ["aggregator.validate_every=100"], "needs a validation share"),
    *((method, ["proxy.source=test"], "in one shot would train on test data") for method in ("feddf_paper", "feddf_matched")),
    ("feddf", ["proxy.source=test", "rounds=1"], "in one shot would train on test data"),
    ("feddf", ["aggregator.student_start=fresh", "aggregator.epochs=0"], "delivers an untrained network"),
    ("fedlaw", ["proxy.source=noise", "proxy.labelled=false", "proxy.size=9"], "needs labelled server data"),
    ("feddf", ["proxy.source=noise"], "must be a count with proxy.source=noise"),
    ("feddf", ["proxy.source=noise", "proxy.size=9", "proxy.dataset=mnist"], "noise does not come from a data set"),
    ("feddf", ["proxy.source=noise", "proxy.size=9", "proxy.labelled=true"], "noise has no labels"),
    ("feddf", ["proxy.resize=true"], "no effect without proxy.dataset"),
    ("fedbe", ["aggregator.temperature=0"], "temperature must be positive"),
    ("fedlaw", ["proxy.labelled=false"], "labelled server data"),
    ("fedlaw", ["proxy.source=none", "proxy.size=0", "proxy.labelled=false"], "needs server data"),
])  # fmt: skip
def test_mistakes_are_told_before_anything_starts(
    method: str, overrides: list[str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        Experiment.of(compose([f"method={method}", *overrides]))


def test_test_images_of_another_data_set_may_teach_in_one_shot() -> None:
    proxy = ["proxy.dataset=synthetic", "proxy.source=test", "proxy.size=9"]
    other = ["dataset=synthetic", "dataset.samples=200", "dataset.seed=1"]
    Experiment.of(compose(["method=feddf_paper", *other, *proxy]))


def test_a_proxy_of_test_data_is_allowed_and_named() -> None:
    small = ["dataset=synthetic", "dataset.samples=200", "dataset.test_samples=100"]
    experiment = Experiment.of(compose(["method=fedlaw", "proxy.source=test", *small]))
    data = experiment.load(CPU)
    assert data.test_data_in_training == "proxy.source=test: 2 samples" and len(data.test) == 98
