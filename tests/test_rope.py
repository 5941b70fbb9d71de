"""Rotary tables: float64 angles, rounded once."""

from __future__ import annotations

import math

import numpy as np

from minfer import rope


def test_tables_hold_cos_and_sin_of_position_times_frequency() -> None:
    cos, sin = rope.tables(3000, 8, 10000.0)
    assert cos.shape == sin.shape == (3000, 4) and cos.dtype == np.float32
    for position, pair in ((0, 0), (1, 0), (2999, 0), (2999, 1), (777, 3)):
        angle = position * 10000.0 ** (-2 * pair / 8)
        assert cos[position, pair] == np.float32(math.cos(angle))
        assert sin[position, pair] == np.float32(math.sin(angle))


def test_frequencies_fall_from_one_by_the_base() -> None:
    assert rope.inverse_frequencies(4, 100.0).tolist() == [1.0, 0.1]
