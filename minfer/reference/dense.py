"""Dense steps: norms, rope and activations in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from minfer.format import Floats, Int32
from minfer.ops import HALF, Config, check_pairing

Doubles = NDArray[np.float64]


def rms_norm(x: Floats, weight: Floats, *, eps: float, config: Config | None = None) -> Doubles:
    """Each row over the root of its mean square, times weight; x [n, m], weight [m]."""
    wide = np.asarray(x, np.float64)
    mean = np.mean(wide * wide, axis=-1, keepdims=True)
    out: Doubles = wide / np.sqrt(mean + eps) * np.asarray(weight, np.float64)
    return out


def rope(
    x: Floats,
    positions: Int32,
    cos: Floats,
    sin: Floats,
    *,
    pairing: str,
    config: Config | None = None,
) -> Doubles:
    """Rotate pair i of every head row x [n, n_head, d] by the table row of its position.

    cos, sin: [n_pos, n_rot / 2]. pairing "half": dims (i, i + n_rot/2); "interleaved":
    (2i, 2i + 1). Dims from n_rot on are copied.
    """
    c, s = (np.asarray(table, np.float64)[positions][:, None] for table in (cos, sin))
    out: Doubles = rotated(np.asarray(x, np.float64), c, s, pairing)
    return out


def rotated(x: Any, c: Any, s: Any, pairing: str) -> Any:
    """A copy of x [n, n_head, d] with its pairs turned; every operation rounds in x's type.

    c, s [n or 1, 1, n_rot / 2] of that type.
    """
    check_pairing(pairing)
    out, half = x.copy(), c.shape[-1]
    if pairing == HALF:
        first, second = slice(0, half), slice(half, 2 * half)
    else:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    a, b = x[..., first], x[..., second]
    out[..., first], out[..., second] = a * c - b * s, b * c + a * s
    return out


def silu_mul(gate: Floats, up: Floats, *, config: Config | None = None) -> Doubles:
    """gate * sigmoid(gate) * up."""
    wide = np.asarray(gate, np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        out: Doubles = wide / (1 + np.exp(-wide)) * np.asarray(up, np.float64)
    return out


def gelu_mul(gate: Floats, up: Floats, *, config: Config | None = None) -> Doubles:
    """gelu(gate) * up, with gelu(x) = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))).

    (1 + tanh(z)) / 2 is computed as 1 / (1 + exp(-2 z)), which does not cancel.
    """
    wide = np.asarray(gate, np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        twice = 2 * np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)
        out: Doubles = wide / (1 + np.exp(-twice)) * np.asarray(up, np.float64)
    return out


def add(x: Floats, y: Floats, *, config: Config | None = None) -> Doubles:
    """x + y; y [n, m] as x, or one row [m]."""
    return np.asarray(x, np.float64) + np.asarray(y, np.float64)


def scale(x: Floats, *, factor: float, config: Config | None = None) -> Doubles:
    """x times the float32 nearest to factor."""
    return np.asarray(x, np.float64) * float(np.float32(factor))


def softcap(x: Floats, *, cap: float, config: Config | None = None) -> Doubles:
    """cap * tanh(x / cap)."""
    out: Doubles = cap * np.tanh(np.asarray(x, np.float64) / cap)
    return out
