"""Rows of words from where they lie to another place, each move like memmove (contract 5.6)."""

import itertools

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

OVER_ROWS = (16, 128)  # rows and words of a program where rows are spread over the grid
OVER_COLUMNS = (1024, 8)  # and where it owns columns: 8 words are a sector of memory
MOVE_WARPS = {OVER_ROWS: 4, OVER_COLUMNS: 8}
FEW_ROWS = 64  # a shorter move is no work for a launch of its own


@triton.jit
def _move_cells_rows_kernel(
    plane,  # int32 [n_cells, words]
    moves,  # int32 [n, 3]
    first,
    last,
    words,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Moves first, .. last - 1 in order; programs of one column share the rows of each.

    Rows go in the direction in which none is written before it is read.
    """
    group, n_groups = tl.program_id(0), tl.num_programs(0)
    column = tl.program_id(1) * WORDS + tl.arange(0, WORDS)[None, :]
    for i in range(first, last):
        src, dst, n = tl.load(moves + 3 * i), tl.load(moves + 3 * i + 1), tl.load(moves + 3 * i + 2)
        n_blocks = tl.cdiv(n, ROWS)
        for b in range(group, n_blocks, n_groups):
            block = tl.where(dst > src, n_blocks - 1 - b, b)
            row = (block * ROWS + tl.arange(0, ROWS))[:, None]
            mask = (row < n) & (column < words)
            held = tl.load(plane + (src + row).to(tl.int64) * words + column, mask=mask)
            tl.debug_barrier()  # all of the block is read before any of it is written
            tl.store(plane + (dst + row).to(tl.int64) * words + column, held, mask=mask)
        tl.debug_barrier()  # the next move may read what this one wrote


def launches(moves: NDArray[np.int32]) -> list[tuple[int, int, int]]:
    """Moves by launch, as (first, last + 1, rows that are spread over the grid).

    A long move that does not overlap itself has a launch of its own; others share one, in which
    each program walks all rows of its columns.
    """
    src, dst, n_rows = moves.astype(np.int64).T
    alone = (abs(src - dst) >= n_rows) & (n_rows >= FEW_ROWS)
    found, first = [], 0
    for spread, run in itertools.groupby(alone.tolist()):
        last = first + len(list(run))
        if spread:
            found += [(i, i + 1, int(n_rows[i])) for i in range(first, last)]
        else:
            found.append((first, last, 1))
        first = last
    return found


def move_words(
    plane: torch.Tensor, moves: torch.Tensor, first: int, last: int, n_rows: int
) -> None:
    """One of `launches` over a plane int32 [n_cells, words]. moves: int32 [n, 3]."""
    n_words = plane.shape[1]
    tile = OVER_ROWS if n_rows > 1 else OVER_COLUMNS
    words = min(tile[1], triton.next_power_of_2(n_words))
    block = tile[0] * tile[1] // words
    _move_cells_rows_kernel[(triton.cdiv(n_rows, block), triton.cdiv(n_words, words))](
        plane,
        moves,
        first,
        last,
        n_words,
        ROWS=block,
        WORDS=words,
        num_warps=MOVE_WARPS[tile],
        enable_fp_fusion=False,
    )
