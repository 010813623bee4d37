"""Every code block of the documentation has a mark, runs, and prints what is written."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.docs.blocks import (
    ROOT,
    BlockError,
    agree,
    blocks,
    differs,
    documents,
    masked,
    outputs,
    part,
    plain_commands,
    unmarked,
    write,
)

DOCUMENTS = {str(file.relative_to(ROOT)): file for file in documents()}


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a home folder that all documents share.

    It is shared because matplotlib fills it once.
    """
    return tmp_path_factory.mktemp("home")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_block_has_a_mark(name: str) -> None:
    assert [block.place for block in unmarked(DOCUMENTS[name])] == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_blocks_run_and_print_what_is_written(name: str, tmp_path: Path, home: Path) -> None:
    stale = [
        f"{block.place}: run 'python -m tests.docs.blocks --update {name}'. It prints:\n{text}"
        for block, text, fixed in outputs(DOCUMENTS[name], tmp_path, home)
        if differs(block, text, fixed)
    ]
    assert not stale, "\n".join(stale)


def page(folder: Path, text: str) -> Path:
    file = folder / "page.md"
    file.write_text(text)
    return file


def results(text: str, folder: Path) -> list[tuple[str, bool]]:
    work = folder / "work"
    work.mkdir()
    return [(found, fixed) for _, found, fixed in outputs(page(folder, text), work, folder / "h")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- runs -->\n```bash\ntrue\n```\n", "page.md:1: the mark is not known"),
        ("<!-- run -->\n```\ntrue\n```\n", "page.md:2: a 'run' block is"),
        ("<!-- run: sometimes -->\n```bash\ntrue\n```\n", "followed by nothing or by 'fails'"),
        ("<!-- dry-run -->\n```python\n1\n```\n", "a 'dry-run' block is ```bash"),
        ("<!-- output -->\n```text\n1\n```\n", "an 'output' block follows a 'run' block"),
        ("<!-- not in CI -->\n```bash\nfalse\n```\n", "needs a reason"),
        ("<!-- file: ../x.py -->\n```python\n1\n```\n", "needs a path in the folder"),
        ("<!-- dry-run -->\n```bash\nfedexp-runs list\n```\n", "has only 'fedexp'"),
        ("<!-- dry-run -->\n```bash\nfedexp > text\n```\n", "has only 'fedexp'"),
        ("```bash\ntrue\n", "page.md:1: the block is not closed"),
    ],
)
def test_wrong_mark_raises_block_error(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(BlockError, match=message):
        blocks(page(tmp_path, text))


def test_block_without_mark_is_found(tmp_path: Path) -> None:
    text = "<!-- run -->\n```bash\ntrue\n```\n\n1. A step:\n\n   ```\n   true\n   ```\n"
    assert [block.line for block in unmarked(page(tmp_path, text))] == [8]


def test_file_block_exists_before_the_next_block(tmp_path: Path) -> None:
    text = (
        "<!-- file: mine/here.py -->\n```python\nx = 3\n```\n"
        "<!-- run -->\n```python\nfrom mine.here import x\nprint(x)\n```\n"
        "<!-- output -->\n```text\n```\n"
        "<!-- run -->\n```python\nprint(x + 1)\n```\n"
        "<!-- output -->\n```text\n```\n"
    )
    assert results(text, tmp_path) == [("3\n", True), ("4\n", True)]


def test_failing_block_raises_unless_its_mark_says_so(tmp_path: Path) -> None:
    text = "<!-- run -->\n```bash\nfalse\necho after\n```\n"
    with pytest.raises(BlockError, match=r"page\.md:2: the block failed"):
        results(text, tmp_path)
    (tmp_path / "work").rmdir()
    assert results(text.replace("run", "run: fails"), tmp_path) == []
    (tmp_path / "work").rmdir()
    with pytest.raises(BlockError, match="did not fail"):
        results(text.replace("run", "run: fails").replace("false", "true"), tmp_path)


def test_failing_python_block_raises(tmp_path: Path) -> None:
    with pytest.raises(BlockError, match="ZeroDivisionError"):
        results("<!-- run -->\n```python\n1 / 0\n```\n", tmp_path)


def test_dry_run_starts_no_training(tmp_path: Path) -> None:
    results("<!-- dry-run -->\n```bash\nfedexp rounds=50\n```\n", tmp_path)
    assert not list((tmp_path / "work").rglob("result.json"))


def test_dry_run_refuses_a_wrong_key(tmp_path: Path) -> None:
    with pytest.raises(BlockError, match=r"partition\.alfa"):
        results("<!-- dry-run -->\n```bash\nfedexp partition.alfa=1\n```\n", tmp_path)


@pytest.mark.parametrize(
    ("line", "fixed"),
    [
        ("echo fedexp", False),
        ("echo fedexp --help method", True),
        ("echo fedexp rounds=1", False),
        ("echo fedexp rounds=1 engine=serial threads=1", True),
        ("echo fedexp rounds=1 \\\n  engine=serial threads=1", True),
        ("echo fedexp-runs list", True),
        ("echo fedexp-table run demo/digits", False),
    ],
)
def test_numbers_are_compared_if_engine_and_threads_are_fixed(
    line: str, fixed: bool, tmp_path: Path
) -> None:
    text = f"<!-- run -->\n```bash\n{line}\n```\n<!-- output -->\n```text\n```\n"
    assert [found for _, found in results(text, tmp_path)] == [fixed]


@pytest.mark.parametrize(
    ("code", "commands"),
    [
        ("fedexp -m \\\n  seed=0,1\n", [["fedexp", "-m", "seed=0,1"]]),
        (
            "fedexp-runs list 'partition.alpha<1'\n\nfedexp\n",
            [["fedexp-runs", "list", "partition.alpha<1"], ["fedexp"]],
        ),
        ("timeout 10 fedexp\n", [["timeout", "10", "fedexp"]]),
        ("fedexp > text\n", []),
        ("fedexp seed=$SEED\n", []),
        ("fedexp\nls\n", []),
    ],
)
def test_only_plain_commands_need_no_bash(code: str, commands: list[list[str]]) -> None:
    assert plain_commands(code) == commands


def test_forked_command_has_folder_environment_streams_and_exit_code(tmp_path: Path) -> None:
    text = (
        "<!-- file: conf/experiment/mine.yaml -->\n```yaml\nrounds: 7\n```\n"
        "<!-- run -->\n```bash\n{}fedexp --help experiment\n```\n"
        "<!-- output -->\n```text\n```\n"
        "<!-- run: fails -->\n```bash\n{}fedexp rounds=-1\nfedexp\n```\n"
        "<!-- output -->\n```text\n```\n"
    )
    forked = results(text.replace("{}", ""), tmp_path)
    assert all(word in found for word, (found, _) in zip(("mine", "rounds"), forked, strict=True))
    shutil.rmtree(tmp_path / "work")
    # The word `command` makes Bash run these blocks.
    assert forked == results(text.replace("{}", "command "), tmp_path)


def test_masks_hide_times_paths_and_hashes_only() -> None:
    one = (
        "round 2/3  test/global/acc 0.3083  eta 0:01\n"
        "seconds          0.54  (setup 0.04, log 0.43,\n                 checkpoint 0.01)\n"
        "speed            2521 local steps per second of training\n"
        "folder: /tmp/a/outputs/runs/fedavg-digits-3fa469c56492b7ec/240ad8b7\n"
        "memory  304 MB at its peak\n"
    )
    two = (
        "round 2/3  test/global/acc 0.3083  eta 1:05:01\n"
        "seconds          12.10  (setup 0.04, train 11.43)\n"
        "speed            31 local steps per second of training\n"
        "folder: /home/you/outputs/runs/fedavg-digits-1fa469c56492b7ec/110ad8b7\n"
        "memory  1.2 GB at its peak\n"
    )
    assert masked(one) == masked(two)
    other = one.replace("0.3083", "0.3084")
    assert masked(one) != masked(other)
    assert masked(one, numbers=True) == masked(other, numbers=True)
    assert masked(one, numbers=True) != masked(one.replace("acc", "loss"), numbers=True)


def test_part_selects_lines() -> None:
    printed = "1\n2\n3\n4\n5\n"
    assert part(printed, "") == printed
    assert part(printed, "head 1 tail 2") == "1\n...\n4\n5\n"
    assert part(printed, "tail 1") == "...\n5\n"
    assert part(printed, "head 9") == printed


def test_write_keeps_the_rest_of_the_page(tmp_path: Path) -> None:
    text = (
        "- A step:\n\n  <!-- run -->\n  ```bash\n  seq 2\n  ```\n\n"
        "  <!-- output -->\n  ```text\n  old\n  ```\n\nEnd.\n"
    )
    file = page(tmp_path, text)
    (tmp_path / "work").mkdir()
    found = list(outputs(file, tmp_path / "work", tmp_path / "h"))
    assert [differs(*entry) for entry in found] == [True]
    write(file, [(block, new) for block, new, _ in found])
    assert file.read_text() == text.replace("  old", "  1\n  2")


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("acc 0.80 (3)", "acc 0.84 (3)", True),
        ("acc 0.80 (3)", "acc 0.95 (3)", False),
        ("acc 0.80 (3)", "acc 0.80 (4)", False),
        ("acc 0.80", "loss 0.80", False),
        ("loss 12.5", "loss 13.1", True),
        ("acc nan", "acc 0.8", False),
    ],
)
def test_numbers_agree_as_between_processors(old: str, new: str, same: bool) -> None:
    assert agree(old, new, numbers=True) == same
    assert agree(old, new, numbers=False) == ("loss 0.80" not in new)
