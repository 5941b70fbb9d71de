"""Attention over cells [0, pos], or one [lo, hi) per query.

out[i, h] = sum over keys c of the window: softmax(scale * q[i, h] . K[c]) V[c]

rows: one query head at a time, every shape, exact. split: decode, work cut by partitions of 256
keys. flash: prefill, tiles of queries against tiles of keys, one sweep.
"""

from __future__ import annotations

from typing import Any

from minfer.format import Int32, KvFormat, Region
from minfer.kernels_mlx._call import prepare
from minfer.kernels_mlx._flash import attend_flash
from minfer.kernels_mlx._rows import attend_rows
from minfer.kernels_mlx._split import attend_split
from minfer.kernels_mlx._tunables import FLASH, FLASH_LIMITS, SPLIT, SPLIT_LIMITS
from minfer.ops import Config, variant

NAME = "attn_window"


@variant()
def attn_window_rows(
    q: Any,
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
) -> Any:
    """q float32 [n_q, n_head, d] to float32 of that shape; one head at a time, tiles unused."""
    call = prepare(NAME, q, k, v, positions, span, fmt=fmt, scale=scale, width=width)
    return attend_rows(call)


@variant(limits=SPLIT_LIMITS, space=SPLIT)
def attn_window_split(
    q: Any,
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
) -> Any:
    """q float32 [n_q, n_head, d] to float32 of that shape; by partitions, tiles unused."""
    call = prepare(
        NAME, q, k, v, positions, span, fmt=fmt, scale=scale, width=width, limits=SPLIT_LIMITS
    )
    return attend_split(call, config)


@variant(limits=FLASH_LIMITS, space=FLASH)
def attn_window_flash(
    q: Any,
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
) -> Any:
    """q float32 [n_q, n_head, d] to float32 of that shape; `tiles` [n, 2] cut by block_m."""
    call = prepare(
        NAME, q, k, v, positions, span, fmt=fmt, scale=scale, width=width, limits=FLASH_LIMITS
    )
    return attend_flash(call, tiles, config)
