"""What launchers take, checked: kernels do not raise, and their types are fixed at the first call.

Arrays come out C-contiguous and writable, weights read-only, as a loaded model's are.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from minfer.errors import Refusal
from minfer.format import Bytes, Floats, Int32, KvFormat, Region
from minfer.kernels_numba._jit import kernel
from minfer.ops import arguments, cell_arguments

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
        arguments.refuse_dimensions(array.shape, name, n_dims)
    if array.dtype != I32:
        array = arguments.narrowed(array, name)
    return cast(Int32, owned(array))


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
        arguments.refuse_weight_type(fmt, str(STORED[fmt]), str(weight.dtype))
    if weight.ndim != 2:
        arguments.refuse_dimensions(weight.shape, "weight", 2)
    view = (weight if weight.flags.c_contiguous else weight.copy()).view(U8)
    if view.flags.writeable:
        view.flags.writeable = False
    return view, arguments.n_in_of(weight.shape, fmt)


def product(weight: Any, x: Any, fmt: KvFormat) -> tuple[Bytes, Floats]:
    """`stored` and rows f32 [n, n_in] of the same n_in."""
    matrix, n_in = stored(weight, fmt)
    x = floats(x, "x", 2)
    arguments.check_product(fmt, len(matrix), n_in, x.shape)
    return matrix, x


def _float32(array: Any, name: str, n_dims: int) -> Any:
    array = np.asarray(array)
    if array.dtype != F32:
        arguments.refuse_type(name, "float32", str(array.dtype))
    if array.ndim != n_dims:
        arguments.refuse_dimensions(array.shape, name, n_dims)
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


def checked_cells(region: Region, cells: Any) -> Int32:
    """The cells as int32 [n], refused if one is outside the region."""
    checked = int32s(cells, "cells")
    bad = first_outside(checked, region.n_cells)
    if bad >= 0:
        cell_arguments.refuse_cell(checked[bad], bad, region.n_cells)
    return checked


def checked_moves(region: Region, moves: Any) -> Int32:
    """The moves as int32 [n, 3], refused if one of them leaves the region."""
    checked = int32s(moves, "moves", 2)
    cell_arguments.check_moves_shape(checked.shape)
    bad = first_beyond(checked, region.n_cells)
    if bad >= 0:
        cell_arguments.refuse_move(bad, checked[bad].tolist(), region.n_cells)
    return checked


def checked_turn(region: Region, cells: Any, cos: Any, sin: Any) -> tuple[Int32, Floats, Floats]:
    """Cells of a q8_0 region, each named once, and the table row that turns their heads."""
    cells = checked_cells(region, cells)
    bad = first_repeated(cells, region.n_cells)
    if bad >= 0:
        cell_arguments.refuse_repeated(cells[bad], bad)
    cos, sin = read_only(cos, "cos", 2), read_only(sin, "sin", 2)
    cell_arguments.check_turn(cos.shape, sin.shape, region.head_dim)
    return cells, cos, sin
