"""Paths that a user wrote."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

from fedexp.core.errors import ConfigError


def user_path(value: Any, where: str) -> Path:
    """Return a path of the user with ``~`` replaced by the home folder.

    Args:
        value: The path. It may be unchecked.
        where: Config key or argument that has this value, for messages.

    Raises:
        ConfigError: The value is not a path, or the home folder is not known.
    """
    if not isinstance(value, str | PathLike):
        raise ConfigError(
            f"'{where}' has the wrong type", where=where, expected="a path", got=repr(value)
        )
    try:
        return Path(value).expanduser()
    except RuntimeError as error:
        raise ConfigError(
            f"the home folder in '{where}' is not known",
            where=where,
            expected="~ for your home folder, or ~NAME for the home folder of the user NAME",
            got=str(value),
            do="write the whole path, without ~",
        ) from error
