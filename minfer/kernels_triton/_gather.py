"""Logical index -> cell: the one place where a window's addresses come from (contract 6.3).

The logical index of a key is its position. Only addresses depend on the mode of a window, so bits
do not depend on it or on where rows lie. Modes are told apart by a constexpr.
"""

import triton
import triton.language as tl

CAUSAL = tl.constexpr(0)  # no window input: cells [0, pos]
SPAN = tl.constexpr(1)  # int32 [n_q, 2]: [lo, hi)
RUNS = tl.constexpr(2)  # int32 [n_q, 4, 2]: (cell, length) in position order


@triton.jit
def query_window(window, query, pos, width, MODE: tl.constexpr):
    """first, e0, e1, e2, b0, b1, b2, b3 of one query.

    first: first logical index it sees. Run r ends before index e_r; key j of it lies in cell
    b_r + j. width: sliding width, 0 for none.
    """
    first = pos * 0
    e0, e1, e2 = first, first, first
    b0, b1, b2, b3 = first, first, first, first
    if MODE == SPAN:
        lo = tl.load(window + 2 * query)
        hi = tl.load(window + 2 * query + 1)
        first = pos + 1 - (hi - lo)
        b0 = hi - 1 - pos
    if MODE == RUNS:
        row = window + 8 * query
        n0, n1 = tl.load(row + 1), tl.load(row + 3)
        n2, n3 = tl.load(row + 5), tl.load(row + 7)
        first = pos + 1 - (n0 + n1 + n2 + n3)
        e0 = first + n0
        e1 = e0 + n1
        e2 = e1 + n2
        b0, b1 = tl.load(row) - first, tl.load(row + 2) - e0
        b2, b3 = tl.load(row + 4) - e1, tl.load(row + 6) - e2
    if width > 0:
        first = tl.maximum(first, pos + 1 - width)
    return first, e0, e1, e2, b0, b1, b2, b3


@triton.jit
def cell_of(j, e0, e1, e2, b0, b1, b2, b3, MODE: tl.constexpr):
    """The cell of logical index j, an int32 scalar or block, by what `query_window` gave."""
    if MODE == RUNS:
        return j + tl.where(j < e0, b0, tl.where(j < e1, b1, tl.where(j < e2, b2, b3)))
    return j + b0


@triton.jit
def own_cell(window, query, pos, mask, MODE: tl.constexpr):
    """The last cell of a query's window, its own row; int32 scalars or blocks, 0 where masked."""
    if MODE == SPAN:
        return tl.load(window + 2 * query + 1, mask=mask, other=1) - 1
    if MODE == RUNS:
        row = window + 8 * query
        cell = pos * 0
        for r in tl.static_range(4):
            length = tl.load(row + 2 * r + 1, mask=mask, other=0)
            first = tl.load(row + 2 * r, mask=mask, other=0)
            cell = tl.where(length > 0, first + length - 1, cell)
        return cell
    return tl.where(mask, pos, 0)
