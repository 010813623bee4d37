"""Each wrong input of the corpus is refused before anything is written or trained.

The message fits on one screen and has no traceback. `wrong_inputs.yaml` describes its
entries. All entries run in this process through the commands' entry functions, each in
a separate folder. Some also run as processes. This file is not among the suite's
default paths: ``make corpus`` runs it.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

import fedexp
from fedexp.commands import data, run, runs, table, tune
from fedexp.core.errors import FedexpError

pytestmark = pytest.mark.corpus

MODULES = {
    "fedexp": run,
    "fedexp-table": table,
    "fedexp-tune": tune,
    "fedexp-runs": runs,
    "fedexp-data": data,
}
# The size of a screen
LINES, COLUMNS = 24, 100
# Lower bounds that the README states: the number of entries, and the share of typos that get the
# right suggestion
FEWEST, RIGHT_SHARE = 700, 0.95
# Files that may change although an input is refused: the bookkeeping of a run that resumes, locks,
# and the output of a test's process
PASSING = re.compile(
    r"(status|environment)\.json|error\.txt|config\.yaml|lock|.*\.lock|\.(out|err)-.*"
)
# Entries with `stored` find these runs under ``outputs``
STORED = ["rounds=1", "clients=4", "model.hidden=[4]", "threads=1", "method=local,fedavg"]


@dataclass(frozen=True)
class Entry:
    """One wrong input. `wrong_inputs.yaml` describes the fields."""

    command: str
    arguments: str
    says: list[str]
    hint: list[str]
    meant: str | None = None
    files: dict[str, str] = field(default_factory=dict)
    stored: bool = False
    process: bool = False
    exit: int = 2

    @classmethod
    def of(cls, node: dict[str, Any]) -> Entry:
        (command,) = node.keys() & {*MODULES, "python"}
        rest = {key: value for key, value in node.items() if key not in (command, "says", "hint")}
        words = {key: node.get(key, []) for key in ("says", "hint")}
        words = {
            key: [*map(str, value)] if isinstance(value, list) else [str(value)]
            for key, value in words.items()
        }
        return cls(command, node[command], **words, **rest)

    def __str__(self) -> str:
        return f"{self.command} {self.arguments}"

    @property
    def argv(self) -> list[str]:
        return shlex.split(self.arguments)


LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
CORPUS = [
    Entry.of(node)
    for node in yaml.load(Path(__file__).with_name("wrong_inputs.yaml").read_text(), LOADER)
]
README = Path(__file__).parents[2] / "README.md"
TYPOS = [number for number, entry in enumerate(CORPUS) if entry.meant is not None]


@dataclass(frozen=True)
class Answer:
    """How a command ended.

    Args:
        changed: Files that are new or have changed since the command began.
    """

    code: int
    told: str
    changed: list[str]

    def suggests(self, meant: str) -> bool:
        """Return whether the text after "to do" has it in quotes."""
        return any(
            f"'{meant}'" in line
            for line in self.told.splitlines()
            if line.lstrip().startswith("to do:")
        )


@cache
def answer(number: int) -> Answer:
    """Return the answer of entry `number` in this process."""
    entry = CORPUS[number]
    with folder_of(entry) as folder, contextlib.chdir(folder):
        before = content(folder)
        code, told = called(entry)
        return Answer(code, told, changes(before, content(folder)))


def called(entry: Entry) -> tuple[int, str]:
    """Return the exit code and the text of both streams.

    For Python code, the exit code is 2, and the text is that of fedexp's errors only.
    """
    path, modules, said = [*sys.path], {*sys.modules}, io.StringIO()
    sys.dont_write_bytecode = True
    importlib.invalidate_caches()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            if entry.command == "python":
                exec(entry.arguments, {"fedexp": fedexp})
                code = 0
            else:
                code = MODULES[entry.command].run_command(entry.argv)
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
        except FedexpError as error:
            code = 2
            print(f"error: {error}")
        except Exception:  # noqa: BLE001 - no exception is a valid answer
            code = 1
            traceback.print_exc()
    sys.path[:] = path
    for name in {*sys.modules} - modules:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(Path.cwd())):
            # The next entry may have a different module with this name
            del sys.modules[name]
    return code, said.getvalue()


@contextlib.contextmanager
def folder_of(entry: Entry) -> Iterator[Path]:
    """Return a new folder with the entry's files."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        if entry.stored:
            shutil.copytree(stored(), folder / "outputs")
        for file, text in entry.files.items():
            path = next(folder.glob(file), folder / file)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        yield folder


@cache
def stored() -> Path:
    """Return an output root with the runs of `STORED`.

    It is deleted with the session's folders.
    """
    folder = Path(os.environ["CORPUS_FOLDER"])
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
        assert run.run_command(["-m", *STORED]) == 0
    return folder / "outputs"


@pytest.fixture(autouse=True, scope="module")
def _somewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CORPUS_FOLDER", str(tmp_path_factory.mktemp("corpus")))
        patch.setattr(sys, "path", [path for path in sys.path if path])
        patch.delenv("HYDRA_FULL_ERROR", raising=False)
        yield


def content(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder.

    Locks, the bookkeeping of a run and the output of a test's process are left out.
    """
    files = (
        path for path in folder.rglob("*") if path.is_file() and not PASSING.fullmatch(path.name)
    )
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def changes(before: dict[str, bytes], after: dict[str, bytes]) -> list[str]:
    return sorted(
        name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
    )


def check(entry: Entry, found: Answer) -> None:
    """Check all that every answer must satisfy, except the suggestion."""
    told = found.told
    assert found.code == entry.exit, told
    assert "Traceback" not in told, told
    assert sum(max(1, math.ceil(len(line) / COLUMNS)) for line in told.splitlines()) <= LINES, told
    assert re.search(r"^error: \S", told, re.M), told
    for words in [*entry.says, *entry.hint]:
        assert words in told, f"{words!r} is not in:\n{told}"
    assert not found.changed, found.changed


@pytest.mark.parametrize("number", range(len(CORPUS)), ids=[str(entry) for entry in CORPUS])
def test_it_is_refused_in_words(number: int) -> None:
    check(CORPUS[number], answer(number))


def test_typos_get_the_right_suggestion() -> None:
    missed = [f"{CORPUS[n]}: not '{CORPUS[n].meant}'\n{answer(n).told}" for n in TYPOS
              if not answer(n).suggests(str(CORPUS[n].meant))]  # fmt: skip
    print(
        f"{len(TYPOS) - len(missed)} of {len(TYPOS)} typos got the right suggestion",
        *missed,
        sep="\n",
    )
    assert len(missed) < (1 - RIGHT_SHARE) * len(TYPOS), "\n".join(missed)
    assert f"For more than {100 * RIGHT_SHARE:g} % of the typos" in README.read_text()


@pytest.mark.parametrize("entry", [entry for entry in CORPUS if entry.process], ids=str)
def test_it_is_refused_by_a_process(entry: Entry) -> None:
    """The command's entry point runs in a new interpreter."""
    start = f"from {MODULES[entry.command].__name__} import main; main()"
    command = [sys.executable, "-B", "-c", start, *entry.argv]
    with folder_of(entry) as folder:
        before = content(folder)
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, check=False, timeout=120
        )
        check(
            entry,
            Answer(done.returncode, done.stdout + done.stderr, changes(before, content(folder))),
        )


def test_the_corpus_is_one() -> None:
    """The corpus is large enough and has no duplicates.

    Every entry says what is expected of its answer.
    """
    assert len(CORPUS) > FEWEST
    assert len({(str(entry), *entry.files.items()) for entry in CORPUS}) == len(CORPUS)
    assert sum(entry.process for entry in CORPUS) == 11
    assert len(TYPOS) >= 60
    assert all(entry.says and (entry.hint or entry.meant) for entry in CORPUS)
    assert f"More than {FEWEST} wrong inputs are tested." in README.read_text()
