"""Stacked training gives the serial engine's results.

The tests cover every method and every kind of network.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedexp.core import trees
from fedexp.core.errors import ClientError, FedexpError
from fedexp.core.kernel import num_steps
from fedexp.core.net import Net, same_author
from fedexp.core.runner import Snapshot, next_jobs
from fedexp.core.task import Batch
from fedexp.core.trainer import Adjustment, Ascent, Ctx, Measured, Received, Trainer, elementwise
from fedexp.core.trees import Tree, Trees
from fedexp.core.weights import ModelSpec
from fedexp.data.augment import Augment
from fedexp.engines.kernels import linear
from fedexp.engines.serial import Serial
from fedexp.engines.vectorized import Vectorized
from fedexp.models.mlp import MLP
from fedexp.tasks.classification import Classification
from tests.engines.compare import (
    about,
    assert_matches_serial,
    assert_same_results,
    distinct_methods,
    second_round_jobs,
)
from tests.engines.plugins import NoBatchingRule, StackableLater
from tests.world import CPU, World, make_data, make_world

UNEQUAL = (20, 12, 17, 9, 1, 20, 33)
EQUAL = (18,) * 5
DEEP = {"_target_": "fedexp.models.mlp.MLP", "hidden": [7, 5]}
CONV = {"_target_": "tests.core.test_kernel.Small"}  # convolution, BatchNorm, dropout


def world(
    method: str = "fedavg", *overrides: str, sizes: tuple[int, ...] = UNEQUAL, model: dict = DEEP
) -> World:
    return make_world(
        f"method={method}", "local.epochs=2", *overrides, data=make_data(sizes), model=model
    )


def in_float32(jobs: list, data):
    def cast(tree: Tree) -> Tree:
        return {k: v.float() if v.is_floating_point() else v for k, v in tree.items()}

    def casts(nest):
        return nest and {k: cast(v) for k, v in nest.items()}

    starts = {
        id(j.start): replace(j.start, params=cast(j.start.params), buffers=cast(j.start.buffers))
        for j in jobs
    }
    shared = {id(j.shared): casts(j.shared) for j in jobs}
    jobs = [
        replace(
            j, start=starts[id(j.start)], shared=shared[id(j.shared)] or {}, state=casts(j.state)
        )
        for j in jobs
    ]
    return jobs, replace(data, train=replace(data.train, dtype=torch.float32))


@pytest.mark.parametrize("sizes", [UNEQUAL, EQUAL], ids=["unequal", "equal"])
@pytest.mark.parametrize("kernel", ["linear", "vmap"])
def test_every_method(sizes: tuple[int, ...], kernel: str) -> None:
    for method in distinct_methods():
        with about(method):
            w = world(method, sizes=sizes)
            jobs = second_round_jobs(w)
            engine = Vectorized(stack=3, kernel=kernel)
            assert_matches_serial(engine, w, jobs, 1e-9)
            kind = type(w.env.trainer)
            # The linear kernel has no hand-written backward pass for such a loss.
            own_loss = not same_author(kind, "feature_term", "loss")
            assert (engine.stacked_steps > 0) is not (
                len(jobs) == 1 or (own_loss and kernel == "linear")
            )
            jobs, data = in_float32(jobs, w.data)
            stacked = list(Vectorized(stack=3, kernel=kernel).map(jobs, data))
            assert_same_results(stacked, list(Serial().map(jobs, data)), 1e-4)


@pytest.mark.parametrize(
    "overrides",
    [
        ("local.momentum=0.5",),
        ("local.clip=0.05",),
        ("local.weight_decay=0.1", "local.momentum=0.9"),
        ("local.optimizer=adam",),
        ("local.optimizer=amsgrad",),
        ("local.optimizer=rmsprop",),
        ("local.epochs=null", "local.steps=7"),
        ("local.batch_size=100",),
        ("init=different",),
    ],
    ids=lambda o: o[-1],
)
@pytest.mark.parametrize("kernel", ["linear", "vmap"])
def test_every_local_setting(overrides: tuple[str, ...], kernel: str) -> None:
    for sizes in (UNEQUAL, EQUAL):
        w = world("fedprox", *overrides, sizes=sizes)
        assert_matches_serial(Vectorized(stack=4, kernel=kernel), w, second_round_jobs(w), 1e-9)


@pytest.mark.parametrize("bias", ["true", "false"])
@pytest.mark.parametrize("hidden", [[], [6], [6, 5, 4]])
def test_every_depth_of_chain(bias: str, hidden: list[int]) -> None:
    model = {"_target_": "fedexp.models.mlp.MLP", "hidden": hidden, "bias": bias == "true"}
    w = world(model=model)
    engine = Vectorized(stack=4)
    assert_matches_serial(engine, w, second_round_jobs(w), 1e-9)
    assert engine.stacked_steps


@pytest.mark.parametrize("frozen", ["hidden.0", "output", "hidden", "bias"])
@pytest.mark.parametrize("kernel", ["linear", "vmap"])
def test_frozen_parameters(frozen: str, kernel: str) -> None:
    w = world(sizes=EQUAL)
    names = frozenset(name for name in w.env.initial_weights().params if frozen in name)
    jobs = [replace(job, frozen=names) for job in second_round_jobs(w)]
    assert names and len(names) < len(jobs[0].start.params)
    engine = Vectorized(stack=5, kernel=kernel)
    assert_matches_serial(engine, w, jobs, 1e-9)
    assert engine.stacked_steps


def test_batch_norm_and_dropout() -> None:
    """Every client has separate buffers, counters and dropout masks.

    Clients of unequal sizes are not padded, because padding would change the
    statistics.
    """
    for sizes in (EQUAL, (20, 12, 17, 9, 12, 20, 20)):
        w = world("scaffold", sizes=sizes, model=CONV)
        engine = Vectorized(stack=3)
        assert_matches_serial(engine, w, second_round_jobs(w), 1e-9)
        assert engine.stacked_steps


@pytest.mark.parametrize("kernel", ["linear", "vmap"])
def test_augmentation(kernel: str) -> None:
    w = world(sizes=EQUAL)
    w.data = replace(w.data, train=replace(w.data.train, augment=Augment(flip=0.5, crop_padding=1)))
    assert_matches_serial(Vectorized(stack=5, kernel=kernel), w, second_round_jobs(w), 1e-9)


@pytest.mark.parametrize("steps", range(1, 9))
def test_no_client_takes_a_step_it_would_not_take_alone(steps: int) -> None:
    w = world("scaffold", f"limit.steps={steps}")
    assert_matches_serial(Vectorized(stack=7), w, second_round_jobs(w), 1e-9)


@dataclass(frozen=True)
class Normed(Trainer):
    """A correction that needs the whole gradient of one client, with a client state."""

    def correct(self, grad: Tree, params: Tree, ctx: Ctx) -> Tree:
        return trees.scale(grad, 1 / (trees.norm(grad) + ctx.num_steps))

    def finish(self, params: Tree, buffers: Tree, ctx: Ctx):
        return {"moved": trees.sub(params, ctx.start)}, {"full": ctx.full_gradient(params)}


@dataclass(frozen=True)
class OwnLoss(Trainer):
    def loss(self, net: Net, params: Tree, buffers: Tree, batch: Batch, ctx: Ctx) -> Tensor:
        drift = sum(((params[name] - ctx.start[name]) ** 2).sum() for name in params)
        noise = ctx.once("mine", lambda: ctx.noise("mine", tuple(batch.x.shape)).to(batch.x))
        noisy = ctx.task.loss(net, params, buffers, Batch(batch.x + 0.1 * noise, batch.y), ctx)
        return noisy * ctx.num_steps + 0.1 * drift


@dataclass(frozen=True)
class OwnGrad(Trainer):
    def grad(self, net: Net, params: Tree, buffers: Tree, batch: Batch, ctx: Ctx):
        grad, loss = super().grad(net, params, buffers, batch, ctx)
        return trees.scale(grad, 0.5), loss


@dataclass(frozen=True)
class Overreaching(Trainer):
    """A trainer whose hook is marked as elementwise but is not elementwise."""

    @elementwise
    def correct(self, grad: Tree, params: Tree, ctx: Ctx) -> Tree:
        return trees.scale(grad, 1 / ctx.num_steps)


@dataclass(frozen=True)
class Adjusted(Trainer):
    """A trainer that uses every part of an adjustment, different for every client."""

    def init_state(self, start: Tree, received: Received):
        return {"mine": trees.scale(start, 0.1)}

    @elementwise
    def adjustment(self, ctx: Ctx) -> Adjustment:
        shift = trees.add(ctx.state["mine"], ctx.start, alpha=0.3)
        toward = trees.sub(ctx.start, ctx.state["mine"], alpha=0.4)
        return Adjustment(0.5, 0.7, toward, shift, outside=trees.scale(ctx.state["mine"], 0.2))

    def finish(self, params: Tree, buffers: Tree, ctx: Ctx):
        return {}, {"mine": trees.sub(params, ctx.start)}


@pytest.mark.parametrize(
    "overrides", [(), ("local.momentum=0.6",), ("local.clip=0.05",), ("local.optimizer=adam",)]
)
@pytest.mark.parametrize("kernel", ["linear", "linear in blocks", "vmap"])
def test_adjustments(
    overrides: tuple[str, ...], kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stacked adjustments give the serial engine's results.

    In the case "linear in blocks", a block holds two clients for each of the first two
    layers, which take 224 and 280 bytes per client.
    """
    kernel, _, in_blocks = kernel.partition(" ")
    if in_blocks:
        monkeypatch.setattr(linear, "_BLOCK_BYTES", 640)
    for sizes in (EQUAL, UNEQUAL):
        w = world("fedavg", *overrides, sizes=sizes)
        w.env = replace(w.env, trainer=Adjusted())
        engine = Vectorized(stack=4, kernel=kernel)  # type: ignore[arg-type]
        assert_matches_serial(engine, w, second_round_jobs(w), 1e-9)
        assert engine.stacked_steps


def test_an_adjustment_is_its_formula() -> None:
    """Two full-batch steps equal their formula.

    The formula is ``w -= lr (a g + b (w - c) + s)``, followed by ``w -= lr o``.
    """
    w = world("fedavg", "local.batch_size=100", "local.lr=0.1", sizes=(9,))
    w.env = replace(w.env, trainer=Adjusted())
    (job,) = next_jobs(w.aggregator, w.env, Snapshot(0, w.aggregator.init(w.env)))
    start, mine = job.start.params, (job.state or {})["mine"]
    at = start
    for _ in range(2):
        moved = replace(job, trainer=Trainer(), start=replace(job.start, params=at))
        (plain,) = Serial().map(
            [replace(moved, local_training=replace(job.local_training, max_steps=1))], w.data
        )
        gradient = trees.scale(trees.sub(at, plain.weights.params), 1 / 0.1)
        direction = {
            k: 0.5 * gradient[k]
            + 0.7 * (at[k] - start[k] + 0.4 * mine[k])
            + mine[k]
            + 0.3 * start[k]
            + 0.2 * mine[k]
            for k in at
        }
        at = trees.sub(at, direction, alpha=0.1)
    (result,) = Serial().map([job], w.data)
    assert result.num_steps == 2
    for name, value in at.items():
        torch.testing.assert_close(result.weights.params[name], value, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "trainer", [Normed(), OwnLoss(), OwnGrad()], ids=lambda t: type(t).__name__
)
@pytest.mark.parametrize("model", [DEEP, CONV], ids=["mlp", "conv"])
def test_any_trainer(trainer: Trainer, model: dict) -> None:
    for sizes in (EQUAL, (20, 12, 17, 9, 12, 20, 20)):
        w = world(sizes=sizes, model=model)
        jobs = [replace(job, trainer=trainer) for job in second_round_jobs(w)]
        engine = Vectorized(stack=3)
        assert_matches_serial(engine, w, jobs, 1e-9)
        assert (engine.stacked_steps == 0) == isinstance(trainer, OwnGrad)


@dataclass(frozen=True)
class Smooth(Classification):
    """A task with another loss that inherits the claim to be plain cross-entropy."""

    def loss(self, net: Net, params: Tree, buffers: Tree, batch: Batch, ctx: Ctx) -> Tensor:
        return F.cross_entropy(net(params, buffers, batch.x), batch.y, label_smoothing=0.5)


class TanhMLP(MLP):
    """A model with another forward pass that inherits the claim to be a ReLU chain."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.hidden:
            x = torch.tanh(layer(x.flatten(1)))
        return self.output(x)


class CosineHead(nn.Linear):
    """A layer that has the parameters of a linear layer and computes a cosine."""

    def forward(self, x: Tensor) -> Tensor:
        return 5 * F.normalize(x) @ F.normalize(self.weight).T + self.bias


class CosineMLP(MLP):
    """A model that inherits a ReLU chain and replaces one of its layers."""

    def __init__(self, **kwargs: object) -> None:
        super().__init__(**kwargs)
        self.output = CosineHead(self.output.in_features, self.output.out_features)


def test_inherited_claims_are_not_believed() -> None:
    w = world(sizes=EQUAL)
    jobs = [replace(job, task=Smooth()) for job in second_round_jobs(w)]
    assert_matches_serial(Vectorized(stack=5), w, jobs, 1e-9)
    for name in ("TanhMLP", "CosineMLP"):
        model = {"_target_": f"tests.engines.test_vectorized.{name}", "hidden": [5]}
        w = world(sizes=EQUAL, model=model)
        assert_matches_serial(Vectorized(stack=5), w, second_round_jobs(w), 1e-9)


class Scaled(MLP):
    """An MLP whose output has a learned factor, a parameter without axes."""

    def __init__(self, **kwargs: object) -> None:
        super().__init__(**kwargs)
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * super().forward(x)


def test_norms_include_parameters_without_axes() -> None:
    model = {"_target_": "tests.engines.test_vectorized.Scaled", "hidden": [5]}
    w = world("fedsam", "local.clip=0.5", sizes=EQUAL, model=model)
    engine = Vectorized(stack=5)
    assert_matches_serial(engine, w, second_round_jobs(w), 1e-9)
    assert engine.stacked_steps


@dataclass(frozen=True)
class OwnAdjustment(Trainer):
    """A trainer whose adjustment depends on facts about each client."""

    by_steps: bool = False

    def adjustment(self, ctx: Ctx) -> Adjustment:
        full = ctx.full_gradient(ctx.start)
        return Adjustment(
            pull=1 / ctx.num_steps if self.by_steps else 0.5,
            shift=trees.scale(full, 1 / trees.norm(full)),
        )


@pytest.mark.parametrize("by_steps", [False, True])
@pytest.mark.parametrize("model", [DEEP, CONV], ids=["mlp", "conv"])
def test_an_adjustment_of_each_clients_own(by_steps: bool, model: dict) -> None:
    for sizes in (EQUAL, (20, 12, 17, 9, 12, 20, 20)):
        w = world(sizes=sizes, model=model)
        jobs = [replace(job, trainer=OwnAdjustment(by_steps)) for job in second_round_jobs(w)]
        engine = Vectorized(stack=3)
        assert_matches_serial(engine, w, jobs, 1e-9)
        # Clients of different sizes are stacked by size.
        assert engine.stacked_steps


def test_clients_of_one_size_are_stacked_after_a_stack_of_different_sizes() -> None:
    engine = Vectorized(stack=3)
    for sizes, stacked in (((5, 12, 20), False), ((12, 12, 20), True)):
        w = world(sizes=sizes, model=CONV)
        jobs = [replace(job, trainer=OwnAdjustment(True)) for job in second_round_jobs(w)]
        assert_matches_serial(engine, w, jobs, 1e-9)
        assert bool(engine.stacked_steps) == stacked


@dataclass(frozen=True)
class StatePerSample(Trainer):
    """A trainer whose client state has one number per sample, which a hook reads."""

    def correct(self, grad: Tree, params: Tree, ctx: Ctx) -> Tree:
        own = ctx.state["table"]["values"].mean() if ctx.state else 1.0
        return {name: value * own for name, value in grad.items()}

    def finish(self, params: Tree, buffers: Tree, ctx: Ctx) -> tuple[Trees, Trees | None]:
        return {}, {"table": {"values": torch.arange(1.0, ctx.num_examples + 1)}}


@pytest.mark.parametrize("model", [DEEP, CONV], ids=["mlp", "conv"])
def test_client_states_of_different_shapes_are_stacked_by_size(model: dict) -> None:
    w = world(sizes=(20, 12, 17, 12, 20, 20), model=model)
    w.env = replace(w.env, trainer=StatePerSample())
    engine = Vectorized(stack=3)
    assert_matches_serial(engine, w, second_round_jobs(w), 1e-9)
    assert engine.stacked_steps


@dataclass(frozen=True)
class Unreduced(Trainer):
    """A trainer with a loss per sample, whose mean is not taken or is not a scalar."""

    form: str

    def loss(
        self, net: Net, params: Tree, buffers: Tree, batch: Batch, ctx: Ctx
    ) -> Tensor | Measured:
        losses = F.cross_entropy(net(params, buffers, batch.x), batch.y, reduction="none")
        if self.form == "measured":
            return Measured(losses.mean(), {"rows": losses.detach()})
        return losses if self.form == "rows" else losses.mean()[None]


@pytest.mark.parametrize("engine", [Serial(), Vectorized(stack=5, kernel="vmap")])
@pytest.mark.parametrize(
    ("form", "what"), [("rows", "the loss"), ("one", "the loss"), ("measured", "'rows'")]
)
def test_a_loss_that_is_no_scalar_is_refused(
    engine: Serial | Vectorized, form: str, what: str
) -> None:
    w = world(sizes=EQUAL)
    jobs = [replace(job, trainer=Unreduced(form)) for job in second_round_jobs(w)]
    with pytest.raises(FedexpError, match=f"{what} is not a scalar"):
        list(engine.map(jobs, w.data))


def test_few_results_wait_for_an_earlier_client() -> None:
    sizes = tuple(5 + i % 9 for i in range(60))
    w = world(sizes=sizes, model=CONV)
    jobs = [w.env.job(c, w.env.initial_weights(), {}) for c in range(len(sizes))]
    for stack in Vectorized(stack=2).split(jobs, w.data):
        assert max(stack) - min(stack) < 16


def test_a_hook_wrongly_marked_elementwise_does_not_pass_unnoticed() -> None:
    w = world()
    jobs = [replace(job, trainer=Overreaching()) for job in second_round_jobs(w)]
    (result, *_) = Vectorized(stack=3).map(jobs, w.data)
    assert trees.nonfinite(result.weights.params)


def test_split_is_complete_and_keeps_unlike_jobs_apart() -> None:
    w = world()
    jobs = second_round_jobs(w)
    jobs[2] = replace(jobs[2], local_training=replace(jobs[2].local_training, lr=0.5))
    stacks = Vectorized(stack=3).split(jobs, w.data)
    assert sorted(i for stack in stacks for i in stack) == list(range(len(jobs)))
    assert [2] in stacks and max(map(len, stacks)) == 3
    assert_matches_serial(Vectorized(stack=3), w, jobs, 1e-9)


def test_out_of_memory_halves_the_stack_and_trains_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from fedexp.engines import vectorized

    w = world(sizes=EQUAL)
    jobs = second_round_jobs(w)
    original: Callable = vectorized.train_stack
    tried: list[int] = []

    def small_device(jobs, *rest):
        tried.append(len(jobs))
        if len(jobs) > 2:
            raise torch.cuda.OutOfMemoryError("simulated")
        return original(jobs, *rest)

    monkeypatch.setattr(vectorized, "train_stack", small_device)
    engine, notes = Vectorized(stack=5), []
    engine.note = notes.append
    assert_matches_serial(engine, w, jobs, 1e-9)
    assert tried == [5, 2, 1, 2]
    assert ["stack 5 clients, so at most 2" in note for note in notes] == [True]


@dataclass(frozen=True)
class Changing(Trainer):
    """A trainer that changes the model that all clients received."""

    def finish(self, params: Tree, buffers: Tree, ctx: Ctx) -> tuple[Trees, Trees | None]:
        next(iter(ctx.received.params.values())).add_(1)
        return {}, None


@pytest.mark.parametrize("kernel", ["linear", "vmap"])
def test_a_hook_that_changes_what_clients_share_is_refused(kernel: str) -> None:
    w = world(sizes=EQUAL)
    jobs = [replace(job, trainer=Changing()) for job in second_round_jobs(w)]
    with pytest.raises(ClientError, match="Changing changed a tensor of ctx in place"):
        list(Vectorized(stack=5, kernel=kernel).map(jobs, w.data))


def test_errors_name_the_clients() -> None:
    w = world(sizes=(8, 0, 5))
    jobs = [w.env.job(c, w.env.initial_weights(), {}) for c in range(3)]
    with pytest.raises(ClientError, match="client 1 cannot take a step"):
        list(Vectorized(stack=3).map(jobs, w.data))
    with pytest.raises(ClientError, match="clients 0, 2 failed"):
        bad = replace(w.data, train=replace(w.data.train, y=w.data.train.y + 5))
        list(Vectorized(stack=2).map([jobs[0], jobs[2]], bad))


@dataclass(frozen=True)
class ByExamples(Trainer):
    """A trainer whose loss reads a number of the client from the second epoch on."""

    number: str = "num_examples"

    def loss(self, net: Net, params: Tree, buffers: Tree, batch: Batch, ctx: Ctx) -> Tensor:
        loss = ctx.task.loss(net, params, buffers, batch, ctx)
        return loss * (1 + 1 / getattr(ctx, self.number)) if ctx.epoch else loss


def share_stacked(
    sizes: Sequence[int], b: int, epochs: int, alike: Callable[[int, int], int] = lambda n, per: 0
) -> float:
    """Return the share of steps that clients take together in one stack.

    `alike` returns what stacked clients must have in common, from a client's number of
    samples and its number of steps per epoch.
    """
    steps = Counter(
        (step, step // per, min(b, n - step % per * b), alike(n, per))
        for n, per in ((n, -(-n // b)) for n in sizes)
        for step in range(epochs * per)
    )
    return sum(k for k in steps.values() if k > 1) / steps.total()


WIDE = (71, 328, 96, 128, 71, 200, 96, 111, 64, 328)


@pytest.mark.parametrize(
    ("method", "overrides", "model"),
    [
        ("scaffold", (), CONV),
        ("fedavg", (), CONV),
        ("fedavg", ("local.momentum=0.9",), CONV),
        # Adam would enlarge the rounding errors of a bias before BatchNorm, whose
        # gradient is 0.
        ("fedavg", ("local.optimizer=adam",), DEEP),
        ("fedsam", (), CONV),
        ("ldam", (), DEEP),
        ("fedgen", (), DEEP),
        ("moon", (), DEEP),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_clients_of_different_sizes_train_as_alone(
    method: str, overrides: tuple[str, ...], model: dict
) -> None:
    w = world(method, "local.batch_size=32", *overrides, sizes=WIDE, model=model)
    jobs = second_round_jobs(w)
    engine = Vectorized(stack=len(jobs), kernel="vmap")
    assert_matches_serial(engine, w, jobs, 1e-12)
    share = engine.stacked_steps / sum(num_steps(job, w.data) for job in jobs)
    assert share == share_stacked(WIDE, 32, 2) > 0.3


def test_deferred_reweighting_groups_by_the_number_of_steps() -> None:
    w = world("ldam", "local.batch_size=32", "trainer.drw=0.5", sizes=WIDE)
    jobs = second_round_jobs(w)
    engine = Vectorized(stack=len(jobs), kernel="vmap")
    assert_matches_serial(engine, w, jobs, 1e-12)
    share = engine.stacked_steps / sum(num_steps(job, w.data) for job in jobs)
    assert share == share_stacked(WIDE, 32, 2, lambda n, per: per) < share_stacked(WIDE, 32, 2)


@pytest.mark.parametrize("number", ["num_examples", "num_steps"])
@pytest.mark.parametrize("uphill", [False, True])
def test_a_loss_that_reads_a_clients_number_is_stacked_with_its_like(
    number: str, uphill: bool
) -> None:
    kind = type("Climbs", (ByExamples,), {"ascent": lambda self, ctx: Ascent(0.05)})
    trainer = (kind if uphill else ByExamples)(number)
    w = world("fedavg", "local.batch_size=32", sizes=WIDE, model=CONV)
    jobs = [replace(job, trainer=trainer) for job in second_round_jobs(w)]
    engine = Vectorized(stack=len(jobs))
    assert_matches_serial(engine, w, jobs, 1e-12)
    by_size = share_stacked(WIDE, 32, 2, lambda n, per: n)
    share = engine.stacked_steps / sum(num_steps(job, w.data) for job in jobs)
    # Stacked clients must have equal numbers only from the second epoch on.
    assert by_size < share < share_stacked(WIDE, 32, 2)


def test_a_user_module_without_linear_chain_is_stacked_by_vmap() -> None:
    spec = ModelSpec(
        "tests.engines.test_vectorized.Plain", (("input_shape", (1, 2, 2)), ("num_classes", 3))
    )
    assert Net(spec, CPU, torch.float64).linear_chain == ()
    w = world(sizes=EQUAL, model={"_target_": "tests.engines.test_vectorized.Plain"})
    engine = Vectorized(stack=5)
    assert_matches_serial(engine, w, second_round_jobs(w), 1e-9)
    assert engine.stacked_steps


class Plain(nn.Module):
    def __init__(self, *, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.fc = nn.Linear(4, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.fc(x.flatten(1)))


def test_a_loss_that_cannot_be_vectorised_runs_serially() -> None:
    w = world(sizes=EQUAL)
    jobs = [replace(job, trainer=NoBatchingRule()) for job in second_round_jobs(w)]
    engine = Vectorized(stack=5)
    assert_matches_serial(engine, w, jobs, 0)
    assert engine.stacked_steps == 0


def test_a_stack_does_not_depend_on_stacks_that_failed_before() -> None:
    """An engine that was restored before the round computes the same bits."""
    w = world()
    later = [replace(job, trainer=StackableLater()) for job in second_round_jobs(w)]
    engine, restored = Vectorized(stack=3, kernel="vmap"), Vectorized(stack=3, kernel="vmap")
    list(engine.map([replace(job, round=0) for job in later], w.data))
    assert engine.stacked_steps == 0
    results = [list(one.map(later, w.data)) for one in (engine, restored)]
    assert engine.stacked_steps == restored.stacked_steps > 0
    assert_same_results(*results, 0.0)
