"""What an operation does to the tables of a store, as a value (contract 0.1, 5.5).

A planner works on a `Draft`, which holds copies of what it touches, and refuses or returns a
`Change`. Nothing is changed before the store carries that out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from minfer.kv.checks import sequence_id, unknown
from minfer.kv.readers import Readers
from minfer.kv.runs import Counts, Entry, Move, Run, Share
from minfer.uninterrupted import Uninterrupted

if TYPE_CHECKING:
    from minfer.kv.cells import CellTables


@dataclass(frozen=True, slots=True)
class Change:
    """One step from the tables of `generation` to the next.

    runs, entries: by run id and by sequence, what holds afterwards; None is gone. moves: carried
    out in order, before the tables change. cleared: cells to wipe after the moves. counts: the
    store's counts afterwards.
    """

    generation: int
    counts: Counts
    runs: Mapping[int, Run | None]
    entries: Mapping[int, Entry | None]
    moves: tuple[Move, ...] = ()
    cleared: range = range(0)

    @property
    def is_empty(self) -> bool:
        return not (self.runs or self.entries)


class Draft:
    """A working copy of the entries and runs that an operation touches."""

    def __init__(self, tables: CellTables, what: str) -> None:
        """what: names the operation where it has to wait for the end of a step."""
        tables.refuse_while_open(what)
        self._tables = tables
        self._runs: dict[int, Run | None] = {}
        self._entries: dict[int, Entry | None] = {}
        self._searching = False
        self.next_run = tables.next_run
        self.readers = Readers(tables.readers)
        self.counts = tables.counts
        self.moves: list[Move] = []
        self.cleared = range(0)

    def known(self, seq: int) -> tuple[int, Entry]:
        """A sequence id and its entry; one that holds no run is refused (2.5)."""
        seq = sequence_id(seq)
        return seq, self.entry(seq)

    def entry(self, seq: int) -> Entry:
        """The entry of a sequence as the draft has it."""
        entry = self._entries[seq] if seq in self._entries else self._tables.entries.get(seq)
        if entry is None:
            raise unknown(seq)
        return entry

    def run(self, run_id: int) -> Run:
        """A run as the draft has it."""
        run = self._runs[run_id] if run_id in self._runs else self._tables.runs[run_id]
        assert run is not None, f"run {run_id} is gone"
        return run

    @property
    def runs(self) -> Mapping[int, Run]:
        """All runs by id as the draft has them; a copy, so not for every operation."""
        merged = {**self._tables.runs, **self._runs}
        return {run_id: run for run_id, run in merged.items() if run is not None}

    def put(self, seq: int, entry: Entry | None) -> None:
        """Give `seq` this entry, or take it away; a run that loses its readers is settled."""
        before = self._entries[seq] if seq in self._entries else self._tables.entries.get(seq)
        was, now = (one.share if one else None for one in (before, entry))
        self._entries[seq] = entry
        if was != now:
            self.readers.replace(was, now)
            if was is not None:
                self._settle(was)

    def put_run(self, run: Run) -> None:
        """Add a run, or change it."""
        self._set_run(run.id, run)

    def add_run(self, start: int, cap: int, owner: int) -> Run:
        """A new run of `owner`, with an id of its own."""
        run = Run(self.next_run, start, cap, owner)
        self.next_run += 1
        self.put_run(run)
        return run

    def abandon(self, run: Run) -> None:
        """The owner leaves a run: what others read of it is orphaned, the rest is free (5.2)."""
        rows = self.readers.longest(run.id)
        self._set_run(run.id, replace(run, owner=None, cap=rows) if rows else None)

    def _settle(self, left: Share) -> None:
        """Trim an orphan to what is still read of it."""
        run = self.run(left.run)
        if run.owner is None and self.readers.longest(run.id) < run.cap:
            self.abandon(run)

    def rows_read(self, run: Run) -> int:
        """Rows of a run that its owner or others read."""
        own = 0 if run.owner is None else self.entry(run.owner).private_rows
        return max(own, self.readers.longest(run.id))

    def move(self, run: int, src: int, dst: int, rows: int) -> None:
        """Copy rows once the change is carried out; none are no move."""
        if rows > 0 and src != dst:
            self.moves.append(Move(run, src, dst, rows))

    def count(self, **more: int) -> None:
        """Add to the counts of the store."""
        added = {name: getattr(self.counts, name) + n for name, n in more.items()}
        self.counts = replace(self.counts, **added)

    @contextmanager
    def searching(self) -> Iterator[None]:
        """A block in which `first_fit` sees the cells that the draft frees and takes."""
        with Uninterrupted(), self._tables.free.trial():
            self._searching = True
            try:
                yield
            finally:
                self._searching = False

    def _set_run(self, run_id: int, run: Run | None) -> None:
        if self._searching:
            before = self._runs[run_id] if run_id in self._runs else self._tables.runs.get(run_id)
            if before is not None:
                self._tables.free.give(before.start, before.cap)
            if run is not None:
                self._tables.free.take(run.start, run.cap)
        self._runs[run_id] = run

    def done(self) -> Change:
        """What was drafted."""
        return Change(
            generation=self._tables.generation,
            counts=self.counts,
            runs=self._runs,
            entries=self._entries,
            moves=tuple(self.moves),
            cleared=self.cleared,
        )
