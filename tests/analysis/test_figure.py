"""Tests of pictures of runs: files, styles, and the command that writes them."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from fedexp.analysis.figure import _draw_panel, _notes, limits, series_label, series_styles
from fedexp.analysis.series import PlotSpec, Point, mean_interval, plot_data
from fedexp.commands.runs import run_command
from fedexp.config.folders import conf_dir
from fedexp.storage.stored_run import find_runs
from fedexp.tables.plot_styles import read_method_styles
from fedexp.tables.report import canvas
from tests.analysis.written import write_run

PRESETS = sorted(path.stem for path in (conf_dir() / "method").glob("*.yaml"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for method, height in (("fedavg", 0.0), ("scaffold", 0.2)):
        for seed in (0, 1):
            write_run(tmp_path, method, seed, [0.1 + height, 0.4 + height + seed / 10])
    return tmp_path


def colours(png: bytes) -> set[tuple[int, ...]]:
    image = np.rint(imread(io.BytesIO(png))[..., :3] * 255).astype(int)
    return {tuple(pixel) for pixel in image.reshape(-1, 3).tolist()}


def rgb(colour: str) -> tuple[int, ...]:
    return tuple(int(colour[at : at + 2], 16) for at in (1, 3, 5))


def test_plot_writes_three_formats_with_the_notes(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(root, "scaffold", 2, [0.1], status="failed", rounds=2)
    assert run_command(["plot", "--root", str(root)]) == 0
    out = capsys.readouterr().out
    assert "missing: method=scaffold: seed 2 (failed)" in out and "4 runs, seeds 0, 1" in out
    stem = root / "plots" / "test-global-acc-over-round-by-method"
    assert f"picture: {stem}.png, .svg, .pdf" in out.replace("\n", "")
    png, svg, pdf = (
        stem.with_name(stem.name + end).read_bytes() for end in (".png", ".svg", ".pdf")
    )
    assert pdf.startswith(b"%PDF") and b"Type3" not in pdf and b"<svg" in svg
    # The legend's lines are drawn at 90 % opacity on white.
    found = colours(png)
    for name in ("blue", "vermillion"):
        target = np.array(rgb(canvas.COLOURS[name])) * 0.9 + 255 * 0.1
        assert min(np.abs(np.array(pixel) - target).max() for pixel in found) <= 2


def test_same_runs_are_drawn_to_the_same_bytes(root: Path) -> None:
    for name in ("a", "b"):
        assert run_command(["plot", "--root", str(root), "--out", str(root / name)]) == 0
    for end in (".png", ".svg", ".pdf"):
        assert (root / f"a{end}").read_bytes() == (root / f"b{end}").read_bytes()


def test_out_with_an_ending_writes_only_this_format(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = root / "deep" / "curves.v2.pdf"
    assert run_command(["plot", "--root", str(root), "--out", str(out)]) == 0
    assert [path.name for path in out.parent.iterdir()] == ["curves.v2.pdf"]
    assert run_command(["plot", "--root", str(root), "--out", str(root / "a.jpg")]) == 2
    assert ".png, .svg, .pdf" in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "words"), [
    (["hue=method"], "use one of: by, cols, rows, x, y"), (["row=seed"], "did you mean 'rows'?"), (["x="], "'x' has no value"),
    (["by=method,"], "'by' has no value"), (["method"], "is not a condition"),
])  # fmt: skip
def test_wrong_arguments_are_refused(
    root: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert run_command(["plot", "--root", str(root), *arguments]) == 2
    assert words in capsys.readouterr().err and not (root / "plots").exists()


def test_bands_of_two_seeds_do_not_hide_the_curves(root: Path) -> None:
    def point(*values: float) -> Point:
        return Point(0.0, *mean_interval(values), values)

    low, high = limits([point(0.2, 0.4), point(0.5, 0.6)])
    assert low == pytest.approx(0.2 - 0.3 * 0.4 - 0.05 * 0.64)
    assert high == pytest.approx(0.6 + 0.3 * 0.4 + 0.05 * 0.64)
    low, high = limits([point(0.5), point(0.7)])
    assert (low, high) == pytest.approx((0.49, 0.71))


def test_limits_around_equal_values_ignore_rounding() -> None:
    mean, *interval = mean_interval([0.1, 0.1, 0.1])
    assert mean != 0.1
    assert limits([Point(0.0, mean, *interval, (0.1,) * 3)]) == pytest.approx((0.0995, 0.1005))


def test_every_method_has_the_same_style_in_all_pictures() -> None:
    known = read_method_styles()
    assert set(known) <= set(PRESETS)
    markers = [(style.marker, style.dash) for style in known.values()]
    # There are 48 pairs of marker and dash.
    assert len(set(markers)) == min(len(markers), 48)
    together = series_styles([(method,) for method in PRESETS], ("method",))
    for method in PRESETS:
        (alone,) = series_styles([(method,)], ("method",)).values()
        assert alone["color"] == together[method,]["color"]
        family = [name for name in known if method == name or method.startswith(f"{name}_")]
        assert family, f"{method} has no style in conf/table/_plot_styles.yaml"
        assert canvas.COLOURS[known[max(family, key=len)].colour] == alone["color"]
    own = [
        series_styles([("mine",), *other], ("method",))["mine",] for other in ([], [("fedavg",)])
    ]
    assert own[0]["color"] == own[1]["color"]


def test_series_of_one_method_have_its_colour_and_differ_in_marker_and_dash() -> None:
    series = [("fedprox", "0.1"), ("fedprox", "1"), ("fedavg", "-")]
    one, two, other = series_styles(series, ("method", "trainer.mu")).values()
    assert one["color"] == two["color"] == canvas.COLOURS["green"]
    assert (one["marker"], one["linestyle"]) != (two["marker"], two["linestyle"])
    assert other["color"] == canvas.COLOURS["blue"]
    swapped = series_styles([("fedavg",), ("fedavg aggregator=median",)], ("method",)).values()
    assert {style["color"] for style in swapped} == {canvas.COLOURS["blue"]}
    assert [series_label(labels, ("method", "trainer.mu")) for labels in series] == [
        "fedprox trainer.mu=0.1", "fedprox trainer.mu=1", "fedavg",
    ]  # fmt: skip


def simulated(colour: str, matrix: np.ndarray) -> np.ndarray:
    """Return the CIELAB colour that a person with a colour vision deficiency sees."""
    value = np.array(rgb(colour)) / 255
    linear = np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)
    to_xyz = np.array(
        [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    )
    xyz = to_xyz @ np.clip(matrix @ linear, 0, 1) / np.array([0.9505, 1.0, 1.089])
    x, y, z = np.where(xyz > 216 / 24389, np.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


# The matrices for severity 1.0 are from Machado, Oliveira and Fernandes, A
# physiologically-based model for simulation of color vision deficiency, 2009.
DEFICIENCIES = {
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}  # fmt: skip


@pytest.mark.parametrize("deficiency", DEFICIENCIES)
def test_colour_blind_readers_distinguish_the_methods_that_are_often_compared(
    deficiency: str,
) -> None:
    methods = ("fedavg", "scaffold", "fedprox", "fednova")
    styles = read_method_styles()
    matrix = np.array(DEFICIENCIES[deficiency])
    seen = [simulated(canvas.COLOURS[styles[method].colour], matrix) for method in methods]
    distances = [float(np.linalg.norm(a - b)) for at, a in enumerate(seen) for b in seen[at + 1 :]]
    assert min(distances) > 10, distances


def test_interval_of_a_single_point_is_a_vertical_line() -> None:
    axes = canvas.axes(canvas.figure(3.0, 2.0), 1, 1, 1)
    styles = series_styles([("fedavg",)], ("method",))
    point = Point(0.1, *mean_interval([0.4, 0.6]), (0.4, 0.6))
    _draw_panel(axes, {("fedavg",): [point]}, "trainer.mu", styles)
    (interval,) = axes.collections
    ((low, high),) = interval.get_segments()
    assert low.tolist() == [0.1, point.low] and high.tolist() == [0.1, point.high]


def test_panel_without_runs_has_no_numbers_on_its_axis() -> None:
    axes = canvas.axes(canvas.figure(3.0, 2.0), 1, 1, 1)
    _draw_panel(axes, {}, "round", series_styles([("fedavg",)], ("method",)))
    assert not axes.get_xticks().size and [text.get_text() for text in axes.texts] == ["no values"]


def test_series_without_the_key_of_the_axis_are_named(tmp_path: Path) -> None:
    for seed in (0, 1):
        write_run(tmp_path, "fedavg", seed, [0.5])
        for mu in (0.1, 1.0):
            write_run(tmp_path, "fedprox", seed, [0.6 + mu / 10 + seed / 10], trainer__mu=mu)
    data = plot_data(find_runs(tmp_path), PlotSpec(x="trainer.mu"), ())
    assert _notes(data)[1:] == ["Horizontal lines: no trainer.mu: fedavg."]
