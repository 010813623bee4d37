"""Run the code blocks of the documentation and write their output blocks.

    python -m tests.docs.blocks                     # compare the outputs
    python -m tests.docs.blocks --update            # write the outputs
    python -m tests.docs.blocks --update README.md  # only these files

Every fenced block of README.md, CONTRIBUTING.md and docs/ has a mark. A mark is an HTML
comment on the line above the fence:

- ``run``: A bash or Python block. It must succeed.
- ``run: fails``: The same, but the block must end with an error.
- ``dry-run``: A bash block. ``fedexp``, ``fedexp-tune`` and ``fedexp-table run`` get
  ``--dry-run``.
- ``file: PATH``: The block is written to this path before the next blocks run.
- ``output``: A text block after a ``run`` block, with what that block prints.
- ``output: head N``, ``output: tail N``, ``output: head N tail M``: The
  same, but with only these lines of the output.
- ``not in CI: REASON``: The block does not run.

The blocks of one file run in order in one empty folder. Its Python blocks share their
variables.

A Bash block that consists of plain ``fedexp`` commands, with or without ``timeout``, runs
in forked processes, which need no seconds of imports (`tests.fork_server`). Bash runs all
other blocks, such as those with ``>``. A ``dry-run`` block has only plain commands.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.fork_server import run_script

ROOT = Path(__file__).resolve().parents[2]
# Outputs show this folder in place of the temporary one.
SHOWN_FOLDER = "/home/you"
TIMEOUT = 240
# All blocks together should take at most this many seconds.
BOUND = 180

_FENCE = re.compile(r"^(?P<indent>\s*)(?P<fence>`{3,}|~{3,})\s*(?P<language>[\w+-]*)")
_MARK = re.compile(
    r"^\s*<!--\s*(?P<name>run|dry-run|file|output|not in CI)(?::\s*(?P<text>.*?))?\s*-->\s*$"
)
_COMMENT = re.compile(r"^\s*<!--.*-->\s*$")
_PART = re.compile(r"^(?:head (?P<head>\d+))?\s*(?:tail (?P<tail>\d+))?$")

# This matches hexadecimal words of at least eight characters that contain a digit.
_HASH = re.compile(r"\b(?=[a-f]*\d)[0-9a-f]{8,64}\b")
_NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?\b|\b(?:nan|inf)\b")
_UNITS = "ms|s|sec|seconds?|min|minutes?|h|hours?|d|days?|B|bytes|kB|MB|GB|TB|[KMG]iB"
_MEASURED = (
    # This matches the row of `fedexp` that lists seconds by phase, and its continuation
    # lines.
    (re.compile(r"^seconds  .*(?:\n {12,}.*)*", re.M), "seconds"),
    (re.compile(r"\b\d{4}-\d\d-\d\d(?:[ T]\d\d:\d\d(?::\d\d)?)?"), "DATE"),
    (re.compile(r"\b\d+:\d\d(?::\d\d)?\b"), "TIME"),
    (re.compile(r"\b\d+ local steps per second"), "SPEED"),
    (re.compile(rf"(?<![\w.])\d+(?:\.\d+)? ?(?:{_UNITS})\b"), "MEASURED"),
    # The commit is absent for an installed package, and has a + if files were changed.
    (re.compile(r", commits: \[[^]]*\]"), ""),
    (_HASH, "HASH"),
    (re.compile(r"(?<![\w.])/(?:[\w.+-]+/)+[\w.+-]*"), "PATH"),
)

# This matches commands that train. Help, configs and dry runs do not train.
_TRAINING = re.compile(r"\bfedexp(?:-table run)?(?: (?!.*--(?:help|cfg|dry-run))|$)")

# This script executes the Python blocks of a file. It reads each block from one line of
# JSON.
_SESSION = r"""
import json, sys, traceback
names = {"__name__": "__main__"}
for line in sys.stdin:
    code, name, end = json.loads(line)
    failed = 0
    try:
        exec(compile(code, name, "exec"), names)
    except BaseException:
        traceback.print_exc()
        failed = 1
    sys.stderr.flush()
    print(f"{end}{failed}", flush=True)
"""
_END = "end of block "

# The package has these commands. The patterns match text that Bash does not expand.
_SCRIPTS = ("fedexp", "fedexp-data", "fedexp-runs", "fedexp-table", "fedexp-tune")
_QUOTED = re.compile(r"'[^']*'")
_PLAIN = re.compile(r"[\w\s=.,:/+-]*")


class BlockError(Exception):
    """An error in a block.

    The mark is missing or wrong, the block fails, or it prints another text.
    """


@dataclass(frozen=True)
class Block:
    """A fenced block of a Markdown file.

    Args:
        file: The Markdown file.
        line: Number of the line with the opening fence, from 1.
        end: Number of the line with the closing fence.
        indent: The spaces before the fence.
        language: The word after the fence.
        mark: Name of the mark, "" if there is none.
        text: The text after the mark's colon.
        code: The block's lines without the indentation.
    """

    file: Path
    line: int
    end: int
    indent: str
    language: str
    mark: str
    text: str
    code: str

    @property
    def place(self) -> str:
        """The file and line, for messages."""
        return f"{shown(self.file)}:{self.line}"

    @property
    def runs(self) -> bool:
        """Whether the block is executed."""
        return self.mark in ("run", "dry-run")


def shown(file: Path) -> str:
    """Return a file's path in the checkout."""
    return str(file.relative_to(ROOT)) if file.is_relative_to(ROOT) else str(file)


def documents() -> list[Path]:
    """List the Markdown files whose blocks need a mark."""
    first = [ROOT / name for name in ("README.md", "CONTRIBUTING.md")]
    return [file for file in first if file.is_file()] + sorted((ROOT / "docs").rglob("*.md"))


def blocks(file: Path) -> list[Block]:
    """Read the fenced blocks of a file.

    Raises:
        BlockError: A block is not closed, or its mark is not known.
    """
    lines = file.read_text().splitlines()
    found = []
    number = 0
    while number < len(lines):
        opening = _FENCE.match(lines[number])
        if not opening:
            number += 1
            continue
        closing = number + 1
        while closing < len(lines) and lines[closing].strip() != opening["fence"]:
            closing += 1
        if closing == len(lines):
            raise BlockError(f"{shown(file)}:{number + 1}: the block is not closed")

        name, text = _mark(file, number, lines[number - 1] if number else "")
        code = textwrap.dedent("\n".join(lines[number + 1 : closing])) + "\n"
        block = Block(
            file, number + 1, closing + 1, opening["indent"], opening["language"], name, text, code
        )
        _check(block, found[-1] if found else None)
        found.append(block)
        number = closing + 1
    return found


def _mark(file: Path, number: int, line: str) -> tuple[str, str]:
    """Return the name and the text of a mark, both "" if the line has none."""
    if not _COMMENT.match(line):
        return "", ""
    mark = _MARK.match(line)
    if not mark:
        raise BlockError(f"{shown(file)}:{number}: the mark is not known: {line.strip()}")
    return mark["name"], mark["text"] or ""


def _check(block: Block, previous: Block | None) -> None:
    """Check that a mark has the text, language and place that it needs."""
    problem = ""
    if block.mark == "run":
        if block.language not in ("bash", "python"):
            problem = "a 'run' block is ```bash or ```python"
        elif block.text not in ("", "fails"):
            problem = "'run' is followed by nothing or by 'fails'"
    elif block.mark == "dry-run" and block.language != "bash":
        problem = "a 'dry-run' block is ```bash"
    elif block.mark == "dry-run" and not all(map(_dry, plain_commands(block.code) or [[]])):
        problem = (
            "a 'dry-run' block has only 'fedexp', 'fedexp-tune' and 'fedexp-table run' commands"
        )
    elif block.mark == "output":
        if previous is None or previous.mark != "run":
            problem = "an 'output' block follows a 'run' block"
        elif block.language != "text":
            problem = "an 'output' block is ```text"
        elif not _PART.match(block.text):
            problem = "'output' is followed by nothing or by 'head N tail M'"
    elif block.mark == "not in CI" and not block.text:
        problem = "'not in CI' needs a reason"
    elif block.mark == "file":
        path = Path(block.text)
        if not block.text or path.is_absolute() or ".." in path.parts:
            problem = "'file' needs a path in the folder of the blocks"
    if problem:
        raise BlockError(f"{block.place}: {problem}")


def unmarked(file: Path) -> list[Block]:
    """List the blocks of a file that have no mark."""
    return [block for block in blocks(file) if not block.mark]


def outputs(file: Path, folder: Path, home: Path) -> Iterator[tuple[Block, str, bool]]:
    """Run the blocks of a file in order.

    Args:
        file: Markdown file.
        folder: Empty folder in which the blocks run.
        home: Folder that replaces the user's home and the temporary folder.

    Yields:
        Each output block, the text that it should have, and whether the numbers in it
        are reproducible.

    Raises:
        BlockError: A block fails, or does not fail as its mark says.
    """
    environment = clean_environment(folder, home)
    session: _Session | None = None
    printed, fixed = "", True
    try:
        for block in blocks(file):
            if block.mark == "file":
                path = folder / block.text
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(block.code)
            elif block.mark == "output":
                yield block, part(printed, block.text), fixed
            elif block.runs:
                if block.language == "python":
                    session = session or _Session(folder, environment)
                    failed, printed = session.run(block)
                else:
                    failed, printed = _bash(block, folder, environment)
                if failed != (block.text == "fails"):
                    state = "failed" if failed else "did not fail"
                    raise BlockError(f"{block.place}: the block {state}:\n{printed}")
                printed = readable(printed, folder)
                fixed = fixed and _is_fixed(block)
    finally:
        if session:
            session.close()


def _is_fixed(block: Block) -> bool:
    """Return whether all trainings of a block have a fixed engine and one thread."""
    code = block.code.replace("\\\n", " ")
    if block.language == "python":
        return "fedexp.run(" not in code or ("engine=serial" in code and "threads=1" in code)
    lines = [line for line in code.splitlines() if _TRAINING.search(line)]
    return all("engine=serial" in line and "threads=1" in line for line in lines)


def clean_environment(folder: Path, home: Path) -> dict[str, str]:
    """Return environment variables that hide the user's settings and the network."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FEDEXP")}
    for name in ("home", "tmp"):
        (home / name).mkdir(parents=True, exist_ok=True)
    refused = "http://127.0.0.1:9"
    return kept | {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", "")]),
        "PYTHONPATH": str(folder),
        "HOME": str(home / "home"),
        "TMPDIR": str(home / "tmp"),
        "OMP_NUM_THREADS": "1",
        "WANDB_MODE": "offline",
        "NO_COLOR": "1",
        "http_proxy": refused,
        "https_proxy": refused,
        "no_proxy": "localhost,127.0.0.1",
    }


def _bash(block: Block, folder: Path, environment: dict[str, str]) -> tuple[bool, str]:
    """Run a bash block and return whether it failed, and what it printed."""
    commands = plain_commands(block.code)
    # A forked process would wait forever for joblib's launcher.
    if commands and "hydra/launcher=joblib" not in block.code:
        return _forked(block, commands, folder, environment)

    done = subprocess.run(
        ["bash", "-c", "set -e\n" + block.code],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    return done.returncode != 0, done.stdout


def plain_commands(code: str) -> list[list[str]]:
    """Split a script into the words of its commands.

    Returns:
        The commands. The list is empty if there is another command than those of the
        package, or syntax other than words, single quotes and continued lines.
    """
    lines = [line for line in code.replace("\\\n", " ").splitlines() if line.strip()]
    if not all(_PLAIN.fullmatch(_QUOTED.sub("", line)) for line in lines):
        return []
    commands = [shlex.split(line) for line in lines]
    scripts = [words[2] if words[0] == "timeout" else words[0] for words in commands]
    return commands if set(scripts) <= set(_SCRIPTS) else []


def _dry(words: list[str]) -> list[str]:
    """Return the dry run of a command, or an empty list if it has none."""
    trains = {"fedexp": 1, "fedexp-tune": 1, "fedexp-table": 2 if words[1:2] == ["run"] else 0}
    place = trains.get(words[0], 0) if words else 0
    return [*words[:place], "--dry-run", *words[place:]] if place else []


def _forked(
    block: Block, commands: list[list[str]], folder: Path, environment: dict[str, str]
) -> tuple[bool, str]:
    """Do the same as `_bash` for commands that need no shell."""
    with tempfile.NamedTemporaryFile(dir=environment["TMPDIR"]) as file:
        printed = Path(file.name)

        def fails(words: list[str]) -> bool:
            seconds = float(TIMEOUT)
            if words[0] == "timeout":
                seconds, words = float(words[1]), words[2:]
            return run_script(words, folder, environment, printed, seconds) != 0

        def fails_dry(words: list[str]) -> bool:
            # If the data set's files are missing, the dry run fails. Composing the
            # config is then enough.
            composed = [words[0], "--cfg", "job", *words[1:]]
            return fails(_dry(words)) and (words[0] != "fedexp" or fails(composed))

        # The first command that fails ends the block.
        failed = any(map(fails_dry if block.mark == "dry-run" else fails, commands))
        return failed, printed.read_text()


class _Session:
    """A Python process that executes the Python blocks of one file."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-c", _SESSION],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, block: Block) -> tuple[bool, str]:
        """Run a block and return whether it failed, and what it printed."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps([block.code, block.place, _END]) + "\n")
        self._process.stdin.flush()

        printed: list[str] = []
        for line in self._process.stdout:
            if line.startswith(_END):
                return line.strip().endswith("1"), "".join(printed)
            printed.append(line)
        raise BlockError(f"{block.place}: the Python process ended:\n{''.join(printed)}")

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(TIMEOUT)


def readable(printed: str, folder: Path) -> str:
    """Replace the folders of this machine and remove spaces at the ends of lines."""
    for path, name in ((folder.resolve(), SHOWN_FOLDER), (ROOT, f"{SHOWN_FOLDER}/fedexp")):
        printed = printed.replace(str(path), name)
    return "\n".join(line.rstrip() for line in printed.splitlines()).strip("\n") + "\n"


def part(printed: str, choice: str) -> str:
    """Return the lines that a mark such as ``head 3 tail 2`` selects."""
    found = _PART.match(choice)
    assert found
    if not choice:
        return printed
    lines = printed.splitlines()
    head, tail = int(found["head"] or 0), int(found["tail"] or 0)
    if head + tail >= len(lines):
        return printed
    return "\n".join([*lines[:head], "...", *lines[len(lines) - tail :]]) + "\n"


def masked(text: str, *, numbers: bool = False) -> str:
    """Replace what differs between two runs of the same command.

    Args:
        text: An output.
        numbers: Whether to replace all numbers, too. Spaces are then joined, because
            numbers of other lengths move columns.
    """
    for pattern, word in _MEASURED:
        text = pattern.sub(word, text)
    if numbers:
        text = _NUMBER.sub("NUMBER", text)
    # A measured value of another length changes the width of its column.
    return re.sub(r" {2,}", "  ", re.sub(r"[-─━]{3,}", "---", text))


def differs(block: Block, text: str, fixed: bool) -> bool:
    """Return whether an output block differs from the printed text."""
    return not agree(block.code, text, numbers=fixed)


def agree(old: str, new: str, *, numbers: bool) -> bool:
    """Return whether two outputs agree.

    Args:
        old: An output.
        new: Another output.
        numbers: Whether numbers count. Whole numbers must then be equal. Others may
            differ as between processors, which round differently.
    """
    if masked(old, numbers=True) != masked(new, numbers=True):
        return False
    pairs = zip(*(_NUMBER.findall(masked(text)) for text in (old, new)), strict=True)
    return not numbers or all(_close(*pair) for pair in pairs)


def _close(a: str, b: str) -> bool:
    if a.lstrip("+-").isdecimal() and b.lstrip("+-").isdecimal():
        return a == b
    return a == b or math.isclose(float(a), float(b), rel_tol=0.1, abs_tol=0.05)


def write(file: Path, texts: Sequence[tuple[Block, str]]) -> None:
    """Write the texts of output blocks to their file."""
    lines = file.read_text().splitlines()
    for block, text in reversed(texts):
        new = [(block.indent + line).rstrip() for line in text.splitlines()]
        lines[block.line : block.end - 1] = new
    file.write_text("\n".join(lines) + "\n")


def main() -> int:
    """Compare or write the output blocks of files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--update", action="store_true", help="write the output blocks")
    parser.add_argument("files", nargs="*", type=Path, help="Markdown files (default: all)")
    options = parser.parse_args()

    status = 0
    begin = time.monotonic()
    for file in [path.resolve() for path in options.files] or documents():
        try:
            if not any(block.runs for block in blocks(file)):
                continue
            with tempfile.TemporaryDirectory() as home:
                folder = Path(home).resolve() / "work"
                folder.mkdir()
                found = list(outputs(file, folder, Path(home)))
        except BlockError as error:
            print(error)
            status = 1
            continue

        stale = [
            (block, text)
            for block, text, fixed in found
            # Agreement within a tolerance is not enough for a new text
            if differs(block, text, fixed)
            or (options.update and masked(block.code) != masked(text))
        ]
        for block, text in stale:
            print(f"{block.place}: the output is stale" + ("" if options.update else f":\n{text}"))
        if options.update:
            write(file, stale)
        status = status or int(bool(stale) and not options.update)
        print(f"{shown(file)}: {len(found)} outputs, {len(stale)} stale")

    if not options.files:
        print(duration(time.monotonic() - begin))
    return status


def duration(seconds: float) -> str:
    """Describe how long all blocks took.

    Other work on the machine makes the time longer.
    """
    excess = ": too long, or the machine was busy" if seconds > BOUND else ""
    return f"code blocks of the documentation: {seconds:.0f} of {BOUND} s{excess}"


if __name__ == "__main__":
    sys.exit(main())
