"""x @ weight.T for many rows; a row's bits depend on it and the weight only (contract 6.5).

matmul
  tiles   f32 and f16: 6 rows by 64 columns over packed panels of the weight; every product is one
          fma chain in k order per 256 values of k, the chains added in order. f16 is decoded while
          a panel is packed.
  blocks  q8_0: 6 rows by 32 columns; rows of x are quantized (contract 4.1), products are those of
          `matvec_blocks` to the bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from minfer.format import BLOCK, BLOCK_BYTES, Bytes, Floats, KvFormat
from minfer.kernels_numba._arguments import product
from minfer.kernels_numba._cell import head_bytes
from minfer.kernels_numba._emit import LANES, VF, Emitter
from minfer.kernels_numba._ir import address, fetch_add, intrinsic_of
from minfer.kernels_numba._jit import kernel
from minfer.kernels_numba._panels import (
    BLOCK_STEP,
    ROWS,
    multiply,
    multiply_blocks,
    pack_keys,
    panel_keys,
)
from minfer.kernels_numba._query import QUERY_BLOCK, ROUNDING, pack_row, query_bytes
from minfer.kernels_numba._workers import THREADS, Worker, n_workers, read, run, share
from minfer.kernels_numba.matvec import COLUMNS, matvec_blocks
from minfer.ops import Config, variant


class Tiling(NamedTuple):
    """How a format's weight is cut into panels. A unit is what is read at once: elements of it,
    bytes of it in the weight, in a row of x as the tile reads it, and in a panel."""

    columns: int  # weight rows of a panel
    units: int  # of a whole panel
    unit: int
    weight_bytes: int
    row_bytes: int
    panel_bytes: int

    @classmethod
    def of(cls, fmt: KvFormat) -> Tiling:
        """f32 and f16: 64 KiB a panel, whose depth is a chain's length and so part of the answer.
        q8_0: 27 KiB, so that a panel stays in L1; no bits depend on it."""
        columns = panel_keys(fmt)
        if fmt is KvFormat.Q8_0:
            return cls(columns, 24, BLOCK, BLOCK_BYTES, QUERY_BLOCK, BLOCK_STEP)
        return cls(columns, 256, 1, head_bytes(fmt, 1), 4, 4 * columns)


class Scratch(NamedTuple):
    """A worker's own buffers, as uint8 but for `tile`."""

    panel: Any  # [bytes of a panel]
    source: Any  # [16, bytes]: weight rows where fewer than 16 by 16 elements are left
    values: Any  # [6, bytes]: rows of x of a tile that hangs over the last row
    tile: Any  # float32 [6, columns]


class Args(NamedTuple):
    """What a worker gets."""

    weight: Any  # uint8 [n_out, bytes of a row]
    rows: Any  # float32 [n, n_in]
    x: Any  # uint8 [n, bytes], the same rows as tiles read them
    out: Any  # float32 [n, n_out]
    scratch: Scratch  # with one row a worker
    counter: Any  # int64 [1], the next item: a part of the rows of a panel
    parts: int  # that the rows are cut into


# -- tiles ----------------------------------------------------------------------------------------


def _tile(fmt: KvFormat) -> Any:
    """Intrinsic (x, x stride, k0, depth, panel, out, out stride): out[6][columns] += x @ panel.

    At k0 = 0 it counts from zero, whatever lies in `out`.
    """
    parts = range(panel_keys(fmt) // LANES)

    def emit(
        e: Emitter, x: Any, stride: Any, k0: Any, depth: Any, panel: Any, out: Any, out_stride: Any
    ) -> None:
        rows = e.rows(out, out_stride, ROWS)
        first = e.builder.icmp_unsigned("==", k0, e.index(0))

        def load(row: Any, part: int) -> Any:
            before = e.load(VF, row, 4 * LANES * part)
            return e.builder.select(first, e.const(VF, 0.0), before)

        if fmt is KvFormat.Q8_0:
            sums = [[e.variable(load(row, p)) for p in parts] for row in rows]
            multiply_blocks(e, sums, x, stride, panel, depth)
        else:
            sums = [[e.variable(e.const(VF, 0.0)) for _ in parts] for _ in rows]
            multiply(e, sums, x, stride, panel, 4 * LANES * len(parts), depth)
            for row, line in zip(rows, sums, strict=True):
                for p, chain in enumerate(line):
                    e.set(chain, e.builder.fadd(load(row, p), e.get(chain)))
        for row, line in zip(rows, sums, strict=True):
            for p, total in enumerate(line):
                e.store(e.get(total), row, 4 * LANES * p)

    return intrinsic_of("ppppppp:v", emit)


def _pack_kernel(fmt: KvFormat) -> Any:
    columns, _, unit, weight_bytes, *_ = Tiling.of(fmt)
    pack_16 = pack_keys(fmt)  # 16 weight rows to 16 neighbouring columns of a panel

    @kernel(key=fmt.value)
    def pack_panel(weight, first, k0, depth, mine):
        """Columns first .. of k0 .. k0 + depth - 1; past the last weight row they hold anything."""
        at, width = k0 // unit * weight_bytes, depth // unit * weight_bytes
        source, stride = mine.source, weight.shape[1]
        for c in range(0, columns, LANES):
            n, target = min(LANES, weight.shape[0] - first - c), address(mine.panel) + 4 * c
            if n == LANES and depth % LANES == 0:
                pack_16(address(weight[first + c]) + at, stride, target, depth)
                continue
            for r in range(n):
                source[r, :width] = weight[first + c + r, at : at + width]
            whole = (depth + LANES - 1) // LANES * LANES
            pack_16(address(source), source.shape[1], target, whole)

    return pack_panel


def _edge_kernel(fmt: KvFormat) -> Any:
    columns, _, unit, _, row_bytes, _ = Tiling.of(fmt)
    tile_of = _tile(fmt)

    @kernel(key=fmt.value)
    def edge_tile(x, row, k0, depth, out, c0, mine):
        """A tile that hangs over the last row or column: through a whole one, partly garbage."""
        rows, used = min(ROWS, out.shape[0] - row), min(columns, out.shape[1] - c0)
        tile, values = mine.tile, mine.values
        at, width = k0 // unit * row_bytes, depth // unit * row_bytes
        for r in range(rows):
            tile[r, :used] = out[row + r, c0 : c0 + used]
            values[r, :width] = x[row + r, at : at + width]
        panel, stride = address(mine.panel), values.shape[1]
        tile_of(address(values), stride, k0, depth, panel, address(tile), 4 * columns)
        for r in range(rows):
            out[row + r, c0 : c0 + used] = tile[r, :used]

    return edge_tile


def _matmul_worker(fmt: KvFormat) -> Worker:
    columns, units, unit, _, row_bytes, _ = Tiling.of(fmt)
    pack_panel, edge_tile, tile_of = _pack_kernel(fmt), _edge_kernel(fmt), _tile(fmt)

    @kernel(key=fmt.value)
    def part(weight, x, n_in, out, c0, first, last, mine):
        """The columns of a panel at c0, rows first .. last-1."""
        n, n_out = out.shape
        for k0 in range(0, max(n_in, 1), units * unit):  # once over nothing, for zeros
            depth = min(units * unit, n_in - k0)
            pack_panel(weight, c0, k0, depth, mine)
            for row in range(first, last, ROWS):
                if row + ROWS <= n and c0 + columns <= n_out:
                    source = address(x[row]) + k0 // unit * row_bytes
                    panel, target = address(mine.panel), address(out[row, c0:])
                    tile_of(source, x.shape[1], k0, depth, panel, target, 4 * n_out)
                else:
                    edge_tile(x, row, k0, depth, out, c0, mine)

    @Worker
    @kernel(key=fmt.value)
    def matmul_kernel(t, n_threads, pointer):
        args = read(pointer)
        weight, rows, own, parts = args.weight, args.rows, args.scratch, args.parts
        n, mine = rows.shape[0], Scratch(own.panel[t], own.source[t], own.values[t], own.tile[t])
        n_panels = (weight.shape[0] + columns - 1) // columns
        per_part = ((n + parts - 1) // parts + ROWS - 1) // ROWS * ROWS
        item = fetch_add(address(args.counter))
        while item < n_panels * parts:
            c0, first = item // parts * columns, item % parts * per_part
            last = min(n, first + per_part)
            part(weight, args.x, rows.shape[1], args.out, c0, first, last, mine)
            item = fetch_add(address(args.counter))
        return 0

    return matmul_kernel


@Worker
@kernel
def _pack_rows_kernel(t: Any, n_threads: Any, pointer: Any) -> int:
    args = read(pointer)
    rows, x = args.rows, args.x
    begin, end = share(t, n_threads, rows.shape[0])
    for row in range(begin, end):
        pack_row(address(rows[row]), address(x[row]), rows.shape[1])
    return 0


WORKERS = {fmt: _matmul_worker(fmt) for fmt in KvFormat}


def _arguments(weight: Bytes, rows: Floats, x: Bytes, fmt: KvFormat, threads: int) -> Args:
    """What the workers of `fmt` take, with memory of their own."""
    tiling = Tiling.of(fmt)
    units = min(tiling.units, rows.shape[1] // tiling.unit)
    padded = (units * tiling.unit + LANES - 1) // LANES * LANES // tiling.unit
    scratch = Scratch(
        panel=np.empty((threads, padded * tiling.panel_bytes), np.uint8),
        source=np.empty((threads, LANES, padded * tiling.weight_bytes), np.uint8),
        values=np.empty((threads, ROWS, units * tiling.row_bytes), np.uint8),
        tile=np.empty((threads, ROWS, tiling.columns), np.float32),
    )
    # few panels are shared more evenly as halves of the rows; a panel is then packed twice
    few = len(weight) < 16 * tiling.columns * threads
    parts = 2 if few and len(rows) >= 32 * ROWS else 1
    out = np.empty((len(rows), len(weight)), np.float32)
    return Args(weight, rows, x, out, scratch, np.zeros(1, np.int64), parts)


@variant(formats=(KvFormat.F32, KvFormat.F16), space={"threads": THREADS})
def matmul_tiles(weight: Any, x: Floats, *, fmt: KvFormat, config: Config) -> Floats:
    """x [n, n_in] @ weight.T, weight float32 or float16 [n_out, n_in]: f32 [n, n_out]."""
    weight, x = product(weight, x, fmt)
    threads = n_workers(config["threads"])
    args = _arguments(weight, x, x.view(np.uint8), fmt, threads)
    run(threads, WORKERS[fmt], None, args)
    out: Floats = args.out
    return out


@variant(formats=(KvFormat.Q8_0,), query=ROUNDING, space={"threads": THREADS})
def matmul_blocks(weight: Any, x: Floats, *, fmt: KvFormat, config: Config) -> Floats:
    """x [n, n_in] @ weight.T, weight q8_0 blocks uint8 [n_out, n_in / 32 * 34]: f32 [n, n_out].

    A few rows go the way of `matvec_blocks`: the same bits, sooner than panels are packed.
    """
    if len(x) <= COLUMNS:
        return matvec_blocks(weight, x, fmt=fmt, config=config)
    weight, x = product(weight, x, fmt)
    threads = n_workers(config["threads"])
    packed = np.empty((len(x), query_bytes(fmt, x.shape[1])), np.uint8)
    args = _arguments(weight, x, packed, fmt, threads)
    run(threads, _pack_rows_kernel, WORKERS[fmt], args)
    out: Floats = args.out
    return out
