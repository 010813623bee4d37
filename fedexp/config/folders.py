"""Folders of config files: the built-in folder and the user's folder."""

from __future__ import annotations

from pathlib import Path


def conf_dir() -> Path:
    """Return the folder of the built-in configs.

    It is ``fedexp/conf`` in a wheel and ``conf`` in a checkout.
    """
    package = Path(__file__).resolve().parents[1]
    return package / "conf" if (package / "conf").is_dir() else package.parent / "conf"


def user_conf_dir() -> Path | None:
    """Return the folder ``conf`` in the working directory, the user's configs.

    The result is None if the folder does not exist, or if it is the folder of the
    built-in configs.
    """
    folder = Path.cwd() / "conf"
    return folder if folder.is_dir() and folder.resolve() != conf_dir().resolve() else None


def conf_dirs() -> list[Path]:
    """Return the folder of the built-in configs, and the user's folder if it exists."""
    user = user_conf_dir()
    return [conf_dir()] if user is None else [conf_dir(), user]
