"""The Ray engine on a cluster of two nodes on this machine's loopback: serial's bits, whatever is lost on the way."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedexp.compose import compose, conf_dir
from fedexp.core.build import build
from fedexp.core.engine import Executor, Numerics, Trial, describe
from fedexp.core.errors import ClientError, ConfigError, FedexpError
from fedexp.core.runner import Snapshot, next_jobs
from fedexp.engines import ray_cluster
from fedexp.engines.ray import Ray
from fedexp.engines.ray_actor import Worker
from fedexp.engines.ray_wire import Packer
from fedexp.engines.serial import Serial
from fedexp.run import execute
from fedexp.storage.files import read_jsonl
from tests.engines.plugins import Deadly, Slow
from tests.world import World, assert_same, make_data, make_world

if os.environ.get("CI") != "true":
    pytest.importorskip("ray")

METHODS = sorted(path.stem for path in (conf_dir() / "method").glob("*.yaml"))
NUMERICS = Numerics({}, threads=1, device="cpu", dtype="float64")
STORE = 100 * 2**20  # bytes of each node's object store
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Two nodes of one CPU each."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_enable_metrics_collection": "0",
            "RAY_AUTH_MODE": "token",  # its own, so that nothing is written to the home folder
            "RAY_AUTH_TOKEN": uuid.uuid4().hex,
            "RAY_health_check_period_ms": "500",
            "RAY_health_check_failure_threshold": "4",
        }.items():
            patch.setenv(name, value)
        from ray.cluster_utils import Cluster

        home = {"node_ip_address": "127.0.0.1", "include_dashboard": False, "object_store_memory": STORE}
        temporary = tmp_path_factory.mktemp("ray")
        nodes = Cluster(initialize_head=True, head_node_args={**home, "num_cpus": 1, "temp_dir": str(temporary)})
        nodes.second = nodes.add_node(num_cpus=1, **home)
        nodes.again = lambda: nodes.add_node(num_cpus=1, **home)
        try:
            yield nodes
        finally:
            import ray

            ray.shutdown()
            nodes.shutdown()


@pytest.fixture(scope="module")
def engine(cluster: Any) -> Iterator[Ray]:
    """One actor on each node, shared by the tests that disturb nothing."""
    engine = Ray(address=cluster.address)
    engine.open(NUMERICS, 2)
    yield engine
    engine.close()


def same_run(world: World, executor: Executor, **kwargs: Any) -> None:
    """Models, clients' memories and all else that goes on are serial's, to the bit."""
    expected, got = world.run(), world.run(executor=executor, **kwargs)
    assert_same(world.models(got), world.models(expected))
    assert sorted(got.clients) == sorted(expected.clients)
    for client, memory in expected.clients.items():
        assert sorted(got.clients[client]) == sorted(memory)
        for name, tree in memory.items():
            assert_same([got.clients[client][name]], [tree])


def test_actors_are_spread_over_the_nodes(engine: Ray) -> None:
    assert engine._crew is not None
    assert len({member.node for member in engine._crew.ready}) == 2


@pytest.mark.parametrize("method", METHODS)
def test_serials_bits(method: str, engine: Ray) -> None:
    same_run(make_world(f"method={method}", m=3), engine)


def test_many_small_and_unequal_clients(engine: Ray) -> None:
    same_run(make_world("method=scaffold", data=make_data((*range(1, 30), 60, 2, 90, 3))), engine)


@pytest.mark.parametrize("model", [{"_target_": "fedexp.models.resnet.ResNet18", "norm": "batch", "width": 4}])
def test_buffers_travel(model: dict, engine: Ray) -> None:
    same_run(make_world("method=fedavg", "rounds=2", model=model), engine)
