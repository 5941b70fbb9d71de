"""Rotary tables: float64 angles, rounded once, and the scalings of transformers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from minfer import reference, rope
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


@pytest.mark.parametrize("n_rot", [2, 6, 64])
@pytest.mark.parametrize("by", [0, 1, -1, -37, 4095, -100_000])
@pytest.mark.parametrize("scaling", [None, Linear(8.0), Llama3(32.0, 1.0, 4.0, 8192)], ids=repr)
def test_a_turn_is_the_angle_of_so_many_positions(
    scaling: Scaling | None, by: int, n_rot: int
) -> None:
    cos, sin = rope.turn(Rope(n_rot, 500000.0, scaling), by)
    assert cos.shape == sin.shape == (1, n_rot // 2) and cos.dtype == sin.dtype == np.float32
    divisors = [1.0] * (n_rot // 2)
    if scaling is not None:
        divisors = scaling.divisors(Rope(n_rot, 500000.0)).tolist()
    for pair, divisor in enumerate(divisors):
        angle = by * (500000.0 ** (-2 * pair / n_rot) / divisor)
        assert cos[0, pair] == np.float32(math.cos(angle))
        assert sin[0, pair] == np.float32(math.sin(angle))


def test_a_turn_leaves_the_temperature_out_and_keeps_the_scaling() -> None:
    warm = Rope(8, 100.0, Yarn(4.0, 64, 1.25))
    cos, sin = rope.turn(warm, 17)
    assert np.abs(cos * cos + sin * sin - 1).max() < 2e-7
    at_17 = [1.25 * table[0] for table in (cos, sin)]
    assert np.abs(np.array(at_17) - [table[17] for table in rope.tables(50, warm)]).max() < 2e-7
    assert np.abs(cos - rope.turn(Rope(8, 100.0), 17)[0]).max() > 0.1


def test_a_turn_back_lands_where_a_row_would_have_been_written() -> None:
    how = Rope(16, 10000.0, Linear(2.0))
    x = np.random.default_rng(0).standard_normal((20, 2, 24)).astype(np.float32)
    tables, positions = rope.tables(60, how), np.arange(30, 50)
    at_30 = reference.rope(x, positions, *tables, pairing="half")
    back = reference.rope(at_30, np.zeros(20, int), *rope.turn(how, -30), pairing="half")
    assert np.abs(back - reference.rope(x, positions - 30, *tables, pairing="half")).max() < 1e-6


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
