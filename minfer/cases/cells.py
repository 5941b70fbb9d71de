"""Named cases of what is done to cells where they lie: moves, and turns of q8_0 cells."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np

from minfer import reference
from minfer.format import Floats, Int32, KvFormat, Region, cell_bytes
from minfer.ops import HALF, INTERLEAVED


@dataclass(frozen=True)
class MoveCase:
    """Moves (src, dst, rows), carried out in order over `n_cells` cells."""

    name: str
    n_cells: int
    moves: tuple[tuple[int, int, int], ...]

    @property
    def array(self) -> Int32:
        """The moves as int32 [n, 3]."""
        return np.array(self.moves, np.int32).reshape(-1, 3)


MOVE_CASES = (
    MoveCase("none", 3, ()),
    MoveCase("one", 2, ((0, 1, 1),)),
    MoveCase("up", 9, ((0, 2, 6),)),
    MoveCase("down", 9, ((2, 0, 6),)),
    MoveCase("up-by-one", 40, ((0, 1, 39),)),
    MoveCase("down-by-one", 40, ((1, 0, 39),)),
    MoveCase("apart", 9, ((1, 5, 3),)),
    MoveCase("in-place", 9, ((3, 3, 4),)),
    MoveCase("whole", 9, ((0, 0, 9),)),
    MoveCase("zero-rows", 9, ((0, 4, 0), (9, 0, 0), (5, 9, 0))),
    MoveCase("chain", 4, ((0, 1, 1), (1, 2, 1), (2, 3, 1))),
    MoveCase("chain-of-overlaps", 12, ((0, 2, 6), (2, 3, 7), (3, 0, 8))),
    MoveCase("grow-the-first", 14, ((8, 10, 4), (4, 6, 4))),
    MoveCase("swap", 7, ((0, 4, 3), (1, 0, 3), (4, 1, 3))),
)


@dataclass(frozen=True)
class TurnCase:
    """Cells of heads of `head_dim`, of which the first `n_rot` dimensions turn."""

    name: str
    n_head_kv: int
    head_dim: int
    n_rot: int
    pairing: str
    cells: tuple[int, ...] = (3, 10, 0, 7)
    n_cells: int = 11


TURN_CASES = tuple(
    TurnCase(f"{name}-{pairing}", n_head_kv, head_dim, n_rot, pairing, *more)
    for name, n_head_kv, head_dim, n_rot, *more in (
        ("one-block", 1, 32, 32),
        ("odd-words", 3, 32, 32),
        ("whole-heads", 2, 64, 64),
        ("half-of-a-head", 2, 64, 32),
        ("a-quarter-and-a-block", 1, 96, 40),
        ("two-dimensions", 2, 32, 2),
        ("no-dimension", 1, 32, 0),
        ("wide-heads", 1, 256, 256),
        ("no-cell", 1, 32, 32, ()),
        ("for-threads", 3, 64, 64, tuple(range(200, 0, -1)), 201),
    )
    for pairing in (HALF, INTERLEAVED)
)


def any_bytes(fmt: KvFormat, n_cells: int, n_head_kv: int, head_dim: int) -> Region:
    """A canonical region of random bytes, the padding of its cells included."""
    width = cell_bytes(fmt, n_head_kv * head_dim)
    cells = np.random.default_rng(n_cells).integers(0, 256, (n_cells, width), np.uint8)
    return Region(fmt, "canonical", n_head_kv, head_dim, (cells,))


def turn_inputs(case: TurnCase) -> tuple[Region, Int32, Floats, Floats]:
    """A q8_0 region, the cells of the case, and cos and sin [1, n_rot / 2] of some angles.

    Magnitudes of rows reach from scales that become zero, over subnormal ones, to those that become
    infinite. Cell 0 is poisoned by a NaN, cell 7 holds zeros.
    """
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    rows = rng.standard_normal((case.n_cells, case.n_head_kv * case.head_dim))
    rows *= 10.0 ** rng.uniform(-7, 7, (case.n_cells, 1))
    rows[0, 5], rows[7:8] = np.nan, 0
    cells = reference.quantize_q8_0(rows.astype(np.float32))
    region = Region(KvFormat.Q8_0, "canonical", case.n_head_kv, case.head_dim, (cells,))
    angles = rng.uniform(-9, 9, (1, case.n_rot // 2))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    return region, np.array(case.cells, np.int32), cos, sin
