"""The rows of a session in pieces of bounded size, in the order of the file (contract 8.1, 8.4)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from minfer.format import Bytes, Int32, Region
from minfer.kv.arena import Arena
from minfer.kv.inputs import joined

PIECE_BYTES = 4 << 20
CANONICAL = "canonical"  # the layout whose array holds cells as a file does
WHICH = ("k", "v")


@dataclass(frozen=True, eq=False)
class Cells:
    """The cells of a piece, the same in every layer. ranges: ascending."""

    ranges: tuple[range, ...]

    @cached_property
    def numbers(self) -> Int32:
        """All of them."""
        return joined(self.ranges)


class Piece(NamedTuple):
    """Rows of the K (`which` 0) or the V cells of a layer."""

    layer: int
    which: int
    cells: Cells

    @property
    def n_rows(self) -> int:
        return len(self.cells.numbers)


def pieces(n_layer: int, written: Sequence[range], cell_bytes: int) -> Iterator[Piece]:
    """All rows: layer by layer, K then V, in ascending cell.

    written: the cells with rows, ascending. A piece has `PIECE_BYTES` at most, or one row.
    """
    cut = [Cells(ranges) for ranges in groups(written, cell_bytes)]
    for layer in range(n_layer if cut else 0):
        for which in range(2):
            for cells in cut:
                yield Piece(layer, which, cells)


def groups(cells: Sequence[range], cell_bytes: int) -> Iterator[tuple[range, ...]]:
    """`cells` in their order, cut into groups of `PIECE_BYTES` at most, or one cell."""
    most = max(1, PIECE_BYTES // cell_bytes)
    group: list[range] = []
    room = most
    for some in cells:
        while len(some) > room:
            yield (*group, some[:room])
            some, group, room = some[room:], [], most
        if some:
            group.append(some)
            room -= len(some)
    if group:
        yield tuple(group)


def view(arena: Arena, piece: Piece) -> Bytes | None:
    """The cells of a piece where the store keeps them, uint8 [n, cell_bytes].

    None unless they lie there in a row and as a file has them.
    """
    region = _region(arena, piece)
    if region.layout != CANONICAL or len(piece.cells.ranges) != 1:
        return None
    (cells,) = piece.cells.ranges
    held: Bytes = region.arrays[0][cells.start : cells.stop]
    return held


def taken(arena: Arena, piece: Piece) -> Bytes:
    """The cells of a piece, canonical: uint8 [n, cell_bytes]; a view where that is possible."""
    held = view(arena, piece)
    if held is not None:
        return held
    read = arena.by_layer[piece.layer].kernels.read_cells
    copied: Bytes = read(_region(arena, piece), piece.cells.numbers)
    return copied


def put(arena: Arena, piece: Piece, rows: Bytes) -> None:
    """Store canonical cells, uint8 [n, cell_bytes]."""
    pair = list(arena.layers[piece.layer])
    write = arena.by_layer[piece.layer].kernels.write_cells
    pair[piece.which] = write(_region(arena, piece), piece.cells.numbers, rows)
    arena.bind(piece.layer, *pair)


def _region(arena: Arena, piece: Piece) -> Region:
    return arena.layers[piece.layer][piece.which]
