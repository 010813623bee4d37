"""Tests of drawings of models: what they read from a run's folder, and compute."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fedexp.config.compose import compose
from fedexp.core.errors import DataError, StorageError
from fedexp.core.net import Net
from fedexp.core.outcome import Delivers, Outcome
from fedexp.core.resolved_config import ResolvedConfig
from fedexp.core.trees import Tree
from fedexp.core.weights import ModelSpec, Weights
from fedexp.models.cvae import decoder_of, generate
from fedexp.running.experiment import load_data
from fedexp.storage.files import write_json
from fedexp.storage.model_folder import save_outcome
from fedexp.storage.tensors import save_tree
from fedexp.tables.drawing import DrawnRun
from fedexp.tables.drawings import plane as planes
from fedexp.tables.drawings.plane import Plane, around, plane
from fedexp.tables.drawings.samples import SamplesDrawing, montage, read
from fedexp.tables.drawings.stored import (
    by_row,
    delivered,
    evaluated,
    passed,
    split_vector,
    vector_of,
)
from fedexp.tables.drawings.units import Units, met
from tests.matching.nets import MODELS, weights_of
from tests.world import CPU, assert_same

CVAE = ModelSpec.of(
    {
        "_target_": "fedexp.models.cvae.Cvae",
        "latent": 3,
        "hidden": [5, 6],
        "mean": [0.3],
        "std": [0.5],
    },
    (1, 4, 4),
    7,
)


def run(
    folder: Path, method: str = "m", config: ResolvedConfig | None = None, seed: int = 0
) -> DrawnRun:
    return DrawnRun({}, method, method.upper(), seed, folder, config or ResolvedConfig(), {})


def save(folder: Path, models: Sequence[Weights], kind: Delivers = "global") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_outcome(Outcome(tuple(models), kind), None, folder)
    return folder


def keep(folder: Path, steps: dict[int, dict[str, list[Tree]]], round: int = 1) -> Path:
    """Write a trace with the names that `fedexp.evaluation.tracing` gives."""
    tree = {
        f"{step}/{series}/{number}/{name}": value
        for step, all_series in steps.items()
        for series, models in all_series.items()
        for number, params in enumerate(models)
        for name, value in params.items()
    }
    (folder / "trace").mkdir(parents=True, exist_ok=True)
    save_tree(folder / "trace" / f"{round}.safetensors", tree, {})
    return folder


# --- what is read


@pytest.mark.parametrize("kind", ["global", "local"])
def test_models_are_read_as_they_were_written(tmp_path: Path, kind: Delivers) -> None:
    spec = MODELS["resnet, BatchNorm"]
    models = [weights_of(spec, i) for i in range(1 if kind == "global" else 3)]
    found = delivered(run(save(tmp_path, models, kind)))
    assert [m.spec for m in found] == [spec] * len(models)
    assert_same([m.params for m in found], [m.params for m in models])
    assert_same([m.buffers for m in found], [m.buffers for m in models])


def test_drawn_model_of_a_class_that_no_config_names_is_refused(tmp_path: Path) -> None:
    model = Weights(ModelSpec("tests.world.Softmax", ()), {"fc.weight": torch.ones(10, 64)}, {})
    folder = save(tmp_path, [model])
    with pytest.raises(StorageError, match=r"tests\.world\.Softmax"):
        delivered(run(folder))


def test_a_trace_is_read_in_order_and_only_what_is_asked_for(tmp_path: Path) -> None:
    def models(step: int) -> dict[str, list[Tree]]:
        return {"W": [{"a": torch.full((2,), step), "b": torch.zeros(1)}],
                "V": [{"a": torch.full((2,), 100 * i + step), "b": torch.zeros(1)} for i in range(12)]}  # fmt: skip

    keep(tmp_path, {10: models(10), 2: models(2)}, round=10)
    keep(tmp_path, {7: models(7)}, round=9)  # This is an earlier round.
    found = passed(run(tmp_path), "V", ["a"])
    assert list(found) == [2, 10] and [set(v) for v in found[2]] == [{"a"}] * 12
    assert [int(v["a"][0]) for v in found[10]] == [100 * i + 10 for i in range(12)]
    with pytest.raises(StorageError, match="nothing is stored of series 'mean_v'") as error:
        passed(run(tmp_path), "mean_v")
    assert "a of W" in str(error.value)
    with pytest.raises(StorageError, match=r"'M' has no trace/0\.safetensors"):
        passed(run(tmp_path / "none"), "W")


def test_evaluated_is_the_last_rounds_row(tmp_path: Path) -> None:
    assert evaluated(run(tmp_path), 3) == {}
    for name, value in (("9", 0.1), ("10", 0.2)):
        rows = [{"iteration": 0}, {"iteration": 3, "V/train/acc": [value]}]
        write_json(tmp_path / "trace" / f"{name}.json", {"rows": rows}, seal=True)
    assert (
        evaluated(run(tmp_path), 3) == {"iteration": 3, "V/train/acc": [0.2]}
        and evaluated(run(tmp_path), 4) == {}
    )


def test_rows_and_seeds_are_drawn_apart(tmp_path: Path) -> None:
    runs = [run(tmp_path, method, seed=seed) for seed in (0, 1) for method in ("a", "b")]
    assert [(where, list(group)) for where, group in by_row(runs)] == [
        ("seed 0", ["a", "b"]),
        ("seed 1", ["a", "b"]),
    ]
    assert [where for where, _ in by_row(runs[:2])] == [""] and by_row([]) == []


def test_flat_and_back() -> None:
    params = weights_of(MODELS["cnn"], 1).params
    vector = vector_of(params)
    assert vector.shape == (sum(v.numel() for v in params.values()),)
    assert_same([split_vector(vector, params)], [params])


# --- images


def test_montage_puts_images_where_they_belong() -> None:
    images = torch.rand(2, 3, 1, 4, 5, generator=torch.Generator().manual_seed(0))
    sheet = montage(images, 2)
    assert sheet.shape == (2 * 4 + 2, 3 * 5 + 2 * 2, 4)
    assert (
        torch.equal(sheet[6:10, 14:19, 1], images[1, 2, 0]) and (sheet[6:10, 14:19, 3] == 1).all()
    )
    assert not sheet[4:6].any() and not sheet[:, 5:7].any()
    colours = torch.rand(1, 1, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    assert torch.equal(montage(colours, 1)[..., :3], colours[0, 0].permute(1, 2, 0))


def test_every_model_draws_from_the_same_codes() -> None:
    model = weights_of(CVAE, 0)
    before = torch.random.get_rng_state()
    images = SamplesDrawing().images(model, 4)
    assert torch.equal(before, torch.random.get_rng_state())
    assert images.shape == (4, 7, 1, 4, 4) and torch.equal(
        images[:2], SamplesDrawing().images(model, 4)[:2]
    )
    assert not torch.equal(images, SamplesDrawing(seed=1).images(model, 4))
    label = model.params["decoder.0.weight"].clone()
    # The decoder ignores labels, so all images of a row, which has one code, are equal.
    label[:, 3:] = 0
    images = SamplesDrawing().images(
        Weights(CVAE, {**model.params, "decoder.0.weight": label}, {}), 4
    )
    torch.testing.assert_close(images, images[:, :1].expand_as(images))
    assert not torch.allclose(images[0], images[1])
    code = model.params["decoder.0.weight"].clone()
    # The decoder ignores codes, so all images of a column, which has one label, are
    # equal.
    code[:, :3] = 0
    blind = Weights(CVAE, {**model.params, "decoder.0.weight": code}, {})
    alone = generate(decoder_of(blind), torch.arange(7), torch.zeros(7, 3, dtype=torch.float64))
    for row in SamplesDrawing().images(blind, 3):
        torch.testing.assert_close(row, alone)


def test_reading_is_the_class_with_the_highest_bound() -> None:
    judge = weights_of(CVAE, 0)
    judge = Weights(CVAE, {name: 3 * value for name, value in judge.params.items()}, {})
    images = torch.rand(
        60, 1, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    net = Net(CVAE, CPU, torch.float64)
    net.train(False)
    classes = []
    for image in images:
        x = ((image - 0.3) / 0.5)[None]
        losses = [float(net(judge.params, {}, x, torch.tensor([k])).sum()) for k in range(7)]
        classes.append(losses.index(min(losses)))
    assert read(judge, images).tolist() == classes and len(set(classes)) > 2


def test_samples_take_the_clients_model_and_the_columns_asked_for(tmp_path: Path) -> None:
    locals_ = [weights_of(CVAE, i) for i in range(2)]
    both = save(tmp_path / "local", locals_, "local")
    one = save(tmp_path / "one", locals_[1:])
    (first,) = SamplesDrawing(codes=1).draw([run(both)])
    (second,) = SamplesDrawing(codes=1, model={"m": 1}).draw([run(both)])
    (same,) = SamplesDrawing(codes=1).draw([run(one)])
    assert second.svg == same.svg != first.svg and second.name == "samples"
    (drawn,) = SamplesDrawing(codes=1, methods=("m",), judge="m").draw(
        [run(one), run(both, "other")]
    )
    assert "reads as their class" in drawn.title
    assert SamplesDrawing(methods=("none",)).draw([run(one)]) == ()
    assert {p.name for p in SamplesDrawing(codes=1).draw([run(one), run(one, seed=1)])} == {
        "samples-seed-0",
        "samples-seed-1",
    }


# --- units


def test_rows_meet_those_of_their_number() -> None:
    rows = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 5
    assert met(torch.stack([rows, rows + 0.01, rows - 0.01])) == 1
    assert met(torch.stack([rows, rows.roll(1, 0)])) == 0
    swapped = rows[[1, 0, 2, 3, 4, 5]]
    assert met(torch.stack([rows, rows, swapped])) == pytest.approx((2 * 6 + 4 * 4) / (6 * 6))


def test_units_are_those_of_the_last_iteration_kept(tmp_path: Path) -> None:
    def models(seed: int) -> list[Tree]:
        generator = torch.Generator().manual_seed(seed)
        return [
            {"x.weight": torch.randn(8, 5, generator=generator), "y.weight": torch.ones(3)}
            for _ in range(3)
        ]

    late = keep(tmp_path / "late", {0: {"V": models(1)}, 4: {"V": models(2)}})
    alone = keep(tmp_path / "alone", {4: {"V": models(2)}})
    early = keep(tmp_path / "early", {0: {"V": models(1)}})
    before = np.random.get_state()[1].tolist()  # type: ignore[index]
    pictures = [Units("x.weight").draw([run(folder)])[0] for folder in (late, alone, early)]
    assert np.random.get_state()[1].tolist() == before  # type: ignore[index]
    assert (
        pictures[0].svg == pictures[1].svg != pictures[2].svg and pictures[0].png[:4] == b"\x89PNG"
    )
    write_json(alone / "trace" / "1.json", [{"iteration": 4, "V/train/acc": [0.5, 0.7, 0.9]}])
    (told,) = Units("x.weight").draw([run(alone)])
    assert told.svg != pictures[1].svg
    with pytest.raises(StorageError, match=r"nothing is stored of series 'V' and z\.weight"):
        Units("z.weight").draw([run(late)])


# --- the plane


def test_projection_is_least_squares() -> None:
    generator = torch.Generator().manual_seed(0)
    g0, g1, g2, g = torch.randn(4, 40, dtype=torch.float64, generator=generator)
    basis = plane(g0, g1, g2)
    torch.testing.assert_close(basis @ basis.T, torch.eye(2, dtype=torch.float64))
    span = torch.stack([g1 - g0, g2 - g0]).numpy()
    weights, *_ = np.linalg.lstsq(span.T, (g - g0).numpy(), rcond=None)
    torch.testing.assert_close((basis @ (g - g0)) @ basis, torch.from_numpy(span.T @ weights))
    torch.testing.assert_close(
        basis @ (g1 - g0), torch.stack([(g1 - g0).norm(), torch.zeros((), dtype=g0.dtype)])
    )
    assert float(basis[1] @ (g2 - g0)) > 0
    for third in (g0 + 3 * (g1 - g0), g0):
        with pytest.raises(StorageError, match="no plane"):
            plane(g0, g1, third)


def test_surface_reaches_beyond_the_path() -> None:
    assert around(torch.tensor([1.0, 3.0, 2.0]), 0.25, 4) == pytest.approx([0.5, 1.5, 2.5, 3.5])


DIGITS = ["model.hidden=[6]", "method=ma_echo", "rounds=1"]


def trajectory(config: ResolvedConfig, steps: int = 4) -> list[Tree]:
    spec = ModelSpec.of(config["model"], (1, 8, 8), 10)
    return [Weights.init(spec, seed, CPU, torch.float32).params for seed in range(steps)]


def test_loss_is_the_cross_entropy_of_the_first_test_images() -> None:
    config = compose(DIGITS)
    test = load_data(config).test
    (params,) = trajectory(config, 1)
    x = test.inputs(slice(0, 37)).flatten(1)
    names: list[Tensor] = list(params.values())
    logits = torch.relu(x @ names[0].T + names[1]) @ names[2].T + names[3]
    expected = float(functional.cross_entropy(logits.double(), test.y[:37]))
    assert planes.test_loss(config, 37)(params) == pytest.approx(expected, rel=1e-5)


def test_a_path_is_drawn_over_the_loss_and_absent_data_are_told(tmp_path: Path) -> None:
    config = compose(DIGITS)
    path = trajectory(config)
    keep(tmp_path, {step: {"W": [params]} for step, params in enumerate(path)})
    drawing = Plane(method="m", resolution=3, images=20)
    (picture,) = drawing.draw([run(tmp_path, config=config), run(tmp_path, "other")])
    loss = planes.test_loss(config, 20)
    assert (
        picture.name == "plane"
        and f"t = 0: {loss(path[0]):.3g}; at t = 3: {loss(path[3]):.3g}" in picture.title
    )
    assert drawing.draw([run(tmp_path, "other")]) == ()
    keep(tmp_path / "few", {step: {"W": [path[step]]} for step in (0, 2, 3)})
    with pytest.raises(StorageError, match="iterations 0, 1 and 2"):
        drawing.draw([run(tmp_path / "few", config=config)])
    absent = compose([*DIGITS, "dataset=mnist", f"data_root={tmp_path}/nothing"])
    with pytest.raises(DataError, match="do not exist"):
        drawing.draw([run(tmp_path, config=absent)])
