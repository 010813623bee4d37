"""Models from elsewhere are fused with the facts about clients in their folder.

The configured partition is used only if the configuration declares it as theirs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import fedexp
from fedexp.config.compose import compose
from fedexp.core.env import Env
from fedexp.core.errors import ConfigError, FedexpError, StorageError
from fedexp.core.jobs import ClientResult
from fedexp.core.layers import layers_of
from fedexp.core.task import Metrics
from fedexp.core.weights import Weights
from fedexp.methods.bases.fusion import FusionAggregator, averaged
from fedexp.methods.ma_echo.aggregator import MAEcho
from fedexp.running.experiment import load_data
from fedexp.storage.client_data import load_client_data
from fedexp.storage.model_folder import ModelFolder
from fedexp.storage.tensors import load_tree, save_tree

BASE = ["rounds=1", "clients=3", "threads=1", "memo.enabled=false", "model.hidden=[5]"]
IID = "partition=iid"
MODEL = {"_target_": "fedexp.models.mlp.MLP", "hidden": [5]}
MINE = "client_models.path=mine"
MA_ECHO = [
    "method=ma_echo",
    "aggregator.T=2",
    "aggregator.projector=exact",
    "aggregator.damping=update",
]


@dataclass(frozen=True)
class CountsSeen(FusionAggregator):
    """The mean of the models, which also logs the sum of the numbers of samples."""

    def fuse(self, results: Sequence[ClientResult], env: Env) -> tuple[Weights, Metrics]:
        seen = sum(result.num_examples for result in results)
        return averaged([result.weights for result in results]), {"seen": float(seen)}


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> fedexp.Run:
    """Return a run whose models were trained on equal shares.

    These shares differ from the default partition.
    """
    root = tmp_path_factory.mktemp("local")
    return fedexp.run([*BASE, "method=local", IID, "local.epochs=1", f"output_root={root}"])


def saved(local: fedexp.Run, **arguments: Any) -> None:
    """Save the models as if they came from another framework."""
    fedexp.save_models(
        "mine",
        [local.module(client).state_dict() for client in range(3)],
        MODEL,
        input_shape=(1, 8, 8),
        num_classes=10,
        **arguments,
    )


def raw_samples(local: fedexp.Run) -> list[tuple[torch.Tensor, torch.Tensor]]:
    data = load_data(compose([*BASE, IID]))
    index = [torch.from_numpy(local.partition.of(client)) for client in range(3)]
    return [(data.train.x[i], data.train.y[i]) for i in index]


def normalisation(local: fedexp.Run) -> dict[str, Any]:
    return {name: local.config["dataset"][name] for name in ("mean", "std")}


def fuse(*overrides: str) -> fedexp.Run:
    return fedexp.run([*BASE, *overrides])


def assert_same(one: fedexp.Run, other: fedexp.Run, atol: float = 0.0) -> None:
    for name, value in one.models[0].params.items():
        torch.testing.assert_close(value, other.models[0].params[name], rtol=0, atol=atol)


def test_run_folder_is_fused_with_its_own_split(local: fedexp.Run) -> None:
    path = f"client_models.path={local.folder}"
    fused, same = fuse(*MA_ECHO, path), fuse(*MA_ECHO, path, IID)
    assert fused.result["partition"]["sha256"] == local.result["partition"]["sha256"]
    assert_same(fused, same)
    assert "not those of the configured partition" in (fused.folder / "run.log").read_text()
    assert not (same.folder / "run.log").exists()

    declared = [*MA_ECHO, path, "client_models.data=partition"]
    assert_same(fused, fuse(*declared, IID))
    with pytest.raises(FedexpError, match="not trained on the configured partition"):
        fuse(*declared)


def test_run_folder_without_its_validation_share_is_refused(local: fedexp.Run) -> None:
    with pytest.raises(FedexpError, match="trained on all of them"):
        fuse("method=average", f"client_models.path={local.folder}", "partition.val_fraction=0.2")


@pytest.mark.parametrize("taken", [["eval.held_out=100"], ["proxy.source=train", "proxy.size=100"]])
def test_samples_that_the_models_were_trained_on_are_not_taken(
    taken: list[str], local: fedexp.Run, tmp_path: Path
) -> None:
    """The models were trained on all samples. Held-out and server data must be others."""
    path = f"client_models.path={local.folder}"
    for more in ([], ["client_models.data=partition"]):
        with pytest.raises(FedexpError, match="chose other training samples"):
            fuse("method=fedavg", path, IID, *more, *taken)

    trained = fedexp.run([*BASE, "method=local", IID, *taken, f"output_root={tmp_path}"])
    path = f"client_models.path={trained.folder}"
    for more in ([], ["client_models.data=partition"]):
        assert fuse("method=fedavg", path, IID, *more, *taken).status == "done"

    saved(local)
    with pytest.raises(ConfigError, match="does not contain the clients' samples"):
        fuse("method=fedavg", "aggregator.weights=uniform", MINE, *taken)
    saved(local, data=raw_samples(local), keep_data=True)
    with pytest.raises(FedexpError, match="may have been trained on the same samples"):
        fuse("method=fedavg", MINE, *taken)


def test_split_of_changed_inputs_is_refused_if_it_is_needed(tmp_path: Path) -> None:
    skew = ["feature_skew.kind=noise", "feature_skew.strength=3"]
    trained = fedexp.run([*BASE, "method=local", IID, *skew, f"output_root={tmp_path}"])
    path = f"client_models.path={trained.folder}"
    with pytest.raises(FedexpError, match="feature_skew changed the inputs"):
        fuse(*MA_ECHO, path)
    assert fuse("method=fedavg", path).status == "done"


def test_models_that_were_trained_with_another_feature_skew_are_refused(
    tmp_path: Path, local: fedexp.Run
) -> None:
    skew = ["feature_skew.kind=noise", "feature_skew.strength=3"]
    trained = fedexp.run([*BASE, "method=local", IID, *skew, f"output_root={tmp_path}"])
    own = ["method=fedavg", IID, "client_models.data=partition"]
    noisy, plain = (f"client_models.path={run.folder}" for run in (trained, local))
    other = ["feature_skew.kind=noise", "feature_skew.strength=2"]
    for overrides in ([noisy], [plain, *skew], [noisy, *other]):
        with pytest.raises(ConfigError, match="another feature skew"):
            fuse(*own, *overrides)
    with pytest.raises(ConfigError, match=r"feature_skew\.kind=noise feature_skew\.strength=3"):
        fuse(*own, noisy)

    saved(local)
    for overrides in ([noisy, *skew], [plain], [MINE, *skew], [MINE]):
        assert fuse(*own, *overrides).status == "done"


@pytest.mark.parametrize(("overrides", "known", "missing"), [
    (["method=fedavg"], {}, "numbers of samples"),
    (["method=ensemble", "aggregator.combine=samples"], {}, "numbers of samples"),
    (["method=average", "aggregator.last_layer=masked"], {"num_examples": [1, 1, 1]}, "class counts"),
    (["method=pfnm"], {"num_examples": [1, 1, 1]}, "class counts"),
    (["method=ma_echo"], {"class_counts": [[2] * 10] * 3}, "clients' samples"),
    (["method=fedavg", "rounds=2"], {"num_examples": [1, 1, 1]}, "clients' samples"),
    (["method=average", "partition.val_fraction=0.2"], {}, "clients' samples"),
    (["method=average", "eval.per_client=true"], {}, "clients' samples"),
])  # fmt: skip
def test_missing_fact_is_named_before_anything_runs(
    overrides: list[str], known: dict[str, Any], missing: str, local: fedexp.Run
) -> None:
    saved(local, **known)
    with pytest.raises(ConfigError, match=missing) as refused:
        fuse(MINE, *overrides)
    assert "fedexp.save_models(" in str(refused.value)
    assert "client_models.data=partition" in str(refused.value)
    assert not Path("outputs/runs").exists()
    given = [o for o in overrides if "val_fraction" not in o]
    assert fuse(MINE, *given, IID, "client_models.data=partition").status == "done"


def test_probe_that_no_need_declares_is_refused(local: fedexp.Run) -> None:
    Path("conf/aggregator").mkdir(parents=True)
    Path("conf/aggregator/counts.yaml").write_text(
        "_target_: tests.engines.test_stored_models.CountsAsBias\n"
    )
    saved(local)
    with pytest.raises(FedexpError, match="asks clients for class_counts"):
        fuse(MINE, "aggregator=counts")


def test_unknown_counts_are_not_those_of_the_configured_partition(local: fedexp.Run) -> None:
    Path("conf/aggregator").mkdir(parents=True)
    Path("conf/aggregator/seen.yaml").write_text(
        "_target_: tests.engines.test_client_data.CountsSeen\n"
    )
    saved(local)
    assert fuse(MINE, "aggregator=seen").metrics[-1]["seen"] == 0

    clients = ModelFolder.open(fuse(MINE, "method=ensemble").folder).clients
    assert clients is not None and clients.num_examples is None and clients.class_counts is None


def test_answers_to_probes_replace_samples(local: fedexp.Run) -> None:
    spec = local.models[0].spec
    probes = [
        MAEcho(projector="exact", damping="update").projections(spec, layers_of(spec, (1, 8, 8)))
    ]
    saved(local, data=raw_samples(local), probes=probes, **normalisation(local))
    tree, _ = load_tree(Path("mine/client_data.safetensors"), torch.device("cpu"))
    assert all(key.startswith("answers/") for key in tree)
    facts = json.loads(Path("mine/clients.json").read_text())
    assert facts["num_examples"] == local.partition.sizes.tolist()

    assert_same(fuse(*MA_ECHO, MINE), fuse(*MA_ECHO, f"client_models.path={local.folder}"), 1e-5)
    with pytest.raises(FedexpError, match="answers in the folder are to other probes") as refused:
        fuse("method=ma_echo", MINE)
    assert "keep_data=True" in str(refused.value)


def test_default_probe_is_that_of_ma_echo(local: fedexp.Run) -> None:
    saved(local, data=raw_samples(local), **normalisation(local))
    assert fuse("method=ma_echo", "aggregator.T=2", MINE).status == "done"


def test_stored_samples_serve_every_need(local: fedexp.Run) -> None:
    saved(local, data=raw_samples(local), keep_data=True, **normalisation(local))
    path = f"client_models.path={local.folder}"
    assert_same(fuse(*MA_ECHO, MINE), fuse(*MA_ECHO, path), 1e-5)
    later = ["rounds=2", "local.epochs=1", "local.batch_size=1000"]
    assert_same(fuse("method=fedavg", MINE, *later), fuse("method=fedavg", path, *later), 1e-5)


def test_stored_samples_of_another_form_are_refused(local: fedexp.Run) -> None:
    saved(local, data=raw_samples(local), keep_data=True, **normalisation(local))
    with pytest.raises(FedexpError, match="trained on all of them"):
        fuse("method=average", MINE, "partition.val_fraction=0.2")

    floats = [(x.float() / 255, y) for x, y in raw_samples(local)]
    saved(local, data=floats, keep_data=True, **normalisation(local))
    with pytest.raises(FedexpError, match="do not have the form of the data set's samples"):
        fuse("method=average", MINE)


def test_positions_are_used_with_the_data_set_that_they_are_from(local: fedexp.Run) -> None:
    positions = [local.partition.of(client) for client in range(3)]
    saved(local, data=positions, data_sha256=local.result["partition"]["data_sha256"])
    assert_same(fuse(*MA_ECHO, MINE), fuse(*MA_ECHO, f"client_models.path={local.folder}"))

    saved(local, data=positions, data_sha256="0" * 64)
    with pytest.raises(FedexpError, match="it is a split of other data"):
        fuse(*MA_ECHO, MINE)


@pytest.mark.parametrize(("change", "message"), [
    ({"data": [[0, 1]], "data_sha256": "0"}, "every model needs its samples"),
    ({"data": [[0, 1]] * 3}, "need the fingerprint of their data set"),
    ({"data": [(torch.zeros(2, 3), torch.zeros(2).long())] * 3}, "client 0 do not fit"),
    ({"data": [(torch.zeros(2, 1, 8, 8), torch.tensor([0, 10]))] * 3}, "labels in 0 .. 10"),
    ({"data": [(torch.zeros(2, 1, 8, 8), torch.zeros(2).long())] * 3}, "how inputs were normalised"),
])  # fmt: skip
def test_unfit_data_is_refused(change: dict[str, Any], message: str, local: fedexp.Run) -> None:
    with pytest.raises(ConfigError, match=message):
        saved(local, **change)
    assert not Path("mine").exists()


def test_data_of_earlier_models_are_not_those_of_later_ones(local: fedexp.Run) -> None:
    counts = torch.ones(3, 10, dtype=torch.int64)
    positions = [local.partition.of(client) for client in range(3)]
    saved(local, data=positions, data_sha256=local.result["partition"]["data_sha256"])
    assert Path("mine/client_data.safetensors").exists()
    saved(local, class_counts=counts)
    assert not Path("mine/client_data.safetensors").exists()


def test_a_damaged_description_of_the_data_is_named(local: fedexp.Run) -> None:
    positions = [local.partition.of(client) for client in range(3)]
    saved(local, data=positions, data_sha256=local.result["partition"]["data_sha256"])
    path = Path("mine/client_data.safetensors")
    tree = load_tree(path, torch.device("cpu"))[0]
    save_tree(path, tree, {"samples": 0, "indices": 3, "data_sha256": "x"})
    with pytest.raises(StorageError, match=r"client_data\.safetensors is damaged"):
        load_client_data(Path("mine"))


def test_weights_by_samples_need_the_split_of_the_models(local: fedexp.Run) -> None:
    saved(local, num_examples=[3, 4, 5])
    fedcda = ["method=fedcda", "aggregator.warm_up=0", "aggregator.strategy=newest"]
    fuse(MINE, *fedcda)
    with pytest.raises(ConfigError, match="samples"):
        fuse(MINE, *fedcda, "aggregator.chosen_weights=samples")
