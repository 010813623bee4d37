"""The resolved config of a run, in the code and as ``config.yaml`` stores it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

_FACTS = ("contents", "choices", "overrides")  # keys of config.yaml beside the values


@dataclass(frozen=True)
class ResolvedConfig:
    """A config without interpolations, and its origin.

    ``config[key]`` is the value of a top-level key. An empty config is false.

    Args:
        values: Value of every key, plain Python objects.
        contents: Hash of every file whose content is part of the config, by the dotted
            key that names the file.
        choices: Chosen option of each config group.
        overrides: Overrides as typed, without Hydra's own.
        interpolations: Text that is stored in place of a value, by dotted key. It names
            the environment variable that the value came from, which may be secret.
    """

    values: dict[str, Any] = field(default_factory=dict)
    contents: dict[str, str] = field(default_factory=dict)
    choices: dict[str, Any] = field(default_factory=dict)
    overrides: list[str] = field(default_factory=list)
    interpolations: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_stored(cls, stored: Mapping[str, Any]) -> ResolvedConfig:
        """Build a config from a mapping that `to_stored` returned.

        Entries that an earlier version did not store are empty. Interpolations stay in
        the values as text. `fedexp.config.compose.resolve_stored` resolves them.
        """
        return cls(
            values={key: value for key, value in stored.items() if key not in _FACTS},
            contents=dict(stored.get("contents") or {}),
            choices=dict(stored.get("choices") or {}),
            overrides=list(stored.get("overrides") or []),
        )

    def to_stored(self) -> dict[str, Any]:
        """Return the content of ``config.yaml`` as one flat mapping.

        It has all fields. A value with an interpolation is replaced by the
        interpolation.
        """
        return {
            **_replaced(self.values, self.interpolations),
            "contents": dict(self.contents),
            "choices": dict(self.choices),
            "overrides": list(self.overrides),
        }

    def with_values(self, **values: Any) -> ResolvedConfig:
        """Return a copy with other values at top-level keys."""
        remaining = {
            key: text
            for key, text in self.interpolations.items()
            if key.partition(".")[0] not in values
        }
        return replace(self, values={**self.values, **values}, interpolations=remaining)

    def __getitem__(self, key: str) -> Any:
        return self.values[key]

    def __bool__(self) -> bool:
        return bool(self.values)


def _replaced(
    node: Mapping[str, Any], texts: Mapping[str, Any], prefix: str = ""
) -> dict[str, Any]:
    """Return a copy of nested values, with the given texts at their dotted keys."""
    return {
        key: _replaced(value, texts, f"{name}.")
        if isinstance(value, Mapping)
        else texts.get(name, value)
        for key, value in node.items()
        for name in (f"{prefix}{key}",)
    }
