"""Logical index -> cell: the one place where a window's addresses come from (contract 6.3).

The logical index of a key is its position. Runs say in which cells the keys before a query lie;
kernels ask here for a stretch of logical indices and get addresses, so that nothing else in them
depends on the window's mode or on where rows lie.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from minfer.kernels_numba._emit import LANES
from minfer.kernels_numba._ir import copy_bytes, zero_bytes
from minfer.kernels_numba._jit import kernel
from minfer.window import PARTITION

TILE = LANES  # keys whose scores are computed together, aligned in logical index
SCORE_STRIDE = 4 * PARTITION  # bytes from one row's scores, or weights, to the next


class Dims(NamedTuple):
    """Sizes of a call: heads, elements of a head, bytes of a cell and of one head inside it."""

    n_head: int
    n_head_kv: int
    head_dim: int
    row_bytes: int
    head_bytes: int


@kernel
def append(table, n, index, cell, end):
    """Add keys index .. end-1, the first in `cell`, to the n segments of `table`; returns n."""
    if index >= end:
        return n
    if n > 0:
        last = n - 1
        length = table[last, 2]
        if table[last, 0] + length == index and table[last, 1] + length == cell:
            table[last, 2] = length + end - index
            return n
    table[n, 0], table[n, 1], table[n, 2] = index, cell, end - index
    return n + 1


@kernel
def segments(runs, query, pos, lo, hi, table):
    """Where keys lo .. hi-1 lie, as (index, cell, length) rows of `table`; returns their number.

    `query` stands at position `pos`. Keys up to `pos` are looked up in its runs; a later key is
    the own row of a later query of the same tile, the last cell of that query's runs.
    """
    total = np.int64(0)
    for r in range(runs.shape[1]):
        total += runs[query, r, 1]
    start, n = pos + 1 - total, 0
    for r in range(runs.shape[1]):
        end = start + runs[query, r, 1]
        first = max(lo, start)
        n = append(table, n, first, runs[query, r, 0] + first - start, min(hi, end))
        start = end
    for index in range(max(lo, pos + 1), hi):
        cell = np.int64(0)
        for r in range(runs.shape[1]):
            if runs[query + index - pos, r, 1] > 0:
                cell = runs[query + index - pos, r, 0] + runs[query + index - pos, r, 1] - 1
        n = append(table, n, index, cell, index + 1)
    return n


@kernel
def gather_tile(table, n, index, base, row_bytes, size, stage):
    """Address and stride of TILE rows of `size` bytes, keys index .. index + TILE - 1.

    In the arena at `base` if the segments hold all of them in a row; else copied to `stage`,
    with zeros for keys outside the segments.
    """
    for s in range(n):
        first, cell, length = table[s, 0], table[s, 1], table[s, 2]
        if first <= index and index + TILE <= first + length:
            return base + (cell + index - first) * row_bytes, row_bytes
    zero_bytes(stage, TILE * size)
    for s in range(n):
        first, cell, length = table[s, 0], table[s, 1], table[s, 2]
        for i in range(max(first, index), min(first + length, index + TILE)):
            source = base + (cell + i - first) * row_bytes
            copy_bytes(source, stage + (i - index) * size, size)
    return stage, size
