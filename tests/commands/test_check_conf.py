"""Tests of `fedexp-runs check-conf`."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedexp.commands.runs import run_command
from fedexp.config.folders import conf_dir

FILES = {
    "conf/trainer/plain.yaml": "_target_: fedexp.trainers.sgd.Sgd\n",
    "conf/aggregator/matched.yaml": "_target_: fedexp.methods.fedma.FedMA\nlast_lr: 0.2\n",
    "conf/aggregator/own.yaml": "_target_: mymethods.Own\nlast_lr: 0.2\n",
    "conf/aggregator/mean.yaml": "_target_: fedexp.methods.fedavg.Mean\nlast_lr: 0.2\n",
    "conf/method/mine.yaml": """\
# @package _global_
defaults:
  - override /aggregator: fedma
aggregator:
  last_epochs: 2
hydra:
  sweeper:
    params:
      aggregator.last_weight_decay: 0,1e-4
overrides: [aggregator.last_lr=0.3]
local:
  lr: ${aggregator.last_lr}
""",
    "mymethods.py": '''\
"""My methods."""
from dataclasses import dataclass
from fedexp.aggregators.mean import Mean
from fedexp.trainers.sgd import Sgd
import fedexp.engines.shares

@dataclass(frozen=True)
class Own(Mean):
    keys = "aggregator.last_lr"

    def plan(self, state, env):
        fedexp.engines.shares.available_cores()
        return [env.job(0, Sgd())]
''',
    ".hidden/old.py": "import fedexp.trainers\n",
    "outputs/sources/old.py": "import fedexp.trainers\n",
    "results/runs/old.py": "import fedexp.trainers\n",
    "env/pyvenv.cfg": "",
    "env/old.py": "import fedexp.trainers\n",
}
FOUND = [
    "conf/aggregator/matched.yaml:2: aggregator.last_lr -> aggregator.output_lr_factor",
    "conf/aggregator/own.yaml:2: aggregator.last_lr -> aggregator.output_lr_factor",
    "conf/method/mine.yaml:5: aggregator.last_epochs -> aggregator.output_epochs_factor",
    "conf/method/mine.yaml:9: aggregator.last_weight_decay -> aggregator.output_weight_decay",
    "conf/method/mine.yaml:10: aggregator.last_lr -> aggregator.output_lr_factor",
    "conf/method/mine.yaml:12: aggregator.last_lr -> aggregator.output_lr_factor",
    "conf/trainer/plain.yaml:1: fedexp.trainers.sgd.Sgd -> fedexp.methods.fedavg.PlainTrainer",
    "mymethods.py:3: fedexp.aggregators.mean.Mean -> fedexp.methods.fedavg.Mean",
    "mymethods.py:4: fedexp.trainers.sgd.Sgd -> fedexp.methods.fedavg.PlainTrainer",
    "mymethods.py:5: fedexp.engines.shares -> fedexp.runtime.resources",
    "mymethods.py:9: aggregator.last_lr -> aggregator.output_lr_factor",
    "mymethods.py:12: fedexp.engines.shares.available_cores -> "
    "fedexp.runtime.resources.available_cores",
    "mymethods.py:13: Sgd -> PlainTrainer",
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the files of a user of version 0.1, and make their folder the working directory."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_check_conf_lists_every_line_that_must_change(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert run_command(["check-conf"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines == [*FOUND, "13 names to change in 5 of 6 files"]
    assert run_command(["check-conf", "./conf"]) == 1
    assert capsys.readouterr().out.splitlines() == lines
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_check_conf_of_one_file_reads_that_file(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["check-conf", "conf/trainer/plain.yaml"]) == 1
    text = capsys.readouterr().out
    assert "PlainTrainer" in text and text.endswith("1 names to change in 1 of 1 files\n")


def test_check_conf_of_current_files_finds_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("conf/trainer/plain.yaml", "conf/method/mine.yaml", "mymethods.py"):
        (folder / name).unlink()
    (folder / "conf/aggregator/matched.yaml").write_text(
        "_target_: fedexp.methods.fedma.FedMA\noutput_lr_factor: 0.2\n"
    )
    (folder / "conf/aggregator/own.yaml").unlink()
    assert run_command(["check-conf"]) == 0
    assert capsys.readouterr().out == "2 files: every path and config key is current\n"


def test_check_conf_of_built_in_configs_finds_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(path) for path in sorted(conf_dir().rglob("*.yaml"))]
    assert files and run_command(["check-conf", *files]) == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("conf/broken.yaml", "a: [1\n", "a config file is not YAML"),
        ("broken.py", "def f(:\n", "a module is not Python"),
    ],
)
def test_check_conf_of_unreadable_file_names_it(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, message: str
) -> None:
    (folder / name).write_text(text)
    assert run_command(["check-conf"]) == 2
    error = capsys.readouterr().err
    assert message in error and f"{name}:" in error


def test_check_conf_of_missing_path_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["check-conf", "nowhere"]) == 2
    assert "there is no 'nowhere'" in capsys.readouterr().err
