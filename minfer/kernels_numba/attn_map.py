"""Attention over up to four (cell, length) runs per query.

out[i, h] = sum over keys c of the window: softmax(scale * q[i, h] . K[c]) V[c]

rows: one key at a time, every shape. split: decode, work cut by partitions of 256 keys.
flash: prefill, tiles of queries against packed keys. scratch: q8_0 cells decoded to f32 first,
then flash, with the query as it is; by name, to compare with.
"""

from __future__ import annotations

from minfer.format import Floats, Int32, KvFormat, Region
from minfer.kernels_numba._call import prepare
from minfer.kernels_numba._emit import LANES
from minfer.kernels_numba._flash import BLOCK_M, attend_flash
from minfer.kernels_numba._query import ROUNDING
from minfer.kernels_numba._rows import attend_rows
from minfer.kernels_numba._scratch import attend_scratch
from minfer.kernels_numba._split import SPLIT, attend_split
from minfer.kernels_numba._workers import THREADS
from minfer.ops import DECODE, PREFILL, Config, Limits, variant

NAME = "attn_map"


@variant(query=ROUNDING, space={"threads": THREADS})
def attn_map_rows(
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
    config: Config,
) -> Floats:
    """q [n_q, n_head, d] to f32 of that shape; one key at a time, tiles unused."""
    call = prepare(NAME, q, k, v, positions, runs, fmt=fmt, scale=scale, width=width)
    return attend_rows(call, config["threads"])


@variant(
    limits=Limits(kinds=(DECODE,), head_dim_multiple=LANES),
    query=ROUNDING,
    space=SPLIT,
)
def attn_map_split(
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
    config: Config,
) -> Floats:
    """q [n_q, n_head, d] to f32 of that shape; by partitions of every query, tiles unused."""
    call = prepare(
        NAME, q, k, v, positions, runs, fmt=fmt, scale=scale, width=width, multiple=LANES
    )
    return attend_split(call, config)


@variant(
    limits=Limits(kinds=(PREFILL,), head_dim_multiple=LANES),
    query=ROUNDING,
    space={"threads": THREADS, "block_m": BLOCK_M},
)
def attn_map_flash(
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
    config: Config,
) -> Floats:
    """q [n_q, n_head, d] to f32 of that shape; `tiles` [n, 2] cut by block_m (contract 2.7)."""
    call = prepare(
        NAME, q, k, v, positions, runs, fmt=fmt, scale=scale, width=width, multiple=LANES
    )
    return attend_flash(call, tiles, config["threads"])


@variant(
    formats=(KvFormat.Q8_0,),
    limits=Limits(head_dim_multiple=LANES),
    space={"threads": THREADS, "block_m": BLOCK_M},
    default=False,
)
def attn_map_scratch(
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
    config: Config,
) -> Floats:
    """q [n_q, n_head, d] to f32 of that shape; memory of 8 * n_head_kv * d bytes a cell seen."""
    call = prepare(
        NAME, q, k, v, positions, runs, fmt=fmt, scale=scale, width=width, multiple=LANES
    )
    return attend_scratch(call, tiles, config["threads"])
