"""Tests of the command fedexp-data, its table and its picture."""

import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from fedexp.commands.data import run_command
from fedexp.data.picture import draw_partition
from fedexp.data.table import partition_table
from tests.data.idx import write_mnist


def counts(clients: int, classes: int) -> np.ndarray:
    return np.random.default_rng(0).poisson(3, (clients, classes)).astype(np.int64)


def printed(table: object) -> str:
    console = Console(width=200, no_color=True, record=True, file=io.StringIO())
    console.print(table)
    return console.export_text()


def test_the_table_shows_every_count() -> None:
    table = counts(5, 10)
    rows = [line.split() for line in printed(partition_table(table)).splitlines()]
    for client in range(5):
        cells = [str(n) if n else "·" for n in table[client]]
        assert [
            str(client),
            str(table[client].sum()),
            str((table[client] > 0).sum()),
            *cells,
        ] in rows
    assert any(row[:2] == ["total", str(table.sum())] for row in rows if row)


def test_many_clients_are_summarised() -> None:
    table = counts(1000, 10)
    text = printed(partition_table(table))
    assert len(text.splitlines()) < 30
    median = next(line for line in text.splitlines() if "median" in line)
    assert str(int(np.quantile(table.sum(axis=1), 0.5, method="nearest"))) in median.split()
    assert f"{table.sum():,}" in text


def test_many_classes_are_listed_by_size() -> None:
    table = np.zeros((3, 100), np.int64)
    table[0, 42], table[0, 7] = 99, 12
    assert "42: 99, 7: 12" in printed(partition_table(table))


@pytest.mark.parametrize(
    ("clients", "classes"), [(1, 2), (5, 10), (100, 10), (5, 100), (100, 100), (1000, 10)]
)
def test_pictures_of_every_size(tmp_path: Path, clients: int, classes: int) -> None:
    from PIL import Image

    draw_partition(counts(clients, classes), tmp_path / "deep" / "p.png", "title")
    with Image.open(tmp_path / "deep" / "p.png") as picture:
        assert picture.format == "PNG" and picture.width > 500 and max(picture.size) < 2600


def test_pictures_leave_no_global_figure(tmp_path: Path) -> None:
    import matplotlib.pyplot as plt

    draw_partition(counts(3, 4), tmp_path / "p.png")
    assert plt.get_fignums() == []


def test_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert (
        run_command(
            [
                "show",
                "clients=4",
                "partition.val_fraction=0.1",
                "proxy.source=test",
                "proxy.size=20",
                "feature_skew.kind=blur",
                "feature_skew.strength=1.5",
            ]
        )
        == 0
    )
    text = capsys.readouterr().out
    for part in (
        "clients=4",
        "1,437 samples in the pool",
        "held out for validation",
        "20 unlabelled samples",
        "blur, with a strength from 0 for client 0 to 1.5 for client 3",
        "sha256",
    ):
        assert part in text
    assert (tmp_path / "partition.png").exists()


def test_show_names_ignored_limits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "p.png")
    assert run_command(["show", "partition=pathological", "limit.train=100", "--out", out]) == 0
    assert "limit.train is ignored: partition pathological" in capsys.readouterr().out


def test_overrides_may_stand_anywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["show", "clients=2", "--out", str(tmp_path / "p.png"), "seed_data=3"]) == 0
    assert "clients=2, seed_data=3" in capsys.readouterr().out
    for arguments in (["show", "--owt", "p.png"], ["list", "clients=2"]):
        assert run_command(arguments) == 2


def test_prepare_and_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_mnist(tmp_path)
    assert run_command(["prepare", "mnist", "--root", str(tmp_path)]) == 0
    assert "30 samples, 1 x 28 x 28, 3 to 3 of each class" in capsys.readouterr().out
    assert list((tmp_path / ".fedexp").glob("mnist-*.safetensors"))
    assert run_command(["list", "--root", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "there" in next(line for line in lines if line.strip().startswith("mnist"))
    assert "absent" in next(line for line in lines if line.strip().startswith("cifar10 "))
    assert "embedded" in next(line for line in lines if line.strip().startswith("digits"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["prepare", "mnits"], "did you mean 'mnist'?"),
        (["show", "partition=dirichle"], "did you mean 'dirichlet'?"),
        (["show", "partition.alpha=-1"], "alpha must be positive"),
        (["show", "dataset=image_folder", "data_root=nowhere"], "do not exist"),
        (["show", "partition=file"], "no partition file is given"),
    ],
)
def test_errors_are_plain(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err and "Traceback" not in captured.err


def test_the_traceback_is_there_for_who_wants_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    assert run_command(["show", "partition.alpha=-1"]) == 2
    assert "Traceback" in capsys.readouterr().err
