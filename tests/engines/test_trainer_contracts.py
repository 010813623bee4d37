"""Tests of the trainer's contract on every engine that computes in this process.

The module `fedexp.core.trainer` documents what a trainer may do and what it knows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedexp.core import trees
from fedexp.core.data import FederatedData, Partition, Samples
from fedexp.core.engine import Engine
from fedexp.core.errors import ClientError
from fedexp.core.jobs import ClientJob, ClientResult
from fedexp.core.kernel import batch_ranges, batches
from fedexp.core.net import Net, same_author
from fedexp.core.runner import Snapshot, next_jobs, run
from fedexp.core.task import Batch
from fedexp.core.trainer import (
    Adjustment,
    Ascent,
    Ctx,
    FeatureTerm,
    Measured,
    TermValue,
    Trainer,
    elementwise,
)
from fedexp.core.trees import Tree, Trees
from fedexp.engines.kernels.linear import Linear
from fedexp.engines.serial import Serial
from fedexp.engines.vectorized import Vectorized
from fedexp.methods.fedmrur.trainer import FedMRUR
from fedexp.methods.mofedsam import MoFedSAM
from tests.engines.compare import assert_matches_serial, assert_same_results, second_round_jobs
from tests.engines.plugins import NoBatchingRule
from tests.reference.generated import Generated
from tests.reference.moon_like import MoonLike
from tests.reference.sam import Sam
from tests.world import MLP, World, make_data, make_world

EQUAL = (18,) * 5
UNEQUAL = (20, 12, 17, 9, 12, 20, 20)
# These layers are so wide that an ascent is computed from factors with batches of 8.
WIDE = {"_target_": "fedexp.models.mlp.MLP", "hidden": [60, 50], "bias": True}
CONV = {"_target_": "tests.core.test_kernel.Small"}  # convolution, BatchNorm, dropout
HYPERBOLIC: list[dict] = [
    {},
    {"reduction": "exp_mean"},
    {"reduction": "exp_sum"},
    {"reduction": "sum_exp", "layer": "logits"},
]
ENGINES = {
    "serial": Serial,
    "linear": lambda: Vectorized(3, "linear"),
    "vmap": lambda: Vectorized(3, "vmap"),
}


def world_of(
    trainer: Trainer, *overrides: str, sizes: tuple[int, ...] = EQUAL, model: dict = MLP
) -> World:
    world = make_world(
        "method=fedavg", "local.epochs=2", *overrides, data=make_data(sizes), model=model
    )
    world.env = replace(world.env, trainer=trainer)
    return world


def first_jobs(world: World) -> list[ClientJob]:
    return next_jobs(world.aggregator, world.env, Snapshot(0, world.aggregator.init(world.env)))


def trained(world: World, trainer: Trainer, engine: Engine | None = None) -> list[ClientResult]:
    """Return the results of the first round with another trainer on the same jobs."""
    world.env = replace(world.env, trainer=trainer)
    return list((engine or Serial()).map(first_jobs(world), world.data))


# ---------------------------------------------------------------- ascent


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("model", [MLP, WIDE], ids=["narrow", "wide"])
@pytest.mark.parametrize(
    "changes",
    [
        (),
        ("local.momentum=0.6",),
        ("local.momentum=0.6", "local.weight_decay=0.1"),
        ("local.clip=0.05",),
    ],
    ids=lambda o: "+".join(o) or "plain",
)
def test_sam_is_its_formula(engine: str, changes: tuple[str, ...], model: dict) -> None:
    """The results equal a loop that uses only torch.

    The loop uses autograd, flat vectors and `torch.optim.SGD`.
    """
    rho = 0.3
    world = world_of(Sam(rho), *changes, sizes=(18, 11, 18), model=model)
    found = list(ENGINES[engine]().map(first_jobs(world), world.data))
    for job, result in zip(first_jobs(world), found, strict=True):
        module = job.start.module().train()
        live = list(module.parameters())
        local_training, index = (
            job.local_training,
            torch.from_numpy(world.data.partition.of(job.client)),
        )
        optimizer = torch.optim.SGD(
            live,
            local_training.lr,
            local_training.momentum,
            weight_decay=local_training.weight_decay,
        )
        losses, norms = [], []
        schedule = list(batch_ranges(len(index), local_training, 1))
        for batch in batches(job, world.data.train, index, schedule, None):  # type: ignore[arg-type]
            loss = F.cross_entropy(module(batch.x), batch.y)
            g = torch.cat([v.flatten() for v in torch.autograd.grad(loss, live)])
            e = rho * g / (g.norm() + 1e-12)
            here = torch.nn.utils.parameters_to_vector(live).detach().clone()
            torch.nn.utils.vector_to_parameters(here + e, live)
            optimizer.zero_grad()
            F.cross_entropy(module(batch.x), batch.y).backward()
            torch.nn.utils.vector_to_parameters(here, live)
            if local_training.clip is not None:
                torch.nn.utils.clip_grad_norm_(live, local_training.clip)
            optimizer.step()
            losses.append(loss.item())
            norms.append(float(e.norm()))
        for name, value in module.named_parameters():
            torch.testing.assert_close(
                result.weights.params[name], value.detach(), rtol=1e-9, atol=1e-11
            )
        assert result.metrics["loss"] == pytest.approx(np.mean(losses), rel=1e-9)
        assert (
            result.metrics["perturbation"]
            == pytest.approx(np.mean(norms), rel=1e-9)
            == pytest.approx(rho)
        )


@pytest.mark.parametrize("model", [MLP, CONV], ids=["mlp", "conv"])
def test_an_ascent_of_radius_0_is_plain_training_to_the_bit(model: dict) -> None:
    """With a radius of 0 the results are bit-identical to plain training.

    This includes BatchNorm's statistics and the parameters from which the ascent
    starts.
    """
    world = world_of(Trainer(), "local.momentum=0.5", model=model)
    plain, sam = trained(world, Trainer()), trained(world, Sam(0.0))
    assert all(result.metrics.pop("perturbation") == 0 for result in sam)
    assert_same_results(sam, plain, 0)
    assert [r.metrics for r in sam] == [r.metrics for r in plain]


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_climbed_from_is_restored_to_the_bit(engine: str) -> None:
    """The parameters after an ascent are bit-identical to those before it.

    The learning rate is so small that a step changes no parameter. Computing w + e - e
    would change them.
    """
    world = world_of(Sam(0.3))
    jobs = [
        replace(job, local_training=replace(job.local_training, lr=1e-300))
        for job in first_jobs(world)
    ]
    for job, result in zip(jobs, ENGINES[engine]().map(jobs, world.data), strict=True):
        assert result.metrics["perturbation"] == pytest.approx(0.3)
        assert all(
            torch.equal(value, job.start.params[name])
            for name, value in result.weights.params.items()
        )


@pytest.mark.parametrize("engine", ["serial", "vmap"])
def test_statistics_move_in_the_first_pass_alone(engine: str) -> None:
    world = world_of(Trainer(), "local.epochs=null", "local.steps=1", model=CONV)
    plain, sam = (trained(world, trainer, ENGINES[engine]()) for trainer in (Trainer(), Sam(0.5)))
    for a, b in zip(plain, sam, strict=True):
        assert a.weights.buffers
        assert not torch.equal(a.weights.params["conv.weight"], b.weights.params["conv.weight"])
        for name, value in a.weights.buffers.items():
            assert torch.equal(value, b.weights.buffers[name]), name


@dataclass(frozen=True)
class MomentumSam(Trainer):
    """A trainer with an ascent, an adjustment and a correction.

    The correction is a hook that needs the whole gradient of one client.
    """

    def ascent(self, ctx: Ctx) -> Ascent:
        return Ascent(0.2, eps=1e-7)

    @elementwise
    def adjustment(self, ctx: Ctx) -> Adjustment:
        return Adjustment(gradient=0.3, shift={k: 0.1 * v for k, v in ctx.start.items()})

    def correct(self, grad: Tree, params: Tree, ctx: Ctx) -> Tree:
        return {k: v * (1 + 0.1 * ctx.step + 0.01 * ctx.epoch + ctx.round) for k, v in grad.items()}


@dataclass(frozen=True)
class Outside(Trainer):
    """A change outside the optimizer. Its tree is in another order than the parameters."""

    @elementwise
    def adjustment(self, ctx: Ctx) -> Adjustment:
        numbered = {k: 0.1 * i + v for i, (k, v) in enumerate(ctx.start.items())}
        return Adjustment(outside=dict(sorted(numbered.items(), reverse=True)))


@dataclass(frozen=True)
class Margins(Trainer):
    """LDAM's margins (Cao et al. 2019), computed from class counts.

    A client without samples of a class has no margin for it.
    """

    def loss(self, net: Net, params: Tree, buffers: Tree, batch: Batch, ctx: Ctx) -> Measured:
        counts = ctx.class_counts.to(batch.x)
        margins = torch.where(counts > 0, counts.clamp(min=1) ** -0.25, 0.0)
        margins = 0.5 * margins / margins.max()
        logits = net(params, buffers, batch.x) - margins * F.one_hot(batch.y, len(counts))
        loss = (
            F.cross_entropy(logits, batch.y)
            * (1 + 0.1 * ctx.step + 0.2 * ctx.epoch)
            * ctx.num_examples
            / 20
        )
        return Measured((1 + ctx.round) * loss, {"margin": margins[batch.y].mean()})


@pytest.mark.parametrize(
    ("model", "sizes"),
    [(MLP, EQUAL), (MLP, UNEQUAL), (WIDE, UNEQUAL), (CONV, UNEQUAL)],
    ids=["mlp-equal", "mlp-unequal", "wide-unequal", "conv-unequal"],
)
@pytest.mark.parametrize(
    "trainer",
    [
        *(
            Sam(0.3),
            MoFedSAM(rho=0.3),
            MomentumSam(),
            MoonLike(),
            Generated(),
            Outside(),
            Margins(),
        ),
        *(
            FedMRUR(rho=0.3, gamma=0.5, sigma=50.0, measure_gradient=True, **how)
            for how in HYPERBOLIC
        ),
    ],
    ids=lambda t: type(t).__name__,
)
def test_stacked_is_serial(trainer: Trainer, sizes: tuple[int, ...], model: dict) -> None:
    world = world_of(trainer, sizes=sizes, model=model)
    jobs = second_round_jobs(world)
    by_hand = model is not CONV and same_author(type(trainer), "feature_term", "loss")
    for kernel in ("linear" if by_hand else "auto", "vmap"):
        engine = Vectorized(3, kernel)  # type: ignore[arg-type]
        assert_matches_serial(engine, world, jobs, 1e-9)
        assert engine.stacked_steps


@pytest.mark.parametrize(
    "frozen", ["hidden.0", "hidden.0.weight", "hidden.1", "output", "bias", "weight"]
)
def test_an_ascent_leaves_frozen_parameters_alone(frozen: str) -> None:
    """Frozen parameters do not count in the ascent's norm and are not moved by it.

    This holds for ascents from factors and for ascents from gradients.
    """
    world = world_of(Sam(0.3), sizes=UNEQUAL, model=WIDE)
    names = frozenset(name for name in world.env.initial_weights().params if frozen in name)
    jobs = [replace(job, frozen=names) for job in first_jobs(world)]
    assert names and len(names) < len(jobs[0].start.params)
    engine = Vectorized(3, "linear")
    assert_matches_serial(engine, world, jobs, 1e-9)
    assert engine.stacked_steps


def test_a_climb_by_factors_keeps_its_length_where_samples_cancel() -> None:
    """The ascent keeps its length if the gradients of the samples cancel.

    The inputs of all classes are nearly equal and in float32. Therefore ``||g||^2`` is
    far below the rounding errors of the products that it is computed from.
    """
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.uniform(size=(12, 1, 784)) + 1e-4 * rng.normal(size=(12, 10, 784)))
    x, y = x.float().reshape(120, 1, 28, 28), torch.arange(120) % 10
    partition = Partition.from_lists([np.arange(10 * c, 10 * c + 10) for c in range(12)])
    samples = Samples(x, y)
    data = FederatedData(samples, partition, samples, 10, "synthetic", y.numpy())
    model = {**WIDE, "hidden": [200, 200]}
    world = make_world(
        "method=fedavg",
        "dtype=float32",
        "local.epochs=1",
        "local.batch_size=10",
        data=data,
        model=model,
    )
    world.env = replace(world.env, trainer=Sam(0.05))
    even = {
        name: 0 * value if "output" in name else value
        for name, value in world.env.initial_weights().params.items()
    }
    jobs = [replace(job, start=replace(job.start, params=even)) for job in first_jobs(world)]
    stacked, alone = (
        list(engine.map(jobs, data)) for engine in (Vectorized(3, "linear"), Serial())
    )
    for a, b in zip(stacked, alone, strict=True):
        assert a.metrics["perturbation"] == pytest.approx(b.metrics["perturbation"], rel=1e-3)
        moved = [float(trees.norm(trees.sub(result.weights.params, even))) for result in (a, b)]
        assert moved[0] == pytest.approx(moved[1], rel=0.1)


@pytest.mark.parametrize(
    ("batch_size", "hidden", "frozen", "factors"),
    [
        (9, [60, 50], set(), True),
        (10, [60, 50], set(), False),
        (9, [8], set(), False),
        (9, [60, 50], {"hidden.1.weight"}, False),  # only this weight is large
    ],
)
def test_an_ascent_goes_by_factors_where_that_is_less_work(
    batch_size: int, hidden: list[int], frozen: set[str], factors: bool
) -> None:
    """The ascent is computed from factors if that takes fewer products.

    The model has 4 inputs and 3 classes. With a batch size of b, the factors take
    3 b (4 + 60 + 60 + 50 + 50 + 3) products. The gradients take
    2 (4 x 60 + 60 x 50 + 50 x 3) products.
    """
    world = world_of(Sam(0.3), f"local.batch_size={batch_size}", model={**WIDE, "hidden": hidden})
    job = replace(first_jobs(world)[0], frozen=frozenset(frozen))
    assert (
        Linear(job, Net(job.start.spec, torch.device("cpu"), torch.float64)).fuses_ascent is factors
    )


class TwoLayerHead(nn.Module):
    """A chain of three layers, of which the last two are the head."""

    head_module = "head"
    linear_chain = (
        ("body.weight", "body.bias"),
        ("head.0.weight", "head.0.bias"),
        ("head.2.weight", "head.2.bias"),
    )

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.body = nn.Linear(int(np.prod(input_shape)), 9)
        self.head = nn.Sequential(nn.Linear(9, 7), nn.ReLU(), nn.Linear(7, num_classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.body(x.flatten(1))))


@pytest.mark.parametrize(("layer", "stacked"), [("penultimate", False), ("logits", True)])
def test_penultimate_features_are_the_heads_input(
    layer: Literal["penultimate", "logits"], stacked: bool
) -> None:
    model = {"_target_": "tests.engines.test_trainer_contracts.TwoLayerHead"}
    world = world_of(FedMRUR(gamma=0.5, sigma=2.0, layer=layer), model=model)
    engine = Vectorized(3, "linear")
    assert_matches_serial(engine, world, second_round_jobs(world), 1e-9)
    assert bool(engine.stacked_steps) is stacked


@dataclass(frozen=True)
class Drawn(Trainer):
    """A trainer whose term uses the task's gradient in the logits or in the features.

    The term also measures a scalar with the name `name`.
    """

    layer: Literal["penultimate", "logits"] = "penultimate"
    name: str = "drawn"

    def ascent(self, ctx: Ctx) -> Ascent:
        return Ascent(0.3)

    def feature_term(self) -> FeatureTerm:
        def of(
            z: Tensor, a: Tensor, share: float | Tensor, task_gradient: Callable[[], Tensor]
        ) -> TermValue:
            counts = share.unsqueeze(-1) if isinstance(share, Tensor) else share
            pull = (
                counts
                * (z - a)
                * torch.linalg.vector_norm(task_gradient(), dim=(-2, -1), keepdim=True)
            )
            value = (pull * z).sum((-2, -1))
            return TermValue(value, pull, {self.name: value})

        return FeatureTerm(self.layer, of)

    def loss(self, net: Net, params: Tree, buffers: Tree, batch: Batch, ctx: Ctx) -> Measured:
        seen = net.observe(params, buffers, batch.x, features=True)
        other = ctx.reference.observe(*ctx.received, batch.x, features=True)
        z, a = (
            (seen.output, other.output)
            if self.layer == "logits"
            else (seen.features, other.features)
        )
        assert z is not None and a is not None

        def task_gradient() -> Tensor:
            loss = F.cross_entropy(seen.output, batch.y)
            return torch.autograd.grad(loss, z, retain_graph=True)[0]

        value, pull, scalars = self.feature_term().of(
            z.detach(), a.detach(), 1 / len(z), task_gradient
        )
        drawn = ((z - z.detach()) * pull).sum() + value
        return Measured(F.cross_entropy(seen.output, batch.y) + drawn, scalars)


@pytest.mark.parametrize("model", [MLP, WIDE], ids=["by gradients", "by factors"])
@pytest.mark.parametrize("layer", ["penultimate", "logits"])
def test_a_term_sees_the_tasks_gradient_at_the_weights_of_its_pass(
    layer: Literal["penultimate", "logits"], model: dict
) -> None:
    world = world_of(Drawn(layer), model=model, sizes=UNEQUAL)
    engine = Vectorized(3, "linear")
    assert_matches_serial(engine, world, first_jobs(world), 1e-9)
    assert engine.stacked_steps


@pytest.mark.parametrize("engine", ["serial", "linear"])
@pytest.mark.parametrize("name", ["loss", "perturbation"])
def test_a_terms_scalar_has_a_name_of_its_own(name: str, engine: str) -> None:
    world = world_of(Drawn(name=name), model=WIDE)
    with pytest.raises(ClientError, match="must have another name"):
        list(ENGINES[engine]().map(first_jobs(world), world.data))


def test_ascents_that_differ_between_clients_run_serially() -> None:
    @dataclass(frozen=True)
    class BySize(Trainer):
        def ascent(self, ctx: Ctx) -> Ascent:
            return Ascent(1 / ctx.num_examples)

    world = world_of(BySize(), sizes=UNEQUAL)
    engine = Vectorized(3)
    said: list[str] = []
    engine.note = said.append
    assert_matches_serial(engine, world, first_jobs(world), 1e-9)
    assert any("ascents differ" in text for text in said)


# ---------------------------------------------------------------- received and previous
# models


def test_other_models_leave_training_alone() -> None:
    """With a weight of 0 the term leaves the results bit-identical.

    Two more models, which have different buffers, run in every step.
    """
    world = world_of(Trainer(), model=CONV)

    @dataclass(frozen=True)
    class OnceThrough(Trainer):
        def loss(self, net: Net, params: Tree, buffers: Tree, batch: Batch, ctx: Ctx) -> Tensor:
            return F.cross_entropy(net(params, buffers, batch.x), batch.y)

    moon = [
        replace(job, trainer=MoonLike(0.0))
        for job in second_round_jobs(world_of(MoonLike(0.0), model=CONV))
    ]
    before = [
        (dict(j.start.params), {k: v.clone() for k, v in j.start.buffers.items()}) for j in moon
    ]
    found = list(Serial().map(moon, world.data))
    plain = list(
        Serial().map([replace(job, trainer=OnceThrough(), state=None) for job in moon], world.data)
    )
    for a, b, job, (params, buffers) in zip(found, plain, moon, before, strict=True):
        assert a.metrics.pop("contrast") > 0
        assert a.metrics == b.metrics
        assert (
            all(torch.equal(job.start.buffers[k], v) for k, v in buffers.items())
            and job.start.params == params
        )
        assert a.state is not None
        for kind, tree in (("params", a.weights.params), ("buffers", a.weights.buffers)):
            assert list(a.state[kind]) == list(tree) and all(
                torch.equal(a.state[kind][k], tree[k]) for k in tree
            )
    assert_same_results([replace(result, state=None) for result in found], plain, 0)


def test_the_reference_is_the_received_model_in_evaluation_mode() -> None:
    """The reference equals the received model in evaluation mode.

    This includes its frozen parameters and its buffers. It also holds for the generator
    that the server sends.
    """

    @dataclass(frozen=True)
    class Look(Trainer):
        def finish(self, params: Tree, buffers: Tree, ctx: Ctx) -> tuple[Trees, None]:
            x = torch.linspace(-1, 1, 8, dtype=torch.float64).reshape(2, 1, 2, 2)
            return {
                "seen": {
                    "received": ctx.reference(*ctx.received, x),
                    "own": ctx.reference(params, buffers, x),
                }
            }, None

    world = world_of(Look(), "local.lr=0.5", model=CONV)
    x = torch.linspace(-1, 1, 8, dtype=torch.float64).reshape(2, 1, 2, 2)
    jobs = first_jobs(world)
    jobs = [
        replace(job, start=after.weights)
        for job, after in zip(jobs, Serial().map(jobs, world.data), strict=True)
    ]
    for engine in (Serial(), Vectorized(3)):
        for job, result in zip(jobs, engine.map(jobs, world.data), strict=True):
            for name, weights in (("received", job.start), ("own", result.weights)):
                torch.testing.assert_close(result.payload["seen"][name], weights.module()(x))


def test_a_state_begins_with_the_whole_received_model() -> None:
    world = world_of(MoonLike(), model=CONV)
    jobs = first_jobs(world)
    frozen = frozenset({"conv.bias"})
    assert all(job.state is not None and job.state["buffers"] is job.start.buffers for job in jobs)
    jobs = [replace(job, frozen=frozen) for job in jobs]
    engine = Vectorized(5)
    assert_matches_serial(engine, world, jobs, 1e-9)
    assert engine.stacked_steps


# ---------------------------------------------------------------- what a trainer knows
# and measures


def test_a_trainer_knows_the_round_everywhere() -> None:
    @dataclass(frozen=True)
    class Rounds(Trainer):
        def loss(self, net: Net, params: Tree, buffers: Tree, batch: Batch, ctx: Ctx) -> Measured:
            loss = super().loss(net, params, buffers, batch, ctx)
            assert isinstance(loss, Tensor)
            return Measured(loss, {"round": torch.zeros_like(loss) + ctx.round})

        @elementwise
        def correct(self, grad: Tree, params: Tree, ctx: Ctx) -> Tree:
            return {name: torch.full_like(value, ctx.round) for name, value in grad.items()}

    world = world_of(Rounds(), "local.epochs=null", "local.steps=1", "local.lr=0.5")
    for engine in (Serial(), Vectorized(3, "vmap")):
        for job, result in zip(
            jobs := second_round_jobs(world), engine.map(jobs, world.data), strict=True
        ):
            assert job.round == result.metrics["round"] == 1
            for name, value in result.weights.params.items():
                torch.testing.assert_close(value, job.start.params[name] - 0.5)


def test_class_counts_are_a_bincount() -> None:
    @dataclass(frozen=True)
    class Counts(Trainer):
        def finish(self, params: Tree, buffers: Tree, ctx: Ctx) -> tuple[Trees, None]:
            return {
                "facts": {"counts": ctx.class_counts, "n": torch.tensor(ctx.num_examples)}
            }, None

    world = world_of(Counts(), sizes=(7, 1, 12, 9))
    for engine in (Serial(), Vectorized(3)):
        results = engine.map(first_jobs(world), world.data)
        counts = torch.stack([result.payload["facts"]["counts"] for result in results])
        assert torch.equal(counts, torch.from_numpy(world.data.class_counts()))
    assert (counts == 0).any()


@pytest.mark.parametrize(
    "work", [("local.epochs=3",), ("local.epochs=1",), ("local.epochs=null", "local.steps=8")]
)
def test_losses_of_all_steps_and_of_the_last_epoch(work: tuple[str, ...]) -> None:
    told: list[tuple[int, int, float]] = []

    @dataclass(frozen=True)
    class Listening(Trainer):
        def grad(self, net: Net, params: Tree, buffers: Tree, batch: Batch, ctx: Ctx):
            grad, loss = super().grad(net, params, buffers, batch, ctx)
            assert isinstance(loss, Tensor)
            told.append((ctx.epoch, ctx.step, float(loss)))
            return grad, loss

    world = world_of(Listening(), *work, "local.batch_size=7", sizes=(20, 15, 9))
    jobs = first_jobs(world)
    for job in jobs:
        told.clear()
        (result,) = Serial().map([job], world.data)
        per_epoch = -(-world.data.partition.size(job.client) // 7)
        assert [(epoch, step) for epoch, step, _ in told] == [
            (i // per_epoch, i) for i in range(result.num_steps)
        ]
        last = [loss for epoch, _, loss in told if epoch == told[-1][0]]
        assert len(last) < len(told) or "local.epochs=1" in work
        assert result.metrics["loss"] == pytest.approx(
            np.mean([loss for *_, loss in told]), rel=1e-12
        )
        assert result.metrics["loss_last_epoch"] == pytest.approx(np.mean(last), rel=1e-12)
    plain = [replace(job, trainer=Trainer()) for job in jobs]
    for kernel in ("linear", "vmap"):
        assert_matches_serial(Vectorized(3, kernel), world, plain, 1e-9)  # type: ignore[arg-type]


def test_a_row_holds_the_clients_means_by_samples() -> None:
    world = world_of(MoonLike(), sizes=(20, 12, 5))
    results = trained(world, MoonLike())
    (step, *_) = run(world.aggregator, world.env, Serial(), world.data)
    sizes = [result.num_examples for result in results]
    for name in ("loss", "loss_last_epoch", "contrast"):
        expected = np.average([result.metrics[name] for result in results], weights=sizes)
        assert step.metrics[f"train/{name}"] == pytest.approx(expected, rel=1e-12)


def test_a_scalar_that_is_not_measured_in_every_step_is_refused() -> None:
    @dataclass(frozen=True)
    class Sometimes(Trainer):
        def loss(
            self, net: Net, params: Tree, buffers: Tree, batch: Batch, ctx: Ctx
        ) -> Tensor | Measured:
            loss = super().loss(net, params, buffers, batch, ctx)
            assert isinstance(loss, Tensor)
            return Measured(loss, {"rare": loss}) if ctx.step == 1 else loss

    world = world_of(Sometimes())
    for engine in (Serial(), Vectorized(3)):
        with pytest.raises(Exception, match="'rare' was measured 1 times in 6 batches"):
            list(engine.map(first_jobs(world), world.data))


@pytest.mark.parametrize("name", ["loss", "loss_last_epoch", "perturbation"])
def test_a_scalar_has_a_name_of_its_own(name: str) -> None:
    @dataclass(frozen=True)
    class Taken(Trainer):
        def loss(self, net: Net, params: Tree, buffers: Tree, batch: Batch, ctx: Ctx) -> Measured:
            loss = super().loss(net, params, buffers, batch, ctx)
            assert isinstance(loss, Tensor)
            return Measured(loss, {name: loss})

    with pytest.raises(Exception, match=f"another name than '{name}'"):
        list(Serial().map(first_jobs(world_of(Taken())), world_of(Taken()).data))


@pytest.mark.parametrize("model", [MLP, CONV], ids=["mlp", "conv"])
def test_a_loss_that_asks_late_stays_stacked(model: dict) -> None:
    """The clients stay stacked if a loss needs a value first in a later epoch.

    From the second epoch on, the loss uses class counts and noise. The interrupted
    forward pass has already moved the buffers. They must move only once.
    """

    @dataclass(frozen=True)
    class Late(Trainer):
        def loss(self, net: Net, params: Tree, buffers: Tree, batch: Batch, ctx: Ctx) -> Tensor:
            loss = super().loss(net, params, buffers, batch, ctx)
            assert isinstance(loss, Tensor)
            if not ctx.epoch:
                return loss
            return loss * (
                1
                + ctx.noise("late", (1,)).sum()
                + (ctx.class_counts / ctx.num_examples)[0].to(loss)
            )

    world = world_of(Late(), model=model)
    engine = Vectorized(3, "vmap")
    assert_matches_serial(engine, world, first_jobs(world), 1e-9)
    assert engine.stacked_steps


# ---------------------------------------------------------------- notes


def test_a_run_says_once_why_its_clients_are_not_stacked() -> None:
    from tests.engines.test_vectorized import OwnGrad

    for trainer, reason in (
        (OwnGrad(), "the trainer overrides `grad`"),
        (NoBatchingRule(), "cannot be vectorised"),
    ):
        world = world_of(trainer)
        said: list[str] = []
        engine = Vectorized(3)
        engine.note = said.append
        list(engine.map(first_jobs(world), world.data))
        assert said and all(reason in text and type(trainer).__name__ in text for text in said)
    said.clear()
    quiet = Vectorized(3)
    quiet.note = said.append
    trained = [replace(job, trained=True) for job in first_jobs(world_of(Sam()))]
    quiet.split(trained, world.data)
    # A job that only answers probes does not count as a client that trains.
    assert not said
    list(quiet.map(first_jobs(world_of(Sam())), world.data))
    assert not said
