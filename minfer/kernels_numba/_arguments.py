"""What launchers take, checked: kernels do not raise, and their types are fixed at the first call.

Arrays come out C-contiguous and writable, weights read-only (they may be mapped from a file).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from minfer.errors import Refusal
from minfer.format import Floats, Int32, KvFormat, Region
from minfer.kernels_numba._jit import kernel


@kernel
def first_outside(values: Any, limit: Any) -> int:
    """Index of the first value that is not in [0, limit), or -1."""
    for i in range(values.size):
        if values[i] < 0 or values[i] >= limit:
            return i
    return -1


def owned(array: Any, dtype: Any) -> Any:
    """The array as `dtype`, contiguous and writable; a copy only where it is not."""
    array = np.ascontiguousarray(array, dtype)
    return array if array.flags.writeable else array.copy()


def int32s(array: Any, name: str, n_dims: int | None = 1) -> Int32:
    """Whole numbers as int32; refuses other types, other dimensions and what int32 cannot hold."""
    array = np.asarray(array)
    if array.dtype.kind not in "iu" and array.size:
        raise Refusal(
            "10",
            f"{name} must be whole numbers (int32), not {array.dtype}",
            {"name": name, "dtype": str(array.dtype)},
        )
    if n_dims is not None and array.ndim != n_dims:
        raise Refusal(
            "10",
            f"{name} must have {n_dims} dimensions, not {list(array.shape)}",
            {"name": name, "shape": array.shape, "n_dims": n_dims},
        )
    if array.dtype != np.int32:
        for value in (array.min(), array.max()) if array.size else ():
            if not -(2**31) <= int(value) < 2**31:
                raise Refusal(
                    "10",
                    f"{value} in {name} does not fit into int32",
                    {"name": name, "value": int(value)},
                )
    result: Int32 = owned(array, np.int32)
    return result


def floats(array: Any, name: str, n_dims: int) -> Floats:
    """float32 of so many dimensions; another type is refused, not cast (contract 4.2)."""
    result: Floats = owned(_float32(array, name, n_dims), np.float32)
    return result


def read_only(array: Any, name: str, n_dims: int) -> Floats:
    """float32 as a contiguous view that cannot be written.

    Numba compiles once more for arrays that are mapped read-only from a file; passing every
    weight as read-only leaves one signature.
    """
    view = np.ascontiguousarray(_float32(array, name, n_dims)).view()
    view.flags.writeable = False
    return view


def _float32(array: Any, name: str, n_dims: int) -> Any:
    array = np.asarray(array)
    if array.dtype != np.float32:
        raise Refusal(
            "4.2",
            f"{name} must be float32, not {array.dtype}; convert before the call",
            {"name": name, "dtype": str(array.dtype)},
        )
    if array.ndim != n_dims:
        raise Refusal(
            "10",
            f"{name} must have {n_dims} dimensions, not {list(array.shape)}",
            {"name": name, "shape": array.shape, "n_dims": n_dims},
        )
    return array


def check_region(region: Region, fmt: KvFormat) -> None:
    """Refuse a region of another format or layout, or whose array is not what its sizes say."""
    if region.fmt is not fmt or region.layout != "canonical":
        raise Refusal(
            "3.2",
            f"this call wants canonical {fmt} cells and the region holds {region.layout} "
            f"{region.fmt}",
            {"fmt": fmt.value, "region": region.fmt.value, "layout": region.layout},
        )
    cells = region.arrays[0]
    fits = cells.dtype == np.uint8 and cells.flags.c_contiguous and cells.ndim == 2
    if not fits or cells.shape[1] != region.row_bytes:
        raise Refusal(
            "3.5",
            f"a {fmt} region of {region.n_head_kv} heads of {region.head_dim} is contiguous uint8 "
            f"[n_cells, {region.row_bytes}], not {cells.dtype} {list(cells.shape)}",
            {"shape": cells.shape, "row_bytes": region.row_bytes},
        )


def check_pair(k: Region, v: Region) -> None:
    """Refuse K and V regions of different heads."""
    if (k.n_head_kv, k.head_dim) != (v.n_head_kv, v.head_dim):
        raise Refusal(
            "10",
            f"K has {k.n_head_kv} heads of {k.head_dim}, V has {v.n_head_kv} of {v.head_dim}",
            {"k": (k.n_head_kv, k.head_dim), "v": (v.n_head_kv, v.head_dim)},
        )


def checked_cells(region: Region, cells: Any) -> Int32:
    """The cells as int32 [n], refused if one is outside the region."""
    checked = int32s(cells, "cells")
    bad = first_outside(checked, region.n_cells)
    if bad >= 0:
        raise Refusal(
            "2.5",
            f"cell {checked[bad]} of row {bad} is outside the region of {region.n_cells} cells",
            {"cell": int(checked[bad]), "row": int(bad), "n_cells": region.n_cells},
        )
    return checked
