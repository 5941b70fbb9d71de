"""x @ weight.T for a few rows; a row's bits depend on it and the weight only (contract 6.5).

matvec
  lanes   f32 and f16: each weight row is read once per 16 rows of x; every product is 16 lane sums
          in k order, then one fixed tree. f16 is decoded in registers.
  blocks  q8_0: rows of x are quantized (contract 4.1); every product is the exact sums of blocks
          times both scales, blocks in order (4.5).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from minfer.format import BLOCK, BLOCK_BYTES, Bytes, Floats, KvFormat
from minfer.kernels_numba._arguments import product
from minfer.kernels_numba._cell import (
    dot_16_blocks,
    dot_one_block,
    head_bytes,
    load_16,
    load_16_blocks,
)
from minfer.kernels_numba._emit import F32, I32, LANES, VF, Emitter
from minfer.kernels_numba._ir import address, intrinsic_of
from minfer.kernels_numba._jit import kernel
from minfer.kernels_numba._query import (
    QUERY_BLOCK,
    QUERY_SCALE,
    QUERY_SUM,
    ROUNDING,
    pack_row,
    query_bytes,
)
from minfer.kernels_numba._workers import ALONE_BYTES, THREADS, Worker, n_workers, read, run, share
from minfer.ops import Config, variant

COLUMNS = 16  # rows of x that share one pass over the weights
LINE = 64  # bytes of a cache line


def _threads(weight: Bytes, n: int, config: Config) -> int:
    """`threads` of config, or 1 where n rows of x read few bytes of weight."""
    threads = n_workers(config["threads"])
    return threads if weight.size * n >= ALONE_BYTES else 1


# -- lanes ----------------------------------------------------------------------------------------


def _lane_sums(fmt: KvFormat, n_rows: int, n_columns: int) -> Any:
    """y[column, row] = sum over k of weight[row, k] * x[column, k] for a small block of both.

    Intrinsic (weight, weight stride, x, x stride, n_in, y, y stride): strides in bytes. Lane k % 16
    takes element k, the last lanes past n_in are zero, and the tree is that of `sums_of_four`.
    """
    size = head_bytes(fmt, 1)

    def emit(
        e: Emitter,
        weight: Any,
        stride: Any,
        x: Any,
        x_stride: Any,
        n_in: Any,
        y: Any,
        y_stride: Any,
    ) -> None:
        rows, columns = e.rows(weight, stride, n_rows), e.rows(x, x_stride, n_columns)
        sums = [[e.variable(e.const(VF, 0.0)) for _ in rows] for _ in columns]

        def step(i: Any, count: Any = None) -> None:
            here, there = e.mul(i, 4 * LANES), e.mul(i, size * LANES)
            xs = [load_16(e, KvFormat.F32, e.add(column, here), count) for column in columns]
            for r, row in enumerate(rows):
                w = load_16(e, fmt, e.add(row, there), count)
                for c, x_16 in enumerate(xs):
                    e.set(sums[c][r], e.fma(w, x_16, e.get(sums[c][r])))

        whole = e.builder.udiv(n_in, e.index(LANES))
        with e.loop(whole) as i:
            # two groups of rows ahead, line by line, into L2: this is what reaches the DRAM's rate
            ahead = e.add(weight, e.mul(stride, 2 * n_rows), e.mul(i, size * LANES * n_rows))
            for line in range(0, size * LANES * n_rows, LINE):
                e.prefetch(ahead, line)
            step(i)
        tail = e.builder.urem(n_in, e.index(LANES))
        with e.when(e.builder.icmp_unsigned("!=", tail, e.index(0))):
            step(whole, tail)
        for c in range(n_columns):
            out = e.add(y, e.mul(y_stride, c))
            if n_rows == 1:
                e.store(e.lane(e.sums_of_four([e.get(sums[c][0])] * 4), 0), out)
            for r in range(0, n_rows - 3, 4):
                four = e.sums_of_four([e.get(slot) for slot in sums[c][r : r + 4]])
                e.store(four, out, 4 * r)

    return intrinsic_of("ppppppp:v", emit)


def _lanes_worker(fmt: KvFormat) -> Worker:
    lanes_8x1, lanes_4x4 = _lane_sums(fmt, 8, 1), _lane_sums(fmt, 4, 4)
    lanes_4x1, lanes_1x1 = _lane_sums(fmt, 4, 1), _lane_sums(fmt, 1, 1)

    @kernel(key=fmt.value)
    def rows(weight, x, out, row, stop, column, n):
        """Rows row .. stop-1 of weight times x rows column .. column+n-1."""
        n_in, ws, xs, ys = x.shape[1], weight.shape[1], 4 * x.shape[1], 4 * out.shape[1]
        while row + 8 <= stop and n == 1:
            y = address(out[column, row:])
            lanes_8x1(address(weight[row]), ws, address(x[column]), xs, n_in, y, ys)
            row += 8
        while row + 4 <= stop:
            w, c, end = address(weight[row]), column, column + n
            while c + 4 <= end:
                lanes_4x4(w, ws, address(x[c]), xs, n_in, address(out[c, row:]), ys)
                c += 4
            while c < end:
                lanes_4x1(w, ws, address(x[c]), xs, n_in, address(out[c, row:]), ys)
                c += 1
            row += 4
        while row < stop:
            for c in range(column, column + n):
                y = address(out[c, row:])
                lanes_1x1(address(weight[row]), ws, address(x[c]), xs, n_in, y, ys)
            row += 1

    @Worker
    @kernel(key=fmt.value)
    def matvec_lanes_kernel(t, n_threads, pointer):
        weight, x, out = read(pointer)
        begin, end = share(t, n_threads, (weight.shape[0] + 15) // 16)
        for column in range(0, x.shape[0], COLUMNS):
            n = min(COLUMNS, x.shape[0] - column)
            rows(weight, x, out, 16 * begin, min(16 * end, weight.shape[0]), column, n)
        return 0

    return matvec_lanes_kernel


LANES_WORKERS = {fmt: _lanes_worker(fmt) for fmt in (KvFormat.F32, KvFormat.F16)}


@variant(formats=tuple(LANES_WORKERS), space={"threads": THREADS})
def matvec_lanes(weight: Any, x: Floats, *, fmt: KvFormat, config: Config) -> Floats:
    """x [n, n_in] @ weight.T, weight float32 or float16 [n_out, n_in]: f32 [n, n_out]."""
    weight, x = product(weight, x, fmt)
    out = np.empty((len(x), len(weight)), np.float32)
    run(_threads(weight, len(x), config), LANES_WORKERS[fmt], None, (weight, x, out))
    return out


# -- blocks ---------------------------------------------------------------------------------------


def _add_term(e: Emitter, total: Any, query: Any, isum: Any, scale: Any) -> None:
    """total += float(isum) * (scale of the weight * scale of x), each rounded (contract 4.5)."""
    build, kind = e.builder, scale.type
    scale_x = e.load(F32, query, QUERY_SCALE)
    scale_x = scale_x if kind is F32 else e.splat(scale_x)
    term = build.fmul(build.sitofp(isum, kind), build.fmul(scale, scale_x))
    e.set(total, build.fadd(e.get(total), term))


def _emit_16x1(e: Emitter, weight: Any, stride: Any, x: Any, n_in: Any, y: Any) -> None:
    """y[0..15] = 16 weight rows times one packed row."""
    total = e.variable(e.const(VF, 0.0))
    with e.loop(e.builder.udiv(n_in, e.index(BLOCK))) as i:
        _prefetch_blocks(e, weight, stride, i)
        query = e.add(x, e.mul(i, QUERY_BLOCK))
        isum, scales = dot_16_blocks(e, e.add(weight, e.mul(i, BLOCK_BYTES)), stride, query)
        isum = e.builder.add(isum, e.load_splat(I32, query, QUERY_SUM))
        _add_term(e, total, query, isum, scales)
    e.store(e.get(total), y)


def _emit_16x4(
    e: Emitter, weight: Any, stride: Any, x: Any, x_stride: Any, n_in: Any, y: Any, y_stride: Any
) -> None:
    """y[column, 0..15] = 16 weight rows times four packed rows."""
    columns = e.rows(x, x_stride, 4)
    totals = [e.variable(e.const(VF, 0.0)) for _ in columns]
    with e.loop(e.builder.udiv(n_in, e.index(BLOCK))) as i:
        _prefetch_blocks(e, weight, stride, i)
        codes, scales = load_16_blocks(e, e.add(weight, e.mul(i, BLOCK_BYTES)), stride)
        for column, total in zip(columns, totals, strict=True):
            query = e.add(column, e.mul(i, QUERY_BLOCK))
            isum = e.load_splat(I32, query, QUERY_SUM)
            for step, four in enumerate(codes):
                isum = e.dot_u8_s8(isum, four, e.load_splat(I32, query, 4 * step))
            _add_term(e, total, query, isum, scales)
    for c, total in enumerate(totals):
        e.store(e.get(total), e.add(y, e.mul(y_stride, c)))


def _prefetch_blocks(e: Emitter, weight: Any, stride: Any, i: Any) -> None:
    """Two groups of rows ahead, a sixteenth of a group at a time, into L2."""
    ahead = e.add(weight, e.mul(stride, 2 * LANES), e.mul(i, LANES * BLOCK_BYTES))
    for line in range(0, LANES * BLOCK_BYTES, LINE):
        e.prefetch(ahead, line)


def _emit_1x1(e: Emitter, weight: Any, x: Any, n_in: Any) -> Any:
    """One weight row times one packed row."""
    total = e.variable(e.const(F32, 0.0))
    with e.loop(e.builder.udiv(n_in, e.index(BLOCK))) as i:
        query = e.add(x, e.mul(i, QUERY_BLOCK))
        isum, scale = dot_one_block(e, e.add(weight, e.mul(i, BLOCK_BYTES)), query)
        isum = e.builder.add(isum, e.load(I32, query, QUERY_SUM))
        _add_term(e, total, query, isum, scale)
    return e.get(total)


_blocks_16x1 = intrinsic_of("ppppp:v", _emit_16x1)
_blocks_16x4 = intrinsic_of("ppppppp:v", _emit_16x4)
_blocks_1x1 = intrinsic_of("ppp:f", _emit_1x1)


@kernel
def _matvec_block_rows(
    weight: Any, x: Any, n: Any, n_in: Any, row: Any, stop: Any, out: Any
) -> None:
    """Rows row .. stop-1 of weight times the first n packed rows of x, to out [n, n_out]."""
    ws, xs, ys = weight.shape[1], x.shape[1], 4 * out.shape[1]
    while row + 16 <= stop:
        w, c = address(weight[row]), 0
        while c + 4 <= n:
            _blocks_16x4(w, ws, address(x[c]), xs, n_in, address(out[c, row:]), ys)
            c += 4
        while c < n:
            _blocks_16x1(w, ws, address(x[c]), n_in, address(out[c, row:]))
            c += 1
        row += 16
    while row < stop:
        for c in range(n):
            out[c, row] = _blocks_1x1(address(weight[row]), address(x[c]), n_in)
        row += 1


@Worker
@kernel
def _matvec_blocks_kernel(t: Any, n_threads: Any, pointer: Any) -> int:
    weight, x, packed, out = read(pointer)
    begin, end = share(t, n_threads, (weight.shape[0] + 15) // 16)
    first, stop, n_in = 16 * begin, min(16 * end, weight.shape[0]), x.shape[1]
    for column in range(0, x.shape[0], COLUMNS):
        n = min(COLUMNS, x.shape[0] - column)
        for c in range(n):  # by every worker: cheaper than to wait for one another
            pack_row(address(x[column + c]), address(packed[t, c]), n_in)
        _matvec_block_rows(weight, packed[t], n, n_in, first, stop, out[column:])
    return 0


@variant(formats=(KvFormat.Q8_0,), query=ROUNDING, space={"threads": THREADS})
def matvec_blocks(weight: Any, x: Floats, *, fmt: KvFormat, config: Config) -> Floats:
    """x [n, n_in] @ weight.T, weight q8_0 blocks uint8 [n_out, n_in / 32 * 34]: f32 [n, n_out]."""
    weight, x = product(weight, x, fmt)
    n, n_in = x.shape
    threads = _threads(weight, n, config)
    packed = np.empty((threads, min(n, COLUMNS), query_bytes(fmt, n_in)), np.uint8)
    out = np.empty((n, len(weight)), np.float32)
    run(threads, _matvec_blocks_kernel, None, (weight, x, packed, out))
    return out
