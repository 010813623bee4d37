"""Where configs lie: the built-in ones and the user's."""

from __future__ import annotations

from pathlib import Path


def conf_dir() -> Path:
    """The built-in configs: ``fedexp/conf`` in a wheel, the top-level ``conf`` in a checkout."""
    package = Path(__file__).resolve().parents[1]
    return package / "conf" if (package / "conf").is_dir() else package.parent / "conf"


def user_conf_dir() -> Path | None:
    """``./conf`` of the working directory, where it exists and is not the built-in one."""
    mine = Path.cwd() / "conf"
    return mine if mine.is_dir() and mine.resolve() != conf_dir().resolve() else None
