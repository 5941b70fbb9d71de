"""The Metal backend: kernels as Metal source run by MLX, and the array helpers of every backend.

Arrays are mlx arrays, cells lie in planes (`minfer.planes`). A kernel cannot write its inputs, so
it makes the rows and MLX puts them into a region in place. What leaves the package is canonical
(contract 3.5).
"""

from __future__ import annotations

import importlib.metadata
import math
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from minfer import planes
from minfer.format import BLOCK, Bytes, Int32, KvFormat, Region
from minfer.kernels_mlx._arguments import check_region, checked_cells, put, tensor
from minfer.kernels_mlx._kernel import MetalKernel
from minfer.ops.cell_arguments import check_bytes, check_fill
from minfer.planes import LAYOUT

__all__ = ["LAYOUT", "MetalKernel"]

# of `environment`, what the bits of answers depend on
NUMERIC = ("mlx", "architecture", "device_name", "runs in")
READS_PACKED_KV = True
SUPPORTS_ATTN_SPAN = True


def compute_capability() -> None:
    """There is none: it is NVIDIA's."""
    return None


def array_type() -> type:
    """The class of this package's arrays."""
    return mx.array


def from_host(array: NDArray[Any]) -> mx.array:
    """A numpy array as an mlx array."""
    return tensor(array)


def to_host(array: Any) -> NDArray[Any]:
    """An mlx array as numpy, evaluated and copied.

    Waits for all work: what it reads cannot be written in place before it has ended.
    """
    if not isinstance(array, mx.array):
        given: NDArray[Any] = array
        return given
    host = np.array(array)
    mx.synchronize()
    return host


def empty_regions(
    count: int, fmt: KvFormat, n_cells: int, n_head_kv: int, head_dim: int, fill: float = 0.0
) -> list[Region]:
    """Regions of `n_cells` cells of n_head_kv * head_dim elements, all 0.0 or all NaN (`fill`)."""
    return [empty_region(fmt, n_cells, n_head_kv, head_dim, fill) for _ in range(count)]


def empty_region(
    fmt: KvFormat, n_cells: int, n_head_kv: int, head_dim: int, fill: float = 0.0
) -> Region:
    """One region, see `empty_regions`."""
    check_fill(fill)
    n = n_head_kv * head_dim
    shapes = planes.shapes(fmt, n_cells, n)
    arrays = [mx.zeros(shape, getattr(mx, dtype)) for shape, dtype in shapes]
    if math.isnan(fill):
        # numpy's NaN, as on other devices: a conversion of mlx may make another one
        arrays[-1][:, : _used(fmt, n)] = mx.array(np.full(1, fill, shapes[-1][1]))
    mx.eval(arrays)
    return Region(fmt, LAYOUT, n_head_kv, head_dim, tuple(arrays))


def _used(fmt: KvFormat, n: int) -> int:
    """Columns of the last plane that are no padding, for cells of n elements."""
    return n // BLOCK if fmt is KvFormat.Q8_0 else n


def clear_cells(region: Region, cells: Int32, fill: float = 0.0) -> Region:
    """Set every element of the cells to 0.0 or NaN, padding to zero; the region, in place."""
    check_region(region, region.fmt)
    index = checked_cells(region, cells)
    cleared = empty_region(region.fmt, 1, region.n_head_kv, region.head_dim, fill)
    put(region, index, cleared.arrays)
    return region


def read_cells(region: Region, cells: Int32) -> Bytes:
    """A copy of the cells, canonical: uint8 [n, cell_bytes]."""
    check_region(region, region.fmt)
    index = checked_cells(region, cells)
    held = tuple(to_host(plane[index]) for plane in region.arrays)
    return planes.to_canonical(region.fmt, held, region.row_elems)


def write_cells(region: Region, cells: Int32, rows: Bytes) -> Region:
    """Put canonical bytes uint8 [n, cell_bytes] into the cells, verbatim; the region, in place."""
    check_region(region, region.fmt)
    index = checked_cells(region, cells)
    rows = np.asarray(rows)
    check_bytes(region, rows, len(index))
    parts = planes.of_canonical(region.fmt, rows, region.row_elems)
    put(region, index, [tensor(part) for part in parts])
    return region


def decode_cells(region: Region, cells: Int32) -> mx.array:
    """The rows in the cells, decoded exactly: f32 [n, n_head_kv, head_dim]."""
    check_region(region, region.fmt)
    index = checked_cells(region, cells)
    decoded = region.arrays[0][index][:, : region.row_elems].astype(mx.float32)
    if region.fmt is KvFormat.Q8_0:
        scales = region.arrays[1][index][:, : region.row_elems // BLOCK].astype(mx.float32)
        decoded = decoded.reshape(-1, region.row_elems // BLOCK, BLOCK) * scales[..., None]
    shaped: mx.array = decoded.reshape(len(index), region.n_head_kv, region.head_dim)
    return shaped


def environment() -> dict[str, str]:
    """What a bug report about this backend needs: versions and the GPU."""
    found = {"mlx": importlib.metadata.version("mlx")}
    if not mx.metal.is_available():
        return {**found, "runs in": "the simulator"}
    return {**found, **{name: str(value) for name, value in mx.device_info().items()}}
