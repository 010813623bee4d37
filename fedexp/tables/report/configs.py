"""Resolved configs of many runs: the common part once, and the rest of each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

# Values by dotted key.
Flat = dict[str, Any]


def flat(node: Any, prefix: str = "") -> Flat:
    """Flatten nested mappings to dotted keys. An empty mapping is a value."""
    if not isinstance(node, Mapping) or not node:
        return {prefix: node}
    return {
        path: value
        for key, inner in node.items()
        for path, value in flat(inner, f"{prefix}.{key}" if prefix else str(key)).items()
    }


def parted(configs: Mapping[str, Mapping[str, Any]]) -> tuple[Flat, dict[str, Flat]]:
    """Split configs into their common part and the rest of each.

    Args:
        configs: Configs by their hashes.

    Returns:
        The common part, and the rest by hash.
    """
    each = {name: flat(config) for name, config in sorted(configs.items())}
    first = next(iter(each.values()), {})
    shared = {
        key: value
        for key, value in first.items()
        if all(key in config and _same(config[key], value) for config in each.values())
    }
    return shared, {
        name: {k: v for k, v in config.items() if k not in shared} for name, config in each.items()
    }


def lines(config: Mapping[str, Any]) -> str:
    """Return one line ``key: value`` per key, values as JSON."""
    return "\n".join(f"{key}: {json.dumps(value)}" for key, value in config.items())


def _same(a: Any, b: Any) -> bool:
    return json.dumps(a) == json.dumps(b)
