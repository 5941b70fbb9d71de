"""The CUDA backend: kernels in Triton, and the array helpers that a store asks of every backend.

Arrays are torch tensors, cells lie in planes (`minfer.planes`). What leaves the package is
canonical (contract 3.5).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from minfer import planes
from minfer.format import BLOCK, Bytes, Int32, KvFormat, Region
from minfer.kernels_triton._arguments import (
    check_region,
    checked_cells,
    home,
    interpreted,
    tensor,
)
from minfer.ops.cell_arguments import check_bytes, check_fill
from minfer.planes import LAYOUT

__all__ = ["LAYOUT"]

NUMERIC = ("triton", "torch", "cuda", "gpu", "runs in")  # of `environment`, what bits depend on
READS_PACKED_KV = True
SUPPORTS_ATTN_SPAN = True


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
    arrays = tuple(
        torch.zeros(shape, dtype=getattr(torch, dtype), device=home())
        for shape, dtype in planes.shapes(fmt, n_cells, n_head_kv * head_dim)
    )
    region = Region(fmt, LAYOUT, n_head_kv, head_dim, arrays)
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
    held = tuple(to_host(plane[index]) for plane in region.arrays)
    return planes.to_canonical(region.fmt, held, region.row_elems)


def write_cells(region: Region, cells: Int32, rows: Bytes) -> Region:
    """Put canonical bytes uint8 [n, cell_bytes] into the cells, verbatim; the region, in place."""
    check_region(region, region.fmt)
    index = checked_cells(region, cells).long()
    rows = np.asarray(rows)
    check_bytes(region, rows, len(index))
    parts = planes.of_canonical(region.fmt, rows, region.row_elems)
    for plane, part in zip(region.arrays, parts, strict=True):
        plane[index] = from_host(part)
    return region


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
