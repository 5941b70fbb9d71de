"""Attention over cells [0, pos], or one [lo, hi) per query.

out[i, h] = sum over keys c of the window: softmax(scale * q[i, h] . K[c]) V[c]

rows: one key at a time, every shape. split: decode, work cut by partitions of 256 keys.
flash: prefill, tiles of queries against packed keys.
"""

from __future__ import annotations

from typing import Any

from minfer.errors import Refusal
from minfer.format import KvFormat, Region
from minfer.kernels_numba._call import Call, Floats, prepare, wrap_window
from minfer.kernels_numba._flash import BLOCK_M, attend_flash
from minfer.kernels_numba._ir import LANES
from minfer.kernels_numba._jit import THREADS
from minfer.kernels_numba._plain import attend_rows
from minfer.kernels_numba._query import ROUNDING
from minfer.kernels_numba._split import attend_split
from minfer.ops import DECODE, PREFILL, Config, Limits, variant
from minfer.window import Int32, Runs


def _prepare(
    q: Floats, positions: Int32, span: Int32 | None, k: Region, v: Region, **how: Any
) -> Call:
    windows = wrap_window(span, len(q))
    if isinstance(windows, Runs):
        raise Refusal(
            "2.2",
            f"a window input of {windows.array.size} numbers holds runs for {len(q)} queries; "
            "attn_map reads those",
            {"size": windows.array.size, "n_q": len(q)},
        )
    return prepare(q, k, v, positions, windows, **how)


@variant(query=ROUNDING, space={"threads": THREADS})
def attn_window_rows(
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
    config: Config,
) -> Floats:
    """q [n_q, n_head, d] to f32 of that shape; one key at a time, tiles unused."""
    call = _prepare(q, positions, span, k, v, fmt=fmt, scale=scale, width=width)
    return attend_rows(call, config["threads"])


@variant(
    limits=Limits(kinds=(DECODE,), head_dim_multiple=LANES),
    query=ROUNDING,
    space={"threads": THREADS},
)
def attn_window_split(
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
    config: Config,
) -> Floats:
    """q [n_q, n_head, d] to f32 of that shape; by partitions of every query, tiles unused."""
    call = _prepare(q, positions, span, k, v, fmt=fmt, scale=scale, width=width, multiple=LANES)
    return attend_split(call, config["threads"])


@variant(
    limits=Limits(kinds=(PREFILL,), head_dim_multiple=LANES),
    query=ROUNDING,
    space={"threads": THREADS, "block_m": BLOCK_M},
)
def attn_window_flash(
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
    config: Config,
) -> Floats:
    """q [n_q, n_head, d] to f32 of that shape; `tiles` [n, 2] cut by block_m (contract 2.7)."""
    call = _prepare(q, positions, span, k, v, fmt=fmt, scale=scale, width=width, multiple=LANES)
    return attend_flash(call, tiles, config["threads"])
