"""What launchers take, checked, as mlx arrays.

Host arrays (numpy) are looked at and copied. mlx arrays are taken as they are: to look at their
values would stop the GPU, so whoever made them has checked them (contract 7.5).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx
import numpy as np

from minfer.format import Int32, KvFormat, Region, word
from minfer.ops import arguments, cell_arguments
from minfer.ops.arguments import host_int32s
from minfer.ops.cell_arguments import check_layout, check_planes
from minfer.planes import LAYOUT

STORED = {KvFormat.F32: mx.float32, KvFormat.F16: mx.float16, KvFormat.Q8_0: mx.uint8}


def host(array: Any) -> bool:
    """Whether an array is on the host: anything but an mlx array."""
    return not isinstance(array, mx.array)


def tensor(array: Any) -> mx.array:
    """The array as an mlx array of the same type."""
    return mx.array(np.ascontiguousarray(array)) if host(array) else cast(mx.array, array)


def floats(array: Any, name: str, n_dims: int) -> mx.array:
    """float32 of so many dimensions; another type is refused, not cast (contract 4.2)."""
    given = np.asarray(array) if host(array) else array
    if word(given.dtype) != "float32":
        arguments.refuse_type(name, "float32", word(given.dtype))
    if given.ndim != n_dims:
        arguments.refuse_dimensions(given.shape, name, n_dims)
    return tensor(given)


rows = floats  # MLX copies what a kernel cannot read where it lies


def int32s(array: Any, name: str, n_dims: int | None = 1) -> mx.array:
    """Whole numbers as an int32 array of mlx."""
    if host(array):
        return tensor(host_int32s(array, name, n_dims))
    if array.dtype != mx.int32:
        arguments.refuse_fractions(name, word(array.dtype))
    if n_dims is not None and array.ndim != n_dims:
        arguments.refuse_dimensions(array.shape, name, n_dims)
    return cast(mx.array, array)


def stored(weight: Any, fmt: KvFormat) -> tuple[mx.array, int]:
    """A matrix of `fmt`, and its n_in.

    float32 and float16 are [n_out, n_in], q8_0 is uint8 [n_out, n_in / 32 * 34]: whole blocks
    without padding, as in a GGUF file.
    """
    given, wanted = (np.asarray(weight) if host(weight) else weight), word(STORED[fmt])
    if word(given.dtype) != wanted:
        arguments.refuse_weight_type(fmt, wanted, word(given.dtype))
    if given.ndim != 2:
        arguments.refuse_dimensions(given.shape, "weight", 2)
    return tensor(given), arguments.n_in_of(given.shape, fmt)


def product(weight: Any, x: Any, fmt: KvFormat) -> tuple[mx.array, mx.array]:
    """`stored` and rows f32 [n, n_in] of the same n_in."""
    matrix, n_in = stored(weight, fmt)
    x = floats(x, "x", 2)
    arguments.check_product(fmt, len(matrix), n_in, x.shape)
    return matrix, x


# -- regions --------------------------------------------------------------------------------------


def check_region(region: Region, fmt: KvFormat) -> None:
    """Refuse a region of another format or layout, or whose arrays are not what its sizes say."""
    check_layout(region, fmt, LAYOUT)
    ours = [plane for plane in region.arrays if isinstance(plane, mx.array)]
    check_planes(region, tuple((tuple(plane.shape), word(plane.dtype)) for plane in ours))


def planes(region: Region) -> tuple[mx.array, mx.array]:
    """Rows and scales of a region; rows again where there are no scales."""
    return region.arrays[0], region.arrays[-1]


def put(region: Region, cells: mx.array, stored: Sequence[mx.array]) -> None:
    """Stored rows, plane by plane, into the cells int32 [n], in place; one row is put into each.

    MLX writes into the buffer of a plane if nothing else holds it when the rows are evaluated.
    """
    for plane, rows in zip(region.arrays, stored, strict=True):
        plane[cells] = rows


def checked_cells(region: Region, cells: Any) -> mx.array:
    """The cells as int32 [n]; a host array is refused if one is outside the region."""
    if not host(cells):
        return int32s(cells, "cells")
    return tensor(cell_arguments.host_cells(cells, region.n_cells))


def checked_moves(region: Region, moves: Any) -> Int32:
    """The moves as int32 [n, 3] on the host, refused if one of them leaves the region."""
    return cell_arguments.host_moves(np.array(moves), region.n_cells)
