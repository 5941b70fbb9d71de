"""Who reads how much of another sequence's run (contract 1: share)."""

from __future__ import annotations

from minfer.kv.runs import Share


class Readers:
    """By run, the numbers of rows that sharers read, each with how many sharers read so many.

    Derived from the shares and kept beside them, so that the longest reader of a run is found
    without looking at every sequence. Made of another one it is a draft over that one.
    """

    def __init__(self, below: Readers | None = None) -> None:
        self._below = below
        self._by_run: dict[int, dict[int, int]] = {}

    def longest(self, run: int) -> int:
        """Rows of `run` that its longest reader reads, 0 without readers."""
        return max(self._counts(run), default=0)

    def replace(self, was: Share | None, now: Share | None) -> None:
        """One sequence reads `now` instead of `was`."""
        if was == now:
            return
        for share, more in ((was, -1), (now, 1)):
            if share is not None:
                if share.run not in self._by_run:
                    self._by_run[share.run] = dict(self._counts(share.run))
                counts = self._by_run[share.run]
                counts[share.rows] = counts.get(share.rows, 0) + more
                if not counts[share.rows]:
                    del counts[share.rows]
                if self._below is None and not counts:
                    del self._by_run[share.run]

    def items(self) -> list[tuple[int, dict[int, int]]]:
        """Every run that is read, with its counts, in order of run ids and of rows."""
        return [(run, dict(sorted(counts.items()))) for run, counts in sorted(self._by_run.items())]

    def _counts(self, run: int) -> dict[int, int]:
        counts = self._by_run.get(run)
        if counts is None:
            return {} if self._below is None else self._below._counts(run)
        return counts
