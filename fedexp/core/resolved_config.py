"""The resolved config of a run, and its conversion to and from ``config.yaml``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

_FACTS = ("contents", "choices", "overrides")  # keys of config.yaml besides the values


@dataclass(frozen=True)
class ResolvedConfig:
    """A config whose interpolations are resolved, and its origin.

    ``config[key]`` is the value of a top-level key. An empty config is false.

    Args:
        values: Value of every key, plain Python objects.
        contents: Hash of every file whose content is part of the config, by the dotted
            key that names the file.
        choices: Chosen option of each config group.
        overrides: Overrides as the user typed them, without those of Hydra's own keys.
        interpolations: Interpolations whose values come from environment variables, by
            dotted key. The value of such a variable may be secret. The file
            ``config.yaml`` therefore contains the interpolation in place of the value.
    """

    values: dict[str, Any] = field(default_factory=dict)
    contents: dict[str, str] = field(default_factory=dict)
    choices: dict[str, Any] = field(default_factory=dict)
    overrides: list[str] = field(default_factory=list)
    interpolations: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_stored(cls, stored: Mapping[str, Any]) -> ResolvedConfig:
        """Build a config from a mapping that `to_stored` returned.

        Fields that an earlier version of fedexp did not store are empty. Interpolations
        stay in the values as text. `fedexp.config.compose.resolve_stored` resolves
        them.
        """
        return cls(
            values={key: value for key, value in stored.items() if key not in _FACTS},
            contents=dict(stored.get("contents") or {}),
            choices=dict(stored.get("choices") or {}),
            overrides=list(stored.get("overrides") or []),
        )

    def to_stored(self) -> dict[str, Any]:
        """Return the content of ``config.yaml`` as one mapping.

        Its keys are the top-level config keys, ``contents``, ``choices`` and
        ``overrides``. A value that has an entry in `interpolations` is replaced by this
        entry.
        """
        return {
            **_replaced(self.values, self.interpolations),
            "contents": dict(self.contents),
            "choices": dict(self.choices),
            "overrides": list(self.overrides),
        }

    def with_values(self, **values: Any) -> ResolvedConfig:
        """Return a copy in which the values of some top-level keys are replaced."""
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
    """Return a copy of nested values in which some values are replaced by texts.

    Args:
        node: The nested values.
        texts: The texts, by the dotted key of the value.
        prefix: Dotted key of `node`, with a dot at the end, or empty.
    """
    return {
        key: _replaced(value, texts, f"{name}.")
        if isinstance(value, Mapping)
        else texts.get(name, value)
        for key, value in node.items()
        for name in (f"{prefix}{key}",)
    }
