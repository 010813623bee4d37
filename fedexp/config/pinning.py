"""Hashes of the files and folders that a config names.

The content of such a file or folder is part of a run's identity. Its path is not. A
plug-in, or a class in `fedexp.config.keys`, declares which of its keys name files or
folders, and which function hashes their content:
``content_keys: ClassVar[Mapping[str, Callable[[Path], str]]] = {"path": file_sha256}``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fedexp.config.keys import ClientModels
from fedexp.core.build import locate
from fedexp.core.errors import ConfigError

# Classes of config nodes that have no ``_target_``, by the dotted key of the node.
_OWN: dict[str, type] = {"client_models": ClientModels}


def pin(config: dict[str, Any]) -> dict[str, str]:
    """Hash the files and folders that a config names.

    A config node may have a key ``sha256`` for the hash. This key is used only if the
    node's class has exactly one key in ``content_keys``. If ``sha256`` is set, its
    value is returned and nothing is read. If it is empty, the computed hash is written
    to it. A file that does not exist is not hashed. The check of the plug-in refuses it
    later.

    Args:
        config: Values of a resolved config.

    Returns:
        The hashes, by the dotted key that names the file or folder.

    Raises:
        FedexpError: The class of a plug-in does not exist, a plug-in cannot read its
            file, or a path is neither a file nor a folder.
    """
    contents: dict[str, str] = {}
    for place, node in _nodes(config):
        declared = getattr(_plugin_class(place, node), "content_keys", {})
        for key, hash_of in declared.items():
            beside = len(declared) == 1 and "sha256" in node
            found = node["sha256"] if beside and node.get(key) else None
            path = _existing_path(node.get(key))
            if path is not None and not (path.is_file() or path.is_dir()):
                # For example, opening a named pipe would wait for a writer.
                raise ConfigError(
                    f"'{place}.{key}' is not a regular file",
                    where=f"{place}.{key}",
                    expected="a file or a folder, because its content is read several times",
                    got=str(path),
                    do="copy the content into a file",
                )
            if found is None and path is not None:
                # An OSError is raised if, for example, the path of a file is a folder.
                with contextlib.suppress(OSError):
                    found = hash_of(path)
            if found is not None:
                contents[f"{place}.{key}"] = found
                if beside:
                    node["sha256"] = found

    return contents


def _nodes(node: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every nested mapping of a config with its dotted key."""
    for key, value in node.items():
        if isinstance(value, dict):
            inside = f"{place}.{key}" if place else str(key)
            yield inside, value
            yield from _nodes(value, inside)


def _plugin_class(place: str, node: Mapping[str, Any]) -> type | None:
    """Return the class of a config node that may name a file or folder.

    If the node has no ``sha256`` and none of its values is an existing path, the result
    is None, and the class is not imported.
    """
    if "_target_" not in node:
        return _OWN.get(place)
    if node.get("sha256") or any(
        _existing_path(value) for key, value in node.items() if key != "_target_"
    ):
        return locate(node["_target_"], object, place)
    return None


def _existing_path(value: Any) -> Path | None:
    """Return the path that `value` names, or None if it names no existing path."""
    try:
        path = Path(value).expanduser() if isinstance(value, str) and value else None
        return path if path is not None and path.exists() else None
    # These errors occur if the text is too long, or names an unknown user's home
    # folder.
    except (OSError, RuntimeError):
        return None
