"""`flash`: prefill attention, work cut into (tile of queries, KV head), heavy tiles first.

Rows are the tile's positions times the heads of the group. Per partition of 256 keys the keys are
packed once, scores and weighted values come six rows at a time, and each row's state joins the
tree that `split` and `rows` use. A row's bits depend on its own window alone: keys outside it
weigh exactly 0, partitions outside it are skipped.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange

from minfer.format import KvFormat
from minfer.kernels_numba._gather import TILE, copy_bytes, gather_tile, segments, zero_bytes
from minfer.kernels_numba._ir import address, fetch_add
from minfer.kernels_numba._jit import kernel
from minfer.kernels_numba._panels import (
    ROWS,
    WEIGHT_STRIDE,
    add_values,
    pack_keys,
    panel_bytes,
    panel_keys,
    score_panel,
)
from minfer.kernels_numba._query import pack_row
from minfer.kernels_numba._rows import LOAD_ROW
from minfer.kernels_numba._softmax import finish, join, softmax_row
from minfer.window import PARTITION

VALUE_BLOCK = 64  # keys whose values stay in L1 while every row group passes


@kernel
def _group_bounds(tile, group, rows, start, plan):
    """First and last key + 1, from `start`, that the `ROWS` rows from `rows` on see."""
    first = tile.first + rows // group
    last = tile.first + min((rows + ROWS - 1) // group, tile.count - 1)
    lo = max(plan.firsts[first] - start, 0)
    return lo, min(plan.positions[last] + 1 - start, PARTITION)


@kernel
def _softmax_rows(tile, group, start, plan, weights, states):
    """Softmax of every row of the tile over one partition; rows that see none of it: l = 0."""
    for row in range(tile.count * group):
        lo, hi = _group_bounds(tile, group, row // ROWS * ROWS, start, plan)
        query = tile.first + row // group
        own_lo = max(plan.firsts[query] - start, 0)
        own_hi = min(plan.positions[query] + 1 - start, PARTITION)
        at, state = address(weights) + row * WEIGHT_STRIDE, address(states) + 8 * row
        if own_lo < own_hi:
            softmax_row(at, lo // TILE, (hi + TILE - 1) // TILE, own_lo, own_hi, state)
        else:
            states[row, 0], states[row, 1] = -np.inf, 0
            weights[row] = 0


@kernel
def _add_rows(tile, group, d, start, plan, weights, table, n, values, stride, acc):
    """Weights times values: keys in order, in stretches that lie in consecutive rows."""
    for s in range(n):
        first, source = table[s, 0], table[s, 1]
        for begin in range(first, first + table[s, 2], VALUE_BLOCK):
            end = min(begin + VALUE_BLOCK, first + table[s, 2])
            for rows in range(0, tile.count * group, ROWS):
                lo, hi = _group_bounds(tile, group, rows, start, plan)
                a, b = max(begin - start, lo), min(end - start, hi)
                if a < b:
                    row = values + (source + start + a - first) * stride
                    at = address(weights) + rows * WEIGHT_STRIDE + 4 * a
                    add_values(at, b - a, row, stride, address(acc) + 4 * rows * d, d)


@kernel
def _join_rows(states, acc, a, b, n):
    """Row by row, state b of the stack joins state a; a side that saw no key is skipped."""
    for row in range(n):
        if states[b, row, 1] == 0:
            continue
        if states[a, row, 1] == 0:
            states[a, row], acc[a, row] = states[b, row], acc[b, row]
        else:
            join(states[a, row], acc[a, row], states[b, row], acc[b, row])


def _tile_kernel(fmt: KvFormat) -> Any:
    """One (tile, KV head)."""
    pack, score, load = pack_keys(fmt), score_panel(fmt), LOAD_ROW[fmt]
    packs_query, in_place, keys = fmt is KvFormat.Q8_0, fmt is KvFormat.F32, panel_keys(fmt)
    panel_width = panel_bytes(fmt, 32)  # per 32 elements

    @kernel(key=fmt.value)
    def take_queries(tile, dims, kv, q, rows, q_bytes):
        group, d = dims.n_head // dims.n_head_kv, dims.head_dim
        for row in range(tile.count * group):
            query, head = tile.first + row // group, kv * group + row % group
            source = address(q) + 4 * d * (query * dims.n_head + head)
            if packs_query:
                pack_row(source, address(rows) + row * q_bytes, d)
            else:
                copy_bytes(source, address(rows) + row * q_bytes, q_bytes)
        used = tile.count * group
        unused = (used + ROWS - 1) // ROWS * ROWS - used
        zero_bytes(address(rows) + used * q_bytes, unused * q_bytes)

    @kernel(key=fmt.value)
    def scores(tile, dims, plan, k, start, lo, hi, table, n, scale, mine, q_bytes):
        group, d = dims.n_head // dims.n_head_kv, dims.head_dim
        panels, width = address(mine.panels), d * panel_width // 32
        for at in range((lo - start) // TILE * TILE, hi - start, TILE):
            row, stride = gather_tile(
                table, n, start + at, k, dims.row_bytes, dims.head_bytes, address(mine.stage)
            )
            pack(row, stride, panels + at // keys * width + at % keys * 4, d)
        for at in range((lo - start) // keys * keys, hi - start, keys):
            for rows in range(0, tile.count * group, ROWS):
                first, last = _group_bounds(tile, group, rows, start, plan)
                if first < at + keys and at < last:
                    query = address(mine.queries) + rows * q_bytes
                    out = address(mine.weights) + rows * WEIGHT_STRIDE + 4 * at
                    score(query, q_bytes, d, panels + at // keys * width, out, scale)

    @kernel(key=fmt.value)
    def values(tile, dims, plan, v, start, lo, hi, table, n, mine, acc):
        group, d = dims.n_head // dims.n_head_kv, dims.head_dim
        if in_place:
            stride = dims.row_bytes
            _add_rows(tile, group, d, start, plan, mine.weights, table, n, v, stride, acc)
            return
        for s in range(n):
            for i in range(table[s, 2]):
                target = address(mine.values) + 4 * d * (table[s, 0] + i - lo)
                load(v + (table[s, 1] + i) * dims.row_bytes, target, d)
        table[0, 0], table[0, 1], table[0, 2] = lo, 0, hi - lo
        source = address(mine.values)
        _add_rows(tile, group, d, start, plan, mine.weights, table, 1, source, 4 * d, acc)

    @kernel(key=fmt.value)
    def attend(tile, dims, kv, k, v, q, scale, plan, mine, q_bytes, out):
        group = dims.n_head // dims.n_head_kv
        n_rows, pos = tile.count * group, plan.positions[tile.first]
        begin, end = plan.firsts[tile.first], pos + tile.count
        take_queries(tile, dims, kv, q, mine.queries, q_bytes)
        depth, absent = 0, begin // PARTITION
        while absent > 0:  # one empty state for every group of partitions before the window
            if absent & 1:
                mine.states[depth] = 0
                depth += 1
            absent >>= 1
        for part in range(begin // PARTITION, (end + PARTITION - 1) // PARTITION):
            start = part * PARTITION
            lo, hi = max(begin, start), min(end, start + PARTITION)
            n = segments(plan.runs, tile.first, pos, lo, hi, mine.segments)
            scores(tile, dims, plan, k, start, lo, hi, mine.segments, n, scale, mine, q_bytes)
            _softmax_rows(tile, group, start, plan, mine.weights, mine.states[depth])
            mine.acc[depth] = 0
            values(tile, dims, plan, v, start, lo, hi, mine.segments, n, mine, mine.acc[depth])
            while part & 1:
                _join_rows(mine.states, mine.acc, depth - 1, depth, n_rows)
                depth, part = depth - 1, part >> 1
            depth += 1
        while depth > 1:
            depth -= 1
            _join_rows(mine.states, mine.acc, depth - 1, depth, n_rows)
        for row in range(n_rows):
            target = out[tile.first + row // group, kv * group + row % group]
            finish(mine.acc[0, row], mine.states[0, row, 1], target)

    return attend
