"""The notebooks of the documentation run, and their outputs are current."""

from __future__ import annotations

from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytest.importorskip("pandas")

from tests.docs.blocks import ROOT  # noqa: E402
from tests.docs.notebooks import executed, is_stale, notebooks  # noqa: E402


@pytest.mark.parametrize("file", notebooks(), ids=lambda file: str(file.relative_to(ROOT)))
def test_notebook_outputs_are_current(file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    stored = nbformat.read(file, as_version=4)
    new = executed(file, folder, tmp_path)
    assert not is_stale(stored, new), "run python -m tests.docs.notebooks --update"


def test_notebook_with_a_wrong_output_is_stale(tmp_path: Path) -> None:
    new = nbformat.v4
    cell = new.new_code_cell("print(6 * 7)", outputs=[new.new_output("stream", text="41\n")])
    file = tmp_path / "small.ipynb"
    nbformat.write(new.new_notebook(cells=[cell]), file)

    folder = tmp_path / "work"
    folder.mkdir()
    made = executed(file, folder, tmp_path)
    assert is_stale(nbformat.read(file, as_version=4), made)
    assert not is_stale(made, made)
