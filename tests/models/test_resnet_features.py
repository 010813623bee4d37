"""Tests of frozen extractors: torchvision's numbers, weight files, stored features."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import fedexp
from fedexp.config.compose import compose
from fedexp.core.env import Specs
from fedexp.core.errors import ConfigError
from fedexp.core.jobs import ClientResult
from fedexp.core.net import Net
from fedexp.core.runner import Snapshot, run
from fedexp.core.seeds import torch_generator
from fedexp.core.weights import ModelSpec, Weights
from fedexp.data._torchvision import torchvision_module
from fedexp.engines.serial import Serial
from fedexp.engines.vectorized import Vectorized
from fedexp.models.resnet_features import ResNetExtractor
from fedexp.running.execute import execute
from fedexp.running.experiment import Experiment
from fedexp.storage.files import file_sha256
from fedexp.storage.identity import config_hash
from tests.world import CPU, assert_same

TINY = ["model=resnet18_features", "model.random_features=true", "model.width=2", "model.hidden=5"]
WORLD = [
    *TINY,
    "clients=3",
    "partition=iid",
    "limit.train=60",
    "limit.test=40",
    "rounds=2",
    "local.batch_size=10",
]


def torchvision_state(depth: int, seed: int = 0) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Return torchvision's network with random weights, and its state.

    The network is in evaluation mode.
    """
    # This makes the import below work with any version of torch
    torchvision_module("torchvision.datasets")
    import torchvision

    with torch.device("meta"):
        network = getattr(torchvision.models, f"resnet{depth}")()
    generator = torch_generator("torchvision", seed)
    state = {
        name: torch.ones((), dtype=torch.int64)
        if value.dtype == torch.int64
        else torch.rand(value.shape, generator=generator) * (0.1 if value.dim() > 1 else 1.0)
        + 0.05 * (value.dim() == 1)
        for name, value in network.state_dict().items()
    }
    network.load_state_dict(state, assign=True)
    return network.eval(), state


def extractor(**kwargs: object) -> tuple[Net, Weights]:
    name = f"{ResNetExtractor.__module__}.ResNetExtractor"
    spec = ModelSpec(name, tuple(sorted({"input_shape": (3, 40, 40), **kwargs}.items())))
    return Net(spec, CPU, torch.float32), Weights.init(spec, 0, CPU, torch.float32)


@pytest.mark.parametrize(("depth", "suffix"), [(18, ".pth"), (34, ".safetensors")])
def test_features_are_torchvisions(tmp_path: Path, depth: int, suffix: str) -> None:
    network, state = torchvision_state(depth)
    file = tmp_path / f"weights{suffix}"
    save_file(state, file) if suffix == ".safetensors" else torch.save(state, file)
    network.fc = torch.nn.Identity()
    net, weights = extractor(depth=depth, pretrained=str(file), sha256=file_sha256(file))
    x = torch.randn(2, 3, 40, 40, generator=torch_generator("x"))
    with torch.no_grad():
        expected = network(x)
        torch.testing.assert_close(
            net(weights.params, weights.buffers, x), expected, rtol=1e-4, atol=1e-5
        )
        larger, weights = extractor(
            depth=depth, pretrained=str(file), resize=40, input_shape=(1, 20, 20)
        )
        grey = x[:, :1, ::2, ::2].contiguous()
        scaled = torch.nn.functional.interpolate(
            grey, (40, 40), mode="bilinear", antialias=True
        ).repeat(1, 3, 1, 1)
        torch.testing.assert_close(
            larger(weights.params, weights.buffers, grey), network(scaled), rtol=1e-4, atol=1e-5
        )


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        Experiment.of(compose(["model=resnet18_features", *overrides]))
    return str(caught.value)


def test_extractor_with_unusable_file_is_refused_before_training(tmp_path: Path) -> None:
    said = refused()
    assert "model.pretrained=/path/to/resnet18.pth" in said and "model.random_features=true" in said
    assert "does not exist" in refused(f"model.pretrained={tmp_path}/none.pth")
    assert "not both" in refused(
        f"model.pretrained={tmp_path}/none.pth", "model.random_features=true"
    )
    (tmp_path / "broken.pth").write_bytes(b"not a file of torch's")
    assert "cannot be read" in refused(f"model.pretrained={tmp_path}/broken.pth")
    (tmp_path / "broken.safetensors").write_bytes(b"nothing")
    assert "cannot be read" in refused(f"model.pretrained={tmp_path}/broken.safetensors")
    torch.save([1, 2], tmp_path / "list.pth")
    assert "not contain a state dictionary" in refused(f"model.pretrained={tmp_path}/list.pth")
    deep = tmp_path / "deep.pth"
    torch.save(torchvision_state(34)[1], deep)
    said = refused(f"model.pretrained={deep}")
    assert "do not belong to this network" in said and "stages.0.2.conv1.weight" in said
    assert "not the ones that the config names" in refused(
        f"model.pretrained={deep}", "model.sha256=0123"
    )


def test_identity_of_pretrained_file_depends_on_its_content(tmp_path: Path) -> None:
    def hash_of(name: str) -> str:
        return config_hash(
            compose(["model=resnet18_features", f"model.pretrained={tmp_path}/{name}.pth"])
        )

    for name, content in (("a", b"one"), ("b", b"one"), ("c", b"two")):
        (tmp_path / f"{name}.pth").write_bytes(content)
    assert hash_of("a") == hash_of("b") != hash_of("c")
    assert hash_of("absent") not in {hash_of("a"), hash_of("c")}


def test_models_on_features_are_brought_in_by_runs_of_the_same_normalisation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Features are not normalised, but the inputs of the extractor are."""
    monkeypatch.chdir(tmp_path)
    quick = [*TINY, "clients=3", "rounds=1", "limit.train=60", "limit.test=20"]
    local = fedexp.run([*quick, "method=local"])
    fused = fedexp.run([*quick, f"client_models.path={local.folder}"])
    assert fused.metrics[-1]["local_steps"] == 0
    with pytest.raises(ConfigError, match="another normalisation"):
        fedexp.run([*quick, f"client_models.path={local.folder}", "dataset.mean=[0.5]"])


def whole_and_split(*overrides: str):
    """Return two variants of an experiment with equal initial heads.

    The first trains the whole network. The second trains only the head on features.
    """
    config = compose([*WORLD, "dtype=float64", *overrides])
    split = Experiment.of(config)
    assert split.extractor is not None and split.input_shape == (16,)
    whole_spec = ModelSpec.of(config["model"], split.dataset.shape, 10)
    whole = replace(split, specs=Specs(whole_spec), extractor=None, input_shape=split.dataset.shape)
    data = split.load(CPU)
    notes: list[str] = []
    features = replace_memo(split).prepare(data, notes.append)
    assert len(notes) == 1 and "100 samples" in notes[0]
    assert whole.prepare(data, notes.append) is data
    start = whole.env(data, CPU).initial_weights()
    return (whole, data, start), (split, features, Weights(split.specs.server, head_of(start), {}))


def replace_memo(experiment: Experiment) -> Experiment:
    return replace(experiment, config=replace(experiment.config, reuse=False))


def head_of(weights: Weights) -> dict[str, torch.Tensor]:
    return {
        name: value for name, value in weights.params.items() if not name.startswith("extractor.")
    }


def train(world, engine) -> list[Weights]:
    experiment, data, start = world
    env = experiment.env(data, CPU)
    state = experiment.aggregator.init(env)
    snapshot = Snapshot(0, {**state, "weights": start})
    return [
        step.after.state["weights"]
        for step in run(experiment.aggregator, env, engine, data, snapshot)
    ]


@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
@pytest.mark.parametrize("engine", [Serial, Vectorized])
def test_a_frozen_model_trains_like_its_head_on_features(method: str, engine: type) -> None:
    whole, split = whole_and_split(f"method={method}", "aggregator.weights=uniform")
    ones, heads = train(whole, engine()), train(split, engine())
    start = whole[2]
    for one, head in zip(ones, heads, strict=True):
        assert_same([head_of(one)], [head.params], tolerance=1e-9)
        # Frozen tensors are bit-identical, including the statistics of BatchNorm
        for name in start.frozen:
            assert torch.equal(
                {**one.params, **one.buffers}[name], {**start.params, **start.buffers}[name]
            ), name
    assert not torch.allclose(heads[-1].params["output.weight"], split[2].params["output.weight"])


def test_control_variates_cover_what_is_trained() -> None:
    (experiment, data, start), _ = whole_and_split("method=scaffold")
    state = experiment.aggregator.init(experiment.env(data, CPU))
    assert set(state["shared"]["c"]) == {"hidden.0.weight", "output.weight"}
    assert (
        set(start.trainable) == {"hidden.0.weight", "output.weight"}
        and len(start.frozen) == 60 + 60
    )


def test_augmented_batches_are_trained_through_the_whole_network() -> None:
    experiment = Experiment.of(
        compose([*WORLD, "dataset.augment={flip: 0.5, crop_padding: 1, crop_probability: 1.0}"])
    )
    assert experiment.extractor is None and experiment.specs.server.arch.endswith("ResNetFeatures")
    env = experiment.env(experiment.load(CPU), CPU)
    net = Net(env.server_spec, CPU, torch.float32)
    assert not net.has_batch_norm
    weights = env.initial_weights()
    assert env.job(0, weights, {}).frozen == {
        name for name in weights.params if name.startswith("extractor.")
    }
    assert (
        env.job(0, weights, {}, frozenset({"output.weight"})).frozen
        > env.job(0, weights, {}).frozen
    )


def test_all_clients_have_the_same_random_features() -> None:
    experiment = Experiment.of(compose([*WORLD, "init=different", "dataset.augment={flip: 0.5}"]))
    env = experiment.env(experiment.load(CPU), CPU)
    one, two = env.initial_weights(0), env.initial_weights(1)
    assert all(
        torch.equal(one.params[name], two.params[name]) for name in one.frozen & one.params.keys()
    )
    assert not torch.equal(one.params["output.weight"], two.params["output.weight"])


def test_runs_share_features_and_keep_the_head_alone(tmp_path: Path) -> None:
    said: list[str] = []
    common = [
        *WORLD,
        f"output_root={tmp_path}/out",
        "proxy.source=test",
        "proxy.size=10",
        "partition.val_fraction=0.2",
    ]
    results = [execute(compose([*common, f"local.lr={lr}"]), say=said.append) for lr in (0.1, 0.2)]
    assert sum("features of" in line for line in said) == 1
    assert all(0 <= result["metrics"]["test/global/acc"] <= 1 for result in results)
    execute(compose([*common, "local.lr=0.1", "model.resize=12"]), say=said.append)
    assert sum("features of" in line for line in said) == 2
    # Other algorithms may change the last bits of features
    for switch in ("deterministic=true", "cudnn_benchmark=true"):
        execute(compose([*common, "local.lr=0.3", switch]), say=said.append)
    assert sum("features of" in line for line in said) == 4
    from safetensors import safe_open

    with safe_open(Path(results[0]["folder"]) / "model.safetensors", "pt") as file:
        shapes = {name: tuple(file.get_tensor(name).shape) for name in file.keys()}  # noqa: SIM118
        specs = json.loads(file.metadata()["fedexp"])["specs"]
    assert shapes == {"hidden.0.weight": (5, 16), "output.weight": (10, 5)}
    assert specs[0]["arch"] == "fedexp.models.mlp.MLP"


def test_statistics_of_a_frozen_extractor_never_move() -> None:
    """The statistics of a frozen extractor never change.

    They do not change if the network was in evaluation mode before. Rounding in an
    aggregation does not change them either.
    """
    experiment = Experiment.of(compose([*WORLD, "dataset.augment={flip: 0.5}"]))
    data = experiment.load(CPU)
    env = experiment.env(data, CPU)
    start = env.initial_weights()
    generator = torch_generator("statistics")
    odd = {
        name: torch.rand(value.shape, generator=generator) if value.is_floating_point() else value
        for name, value in start.buffers.items()
    }
    start = replace(start, buffers=odd)
    net = Net(start.spec, CPU, torch.float32)
    net.train(False)
    net.train(True)
    used = {name: value.clone() for name, value in odd.items()}
    net(start.params, used, data.train.inputs(slice(0, 4)))
    assert all(torch.equal(used[name], odd[name]) for name in odd)
    state = {**experiment.aggregator.init(env), "weights": start}
    results = [
        ClientResult(c, start, n, 1, {}, None, {"loss": 0.0}) for c, n in enumerate((7, 11, 13))
    ]
    after, _ = experiment.aggregator.update(state, results, env)
    assert all(torch.equal(after["weights"].buffers[name], odd[name]) for name in odd)
    assert all(
        torch.equal(after["weights"].params[name], start.params[name]) for name in start.params
    )
