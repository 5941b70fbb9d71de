"""The free cells of an arena: lowest first fit and joining in O(log n_cells)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from minfer.kv.runs import Run


class FreeCells:
    """Maximal runs of free cells.

    A complete binary tree in one list: the leaf of a cell holds the length of the free run that
    begins there (0 if none does), an inner node the larger of its two children. First fit walks
    down to the lowest leaf that is long enough (a range maximum tree over the sorted runs).
    """

    def __init__(self, n_cells: int) -> None:
        self._first_leaf = 1 << (n_cells - 1).bit_length()
        self._longest = [0] * (2 * self._first_leaf + 1)  # one spare leaf: the cell past the end
        self._start_of_end: dict[int, int] = {}
        self.cells = 0
        self._undo: list[tuple[bool, int, int]] | None = None
        self.give(0, n_cells)

    @property
    def count(self) -> int:
        """Number of free runs."""
        return len(self._start_of_end)

    @property
    def largest(self) -> int:
        """Cells of the largest free run."""
        return self._longest[1]

    def runs(self) -> list[tuple[int, int]]:
        """(start, length) of every free run, in cell order."""
        return sorted((start, end - start) for end, start in self._start_of_end.items())

    def first_fit(self, n: int) -> int | None:
        """Start of the lowest free run of at least `n` cells, None if there is none."""
        longest, node = self._longest, 1
        if longest[node] < n:
            return None
        while node < self._first_leaf:
            node *= 2
            if longest[node] < n:
                node += 1
        return node - self._first_leaf

    def length_at(self, start: int) -> int:
        """Cells of the free run that begins at `start`, 0 if none does."""
        return self._longest[self._first_leaf + start]

    def take(self, start: int, n: int) -> None:
        """Occupy cells [start, start + n), which are free."""
        first = self._begin_of(start)
        end = first + self.length_at(first)
        if not first <= start <= start + n <= end:
            raise AssertionError(f"cells [{start}, {start + n}) are not all free")
        self._note(False, start, n)
        self._remove(first, end - first)
        if start > first:
            self._insert(first, start - first)
        if end > start + n:
            self._insert(start + n, end - start - n)

    def give(self, start: int, n: int) -> None:
        """Free cells [start, start + n), joined to their free neighbours."""
        self._note(True, start, n)
        before = self._start_of_end.get(start)
        after = self.length_at(start + n)
        end = start + n + after
        if after:
            self._remove(start + n, after)
        if before is not None:
            self._remove(before, start - before)
            start = before
        self._insert(start, end - start)

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Undo what the block gives and takes: a search through what would be free."""
        self._undo = []
        try:
            yield
        finally:
            undo, self._undo = self._undo, None
            for given, start, n in reversed(undo):
                (self.take if given else self.give)(start, n)

    def problems(self, runs: Iterable[Run], n_cells: int) -> list[str]:
        """How this list differs from the gaps between `runs`; empty if it does not."""
        found, gaps, cell = [], [], 0
        for run in sorted(runs, key=lambda r: r.start):
            if run.start > cell:
                gaps.append((cell, run.start - cell))
            cell = run.end
        if cell < n_cells:
            gaps.append((cell, n_cells - cell))
        if gaps != self.runs():
            found.append(f"free runs are {gaps} and the free list says {self.runs()}")
        if self.cells != sum(n for _, n in gaps):
            found.append(f"{self.cells} cells are counted free of {gaps}")
        if self.largest != max((n for _, n in gaps), default=0):
            found.append(f"the largest of {gaps} is not {self.largest}")
        return found

    def _note(self, given: bool, start: int, n: int) -> None:
        if self._undo is not None:
            self._undo.append((given, start, n))

    def _begin_of(self, cell: int) -> int:
        """Start of the last free run that begins at `cell` or below it; 0 if none does."""
        longest, node = self._longest, self._first_leaf + cell
        if longest[node]:
            return cell
        while node > 1:
            if node % 2 and longest[node - 1]:
                node -= 1
                while node < self._first_leaf:
                    node = 2 * node + 1
                    if not longest[node]:
                        node -= 1
                return node - self._first_leaf
            node //= 2
        return 0

    def _insert(self, start: int, length: int) -> None:
        self._start_of_end[start + length] = start
        self.cells += length
        self._set(start, length)

    def _remove(self, start: int, length: int) -> None:
        del self._start_of_end[start + length]
        self.cells -= length
        self._set(start, 0)

    def _set(self, cell: int, length: int) -> None:
        longest, node = self._longest, self._first_leaf + cell
        longest[node] = length
        while node > 1:
            node //= 2
            best = max(longest[2 * node], longest[2 * node + 1])
            if longest[node] == best:
                return
            longest[node] = best
