"""The CPU backend: kernels in Numba, and the array helpers that a store asks of every backend.

Arrays are numpy arrays. A region is one uint8 array [n_cells, cell_bytes] in canonical layout,
so host copies are plain reads. Numba is imported by the submodules, not here.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minfer.format import Bytes, Floats, Int32, KvFormat, Region, cell_bytes
from minfer.memory import zeroed
from minfer.ops.cell_arguments import check_bytes, check_fill

LAYOUT = "canonical"
NUMERIC = ("numba", "llvmlite", "isa")  # of `environment`, what the bits of answers depend on
READS_PACKED_KV = True
SUPPORTS_ATTN_SPAN = True


def empty_regions(
    count: int, fmt: KvFormat, n_cells: int, n_head_kv: int, head_dim: int, fill: float = 0.0
) -> list[Region]:
    """Regions of `n_cells` cells of n_head_kv * head_dim elements, all 0.0 or all NaN (`fill`)."""
    check_fill(fill)
    width = cell_bytes(fmt, n_head_kv * head_dim)
    arenas = [flat.reshape(n_cells, width) for flat in zeroed([n_cells * width] * count)]
    regions = [Region(fmt, LAYOUT, n_head_kv, head_dim, (arena,)) for arena in arenas]
    if math.isnan(fill) and n_cells:
        for region in regions:
            clear_cells(region, np.zeros(1, np.int32), fill)
            region.arrays[0][1:] = region.arrays[0][0]
    return regions


def empty_region(
    fmt: KvFormat, n_cells: int, n_head_kv: int, head_dim: int, fill: float = 0.0
) -> Region:
    """One region, see `empty_regions`."""
    return empty_regions(1, fmt, n_cells, n_head_kv, head_dim, fill)[0]


def clear_cells(region: Region, cells: Int32, fill: float = 0.0) -> Region:
    """Set every element of the cells to 0.0 or NaN, padding to zero; the region, in place."""
    from minfer.kernels_numba.cells import store_cells_rows

    check_fill(fill)
    rows = np.full((np.size(cells), region.n_head_kv, region.head_dim), fill, np.float32)
    return store_cells_rows(region, rows, cells, fmt=region.fmt, config={"threads": 1})


def compute_capability() -> tuple[int, int] | None:
    """That of the GPU the kernels run on; none here."""
    return None


def array_type() -> type:
    """The class of this package's arrays."""
    return np.ndarray


def from_host(array: NDArray[Any]) -> Any:
    """A numpy array as a backend array; here it is one."""
    return array


def to_host(array: Any) -> NDArray[Any]:
    """A backend array as numpy; here it is one."""
    return np.asarray(array)


def read_cells(region: Region, cells: Int32) -> Bytes:
    """A copy of the cells, canonical: uint8 [n, cell_bytes]."""
    from minfer.kernels_numba._arguments import checked_cells

    return np.asarray(region.arrays[0][checked_cells(region, cells)])


def write_cells(region: Region, cells: Int32, rows: Bytes) -> Region:
    """Put canonical bytes uint8 [n, cell_bytes] into the cells, verbatim; the region, in place."""
    from minfer.kernels_numba._arguments import checked_cells

    cells = checked_cells(region, cells)
    rows = np.asarray(rows)
    check_bytes(region, rows, len(cells))
    region.arrays[0][cells] = rows
    return region


def decode_cells(region: Region, cells: Int32) -> Floats:
    """The rows in the cells, decoded exactly: f32 [n, n_head_kv, head_dim]."""
    from minfer.kernels_numba.cells import load_cells

    return load_cells(region, cells, threads=1)


def environment() -> dict[str, str]:
    """What a bug report about this backend needs: versions, CPU, instructions, threads."""
    import llvmlite
    import numba as numba_package
    from numba.core.registry import cpu_target

    from minfer.kernels_numba._cache import cache_folder
    from minfer.kernels_numba._emit import Isa
    from minfer.kernels_numba._jit import load_tbb

    load_tbb()  # before the pool starts, as it is for every kernel
    numba: Any = numba_package  # its own hints are partial
    codegen = cpu_target.target_context.codegen()
    threads = numba.get_num_threads()  # starts the pool, after which its layer is known
    return {
        "numba": numba.__version__,
        "llvmlite": llvmlite.__version__,
        "cpu": codegen.magic_tuple()[1],
        "isa": str(Isa.of(codegen)),
        "threads": str(threads),
        "threading layer": numba.threading_layer(),
        "kernel cache": str(cache_folder()),
    }
