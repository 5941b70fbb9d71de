"""What launchers of every kernel package refuse of numbers, shapes and weights (contract 4.2, 10).

Sizes and numbers come in, arrays stay where they are; `cell_arguments` does the same for cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

from minfer.errors import Refusal
from minfer.format import BLOCK, BLOCK_BYTES, KvFormat

INT32 = np.dtype(np.int32)
Sizes: TypeAlias = Sequence[int]


def refuse_dimensions(shape: Sizes, name: str, n_dims: int) -> NoReturn:
    """Refuse an array of another number of dimensions than `n_dims`."""
    raise Refusal(
        "10",
        f"{name} must have {n_dims} dimensions, not {list(shape)}",
        {"name": name, "shape": tuple(shape), "n_dims": n_dims},
    )


def refuse_type(name: str, wanted: str, dtype: str) -> NoReturn:
    """Refuse numbers of another type: they are not cast (contract 4.2)."""
    raise Refusal(
        "4.2",
        f"{name} must be {wanted}, not {dtype}; convert before the call",
        {"name": name, "dtype": dtype},
    )


def refuse_fractions(name: str, dtype: str) -> NoReturn:
    """Refuse numbers that are not whole."""
    raise Refusal(
        "10",
        f"{name} must be whole numbers (int32), not {dtype}",
        {"name": name, "dtype": dtype},
    )


def narrowed(array: Any, name: str) -> NDArray[np.int32]:
    """Whole numbers as int32, to the same values; refuses what int32 cannot hold."""
    if array.dtype.kind not in "iu" and array.size:
        refuse_fractions(name, str(array.dtype))
    for value in (array.min(), array.max()) if array.size else ():
        if not -(2**31) <= int(value) < 2**31:
            raise Refusal(
                "10",
                f"{value} in {name} does not fit into int32",
                {"name": name, "value": int(value)},
            )
    as_int32: NDArray[np.int32] = array.astype(INT32)
    return as_int32


def host_int32s(array: Any, name: str, n_dims: int | None = 1) -> NDArray[np.int32]:
    """A host array of whole numbers as int32; refuses what int32 cannot hold."""
    array = np.asarray(array)
    if n_dims is not None and array.ndim != n_dims:
        refuse_dimensions(array.shape, name, n_dims)
    return np.ascontiguousarray(narrowed(array, name))


def refuse_weight_type(fmt: KvFormat, wanted: str, dtype: str) -> NoReturn:
    """Refuse a weight of another type than that of its format."""
    raise Refusal(
        "4.2",
        f"a weight in {fmt} is {wanted}, not {dtype}; convert before the call",
        {"fmt": fmt.value, "dtype": dtype},
    )


def n_in_of(shape: Sizes, fmt: KvFormat) -> int:
    """Elements of a row of a weight of `shape`; refuses q8_0 rows that are not whole blocks."""
    if fmt is not KvFormat.Q8_0:
        return shape[1]
    if shape[1] % BLOCK_BYTES:
        raise Refusal(
            "3.3",
            f"q8_0 rows of {shape[1]} bytes are not whole blocks of {BLOCK_BYTES}",
            {"shape": tuple(shape)},
        )
    return shape[1] // BLOCK_BYTES * BLOCK


def check_product(fmt: KvFormat, n_out: int, n_in: int, x: Sizes) -> None:
    """Refuse rows, by their shape, that a weight of n_out rows of n_in cannot multiply."""
    if n_in != x[1]:
        raise Refusal(
            "10",
            f"a {fmt} weight of {n_out} rows of {n_in} cannot multiply rows {list(x)}",
            {"weight": (n_out, n_in), "x": tuple(x)},
        )


def check_rope(x: Sizes, n_positions: int, cos: Sizes, sin: Sizes) -> None:
    """Refuse tables and positions, by their sizes, that do not turn rows [n, n_head, d]."""
    if tuple(cos) != tuple(sin) or 2 * cos[1] > x[2] or n_positions != x[0]:
        raise Refusal(
            "10",
            f"tables {list(cos)} and {list(sin)} and {n_positions} positions do "
            f"not fit rows {list(x)}",
            {"cos": tuple(cos), "sin": tuple(sin), "positions": n_positions, "x": tuple(x)},
        )


def refuse_position(position: int, row: int, n_pos: int) -> NoReturn:
    """Refuse a position that a rope table of n_pos rows does not hold."""
    raise Refusal(
        "7.5",
        f"position {position} of row {row} is not in the rope table of {n_pos}",
        {"position": int(position), "row": int(row), "n_pos": n_pos},
    )


def check_positions(positions: NDArray[np.int32], n_pos: int) -> None:
    """Refuse host positions int32 [n] of which one has no row in a rope table of n_pos rows."""
    bad = np.flatnonzero((positions < 0) | (positions >= n_pos))
    if len(bad):
        refuse_position(positions[bad[0]], bad[0], n_pos)


def host_tokens(tokens: Any, n_vocab: int) -> NDArray[np.int32]:
    """Host tokens as int32 [n], refused if one is outside the vocabulary."""
    checked = host_int32s(tokens, "tokens")
    bad = np.flatnonzero((checked < 0) | (checked >= n_vocab))
    if len(bad):
        refuse_token(checked[bad[0]], n_vocab)
    return checked


def refuse_token(token: int, n_vocab: int) -> NoReturn:
    """Refuse a token outside the vocabulary."""
    raise Refusal(
        "7.5",
        f"token {token} is not in the vocabulary of {n_vocab}",
        {"token": int(token), "n_vocab": n_vocab},
    )


def check_same_shape(a_name: str, a: Sizes, b_name: str, b: Sizes) -> None:
    """Refuse two arrays, by their shapes, that differ."""
    if tuple(a) != tuple(b):
        refuse_shapes(a_name, a, b_name, b)


def refuse_shapes(a_name: str, a: Sizes, b_name: str, b: Sizes) -> NoReturn:
    """Refuse two shapes that do not go together."""
    raise Refusal(
        "10",
        f"shapes {list(a)} of {a_name} and {list(b)} of {b_name} differ",
        {a_name: tuple(a), b_name: tuple(b)},
    )


def check_norm(weight: Sizes, x: Sizes) -> None:
    """Refuse a weight [m], by its shape, that cannot scale rows [n, m]."""
    if tuple(weight) != tuple(x[1:]):
        raise Refusal(
            "10",
            f"a weight of {list(weight)} cannot scale {list(x)}",
            {"weight": tuple(weight), "x": tuple(x)},
        )
