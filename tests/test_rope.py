"""Rotary tables: float64 angles, rounded once, and the scalings of transformers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from minfer import rope
from minfer.rope import Divided, Linear, Llama3, Rope, Scaling, Yarn, yarn_temperature


def test_tables_hold_cos_and_sin_of_position_times_frequency() -> None:
    cos, sin = rope.tables(3000, Rope(8, 10000.0))
    assert cos.shape == sin.shape == (3000, 4) and cos.dtype == np.float32
    for position, pair in ((0, 0), (1, 0), (2999, 0), (2999, 1), (777, 3)):
        angle = position * 10000.0 ** (-2 * pair / 8)
        assert cos[position, pair] == np.float32(math.cos(angle))
        assert sin[position, pair] == np.float32(math.sin(angle))


def test_tables_longer_than_a_chunk_are_seamless(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = rope.tables(100, Rope(8, 10000.0))
    monkeypatch.setattr(rope, "CHUNK", 7)
    assert all(
        (a == b).all() for a, b in zip(whole, rope.tables(100, Rope(8, 10000.0)), strict=True)
    )


def test_frequencies_fall_from_one_by_the_base() -> None:
    assert Rope(4, 100.0).frequencies().tolist() == [1.0, 0.1]


def test_the_temperature_multiplies_cos_and_sin_once() -> None:
    plain = rope.tables(50, Rope(8, 100.0, Yarn(1.0, 64, 1.0)))
    warm = rope.tables(50, Rope(8, 100.0, Yarn(1.0, 64, 1.25)))
    for ours, theirs in zip(warm, plain, strict=True):
        assert np.abs(ours - 1.25 * theirs).max() < 2e-7


CONTEXT = {"original_max_position_embeddings": 8192}
CASES: dict[str, tuple[dict[str, Any], Scaling]] = {
    "linear": ({"rope_type": "linear", "factor": 8.0}, Linear(8.0)),
    "llama3": (
        {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        | CONTEXT,
        Llama3(32.0, 1.0, 4.0, 8192),
    ),
    "yarn": (
        {"rope_type": "yarn", "factor": 4.0} | CONTEXT,
        Yarn(4.0, 8192, yarn_temperature(4.0)),
    ),
    "yarn, other turns": (
        {"rope_type": "yarn", "factor": 40.0, "beta_fast": 16.0, "beta_slow": 2.0} | CONTEXT,
        Yarn(40.0, 8192, yarn_temperature(40.0), 16.0, 2.0),
    ),
    "yarn, attention": (
        {"rope_type": "yarn", "factor": 0.5, "attention_factor": 0.75} | CONTEXT,
        Yarn(0.5, 8192, 0.75),
    ),
    "yarn, one pair": (
        {"rope_type": "yarn", "factor": 2.0, "beta_fast": 1400.0, "beta_slow": 1320.0} | CONTEXT,
        Yarn(2.0, 8192, yarn_temperature(2.0), 1400.0, 1320.0),
    ),
}


@pytest.mark.parametrize("n_rot", [64, 128])
@pytest.mark.parametrize("base", [10000.0, 500000.0])
@pytest.mark.parametrize("case", CASES)
def test_scalings_are_those_of_transformers(case: str, base: float, n_rot: int) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    theirs, ours = CASES[case]
    config = LlamaConfig(
        head_dim=n_rot,
        max_position_embeddings=131072,
        rope_parameters=theirs | {"rope_theta": base},
    )
    wanted, temperature = ROPE_INIT_FUNCTIONS[theirs["rope_type"]](config, "cpu")
    found = Rope(n_rot, base, ours)
    plain = Rope(n_rot, base).frequencies()
    # they compute in float32
    assert np.abs(found.frequencies() / wanted.double().numpy() - 1).max() < 2e-6
    assert found.temperature == pytest.approx(temperature, rel=1e-12)
    assert np.abs(found.frequencies() / plain - 1).max() > 0.1


def test_llama3_keeps_fast_pairs_and_slows_slow_ones() -> None:
    divisors = Llama3(8.0, 1.0, 4.0, 8192).divisors(Rope(128, 500000.0))
    assert divisors[0] == 1 and divisors[-1] == 8
    blended = divisors[(divisors > 1) & (divisors < 8)]
    assert len(blended) > 3 and (np.diff(blended) > 0).all()


def test_yarn_keeps_and_slows_by_hand() -> None:
    """64 dims, base 10000, 4096 positions: 32 turns at pair 10.4, one at 22.5, rounded outwards."""
    divisors = Yarn(4.0, 4096, 1.0).divisors(Rope(64, 10000.0))
    assert (divisors[:11] == 1).all() and (divisors[23:] == 4).all()
    assert divisors[16] == pytest.approx(1 / (7 / 13 + 6 / 13 / 4))


def test_factors_divide_each_its_frequency() -> None:
    assert Rope(4, 100.0, Divided((2.0, 4.0))).frequencies().tolist() == [0.5, 0.025]


def test_the_temperature_of_yarn() -> None:
    assert yarn_temperature(1.0) == yarn_temperature(0.25) == 1.0
    assert yarn_temperature(math.e**2) == pytest.approx(1.2)
