"""Tests of DENSE.

They cover an independent loop, stored values, profiles, rounds, refused configurations
and learning.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedexp.config.compose import compose
from fedexp.core import trees
from fedexp.core.data import FederatedData, Partition, Samples
from fedexp.core.env import Specs
from fedexp.core.errors import ConfigError, FedexpError
from fedexp.core.jobs import ClientResult
from fedexp.core.net import Net
from fedexp.core.runner import run
from fedexp.core.seeds import seed_of, torch_generator
from fedexp.core.weights import ModelSpec, Weights
from fedexp.distillation import synthesis
from fedexp.distillation.bank import samples_of
from fedexp.distillation.ensemble import TeacherEnsemble
from fedexp.distillation.generator import generator_spec
from fedexp.distillation.student import answers
from fedexp.distillation.views import View
from fedexp.engines.serial import Serial
from fedexp.evaluation.evaluate import Evaluator
from fedexp.methods.bases import data_free, generating
from fedexp.methods.bases.data_free import DataFreeState
from fedexp.methods.dense import Dense
from fedexp.running import execute as running
from fedexp.running.execute import execute
from fedexp.running.experiment import Experiment
from fedexp.server_training.optimizers import cosine
from fedexp.storage.files import read_jsonl
from fedexp.storage.run_folder import trace_rows
from tests.fork_server import Forked
from tests.methods.distilled_world import (
    CNN,
    SIZES,
    assert_student,
    divergence,
    fresh_student,
    labels,
    modules_of,
    normal,
    normalised,
    one_pass,
    same,
    small_world,
    states,
)
from tests.world import CPU, MLP, make_data, make_world

TINY = ("aggregator.T_G=3", "aggregator.nz=4", "aggregator.ngf=3", "aggregator.lr_generator=0.05")
GENERATOR = generator_spec((1, 4, 4), 4, 3)


def test_dense_epochs_equal_a_torch_loop() -> None:
    """Three epochs give the same student as a loop that is written with torch.

    The loop uses torch's modules, hooks and optimizers.
    """
    world = small_world(
        "dense", *TINY, "aggregator.lambda_1=0.3", "aggregator.lambda_2=2.0", "aggregator.tau=4"
    )
    after, rows = states(world)
    modules, found = modules_of(after[0])
    teachers = lambda x: torch.stack([module(x) for module in modules]).mean(0)  # noqa: E731
    student, bank = fresh_student(world), []
    slow = torch.optim.SGD(student.parameters(), lr=0.01, momentum=0.9)
    for epoch in (1, 2, 3):
        generator = (
            Weights.init(GENERATOR, seed_of(0, "generator", 0, epoch), CPU, torch.float64)
            .module()
            .train()
        )
        z, y = normal("z", epoch, 6, 4).requires_grad_(), labels(world, epoch)
        fast = torch.optim.Adam([*generator.parameters(), z], lr=0.05, betas=(0.5, 0.999))
        student.eval()
        best = kept = None
        for _ in range(3):
            images = generator(z)
            found.clear()
            d = teachers(normalised(images))
            s = student(normalised(images))
            ce, bn = nn.functional.cross_entropy(d, y), sum(found) / 3
            div = -(divergence(d, s, 1.0) * (d.argmax(1) != s.argmax(1))).sum() / 6
            loss = ce + 0.3 * bn + 2 * div
            if best is None or loss < best[0]:
                best, kept = (loss, ce, bn, div), images.detach().clone()
            fast.zero_grad()
            loss.backward()
            fast.step()
        bank.append((kept * 255).round() / 255)
        logged = [rows[epoch][f"synthesis/{name}"] for name in ("loss", "ce", "bn", "div")]
        assert logged == pytest.approx([float(value.detach()) for value in best], rel=1e-8)
        one_pass(student, slow, bank, teachers, 4.0, epoch)
        assert_student(student, world, after[epoch])
    stored = torch.cat([batch["x"] for batch in after[-1]["own"]["bank"]]) / 255.0
    torch.testing.assert_close(stored, torch.cat(bank).float())


def test_algorithm_1_keeps_its_generator_and_takes_one_step_an_epoch() -> None:
    """Algorithm 1 keeps one generator with its optimizer, and z does not change.

    The student takes one step per epoch. Its images are those after the generator's
    last step. B does not matter.
    """
    world = small_world(
        "dense_paper_literal", *TINY, "aggregator.lambda_1=0", "aggregator.lambda_2=0"
    )
    after, rows = states(world)
    modules = [kept.load().module() for kept in after[0]["teachers"]]
    teachers = lambda x: torch.stack([module(x) for module in modules]).mean(0)  # noqa: E731
    student = fresh_student(world)
    slow = torch.optim.SGD(student.parameters(), lr=0.01, momentum=0.9)
    generator = (
        Weights.init(GENERATOR, seed_of(0, "generator"), CPU, torch.float64).module().train()
    )
    fast = torch.optim.Adam(generator.parameters(), lr=0.05, betas=(0.5, 0.999))
    for epoch in (1, 2, 3):
        z, y = normal("z", epoch, 6, 4), labels(world, epoch)
        for _ in range(3):
            fast.zero_grad()
            nn.functional.cross_entropy(teachers(normalised(generator(z))), y).backward()
            fast.step()
        x = normalised(generator(z).detach())
        student.train()
        slow.zero_grad()
        divergence(teachers(x).detach(), student(x), 1.0).mean().backward()
        slow.step()
        assert_student(student, world, after[epoch])
    assert [row["distillation/steps"] for row in rows[1:]] == [1, 1, 1] and "bank" not in after[-1][
        "own"
    ]


def test_the_bank_grows_by_a_batch_an_epoch_and_the_student_passes_over_all() -> None:
    world = small_world("dense", *TINY, "aggregator.b=5", "aggregator.B=4")
    after, rows = states(world)
    assert [row["bank"] for row in rows[1:]] == [5, 10, 15]
    # The fifth of the five images does not form a batch.
    assert [row["distillation/steps"] for row in rows[1:]] == [1, 3, 4]
    for before, now in itertools.pairwise(after[1:]):
        old, new = before["own"]["bank"], now["own"]["bank"]
        assert len(new) == len(old) + 1
        assert all(torch.equal(a["x"], b["x"]) for a, b in zip(old, new, strict=False))
        assert not torch.equal(old[-1]["x"], new[-1]["x"])
    assert [len(state["teachers"]) for state in after] == [3, 3, 3, 0]


@pytest.mark.parametrize("method", ["dense", "fed_adi"])
@pytest.mark.parametrize("views", ["clients", "authors"])
def test_teachers_see_an_image_once_unless_distillation_augments(
    method: str, views: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Teachers see an image once per round unless distillation augments images.

    The next round has other teachers, which see all stored images.
    """
    rounds = [
        "rounds=2",
        "aggregator.T=2",
        "aggregator.keep_bank=true",
        f"aggregator.views={views}",
    ]
    world = small_world(method, *(TINY if method == "dense" else ["aggregator.N_inv=2"]), *rounds)
    seen: list[int] = []
    call = TeacherEnsemble.__call__
    monkeypatch.setattr(
        TeacherEnsemble, "__call__", lambda self, x: (seen.append(len(x)), call(self, x))[1]
    )
    after, _ = states(world)
    assert sum(seen) == (6 + 6 + 18 + 6 if views == "clients" else 6 + 12 + 18 + 24)
    for begun, ended in ((after[0], after[2]), (after[3], after[5])):
        assert ("logits" in ended["own"]) == (views == "clients")
        ensemble = TeacherEnsemble([kept.load() for kept in begun["teachers"]])
        for batch, logits in zip(
            ended["own"]["bank"], ended["own"].get("logits", []), strict=False
        ):
            torch.testing.assert_close(
                call(ensemble, normalised(batch["x"].double() / 255)), logits
            )
    assert len(after[5]["own"]["bank"]) == 4


def epoch_of(
    world: Any, state: dict[str, Any], *, student: Weights | None = None, **changes: Any
) -> Any:
    """Return the result of `Dense.synthesise` in the second epoch."""
    aggregator, env = replace(world.aggregator, **changes), world.env.at(0, 2)
    ensemble = TeacherEnsemble([kept.load() for kept in state["teachers"]])
    return aggregator.synthesise(
        aggregator.labels(env), student or state["student"], ensemble, state["own"], env
    )


def test_synthesis_leaves_networks_alone_and_sees_the_student_through_one_term() -> None:
    world = small_world("dense", *TINY)
    state = states(world)[0][1]
    student, teachers = state["student"], [kept.load() for kept in state["teachers"]]
    kept = [
        Weights(w.spec, trees.clone(w.params), trees.clone(w.buffers)) for w in (student, *teachers)
    ]
    full = epoch_of(world, state)
    assert all(same(a, b) for a, b in zip((student, *teachers), kept, strict=True))
    other = Weights(student.spec, trees.scale(student.params, -3.0), student.buffers)
    assert not torch.equal(epoch_of(world, state, student=other)[0], full[0])
    blind = [epoch_of(world, state, student=one, lambda_2=0.0) for one in (student, other)]
    assert torch.equal(blind[0][0], blind[1][0]) and blind[0][1] == blind[1][1]
    # The student's steps leave them unchanged too.
    world.aggregator.update(state, [], world.env.at(0, 2))
    assert all(same(a, b) for a, b in zip((student, *teachers), kept, strict=True))
    assert "synthesis/div" in full[1] and "synthesis/div" not in blind[0][1]
    assert not torch.equal(epoch_of(world, state, lambda_1=0.0)[0], full[0])


def test_without_batch_norm_its_term_changes_nothing() -> None:
    world = small_world("dense", *TINY, model=MLP)
    state = states(world)[0][1]
    full, without = epoch_of(world, state), epoch_of(world, state, lambda_1=0.0)
    assert (
        torch.equal(full[0], without[0]) and full[1] == without[1] and full[1]["synthesis/bn"] == 0
    )


def test_the_noise_of_the_generator_is_not_clipped(monkeypatch: pytest.MonkeyPatch) -> None:
    world = small_world("dense", *TINY)
    state = states(world)[0][1]
    unclipped: list[set[str]] = []
    whole = synthesis.synthesise

    def watched(*args: Any, **named: Any) -> synthesis.Synthesis:
        unclipped.append(named["unclipped"])
        return whole(*args, **named)

    monkeypatch.setattr(generating, "synthesise", watched)
    epoch_of(world, state)
    assert unclipped == [{"z"}]


def test_the_kept_images_are_those_of_the_lowest_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stored images are those with the lowest loss.

    The loss is that of the augmented images. The stored images are not augmented. The
    steps are so long that the last one is not the best.
    """
    world = small_world("dense", *TINY, "aggregator.T_G=6", "aggregator.lr_generator=3.0")
    state = states(world)[0][1]
    made: list[synthesis.Synthesis] = []
    whole = synthesis.synthesise
    monkeypatch.setattr(
        generating,
        "synthesise",
        lambda *args, **named: (made.append(whole(*args, **named)), made[-1])[1],
    )
    images, metrics, _ = epoch_of(world, state, synthesis_views="crop_flip")
    losses = [row["loss"] for row in made[0].terms]
    best = losses.index(min(losses))
    assert 0 < best < 5 and losses[best] < min(losses[0], losses[-1])
    aggregator = replace(world.aggregator, synthesis_views="crop_flip")
    env, ensemble = world.env.at(0, 2), TeacherEnsemble([kept.load() for kept in state["teachers"]])
    view = View.of("crop_flip", env, "synthesis")
    answer = answers(state["student"])
    terms_of = partial(aggregator.terms, aggregator.labels(env), answer, ensemble, view)
    again = float(terms_of(images, best)["loss"])
    assert (
        again == pytest.approx(losses[best], rel=1e-12)
        and metrics["synthesis/loss"] == losses[best]
    )
    assert float(terms_of(images, (best + 1) % 6)["loss"]) != pytest.approx(losses[best], rel=1e-6)


def test_a_loss_that_is_not_finite_ends_the_run() -> None:
    world = small_world("dense", *TINY)
    state = states(world)[0][1]
    broken = Weights(
        state["student"].spec,
        trees.scale(state["student"].params, float("nan")),
        state["student"].buffers,
    )
    with pytest.raises(FedexpError, match="is not finite in step"):
        epoch_of(world, state, student=broken)


@pytest.mark.parametrize(
    ("method", "keys"), [("dense", TINY), ("fed_adi", ("aggregator.N_inv=2",))]
)
def test_dense_diverged_before_first_step_does_not_blame_step_size(
    method: str, keys: tuple[str, ...]
) -> None:
    """The error for clients whose outputs are not finite names the clients' step size.

    It does not blame the server's step size. The weights of these clients are finite.
    """
    world = small_world(method, *keys)
    models = [Weights.init(world.env.server_spec, k, CPU, torch.float64) for k in range(2)]
    huge = [Weights(m.spec, trees.scale(m.params, 1e300), m.buffers) for m in models]
    results = [ClientResult(c, m, 9, 1, {}, None, {}) for c, m in enumerate(huge)]
    state, _ = world.aggregator.update(world.aggregator.init(world.env), results, world.env)
    with pytest.raises(FedexpError, match="not finite in step 1 of") as raised:
        world.aggregator.update(state, [], world.env.at(0, 1))
    assert "lower local.lr (clients)" in str(raised.value)


@pytest.mark.parametrize(("method", "keys", "remedy"), [
    ("dense", (*TINY, "aggregator.lr_student=1e300"), "aggregator.lr_student"),
    ("co_boosting", (*TINY, "aggregator.lr_student=1e300"), "aggregator.lr_student"),
    ("fed_adi", ("aggregator.N_inv=2", "aggregator.lr_student=1e300"), "aggregator.lr_student"),
    ("fed_adi", ("aggregator.N_inv=2", "aggregator.w_2=1e308"), "aggregator.lr_student, or the coefficients of the loss"),
    ("dense", (*TINY, "aggregator.lr_generator=1e300"), "lr_generator, or bound gradients with aggregator.generator.clip"),
    ("fed_dafl", (*TINY[1:3], "aggregator.iterations=4", "aggregator.lr_generator=1e300"), "lr_generator or lr_student"),
])  # fmt: skip
def test_dense_with_diverging_training_names_its_step_size_key(
    method: str, keys: tuple[str, ...], remedy: str
) -> None:
    with pytest.raises(FedexpError, match="is not finite in") as raised:
        states(small_world(method, *keys))
    assert remedy in str(raised.value)


# The columns are the paper, the README, Algorithm 1 and Co-Boosting's code. Each has the
# name of the method and the values that differ from the first column.
COLUMNS = {
    "dense": {
        "variant": "bank", "T": 200, "T_G": 30, "b": 128, "B": 128, "lr_generator": 1e-3, "nz": 256, "lambda_1": 1,
        "lambda_2": 0.5,
        "tau_d": 1, "tau": 20, "lr_student": 0.01, "schedule": "constant", "generator": {"betas": [0.5, 0.999], "clip": None},
        "student": {"momentum": 0.9, "weight_decay": 0, "clip": None}, "student_start": "previous", "mask": "disagree",
        "synthesis_views": "clients", "views": "clients", "rounding": "round",
    },
    "dense_authors_readme": {
        "b": 256, "B": 256, "lambda_2": 1, "lr_student": 0.005, "synthesis_views": "crop_flip", "views": "authors",
        "rounding": "floor",
    },
    "dense_paper_literal": {"variant": "paper_literal", "tau": 1, "synthesis_views": "none", "views": "none"},
    "dense_coboost": {
        "lambda_1": 0, "lambda_2": 1, "tau_d": 3, "tau": 4, "schedule": "cosine",
        "generator": {"betas": [0.5, 0.999], "clip": 10}, "student": {"momentum": 0.9, "weight_decay": 1e-4, "clip": 10},
        "synthesis_views": "none",
    },
}  # fmt: skip


@pytest.mark.parametrize("method", COLUMNS)
def test_a_profile_is_its_column(method: str) -> None:
    node = compose([f"method={method}"])["aggregator"]
    for key, value in {**COLUMNS["dense"], **COLUMNS[method]}.items():
        found = {name: node[key][name] for name in value} if isinstance(value, dict) else node[key]
        assert found == value, key


def test_dense_rounds_start_from_the_configured_student() -> None:
    for start in ("previous", "fresh", "fedavg"):
        world = small_world(
            "dense", *TINY, "rounds=2", "aggregator.T=1", f"aggregator.student_start={start}"
        )
        after, rows = states(world)
        assert [state["round"] for state in after] == [0, 1, 1, 2] and len(rows) == 4
        first, begun = after[1], after[2]
        jobs = world.aggregator.plan(first, world.env.at(1, 0))
        assert jobs and all(same(job.start, first["student"]) for job in jobs)
        teachers = [kept.load() for kept in begun["teachers"]]
        means = {
            name: torch.stack([w.params[name] for w in teachers]).mean(0)
            for name in teachers[0].params
        }
        fresh = Weights.init(world.env.server_spec, seed_of(0, "student", 1), CPU, torch.float64)
        expected = {"previous": first["student"].params, "fresh": fresh.params, "fedavg": means}[
            start
        ]
        for name, value in begun["student"].params.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-12)
    for keep, sizes in (("true", [6, 12]), ("false", [6, 6])):
        world = small_world(
            "dense", *TINY, "rounds=2", "aggregator.T=1", f"aggregator.keep_bank={keep}"
        )
        assert [row["bank"] for row in states(world)[1] if "bank" in row] == sizes
    after, _ = states(small_world("dense_paper_literal", *TINY, "rounds=2", "aggregator.T=1"))
    assert same(after[2]["own"]["generator"], after[1]["own"]["generator"])


def test_the_step_size_follows_half_a_cosine_over_the_epochs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[float] = []
    distil = data_free.distil
    monkeypatch.setattr(data_free, "distil", lambda *args: (seen.append(args[4]), distil(*args))[1])
    states(small_world("dense", *TINY, "aggregator.schedule=cosine"))
    assert seen == [cosine(0.01, epoch, 3) for epoch in range(3)] and seen[0] == 0.01 > seen[2] > 0


@pytest.mark.parametrize("chosen", [True, False])
def test_how_teachers_run_is_chosen_once_and_kept(
    chosen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The choice of how teachers run is made once and stored.

    A run that is resumed from any step keeps the choice. The student agrees up to the
    last bits.
    """
    world = small_world("dense", *TINY, "rounds=2", "aggregator.T=1")
    expected, rows = states(world)
    assert [row.get("teachers/stacked") for row in rows] == [0, None, 0, None]
    asked, built = list[bool](), list[bool]()
    build = data_free.TeacherEnsemble
    monkeypatch.setattr(data_free, "stacks", lambda *args: asked.pop())
    monkeypatch.setattr(
        data_free,
        "TeacherEnsemble",
        lambda *args, **how: (built.append(how["stacked"]), build(*args, **how))[1],
    )
    students = []
    for killed in (1, 3, 4):
        asked.append(chosen)
        begun = list(
            itertools.islice(run(world.aggregator, world.env, Serial(), world.data), killed)
        )
        students.append(world.run(begun[-1].after).state["student"])
        assert not asked and set(built) == {chosen}
    for student in students:
        assert same(student, students[0])
    for name, value in students[0].params.items():
        torch.testing.assert_close(
            value, expected[-1]["student"].params[name], rtol=1e-9, atol=1e-11
        )


@pytest.mark.parametrize(
    "method", ["dense", "dense_paper_literal", "fed_dafl", "fed_adi", "co_boosting"]
)
def test_in_bfloat16_it_learns_nearly_the_same(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only teachers and generator use bfloat16. The student's passes are exact.

    If bfloat16 is switched off, autocast is never entered.
    """
    keys = ["dtype=float32", "aggregator.T=1"]
    keys += {
        "fed_adi": ["aggregator.N_inv=2"],
        "fed_dafl": [*TINY[1:3], "aggregator.iterations=2"],
    }.get(method, TINY[:3])
    data = make_data(SIZES, images=True)
    data = replace(
        data,
        train=replace(data.train, dtype=torch.float32),
        test=replace(data.test, dtype=torch.float32),
    )
    bf16, exact = (
        small_world(method, *keys, f"aggregator.precision={precision}", data=data)
        for precision in ("bf16", "float32")
    )
    found: list[str] = []
    run_module = Net._run

    def witnessed(self: Net, module: nn.Module, *args: Any) -> torch.Tensor:
        def hook(layer: nn.Module, args: Any, output: torch.Tensor) -> None:
            if output.dtype == torch.bfloat16:
                found.append(type(self._module).__name__ + " training" * self._module.training)

        handles = [
            part.register_forward_hook(hook)
            for part in module.modules()
            if isinstance(part, nn.Conv2d)
        ]
        try:
            return run_module(self, module, *args)
        finally:
            for handle in handles:
                handle.remove()

    monkeypatch.setattr(Net, "_run", witnessed)
    near, rows = states(bf16)
    assert set(found) == {"ConvNet"} | ({"Generator training"} if method != "fed_adi" else set())
    monkeypatch.setattr(torch, "autocast", lambda *args: pytest.fail("autocast"))
    after, _ = states(exact)
    assert all(np.isfinite(value) for row in rows for value in row.values())
    for name, value in after[-1]["student"].params.items():
        rounded = near[-1]["student"].params[name]
        assert rounded.dtype == torch.float32
        torch.testing.assert_close(rounded, value, rtol=0.05, atol=0.02)
    assert not same(near[-1]["student"], after[-1]["student"])


@pytest.mark.parametrize("optimizer", ["Sgd", "Adam"])
def test_every_round_starts_with_an_empty_optimizer_of_the_student(optimizer: str) -> None:
    target = f"aggregator.student._target_=fedexp.server_training.optimizers.{optimizer}"
    keys = [f"~aggregator.student.{key}" for key in ("momentum", "nesterov")]
    chosen = [target, *keys] if optimizer == "Adam" else []
    world = small_world("dense", *TINY, "rounds=2", "aggregator.T=1", *chosen)
    after, _ = states(world)

    def moments(state: DataFreeState) -> list[float]:
        trees_of = [value for value in state["optimizer"].values() if isinstance(value, dict)]
        return [float(value.abs().sum()) for tree in trees_of for value in tree.values()]

    trained, begun = after[1], after[2]
    assert trained["round"] == 1 and any(moments(trained))
    assert begun["epoch"] == 1 and moments(begun) and not any(moments(begun))
    assert begun["optimizer"].get("t", 0) == 0


def test_dense_with_empty_cohort_keeps_its_state() -> None:
    world = small_world("dense", *TINY)
    begun = world.aggregator.init(world.env)
    state, metrics = world.aggregator.update(begun, [], world.env)
    assert metrics == {"clients": 0} and world.aggregator.position(state, 1) == (1, 0)
    assert same(state["student"], begun["student"])


def test_student_has_the_banks_statistics_after_the_last_epoch_only() -> None:
    """The student gets the statistics of the image bank only after the last epoch.

    They equal those of torch's `update_bn` if all batches have the same size.
    """
    expected, _ = states(small_world("dense", *TINY, "aggregator.B=6"))
    world = small_world("dense", *TINY, "aggregator.B=6", "aggregator.reestimate_batch_norm=true")
    found, _ = states(world)
    for one, other in zip(found[:-1], expected[:-1], strict=True):
        assert same(one["student"], other["student"])

    module = expected[-1]["student"].module()
    samples = samples_of(found[-1]["own"]["bank"], world.env.domain)
    order = torch.randperm(18, generator=torch_generator(0, "statistics", 0))
    torch.optim.swa_utils.update_bn([samples.inputs(at) for at in order.split(6)], module)
    student = found[-1]["student"]
    statistics = {k: v for k, v in module.state_dict().items() if "running" in k}
    assert statistics
    for name, value in statistics.items():
        torch.testing.assert_close(student.buffers[name], value, rtol=1e-9, atol=1e-12)
        assert not torch.allclose(value, expected[-1]["student"].buffers[name], rtol=1e-3)
    for name, value in student.params.items():
        assert torch.equal(value, expected[-1]["student"].params[name])


class Tall(nn.Module):
    """A network that returns logits of four classes for any number of classes."""

    def __init__(self, *, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.output = nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output(x.flatten(1))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["aggregator.T=0"], "T must be positive"),
        (["task=cvae", "model=cvae"], "compares logits of classes"),
        (["+architectures.models.tall={_target_: tests.methods.test_dense.Tall}", "architectures.clients=[tall]", "rounds=1"],
         "output does not fit"),
        (["aggregator.teachers=stacked", "aggregator.precision=bf16"], "does not support precision=bf16"),
        (["aggregator.precision=bf16", "dtype=float64"], "changes only float32"),
        (["aggregator.variant=paper_literal", "aggregator.reestimate_batch_norm=true"],
         "reestimate_batch_norm has no effect with variant=paper_literal"),
        (["aggregator.b=1"], "b must be at least 2"),
        (["aggregator.B=1"], "B must be at least 2"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_in_words(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Experiment.of(compose(["method=dense", "partition=iid", *overrides]))


def test_worlds_that_cannot_work_are_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigError, match="cannot make samples of this shape"):
        Dense().check(ModelSpec.of(MLP, (1, 6, 6), 3), (1, 6, 6))
    config = compose(["method=dense", "partition=iid"])
    mine = {"_target_": "tests.data.test_datasets.Mine", "points": 8, "shape": [1, 8, 8]}
    with pytest.raises(ConfigError, match="no range of pixels") as told:
        Experiment.of(config.with_values(dataset=mine))
    assert told.value.facts["got"] == "data set 'mine', floating-point samples"
    with pytest.raises(ConfigError, match="no range of pixels"):
        Experiment.of(compose(["method=dense", "dataset=cifar10", "model=resnet18_features"]))
    for overrides, words in (
        (["rounds=1", "aggregator.student_start=fedavg"], "must have one architecture"),
        (["rounds=2"], "starts clients from the server's model in the second round"),
    ):
        with pytest.raises(ConfigError, match=words):
            Experiment.of(
                compose(["method=dense", "architectures.clients=[mlp,cnn_mnist]", *overrides])
            )


class Choosy(nn.Module):
    """A network whose computation depends on the values of its logits."""

    def __init__(self, *, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.output = nn.Linear(16, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.output(x.flatten(1))
        return logits if logits.sum() > 0 else -logits


def test_how_teachers_cannot_run_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    aggregator, env = Dense(), small_world("dense").env
    mixed = replace(
        env, specs=Specs(env.server_spec, (ModelSpec.of(MLP, (1, 4, 4), 3), env.server_spec))
    )
    together = replace(aggregator, teachers="stacked")
    with pytest.raises(ConfigError, match="cannot be stacked: they differ in architecture"):
        together.init(mixed)
    # All architectures agree except that of the server.
    together.init(replace(mixed, specs=Specs(env.server_spec, (ModelSpec.of(MLP, (1, 4, 4), 3),))))
    choosy = ModelSpec.of({"_target_": "tests.methods.test_dense.Choosy"}, (1, 4, 4), 3)
    with pytest.raises(ConfigError, match="cannot be stacked: "):
        together.init(replace(env, specs=Specs(choosy)))
    rounded = replace(aggregator, precision="bf16")
    single = replace(env, dtype=torch.float32)
    rounded.init(single)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **how: False)
    with pytest.raises(ConfigError, match="cuda does not support it"):
        rounded.init(replace(single, device=torch.device("cuda")))


def _killed(config: dict[str, Any], place: str, name: str, call: int) -> None:
    """Run in a separate process that kills itself.

    It is killed in call number `call` (counted from 0) of a function that the module
    `place` uses.
    """
    count, module = iter(range(100)), import_module(place)
    whole = getattr(module, name)

    def dying(*args: Any) -> Any:
        if next(count) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(*args)

    setattr(module, name, dying)
    execute(config, say=None)


def test_killed_while_images_are_made_and_in_distillation_it_has_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is killed and resumed has the same bits as one that is not.

    Clients with two architectures teach a student with a third architecture. Processes
    die within the third and the fifth step.
    """
    monkeypatch.setattr(running, "draw_curve", lambda rows, path, title: None)
    wide = "+architectures.models.wide={_target_: fedexp.models.mlp.MLP, hidden: [9]}"
    config = compose(
        ["method=dense", "rounds=1", "clients=3", "partition=iid", "limit.train=60", "limit.test=40", "threads=1",
         "device=cpu", "engine=serial", "checkpoint.every=1", f"output_root={tmp_path / 'a'}", "architectures.clients=[mlp,wide]",
         wide, "dataset.augment={flip: 0.0, crop_padding: 1}", *TINY, "aggregator.T=4", "aggregator.b=8"]
    )  # fmt: skip

    def files(result: dict[str, Any]) -> list[bytes]:
        names = ("metrics.jsonl", "model.safetensors", "trace/1.json", "pictures/synthetic_5.png")
        return [(Path(result["folder"]) / name).read_bytes() for name in names]

    straight = execute(config, say=None)
    again = config.with_values(output_root=str(tmp_path / "b"))
    for place, name, call, done in (
        (synthesis, "value_and_grad", 5, 2),
        (data_free, "distil", 2, 4),
    ):
        process = Forked(tmp_path, _killed, again, place.__name__, name, call)
        told = process.communicate(timeout=120)
        assert process.returncode == -signal.SIGKILL, told
        (journal,) = (tmp_path / "b").glob("runs/*/*/metrics.jsonl")
        assert len(read_jsonl(journal)) == done and not (journal.parent / "pictures").exists()
    resumed = execute(again, say=None)
    assert resumed["attempts"] == 3 and files(resumed) == files(straight)
    rows = read_jsonl(Path(resumed["folder"]) / "metrics.jsonl")
    traced = trace_rows(Path(resumed["folder"]) / "trace" / "1.json")
    assert [row["iteration"] for row in traced] == [1, 2, 3, 4]
    assert [row["synthesis/ce"] for row in traced] == [row["synthesis/ce"] for row in rows[1:]]
    assert [row["student/acc"] for row in traced] == [row["traced/student/acc"] for row in rows[1:]]
    assert (
        not any(name.startswith("traced/") for name in rows[0])
        and "traced/synthesis/ce" not in rows[1]
    )
    students = resumed["traced"]
    assert (
        students["last"]["student/acc"] == rows[-1]["test/global/acc"] == traced[-1]["student/acc"]
    )
    assert resumed["oracle/student/acc"] == max(row["student/acc"] for row in traced)
    assert json.loads((Path(resumed["folder"]) / "result.json").read_text())["bytes"]["up"] > 0


def test_pictures_are_the_rounds_last_images_of_each_class() -> None:
    world = small_world("dense", *TINY, "aggregator.T=9")
    state = states(world)[0][-1]
    grid = world.aggregator.pictures(state, world.env)["synthetic"]
    bank = [
        (x, int(y))
        for batch in state["own"]["bank"]
        for x, y in zip(batch["x"], batch["y"], strict=True)
    ]
    assert grid.shape == (3, 8, 1, 4, 4)
    for number, row in enumerate(grid):
        found = [x for x, y in bank if y == number][-8:]
        assert len(found) == 8 and torch.equal((row * 255).round().byte(), torch.stack(found))
    empty = small_world("dense", *TINY)
    assert empty.aggregator.pictures(empty.aggregator.init(empty.env), empty.env) == {}


@pytest.mark.parametrize("method", ["dense_paper_literal", "fed_dafl"])
def test_a_generators_pictures_are_filed_as_the_student_sees_them(method: str) -> None:
    few = ["aggregator.nz=4", "aggregator.ngf=3", "aggregator.T=1"]
    few += ["aggregator.iterations=2"] if method == "fed_dafl" else ["aggregator.T_G=2"]
    world = small_world(method, *few)
    state = states(world)[0][-1]
    grid = world.aggregator.pictures(state, world.env)["synthetic"]
    student = world.aggregator.outcome(state).models[0].module().eval()
    shown = 0
    for number, row in enumerate(grid):
        images = row[(row < 1).flatten(1).any(1)]
        shown += len(images)
        assert torch.equal(
            student(normalised(images)).argmax(1), torch.full((len(images),), number)
        )
    assert shown >= 8 and torch.equal(
        grid, world.aggregator.pictures(state, world.env)["synthetic"]
    )


def shapes(count: int, seed: int, share: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images (count, 1, 16, 16) and their classes.

    The classes are a horizontal bar, a vertical bar, a square and a diagonal. All have
    noise in the background.
    """
    random = torch.Generator().manual_seed(seed)
    y = torch.multinomial(torch.tensor(share).float(), count, replacement=True, generator=random)
    x = torch.randint(0, 90, (count, 1, 16, 16), generator=random)
    at = torch.randint(0, 9, (count, 2), generator=random)
    for image, kind, (row, column) in zip(x, y.tolist(), at.tolist(), strict=True):
        if kind == 0:
            image[0, row : row + 4] += 150
        elif kind == 1:
            image[0, :, column : column + 4] += 150
        elif kind == 2:
            image[0, row : row + 8, column : column + 8] += 150
        else:
            image[0, range(16), range(16)] += 150
    return x.to(torch.uint8), y


def taught_by_shapes(seed: int, *keys: str) -> float:
    """Return the accuracy of a student of three clients with mainly two classes each.

    The function checks that the student's loss has fallen. It also checks that the
    ensemble is certain of its labels on the images: their cross-entropy is far below
    log 4, the cross-entropy of an even guess.
    """
    shares = ([8, 8, 1, 1], [1, 8, 8, 1], [1, 1, 8, 8])
    parts = [shapes(120, 10 * seed + number, share) for number, share in enumerate(shares)]
    x, y = (torch.cat([part[i] for part in parts]) for i in range(2))
    train, test = (
        Samples(*pair, (0.3,), (0.3,)) for pair in ((x, y), shapes(400, 999, [1, 1, 1, 1]))
    )
    split = Partition.from_lists([np.arange(120 * c, 120 * (c + 1)) for c in range(3)])
    data = FederatedData(train, split, test, 4, "shapes", y.numpy())
    few = [
        "rounds=1",
        "dtype=float32",
        "local.epochs=15",
        "aggregator.T=12",
        "aggregator.T_G=15",
        "aggregator.b=64",
    ]
    few += [
        "aggregator.B=64",
        "aggregator.nz=64",
        "aggregator.ngf=16",
        "aggregator.lr_generator=0.01",
    ]
    few += ["aggregator.lr_student=0.01", f"seed={seed}"]
    model = {**CNN, "channels": [6, 8], "pool": 2}
    world = make_world("method=dense", *few, *keys, data=data, model=model)
    after, rows = states(world)
    assert rows[-1]["distillation/loss"] < rows[1]["distillation/loss"] / 2
    assert all(0 <= row["synthesis/ce"] < 0.5 for row in rows[1:])
    return Evaluator(world.experiment.task, 400)(world.aggregator.outcome(after[-1]), test, "test")[
        "test/global/acc"
    ]


def test_the_student_learns_from_images_alone() -> None:
    """The student learns from images only, with an accuracy well above chance (1/4).

    On average over seeds, the accuracy is higher than without L_BN and L_div. With
    fewer images and steps, the order of the two depends on the processor's last bits.
    """
    whole = [taught_by_shapes(seed) for seed in range(2)]
    similar = [
        taught_by_shapes(seed, "aggregator.lambda_1=0", "aggregator.lambda_2=0")
        for seed in range(2)
    ]
    assert min(whole) > 0.5 and np.mean(whole) > np.mean(similar) + 0.03
