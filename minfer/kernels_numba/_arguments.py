"""What launchers take, checked: kernels do not raise, and their types are fixed at the first call.

Arrays come out C-contiguous and writable, weights read-only, as a loaded model's are.
"""

from __future__ import annotations

from typing import Any, NoReturn, cast

import numpy as np

from minfer.errors import Refusal
from minfer.format import BLOCK, BLOCK_BYTES, Bytes, Floats, Int32, KvFormat, Region
from minfer.kernels_numba._jit import kernel

F32, I32, U8 = np.dtype(np.float32), np.dtype(np.int32), np.dtype(np.uint8)
STORED = {KvFormat.F32: F32, KvFormat.F16: np.dtype(np.float16), KvFormat.Q8_0: U8}


@kernel
def first_outside(values: Any, limit: Any) -> int:
    """Index of the first value that is not in [0, limit), or -1."""
    for i in range(values.size):
        if values[i] < 0 or values[i] >= limit:
            return i
    return -1


@kernel
def first_repeated(values: Any, limit: Any) -> int:
    """Index of the first value in [0, limit) that stands before already, or -1."""
    seen = np.zeros(limit, np.bool_)
    for i in range(values.size):
        if seen[values[i]]:
            return i
        seen[values[i]] = True
    return -1


@kernel
def first_beyond(moves: Any, n_cells: Any) -> int:
    """Index of the first (src, dst, rows) of `moves` that leaves the n_cells cells, or -1."""
    for i in range(moves.shape[0]):
        src, dst, rows = moves[i, 0], moves[i, 1], moves[i, 2]
        if min(src, dst, rows) < 0 or max(src, dst) + rows > n_cells:
            return i
    return -1


def _fits(array: Any, dtype: Any, n_dims: int | None) -> bool:
    """Whether a kernel takes the array as it is: the usual case, told in a fraction of a µs."""
    return (
        type(array) is np.ndarray
        and array.dtype is dtype
        and array.ndim == n_dims
        and array.flags.carray
    )


def owned(array: Any) -> Any:
    """The array itself if it is contiguous, aligned and writable; else a copy that is."""
    return array if array.flags.carray else array.copy()


def int32s(array: Any, name: str, n_dims: int | None = 1) -> Int32:
    """Whole numbers as int32; refuses other types, other dimensions and what int32 cannot hold."""
    if _fits(array, I32, n_dims):
        return cast(Int32, array)
    array = np.asarray(array)
    if n_dims is not None and array.ndim != n_dims:
        _refuse_dimensions(array, name, n_dims)
    if array.dtype != I32:
        array = _narrowed(array, name)
    return cast(Int32, owned(array))


def _narrowed(array: Any, name: str) -> Int32:
    """Other whole numbers as int32, to the same values."""
    if array.dtype.kind not in "iu" and array.size:
        raise Refusal(
            "10",
            f"{name} must be whole numbers (int32), not {array.dtype}",
            {"name": name, "dtype": str(array.dtype)},
        )
    for value in (array.min(), array.max()) if array.size else ():
        if not -(2**31) <= int(value) < 2**31:
            raise Refusal(
                "10",
                f"{value} in {name} does not fit into int32",
                {"name": name, "value": int(value)},
            )
    return cast(Int32, array.astype(I32))


def floats(array: Any, name: str, n_dims: int) -> Floats:
    """float32 of so many dimensions; another type is refused, not cast (contract 4.2)."""
    if _fits(array, F32, n_dims):
        return cast(Floats, array)
    return cast(Floats, owned(_float32(array, name, n_dims)))


def read_only(array: Any, name: str, n_dims: int) -> Floats:
    """float32 as a contiguous view that cannot be written.

    A loaded model's weights cannot be either; workers know arrays of one mutability.
    """
    view = np.ascontiguousarray(_float32(array, name, n_dims)).view()
    view.flags.writeable = False
    return view


def stored(weight: Any, fmt: KvFormat) -> tuple[Bytes, int]:
    """A matrix of `fmt` as its bytes, uint8 [n_out, bytes of a row], and its n_in.

    float32 and float16 are [n_out, n_in], q8_0 is uint8 [n_out, n_in / 32 * 34]: whole blocks
    without padding, as in a GGUF file. The bytes are read-only, as a loaded model's are.
    """
    weight = np.asarray(weight)
    if weight.dtype != STORED[fmt]:
        raise Refusal(
            "4.2",
            f"a weight in {fmt} is {STORED[fmt]}, not {weight.dtype}; convert before the call",
            {"fmt": fmt.value, "dtype": str(weight.dtype)},
        )
    if weight.ndim != 2:
        _refuse_dimensions(weight, "weight", 2)
    view = (weight if weight.flags.c_contiguous else weight.copy()).view(U8)
    if view.flags.writeable:
        view.flags.writeable = False
    if fmt is not KvFormat.Q8_0:
        return view, weight.shape[1]
    if weight.shape[1] % BLOCK_BYTES:
        raise Refusal(
            "3.3",
            f"q8_0 rows of {weight.shape[1]} bytes are not whole blocks of {BLOCK_BYTES}",
            {"shape": weight.shape},
        )
    return view, weight.shape[1] // BLOCK_BYTES * BLOCK


def product(weight: Any, x: Any, fmt: KvFormat) -> tuple[Bytes, Floats]:
    """`stored` and rows f32 [n, n_in] of the same n_in."""
    matrix, n_in = stored(weight, fmt)
    x = floats(x, "x", 2)
    if n_in != x.shape[1]:
        raise Refusal(
            "10",
            f"a {fmt} weight of {len(matrix)} rows of {n_in} cannot multiply rows {list(x.shape)}",
            {"weight": (len(matrix), n_in), "x": x.shape},
        )
    return matrix, x


def _float32(array: Any, name: str, n_dims: int) -> Any:
    array = np.asarray(array)
    if array.dtype != F32:
        raise Refusal(
            "4.2",
            f"{name} must be float32, not {array.dtype}; convert before the call",
            {"name": name, "dtype": str(array.dtype)},
        )
    if array.ndim != n_dims:
        _refuse_dimensions(array, name, n_dims)
    return array


def _refuse_dimensions(array: Any, name: str, n_dims: int) -> NoReturn:
    raise Refusal(
        "10",
        f"{name} must have {n_dims} dimensions, not {list(array.shape)}",
        {"name": name, "shape": array.shape, "n_dims": n_dims},
    )


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


def checked_moves(region: Region, moves: Any) -> Int32:
    """The moves as int32 [n, 3], refused if one of them leaves the region."""
    checked = int32s(moves, "moves", 2)
    if checked.shape[1] != 3:
        raise Refusal(
            "5.6",
            f"moves {list(checked.shape)} must be [n, 3]: src, dst and rows of each",
            {"shape": checked.shape},
        )
    bad = first_beyond(checked, region.n_cells)
    if bad >= 0:
        src, dst, rows = checked[bad].tolist()
        raise Refusal(
            "5.6",
            f"move {bad} of {rows} rows from cell {src} to {dst} does not lie in the region of "
            f"{region.n_cells} cells",
            {"move": bad, "src": src, "dst": dst, "rows": rows, "n_cells": region.n_cells},
        )
    return checked


def checked_turn(region: Region, cells: Any, cos: Any, sin: Any) -> tuple[Int32, Floats, Floats]:
    """Cells of a q8_0 region, each named once, and the table row that turns their heads."""
    cells = checked_cells(region, cells)
    bad = first_repeated(cells, region.n_cells)
    if bad >= 0:
        raise Refusal(
            "5.7",
            f"cell {cells[bad]} of row {bad} was named before; a call turns a cell once",
            {"cell": int(cells[bad]), "row": bad},
        )
    cos, sin = read_only(cos, "cos", 2), read_only(sin, "sin", 2)
    if cos.shape != sin.shape or len(cos) != 1 or 2 * cos.shape[1] > region.head_dim:
        raise Refusal(
            "5.7",
            f"tables {list(cos.shape)} and {list(sin.shape)} are not one row of the pairs of "
            f"heads of {region.head_dim}",
            {"cos": cos.shape, "sin": sin.shape, "head_dim": region.head_dim},
        )
    return cells, cos, sin
