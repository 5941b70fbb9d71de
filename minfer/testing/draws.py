"""Arguments of random calls: most of them possible, so that a run gets far; one in twelve anything.

What can be done depends on what there is: `There` answers, `Drawn` draws one set of arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hypothesis import strategies as st

from minfer.testing.checked import Checked

SEQS = 7  # ids from 0 on
CAP = 6  # of a new run
ROWS = 3  # of a group
GUESS = 4  # rows a sequence has room for, where a cache does not say

Draw = Callable[[st.SearchStrategy[Any]], Any]


class There:
    """Sequences, rows and room as they are. A cache that does not say where rows lie is taken
    for one that has room and shares nothing."""

    def __init__(self, checked: Checked) -> None:
        self.written = checked.contents.written
        self.layout = checked.layout

    def known(self, wanted: Callable[[int], bool]) -> list[int]:
        """Sequences of which `wanted` is true."""
        return [seq for seq in sorted(self.written) if wanted(seq)]

    def cap(self, seq: int) -> int:
        return self.layout.cap(seq) if self.layout else self.written[seq] + GUESS

    def share(self, seq: int) -> int:
        return self.layout.seqs[seq].share if self.layout else 0

    def own_cap(self, seq: int) -> int:
        return self.cap(seq) - self.share(seq)

    def read_by_others(self, seq: int) -> int:
        return self.layout.read_by_others(self.layout.seqs[seq].run) if self.layout else 0

    def fixed(self, seq: int) -> int:
        """Rows from position 0 on that are not the sequence's alone."""
        return max(self.share(seq), self.read_by_others(seq))

    def can_give(self, seq: int) -> int:
        """Rows that a share may have."""
        return self.share(seq) or self.written[seq]

    def is_empty(self, seq: int) -> bool:
        return not self.written[seq] and not self.read_by_others(seq)

    def takes_copies(self, seq: int) -> bool:
        return self.written[seq] == self.share(seq) and not self.read_by_others(seq)

    def free(self) -> tuple[int, int]:
        """Free cells, and those of the largest gap."""
        return (self.layout.free, self.layout.largest_gap) if self.layout else (CAP, CAP)

    def can_move(self) -> bool:
        """Whether there is a gap below a run."""
        gaps = self.layout.gaps() if self.layout else [(0, 1)]
        ends = self.layout.n_ctx if self.layout else 0
        return any(start + length != ends for start, length in gaps)

    def shared_starts(self, seq: int) -> list[int]:
        """Positions where a step would ask for copy-on-write, if it has room."""
        rows = self.written[seq]
        sharer = range(max(0, rows - self.own_cap(seq)), self.share(seq))
        return [*sharer, *range(min(rows, self.read_by_others(seq)))][::-1]


class Drawn(There):
    """One set of arguments being drawn; small numbers first, so that failures shrink well."""

    def __init__(self, draw: Draw, checked: Checked) -> None:
        super().__init__(checked)
        self._draw = draw
        self.wild = self.number(0, 11) == 11

    def number(self, low: int, high: int) -> int:
        """low to high, both included; low where that is nothing."""
        return int(self._draw(st.integers(low, max(low, high))))

    def one_of(self, choices: Iterable[int]) -> int:
        return int(self._draw(st.sampled_from(list(choices))))

    def seq(self, wanted: Callable[[int], bool] = lambda seq: True) -> int:
        """A known sequence that is `wanted`, if there is one; any known one in a wild call."""
        return self.one_of((not self.wild and self.known(wanted)) or sorted(self.written))

    def any_seq(self) -> int:
        """A known sequence, or in a wild call any id."""
        return self.number(0, SEQS) if self.wild else self.seq()

    def new_seq(self) -> int:
        if self.wild:
            return self.number(0, SEQS)
        return self.one_of([seq for seq in range(SEQS) if seq not in self.written][:2] or [SEQS])

    def group(self, seq: int, starts: Sequence[int] = ()) -> tuple[int, int, int]:
        """Rows of `seq` from one of `starts`, else at its end or anywhere before."""
        rows, cap = self.written[seq], self.cap(seq)
        anywhere = [rows] * 2 * (rows < cap) + [max(0, rows - 1)] + self.shared_starts(seq)
        t = self.number(0, rows + 1) if self.wild else self.one_of(starts or anywhere)
        return seq, t, self.number(1, ROWS + 2 if self.wild else min(ROWS, cap - t))


def drawn(make: Callable[[Drawn], Sequence[Any]]) -> st.SearchStrategy[Any]:
    """The strategy that calls `make` beside the machine it draws for."""

    @st.composite
    def strategy(draw: Draw) -> tuple[Any, ...]:
        return tuple(make(Drawn(draw, draw(st.runner()).checked)))

    return strategy()
