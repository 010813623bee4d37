"""Tests of the guard against plug-ins that draw from global generators."""

from __future__ import annotations

import numpy as np
import pytest

from fedexp.runtime.random_numbers import _numpy_state


@pytest.mark.parametrize("draws", [0, 1, 2, 311, 312, 400])
def test_numpy_state_read_from_memory_equals_get_state(draws: int) -> None:
    before = np.random.get_state()
    try:
        np.random.seed(3)
        np.random.random(draws)
        _, words, position, *_ = np.random.get_state()
        assert _numpy_state() == words.tobytes() + np.int32(position).tobytes()
    finally:
        np.random.set_state(before)


def test_numpy_state_after_one_draw_differs() -> None:
    before = np.random.get_state()
    first = _numpy_state()
    try:
        np.random.random()
        assert _numpy_state() != first
    finally:
        np.random.set_state(before)
    assert _numpy_state() == first
