"""Attention over the cells of each query's window, in float64 unless told otherwise."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from minfer.format import Floats, Int32, KvFormat, Region
from minfer.ops import Config
from minfer.reference.codec import decode_rows, dequantize_q8_0, quantize_q8_0

Doubles = NDArray[np.float64]


def attn_window(
    q: Floats,
    k: Region,
    v: Region,
    positions: Int32,
    span: Int32 | None,
    tiles: Int32,
    *,
    fmt: KvFormat,
    scale: float,
    width: int,
    config: Config | None = None,
) -> Doubles:
    """q [n_q, n_head, d] against cells [0, pos], or [lo, hi) of `span` [n_q, 2], per query."""
    runs = runs_of(positions, span)
    out: Doubles = attention(q, k, v, positions, runs, fmt=fmt, scale=scale, width=width)
    return out


def attn_map(
    q: Floats,
    k: Region,
    v: Region,
    positions: Int32,
    runs: Int32,
    tiles: Int32,
    *,
    fmt: KvFormat,
    scale: float,
    width: int,
    config: Config | None = None,
) -> Doubles:
    """q [n_q, n_head, d] against the (cell, length) runs [n_q, 4, 2] of each query."""
    out: Doubles = attention(q, k, v, positions, runs, fmt=fmt, scale=scale, width=width)
    return out


def runs_of(positions: Int32, span: Int32 | None) -> Int32:
    """Causal windows (None) or spans [n_q, 2] as runs [n_q, 1, 2]."""
    if span is None:
        return np.stack([np.zeros_like(positions), positions + 1], axis=1)[:, None]
    return np.stack([span[:, 0], span[:, 1] - span[:, 0]], axis=1)[:, None]


def attention(
    q: Floats,
    k: Region,
    v: Region,
    positions: Int32,
    runs: Int32,
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


def seen_cells(runs: Int32, pos: int, width: int) -> NDArray[np.int64]:
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
