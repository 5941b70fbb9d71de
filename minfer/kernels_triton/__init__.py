"""The CUDA backend: kernels in Triton, and the array helpers that a store asks of every backend.

Arrays are torch tensors. A region of f32 or f16 cells is one tensor of rows; q8_0 cells lie in two
planes, int8 codes [n_cells, n] and float16 scales [n_cells, n / 32], because 34-byte blocks are
read at a quarter of the memory's speed. What leaves the package is canonical (contract 3.5).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from minfer.format import BLOCK, BLOCK_BYTES, Bytes, Int32, KvFormat, Region
from minfer.kernels_triton._arguments import (
    LAYOUT,
    check_region,
    checked_cells,
    home,
    interpreted,
    plane_shapes,
    tensor,
)
from minfer.ops.cell_arguments import check_bytes, check_fill

__all__ = ["LAYOUT"]

READS_PACKED_KV = True
SUPPORTS_ATTN_SPAN = True
SCALE_BYTES = BLOCK_BYTES - BLOCK


def compute_capability() -> tuple[int, int] | None:
    """That of the GPU the kernels run on; None under Triton's interpreter."""
    return None if home().type == "cpu" else torch.cuda.get_device_capability(home())


def array_type() -> type:
    """The class of this package's arrays."""
    return torch.Tensor


def from_host(array: NDArray[Any]) -> torch.Tensor:
    """A numpy array as a tensor where kernels run."""
    return tensor(array, "the array")


def to_host(array: Any) -> NDArray[Any]:
    """A tensor as numpy."""
    host: NDArray[Any] = array.cpu().numpy() if isinstance(array, torch.Tensor) else array
    return host


def empty_regions(
    count: int, fmt: KvFormat, n_cells: int, n_head_kv: int, head_dim: int, fill: float = 0.0
) -> list[Region]:
    """Regions of `n_cells` cells of n_head_kv * head_dim elements, all 0.0 or all NaN (`fill`)."""
    check_fill(fill)
    return [empty_region(fmt, n_cells, n_head_kv, head_dim, fill) for _ in range(count)]


def empty_region(
    fmt: KvFormat, n_cells: int, n_head_kv: int, head_dim: int, fill: float = 0.0
) -> Region:
    """One region, see `empty_regions`."""
    check_fill(fill)
    planes = tuple(
        torch.zeros(shape, dtype=dtype, device=home())
        for shape, dtype in plane_shapes(fmt, n_cells, n_head_kv * head_dim)
    )
    region = Region(fmt, LAYOUT, n_head_kv, head_dim, planes)
    _fill(region, slice(None), fill)
    return region


def _fill(region: Region, cells: Any, fill: float) -> None:
    """Every element of the cells becomes `fill`, padding zero."""
    *codes, last = region.arrays
    for plane in codes:
        plane[cells] = 0
    last[cells] = 0
    used = region.row_elems // BLOCK if codes else region.row_elems
    if math.isnan(fill):
        last[:, :used][cells] = fill


def clear_cells(region: Region, cells: Int32, fill: float = 0.0) -> Region:
    """Set every element of the cells to 0.0 or NaN, padding to zero; the region, in place."""
    check_fill(fill)
    check_region(region, region.fmt)
    _fill(region, checked_cells(region, cells).long(), fill)
    return region


def read_cells(region: Region, cells: Int32) -> Bytes:
    """A copy of the cells, canonical: uint8 [n, cell_bytes]."""
    check_region(region, region.fmt)
    index = checked_cells(region, cells).long()
    planes = [to_host(plane[index]) for plane in region.arrays]
    if region.fmt is not KvFormat.Q8_0:
        return planes[0].view(np.uint8)
    codes, scales = planes
    n, blocks = len(codes), region.row_elems // BLOCK
    packed = np.empty((n, blocks, BLOCK_BYTES), np.uint8)
    packed[..., :SCALE_BYTES] = scales[:, :blocks, None].copy().view(np.uint8)
    packed[..., SCALE_BYTES:] = codes.reshape(n, blocks, BLOCK).view(np.uint8)
    canonical = np.zeros((n, region.row_bytes), np.uint8)
    canonical[:, : blocks * BLOCK_BYTES] = packed.reshape(n, blocks * BLOCK_BYTES)
    return canonical


def write_cells(region: Region, cells: Int32, rows: Bytes) -> Region:
    """Put canonical bytes uint8 [n, cell_bytes] into the cells, verbatim; the region, in place."""
    check_region(region, region.fmt)
    index = checked_cells(region, cells).long()
    rows = np.asarray(rows)
    check_bytes(region, rows, len(index))
    for plane, part in zip(region.arrays, _as_planes(region, rows), strict=True):
        plane[index] = from_host(part)
    return region


def _as_planes(region: Region, rows: Bytes) -> tuple[NDArray[Any], ...]:
    """Canonical rows as the planes of a region."""
    if region.fmt is not KvFormat.Q8_0:
        dtype = np.float32 if region.fmt is KvFormat.F32 else np.float16
        return (np.ascontiguousarray(rows).view(dtype),)
    n, blocks = len(rows), region.row_elems // BLOCK
    packed = rows[:, : blocks * BLOCK_BYTES].reshape(n, blocks, BLOCK_BYTES)
    codes = packed[..., SCALE_BYTES:].reshape(n, region.row_elems).view(np.int8)
    scales = np.zeros((n, region.arrays[1].shape[1]), np.float16)
    scales[:, :blocks] = np.ascontiguousarray(packed[..., :SCALE_BYTES]).view(np.float16)[..., 0]
    return codes, scales


def decode_cells(region: Region, cells: Int32) -> torch.Tensor:
    """The rows in the cells, decoded exactly: f32 [n, n_head_kv, head_dim]."""
    check_region(region, region.fmt)
    index = checked_cells(region, cells).long()
    rows, blocks = region.arrays[0][index], region.row_elems // BLOCK
    decoded = rows[:, : region.row_elems].float()
    if region.fmt is KvFormat.Q8_0:
        scales = region.arrays[1][index][:, :blocks].float()
        decoded = (decoded.view(-1, blocks, BLOCK) * scales[..., None]).flatten(1)
    shaped: torch.Tensor = decoded.reshape(len(index), region.n_head_kv, region.head_dim)
    return shaped


def environment() -> dict[str, str]:
    """What a bug report about this backend needs: versions, the GPU and its memory."""
    import triton

    found = {"triton": triton.__version__, "torch": torch.__version__}
    if home().type == "cpu":
        return {**found, "runs in": "Triton's interpreter" if interpreted() else "nothing: no GPU"}
    properties: Any = torch.cuda.get_device_properties(home())
    return {
        **found,
        "cuda": str(torch.version.cuda),
        "gpu": properties.name,
        "compute capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": str(properties.multi_processor_count),
        "memory": f"{properties.total_memory / 2**30:.0f} GiB",
    }
