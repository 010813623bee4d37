"""The Ray engine on a cluster that grows to three nodes and then loses one."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

from fedexp.core.errors import FedexpError
from fedexp.engines.ray import Ray
from fedexp.engines.ray_cluster import ActorPool
from fedexp.engines.serial import Serial
from tests.engines.plugins import Slow
from tests.engines.test_ray import NUMERICS, STORE, lose, opened, replace_trainer, same_run
from tests.killing import kill
from tests.world import World, make_data, make_world


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes of one CPU each."""
    from ray.cluster_utils import Cluster

    folder = tempfile.mkdtemp(prefix="fedexp-ray-", dir="/tmp")
    each = {"num_cpus": 1, "object_store_memory": STORE, "temp_dir": f"{folder}/ray"}
    head = {**each, "include_dashboard": False, "node_ip_address": "127.0.0.4"}
    with pytest.MonkeyPatch.context() as patch:
        # `Cluster` writes its address to this folder.
        patch.setenv("RAY_TMPDIR", folder)
        nodes = Cluster(initialize_head=True, head_node_args=head)
        nodes.add_node(num_cpus=1, object_store_memory=STORE, node_ip_address="127.0.0.5")
        try:
            yield nodes
        finally:
            import ray

            ray.shutdown()
            nodes.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def engine(cluster: Any) -> Iterator[Ray]:
    engine = Ray(address=cluster.address)
    engine.open(NUMERICS, 2)
    assert engine._pool is not None
    engine._pool.wait_for_start(120, 120)
    with contextlib.closing(engine):
        yield engine


@pytest.fixture
def world() -> World:
    world = make_world("method=fedavg", "rounds=1", data=make_data((7,) * 12))
    return replace_trainer(world, Slow())


def all_nodes(pool: ActorPool) -> set[str]:
    return {actor.node for actor in pool.ready}


def nodes_used(world: World, engine: Ray) -> set[str]:
    """Run `world`, compare the bits and return the nodes that had work."""
    pool = engine._pool
    assert pool is not None
    used: set[str] = set()

    def look(done: int, of: int) -> None:
        used.update(actor.node for actor in pool.actors if actor.batches)

    same_run(world, engine, on_client=look)
    return used


def test_actor_that_ray_restarted_between_two_rounds_is_used(cluster: Any, world: World) -> None:
    import ray

    with opened(cluster, Serial(), actors=1) as engine:
        assert engine._pool is not None
        (actor,) = engine._pool.ready
        kill(ray.get(actor.handle.__ray_call__.remote(lambda worker: os.getpid())))
        ray.get(actor.handle.__ray_ready__.options(max_task_retries=-1).remote(), timeout=120)
        same_run(world, engine)


def test_actors_that_ray_does_not_restart_end_the_run(cluster: Any, world: World) -> None:
    import ray

    with opened(cluster, Serial(), actors=1) as engine:
        assert engine._pool is not None
        ray.kill(engine._pool.ready[0].handle)
        with pytest.raises(FedexpError, match="no actor left"):
            world.run(engine=engine)


def test_node_that_joins_is_used(cluster: Any, engine: Ray, world: World) -> None:
    pool = engine._pool
    assert pool is not None
    assert len(nodes_used(world, engine)) == 2

    third = cluster.add_node(num_cpus=1, object_store_memory=STORE, node_ip_address="127.0.0.6")
    # The pool asked for this third actor before there was a node for it.
    pool.wait_for_start(120, 120)
    assert len(pool.ready) == 3
    used = nodes_used(world, engine)
    assert len(used) == 3 and third.node_id in used


def test_work_of_a_killed_node_is_repeated(
    cluster: Any, engine: Ray, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = engine._pool
    assert pool is not None
    node = next(node for node in cluster.worker_nodes if node.node_id in all_nodes(pool))
    notes: list[str] = []
    monkeypatch.setattr(pool, "_note", notes.append)

    def disturb(done: int, of: int) -> None:
        if done == 2:
            assert any(actor.batches for actor in pool.ready if actor.node == node.node_id)
            lose(cluster, node)

    same_run(world, engine, on_client=disturb)
    assert any("lost an actor" in note for note in notes)
    assert node.node_id not in all_nodes(pool)
