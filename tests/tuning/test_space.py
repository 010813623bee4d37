"""Tests of ranges: what they mean, sample and refuse, and optima at their edges."""

from __future__ import annotations

import pytest
from optuna.trial import FixedTrial

from fedexp.core.errors import ConfigError
from fedexp.tuning.space import Choice, Interval, Range, parse_range


def parsed(text: str) -> Range:
    one = parse_range(text)
    assert one is not None
    return one


@pytest.mark.parametrize(("text", "low", "high", "log", "whole"), [
    ("local.lr=log(0.001,1)", 0.001, 1, True, False),
    ("local.lr=uniform(-1, 1e-1)", -1, 0.1, False, False),
    ("local.epochs=int(1,5)", 1, 5, False, True),
    ("local.epochs=logint(1,500)", 1, 500, True, True),
])  # fmt: skip
def test_parse_range_reads_intervals(
    text: str, low: float, high: float, log: bool, whole: bool
) -> None:
    key = text.partition("=")[0]
    assert parsed(text) == Interval(key, low, high, log, whole, text)


@pytest.mark.parametrize(("text", "values"), [
    ("local.lr=0.1,0.2", ("0.1", "0.2")),
    ("method=choice(fedavg,scaffold)", ("fedavg", "scaffold")),
    ("model.hidden=[8],[16,4]", ("[8]", "[16,4]")),
    ("local.epochs=range(1,4)", ("1", "2", "3")),
])  # fmt: skip
def test_parse_range_reads_lists_as_hydra_does(text: str, values: tuple[str, ...]) -> None:
    assert parsed(text) == Choice(text.partition("=")[0], values, text)


@pytest.mark.parametrize(
    "text", ["rounds=3", "model.hidden=[8,4]", "a='x,y'", "~seed", "lr=int(3)"]
)
def test_parse_range_of_a_single_value_is_none(text: str) -> None:
    assert parse_range(text) is None


@pytest.mark.parametrize(("text", "says"), [
    ("a=log(0,1)", "above 0"), ("a=log(2,1)", "below its end"), ("a=log(1,1)", "below its end"),
    ("a=uniform(0,inf)", "below its end"), ("a=int(0.5,2)", "whole"), ("a=log(1)", "two numbers"),
    ("a=lgo(1,2)", "no kind of range"), ("a=interval(0,1)", "not known"), ("a=1,1", "each once"), ("a=glob(*)", "cannot be read"),
])  # fmt: skip
def test_invalid_range_raises_config_error(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as raised:
        parse_range(text)
    assert raised.value.facts["where"] == text


def test_sampled_numbers_are_short_and_stay_in_the_range() -> None:
    one = parsed("a=log(0.0012345,1)")
    assert one.suggest(FixedTrial({"a": 0.0123456})) == "0.01235"
    # The value is not rounded to 0.001234.
    assert one.suggest(FixedTrial({"a": 0.0012345})) == "0.0012345"
    assert one.checked_values == ["0.0012345", "1", "0.3828"]
    assert parsed("a=int(1,5)").checked_values == ["1", "5"]
    for high in (500, 1000, 1001):
        assert not float(parsed(f"a=uniform(1,{high})").checked_values[-1]).is_integer()
        assert not float(parsed(f"a=uniform(0,{high})").checked_values[-1]).is_integer()
    assert parsed("a=int(1,5)").suggest(FixedTrial({"a": 4})) == "4"
    assert float(parsed("a=uniform(0,12345678)").suggest(FixedTrial({"a": 12345678}))) == 12345678


@pytest.mark.parametrize(("text", "value", "edge"), [
    ("a=log(0.001,1)", "0.0013", "lower"), ("a=log(0.001,1)", "0.002", None),
    ("a=log(0.001,1)", "0.8", "upper"), ("a=uniform(0,1)", "0.04", "lower"),
    ("a=uniform(0,1)", "0.8", None), ("a=int(1,3)", "3", "upper"),
    ("a=0.3,0.1,0.2", "0.1", "lower"), ("a=0.3,0.1,0.2", "0.3", "upper"),
    ("a=0.3,0.1,0.2", "0.2", None), ("a=x,y", "x", None),
])  # fmt: skip
def test_edge_is_reported_on_the_scale_of_the_range(
    text: str, value: str, edge: str | None
) -> None:
    assert parsed(text).edge(value) == edge
