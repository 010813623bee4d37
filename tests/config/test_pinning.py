"""A plug-in names the keys that have paths of files. Composing hashes these files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from fedexp.config.compose import compose
from fedexp.core.errors import ConfigError
from fedexp.core.resolved_config import ResolvedConfig
from fedexp.methods.fedavg import PlainTrainer
from fedexp.storage.files import file_sha256
from fedexp.storage.identity import config_hash, scientific


@dataclass(frozen=True)
class Teacher(PlainTrainer):
    """A user plug-in with one file."""

    content_keys: ClassVar[Mapping[str, Callable[[Path], str]]] = {"teacher": file_sha256}

    teacher: str = ""
    sha256: str | None = None


@pytest.mark.parametrize(
    "overrides",
    [
        ["partition=file", "partition.path=pipe"],
        ["client_models.path=pipe"],
        ["architectures.clients=pipe"],
    ],
)
def test_named_pipe_in_place_of_a_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    with pytest.raises(ConfigError, match="not a regular file"):
        compose(overrides)


@dataclass(frozen=True)
class TwoTeachers(PlainTrainer):
    """A user plug-in with two files and without keys for their hashes."""

    content_keys: ClassVar[Mapping[str, Callable[[Path], str]]] = {
        "one": file_sha256,
        "two": file_sha256,
    }

    one: str = ""
    two: str = ""


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("conf/trainer").mkdir(parents=True)
    Path("conf/trainer/teacher.yaml").write_text(
        "_target_: tests.config.test_pinning.Teacher\nteacher: a.txt\nsha256: null\n"
    )
    Path("conf/trainer/teachers.yaml").write_text(
        "_target_: tests.config.test_pinning.TwoTeachers\none: a.txt\ntwo: c.txt\n"
    )
    for name, text in (("a", "one"), ("b", "one"), ("c", "two")):
        Path(f"{name}.txt").write_text(text)


def resolved(*overrides: str) -> ResolvedConfig:
    return compose(list(overrides))


def test_a_plugins_file_counts_by_its_content_and_not_by_its_place() -> None:
    a, b, c = (resolved("trainer=teacher", f"trainer.teacher={name}.txt") for name in "abc")
    assert a["trainer"]["sha256"] == a.contents["trainer.teacher"] == file_sha256(Path("a.txt"))
    assert a["trainer"]["teacher"] == "a.txt" and "teacher" not in scientific(a)["trainer"]
    assert config_hash(a) == config_hash(b) != config_hash(c)
    absent = resolved("trainer=teacher", "trainer.teacher=d.txt")
    assert absent.contents == {} and absent["trainer"]["sha256"] is None
    assert scientific(absent)["trainer"]["teacher"] == "d.txt"


def test_a_hash_that_the_config_states_stands_also_where_the_file_is_gone() -> None:
    sha256 = file_sha256(Path("a.txt"))
    stated = resolved("trainer=teacher", f"trainer.sha256={sha256}", "trainer.teacher=gone.txt")
    assert config_hash(stated) == config_hash(resolved("trainer=teacher"))


def test_content_keys_of_several_files_are_all_hashed() -> None:
    config = resolved("trainer=teachers")
    hashes = [config.contents[f"trainer.{key}"] for key in ("one", "two")]
    assert hashes == [file_sha256(Path("a.txt")), file_sha256(Path("c.txt"))]
    before = config_hash(config)
    shutil.copy("b.txt", "c.txt")
    assert config_hash(resolved("trainer=teachers")) != before


@pytest.mark.parametrize(
    "overrides",
    [
        ["partition=file", "partition.path=."],
        ["client_models.path=a.txt"],
        ["model=resnet18_features", "model.pretrained=.", "dataset.shape=[1,8,8]"],
    ],
)
def test_path_that_is_not_a_file_is_left_to_the_plugins_check(overrides: list[str]) -> None:
    from fedexp.core.errors import FedexpError
    from fedexp.running.experiment import Experiment

    with pytest.raises(FedexpError):
        Experiment.of(compose(overrides))


def test_composing_imports_no_plugin_that_names_no_file() -> None:
    script = (
        "import sys\nfrom fedexp.config.compose import compose\n"
        "compose(['model=resnet18_features', 'partition=file', 'client_models.path=nowhere'])\n"
        "assert 'torch' not in sys.modules and 'fedexp.models.resnet_features' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
