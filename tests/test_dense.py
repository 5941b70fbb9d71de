"""Dense steps: values against float64, and rows that depend on themselves and the weights only."""

from __future__ import annotations

import numpy as np
import pytest
from arrays import normal

from minfer import reference
from minfer.errors import Refusal
from minfer.kernels_numba.dense import (
    add_rows,
    gelu_mul_rows,
    rms_norm_rows,
    rope_rows,
    scale_rows,
    silu_mul_rows,
    softcap_rows,
)

ONE, TWO = {"threads": 1}, {"threads": 2}
ROW_COUNTS = [*range(1, 18), 63, 64, 65]


def assert_within_budget(out: np.ndarray, ref32: np.ndarray, ref64: np.ndarray) -> None:
    """The error is at most twice that of the same equation in plain f32."""
    assert out.dtype == np.float32 and out.shape == ref64.shape
    assert np.abs(out - ref64).max() <= 2 * np.abs(ref32 - ref64).max() + 1e-6


@pytest.mark.parametrize("m", [1, 15, 16, 17, 33, 576, 577])
def test_rms_norm(m: int) -> None:
    x, weight = normal(65, m) * 3, normal(m, seed=1)
    out = rms_norm_rows(x, weight, eps=1e-5, config=TWO)
    mean = np.cumsum(x * x, axis=1, dtype=np.float32)[:, -1:] / np.float32(m)
    plain = x * (np.float32(1) / np.sqrt(mean + np.float32(1e-5))) * weight
    assert_within_budget(out, plain, reference.rms_norm(x, weight, eps=1e-5))
    for n in ROW_COUNTS:
        for config in (ONE, TWO):
            part = rms_norm_rows(x[65 - n :], weight, eps=1e-5, config=config)
            assert (part == out[65 - n :]).all()


def test_rms_norm_of_a_zero_row_is_zero_and_eps_counts() -> None:
    rows = np.zeros((2, 20), np.float32)
    rows[1] = 1e-3
    out = rms_norm_rows(rows, np.ones(20, np.float32), eps=1e-6, config=ONE)
    assert (out[0] == 0).all()
    assert np.allclose(out[1], 2**-0.5, rtol=1e-6)


GATES = {
    "silu_mul": (silu_mul_rows, lambda g: g / (1 + np.exp(-g))),
    "gelu_mul": (
        gelu_mul_rows,
        lambda g: g / 2 * (1 + np.tanh(np.float32((2 / np.pi) ** 0.5) * (g + 0.044715 * g**3))),
    ),
}


@pytest.mark.parametrize("op", GATES)
@pytest.mark.parametrize("m", [1, 15, 17, 64, 577])
def test_gates(op: str, m: int) -> None:
    launch, plain = GATES[op]
    gate, up = normal(65, m) * 8, normal(65, m, seed=1)
    out = launch(gate, up, config=TWO)
    assert_within_budget(out, plain(gate) * up, getattr(reference, op)(gate, up))
    for n in ROW_COUNTS:
        for config in (ONE, TWO):
            part = launch(gate[65 - n :], up[65 - n :], config=config)
            assert (part == out[65 - n :]).all()


@pytest.mark.parametrize(("op", "far"), [("silu_mul", 85), ("gelu_mul", 9.8)])
def test_a_gate_is_accurate_everywhere_and_has_the_right_ends(op: str, far: float) -> None:
    launch = GATES[op][0]
    gate = np.linspace(-far, far, 100_000, dtype=np.float32)[None]
    ones = np.ones_like(gate)
    wanted = getattr(reference, op)(gate, ones)
    found = launch(gate, ones, config=ONE)
    assert np.abs(found / wanted - 1)[gate != 0].max() < 3e-7
    ends = np.array([[np.nan, np.inf, -300, 300, 0, 3e38, -3e38]], np.float32)
    result = launch(ends, np.ones_like(ends), config=ONE)[0]
    assert np.isnan(result[0])
    assert result[1:].tolist() == [np.inf, 0, 300, 0, float(ends[0, 5]), 0]


def test_gelu_is_that_of_torch() -> None:
    import torch

    gate, up = normal(9, 64) * 4, normal(9, 64, seed=1)
    wanted = torch.nn.functional.gelu(torch.from_numpy(gate), approximate="tanh").numpy() * up
    assert np.abs(gelu_mul_rows(gate, up, config=ONE) - wanted).max() < 2e-6


def test_a_softcap_is_accurate_everywhere_and_keeps_within_its_cap() -> None:
    x = np.concatenate([np.linspace(-300, 300, 100_001), np.geomspace(1e-30, 1, 1000)])
    x = x.astype(np.float32)[None]
    found = softcap_rows(x, cap=30.0, config=ONE)
    wanted = reference.softcap(x, cap=30.0)
    assert np.abs(found / np.where(x == 0, 1, wanted) - 1)[x != 0].max() < 3e-7
    assert np.abs(found).max() <= 30
    ends = np.array([[np.nan, np.inf, -np.inf, 0, -0.0]], np.float32)
    result = softcap_rows(ends, cap=30.0, config=ONE)[0]
    assert np.isnan(result[0]) and result[1:].tolist() == [30, -30, 0, 0]
    assert np.signbit(result[4])


@pytest.mark.parametrize("m", [1, 17, 577])
def test_softcap_and_scale_by_rows(m: int) -> None:
    x = normal(65, m) * 40
    capped, scaled = softcap_rows(x, cap=20.0, config=TWO), scale_rows(x, factor=0.1, config=TWO)
    assert_within_budget(capped, 20 * np.tanh(x / 20), reference.softcap(x, cap=20.0))
    assert (scaled == reference.scale(x, factor=0.1).astype(np.float32)).all()
    for n in ROW_COUNTS:
        for config in (ONE, TWO):
            part = x[65 - n :]
            assert (softcap_rows(part, cap=20.0, config=config) == capped[65 - n :]).all()
            assert (scale_rows(part, factor=0.1, config=config) == scaled[65 - n :]).all()


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize(("d", "n_rot"), [(64, 64), (20, 12), (7, 2), (80, 80)])
def test_rope(pairing: str, d: int, n_rot: int) -> None:
    x = normal(65, 5, d)
    angles = np.arange(100)[:, None] * 10.0 ** -np.linspace(0, 4, n_rot // 2)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    positions = np.random.default_rng(1).integers(0, 100, 65).astype(np.int32)
    out = rope_rows(x, positions, cos, sin, pairing=pairing, config=TWO)
    wanted = reference.rope(x, positions, cos, sin, pairing=pairing)
    assert np.abs(out - wanted).max() < 1e-6
    assert (out[..., n_rot:] == x[..., n_rot:]).all()
    for n in ROW_COUNTS:
        part = rope_rows(x[65 - n :], positions[65 - n :], cos, sin, pairing=pairing, config=ONE)
        assert (part == out[65 - n :]).all()


def test_rope_pairs_are_the_named_ones() -> None:
    x = np.arange(1, 9, dtype=np.float32).reshape(1, 1, 8)
    cos, sin = np.zeros((1, 3), np.float32), np.ones((1, 3), np.float32)
    at = np.zeros(1, np.int32)
    half = rope_rows(x, at, cos, sin, pairing="half", config=ONE)[0, 0]
    assert half.tolist() == [-4, -5, -6, 1, 2, 3, 7, 8]
    neighbours = rope_rows(x, at, cos, sin, pairing="interleaved", config=ONE)[0, 0]
    assert neighbours.tolist() == [-2, 1, -4, 3, -6, 5, 7, 8]


def test_rope_refuses_what_is_not_in_the_table() -> None:
    x, table = normal(2, 1, 8), normal(4, 4)
    for positions, bad in (([0, 4], 4), ([-1, 0], -1)):
        with pytest.raises(Refusal, match=f"position {bad} of row . is not in the rope table of 4"):
            rope_rows(x, np.array(positions), table, table, pairing="half", config=ONE)
    with pytest.raises(Refusal, match="'neox' is neither half nor interleaved"):
        rope_rows(x, np.zeros(2, np.int32), table, table, pairing="neox", config=ONE)
    with pytest.raises(Refusal, match="do not fit rows"):
        wide = normal(4, 5)
        rope_rows(x, np.zeros(2, np.int32), wide, wide, pairing="half", config=ONE)


def test_add_is_exact() -> None:
    x, y = normal(5, 33), normal(5, 33, seed=1)
    assert (add_rows(x, y, config=ONE) == x + y).all()
    assert (add_rows(x, y[2], config=ONE) == x + np.tile(y[2], (5, 1))).all()
    with pytest.raises(Refusal, match=r"shapes \[5, 33\] of x and \[5, 32\] of y differ"):
        add_rows(x, y[:, :32], config=ONE)
    with pytest.raises(Refusal, match=r"shapes \[5, 33\] of x and \[32\] of y differ"):
        add_rows(x, y[0, :32], config=ONE)
