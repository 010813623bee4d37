"""Tests of probes.

They show what probes answer, that the cache stores it, and that it does not depend on
who asks.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from fedexp.core.numerics import Numerics
from fedexp.core.probe import Probe
from fedexp.engines.client_cache import ClientCache
from fedexp.engines.serial import Serial
from fedexp.methods.bases.class_counts import ClassCounts
from fedexp.methods.ma_echo.projections import Projections
from tests.world import World, answers, make_data, make_world

NUMERICS = Numerics({}, threads=1, device="cpu", dtype="float64")


def jobs_of(world: World, *probes: Probe) -> list:
    jobs = world.aggregator.plan(world.aggregator.init(world.env), world.env)
    return [replace(job, probes=probes) for job in jobs]


def test_class_counts_are_the_datas() -> None:
    world = make_world("method=local", data=make_data((20, 12, 1)))
    jobs = jobs_of(world, ClassCounts(3))
    told = [answers(Serial(), job, job.start, world.data)["class_counts"]["n"] for job in jobs]
    assert torch.equal(torch.stack(told), torch.from_numpy(world.data.class_counts()))


class Counting(Serial):
    """A probe that counts how often it really runs."""

    asked = 0

    def map(self, jobs, data):  # type: ignore[no-untyped-def]
        self.asked += sum(len(job.probes) for job in jobs)
        yield from super().map(jobs, data)


def test_the_memo_answers_again_and_tells_probes_models_and_clients_apart(tmp_path: Path) -> None:
    world = make_world("method=local")
    names = (world.env.layers[0].weight,)
    jobs = jobs_of(world, ClassCounts(3), Projections(names))
    inner = Counting()
    cache = ClientCache(inner, tmp_path, 1.0, NUMERICS, "code")
    first = [answers(cache, job, job.start, world.data) for job in jobs]
    assert inner.asked == 2 * len(jobs)
    second = [
        answers(ClientCache(inner, tmp_path, 1.0, NUMERICS, "code"), job, job.start, world.data)
        for job in jobs
    ]
    assert inner.asked == 2 * len(jobs)
    for a, b in zip(first, second, strict=True):
        for name, tree in a.items():
            assert all(torch.equal(b[name][key], value) for key, value in tree.items())
    answers(
        cache,
        replace(jobs[0], probes=(Projections(names, damping=0.25),)),
        jobs[0].start,
        world.data,
    )
    other = world.env.initial_weights()
    changed = replace(other, params={name: value + 1 for name, value in other.params.items()})
    answers(cache, replace(jobs[0], probes=(Projections(names),)), changed, world.data)
    assert inner.asked == 2 * len(jobs) + 2


def test_later_rounds_are_not_stored(tmp_path: Path) -> None:
    world = make_world("method=local")
    (job, *_) = jobs_of(world, ClassCounts(3))
    inner = Counting()
    cache = ClientCache(inner, tmp_path, 1.0, NUMERICS, "code")
    for _ in range(2):
        answers(cache, replace(job, round=1), job.start, world.data)
    assert inner.asked == 2 and not list(tmp_path.iterdir())


def test_a_full_memo_stores_no_more_answers(tmp_path: Path) -> None:
    world = make_world("method=local")
    jobs = jobs_of(world, ClassCounts(3))
    # The cache may hold one byte, so the first answer fills it.
    cache = ClientCache(Counting(), tmp_path, 1e-9, NUMERICS, "code")
    asked = [job.asking(job.start, job.probes) for job in jobs]
    stored = [len(list(tmp_path.rglob("*.safetensors"))) for _ in cache.map(asked, world.data)]
    assert stored == [1] * len(jobs) and len(jobs) > 1
    assert not list(tmp_path.rglob("*.safetensors"))  # the cache exceeded its limit
