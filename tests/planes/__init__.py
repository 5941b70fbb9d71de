"""A kernel package for tests that arranges q8_0 cells in planes, as a GPU does (contract 3.5).

codes int8 [n_cells, n] and scales float16 [n_cells, n / 32]; f32 and f16 cells lie as on the CPU.
What computes is the CPU's, over canonical copies; moves and clears work on the planes. An op
leaves the region it was given alone and returns another, as a backend may that cannot write its
inputs: a caller who does not rebind goes on with old cells.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from minfer import kernels_numba as cpu
from minfer.format import BLOCK, BLOCK_BYTES, Bytes, Floats, Int32, KvFormat, Region
from minfer.kernels_numba._arguments import checked_cells

LAYOUT = "planes"
NUMERIC = ("numba", "isa")
READS_PACKED_KV = True
SUPPORTS_ATTN_SPAN = True
SCALE_BYTES = BLOCK_BYTES - BLOCK

to_host, from_host, array_type = cpu.to_host, cpu.from_host, cpu.array_type
environment, compute_capability = cpu.environment, cpu.compute_capability


def canonical(region: Region) -> Region:
    """A copy in the canonical layout."""
    assert region.layout == LAYOUT, region.layout
    if region.fmt is not KvFormat.Q8_0:
        return replace(region, layout=cpu.LAYOUT, arrays=(region.arrays[0].copy(),))
    codes, scales = region.arrays
    n_cells, blocks = scales.shape
    cells = np.zeros((n_cells, region.row_bytes), np.uint8)
    packed = np.empty((n_cells, blocks, BLOCK_BYTES), np.uint8)
    packed[..., :SCALE_BYTES] = scales[..., None].view(np.uint8)
    packed[..., SCALE_BYTES:] = codes.reshape(n_cells, blocks, BLOCK).view(np.uint8)
    cells[:, : blocks * BLOCK_BYTES] = packed.reshape(n_cells, -1)
    return replace(region, layout=cpu.LAYOUT, arrays=(cells,))


def arranged(region: Region) -> Region:
    """A canonical region in the layout of this package."""
    assert region.layout == cpu.LAYOUT, region.layout
    if region.fmt is not KvFormat.Q8_0:
        return replace(region, layout=LAYOUT)
    cells, blocks = region.arrays[0], region.row_elems // BLOCK
    packed = cells[:, : blocks * BLOCK_BYTES].reshape(len(cells), blocks, BLOCK_BYTES)
    scales = np.ascontiguousarray(packed[..., :SCALE_BYTES]).view(np.float16)[..., 0]
    codes = packed[..., SCALE_BYTES:].reshape(len(cells), region.row_elems).view(np.int8)
    return replace(region, layout=LAYOUT, arrays=(codes, scales))


def empty_regions(
    count: int, fmt: KvFormat, n_cells: int, n_head_kv: int, head_dim: int, fill: float = 0.0
) -> list[Region]:
    """See `kernels_numba.empty_regions`."""
    made = cpu.empty_regions(count, fmt, n_cells, n_head_kv, head_dim, fill)
    return [arranged(region) for region in made]


def clear_cells(region: Region, cells: Int32, fill: float = 0.0) -> Region:
    """Set every element of the cells to 0.0 or NaN, plane by plane."""
    one = empty_regions(1, region.fmt, 1, region.n_head_kv, region.head_dim, fill)[0]
    for plane, cleared in zip(region.arrays, one.arrays, strict=True):
        plane[checked_cells(region, cells)] = cleared
    return region


def read_cells(region: Region, cells: Int32) -> Bytes:
    """See `kernels_numba.read_cells`: canonical bytes leave this package."""
    return cpu.read_cells(canonical(region), cells)


def write_cells(region: Region, cells: Int32, rows: Bytes) -> Region:
    """See `kernels_numba.write_cells`: canonical bytes come in."""
    whole = canonical(region)
    cpu.write_cells(whole, cells, rows)
    for plane, written in zip(region.arrays, arranged(whole).arrays, strict=True):
        plane[:] = written
    return region


def decode_cells(region: Region, cells: Int32) -> Floats:
    """See `kernels_numba.decode_cells`."""
    return cpu.decode_cells(canonical(region), cells)


def over_canonical(launch: Any, *tensors: Any, **how: Any) -> Any:
    """`launch` of the CPU with canonical copies of the regions, its results arranged again."""
    given = [canonical(t) if isinstance(t, Region) else t for t in tensors]
    result = launch(*given, **how)
    if isinstance(result, tuple):
        return tuple(arranged(r) if isinstance(r, Region) else r for r in result)
    return arranged(result) if isinstance(result, Region) else result
