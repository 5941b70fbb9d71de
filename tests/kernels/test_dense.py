"""Dense steps: values against float64, and rows that depend on themselves and the weights only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from arrays import normal
from under_test import apart, configs_of, default, interpreted, op, package, same_bits

from minfer import reference
from minfer.errors import Refusal

FINE = 3000 if interpreted() else 100_000  # points
ROWS = 9 if interpreted() else 65
ROW_COUNTS = [1, 2, ROWS] if interpreted() else [*range(1, 18), 63, 64, ROWS]
rms_norm, rope, add, scale, softcap = (
    op(name) for name in ("rms_norm", "rope", "add", "scale", "softcap")
)


def assert_within_budget(out: np.ndarray, ref32: np.ndarray, ref64: np.ndarray) -> None:
    """The error is at most twice that of the same equation in plain f32."""
    assert out.dtype == np.float32 and out.shape == ref64.shape
    assert np.abs(out - ref64).max() <= 2 * np.abs(ref32 - ref64).max() + 1e-6


def assert_rows_stand_alone(name: str, out: np.ndarray, *rows: np.ndarray, **how: Any) -> None:
    """The last n rows alone have the bits they have among all of them, in every configuration.

    how: scalars of the op, and what is not by rows as a tuple under `whole`.
    """
    launch, whole = op(name), how.pop("whole", ())
    usual, *others = configs_of(default(name))
    calls = [(n, usual) for n in ROW_COUNTS] + [
        (n, config) for config in others for n in ROW_COUNTS[:2]
    ]
    for n, config in calls:
        some = [r[ROWS - n :] for r in rows]
        assert same_bits(launch(*some, *whole, **how, config=config), out[ROWS - n :])


@pytest.mark.parametrize("m", [1, 15, 16, 17, 33, 576, 577])
def test_rms_norm(m: int) -> None:
    x, weight = normal(ROWS, m) * 3, normal(m, seed=1)
    out = rms_norm(x, weight, eps=1e-5)
    mean = np.cumsum(x * x, axis=1, dtype=np.float32)[:, -1:] / np.float32(m)
    plain = x * (np.float32(1) / np.sqrt(mean + np.float32(1e-5))) * weight
    assert_within_budget(out, plain, reference.rms_norm(x, weight, eps=1e-5))
    assert_rows_stand_alone("rms_norm", out, x, whole=(weight,), eps=1e-5)


def test_rms_norm_of_a_zero_row_is_zero_and_eps_counts() -> None:
    rows = np.zeros((2, 20), np.float32)
    rows[1] = 1e-3
    out = rms_norm(rows, np.ones(20, np.float32), eps=1e-6)
    assert (out[0] == 0).all()
    assert np.allclose(out[1], 2**-0.5, rtol=1e-6)


GATES: dict[str, Callable[[Any], Any]] = {
    "silu_mul": lambda g: g / (1 + np.exp(-g)),
    "gelu_mul": (
        lambda g: g / 2 * (1 + np.tanh(np.float32((2 / np.pi) ** 0.5) * (g + 0.044715 * g**3)))
    ),
}


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("m", [1, 15, 17, 64, 577])
def test_gates(name: str, m: int) -> None:
    gate, up = normal(ROWS, m) * 8, normal(ROWS, m, seed=1)
    out = op(name)(gate, up)
    assert_within_budget(out, GATES[name](gate) * up, getattr(reference, name)(gate, up))
    assert_rows_stand_alone(name, out, gate, up)


@pytest.mark.parametrize(("name", "far"), [("silu_mul", 85), ("gelu_mul", 9.8)])
def test_a_gate_is_accurate_everywhere_and_has_the_right_ends(name: str, far: float) -> None:
    gate = np.linspace(-far, far, FINE, dtype=np.float32)[None]
    ones = np.ones_like(gate)
    wanted = getattr(reference, name)(gate, ones)
    found = op(name)(gate, ones)
    assert np.abs(found / wanted - 1)[gate != 0].max() < 3e-7
    ends = np.array([[np.nan, np.inf, -300, 300, 0, 3e38, -3e38]], np.float32)
    result = op(name)(ends, np.ones_like(ends))[0]
    assert np.isnan(result[0])
    assert result[1:].tolist() == [np.inf, 0, 300, 0, float(ends[0, 5]), 0]


def test_gelu_is_that_of_torch() -> None:
    torch = pytest.importorskip("torch")

    gate, up = normal(9, 64) * 4, normal(9, 64, seed=1)
    wanted = torch.nn.functional.gelu(torch.from_numpy(gate), approximate="tanh").numpy() * up
    assert np.abs(op("gelu_mul")(gate, up) - wanted).max() < 2e-6


def test_a_softcap_is_accurate_everywhere_and_keeps_within_its_cap() -> None:
    x = np.concatenate([np.linspace(-300, 300, FINE + 1), np.geomspace(1e-30, 1, 1000)])
    x = x.astype(np.float32)[None]
    found = softcap(x, cap=30.0)
    wanted = reference.softcap(x, cap=30.0)
    assert np.abs(found / np.where(x == 0, 1, wanted) - 1)[x != 0].max() < 3e-7
    assert np.abs(found).max() <= 30
    ends = np.array([[np.nan, np.inf, -np.inf, 0, -0.0]], np.float32)
    result = softcap(ends, cap=30.0)[0]
    assert np.isnan(result[0]) and result[1:].tolist() == [30, -30, 0, 0]
    assert np.signbit(result[4])


@pytest.mark.parametrize("m", [1, 17, 577])
def test_softcap_and_scale_by_rows(m: int) -> None:
    x = normal(ROWS, m) * 40
    capped, scaled = softcap(x, cap=20.0), scale(x, factor=0.1)
    assert_within_budget(capped, 20 * np.tanh(x / 20), reference.softcap(x, cap=20.0))
    assert (scaled == reference.scale(x, factor=0.1).astype(np.float32)).all()
    assert np.array_equal(softcap(x, cap=20), capped), "a whole number"
    assert np.array_equal(scale(x, factor=3), scale(x, factor=3.0))
    assert_rows_stand_alone("softcap", capped, x, cap=20.0)
    assert_rows_stand_alone("scale", scaled, x, factor=0.1)


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize(("d", "n_rot"), [(64, 64), (20, 12), (7, 2), (80, 80)])
def test_rope(pairing: str, d: int, n_rot: int) -> None:
    x = normal(ROWS, 5, d)
    angles = np.arange(100)[:, None] * 10.0 ** -np.linspace(0, 4, n_rot // 2)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    positions = np.random.default_rng(1).integers(0, 100, ROWS).astype(np.int32)
    out = rope(x, positions, cos, sin, pairing=pairing)
    wanted = reference.rope(x, positions, cos, sin, pairing=pairing)
    assert np.abs(out - wanted).max() < 1e-6
    assert (out[..., n_rot:] == x[..., n_rot:]).all()
    assert_rows_stand_alone("rope", out, x, positions, whole=(cos, sin), pairing=pairing)


def test_rope_pairs_are_the_named_ones() -> None:
    x = np.arange(1, 9, dtype=np.float32).reshape(1, 1, 8)
    cos, sin = np.zeros((1, 3), np.float32), np.ones((1, 3), np.float32)
    at = np.zeros(1, np.int32)
    half = rope(x, at, cos, sin, pairing="half")[0, 0]
    assert half.tolist() == [-4, -5, -6, 1, 2, 3, 7, 8]
    neighbours = rope(x, at, cos, sin, pairing="interleaved")[0, 0]
    assert neighbours.tolist() == [-2, 1, -4, 3, -6, 5, 7, 8]


def test_rope_refuses_what_is_not_in_the_table() -> None:
    x, table = normal(2, 1, 8), normal(4, 4)
    for positions, bad in (([0, 4], 4), ([-1, 0], -1)):
        with pytest.raises(Refusal, match=f"position {bad} of row . is not in the rope table of 4"):
            rope(x, np.array(positions), table, table, pairing="half", host=True)
    with pytest.raises(Refusal, match="'neox' is neither half nor interleaved"):
        rope(x, np.zeros(2, np.int32), table, table, pairing="neox")
    with pytest.raises(Refusal, match="do not fit rows"):
        wide = normal(4, 5)
        rope(x, np.zeros(2, np.int32), wide, wide, pairing="half")


def test_add_is_exact() -> None:
    x, y = normal(5, 33), normal(5, 33, seed=1)
    assert (add(x, y) == x + y).all()
    assert (add(x, y[2]) == x + np.tile(y[2], (5, 1))).all()
    with pytest.raises(Refusal, match=r"shapes \[5, 33\] of x and \[5, 32\] of y differ"):
        add(x, y[:, :32])
    with pytest.raises(Refusal, match=r"shapes \[5, 33\] of x and \[32\] of y differ"):
        add(x, y[0, :32])


@pytest.mark.parametrize(("shift", "extra"), [(0, 16), (16, 0), (3, 5)])
@pytest.mark.parametrize("m", [48, 577])
def test_steps_read_rows_that_lie_apart(m: int, shift: int, extra: int) -> None:
    x, y, weight = normal(5, m), normal(5, m, seed=1), package().from_host(normal(m, seed=2))
    near = [package().from_host(rows) for rows in (x, y)]
    far = [apart(x, shift, extra), apart(y, extra, shift + 1)]

    def both(name: str, n: int, **how: Any) -> list[np.ndarray]:
        step = default(name)
        config = step.config()
        outs = (step.launch(*rows[:n], **how, config=config) for rows in (near, far))
        return [np.array(package().to_host(out)) for out in outs]

    for name in ("silu_mul", "gelu_mul", "add"):
        assert same_bits(*both(name, 2)), name
    assert same_bits(*both("rms_norm", 1, weight=weight, eps=1e-5))
    assert same_bits(*both("scale", 1, factor=3.0))
    assert same_bits(*both("softcap", 1, cap=2.0))


def test_rope_reads_heads_of_rows_that_lie_apart() -> None:
    x, place = normal(5, 48), package().from_host
    table, at = place(normal(7, 8)), place(np.arange(5, dtype=np.int32))
    turn = default("rope")
    outs = [
        turn.launch(rows.reshape(5, 3, 16), at, table, table, pairing="half", config=turn.config())
        for rows in (place(x), apart(x, 16, 32))
    ]
    near, far = (np.array(package().to_host(out)) for out in outs)
    assert near.shape == (5, 3, 16) and same_bits(near, far)
