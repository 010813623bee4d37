"""Interruptions of a process that stored data must survive."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def before_every_change(monkeypatch: pytest.MonkeyPatch, look: Callable[[], None]) -> None:
    """Call `look` before every rename and deletion, because a kill there matters."""
    unlink, rename = Path.unlink, Path.replace

    def unwatched() -> None:
        with monkeypatch.context() as inside:
            inside.setattr(Path, "unlink", unlink)
            inside.setattr(Path, "replace", rename)
            look()

    monkeypatch.setattr(
        Path, "unlink", lambda path, missing_ok=False: unwatched() or unlink(path, missing_ok)
    )
    monkeypatch.setattr(Path, "replace", lambda path, target: unwatched() or rename(path, target))


@contextmanager
def interrupted_at(line: int, *files: str) -> Iterator[None]:
    """Raise KeyboardInterrupt at the `line`-th executed line of `files`."""
    executed = 0

    def trace(frame, event, arg):
        nonlocal executed
        name = frame.f_code.co_filename
        if not name.endswith(files) or "tests" in name:
            return None
        if event == "line":
            executed += 1
            if executed == line:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)
