"""The Ray engine gives the serial engine's results to the bit.

The cluster has two nodes on the loopback interface of this machine. The tests also
cover lost nodes and lost actors.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedexp.config.compose import compose
from fedexp.core.build import build
from fedexp.core.engine import Engine, describe
from fedexp.core.errors import ClientError, ConfigError
from fedexp.core.numerics import Numerics
from fedexp.core.runner import Snapshot, next_jobs
from fedexp.engines.ray import Ray
from fedexp.engines.ray_actor import Worker
from fedexp.engines.ray_cluster import _session_folder
from fedexp.engines.ray_wire import Packer, _keys
from fedexp.engines.serial import Serial
from fedexp.engines.vectorized import Vectorized
from fedexp.running.execute import execute
from tests.engines.compare import about, distinct_methods
from tests.engines.plugins import Deadly, NoBatchingRule, Slow
from tests.killing import kill
from tests.reference.witness import Witness, told
from tests.simulated_cuda.device import simulate
from tests.world import World, assert_same, make_data, make_world

# These variables must be set before ray is imported. They switch off usage statistics,
# keep the token out of the home folder, and make Ray notice lost nodes soon.
os.environ |= {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": uuid.uuid4().hex,
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_failure_threshold": "4",
}
if os.environ.get("CI") != "true":
    pytest.importorskip("ray")

NUMERICS = Numerics({}, threads=1, device="cpu", dtype="float64")
STORE = 100 * 2**20  # bytes of each node's object store
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Start a cluster of two nodes with one CPU each."""
    from ray.cluster_utils import Cluster

    # Another temporary folder may be too long for the paths of sockets.
    folder = tempfile.mkdtemp(prefix="fedexp-ray-", dir="/tmp")
    each = {
        "num_cpus": 1,
        "object_store_memory": STORE,
        "include_dashboard": False,
        "temp_dir": f"{folder}/ray",
    }
    with pytest.MonkeyPatch.context() as patch:
        # `Cluster` writes its address to ``$RAY_TMPDIR/ray``, wherever the folder of
        # its nodes is.
        patch.setenv("RAY_TMPDIR", folder)
        nodes = Cluster(
            initialize_head=True, head_node_args={**each, "node_ip_address": "127.0.0.2"}
        )
        nodes.add_node(**each, node_ip_address="127.0.0.3")
        try:
            yield nodes
        finally:
            import ray

            ray.shutdown()
            nodes.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def opened(cluster: Any, inner: Engine, actors: int) -> Iterator[Ray]:
    """Yield an engine with `actors` actors, after all of them have started.

    The start takes seconds.
    """
    engine = Ray(address=cluster.address, inner=describe(inner), actors=actors)
    engine.open(NUMERICS, 2)
    assert engine._pool is not None
    engine._pool.wait_for_start(120, 120)
    assert len(engine._pool.ready) == actors
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def engine(cluster: Any) -> Iterator[Ray]:
    """Yield an engine with one actor on each node.

    The engine holds all CPUs of the cluster from its first test to its last.
    """
    with opened(cluster, Serial(), actors=2) as engine:
        yield engine


def lose(cluster: Any, node: Any) -> None:
    """End a node as a power cut would.

    Its workers are killed as well, because they outlive a killed raylet long enough to
    answer.
    """
    (raylet,) = node.all_processes["raylet"]
    workers = subprocess.run(
        ["pgrep", "-P", str(raylet.process.pid)], capture_output=True, text=True, check=True
    )
    cluster.remove_node(node, allow_graceful=False)
    for pid in workers.stdout.split():
        with contextlib.suppress(ProcessLookupError):
            kill(int(pid))


def same_run(world: World, engine: Engine, **kwargs: Any) -> None:
    """Check that the engine's run is bit-identical to the serial engine's run.

    This includes the models, the client states and everything else that a run carries
    on.
    """
    expected, got = world.run(), world.run(engine=engine, **kwargs)
    assert_same(world.models(got), world.models(expected))
    assert sorted(got.clients) == sorted(expected.clients)
    for client, memory in expected.clients.items():
        assert sorted(got.clients[client]) == sorted(memory)
        for name, tree in memory.items():
            assert_same([got.clients[client][name]], [tree])


def test_no_place_for_a_local_cluster_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/absent")
    with pytest.raises(ConfigError, match="no folder for its sockets"):
        Ray(address="local").open(NUMERICS, 2)


def test_a_run_is_serials_to_the_byte(cluster: Any, tmp_path: Path) -> None:
    """Files of a run from the command line are byte-identical to the serial engine's.

    The run goes through the configuration, the numerics, the client cache and the
    checkpoint.
    """
    common = ["method=scaffold", "rounds=2", "clients=6", "limit.train=300", "threads=2"]
    where = [f"engine.address={cluster.address}", "engine.actors=1"]
    ours = execute(compose([*common, f"output_root={tmp_path}/ray", "engine=ray", *where]))
    serial = execute(
        compose([*common, f"output_root={tmp_path}/serial", "engine=serial", "threads=1"])
    )
    for name in ("model.safetensors", "metrics.jsonl"):
        assert Path(ours["folder"], name).read_bytes() == Path(serial["folder"], name).read_bytes()
    assert ours["numerics"] == serial["numerics"]


def test_an_actor_says_why_its_clients_are_not_stacked(cluster: Any) -> None:
    world = make_world("method=fedavg", data=make_data((6, 6, 6, 6)))
    world.env = replace(world.env, trainer=NoBatchingRule())
    said: list[str] = []
    with opened(cluster, Vectorized(2), actors=1) as engine:
        engine.note = said.append
        same_run(world, engine)
    assert said and all("NoBatchingRule): its loss cannot be vectorised" in text for text in said)


class TestOneCrew:
    """Tests in which no actor is lost."""

    def test_actors_are_spread_over_the_nodes(self, engine: Ray) -> None:
        assert engine._pool is not None
        assert len({actor.node for actor in engine._pool.ready}) == 2

    def test_serials_bits(self, engine: Ray) -> None:
        for method in distinct_methods():
            with about(method):
                same_run(make_world(f"method={method}", m=3), engine)

    def test_many_small_and_unequal_clients(self, engine: Ray) -> None:
        same_run(
            make_world("method=scaffold", data=make_data((*range(1, 30), 60, 2, 90, 3))), engine
        )

    def test_buffers_travel(self, engine: Ray) -> None:
        model = {"_target_": "tests.engines.plugins.Normalised"}
        same_run(make_world("method=fedavg", model=model), engine)

    def test_chunks_are_the_inner_engines(
        self, engine: Ray, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Chunks that are not contiguous still give results in job order."""
        chunks = [[1, 2, 4], [0, 3]]
        monkeypatch.setattr(Serial, "split", lambda self, jobs, data: chunks)
        same_run(make_world("method=local", data=make_data((9, 5, 7, 3, 4))), engine)

    def test_actors_answer_probes_about_what_they_train_and_what_they_are_sent(
        self, engine: Ray
    ) -> None:
        world = make_world("method=fedavg", model={"_target_": "tests.engines.plugins.Normalised"})
        jobs = next_jobs(world.aggregator, world.env, Snapshot(0, world.aggregator.init(world.env)))
        jobs = [replace(job, probes=(Witness(),)) for job in jobs]
        results = list(Serial().map(jobs, world.data))
        got = list(engine.map(jobs, world.data))
        asked = [job.asking(r.weights, job.probes) for job, r in zip(jobs, results, strict=True)]
        for answers in (got, list(engine.map(asked, world.data))):
            for mine, theirs in zip(results, answers, strict=True):
                assert_same([told(theirs)], [told(mine)])
                assert int(theirs.probes["witness"]["pid"]) != os.getpid()
                assert theirs.probe_seconds > 0

    def test_an_error_of_a_client_arrives_as_it_was(self, engine: Ray) -> None:
        """The error of a client has the serial engine's message.

        The results of the clients before it are returned, as by the serial engine.
        """
        world = make_world("method=fedavg", data=make_data((5, 8, 4, 6)))
        jobs = next_jobs(world.aggregator, world.env, Snapshot(0, world.aggregator.init(world.env)))
        empty = replace(world.data, partition=make_data((5, 8, 0, 10)).partition)
        told = []
        for each in (Serial(), engine):
            done = []
            with pytest.raises(ClientError) as caught:
                for result in each.map(jobs, empty):
                    done.append(result.client)
            told.append((done, str(caught.value)))
        assert told[0] == told[1]
        assert told[0][0] == [0, 1]

    def test_other_code_on_a_node_is_refused(
        self, engine: Ray, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("fedexp.engines.ray.code_of", lambda targets: "0123")
        monkeypatch.setattr(engine, "_codes", {})
        with pytest.raises(ConfigError, match="the code of fedexp or of a plug-in is not the same"):
            make_world("method=fedavg").run(engine=engine)

    def test_another_cluster_than_this_process_joined_is_refused(self, engine: Ray) -> None:
        with pytest.raises(ConfigError, match="already belongs to a Ray cluster"):
            Ray(address="local").open(NUMERICS, 2)


def test_other_torch_on_a_node_is_refused() -> None:
    refusal = Worker().ready({}, NUMERICS, 1, "1.0")
    assert isinstance(refusal, ConfigError)
    assert "torch is not the same" in str(refusal) and torch.__version__ in str(refusal)


def test_an_actor_uses_the_gpu_that_it_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver may compute on another GPU. The simulated actor has only one."""
    context = SimpleNamespace(get_node_id=lambda: "node")
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get_runtime_context=lambda: context))
    inner = {"_target_": "fedexp.engines.serial.Serial"}
    with torch.random.fork_rng(devices=[]), simulate(1):
        numerics = replace(NUMERICS, device="cuda:1", dtype="float32")
        assert Worker().ready(inner, numerics, 1, torch.__version__) == "node"


def test_a_lost_node_changes_no_bit(
    cluster: Any, engine: Ray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The results stay bit-identical after the loss of a node.

    The node is killed between two results of a round, while it has work. Later another
    node takes its place.
    """
    notes: list[str] = []
    world = make_world("method=fedavg", "rounds=1", data=make_data((7,) * 10))
    world.env = replace(world.env, trainer=Slow())
    assert engine._pool is not None
    monkeypatch.setattr(engine._pool, "_note", notes.append)
    head, second = sorted(
        engine._pool.ready, key=lambda actor: actor.node != cluster.head_node.node_id
    )
    trained: list[int] = []

    def disturb(done: int, of: int) -> None:
        trained.append(done)
        if done == 2:
            assert second.batches
            (node,) = cluster.worker_nodes
            lose(cluster, node)

    same_run(world, engine, on_client=disturb)
    assert trained == list(range(1, 11))
    assert any("lost an actor" in note for note in notes)
    assert [actor for actor in engine._pool.ready if actor is not head] == []

    cluster.add_node(num_cpus=1, object_store_memory=STORE, node_ip_address="127.0.0.3")
    engine._pool.fill()
    engine._pool.wait_for_start(120, 120)
    same_run(replace_trainer(world, Slow(seconds=0.0)), engine)
    assert len({actor.node for actor in engine._pool.ready}) == 2


def test_work_that_kills_every_actor_is_an_error(
    engine: Ray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedexp.engines.ray.MAX_LOSSES", 2)
    world = replace_trainer(make_world("method=fedavg", data=make_data((5,))), Deadly())
    notes: list[str] = []
    assert engine._pool is not None
    monkeypatch.setattr(engine._pool, "_note", notes.append)
    with pytest.raises(ClientError, match="client 0: 2 Ray actors died"):
        world.run(engine=engine)
    assert sum("lost an actor" in note for note in notes) == 2


def replace_trainer(world: World, trainer: Any) -> World:
    return replace(world, env=replace(world.env, trainer=trainer))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"actors": 3}, "expected: 3 actors of 1 CPUs each, .*room for 2"),
        ({"threads": 2}, "at least 1 actors of 2 CPUs each.*room for 0"),
    ],
)
def test_a_cluster_too_small_is_refused(cluster: Any, config: dict, message: str) -> None:
    with pytest.raises(ConfigError, match="too small") as caught:
        Ray(address=cluster.address, **config).open(NUMERICS, 2)
    assert re.search(message, str(caught.value), re.DOTALL), caught.value


@pytest.mark.parametrize(
    ("config", "where"),
    [
        ({"address": "ray://host:10001"}, "engine.address"),
        ({"threads": 0}, "engine.threads"),
        ({"actors": 0}, "engine.actors"),
        ({"gpus": 1.5}, "engine.gpus"),
        ({"inner": {"_target_": "fedexp.engines.ray.Ray"}}, "engine.inner"),
        ({"inner": {"_target_": "fedexp.engines.serial.Seriell"}}, "did you mean 'Serial'"),
    ],
)
def test_mistakes_in_the_config_are_refused(config: dict, where: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(Engine, {"_target_": "fedexp.engines.ray.Ray", **config}, "engine")
    assert where in str(caught.value)


def test_device_and_gpus_go_together() -> None:
    with pytest.raises(ConfigError, match="the run's kind of device"):
        Ray(gpus=0.5).open(NUMERICS, 2)
    with pytest.raises(ConfigError, match="the run's kind of device"):
        Ray().open(replace(NUMERICS, device="cuda"), 2)


def test_absent_package_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs the package ray") as caught:
        Ray()
    assert "pip install 'fedexp[ray]'" in str(caught.value)


def test_chosen_and_restored() -> None:
    """The inner engine computes with the number of threads of an actor.

    A resumed run keeps the inner engine and the threads with another thread budget.
    """
    engine = Ray(threads=2, actors=1)
    assert isinstance(engine.computing, Serial)
    assert engine.threads_each(8) == 2
    restored = engine.restore(Serial(), 1, 4)
    assert isinstance(restored, Ray)
    assert (restored.threads, restored.actors, restored.inner) == (1, 1, describe(Serial()))
    build(Engine, describe(restored), "engine")


def test_shared_trees_travel_once() -> None:
    """Trees that several jobs share are sent once.

    The start of all clients is stored once. A tree that only one job uses is sent with
    that job.
    """
    world = make_world("method=scaffold")
    jobs = next_jobs(world.aggregator, world.env, Snapshot(0, world.aggregator.init(world.env)))
    stored: list[Any] = []
    packer = Packer(jobs, lambda value: stored.append(value) or f"reference {len(stored)}")
    for position in range(len(jobs)):
        batch = packer.batch([[position]], "data", (), "")
        assert set(batch.trees) == {*_keys(batch.chunks[0][0])}
    assert len(jobs) > 1
    # The stored trees are the weights, SCAFFOLD's c, and the first c_i of every client.
    assert [set(tree) for tree in stored] == [set(jobs[0].start.params)] * 3


def test_local_leaves_nothing_behind(tmp_path: Path) -> None:
    """An interrupted run with a local Ray leaves a clean stdout and no process.

    The command is ``fedexp engine=ray engine.address=local``. It prints no traceback.
    """
    command = [
        sys.executable,
        "-m",
        "fedexp",
        "engine=ray",
        "engine.address=local",
        "threads=1",
        "memo.enabled=false",
    ]
    command += [f"output_root={tmp_path / 'out'}", "clients=4", "limit.train=100", "limit.test=10"]
    # Each round prints one line. The signal arrives during a round.
    command += ["rounds=20", "local.steps=500"]
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as temporary:
        environment = os.environ | {"TMPDIR": temporary, "PYTHONPATH": str(ROOT), "HOME": temporary}
        for name in [name for name in environment if name.startswith("RAY_")]:
            del environment[name]
        process = subprocess.Popen(
            command,
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        first = next((line for line in process.stdout if not line.startswith("peak memory ")), "")
        started = _processes_with(temporary)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert started, err
        assert first.startswith("round "), first + err
        assert process.returncode == 130, err
        assert "raylet" not in out and "Traceback" not in err, out + err
        assert _processes_with(temporary) == []


@pytest.mark.parametrize(
    ("usual", "parent"), [("", ""), ("/" + 60 * "long", "/tmp")], ids=["short", "long"]
)
def test_a_local_clusters_sockets_have_short_paths(
    usual: str, parent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as short:
        place = Path(short + usual)
        place.mkdir(exist_ok=True)
        monkeypatch.setattr(tempfile, "tempdir", str(place))
        folder = _session_folder()
        assert Path(folder).parent == Path(parent or short)
        longest = f"{folder}/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store"
        assert len(longest) <= 103
        shutil.rmtree(folder)


def _processes_with(text: str) -> list[str]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # the process has ended meanwhile
            line = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if text in line:
                found.append(line)
    return found
