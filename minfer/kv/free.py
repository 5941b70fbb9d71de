"""The free cells of an arena: lowest first fit and joining in O(log n_cells)."""

from __future__ import annotations


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

    def take(self, start: int, n: int) -> None:
        """Occupy the first `n` cells of the free run that begins at `start`."""
        length = self._longest[self._first_leaf + start]
        if length < n:
            raise AssertionError(f"cells [{start}, {start + n}) do not begin a free run")
        self._remove(start, length)
        if length > n:
            self._insert(start + n, length - n)

    def give(self, start: int, n: int) -> None:
        """Free cells [start, start + n), joined to their free neighbours."""
        before = self._start_of_end.get(start)
        after = self._longest[self._first_leaf + start + n]
        end = start + n + after
        if after:
            self._remove(start + n, after)
        if before is not None:
            self._remove(before, start - before)
            start = before
        self._insert(start, end - start)

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
