"""Tests that `build` turns config nodes into objects.

A faulty node raises an error with the key, the rule and the nearest name.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import pytest

from fedexp.core.build import build
from fedexp.core.errors import ConfigError, FedexpError, suggest


@dataclass(frozen=True)
class Inner:
    width: int


@dataclass(frozen=True)
class Plugin:
    count: int
    rate: float = 0.5
    kind: Literal["a", "b"] = "a"
    sizes: tuple[int, ...] = ()
    pair: tuple[float, str] = (1.0, "x")
    inner: Inner | None = None
    either: Literal["all"] | int | float = "all"
    flag: bool = False
    hidden: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ValueError(f"count must not be negative, got {self.count}")


@dataclass(frozen=True)
class Child(Plugin):
    extra: str = "e"


def test_values_are_taken_and_cast() -> None:
    made = build(
        Plugin,
        {
            "count": 3,
            "rate": 1,
            "sizes": [1, 2],
            "pair": [2, "y"],
            "inner": {"width": 4},
            "either": 7,
        },
        "p",
    )
    assert made == Plugin(3, 1.0, "a", (1, 2), (2.0, "y"), Inner(4), 7)
    assert type(made.rate) is float and type(made.either) is int
    assert type(build(Plugin, {"count": 1, "either": 0.5}, "p").either) is float


def test_target_names_a_subclass() -> None:
    assert build(Plugin, {"_target_": f"{__name__}.Child", "count": 1, "extra": "z"}, "p") == Child(
        1, extra="z"
    )


@pytest.mark.parametrize(("node", "said"), [
    ({"count": "3"}, ["'p.count' has the wrong type", "an integer", "'3'"]),
    ({"count": 3.0}, ["p.count"]),
    ({"count": True}, ["p.count"]),
    ({}, ["'p.count' is not set"]),
    ({"count": 1, "rate": "fast"}, ["p.rate", "a number"]),
    ({"count": 1, "rate": float("nan")}, ["p.rate"]),
    ({"count": 1, "kind": "c"}, ["a | b"]),
    ({"count": 1, "sizes": [1, "x"]}, ["p.sizes[1]"]),
    ({"count": 1, "sizes": "12"}, ["p.sizes"]),
    ({"count": 1, "pair": [1]}, ["p.pair"]),
    ({"count": 1, "inner": {"widht": 4}}, ["p.inner.widht", "did you mean 'width'?"]),
    ({"count": 1, "flag": 1}, ["p.flag", "true or false"]),
    ({"count": 1, "rat": 2}, ["did you mean 'rate'?"]),
    ({"count": 1, "hidden": 2}, ["unknown key 'hidden'"]),
    ({"count": -1}, ["count must not be negative"]),
    ({"count": 1, "_target_": "nodots"}, ["package.module.Class"]),
    ({"count": 1, "_target_": "no.such.Thing"}, ["module 'no.such' was not found"]),
    ({"count": 1, "_target_": f"{__name__}.Chidl"}, ["did you mean 'Child'?"]),
    ({"count": 1, "_target_": f"{__name__}.Inner"}, ["is not a Plugin"]),
])  # fmt: skip
def test_build_with_faulty_node_raises_with_suggestion(node: dict, said: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        build(Plugin, node, "p")
    for words in said:
        assert words in str(caught.value)


@dataclass(frozen=True)
class WithLists:
    counts: list[int] | None = None
    pairs: Sequence[tuple[int, int]] = ()


@pytest.mark.parametrize(("node", "declared"), [
    ({"counts": [1, 2]}, "tuple[int, ...]"),
    ({"pairs": [[1, 2]]}, "tuple[tuple[int, int], ...]"),
])  # fmt: skip
def test_build_of_a_field_with_a_list_type_says_how_to_declare_it(
    node: dict, declared: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        build(WithLists, node, "p")
    assert f"declare the field as {declared}" in str(caught.value)


@pytest.mark.parametrize(("source", "line", "said"), [
    ("\nimport fx_not_installed\n", 2, "No module named 'fx_not_installed'"),
    ("def f(:\n", 1, "SyntaxError"),
    ("x = 1\ny = x / 0\n", 2, "ZeroDivisionError"),
])  # fmt: skip
def test_a_module_that_cannot_be_imported(
    source: str, line: int, said: str, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"fxbroken{line}{len(source)}"
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=f"'{name}' cannot be imported: .*{said}") as caught:
        build(Plugin, {"_target_": f"{name}.P"}, "p")
    assert f"{name}.py:{line} (p._target_)" in str(caught.value)


def test_errors_travel_between_processes() -> None:
    error = FedexpError("what", where="here", expected=1, got=2, do="that")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_suggest_returns_the_nearest_name() -> None:
    assert suggest("metod", ["method", "model"]) == "did you mean 'method'?"
    assert "method" in suggest("xyz", ["method"])
