"""Tests of clients with several architectures: assignment, refusals, training."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fedexp
from fedexp.config.compose import compose
from fedexp.config.folders import conf_dir
from fedexp.core.errors import ConfigError, DataError
from fedexp.core.runner import Snapshot, next_jobs, run
from fedexp.core.weights import ModelSpec, Weights
from fedexp.engines.client_cache import ClientCache
from fedexp.engines.serial import Serial
from fedexp.engines.vectorized import Vectorized
from fedexp.running.experiment import Experiment
from fedexp.running.remarks import remarks
from fedexp.storage.checkpoint import Checkpoint
from fedexp.storage.identity import config_hash
from tests.engines.compare import assert_same_results

CPU = torch.device("cpu")
CYCLE = "architectures.clients=[tiny_mlp,tiny_cnn,tiny_bn]"
QUICK = [
    "clients=5",
    "rounds=2",
    "threads=1",
    "memo.enabled=false",
    "partition=iid",
    "engine=serial",
    "limit.train=500",
]
MODELS = {
    "tiny_mlp": "_target_: fedexp.models.mlp.MLP\nhidden: [6]\n",
    "tiny_cnn": "_target_: fedexp.models.cnn.ConvNet\nchannels: [3]\nkernel: 3\npadding: same\npool: "
    "2\nhidden: [5]\n",
    "tiny_bn": "_target_: tests.engines.plugins.Normalised\n",
}
TINY = ["fedexp.models.mlp.MLP", "fedexp.models.cnn.ConvNet", "tests.engines.plugins.Normalised"]


@pytest.fixture(autouse=True)
def _tiny_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    Path("conf/model").mkdir(parents=True)
    for name, text in MODELS.items():
        Path(f"conf/model/{name}.yaml").write_text(text)


def archs(*overrides: str, clients: int = 5) -> list[int]:
    """Return the index in `TINY` of every client's network."""
    specs = Experiment.of(compose([*QUICK, "method=local", *overrides])).specs
    return [TINY.index(specs.of(client).arch) for client in range(clients)]


def same(a: Weights, b: Weights) -> bool:
    return a.spec == b.spec and all(
        torch.equal(value, {**b.params, **b.buffers}[name])
        for name, value in {**a.params, **a.buffers}.items()
    )


def test_architectures_assign_networks_to_clients() -> None:
    assert archs(CYCLE) == [0, 1, 2, 0, 1]
    ranges = "architectures.clients={tiny_cnn:0-1,tiny_mlp:[4,2-2],tiny_bn:3}"
    assert archs(ranges) == [1, 1, 0, 2, 0]
    assert (
        archs(ranges, "limit.clients=3", clients=3)
        == archs(ranges, "debug=smoke", clients=3)
        == [1, 1, 0]
    )
    Path("who.json").write_text(
        json.dumps(["tiny_bn", "tiny_mlp", "tiny_mlp", "tiny_cnn", "tiny_bn"])
    )
    assert archs("architectures.clients=who.json") == [2, 0, 0, 1, 2]
    Path("who.yaml").write_text("tiny_cnn: 0-3\ntiny_bn: 4\n")
    assert archs("architectures.clients=who.yaml") == [1, 1, 1, 1, 2]
    node = "+architectures.models.own={_target_:tests.engines.plugins.Normalised}"
    assert archs("architectures.clients=[own,tiny_mlp]", node) == [2, 0, 2, 0, 2]
    experiment = Experiment.of(
        compose([*QUICK, "method=local", CYCLE, "architectures.server=tiny_cnn"])
    )
    assert experiment.specs.server == experiment.specs.of(1)
    assert dict(experiment.specs.server.kwargs)["channels"] == (3,)
    wider = compose([*QUICK, "method=local", CYCLE, "+architectures.models.tiny_mlp.hidden=[7]"])
    assert dict(Experiment.of(wider).specs.of(0).kwargs)["hidden"] == (7,)


def test_content_counts_and_not_the_place_of_a_file() -> None:
    def hash_of(*overrides: str) -> str:
        return config_hash(compose([*QUICK, "method=local", *overrides]))

    before = hash_of(CYCLE)
    assert before != hash_of()
    Path("a.json").write_text(json.dumps(["tiny_mlp"] * 4 + ["tiny_cnn"]))
    Path("b.json").write_text(json.dumps(["tiny_mlp"] * 4 + ["tiny_bn"]))
    of_a, of_b = hash_of("architectures.clients=a.json"), hash_of("architectures.clients=b.json")
    assert of_a != of_b
    shutil.copy("a.json", "b.json")
    assert hash_of("architectures.clients=b.json") == of_a
    Path("conf/model/tiny_mlp.yaml").write_text(MODELS["tiny_mlp"].replace("6", "8"))
    assert hash_of(CYCLE) != before


@pytest.mark.parametrize(("overrides", "said"), [
    (["architectures.clients=[tiny_mlp,tiny_cn]"], ["unknown model 'tiny_cn'", "did you mean 'tiny_cnn'?", "architectures"]),
    (["architectures.server=tiny_cn"], ["unknown model 'tiny_cn'"]),
    (["architectures.clients=[]"], ["names no model"]),
    (["architectures.clients=5"], ["architectures.clients", "wrong type"]),
    (["architectures.clients={tiny_mlp:0-3}"], ["0 architectures for client 4", "add client 4 to a range"]),
    (["architectures.clients={tiny_mlp:0-4,tiny_cnn:3}"], ["2 architectures for client 3"]),
    (["architectures.clients={tiny_mlp:0-5}"], ["'0-5' is not a range of clients", "clients in 0-4", "set clients=6"]),
    (["architectures.clients={tiny_mlp:all}"], ["'all' is not a range"]),
    (["architectures.clients=who.json"], ["not every client has an architecture", "No such file", "who.json"]),
    (["architectures.clients=short.json"], ["5 names", "1 names"]),
    (["+architectures.models.x.hidden=[3]"], ["neither a client nor the server has x"]),
    ([CYCLE, "+architectures.models.tiny_mlp.hiden=[3]"], ["unknown key 'hiden'"]),
    (["architectures.clients=[tiny_mlp,resnet18_features]"], ["frozen extractor", "ResNetFeatures"]),
    (["architectures.clients=[tiny_mlp,broken]"], ["cannot take the data set's inputs"]),
    ([CYCLE, "method=ensemble", "aggregator.combine=masked", "architectures.clients=[tiny_mlp,five]"], ["class by class"]),
])  # fmt: skip
def test_architectures_with_faulty_config_are_refused(
    overrides: list[str], said: list[str]
) -> None:
    Path("short.json").write_text('["tiny_mlp"]')
    Path("conf/model/broken.yaml").write_text(
        "_target_: torch.nn.Linear\nin_features: 3\nout_features: 10\n"
    )
    Path("conf/model/five.yaml").write_text("_target_: tests.running.test_architectures.Padded\n")
    method = [] if any(o.startswith("method=") for o in overrides) else ["method=local"]
    with pytest.raises(ConfigError) as refused:
        Experiment.of(compose([*QUICK, *method, *overrides]))
    for words in said:
        assert words in str(refused.value)


class Padded(torch.nn.Module):
    """A network whose last layer has two more rows than the network has logits."""

    def __init__(self, *, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(64, num_classes + 2)
        self.classes = num_classes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x.flatten(1))[:, : self.classes]


@pytest.mark.parametrize(
    "method", sorted(path.stem for path in (conf_dir() / "method").glob("*.yaml"))
)
def test_what_averages_or_matches_needs_one_architecture(method: str) -> None:
    """A method that averages or matches is refused before data are loaded.

    The refusal needs no data. Methods that keep the models separate accept any
    architectures, and so does one-shot distillation without data.
    """
    free = method.startswith(("local", "ensemble", "dense", "fed_dafl", "fed_adi", "co_boosting"))
    error, words = (DataError, "nowhere") if free else (ConfigError, "one architecture")
    with pytest.raises(error, match=words):
        shots = ["rounds=1"] if free else []
        Experiment.of(
            compose(
                [
                    f"method={method}",
                    "dataset=mnist",
                    "data_root=nowhere",
                    "clients=5",
                    CYCLE,
                    *shots,
                ]
            )
        )


# Three of ten clients have enough samples.
DROPPING = [
    "clients=10",
    "limit.train=null",
    "partition=quantity",
    "partition.alpha=0.3",
    "partition.min_size=100",
    "partition.max_draws=1",
    "partition.on_small=drop",
]


def test_dropped_clients_are_refused_with_several_architectures() -> None:
    def loaded(names: str) -> None:
        overrides = ["method=local", f"architectures.clients={names}"]
        Experiment.of(compose([*QUICK, *DROPPING, *overrides])).load(CPU)

    for names in ("[tiny_mlp,tiny_cnn]", "{tiny_mlp:[0-4],tiny_cnn:[5-9]}"):
        with pytest.raises(ConfigError, match="the split has fewer clients") as error:
            loaded(names)
        assert error.value.facts["got"] == "3 clients"
    loaded("[tiny_mlp]")


@pytest.mark.parametrize(("sampling", "m"), [("fixed", 2.0), ("bernoulli", 1.5)])
def test_a_share_of_the_clients_does_not_count_dropped_clients(sampling: str, m: float) -> None:
    overrides = ["clients_per_round=0.5", f"sampling={sampling}"]
    experiment = Experiment.of(compose([*QUICK, *DROPPING, *overrides]))
    assert experiment.extent.sampling.m == 5
    env = experiment.env(experiment.load(CPU), CPU)
    assert (len(env.sizes), env.sampling.m) == (3, m)
    few = Experiment.of(compose([*QUICK, *DROPPING, "clients_per_round=7"]))
    assert few.env(few.load(CPU), CPU).sampling.m == 3


def test_limit_of_clients_that_stored_models_ignore_is_named() -> None:
    folder = fedexp.run([*QUICK, "method=local"]).folder
    limited = ["method=ensemble", f"client_models.path={folder}", "limit.clients=2"]
    experiment = Experiment.of(compose([*QUICK, *limited]))
    assert experiment.config.clients == 5
    assert [*remarks(experiment)] == [
        "limit.clients is ignored: client_models.path has the models of all clients"
    ]


def test_fedsyns_five_networks() -> None:
    """FedSyn's networks have the numbers of parameters of its Table 3.

    Averaging methods refuse these networks.
    """
    config = compose(["experiment=fedsyn/table3", "method=local"])
    models = config["architectures"]["models"]
    sizes = []
    with torch.device("meta"):
        for name in (*config["architectures"]["clients"], config["architectures"]["server"]):
            module = ModelSpec.of(models[name], (3, 32, 32), 10).module()
            sizes.append(sum(p.numel() for p in module.parameters()))
    assert sizes == [11_173_962, 122_570, 319_242, 175_066, 563_930, 11_173_962]
    for method in ("average", "fedavg"):
        with pytest.raises(ConfigError, match="one architecture"):
            Experiment.of(
                compose(["experiment=fedsyn/table3", f"method={method}", "data_root=nowhere"])
            )
    with pytest.raises(DataError, match="nowhere"):
        fresh = ["method=feddf_matched", "aggregator.student_start=fresh"]
        Experiment.of(compose(["experiment=fedsyn/table3", *fresh, "data_root=nowhere"]))


def test_one_architecture_is_one_however_it_is_named() -> None:
    names = "architectures.clients=[tiny_mlp]", "architectures.server=tiny_mlp"
    for other in names:
        with pytest.raises(ConfigError, match="must have one architecture"):
            Experiment.of(compose(["model=tiny_cnn", other]))
    assert len(Experiment.of(compose([*names, "model=tiny_cnn"])).specs.distinct) == 1
    assert len(Experiment.of(compose(["model=tiny_mlp", names[0]])).specs.distinct) == 1


@pytest.mark.parametrize("init", ["same", "different"])
def test_each_client_trains_as_if_all_had_its_architecture(init: str) -> None:
    mixed = fedexp.run([*QUICK, "method=local", CYCLE, f"init={init}"])
    names = list(MODELS)
    alone = [
        fedexp.run([*QUICK, "method=local", f"model={name}", f"init={init}"]) for name in names
    ]
    for client in range(5):
        assert same(mixed.models[client], alone[client % 3].models[client])
        module = mixed.module(client)
        assert module(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
        each = mixed.result["per_client"]["test/local/acc"][client]
        assert each == alone[client % 3].result["per_client"]["test/local/acc"][client]


def jobs_of(*overrides: str, steps: int = 1):
    experiment = Experiment.of(compose([*QUICK, CYCLE, "dtype=float64", *overrides]))
    data = experiment.load(CPU)
    env = experiment.env(data, CPU)
    snapshot = Snapshot(0, experiment.aggregator.init(env))
    for _ in range(steps):
        snapshot = next(run(experiment.aggregator, env, Serial(), data, snapshot)).after
    return next_jobs(experiment.aggregator, env, snapshot), data


@pytest.mark.parametrize("method", ["local", "ensemble"])
def test_stacks_are_of_one_spec_and_match_serial(method: str) -> None:
    jobs, data = jobs_of(f"method={method}")
    engine = Vectorized(stack=8)
    stacks = engine.split(jobs, data)
    assert sorted(map(sorted, stacks)) == [[0, 3], [1, 4], [2]]
    assert_same_results(list(engine.map(jobs, data)), list(Serial().map(jobs, data)), 1e-9)
    assert engine.stacked_steps > 0


def test_workers_train_them_to_the_same_bits() -> None:
    serial = fedexp.run([*QUICK, "method=local", CYCLE])
    workers = fedexp.run(
        [*QUICK, "method=local", CYCLE, "engine=workers", "engine.workers=2", "output_root=other"]
    )
    assert all(same(a, b) for a, b in zip(serial.models, workers.models, strict=True))
    assert serial.result["per_client"] == workers.result["per_client"]


def test_mixed_architectures_resumed_from_disk_equal_an_uninterrupted_run(tmp_path: Path) -> None:
    experiment = Experiment.of(
        compose([*QUICK, CYCLE, "method=ensemble", "aggregator.combine=masked", "rounds=3"])
    )
    data = experiment.load(CPU)
    env, aggregator = experiment.env(data, CPU), experiment.aggregator
    straight = Snapshot(0, aggregator.init(env))
    for step in run(aggregator, env, Serial(), data, straight):
        straight = step.after
    snapshot = Snapshot(0, aggregator.init(env))
    for _ in range(3):
        snapshot = next(run(aggregator, env, Serial(), data, snapshot)).after
        Checkpoint(tmp_path / "run", CPU).save(snapshot, set(), 0)
        loaded = Checkpoint(tmp_path / "run", CPU).load()
        assert loaded is not None
        snapshot = loaded[0]
    mine, theirs = aggregator.outcome(snapshot.state), aggregator.outcome(straight.state)
    assert snapshot.step == 3 and all(
        same(a, b) for a, b in zip(mine.models, theirs.models, strict=True)
    )


def test_stored_models_stand_for_training_and_the_memo_recalls_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quick = [o for o in QUICK if not o.startswith(("memo", "rounds"))] + ["rounds=1", CYCLE]
    local = fedexp.run([*quick, "method=local"])

    def forbidden(*args: object) -> None:
        raise AssertionError("trained")

    monkeypatch.setattr(ClientCache, "_save", forbidden)
    cached = fedexp.run([*quick, "method=ensemble"])
    stored = fedexp.run([*quick, "method=ensemble", f"client_models.path={local.folder}"])
    assert len(stored.models) == len(cached.models) == 5
    for ran in (cached, stored):
        assert all(same(a, b) for a, b in zip(local.models, ran.models, strict=True))
    assert (
        stored.result["metrics"]["test/ensemble/acc"]
        == cached.result["metrics"]["test/ensemble/acc"]
    )
    shifted = CYCLE.replace("tiny_mlp,tiny_cnn", "tiny_cnn,tiny_mlp")
    with pytest.raises(
        ConfigError, match="model 0 of the folder, client 0's, is another network"
    ) as refused:
        fedexp.run([*quick, "method=ensemble", f"client_models.path={local.folder}", shifted])
    assert "architectures.clients" in str(refused.value)


def test_models_of_several_architectures_are_brought_in() -> None:
    ran = fedexp.run([*QUICK, "method=local", CYCLE])
    models = ran.config["architectures"]["models"]
    nodes = [models[list(MODELS)[client % 3]] for client in range(5)]
    states = [ran.module(client).state_dict() for client in range(5)]
    shape = {"input_shape": (1, 8, 8), "num_classes": 10}
    fedexp.save_models("mine", states, nodes, **shape)
    quick = [o for o in QUICK if not o.startswith("rounds")] + ["rounds=1", CYCLE]
    asked = fedexp.run([*quick, "method=ensemble", "client_models.path=mine"])
    assert all(
        same(a, replace(b, spec=a.spec)) for a, b in zip(ran.models, asked.models, strict=True)
    )
    with pytest.raises(ConfigError, match="every model needs its network"):
        fedexp.save_models("less", states, nodes[:2], **shape)
    with pytest.raises(ConfigError, match="does not fit the network"):
        fedexp.save_models("wrong", states, nodes[::-1][1:] + nodes[:1], **shape)
