"""Regions of the CPU backend from rows, laid out as a store holds them."""

from __future__ import annotations

import numpy as np

from minfer import kernels_numba, registry
from minfer.format import Floats, KvFormat, Region


def pairs(fmt: KvFormat, k: Floats, v: Floats, n: int) -> list[tuple[Region, Region]]:
    """n pairs of regions of `fmt`, with the rows k and v [n_cells, n_head_kv, d]."""
    store = registry.select("store_cells", fmt=fmt)
    regions = kernels_numba.empty_regions(2 * n, fmt, *k.shape)
    cells = np.arange(len(k), dtype=np.int32)
    for region, rows in zip(regions, (k, v), strict=False):
        store.launch(region, rows, cells, fmt=fmt, config=store.config)
    for region, first in zip(regions[2:], regions[:2] * (n - 1), strict=True):
        region.arrays[0][:] = first.arrays[0]
    return list(zip(regions[::2], regions[1::2], strict=True))
