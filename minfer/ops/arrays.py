"""What launchers over arrays of an accelerator check of rows, cells and tables.

A package gives its module `_arguments`, which knows its arrays. Values are looked at where an array
lies on the host; whoever filled one that lies where kernels run has checked it (contract 7.5).
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from minfer.format import KvFormat, Region, refuse_odd_blocks
from minfer.ops import arguments, cell_arguments
from minfer.ops.arguments import host_int32s
from minfer.ops.table import check_pairing


class Arguments(Protocol):
    """What a kernel package knows of its arrays: its module `_arguments`.

    rows: `floats` that a kernel may read where they lie, as parts of wider ones.
    """

    def host(self, array: Any, /) -> bool: ...
    def floats(self, array: Any, name: str, n_dims: int, /) -> Any: ...
    def rows(self, array: Any, name: str, n_dims: int, /) -> Any: ...
    def int32s(self, array: Any, name: str, n_dims: int | None = 1, /) -> Any: ...
    def check_region(self, region: Region, fmt: KvFormat, /) -> None: ...
    def checked_cells(self, region: Region, cells: Any, /) -> Any: ...


def checked_rope(
    own: Arguments, x: Any, positions: Any, cos: Any, sin: Any, pairing: str
) -> tuple[Any, Any, Any]:
    """Positions int32 [n] of the rows x [n, n_head, d], and tables f32 [n_pos, n_pairs].

    Refuses what does not fit.
    """
    check_pairing(pairing)
    looked_at = own.host(positions)
    if looked_at:
        positions = host_int32s(positions, "positions")
    at = own.int32s(positions, "positions")
    cos, sin = own.floats(cos, "cos", 2), own.floats(sin, "sin", 2)
    arguments.check_rope(x.shape, len(at), cos.shape, sin.shape)
    if looked_at:
        arguments.check_positions(positions, len(cos))
    return at, cos, sin


def checked_turn(
    own: Arguments, region: Region, cells: Any, cos: Any, sin: Any
) -> tuple[Any, Any, Any]:
    """Cells int32 [n] of a q8_0 region, each named once, and the table row that turns them."""
    checked = own.checked_cells(region, cells)
    if own.host(cells):
        cell_arguments.check_once(np.asarray(cells))
    cos, sin = own.floats(cos, "cos", 2), own.floats(sin, "sin", 2)
    cell_arguments.check_turn(cos.shape, sin.shape, region.head_dim)
    return checked, cos, sin


def checked_rows(own: Arguments, region: Region, given: Any, name: str, n: int) -> Any:
    """Rows f32 [n, n_head_kv, d] for `n` cells of the region."""
    found = own.rows(given, name, 3)
    cell_arguments.check_rows(region, name, found.shape, n)
    return found


def checked_store(
    own: Arguments,
    q: Any,
    k: Any,
    v: Any,
    k_region: Region,
    v_region: Region,
    cells: Any,
    fmt: KvFormat,
) -> tuple[Any, Any, Any, Any]:
    """Rows q, k, v [n, heads, d] and the cells int32 [n] that k and v go to."""
    for region in (k_region, v_region):
        own.check_region(region, fmt)
    cell_arguments.check_pair(k_region, v_region)
    refuse_odd_blocks(fmt, k_region.head_dim, k_region.row_elems)
    smaller = k_region if k_region.n_cells < v_region.n_cells else v_region
    cells = own.checked_cells(smaller, cells)
    k = checked_rows(own, k_region, k, "k", len(cells))
    v = checked_rows(own, v_region, v, "v", len(cells))
    q = own.rows(q, "q", 3)
    cell_arguments.check_heads(k_region, q.shape, len(cells))
    return q, k, v, cells
