"""Check the engine contract: every engine gives the serial engine's results."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from fedexp.config.folders import conf_dir
from fedexp.core.engine import Engine
from fedexp.core.jobs import ClientJob, ClientResult
from fedexp.core.runner import Snapshot, next_jobs
from fedexp.engines.serial import Serial
from tests.methods.declared import DECLARED
from tests.world import World, make_world


@functools.cache
def distinct_methods() -> tuple[str, ...]:
    """Return one method for each kind of jobs.

    An engine sees only the jobs of a method. Methods that need images are left out,
    because the tests of engines have no images. Their jobs are FedAvg's.
    """
    kinds: dict[str, str] = {}
    for method in sorted(path.stem for path in (conf_dir() / "method").glob("*.yaml")):
        if DECLARED[method].images:
            continue
        world = make_world(f"method={method}", m=3)
        jobs = next_jobs(world.aggregator, world.env, Snapshot(0, world.aggregator.init(world.env)))
        starts = len({id(job.start) for job in jobs})
        kind = [(j.trainer, j.local_training, j.probes, j.frozen, list(j.shared)) for j in jobs]
        kinds.setdefault(repr((starts, kind)), method)
    return tuple(kinds.values())


@contextmanager
def about(method: str) -> Iterator[None]:
    """Add the method's name to a failure inside this context."""
    try:
        yield
    except Exception as error:
        error.add_note(f"method={method}")
        raise


def trees_of(result: ClientResult) -> dict[str, torch.Tensor]:
    """Return all tensors in a result, by name."""
    flat = {
        **result.weights.params,
        **{f"buffer {k}": v for k, v in result.weights.buffers.items()},
    }
    for kind, trees in (("payload", result.payload), ("state", result.state or {})):
        flat |= {
            f"{kind} {group} {name}": value
            for group, tree in trees.items()
            for name, value in tree.items()
        }
    return flat


def assert_same_results(
    found: Sequence[ClientResult], expected: Sequence[ClientResult], tolerance: float
) -> None:
    """Check that two lists of results agree.

    The clients, their order, their steps and the tensors must agree. With a `tolerance`
    of 0 the tensors must be bit-identical.
    """
    assert [r.client for r in found] == [r.client for r in expected]
    for a, b in zip(found, expected, strict=True):
        assert (a.num_steps, a.num_examples) == (b.num_steps, b.num_examples)
        assert list(a.metrics) == list(b.metrics)
        for name, value in b.metrics.items():
            assert abs(a.metrics[name] - value) <= max(tolerance, 1e-12) * max(1, abs(value)), name
        left, right = trees_of(a), trees_of(b)
        assert list(left) == list(right)
        for name, value in right.items():
            assert left[name].dtype == value.dtype
            if tolerance:
                torch.testing.assert_close(
                    left[name], value, rtol=tolerance, atol=tolerance, msg=name
                )
            else:
                assert torch.equal(left[name], value), name


def second_round_jobs(world: World) -> list[ClientJob]:
    """Return jobs of the second round, in which clients and the server have state."""
    world.env = world.env.at(0)
    from fedexp.core.runner import run

    after = next(run(world.aggregator, world.env, Serial(), world.data)).after
    return next_jobs(world.aggregator, world.env, Snapshot(after.step, after.state, after.clients))


def assert_matches_serial(
    engine: Engine, world: World, jobs: list[ClientJob], tolerance: float
) -> None:
    expected = list(Serial().map(jobs, world.data))
    assert_same_results(list(engine.map(jobs, world.data)), expected, tolerance)
