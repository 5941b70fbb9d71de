"""Attention over the cells of each query's window, in float64 unless told otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minfer.format import Floats, Int32, KvFormat, Region
from minfer.ops import Config, Numerics
from minfer.reference.codec import decode_rows
from minfer.reference.rounding import rounded, weight_error

Doubles = NDArray[np.float64]
EXACT = Numerics("f32", "f32", "f32", "f32", "f32")


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
    numerics: Numerics = EXACT,
) -> Any:
    """softmax(scale * q @ K.T) @ V over each query's own cells, every step in `dtype`.

    Query, K and V are rounded where `numerics` says so, once they are decoded exactly; float32
    here shows what error the format of the arithmetic alone makes.
    """
    how: dict[str, Any] = {"fmt": fmt, "scale": scale, "width": width, "dtype": dtype}
    out = np.empty(q.shape, dtype)
    for i, (weights, values) in enumerate(_mixtures(q, k, v, positions, runs, numerics, **how)):
        mixed = weights @ values / weights.sum(axis=2, keepdims=True)
        out[i] = mixed.reshape(q.shape[1:])
    return out


def rounded_weights_error(
    q: Floats,
    k: Region,
    v: Region,
    positions: Int32,
    runs: Int32,
    *,
    fmt: KvFormat,
    scale: float,
    width: int,
    numerics: Numerics,
) -> Doubles:
    """What weights rounded to `numerics.prob` can do to each element of `attention`, at most.

    With weights p of error e(p), out = sum p v / l and l = sum p of the weights before they are
    rounded: |error| <= sum e(p) |v| / l. The kernel's own p is off by some f32 roundings, which
    moves the bound itself by less than one part in 1000.
    """
    out = np.zeros(q.shape)
    if numerics.prob == "f32":
        return out
    how: dict[str, Any] = {"fmt": fmt, "scale": scale, "width": width, "dtype": np.float64}
    for i, (weights, values) in enumerate(_mixtures(q, k, v, positions, runs, numerics, **how)):
        moved = weight_error(weights, numerics.prob) @ np.abs(values)
        out[i] = (moved / weights.sum(axis=2, keepdims=True)).reshape(q.shape[1:])
    return 1.001 * out


def _mixtures(
    q: Floats,
    k: Region,
    v: Region,
    positions: Int32,
    runs: Int32,
    numerics: Numerics,
    *,
    fmt: KvFormat,
    scale: float,
    width: int,
    dtype: Any,
) -> Iterator[tuple[Any, Any]]:
    """Of each query: weights [n_head_kv, group, n], the largest 1, and values [n_head_kv, n, d]."""
    _, n_head, d = q.shape
    group = n_head // k.n_head_kv
    queries = round_query(q, numerics.query)
    for i, query in enumerate(queries):
        cells = seen_cells(runs[i], int(positions[i]), width)
        keys, values = (
            rounded(decode_rows(region.arrays[0][cells], fmt, region.row_elems), how)
            .reshape(len(cells), region.n_head_kv, d)
            .transpose(1, 0, 2)
            .astype(dtype)
            for region, how in ((k, _narrow(numerics.key)), (v, _narrow(numerics.value)))
        )  # [n_head_kv, n, d]
        heads = query.reshape(k.n_head_kv, group, d).astype(dtype)
        scores = heads @ keys.transpose(0, 2, 1) * dtype(scale)
        yield np.exp(scores - scores.max(axis=2, keepdims=True)), values


def _narrow(decoded: str) -> str:
    """How decoded values are rounded: not at all, where they stay as exact as their cells are."""
    return decoded if decoded in ("f16", "bf16") else "f32"


def seen_cells(runs: Int32, pos: int, width: int) -> NDArray[np.int64]:
    """The cells one query at `pos` sees through `runs` [n, 2], in position order.

    The last cell is the query's own position; a sliding `width` keeps the last `width` of them.
    """
    cells = np.concatenate([np.arange(cell, cell + n) for cell, n in runs.astype(np.int64)])
    return cells[-width:] if width else cells


def round_query(q: Floats, rounding: str) -> Any:
    """q, or the rows of a product, as a variant with that query numerics sees it."""
    return rounded(q, rounding)
