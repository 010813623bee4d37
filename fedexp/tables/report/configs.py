"""Resolved configs of many runs. Values that all of them share are stored once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fedexp.storage.selection import dotted_items

# Values by dotted key.
Flat = dict[str, Any]


def flat(config: Mapping[str, Any]) -> Flat:
    """Return the values of a config by dotted key. Empty mappings count as values."""
    return dict(dotted_items(config, empty=True))


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
        if all(
            key in config and json.dumps(config[key]) == json.dumps(value)
            for config in each.values()
        )
    }
    return shared, {
        name: {k: v for k, v in config.items() if k not in shared} for name, config in each.items()
    }


def lines(config: Mapping[str, Any]) -> str:
    """Return one line ``key: value`` per key, values as JSON."""
    return "\n".join(f"{key}: {json.dumps(value)}" for key, value in config.items())
