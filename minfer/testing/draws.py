"""What a random call is chosen from: `There` says what could be done, `Drawn` chooses by numbers.

Numbers come from outside, a few a call, so that whoever makes them can repeat and shorten a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from minfer.testing.checked import Checked

SEQS = 7  # ids from 0 on
CAP = 6  # of a new run
ROWS = 3  # of a group
GUESS = 4  # rows a sequence has room for, where a cache does not say


class There:
    """Sequences, rows and room as they are. A cache that does not say where rows lie is taken
    for one that has room and shares nothing."""

    wild = False  # whether a call may be one that is impossible

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

    def place(self, seq: int) -> int:
        """The first cell of the run of `seq`."""
        return self.layout.runs[self.layout.seqs[seq].run].start if self.layout else 0

    def most(self, seq: int) -> int:
        """Cells that the run of `seq` can have where it is."""
        if not self.layout:
            return self.written[seq] + GUESS
        return self.layout.most_in_place(self.layout.seqs[seq].run)

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

    def below_share(self, seq: int) -> list[int]:
        """Positions of its share from which `seq` can go on in its own run; the last first."""
        return [*range(max(0, self.written[seq] - self.own_cap(seq)), self.share(seq))][::-1]

    def below_readers(self, seq: int) -> list[int]:
        """Positions that others read from which `seq` can go on elsewhere; the last first."""
        read = self.read_by_others(seq)
        if not read or not self.layout:
            return []
        longest = max(self.layout.largest_gap, self.most(seq) - read)
        return [*range(max(0, self.cap(seq) - longest), min(read, self.written[seq] + 1))][::-1]


class Drawn(There):
    """Arguments of one call. Most are possible, so that a run gets far; one call in eight is wild
    and just beyond what is possible, or between any sequences.

    numbers: 0 to 255, and 0 from where they end; 0 chooses the smallest of everything.
    """

    def __init__(self, numbers: Iterator[int], checked: Checked) -> None:
        super().__init__(checked)
        self._numbers = numbers
        self.wild = self.number(0, 7) == 7

    def number(self, low: int, high: int) -> int:
        """low to high, both included; low where that is nothing."""
        return low + next(self._numbers, 0) % (max(low, high) - low + 1)

    def one_of(self, choices: Sequence[int]) -> int:
        return choices[self.number(0, len(choices) - 1)]

    def seq(self, wanted: Callable[[int], bool] = lambda seq: True) -> int:
        """A known sequence that is `wanted`, if there is one; any known one in a wild call."""
        return self.one_of((not self.wild and self.known(wanted)) or sorted(self.written))

    def seq_of_several(self) -> int:
        """A known sequence that shares or is read, if there is one; often one whose rows are read
        by others and no longer by itself."""
        left = self.known(lambda seq: self.read_by_others(seq) > self.written[seq])
        several = self.known(lambda seq: self.fixed(seq) > 0)
        return self.one_of([*left, *left, *several] or sorted(self.written))

    def any_seq(self) -> int:
        """A known sequence, or in a wild call any id."""
        return self.number(0, SEQS) if self.wild else self.seq()

    def new_seq(self) -> int:
        if self.wild:
            return self.number(0, SEQS)
        return self.one_of([seq for seq in range(SEQS) if seq not in self.written][:2] or [SEQS])

    def group(self, seq: int) -> tuple[int, int, int]:
        """Rows of `seq` at its end, or again: if there are any, rows that others read too."""
        rows, cap = self.written[seq], self.cap(seq)
        if self.wild:
            t = self.number(0, rows + 1)
            return seq, t, self.one_of([1, max(1, cap - t), max(1, cap - t + 1)])
        shared = self.below_share(seq) + self.below_readers(seq)
        if shared and self.number(0, 1):
            return self.rewrite(seq, shared)
        t = rows if rows < cap and self.number(0, 3) else max(0, rows - self.number(1, 2))
        return seq, t, self.number(1, min(ROWS, cap - t))

    def rewrite(self, seq: int, starts: list[int]) -> tuple[int, int, int]:
        """A row or two of `seq` from one of `starts` on."""
        t = self.one_of(starts)
        return seq, t, self.number(1, min(2, self.cap(seq) - t))
