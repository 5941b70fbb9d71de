"""Caches to try the store kit on: one of lists, and one of cells with every operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from minfer.errors import Refusal
from minfer.testing.contents import Contents, Group, Impossible
from minfer.testing.layout import Layout, Moved

N_CTX = 18
EMPTY = 0


class SlotOfToy(NamedTuple):
    run: int
    start: int
    cap: int


class CellsCache:
    """Rows in a list of cells, laid out anew after every call.

    Where they go the kit's own layout says, so this shows what the machine reaches and which
    faults it finds, not that the layout is right; the examples of the contract do that.
    """

    def __init__(self) -> None:
        self.contents, self.layout = Contents(), Layout(N_CTX)
        self.cells = [EMPTY] * N_CTX

    def _do(self, name: str, *args: Any) -> Any:
        contents, layout = self.contents.copy(), self.layout.copy()
        try:
            getattr(contents, name)(*args)
            answer = getattr(layout, name)(*args)
        except Impossible as reason:
            raise Refusal("2.5", str(reason)) from None
        self.contents, self.layout = contents, layout
        for seq in contents.written:
            self.lay(seq)
        return answer

    def lay(self, seq: int) -> None:
        for cell, value in zip(self.cells_of(seq), self.contents.read(seq), strict=True):
            self.cells[cell] = value

    def cells_of(self, seq: int) -> list[int]:
        cells = [cell + i for _, cell, length in self.layout.spans(seq) for i in range(length)]
        return cells[: self.written(seq)]

    def slot(self, run: int) -> SlotOfToy:
        return SlotOfToy(run, self.layout.runs[run].start, self.layout.runs[run].cap)

    def reserve(self, seq: int, cap: int) -> SlotOfToy:
        return self.slot(self._do("reserve", seq, cap))

    def reserve_with_defrag(self, seq: int, cap: int) -> tuple[SlotOfToy, list[Moved]]:
        run, moves = self._do("reserve_with_defrag", seq, cap)
        return self.slot(run), moves

    def resize(self, seq: int, cap: int) -> SlotOfToy:
        return self.slot(self._do("resize", seq, cap))

    def resize_with_defrag(self, seq: int, cap: int) -> tuple[SlotOfToy, list[Moved]]:
        run, moves = self._do("resize_with_defrag", seq, cap)
        return self.slot(run), moves

    def release(self, seq: int) -> None:
        self._do("release", seq)

    def truncate(self, seq: int, rows: int) -> None:
        self._do("truncate", seq, rows)

    def defrag(self, need: int | None) -> list[Moved]:
        moves: list[Moved] = self._do("defrag", need)
        return moves

    def share_prefix(self, src: int, dst: int, rows: int) -> None:
        self._do("share_prefix", src, dst, rows)

    def copy_prefix(self, src: int, dst: int, rows: int) -> None:
        self._do("copy_prefix", src, dst, rows)

    def remove(self, seq: int, start: int, length: int) -> None:
        self._do("remove", seq, start, length)

    def shift(self, seq: int, drop: int) -> None:
        self._do("shift", seq, drop)

    def write(self, seq: int, position: int, values: Sequence[int]) -> None:
        self.step([(seq, position, values)])

    def append(self, seq: int, values: Sequence[int]) -> None:
        self.step([(seq, self.contents.written.get(seq, 0), values)])

    def step(self, groups: Sequence[Group]) -> list[Moved]:
        return [Moved(0, 0, 0, self._do("step", groups))]

    def failing_step(self, groups: Sequence[Group], layers: int) -> None:
        self._do("failing_step", groups)

    def read(self, seq: int) -> list[int]:
        return [self.cells[cell] for cell in self.cells_of(seq)]

    def state(self) -> object:
        return repr(vars(self.layout)), list(self.cells)

    def sequences(self) -> list[int]:
        return sorted(self.layout.seqs)

    def owners(self) -> list[int]:
        return [-1 if run is None else run for run in self.layout.owners()]

    def spans(self, seq: int) -> list[tuple[int, int, int]]:
        return self.layout.spans(seq)

    def cap(self, seq: int) -> int:
        return self.layout.cap(seq)

    def written(self, seq: int) -> int:
        return self.layout.seqs[seq].written

    def stats(self) -> Any:
        return type("Stats", (), self.layout.stats())
