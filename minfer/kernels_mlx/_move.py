"""Rows of planes taken out, and moves cut into batches that are taken and put (contract 5.6)."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import numpy as np

from minfer.format import Int32, Region

BATCH_BYTES = 2 << 20  # that are out of their region at a time


def batch_rows(region: Region) -> int:
    """Cells that may be out of the region at a time."""
    return max(1, BATCH_BYTES // region.row_bytes)


def taken(region: Region, cells: mx.array) -> list[mx.array]:
    """Copies of the rows in the cells, plane by plane, finished.

    MLX holds what unfinished work reads, and a `put` into it would copy the whole plane.
    """
    rows = [plane[cells] for plane in region.arrays]
    mx.eval(rows)
    mx.synchronize()  # on a GPU `eval` returns before what has been read is let go
    return rows


def batches(moves: Int32, n_cells: int, most: int) -> Iterator[tuple[Int32, Int32]]:
    """Moves int32 [n, 3] as batches of `most` rows at most: cells they come from and go to.

    A batch may be taken before any of it is put: no piece of a move in it comes from cells, or
    goes to some, that a piece before it goes to. Batch after batch acts as the moves in order,
    each like memmove.
    """
    written, n_held = np.zeros(n_cells, bool), 0
    held: list[tuple[int, int, int]] = []
    for src, dst, rows in _pieces(moves, most):
        meets = written[src : src + rows].any() or written[dst : dst + rows].any()
        if meets or n_held + rows > most:
            yield _joined(held)
            for _, start, n in held:
                written[start : start + n] = False
            held, n_held = [], 0
        written[dst : dst + rows] = True
        held.append((src, dst, rows))
        n_held += rows
    if held:
        yield _joined(held)


def _pieces(moves: Int32, most: int) -> Iterator[tuple[int, int, int]]:
    """The moves, those of more than `most` rows in pieces, none written before it is read."""
    for src, dst, rows in moves.tolist():
        starts = range(0, rows if src != dst else 0, most)
        for at in reversed(starts) if dst > src else starts:
            yield src + at, dst + at, min(most, rows - at)


def _joined(pieces: list[tuple[int, int, int]]) -> tuple[Int32, Int32]:
    src, dst = (
        np.concatenate(
            [np.arange(piece[i], piece[i] + piece[2], dtype=np.int32) for piece in pieces]
        )
        for i in (0, 1)
    )
    return src, dst
