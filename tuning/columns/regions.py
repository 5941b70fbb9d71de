"""Regions of the CPU backend from rows."""

from __future__ import annotations

import numpy as np

from minfer import kernels_numba, registry
from minfer.format import Floats, KvFormat, Region


def filled(fmt: KvFormat, rows: Floats) -> Region:
    """A region of `fmt` that holds float32 rows [n, n_head_kv, d]."""
    store = registry.select("store_cells", fmt=fmt)
    region = kernels_numba.empty_region(fmt, *rows.shape)
    cells = np.arange(len(rows), dtype=np.int32)
    stored: Region = store.launch(region, rows, cells, fmt=fmt, config=store.config)
    return stored


def copy_of(region: Region) -> Region:
    """Another region of equal bytes."""
    arrays = tuple(array.copy() for array in region.arrays)
    return Region(region.fmt, region.layout, region.n_head_kv, region.head_dim, arrays)
