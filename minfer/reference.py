"""One oracle per op, in numpy: what a kernel must compute, written so that it can be read.

The names and the argument order are those of the kernels; `config` is accepted and ignored. The
q8_0 functions are bit oracles (contract 4.1 to 4.5, every operation in f32); stores work on
canonical bytes; everything else is float64. Attention stands in the last section.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minfer.errors import Refusal
from minfer.format import BLOCK, BLOCK_BYTES, KvFormat, Region, cell_words

F32 = np.float32
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Bytes = NDArray[np.uint8]
Ints = NDArray[np.int32]
Config = Mapping[str, Any] | None

F16_NAN = 0x7E00  # the scale of a poisoned block

# -- q8_0, to the bit -----------------------------------------------------------------------------


def quantize_q8_0(rows: Floats, *, config: Config = None) -> Bytes:
    """f32 [n, m] to canonical cells uint8 [n, 4 * cell_words] (contract 4.1, 4.2).

    Refuses m that is no multiple of 32.
    """
    n, m = rows.shape
    if m % BLOCK:
        raise Refusal("3.3", f"rows of {m} are not whole blocks of {BLOCK}", {"m": m})
    blocks = np.ascontiguousarray(rows, F32).reshape(n, m // BLOCK, BLOCK)
    magnitude = (blocks.view(np.uint32) & 0x7FFFFFFF).max(axis=2)
    with np.errstate(all="ignore"):
        d = magnitude.view(F32) / F32(127)
        scale = d.astype(np.float16)
        codes = np.rint(blocks * (F32(1) / d)[..., None])
    poisoned = (magnitude >= 0x7F800000) | np.isinf(scale)
    empty = poisoned | (scale.view(np.uint16) == 0)
    packed = np.zeros((n, m // BLOCK, BLOCK_BYTES), np.uint8)
    bits = np.where(poisoned, np.uint16(F16_NAN), scale.view(np.uint16))
    packed[..., :2] = bits.astype("<u2")[..., None].view(np.uint8)
    packed[..., 2:] = np.where(empty[..., None], 0, codes).astype(np.int8).view(np.uint8)
    cells = np.zeros((n, 4 * cell_words(KvFormat.Q8_0, m)), np.uint8)
    cells[:, : m // BLOCK * BLOCK_BYTES] = packed.reshape(n, -1)
    return cells


def split_q8_0(cells: Bytes, n: int) -> tuple[Floats, NDArray[np.int8]]:
    """Scales f32 [rows, n / 32] and codes int8 [rows, n / 32, 32] of canonical cells."""
    blocks = n // BLOCK
    packed = cells[:, : blocks * BLOCK_BYTES].reshape(len(cells), blocks, BLOCK_BYTES)
    scales = np.ascontiguousarray(packed[..., :2]).view("<u2").view(np.float16)[..., 0]
    return scales.astype(F32), np.ascontiguousarray(packed[..., 2:]).view(np.int8)


def dequantize_q8_0(cells: Bytes, *, n: int, config: Config = None) -> Floats:
    """Canonical cells to f32 [rows, n]: `float(s) * code`, exact (contract 4.4)."""
    scales, codes = split_q8_0(cells, n)
    return (scales[..., None] * codes.astype(F32)).reshape(len(cells), n)


def dot_q8_0(a: Bytes, b: Bytes, *, n: int, config: Config = None) -> Floats:
    """f32 [rows]: exact int32 per block, terms added in block order (contract 4.5)."""
    (scale_a, codes_a), (scale_b, codes_b) = split_q8_0(a, n), split_q8_0(b, n)
    sums = (codes_a.astype(np.int32) * codes_b.astype(np.int32)).sum(axis=2, dtype=np.int32)
    total = np.zeros(len(a), F32)
    for block in range(n // BLOCK):
        term = sums[:, block].astype(F32) * (scale_a[:, block] * scale_b[:, block])
        total = total + term
    return total


# -- rows in and out of cells ---------------------------------------------------------------------


def encode_rows(rows: Floats, fmt: KvFormat) -> Bytes:
    """f32 [n, m] to canonical cells of `fmt`."""
    if fmt is KvFormat.Q8_0:
        return quantize_q8_0(rows)
    cells = np.zeros((len(rows), 4 * cell_words(fmt, rows.shape[1])), np.uint8)
    with np.errstate(over="ignore"):
        stored = rows.astype("<f4" if fmt is KvFormat.F32 else "<f2")
    cells[:, : stored.itemsize * rows.shape[1]] = stored.view(np.uint8)
    return cells


def decode_rows(cells: Bytes, fmt: KvFormat, n: int) -> Floats:
    """Canonical cells of `fmt` to f32 [rows, n], exact."""
    if fmt is KvFormat.Q8_0:
        return dequantize_q8_0(cells, n=n)
    stored = "<f4" if fmt is KvFormat.F32 else "<f2"
    width = np.dtype(stored).itemsize * n
    return np.ascontiguousarray(cells[:, :width]).view(stored).astype(F32)


def store_cells(
    region: Region, rows: Floats, cells: Ints, *, fmt: KvFormat, config: Config = None
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
    positions: Ints,
    cells: Ints,
    cos: Floats,
    sin: Floats,
    *,
    fmt: KvFormat,
    pairing: str,
    config: Config = None,
) -> tuple[Doubles, Region, Region]:
    """Rotate q and k by position, store k and v by cell; the rotated q and both regions."""
    rotated = rope(k, positions, cos, sin, pairing=pairing).astype(F32)
    k_region = store_cells(k_region, rotated, cells, fmt=fmt)
    v_region = store_cells(v_region, v, cells, fmt=fmt)
    return rope(q, positions, cos, sin, pairing=pairing), k_region, v_region


# -- dense steps, float64 -------------------------------------------------------------------------


def matvec(weight: Floats, x: Floats, *, config: Config = None) -> Doubles:
    """x [n, n_in] @ weight.T, weight [n_out, n_in]."""
    out: Doubles = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    return out


matmul = matvec


def rms_norm(x: Floats, weight: Floats, *, eps: float, config: Config = None) -> Doubles:
    """Each row over the root of its mean square, times weight; x [n, m], weight [m]."""
    wide = np.asarray(x, np.float64)
    mean = np.mean(wide * wide, axis=-1, keepdims=True)
    out: Doubles = wide / np.sqrt(mean + eps) * np.asarray(weight, np.float64)
    return out


def rope(
    x: Floats, positions: Ints, cos: Floats, sin: Floats, *, pairing: str, config: Config = None
) -> Doubles:
    """Rotate pair i of every head row x [n, n_head, d] by the table row of its position.

    cos, sin: [n_pos, n_rot / 2]. pairing "half": dims (i, i + n_rot/2); "interleaved":
    (2i, 2i + 1). Dims from n_rot on are copied.
    """
    out = np.array(x, np.float64)
    half = cos.shape[1]
    if pairing == "half":
        first, second = slice(0, half), slice(half, 2 * half)
    elif pairing == "interleaved":
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        raise Refusal("2.8", f"pairing {pairing!r} is neither half nor interleaved")
    c = np.asarray(cos, np.float64)[positions][:, None]
    s = np.asarray(sin, np.float64)[positions][:, None]
    a, b = out[..., first].copy(), out[..., second].copy()
    out[..., first], out[..., second] = a * c - b * s, b * c + a * s
    return out


def silu_mul(gate: Floats, up: Floats, *, config: Config = None) -> Doubles:
    """gate * sigmoid(gate) * up."""
    wide = np.asarray(gate, np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        out: Doubles = wide / (1 + np.exp(-wide)) * np.asarray(up, np.float64)
    return out


def add(x: Floats, y: Floats, *, config: Config = None) -> Doubles:
    """x + y."""
    return np.asarray(x, np.float64) + np.asarray(y, np.float64)


def embed(weight: Floats, tokens: Ints, *, config: Config = None) -> Doubles:
    """Rows of weight [n_vocab, m]."""
    out: Doubles = np.asarray(weight, np.float64)[tokens]
    return out


# -- attention ------------------------------------------------------------------------------------


def attn_window(
    q: Floats,
    k: Region,
    v: Region,
    positions: Ints,
    span: Ints | None,
    tiles: Ints,
    *,
    fmt: KvFormat,
    scale: float,
    width: int,
    config: Config = None,
) -> Doubles:
    """q [n_q, n_head, d] against cells [0, pos], or [lo, hi) of `span` [n_q, 2], per query."""
    runs = runs_of(positions, span)
    out: Doubles = attention(q, k, v, positions, runs, fmt=fmt, scale=scale, width=width)
    return out


def attn_map(
    q: Floats,
    k: Region,
    v: Region,
    positions: Ints,
    runs: Ints,
    tiles: Ints,
    *,
    fmt: KvFormat,
    scale: float,
    width: int,
    config: Config = None,
) -> Doubles:
    """q [n_q, n_head, d] against the (cell, length) runs [n_q, 4, 2] of each query."""
    out: Doubles = attention(q, k, v, positions, runs, fmt=fmt, scale=scale, width=width)
    return out


def runs_of(positions: Ints, span: Ints | None) -> Ints:
    """Causal windows (None) or spans [n_q, 2] as runs [n_q, 1, 2]."""
    if span is None:
        return np.stack([np.zeros_like(positions), positions + 1], axis=1)[:, None]
    return np.stack([span[:, 0], span[:, 1] - span[:, 0]], axis=1)[:, None]


def attention(
    q: Floats,
    k: Region,
    v: Region,
    positions: Ints,
    runs: Ints,
    *,
    fmt: KvFormat,
    scale: float,
    width: int,
    dtype: Any = np.float64,
) -> Any:
    """softmax(scale * q @ K.T) @ V over each query's own cells, every step in `dtype`.

    K and V are decoded exactly. A variant that rounds the query is compared with this function of
    `round_query(q)`; float32 here shows what error the format of the arithmetic alone makes.
    """
    n_q, n_head, d = q.shape
    group = n_head // k.n_head_kv
    out = np.empty(q.shape, dtype)
    for i in range(n_q):
        cells = seen_cells(runs[i], int(positions[i]), width)
        keys, values = (
            decode_rows(region.arrays[0][cells], fmt, region.row_elems)
            .reshape(len(cells), region.n_head_kv, d)
            .transpose(1, 0, 2)
            .astype(dtype)
            for region in (k, v)
        )  # [n_head_kv, n, d]
        query = q[i].reshape(k.n_head_kv, group, d).astype(dtype)
        scores = query @ keys.transpose(0, 2, 1) * dtype(scale)
        weights = np.exp(scores - scores.max(axis=2, keepdims=True))
        mixed = weights @ values / weights.sum(axis=2, keepdims=True)
        out[i] = mixed.reshape(n_head, d)
    return out


def seen_cells(runs: Ints, pos: int, width: int) -> NDArray[np.int64]:
    """The cells one query at `pos` sees through `runs` [n, 2], in position order.

    The last cell is the query's own position; a sliding `width` keeps the last `width` of them.
    """
    cells = np.concatenate([np.arange(cell, cell + n) for cell, n in runs.astype(np.int64)])
    return cells[-width:] if width else cells


def round_query(q: Floats, rounding: str) -> Floats:
    """q as a variant with that query numerics sees it: q8_0 by contract 4.1, f32 as it is."""
    if rounding == "f32":
        return q
    if rounding != "q8_0":
        raise ValueError(f"no oracle rounds the query to {rounding}")
    d = q.shape[-1]
    return dequantize_q8_0(quantize_q8_0(q.reshape(-1, d)), n=d).reshape(q.shape)
