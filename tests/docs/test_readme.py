"""The README stays short, and every link in it leads to a committed file."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.docs.blocks import ROOT

TEXT = (ROOT / "README.md").read_text()
# These are the lines outside tables.
LINES = [line for line in TEXT.splitlines() if not line.startswith("|")]


def test_readme_is_short() -> None:
    assert len(LINES) <= 200
    assert len(" ".join(LINES).split()) <= 1500


def test_readme_prose_is_wrapped() -> None:
    prose = re.sub(r"^```.*?^```$", "", TEXT, flags=re.MULTILINE | re.DOTALL)
    lines = [line for line in prose.splitlines() if not line.startswith(("|", "!["))]
    assert [line for line in lines if len(line) > 100] == []


def test_readme_links_lead_to_committed_files() -> None:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("not a checkout of git")
    files = listed.stdout.splitlines()
    links = set(re.findall(r"\]\((?!https?:|#)([^)#]+)", TEXT))
    assert links
    assert [
        link
        for link in links
        if link not in files and not any(file.startswith(f"{link}/") for file in files)
    ] == []
