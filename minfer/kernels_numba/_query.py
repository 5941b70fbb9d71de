"""Queries as the score loops read them.

f32 and f16 cells meet the f32 query as it is. q8_0 cells meet it quantized by contract 4.1, per
block of 32: the codes, the scale as f32, and -128 times the sum of the codes, which takes back
the 128 that scores add to every key code to make it unsigned.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from minfer.format import BLOCK, KvFormat
from minfer.kernels_numba._cell import quantize_block
from minfer.kernels_numba._emit import I8, LANES, Emitter, vector
from minfer.kernels_numba._ir import address, intrinsic_of
from minfer.kernels_numba._jit import kernel

ROUNDING = {KvFormat.Q8_0: "q8_0"}  # how scores round the query, f32 for the others
QUERY_BLOCK = 40  # bytes: 32 codes, f32 scale, int32 sum
QUERY_SCALE, QUERY_SUM = 32, 36


def query_bytes(fmt: KvFormat, head_dim: int) -> int:
    """Bytes from one packed head row to the next."""
    return head_dim // BLOCK * QUERY_BLOCK if fmt is KvFormat.Q8_0 else 4 * head_dim


def _pack_row(e: Emitter, source: Any, target: Any, d: Any) -> None:
    build = e.builder
    with e.loop(build.udiv(d, e.index(BLOCK))) as i:
        block = e.add(target, e.mul(i, QUERY_BLOCK))
        _, codes, scale = quantize_block(e, e.add(source, e.mul(i, 4 * BLOCK)))
        for half in (0, 1):
            e.store(build.trunc(codes[half], vector(I8)), block, LANES * half)
        total = e.reduce(build.add(*codes), build.add)
        e.store(scale, block, QUERY_SCALE)
        e.store(build.mul(total, e.const(total.type, -128)), block, QUERY_SUM)


pack_row = intrinsic_of("ppp:v", _pack_row)  # f32 row, packed row, d


@kernel
def _pack_rows(q, packed):
    n, d = q.shape
    for row in range(n):
        pack_row(address(q[row]), address(packed[row]), d)


def pack_queries(q: Any, fmt: KvFormat) -> Any:
    """Head rows of f32 [n_q, n_head, d] as the scores of `fmt` read them, C-contiguous."""
    if fmt is not KvFormat.Q8_0:
        return q
    rows = q.reshape(-1, q.shape[2])
    packed = np.empty((len(rows), query_bytes(fmt, q.shape[2])), np.uint8)
    _pack_rows(rows, packed)
    return packed
