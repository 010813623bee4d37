"""Execute the notebooks of the documentation and write their outputs.

python -m tests.docs.notebooks            # compare the outputs
python -m tests.docs.notebooks --update   # write the outputs
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.docs.blocks import ROOT, agree, clean_environment, readable

TIMEOUT = 60


def notebooks() -> list[Path]:
    """List the notebooks."""
    return sorted((ROOT / "docs").rglob("*.ipynb"))


def executed(file: Path, folder: Path, home: Path) -> Any:
    """Execute a notebook in an empty folder and return it with its new outputs.

    Args:
        file: The notebook.
        folder: Empty folder in which the cells run.
        home: Folder that replaces the user's home and the temporary folder.
    """
    import nbclient
    import nbformat

    # With this environment, Jupyter does not read the user's settings.
    environment = clean_environment(folder, home) | {"IPYTHONDIR": str(home / "ipython")}
    notebook = copy.deepcopy(nbformat.read(file, as_version=4))
    client = nbclient.NotebookClient(
        notebook,
        timeout=TIMEOUT,
        kernel_name="python3",
        coalesce_streams=True,
        record_timing=False,
        resources={"metadata": {"path": str(folder)}},
    )
    with patch.dict(os.environ, environment):
        client.execute()

    for cell in code_cells(notebook):
        for output in cell.outputs:
            if "text" in output:
                output.text = readable(output.text, folder)
            if "text/plain" in output.get("data", {}):
                output.data["text/plain"] = readable(output.data["text/plain"], folder).rstrip("\n")
    # The page does not contain the version of the interpreter that executed the cells.
    notebook.metadata.pop("language_info", None)
    return notebook


def code_cells(notebook: Any) -> Iterator[Any]:
    """Yield the cells that have code."""
    return (cell for cell in notebook.cells if cell.cell_type == "code")


def shown_outputs(notebook: Any) -> list[list[str]]:
    """Return the outputs of each code cell.

    A picture is represented by its format.
    """
    shown = []
    for cell in code_cells(notebook):
        texts = []
        for output in cell.outputs:
            data = output.get("data", {})
            pictures = sorted(kind for kind in data if kind.startswith("image/"))
            # The text of a picture contains its address in memory or its size, and is
            # left out.
            texts += pictures or [output.get("text", data.get("text/plain", ""))]
        shown.append(texts)
    return shown


def is_stale(stored: Any, new: Any) -> bool:
    """Return whether the outputs of a stored notebook differ from its new outputs."""
    pairs = zip(shown_outputs(stored), shown_outputs(new), strict=True)
    return not all(
        len(a) == len(b) and all(agree(*texts, numbers=True) for texts in zip(a, b, strict=True))
        for a, b in pairs
    )


def main() -> int:
    """Compare or write the outputs of the notebooks."""
    import nbformat

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--update", action="store_true", help="write the outputs")
    options = parser.parse_args()

    status = 0
    for file in notebooks():
        with tempfile.TemporaryDirectory() as home:
            folder = Path(home).resolve() / "work"
            folder.mkdir()
            new = executed(file, folder, Path(home))
        stale = is_stale(nbformat.read(file, as_version=4), new)
        print(f"{file.relative_to(ROOT)}: the outputs are {'stale' if stale else 'current'}")
        if stale and options.update:
            nbformat.write(new, file)
        status = status or int(stale and not options.update)
    return status


if __name__ == "__main__":
    sys.exit(main())
