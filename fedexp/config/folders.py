"""Folders of config files: the built-in one and the user's."""

from __future__ import annotations

from pathlib import Path


def conf_dir() -> Path:
    """Return the folder of the built-in configs.

    It is ``fedexp/conf`` in a wheel and ``conf`` in a checkout.
    """
    package = Path(__file__).resolve().parents[1]
    return package / "conf" if (package / "conf").is_dir() else package.parent / "conf"


def user_conf_dir() -> Path | None:
    """Return ``./conf`` of the working directory.

    None if that folder is absent, or is the folder of the built-in configs.
    """
    folder = Path.cwd() / "conf"
    return folder if folder.is_dir() and folder.resolve() != conf_dir().resolve() else None


def conf_dirs() -> list[Path]:
    """Return the folder of the built-in configs and, if there is one, the user's."""
    user = user_conf_dir()
    return [conf_dir()] if user is None else [conf_dir(), user]
