"""Stores, moves and maps of cells, canonical bytes, in place; rope before a store in float64."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from minfer.format import Floats, Int32, KvFormat, Region
from minfer.ops import Config
from minfer.reference.codec import dequantize_q8_0, encode_rows, quantize_q8_0
from minfer.reference.dense import rope, rotated

Doubles = NDArray[np.float64]


def store_cells(
    region: Region, rows: Floats, cells: Int32, *, fmt: KvFormat, config: Config | None = None
) -> Region:
    """Rows f32 [n, n_head_kv, d] into the cells of a canonical region, in place."""
    region.arrays[0][cells] = encode_rows(np.ascontiguousarray(rows).reshape(len(rows), -1), fmt)
    return region


def move_cells(region: Region, moves: Int32, *, config: Config | None = None) -> Region:
    """Copy `rows` cells from src to dst for every (src, dst, rows) [n, 3], in order.

    A move reads all of its cells before it writes one.
    """
    for array in region.arrays:
        for src, dst, rows in np.asarray(moves).tolist():
            array[dst : dst + rows] = array[src : src + rows].copy()
    return region


def map_q8_0_cells(
    region: Region,
    cells: Int32,
    cos: Floats,
    sin: Floats,
    *,
    pairing: str,
    config: Config | None = None,
) -> Region:
    """Every head of the cells [n] rotated by the one table row cos, sin [1, n_rot / 2].

    Decoded exactly (contract 4.4), rotated in f32 with every operation rounded by itself,
    quantized by 4.1.
    """
    arena, n = region.arrays[0], region.row_elems
    rows = dequantize_q8_0(arena[cells], n=n).reshape(-1, region.n_head_kv, region.head_dim)
    with np.errstate(all="ignore"):
        turned = rotated(rows, cos[:, None], sin[:, None], pairing)
    arena[cells] = quantize_q8_0(turned.reshape(-1, n))
    return region


def qkv_rope_store(
    q: Floats,
    k: Floats,
    v: Floats,
    k_region: Region,
    v_region: Region,
    positions: Int32,
    cells: Int32,
    cos: Floats,
    sin: Floats,
    *,
    fmt: KvFormat,
    pairing: str,
    config: Config | None = None,
) -> tuple[Doubles, Region, Region]:
    """Rotate q and k by position, store k and v by cell; the rotated q and both regions."""
    turned = rope(k, positions, cos, sin, pairing=pairing).astype(np.float32)
    k_region = store_cells(k_region, turned, cells, fmt=fmt)
    v_region = store_cells(v_region, v, cells, fmt=fmt)
    return rope(q, positions, cos, sin, pairing=pairing), k_region, v_region
