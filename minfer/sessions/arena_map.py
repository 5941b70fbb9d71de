"""The arena as lines of characters: how full it is, and how broken up.

Every character stands for as many cells. Above is what they hold, below whose they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from minfer.kv.runs import FREE, rows_read
from minfer.kv.session.tables import Tables, owners

LINES_MAX = 4
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
NO_RUN = " "


class Shades(NamedTuple):
    """Characters for cells that a sequence owns, by how many of them are written; for others."""

    all: str
    most: str
    some: str
    none: str
    orphaned: str
    free: str


UNICODE = Shades("█", "▓", "▒", "░", "◇", "·")
ASCII = Shades("#", "=", "-", "_", "o", ".")


class Line(NamedTuple):
    """A stretch of the arena from `cell` on: two texts of one character for `per` cells each."""

    cell: int
    held: str
    runs: str


class Map(NamedTuple):
    """per: cells a character, the last of all fewer perhaps."""

    per: int
    lines: list[Line]


class Piece(NamedTuple):
    """`n` cells of one kind within one character."""

    at: int
    n: int
    run: int
    written: bool
    owned: bool


def draw(tables: Tables, width: int, shades: Shades) -> Map:
    """At most `LINES_MAX` lines of at most `width` characters.

    A character shows what most of its cells are: free, orphaned, or owned by a sequence, and then
    how many of those are written.
    """
    width = max(width, 1)
    per = max(1, -(-tables.n_ctx // (width * LINES_MAX)))
    n = -(-tables.n_ctx // per)
    pieces: list[list[Piece]] = [[] for _ in range(n)]
    for piece in _pieces(tables, per):
        pieces[piece.at].append(piece)
    held = "".join(_shade(of, shades) for of in pieces)
    runs = "".join(_run(of) for of in pieces)
    lines = [
        Line(first * per, held[first : first + width], runs[first : first + width].rstrip())
        for first in range(0, n, width)
    ]
    return Map(per, lines)


def legend(shades: Shades) -> str:
    """What the characters mean, one line."""
    return (
        f"{shades.all} written  {shades.most} half or more  {shades.some} less  "
        f"{shades.none} reserved, not written  {shades.orphaned} orphaned  {shades.free} free"
    )


def _pieces(tables: Tables, per: int) -> Iterator[Piece]:
    """The arena in cell order, cut where anything changes and where a character ends."""
    rows = rows_read(tables.entries.values())
    for run, start, n in owners(tables.runs.values(), tables.n_ctx):
        owned = run != FREE and tables.runs[run].owner is not None
        written = rows.get(run, 0)
        for first, end in ((start, start + written), (start + written, start + n)):
            while first < end:
                at = first // per
                last = min(end, (at + 1) * per)
                yield Piece(at, last - first, run, first < start + written, owned)
                first = last


def _shade(pieces: list[Piece], shades: Shades) -> str:
    free = sum(p.n for p in pieces if p.run == FREE)
    owned = sum(p.n for p in pieces if p.owned)
    orphaned = sum(p.n for p in pieces) - free - owned
    if free > max(owned, orphaned):
        return shades.free
    if orphaned > owned:
        return shades.orphaned
    written = sum(p.n for p in pieces if p.owned and p.written)
    if written in (0, owned):
        return shades.all if written else shades.none
    return shades.most if 2 * written >= owned else shades.some


def _run(pieces: list[Piece]) -> str:
    """The last digit, of 36, of the run that has most of the cells; a blank for none."""
    cells: dict[int, int] = {}
    for piece in pieces:
        cells[piece.run] = cells.get(piece.run, 0) + piece.n
    run = max(cells, key=lambda id: cells[id])
    return NO_RUN if run == FREE else DIGITS[run % len(DIGITS)]
