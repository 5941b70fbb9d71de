"""Products with a weight; a row's bits depend on that row and the weight only (contract 6.5).

matvec  x @ weight.T for a few rows.
  lanes  each weight row is read once per 16 rows of x; every product is 16 lane sums in k order,
         then one fixed tree.
matmul  x @ weight.T for many rows.
  tiles  6 rows by 64 columns over packed panels of the weight; every product is one fma chain in
         k order per 256 values of k, the chains added in order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange
from numpy.typing import NDArray

from minfer.errors import Refusal
from minfer.kernels_numba._ir import (
    F32,
    LANES,
    VF,
    Emitter,
    address,
    fetch_add,
    intrinsic_of,
    vector,
)
from minfer.kernels_numba._jit import THREADS, constant, granted, kernel, launch
from minfer.ops import Config, variant

Floats = NDArray[np.float32]

COLUMNS = 16  # rows of x that share one pass over the weights in matvec
TILE_ROWS, TILE_COLUMNS = 6, 64
PANEL_DEPTH = 256  # k values of a packed panel, 64 KiB: a chain's length, so part of the answer

# -- matvec ---------------------------------------------------------------------------------------


def _lane_sums(n_rows: int, n_columns: int) -> Any:
    """y[column, row] = sum over k of weight[row, k] * x[column, k] for a small block of both.

    Intrinsic (weight, weight stride, x, x stride, n_in, y, y stride): strides in bytes. Lane k % 16
    takes element k, the last lanes past n_in are zero, and the tree is that of `sums_of_four`.
    """

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

        def step(offset: Any, load: Any) -> None:
            xs = [load(column, offset) for column in columns]
            for r, row in enumerate(rows):
                w = load(row, offset)
                for c, x_16 in enumerate(xs):
                    e.set(sums[c][r], e.fma(w, x_16, e.get(sums[c][r])))

        whole = e.builder.udiv(n_in, e.index(LANES))
        with e.loop(whole) as i:
            # two groups of rows ahead, line by line, into L2: this is what reaches the DRAM's rate
            ahead = e.add(weight, e.mul(stride, 2 * n_rows), e.mul(i, 4 * LANES * n_rows))
            for line in range(n_rows):
                e.prefetch(ahead, 4 * LANES * line)
            step(e.mul(i, 4 * LANES), lambda row, offset: e.load(VF, row, offset))
        tail = e.builder.urem(n_in, e.index(LANES))
        with e.when(e.builder.icmp_unsigned("!=", tail, e.index(0))):
            step(e.mul(whole, 4 * LANES), lambda row, offset: e.load_head(row, offset, tail))
        for c in range(n_columns):
            out = e.add(y, e.mul(y_stride, c))
            if n_rows == 1:
                e.store(e.lane(e.sums_of_four([e.get(sums[c][0])] * 4), 0), out)
            for r in range(0, n_rows - 3, 4):
                four = e.sums_of_four([e.get(slot) for slot in sums[c][r : r + 4]])
                e.store(four, out, 4 * r)

    return intrinsic_of("ppppppp:v", emit)


_lanes_8x1, _lanes_4x4 = _lane_sums(8, 1), _lane_sums(4, 4)
_lanes_4x1, _lanes_1x1 = _lane_sums(4, 1), _lane_sums(1, 1)


@kernel
def _matvec_rows(weight: Any, x: Any, out: Any, row: Any, stop: Any, column: Any, n: Any) -> None:
    """Rows row .. stop-1 of weight times x rows column .. column+n-1."""
    n_in = weight.shape[1]
    ws, xs, ys = 4 * n_in, 4 * x.shape[1], 4 * out.shape[1]
    while row + 8 <= stop and n == 1:
        _lanes_8x1(
            address(weight[row]), ws, address(x[column]), xs, n_in, address(out[column, row:]), ys
        )
        row += 8
    while row + 4 <= stop:
        done = 0
        while done + 4 <= n:
            c = column + done
            _lanes_4x4(address(weight[row]), ws, address(x[c]), xs, n_in, address(out[c, row:]), ys)
            done += 4
        while done < n:
            c = column + done
            _lanes_4x1(address(weight[row]), ws, address(x[c]), xs, n_in, address(out[c, row:]), ys)
            done += 1
        row += 4
    while row < stop:
        for c in range(column, column + n):
            _lanes_1x1(address(weight[row]), ws, address(x[c]), xs, n_in, address(out[c, row:]), ys)
        row += 1


@kernel(parallel=True)
def _matvec_lanes_kernel(n_threads: Any, weight: Any, x: Any, out: Any) -> None:
    groups = (weight.shape[0] + 15) // 16
    for thread in prange(n_threads):
        start = thread * groups // n_threads * 16
        stop = min(weight.shape[0], (thread + 1) * groups // n_threads * 16)
        for column in range(0, x.shape[0], COLUMNS):
            n = min(COLUMNS, x.shape[0] - column)
            _matvec_rows(weight, x, out, start, stop, column, n)


@variant(space={"threads": THREADS})
def matvec_lanes(weight: Floats, x: Floats, *, config: Config) -> Floats:
    """x [n, n_in] @ weight.T, weight [n_out, n_in]: f32 [n, n_out]."""
    weight, x = _check_product(weight, x)
    out = np.empty((len(x), len(weight)), np.float32)
    launch(_matvec_lanes_kernel, config["threads"], weight, x, out)
    return out


# -- matmul ---------------------------------------------------------------------------------------


def _emit_tile(
    e: Emitter, x: Any, x_stride: Any, depth: Any, panel: Any, out: Any, out_stride: Any
) -> None:
    """out[6][64] += x[6][depth] @ panel[depth][64], one fma chain from zero per element."""
    parts = range(TILE_COLUMNS // LANES)
    rows, outs = e.rows(x, x_stride, TILE_ROWS), e.rows(out, out_stride, TILE_ROWS)
    sums = [[e.variable(e.const(VF, 0.0)) for _ in parts] for _ in outs]
    with e.loop(depth) as k:
        line, offset = e.add(panel, e.mul(k, 4 * TILE_COLUMNS)), e.mul(k, 4)
        columns = [e.load(VF, line, 4 * LANES * p) for p in parts]
        for r, row in enumerate(rows):
            value = e.load_splat(F32, row, offset)
            for p in parts:
                e.set(sums[r][p], e.fma(value, columns[p], e.get(sums[r][p])))
    for r, row in enumerate(outs):
        for p in parts:
            before = e.load(VF, row, 4 * LANES * p)
            e.store(e.builder.fadd(before, e.get(sums[r][p])), row, 4 * LANES * p)


def _emit_pack(e: Emitter, weight: Any, stride: Any, depth: Any, panel: Any) -> None:
    """16 weight rows of depth % 16 == 0 values to 16 neighbouring columns of a panel."""
    rows = e.rows(weight, stride)
    with e.loop(e.builder.udiv(depth, e.index(LANES))) as i:
        offset, out = e.mul(i, 4 * LANES), e.add(panel, e.mul(i, 4 * LANES * TILE_COLUMNS))

        def load_quad(row: int, quad: int, offset: Any = offset) -> Any:
            return e.load(vector(F32, 4), e.add(rows[row], offset), 16 * quad)

        for k, column in enumerate(e.transpose(load_quad, 4)):
            e.store(column, out, 4 * TILE_COLUMNS * k)


_tile_6x64 = intrinsic_of("pppppp:v", _emit_tile)
_pack_16 = intrinsic_of("pppp:v", _emit_pack)


@kernel
def _pack_panel(weight: Any, first: Any, k0: Any, depth: Any, panel: Any) -> None:
    """panel[k, c] = weight[first + c, k0 + k], zero in columns past the last weight row."""
    n = min(TILE_COLUMNS, weight.shape[0] - first)
    whole = depth // 16 * 16
    for c in range(0, n // 16 * 16, 16):
        _pack_16(address(weight[first + c, k0:]), 4 * weight.shape[1], whole, address(panel[0, c:]))
        for k in range(whole, depth):
            for j in range(c, c + 16):
                panel[k, j] = weight[first + j, k0 + k]
    for c in range(n // 16 * 16, TILE_COLUMNS):
        for k in range(depth):
            panel[k, c] = weight[first + c, k0 + k] if c < n else np.float32(0)


@kernel
def _edge_tile(
    x: Any, row: Any, k0: Any, depth: Any, panel: Any, out: Any, c0: Any, edge: Any
) -> None:
    """A tile that hangs over the last row or column: through a whole one, edge [12, 64 + depth]."""
    rows, columns = min(TILE_ROWS, out.shape[0] - row), min(TILE_COLUMNS, out.shape[1] - c0)
    tile, values = edge[:TILE_ROWS], edge[TILE_ROWS:]
    for r in range(TILE_ROWS):
        for c in range(TILE_COLUMNS):
            tile[r, c] = out[row + r, c0 + c] if r < rows and c < columns else np.float32(0)
        for k in range(depth):
            values[r, k] = x[row + r, k0 + k] if r < rows else np.float32(0)
    stride = 4 * edge.shape[1]
    _tile_6x64(address(values), stride, depth, address(panel), address(tile), stride)
    for r in range(rows):
        for c in range(columns):
            out[row + r, c0 + c] = tile[r, c]


@kernel(parallel=True)
def _matmul_tiles_kernel(
    n_threads: Any, weight: Any, x: Any, out: Any, panels: Any, edges: Any, counter: Any, parts: Any
) -> None:
    n, n_in = x.shape
    n_out = weight.shape[0]
    n_panels = (n_out + TILE_COLUMNS - 1) // TILE_COLUMNS
    per_part = ((n + parts - 1) // parts + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS
    for thread in prange(n_threads):
        panel, edge = panels[thread], edges[thread]
        item = fetch_add(address(counter))
        while item < n_panels * parts:
            c0, first = item // parts * TILE_COLUMNS, item % parts * per_part
            last = min(n, first + per_part)
            for k0 in range(0, n_in, PANEL_DEPTH):
                depth = min(PANEL_DEPTH, n_in - k0)
                _pack_panel(weight, c0, k0, depth, panel)
                for row in range(first, last, TILE_ROWS):
                    if row + TILE_ROWS <= n and c0 + TILE_COLUMNS <= n_out:
                        _tile_6x64(
                            address(x[row, k0:]),
                            4 * n_in,
                            depth,
                            address(panel),
                            address(out[row, c0:]),
                            4 * n_out,
                        )
                    else:
                        _edge_tile(x, row, k0, depth, panel, out, c0, edge)
            item = fetch_add(address(counter))


@variant(space={"threads": THREADS})
def matmul_tiles(weight: Floats, x: Floats, *, config: Config) -> Floats:
    """x [n, n_in] @ weight.T, weight [n_out, n_in]: f32 [n, n_out], for many rows."""
    weight, x = _check_product(weight, x)
    threads = granted(config["threads"])
    depth = min(PANEL_DEPTH, x.shape[1])
    out = np.zeros((len(x), len(weight)), np.float32)
    panels = np.empty((threads, depth, TILE_COLUMNS), np.float32)
    edges = np.empty((threads, 2 * TILE_ROWS, max(depth, TILE_COLUMNS)), np.float32)
    counter = np.zeros(1, np.int64)
    # few panels are shared more evenly as halves of the rows; a panel is then packed twice
    parts = 2 if len(weight) < 16 * TILE_COLUMNS * threads and len(x) >= 32 * TILE_ROWS else 1
    launch(_matmul_tiles_kernel, threads, weight, x, out, panels, edges, counter, parts)
    return out


def _check_product(weight: Floats, x: Floats) -> tuple[Floats, Floats]:
    if weight.ndim != 2 or x.ndim != 2 or weight.shape[1] != x.shape[1]:
        raise Refusal("7.5", f"weight {list(weight.shape)} cannot multiply rows {list(x.shape)}")
    return constant(weight), np.ascontiguousarray(x, np.float32)
