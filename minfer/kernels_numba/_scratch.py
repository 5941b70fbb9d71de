"""`scratch`: decode the cells of the window into float32 first, then run `flash` over them.

The plain way to read a packed cache, kept to compare with (contract 4.6). Every cell that some
query sees is decoded once per call, exactly, and no other cell is read. So the call needs
8 * n_head_kv * head_dim bytes a distinct cell of its windows, however large the arena is.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from minfer.format import Floats, Int32, KvFormat, Region
from minfer.kernels_numba._call import LAYOUTS, Call, Layout, Slots, frozen, where
from minfer.kernels_numba._cell import head_bytes
from minfer.kernels_numba._flash import attend_flash
from minfer.kernels_numba.cells import load_cells


def attend_scratch(call: Call, tiles: Int32, threads: int) -> Floats:
    """Run `scratch` on a checked call of any format and its tiles."""
    if not len(call.q):
        return call.empty_out()
    cells, layout = _compact(call.layout)
    k, v = (_decoded(region, cells, call.workers(threads)) for region in call.regions)
    decoded = call._replace(
        fmt=KvFormat.F32,
        dims=call.dims._replace(
            row_bytes=k.row_bytes, head_bytes=head_bytes(KvFormat.F32, k.head_dim)
        ),
        k=where(k.arrays[0]),
        v=where(v.arrays[0]),
        layout=layout,
        regions=(k, v),
    )
    return attend_flash(decoded, tiles, threads)


def _decoded(region: Region, cells: Int32, threads: int) -> Region:
    """An f32 region of these cells alone."""
    rows = load_cells(region, cells, threads).reshape(len(cells), -1).view(np.uint8)
    return Region(KvFormat.F32, region.layout, region.n_head_kv, region.head_dim, (rows,))


@lru_cache(maxsize=LAYOUTS)
def _compact(layout: Layout) -> tuple[Int32, Layout]:
    """The cells that some query sees, and the layout with runs of row numbers among them."""
    runs = _seen(layout.slots)
    used = runs[..., 1] > 0
    first, end = runs[..., 0][used], runs.sum(axis=2)[used]
    # runs overlap: disjoint stretches of cells that cover them
    order = np.argsort(first, kind="stable")
    reach = np.maximum.accumulate(end[order])
    opens = np.concatenate([[True], first[order][1:] > reach[:-1]])
    starts = first[order][opens]
    sizes = reach[np.concatenate([opens[1:], [True]])] - starts
    offsets = np.cumsum(sizes) - sizes
    shifts = starts - offsets  # cell minus row, the same within a stretch
    cells = np.arange(sizes.sum()) + np.repeat(shifts, sizes)
    runs[used, 0] -= shifts[np.searchsorted(starts, first, side="right") - 1]
    slots = layout.slots._replace(runs=frozen(runs.astype(np.int32)))
    return frozen(cells.astype(np.int32)), Layout(slots, layout.n_keys)


def _seen(slots: Slots) -> NDArray[np.int64]:
    """The runs [n_q, n, 2] without the keys before the sliding width of their query."""
    runs = slots.runs.astype(np.int64)
    ends = np.cumsum(runs[..., 1], axis=1)
    hidden = ends[:, -1] - (slots.positions + 1 - slots.firsts)
    drop = np.clip(hidden[:, None] - (ends - runs[..., 1]), 0, runs[..., 1])
    runs[..., 0] += drop
    runs[..., 1] -= drop
    return runs
