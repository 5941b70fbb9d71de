"""`flash`: prefill attention, work cut into (tile of queries, KV head), heavy tiles first.

Rows are the tile's positions times the heads of the group. Per partition of 256 keys the keys are
packed once, scores and weighted values come six rows at a time, and each row's state joins the
tree that `split` and `rows` use. A row's bits depend on its own window alone: keys outside it
weigh exactly 0, partitions outside it are skipped.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from minfer.format import Floats, Int32, KvFormat
from minfer.kernels_numba._call import Call, Slots, ordered_tiles
from minfer.kernels_numba._cell import LOAD_ROW
from minfer.kernels_numba._gather import (
    SCORE_STRIDE,
    TILE,
    Dims,
    gather_tile,
    segments,
)
from minfer.kernels_numba._ir import address, copy_bytes, fetch_add, zero_bytes
from minfer.kernels_numba._jit import kernel
from minfer.kernels_numba._panels import (
    ROWS,
    mix_values,
    pack_keys,
    panel_bytes,
    panel_keys,
    score_panel,
)
from minfer.kernels_numba._query import pack_row, query_bytes
from minfer.kernels_numba._softmax import finish, join, softmax_row
from minfer.kernels_numba._workers import Worker, read, run
from minfer.ops import Tunable
from minfer.window import KV_MAP_MAX_SPANS, PARTITION

BLOCK_M = Tunable(32, (8, 16, 32, 64))  # queries of a tile; bits do not depend on it
VALUE_BLOCK = 64  # keys whose values stay in L1 while every row group passes


class Tile(NamedTuple):
    """Consecutive queries of one sequence."""

    first: int
    n: int


class Scratch(NamedTuple):
    """Working memory, one row a worker; depth is that of the stack of partition states."""

    queries: Any  # uint8, packed query rows
    panels: Any  # uint8, packed keys of a partition
    values: Any  # float32 [PARTITION * d], decoded values (f32: unused)
    weights: Any  # float32 [rows, PARTITION]
    states: Any  # float32 [depth, rows, 2]
    acc: Any  # float32 [depth, rows, d]
    stage: Any  # uint8, one head's rows of a tile that is not in one piece
    segments: Any  # int64 [n, 3]
    bounds: Any  # int64 [rows / ROWS, 2]


@kernel
def _see(tile, group, start, slots, bounds):
    """bounds[i]: keys [lo, hi), counted from `start`, that row group i sees of a partition."""
    for i in range((tile.n * group + ROWS - 1) // ROWS):
        first = tile.first + i * ROWS // group
        last = tile.first + min((i * ROWS + ROWS - 1) // group, tile.n - 1)
        bounds[i, 0] = max(slots.firsts[first] - start, 0)
        bounds[i, 1] = min(slots.positions[last] + 1 - start, PARTITION)


@kernel
def _softmax_rows(tile, group, start, slots, bounds, factor, weights, states):
    """Softmax of every row of the tile over one partition; rows that see none of it: l = 0."""
    row = 0
    for query in range(tile.first, tile.first + tile.n):
        lo = max(slots.firsts[query] - start, 0)
        hi = min(slots.positions[query] + 1 - start, PARTITION)
        for _ in range(group):
            at, seen = address(weights) + row * SCORE_STRIDE, bounds[row // ROWS]
            if lo < hi:  # weights are read as far as any row of the group sees
                begin, end = seen[0] // TILE, (seen[1] + TILE - 1) // TILE
                softmax_row(at, begin, end, lo, hi, factor, address(states) + 8 * row)
            else:
                states[row, 0], states[row, 1] = -np.inf, 0
                zero_bytes(at, SCORE_STRIDE)
            row += 1


@kernel
def _add_rows(n_groups, d, start, bounds, weights, table, n, values, stride, acc):
    """Weights times values: keys in order, in stretches that lie in consecutive rows."""
    for s in range(n):
        first, source = table[s, 0], table[s, 1]
        for begin in range(first, first + table[s, 2], VALUE_BLOCK):
            end = min(begin + VALUE_BLOCK, first + table[s, 2])
            for i in range(n_groups):
                a, b = max(begin - start, bounds[i, 0]), min(end - start, bounds[i, 1])
                if a < b:
                    row = values + (source + start + a - first) * stride
                    at = address(weights) + i * ROWS * SCORE_STRIDE + 4 * a
                    mix_values(at, b - a, row, stride, address(acc) + 4 * i * ROWS * d, d)


@kernel
def _join_rows(states, acc, a, b, n, factor):
    """Row by row, state b of the stack joins state a; a side that saw no key is skipped."""
    for row in range(n):
        if states[b, row, 1] == 0:
            continue
        if states[a, row, 1] == 0:
            states[a, row, 0], states[a, row, 1] = states[b, row, 0], states[b, row, 1]
            copy_bytes(address(acc[b, row]), address(acc[a, row]), 4 * acc.shape[2])
        else:
            join(states[a, row], acc[a, row], states[b, row], acc[b, row], factor)


@kernel
def _absent(part, states):
    """Start the stack with one empty state for every group of partitions before `part`."""
    depth = 0
    while part > 0:
        if part & 1:
            zero_bytes(address(states[depth]), 4 * states[depth].size)
            depth += 1
        part >>= 1
    return depth


def _query_kernel(fmt: KvFormat) -> Any:
    """The tile's rows of one KV head, position by position, filled up with zero rows."""
    packs = fmt is KvFormat.Q8_0

    @kernel(key=fmt.value)
    def take_queries(tile, dims, kv, q, rows, q_bytes):
        group, d = dims.n_head // dims.n_head_kv, dims.head_dim
        for row in range(tile.n * group):
            query, head = tile.first + row // group, kv * group + row % group
            source = address(q) + 4 * d * (query * dims.n_head + head)
            if packs:
                pack_row(source, address(rows) + row * q_bytes, d)
            else:
                copy_bytes(source, address(rows) + row * q_bytes, q_bytes)
        used = tile.n * group
        unused = (used + ROWS - 1) // ROWS * ROWS - used
        zero_bytes(address(rows) + used * q_bytes, unused * q_bytes)

    return take_queries


def _score_kernel(fmt: KvFormat) -> Any:
    """Keys of one partition packed, then scores of every row group that sees any."""
    pack, score, keys = pack_keys(fmt), score_panel(fmt), panel_keys(fmt)
    panel_width = panel_bytes(fmt, 32)  # per 32 elements

    @kernel(key=fmt.value)
    def scores(n_groups, args, k, start, lo, hi, n, mine):
        dims, d, q_bytes = args.dims, args.dims.head_dim, args.q_bytes
        panels, width, stage = address(mine.panels), d * panel_width // 32, address(mine.stage)
        for at in range((lo - start) // TILE * TILE, hi - start, TILE):
            row, stride = gather_tile(
                mine.segments, n, start + at, k, dims.row_bytes, dims.head_bytes, stage
            )
            pack(row, stride, panels + at // keys * width + at % keys * 4, d)
        for at in range((lo - start) // keys * keys, hi - start, keys):
            panel = panels + at // keys * width
            for i in range(n_groups):
                if mine.bounds[i, 0] < at + keys and at < mine.bounds[i, 1]:
                    query = address(mine.queries) + i * ROWS * q_bytes
                    out = address(mine.weights) + i * ROWS * SCORE_STRIDE + 4 * at
                    score(query, q_bytes, d, panel, out)

    return scores


def _value_kernel(fmt: KvFormat) -> Any:
    """Weights times values of one partition: f32 rows where they lie, others decoded first."""
    load, in_place = LOAD_ROW[fmt], fmt is KvFormat.F32

    @kernel(key=fmt.value)
    def values(n_groups, args, v, start, lo, hi, n, mine, acc):
        d, table, row_bytes = args.dims.head_dim, mine.segments, args.dims.row_bytes
        if in_place:
            _add_rows(n_groups, d, start, mine.bounds, mine.weights, table, n, v, row_bytes, acc)
            return
        source = address(mine.values)
        for s in range(n):
            for i in range(table[s, 2]):
                load(v + (table[s, 1] + i) * row_bytes, source + 4 * d * (table[s, 0] + i - lo), d)
        table[0, 0], table[0, 1], table[0, 2] = lo, 0, hi - lo
        _add_rows(n_groups, d, start, mine.bounds, mine.weights, table, 1, source, 4 * d, acc)

    return values


def _tile_kernel(fmt: KvFormat) -> Any:
    """One (tile, KV head)."""
    take_queries, scores, values = _query_kernel(fmt), _score_kernel(fmt), _value_kernel(fmt)

    @kernel(key=fmt.value)
    def attend(tile, kv, args, mine):
        dims, slots, offset = args.dims, args.slots, kv * args.dims.head_bytes
        group = dims.n_head // dims.n_head_kv
        n_rows, pos = tile.n * group, slots.positions[tile.first]
        n_groups = (n_rows + ROWS - 1) // ROWS
        begin, end = slots.firsts[tile.first], pos + tile.n
        take_queries(tile, dims, kv, args.q, mine.queries, args.q_bytes)
        depth = _absent(begin // PARTITION, mine.states)
        for part in range(begin // PARTITION, (end + PARTITION - 1) // PARTITION):
            start, states, acc = part * PARTITION, mine.states[depth], mine.acc[depth]
            lo, hi = max(begin, start), min(end, start + PARTITION)
            n = segments(slots.runs, tile.first, pos, lo, hi, mine.segments)
            _see(tile, group, start, slots, mine.bounds)
            scores(n_groups, args, args.k + offset, start, lo, hi, n, mine)
            _softmax_rows(tile, group, start, slots, mine.bounds, args.factor, mine.weights, states)
            zero_bytes(address(acc), 4 * acc.size)
            values(n_groups, args, args.v + offset, start, lo, hi, n, mine, acc)
            bits = part
            while bits & 1:
                _join_rows(mine.states, mine.acc, depth - 1, depth, n_rows, args.factor)
                depth, bits = depth - 1, bits >> 1
            depth += 1
        while depth > 1:
            depth -= 1
            _join_rows(mine.states, mine.acc, depth - 1, depth, n_rows, args.factor)
        for row in range(n_rows):
            target = args.out[tile.first + row // group, kv * group + row % group]
            finish(mine.acc[0, row], mine.states[0, row, 1], target)

    return attend


class Args(NamedTuple):
    """What a worker gets."""

    dims: Dims
    k: int  # address of cell 0
    v: int
    q: Any  # float32 [n_q, n_head, d]
    q_bytes: int  # of one packed head row
    factor: Any
    slots: Slots
    tiles: Any  # int64 [n, 2], heavy ones first
    counter: Any  # int64 [1], next (tile, KV head)
    scratch: Scratch
    out: Any  # float32 [n_q, n_head, d]


def _flash_worker(fmt: KvFormat) -> Worker:
    attend = _tile_kernel(fmt)

    @Worker
    @kernel(key=fmt.value)
    def attn_flash(t, n_threads, pointer):
        args = read(pointer)
        dims, tiles, all_of = args.dims, args.tiles, args.scratch
        mine = Scratch(
            all_of.queries[t], all_of.panels[t], all_of.values[t], all_of.weights[t],
            all_of.states[t], all_of.acc[t], all_of.stage[t], all_of.segments[t],
            all_of.bounds[t],
        )  # fmt: skip
        done, item = 0, fetch_add(address(args.counter))
        while item < tiles.shape[0] * dims.n_head_kv:
            index, kv = item // dims.n_head_kv, item % dims.n_head_kv
            attend(Tile(tiles[index, 0], tiles[index, 1]), kv, args, mine)
            done, item = done + 1, fetch_add(address(args.counter))
        return done

    return attn_flash


WORKERS = {fmt: _flash_worker(fmt) for fmt in KvFormat}


def attend_flash(call: Call, tiles: Int32, threads: int) -> Floats:
    """Run `flash` on a checked call and its tiles."""
    out = call.empty_out()
    if not len(out):
        return out
    ordered, threads = ordered_tiles(tiles, call.layout), call.workers(threads)
    args = Args(
        dims=call.dims,
        k=call.k,
        v=call.v,
        q=call.q,
        q_bytes=query_bytes(call.fmt, call.dims.head_dim),
        factor=call.factor,
        slots=call.layout.slots,
        tiles=ordered,
        counter=np.zeros(1, np.int64),
        scratch=_scratch(call, threads, int(ordered[:, 1].max())),
        out=out,
    )
    run(threads, WORKERS[call.fmt], None, args)
    return out


def _scratch(call: Call, n: int, block_m: int) -> Scratch:
    """Working memory of n workers for tiles of at most `block_m` queries."""
    fmt, dims, d = call.fmt, call.dims, call.dims.head_dim
    rows = -(-block_m * (dims.n_head // dims.n_head_kv) // ROWS) * ROWS
    depth = int(call.layout.slots.positions.max() // PARTITION).bit_length() + 2
    decoded = 0 if fmt is KvFormat.F32 else PARTITION * d
    panels = PARTITION // panel_keys(fmt) * panel_bytes(fmt, d)
    return Scratch(
        queries=np.empty((n, rows * query_bytes(fmt, d)), np.uint8),
        panels=np.empty((n, panels), np.uint8),
        values=np.empty((n, decoded), np.float32),
        weights=np.empty((n, rows, PARTITION), np.float32),
        states=np.empty((n, depth, rows, 2), np.float32),
        acc=np.empty((n, depth, rows, d), np.float32),
        stage=np.empty((n, TILE * dims.head_bytes), np.uint8),
        segments=np.empty((n, KV_MAP_MAX_SPANS + block_m, 3), np.int64),
        bounds=np.empty((n, rows // ROWS, 2), np.int64),
    )
