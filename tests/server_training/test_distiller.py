"""Tests of runs with the reference distiller.

Epochs on the server are steps. A run that is resumed between them has the same bits.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedexp.config.compose import compose
from fedexp.core.errors import ConfigError
from fedexp.core.resolved_config import ResolvedConfig
from fedexp.core.weights import ModelSpec, Weights
from fedexp.data.augment import Augment
from fedexp.engines.serial import Serial
from fedexp.running.execute import Interrupted, execute
from fedexp.running.experiment import Experiment
from fedexp.storage.files import read_jsonl
from tests.reference.distiller import Distiller
from tests.world import CPU, make_world

SMALL = [
    "rounds=1",
    "clients=3",
    "partition=iid",
    "limit.train=200",
    "limit.test=100",
    "threads=1",
    "device=cpu",
]


def config_of(
    folder: Path, *overrides: str, engine: str = "serial", **aggregator: Any
) -> ResolvedConfig:
    config = compose(
        [*SMALL, f"engine={engine}", f"output_root={folder}", "checkpoint.every=1", *overrides]
    )
    return config.with_values(
        aggregator={"_target_": "tests.reference.distiller.Distiller", **aggregator}
    )


def files(result: dict[str, Any]) -> list[bytes]:
    return [
        (Path(result["folder"]) / name).read_bytes()
        for name in ("metrics.jsonl", "model.safetensors")
    ]


def interrupted(config: ResolvedConfig, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run `config` until `step` has ended, then stop like a run that gets SIGTERM."""
    from fedexp.tracking.progress import Progress

    def stop(self: Progress, row: dict[str, Any], headline: str, ends_round: bool) -> None:
        if row["step"] == step:
            raise Interrupted(15)

    with monkeypatch.context() as patch:
        patch.setattr(Progress, "step", stop)
        with pytest.raises(Interrupted):
            execute(config, say=None)


def test_epochs_on_the_server_are_steps_of_one_round(tmp_path: Path) -> None:
    result = execute(config_of(tmp_path, "local.epochs=30"), say=None)
    rows = read_jsonl(Path(result["folder"]) / "metrics.jsonl")
    assert [(row["round"], row["step"], row.get("bank")) for row in rows] == [
        (1, 1, None), (1, 2, 128), (1, 3, 256), (1, 4, 384), (1, 5, 512),
    ]  # fmt: skip
    assert ["train/loss" in row for row in rows] == [True, False, False, False, False]
    assert ["test/global/acc" in row for row in rows] == [False, False, False, False, True]
    assert rows[-1]["student/loss"] < rows[1]["student/loss"]
    # The data have ten classes, and the server did not see images of the clients
    assert result["headline"]["value"] > 0.5
    assert result["test_data_in_training"] is None


@pytest.mark.parametrize("overrides", [
    [], ["dataset.augment={flip: 0.5, crop_padding: 1}"],
    ["architectures.clients=[mlp,wide]", "+architectures.models.wide={_target_: fedexp.models.mlp.MLP, hidden: [48, 24]}"],
])  # fmt: skip
def test_resumed_in_mid_distillation_it_has_the_same_bits(
    overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = files(execute(config_of(tmp_path / "straight", *overrides), say=None))
    config = config_of(tmp_path / "resumed", *overrides)
    # The run stops after the clients' training and between two epochs
    for step in (1, 3):
        interrupted(config, step, monkeypatch)
    result = execute(config, say=None)
    assert result["attempts"] == 3
    assert files(result) == straight


def test_teachers_of_stacked_clients_teach_the_same(tmp_path: Path) -> None:
    rows = []
    for engine, more in (("serial", []), ("vectorized", ["engine.stack=3"])):
        result = execute(
            config_of(tmp_path / engine, "dtype=float64", *more, engine=engine), say=None
        )
        rows.append(read_jsonl(Path(result["folder"]) / "metrics.jsonl"))
    assert result["stacked_share"] > 0
    for serial, stacked in zip(*rows, strict=True):
        assert serial == pytest.approx(stacked, rel=1e-6)


def test_smoke_forms_take_fewer_epochs(tmp_path: Path) -> None:
    result = execute(config_of(tmp_path, "limit.server_steps=2"), say=None)
    assert [row["step"] for row in read_jsonl(Path(result["folder"]) / "metrics.jsonl")] == [
        1,
        2,
        3,
    ]


def test_teachers_may_differ_in_architecture() -> None:
    """Two networks teach a third. The logits of both have the same weight."""
    experiment = Experiment.of(compose([*SMALL, "model.hidden=[16]"]))
    data = experiment.load(CPU)
    env, aggregator = experiment.env(data, CPU), Distiller(epochs=2)
    state = aggregator.init(env)
    teachers = []
    for result, hidden in zip(
        Serial().map(aggregator.plan(state, env), data), ((4,), (8, 4), (4,)), strict=True
    ):
        node = {"_target_": "fedexp.models.mlp.MLP", "hidden": list(hidden)}
        spec = ModelSpec.of(node, env.input_shape, env.num_classes)
        teachers.append(
            replace(result, weights=Weights.init(spec, len(hidden), CPU, torch.float32))
        )
    state, _ = aggregator.update(state, teachers, env)
    for step in (1, 2):
        state, metrics = aggregator.update(state, [], env.at(0, step))
        assert metrics["student/loss"] > 0
    assert state["student"].spec == env.initial_weights().spec


def test_the_environment_says_how_clients_images_become_inputs() -> None:
    experiment = Experiment.of(compose([*SMALL, "dataset.augment={flip: 0.0, crop_padding: 1}"]))
    data = experiment.load(CPU)
    env = experiment.env(data, CPU)
    assert env.domain == data.train.domain and env.domain.augment == Augment(
        flip=0.0, crop_padding=1
    )
    assert env.input_shape == tuple(data.train.x.shape[1:])
    some = data.train.x[:50]
    assert torch.equal(env.domain.normalise(some.float() / 255), data.train.inputs(slice(0, 50)))


def test_floating_point_samples_have_no_range_of_pixels() -> None:
    world = make_world("method=fedavg")
    assert world.env.domain.pixel_range is None
    with pytest.raises(ConfigError, match="range of pixels"):
        Distiller().init(world.env)


def test_a_validation_share_reaches_the_server_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from fedexp.core.needs import Needs

    for asked in (False, True):
        monkeypatch.setattr(Distiller, "needs", Needs(validation=asked))
        config = compose([*SMALL, "partition.val_fraction=0.2"])
        distiller = {"_target_": "tests.reference.distiller.Distiller"}
        experiment = Experiment.of(config.with_values(aggregator=distiller))
        data = experiment.load(CPU)
        assert data.val is not None and experiment.env(data, CPU).validation is (
            data.val if asked else None
        )


OTHERS = """
_target_: fedexp.data.synthetic.Synthetic
samples: 500
test_samples: 100
features: 8
num_classes: 5
separation: 2.0
seed: 1
mean: [0.25]
std: [0.5]
augment: null
download: false
"""


@pytest.fixture
def own_conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a folder with a data set of the user, `others`."""
    (tmp_path / "conf" / "dataset").mkdir(parents=True)
    (tmp_path / "conf" / "dataset" / "others.yaml").write_text(OTHERS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


PROXY = [
    "dataset=synthetic",
    "dataset.samples=200",
    "dataset.test_samples=100",
    "proxy.source=test",
    "proxy.size=40",
]


def test_a_proxy_of_another_data_set_is_composed_hashed_and_named(
    own_conf: Path, capsys: Any
) -> None:
    from fedexp.commands.run import run_command
    from fedexp.commands.runs import run_command as runs_command
    from fedexp.storage.identity import code_hash, config_hash

    named = [*SMALL, *PROXY, "proxy.dataset=others"]
    config = compose(named)
    assert config["proxy"]["dataset"]["seed"] == 1 and config.choices["proxy.dataset"] == "others"
    assert config.choices["dataset"] == "synthetic" and config["dataset"]["seed"] == 0
    hashes = [(config_hash(config), code_hash(config.values))]
    path = own_conf / "conf" / "dataset" / "others.yaml"
    path.write_text(OTHERS.replace("download: false", "download: true"))
    assert (config_hash(compose(named)), code_hash(compose(named).values)) == hashes[0]
    path.write_text(OTHERS.replace("seed: 1", "seed: 2"))
    assert config_hash(compose(named)) != hashes[0][0]
    assert run_command([*named, "engine=serial"]) == 0
    words = "proxy.source=test: 40 samples of synthetic"
    assert words in " ".join(capsys.readouterr().out.split())
    (stored,) = Path("outputs").glob("runs/*/*/result.json")
    result = json.loads(stored.read_text())
    assert result["test_data_in_training"] == words and result["partition"]["proxy_sha256"]
    assert runs_command(["show", str(stored.parent)]) == 0
    assert words in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("overrides", "words"), [
    (["proxy.dataset=othres"], "did you mean 'others'"),
    (["proxy.dataset=digits"], "do not fit"),
    (["proxy.dataset=others", "proxy.labelled=true"], "the proxy's labels do not fit"),
    (["proxy.dataset=others", "proxy.source=none", "proxy.size=0"], "has no effect"),
    (["proxy.dataset=mnist", "dataset=digits", "dataset.shape=[1,28,28]", "data_root=nowhere"], "train-images-idx3-ubyte"),
])  # fmt: skip
def test_mistakes_about_another_data_set_are_told_before_anything_starts(
    overrides: list[str], words: str, own_conf: Path, capsys: Any
) -> None:
    from fedexp.commands.run import run_command

    keys = {override.partition("=")[0] for override in overrides}
    base = ["proxy.source=train", "proxy.size=9", "dataset=synthetic"]
    assert (
        run_command([*SMALL, *(o for o in base if o.partition("=")[0] not in keys), *overrides])
        == 2
    )
    assert words in capsys.readouterr().err
    assert not Path("outputs").exists()


def test_a_changed_data_set_of_the_proxy_is_not_passed_off(
    own_conf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stored result is not reused if the samples of the proxy have changed.

    This also holds if the config does not pin the samples.
    """
    from fedexp.core.errors import StorageError
    from fedexp.data.synthetic import Synthetic

    monkeypatch.setattr(Synthetic, "pinned", property(lambda self: self.seed == 0))
    config = compose([*SMALL, *PROXY, "proxy.dataset=others", "engine=serial"])
    first = execute(config, say=None)
    assert execute(config, say=None)["folder"] == first["folder"]
    read = Synthetic.read

    def other(self: Synthetic, root: Path, download: bool) -> Any:
        arrays = read(self, root, download)
        return replace(arrays, train_x=arrays.train_x.flip(0)) if self.seed == 1 else arrays

    monkeypatch.setattr(Synthetic, "read", other)
    with pytest.raises(StorageError, match="computed on other data"):
        execute(config, say=None)
