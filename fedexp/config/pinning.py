"""Files that a config names decide the result by what is in them, not by where they lie.

The class of a plug-in (or of a group of own keys) says which of its keys name such a file or folder, and how its content is
hashed: ``content_keys: ClassVar[Mapping[str, Callable[[Path], str]]] = {"path": file_sha256}``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fedexp.config.keys import ClientModels
from fedexp.core.build import locate

_OWN: dict[str, type] = {"client_models": ClientModels}  # nodes without a _target_


def pin(config: dict[str, Any]) -> dict[str, str]:
    """What is in the files that `config` names: a hash by dotted key. Fills in an empty ``sha256`` beside such a key.

    A file that is not there has no hash unless the config says one; the plug-in's own check refuses it.

    Raises:
        FedexpError: there is no such plug-in, or it cannot read its file.
    """
    contents: dict[str, str] = {}
    for place, node in _nodes(config):
        declared = getattr(_plugin_class(place, node), "content_keys", {})
        for key, hash_of in declared.items():
            beside = len(declared) == 1 and "sha256" in node
            found = node["sha256"] if beside and node.get(key) else None
            path = _existing_path(node.get(key))
            if found is None and path is not None:
                with contextlib.suppress(OSError):  # a folder in place of a file, say
                    found = hash_of(path)
            if found is not None:
                contents[f"{place}.{key}"] = found
                if beside:
                    node["sha256"] = found
    return contents


def _nodes(node: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    for key, value in node.items():
        if isinstance(value, dict):
            inside = f"{place}.{key}" if place else str(key)
            yield inside, value
            yield from _nodes(value, inside)


def _plugin_class(place: str, node: Mapping[str, Any]) -> type | None:
    """The class of a node that may name a file; None where nothing does, so that no plug-in is imported for nothing."""
    if "_target_" not in node:
        return _OWN.get(place)
    if node.get("sha256") or any(
        _existing_path(value) for key, value in node.items() if key != "_target_"
    ):
        return locate(node["_target_"], object, place)
    return None


def _existing_path(value: Any) -> Path | None:
    """The file or folder that a text names, if it is there."""
    try:
        path = Path(value).expanduser() if isinstance(value, str) and value else None
        return path if path is not None and path.exists() else None
    except (OSError, RuntimeError):  # too long a text; ~ of nobody
        return None
