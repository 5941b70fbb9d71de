"""Which cells belong to whom, and what follows from that (contract 1, 5.1, 5.2, 5.9)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, Self

from minfer.testing.contents import Impossible, require

FREE = -1  # in the owner table of a cache


@dataclass
class Stretch:
    """A run: cells [start, start + cap), owned by a sequence or left to its readers (None)."""

    start: int
    cap: int
    owner: int | None


@dataclass
class Holding:
    """A sequence: its own run, its readable rows, the first `share` of which lie in run `root`."""

    run: int
    written: int = 0
    root: int | None = None
    share: int = 0
    times_copied: int = 0  # as a donor


class Places:
    """Runs by a number of their own, sequences, and counters."""

    def __init__(self, n_ctx: int) -> None:
        self.n_ctx = n_ctx
        self.runs: dict[int, Stretch] = {}
        self.seqs: dict[int, Holding] = {}
        self.counts: Counter[str] = Counter()  # four fields of the statistics
        self.events: Counter[str] = Counter()  # what a test run came across
        self._next = 0

    def copy(self) -> Self:
        """Another one, equal and independent."""
        other = type(self)(self.n_ctx)
        other.runs = {number: replace(run) for number, run in self.runs.items()}
        other.seqs = {seq: replace(held) for seq, held in self.seqs.items()}
        other.counts, other.events = self.counts.copy(), self.events.copy()
        other._next = self._next
        return other

    def known(self, seq: int) -> Holding:
        """The holding of `seq`, or `Impossible`."""
        if seq not in self.seqs:
            raise Impossible(f"{seq} holds no cells")
        return self.seqs[seq]

    def shares(self, run: int) -> list[int]:
        """How many rows each reader of a run reads."""
        return [held.share for held in self.seqs.values() if held.root == run]

    def read_by_others(self, run: int) -> int:
        """Rows of a run that its longest reader reads."""
        return max(self.shares(run), default=0)

    def rows(self, run: int) -> int:
        """Rows of a run that anybody reads."""
        owner = self.runs[run].owner
        own = 0
        if owner is not None:
            own = max(0, self.seqs[owner].written - self.seqs[owner].share)
        return max(own, self.read_by_others(run))

    def cap(self, seq: int) -> int:
        """Positions that `seq` has cells for."""
        return self.seqs[seq].share + self.runs[self.seqs[seq].run].cap

    def spans(self, seq: int) -> list[tuple[int, int, int]]:
        """(first position, first cell, length) of the share, then of the own run in full."""
        held = self.seqs[seq]
        own = self.runs[held.run]
        spans = [(held.share, own.start, own.cap)]
        if held.root is not None:
            spans.insert(0, (0, self.runs[held.root].start, held.share))
        return spans

    def owners(self) -> list[int | None]:
        """The run of every cell; a cell of two runs is an error of this model or of the cache."""
        table: list[int | None] = [None] * self.n_ctx
        for number, run in self.runs.items():
            for cell in range(run.start, run.start + run.cap):
                assert table[cell] is None, f"cell {cell} is in two runs"
                table[cell] = number
        return table

    def gaps(self) -> list[tuple[int, int]]:
        """(first cell, length) of every free stretch, in cell order."""
        gaps, cell = [], 0
        for run in [*self.in_order(), Stretch(self.n_ctx, 0, None)]:
            if run.start > cell:
                gaps.append((cell, run.start - cell))
            cell = run.start + run.cap
        return gaps

    def in_order(self) -> list[Stretch]:
        """All runs by first cell."""
        return sorted(self.runs.values(), key=lambda run: run.start)

    @property
    def free(self) -> int:
        return self.n_ctx - sum(run.cap for run in self.runs.values())

    @property
    def largest_gap(self) -> int:
        return max((length for _, length in self.gaps()), default=0)

    def stats(self) -> dict[str, int]:
        """The statistics of contract 5.9."""
        owned = [run.cap for run in self.runs.values() if run.owner is not None]
        counts = ("defrags", "cells_moved", "copy_on_writes", "rows_copied")
        return {
            "n_ctx": self.n_ctx,
            "reserved": sum(owned),
            "written": sum(self.rows(run) for run in self.runs),
            "free_cells": self.free,
            "free_runs": len(self.gaps()),
            "largest_free_run": self.largest_gap,
            "sequences": len(self.seqs),
            "shared": sum(self.read_by_others(run) for run in self.runs),
            "orphaned": self.n_ctx - self.free - sum(owned),
            **{name: self.counts[name] for name in counts},
        }

    def new_run(self, seq: int, cap: int) -> int:
        """First fit: the lowest gap of `cap` cells or more."""
        fitting = [start for start, length in self.gaps() if length >= cap]
        require(bool(fitting), f"no {cap} cells in a row; gaps {self.gaps()}")
        self._next += 1
        self.runs[self._next] = Stretch(fitting[0], cap, seq)
        return self._next

    def keep_share(self, held: Holding, rows: int) -> None:
        """The share ends at `rows`; none is left at 0."""
        held.share = rows
        if rows == 0:
            held.root = None

    def settle(self) -> None:
        """A run without owner is as long as its longest reader reads, and gone with the last."""
        for number, run in list(self.runs.items()):
            if run.owner is None:
                run.cap = self.read_by_others(number)
                if run.cap == 0:
                    del self.runs[number]


def compare_places(cache: Any, places: Places, run_ids: dict[int, int]) -> dict[int, int]:
    """Hold a cache to `places`: owners, spans, rows, capacities, statistics (contract 1, 5).

    run_ids: the cache's id of every run so far; returns those of the runs now. A run keeps its id.
    """
    owners, table = list(cache.owners()), places.owners()
    ids = {number: owners[run.start] for number, run in places.runs.items()}
    named = [FREE if number is None else ids[number] for number in table]
    assert owners == named, f"cells are owned by {owners}; they must be by {named}"
    assert len(set(ids.values())) == len(ids) and FREE not in ids.values(), f"two runs of {owners}"
    for number in ids.keys() & run_ids.keys():
        assert ids[number] == run_ids[number], f"run {run_ids[number]} is now {ids[number]}"
    for seq, held in places.seqs.items():
        got = [tuple(span) for span in cache.spans(seq)]
        wanted = places.spans(seq)
        assert got == wanted, f"spans of {seq} are {got}; they must be {wanted}"
        rows, cap = cache.written(seq), cache.cap(seq)
        assert (rows, cap) == (held.written, places.cap(seq)), (
            f"{seq} has {rows} rows and cap {cap}; they must be {held.written}, {places.cap(seq)}"
        )
    stats, counted = cache.stats(), places.stats()
    told = {name: getattr(stats, name) for name in counted}
    assert told == counted, f"statistics are {told}; they must be {counted}"
    return ids
