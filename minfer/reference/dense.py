"""Dense steps and stores: norms and rope in float64, stores as canonical bytes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from minfer.format import Floats, Int32, KvFormat, Region
from minfer.ops import HALF, Config, check_pairing
from minfer.reference.codec import encode_rows

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
    out = np.array(x, np.float64)
    half = cos.shape[1]
    check_pairing(pairing)
    if pairing == HALF:
        first, second = slice(0, half), slice(half, 2 * half)
    else:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    c = np.asarray(cos, np.float64)[positions][:, None]
    s = np.asarray(sin, np.float64)[positions][:, None]
    a, b = out[..., first].copy(), out[..., second].copy()
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


def store_cells(
    region: Region, rows: Floats, cells: Int32, *, fmt: KvFormat, config: Config | None = None
) -> Region:
    """Rows f32 [n, n_head_kv, d] into the cells of a canonical region, in place."""
    region.arrays[0][cells] = encode_rows(np.ascontiguousarray(rows).reshape(len(rows), -1), fmt)
    return region


def qkv_rope_store(
    q: Floats,
    k: Floats,
    v: Floats,
    k_region: Region,
    v_region: Region,
    positions: Int32,
    cells: Int32,
    cos: Floats,
    sin: Floats,
    *,
    fmt: KvFormat,
    pairing: str,
    config: Config | None = None,
) -> tuple[Doubles, Region, Region]:
    """Rotate q and k by position, store k and v by cell; the rotated q and both regions."""
    rotated = rope(k, positions, cos, sin, pairing=pairing).astype(np.float32)
    k_region = store_cells(k_region, rotated, cells, fmt=fmt)
    v_region = store_cells(v_region, v, cells, fmt=fmt)
    return rope(q, positions, cos, sin, pairing=pairing), k_region, v_region
