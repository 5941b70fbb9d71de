"""What a cache must answer: a plain reference store without cells.

A dict of (sequence, position) -> value, and how many positions each sequence has. Every operation
is a line or two here, so that this is easy to believe. It refuses what makes no sense whatever
the cache is made of; questions of room are for `layout`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

Group: TypeAlias = tuple[int, int, Sequence[int]]  # sequence, first position, one value a row


class Impossible(Exception):
    """Why an operation must be refused."""


def require(holds: bool, why: str) -> None:
    """Raise `Impossible` unless `holds`."""
    if not holds:
        raise Impossible(why)


class Contents:
    """Every operation raises `Impossible` before it changes anything."""

    def __init__(self) -> None:
        self.values: dict[tuple[int, int], int] = {}
        self.written: dict[int, int] = {}

    def copy(self) -> Contents:
        """Another one, equal and independent."""
        other = Contents()
        other.values, other.written = dict(self.values), dict(self.written)
        return other

    def read(self, seq: int) -> list[int]:
        """The value of every readable position of `seq`."""
        return [self.values[seq, position] for position in range(self.written[seq])]

    def reserve(self, seq: int, cap: int) -> None:
        self.written.setdefault(seq, 0)

    reserve_with_defrag = reserve

    def release(self, seq: int) -> None:
        self._keep(seq, 0)
        del self.written[seq]

    def truncate(self, seq: int, rows: int) -> None:
        self._known(seq)
        require(0 <= rows <= self.written[seq], f"{seq} has {self.written[seq]} rows")
        self._keep(seq, rows)

    def resize(self, seq: int, cap: int) -> None:
        self._known(seq)

    resize_with_defrag = resize

    def defrag(self, need: int | None = None) -> None:
        """Rows stay what they are, wherever they lie."""

    def share_prefix(self, src: int, dst: int, rows: int) -> None:
        self._may_copy(src, dst, rows)
        require(rows > 0, "a share of no rows")
        require(self.written[dst] == 0, f"{dst} has rows of its own")
        self._fill(dst, 0, self.read(src)[:rows])

    def copy_prefix(self, src: int, dst: int, rows: int) -> None:
        self._may_copy(src, dst, rows)
        held = self.read(dst)
        require(rows >= len(held), f"{dst} has {len(held)} rows already")
        require(held == self.read(src)[: len(held)], f"{dst} has other rows")
        self._fill(dst, 0, self.read(src)[:rows])

    def remove(self, seq: int, start: int, length: int) -> None:
        self._known(seq)
        kept = self.read(seq)
        inside = start >= 0 and length > 0 and start + length <= len(kept)
        require(inside, f"[{start}, {start + length}) is no part of {len(kept)} rows")
        self._keep(seq, start)
        self._fill(seq, start, kept[start + length :])

    def shift(self, seq: int, drop: int) -> None:
        self.remove(seq, 0, drop)

    def step(self, groups: Sequence[Group]) -> None:
        self._may_step(groups)
        for seq, t, values in groups:
            self._fill(seq, t, values)

    def failing_step(self, groups: Sequence[Group]) -> None:
        """The block of the step raises: its sequences end where the step began."""
        self._may_step(groups)
        for seq, t, _ in groups:
            self._keep(seq, t)

    def _known(self, seq: int) -> None:
        require(seq in self.written, f"{seq} holds no cells")

    def _may_copy(self, src: int, dst: int, rows: int) -> None:
        self._known(src)
        self._known(dst)
        require(src != dst, "a sequence and itself")
        has = self.written[src]
        require(0 <= rows <= has, f"{rows} of the {has} rows of {src}")

    def _may_step(self, groups: Sequence[Group]) -> None:
        for seq, t, _ in groups:
            self._known(seq)
            require(t <= self.written[seq], f"a gap before position {t} of {seq}")

    def _fill(self, seq: int, t: int, values: Sequence[int]) -> None:
        self.values.update(((seq, t + i), value) for i, value in enumerate(values))
        self.written[seq] = max(self.written[seq], t + len(values))

    def _keep(self, seq: int, rows: int) -> None:
        self._known(seq)
        for position in range(rows, self.written[seq]):
            del self.values[seq, position]
        self.written[seq] = rows
