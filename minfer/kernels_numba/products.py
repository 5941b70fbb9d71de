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

from minfer.errors import Refusal
from minfer.format import Floats, KvFormat
from minfer.kernels_numba._arguments import floats, read_only
from minfer.kernels_numba._emit import LANES, VF, Emitter
from minfer.kernels_numba._ir import address, fetch_add, intrinsic_of
from minfer.kernels_numba._jit import kernel
from minfer.kernels_numba._panels import ROWS, multiply, pack_keys
from minfer.kernels_numba._workers import THREADS, Worker, n_workers, read, run, share
from minfer.ops import Config, variant

COLUMNS = 16  # rows of x that share one pass over the weights in matvec
TILE_COLUMNS = 64
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
            step(e.mul(whole, 4 * LANES), lambda row, offset: e.load_first(row, offset, tail))
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


@Worker
@kernel
def _matvec_lanes_kernel(t: Any, n_threads: Any, pointer: Any) -> int:
    weight, x, out = read(pointer)
    begin, end = share(t, n_threads, (weight.shape[0] + 15) // 16)
    for column in range(0, x.shape[0], COLUMNS):
        n = min(COLUMNS, x.shape[0] - column)
        _matvec_rows(weight, x, out, 16 * begin, min(16 * end, weight.shape[0]), column, n)
    return 0


@variant(space={"threads": THREADS})
def matvec_lanes(weight: Floats, x: Floats, *, config: Config) -> Floats:
    """x [n, n_in] @ weight.T, weight [n_out, n_in]: f32 [n, n_out]."""
    weight, x = _check_product(weight, x)
    out = np.empty((len(x), len(weight)), np.float32)
    run(config["threads"], _matvec_lanes_kernel, None, (weight, x, out))
    return out


# -- matmul ---------------------------------------------------------------------------------------


def _emit_tile(
    e: Emitter, x: Any, x_stride: Any, depth: Any, panel: Any, out: Any, out_stride: Any
) -> None:
    """out[6][64] += x[6][depth] @ panel[depth][64], one fma chain from zero per element."""
    parts = range(TILE_COLUMNS // LANES)
    sums = [[e.variable(e.const(VF, 0.0)) for _ in parts] for _ in range(ROWS)]
    multiply(e, sums, x, x_stride, panel, 4 * TILE_COLUMNS, depth)
    for row, line in zip(e.rows(out, out_stride, ROWS), sums, strict=True):
        for p, total in enumerate(line):
            before = e.load(VF, row, 4 * LANES * p)
            e.store(e.builder.fadd(before, e.get(total)), row, 4 * LANES * p)


_tile_6x64 = intrinsic_of("pppppp:v", _emit_tile)
_pack_16 = pack_keys(KvFormat.F32)  # 16 weight rows to 16 neighbouring columns of a panel


@kernel
def _pack_panel(weight: Any, first: Any, k0: Any, depth: Any, panel: Any) -> None:
    """panel[k, c] = weight[first + c, k0 + k], zero in columns past the last weight row."""
    n = min(TILE_COLUMNS, weight.shape[0] - first)
    whole = depth // 16 * 16
    for c in range(0, n // 16 * 16, 16):
        _pack_16(address(weight[first + c, k0:]), 4 * weight.shape[1], address(panel[0, c:]), whole)
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
    """A tile that hangs over the last row or column: through a whole one.

    edge [12, max(depth, 64)]: six rows of the tile, then six rows of x.
    """
    rows, columns = min(ROWS, out.shape[0] - row), min(TILE_COLUMNS, out.shape[1] - c0)
    tile, values = edge[:ROWS], edge[ROWS:]
    for r in range(ROWS):
        for c in range(TILE_COLUMNS):
            tile[r, c] = out[row + r, c0 + c] if r < rows and c < columns else np.float32(0)
        for k in range(depth):
            values[r, k] = x[row + r, k0 + k] if r < rows else np.float32(0)
    stride = 4 * edge.shape[1]
    _tile_6x64(address(values), stride, depth, address(panel), address(tile), stride)
    for r in range(rows):
        for c in range(columns):
            out[row + r, c0 + c] = tile[r, c]


@kernel
def _matmul_part(weight: Any, x: Any, out: Any, c0: Any, first: Any, last: Any, mine: Any) -> None:
    """Columns c0 .. c0 + 63 of rows first .. last-1."""
    panel, edge = mine
    n_in, n_out = x.shape[1], out.shape[1]
    for k0 in range(0, n_in, PANEL_DEPTH):
        depth = min(PANEL_DEPTH, n_in - k0)
        _pack_panel(weight, c0, k0, depth, panel)
        for row in range(first, last, ROWS):
            if row + ROWS <= x.shape[0] and c0 + TILE_COLUMNS <= n_out:
                source, target = address(x[row, k0:]), address(out[row, c0:])
                _tile_6x64(source, 4 * n_in, depth, address(panel), target, 4 * n_out)
            else:
                _edge_tile(x, row, k0, depth, panel, out, c0, edge)


@Worker
@kernel
def _matmul_tiles_kernel(t: Any, n_threads: Any, pointer: Any) -> int:
    weight, x, out, panels, edges, counter, parts = read(pointer)
    n, mine = x.shape[0], (panels[t], edges[t])
    n_panels = (weight.shape[0] + TILE_COLUMNS - 1) // TILE_COLUMNS
    per_part = ((n + parts - 1) // parts + ROWS - 1) // ROWS * ROWS
    item = fetch_add(address(counter))
    while item < n_panels * parts:
        c0, first = item // parts * TILE_COLUMNS, item % parts * per_part
        _matmul_part(weight, x, out, c0, first, min(n, first + per_part), mine)
        item = fetch_add(address(counter))
    return 0


@variant(space={"threads": THREADS})
def matmul_tiles(weight: Floats, x: Floats, *, config: Config) -> Floats:
    """x [n, n_in] @ weight.T, weight [n_out, n_in]: f32 [n, n_out], for many rows."""
    weight, x = _check_product(weight, x)
    threads = n_workers(config["threads"])
    depth = min(PANEL_DEPTH, x.shape[1])
    out = np.zeros((len(x), len(weight)), np.float32)
    panels = np.empty((threads, depth, TILE_COLUMNS), np.float32)
    edges = np.empty((threads, 2 * ROWS, max(depth, TILE_COLUMNS)), np.float32)
    counter = np.zeros(1, np.int64)
    # few panels are shared more evenly as halves of the rows; a panel is then packed twice
    parts = 2 if len(weight) < 16 * TILE_COLUMNS * threads and len(x) >= 32 * ROWS else 1
    args = (weight, x, out, panels, edges, counter, parts)
    run(threads, _matmul_tiles_kernel, None, args)
    return out


def _check_product(weight: Floats, x: Floats) -> tuple[Floats, Floats]:
    weight, x = read_only(weight, "weight", 2), floats(x, "x", 2)
    if weight.shape[1] != x.shape[1]:
        raise Refusal(
            "10",
            f"weight {list(weight.shape)} cannot multiply rows {list(x.shape)}",
            {"weight": weight.shape, "x": x.shape},
        )
    return weight, x
