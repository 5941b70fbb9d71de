"""The tables of a cell store: who owns which cells, and what is readable (contract 5).

Pure bookkeeping without arrays. Operations are planned elsewhere, as values; `install` makes them
so, and `commit` makes the rows of a step readable. Nothing else changes a table.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from minfer.errors import Refusal
from minfer.kv.change import Change
from minfer.kv.checks import sequence_id, unknown, whole_number
from minfer.kv.free import FreeCells
from minfer.kv.readers import Readers
from minfer.kv.runs import (
    Counts,
    Entry,
    LastRow,
    Run,
    Slot,
    Stats,
    owner_table,
    problems,
    rows_read,
    span_list,
    written_cells,
)
from minfer.window import CellSpan

if TYPE_CHECKING:
    from minfer.kv.plan import Plan
    from minfer.kv.session.tables import Tables


class CellTables:
    """Runs and sequences of one arena of `n_ctx` cells; the same for all layers.

    runs, entries, free, readers, counts: for planners to read. generation: rises with every
    change, so that a plan made before it is known to be stale.
    """

    def __init__(self, n_ctx: int) -> None:
        self.n_ctx = whole_number(
            n_ctx, "n_ctx", "10", low=1, way_out="a store needs a cell for every token it keeps"
        )
        self.generation = 0
        self.runs: dict[int, Run] = {}
        self.entries: dict[int, Entry] = {}
        self.free = FreeCells(self.n_ctx)
        self.readers = Readers()
        self.counts = Counts()
        self.next_run = 0
        self._open: Plan | None = None
        self._broken = ""  # why everything is refused

    def install(self, change: Change) -> None:
        """Make `change` so; one that was planned on other tables is refused (5.5)."""
        self.refuse_stale(change)
        if change.is_empty:
            return
        for run_id in change.runs:
            if run_id in self.runs:
                gone = self.runs.pop(run_id)
                self.free.give(gone.start, gone.cap)
        for run in change.runs.values():
            if run is not None:
                self.free.take(run.start, run.cap)
                self.runs[run.id] = run
                self.next_run = max(self.next_run, run.id + 1)
        for seq, entry in change.entries.items():
            before = self.entries.pop(seq, None)
            self.readers.replace(*(one.share if one else None for one in (before, entry)))
            if entry is not None:
                self.entries[seq] = entry
        self.counts = change.counts
        self.generation += 1

    def replace(self, held: Tables | None) -> None:
        """Hold these tables instead of the present ones; None for nothing at all (8.2)."""
        self.refuse_while_open("load")
        runs, entries = (held.runs, held.entries) if held else ({}, {})
        free, readers = FreeCells(self.n_ctx), Readers()
        for run in runs.values():
            free.take(run.start, run.cap)
        for entry in entries.values():
            readers.replace(None, entry.share)
        self.runs, self.entries, self.free, self.readers = dict(runs), dict(entries), free, readers
        self.counts, self.next_run = (held.counts, held.next_run) if held else (Counts(), 0)
        self.generation += 1

    def open(self, plan: Plan) -> None:
        """The step of `plan` is open, its beginning installed."""
        self._open = plan

    @contextmanager
    def lost_by_errors(self) -> Iterator[None]:
        """Around changes of cells: after an error in the block everything is refused."""
        try:
            yield
        except BaseException as error:
            self.lose(error, "it came while its cells were being changed; make another")
            raise

    def lose(self, error: BaseException, why: str) -> None:
        """Refuse everything from now on. why: in words, with the way out."""
        said = (str(error).splitlines() or [""])[0]
        self._broken = f"the store is lost: {type(error).__name__}: {said}; {why}"

    def commit(self, plan: Plan, lasts: Mapping[int, LastRow] | None = None) -> None:
        """End the open step well: its rows become readable.

        lasts: by sequence, what made the last row of its group.
        """
        if not self.is_open(plan):
            raise Refusal("5.5", "this plan is not the open step of the store; open it first")
        self._open = None
        for group, entry in zip(plan.groups, plan.after, strict=True):
            if entry.written == group.t + group.n:  # its last row is the sequence's
                entry = replace(entry, last=(lasts or {}).get(group.seq))
            self.entries[group.seq] = entry
        self.generation += 1

    def abort(self, plan: Plan) -> None:
        """If `plan` is still open, end it badly: its groups stay cut at their first position."""
        if self.is_open(plan):
            self._open = None

    def is_open(self, plan: Plan) -> bool:
        """Whether the step of `plan` has begun and not ended."""
        return plan is self._open

    def refuse_stale(self, change: Change) -> None:
        """Refuse a change that was planned on other tables."""
        if change.generation != self.generation:
            raise Refusal(
                "5.5",
                f"a plan of generation {change.generation} is stale, the store is at generation "
                f"{self.generation}; plan it again",
                {"plan": change.generation, "store": self.generation},
            )

    def refuse_while_open(self, what: str) -> None:
        """Refuse any other change while a step is open."""
        self._refuse_broken()
        if self._open is not None:
            seqs = [group.seq for group in self._open.groups]
            raise Refusal(
                "5.5",
                f"{what} has to wait: a step over sequences {seqs} is open; end its block first",
                {"open": seqs},
            )

    def _refuse_broken(self) -> None:
        if self._broken:
            raise Refusal("5.5", self._broken)

    def known(self, seq: int) -> Entry:
        """The entry of a sequence; one that holds no run is refused (2.5)."""
        self._refuse_broken()
        seq = sequence_id(seq)
        entry = self.entries.get(seq)
        if entry is None:
            raise unknown(seq)
        return entry

    def has(self, seq: int) -> bool:
        """Whether `seq` holds a run."""
        return sequence_id(seq) in self.entries

    def slot(self, seq: int) -> Slot:
        """The run that `seq` owns."""
        run = self.runs[self.known(seq).run]
        return Slot(sequence_id(seq), run.id, run.start, run.cap)

    def spans(self, seq: int) -> list[CellSpan]:
        """Where positions of `seq` lie, in position order; the own run counts in full.

        `written` says up to where they may be read.
        """
        return list(span_list(self.known(seq), self.runs))

    def cap(self, seq: int) -> int:
        """Number of positions `seq` has cells for: its share and its own run."""
        entry = self.known(seq)
        return entry.base + self.runs[entry.run].cap

    def written(self, seq: int) -> int:
        """Number of readable rows of `seq`."""
        return self.known(seq).written

    def written_cells(self, seq: int) -> tuple[range, ...]:
        """Cells of the readable rows of `seq`, in position order."""
        return written_cells(self.known(seq), self.runs)

    def read_cells(self) -> set[int]:
        """Every cell that holds a row which somebody reads."""
        read = rows_read(self.entries.values())
        starts = {run_id: self.runs[run_id].start for run_id in read}
        return {starts[run_id] + i for run_id, rows in read.items() for i in range(rows)}

    def owners(self) -> list[int]:
        """The run id of every cell, FREE (-1) where there is none."""
        return owner_table(self.runs.values(), self.n_ctx)

    def stats(self) -> Stats:
        """Counts of the whole store (5.9)."""
        orphaned = sum(run.cap for run in self.runs.values() if run.owner is None)
        return Stats(
            n_ctx=self.n_ctx,
            reserved=self.n_ctx - self.free.cells - orphaned,
            shared=sum(max(counts) for _, counts in self.readers.items()),
            orphaned=orphaned,
            written=sum(rows_read(self.entries.values()).values()),
            free_cells=self.free.cells,
            free_runs=self.free.count,
            largest_free_run=self.free.largest,
            sequences=len(self.entries),
            **asdict(self.counts),
        )

    def digest(self) -> str:
        """A hash of everything the tables hold, generation aside; equal tables, equal digest."""
        held = (
            self.n_ctx,
            sorted(self.runs.items()),
            sorted(self.entries.items()),
            self.free.runs(),
            self.readers.items(),
            self.counts,
            self.next_run,
            self._open is not None,
        )
        return hashlib.blake2b(repr(held).encode(), digest_size=16).hexdigest()

    def check(self) -> None:
        """Raise AssertionError with every contradiction in the tables (a test's tool)."""
        found = problems(self.n_ctx, self.runs, self.entries)
        found += self.free.problems(self.runs.values(), self.n_ctx)
        readers = Readers()
        for entry in self.entries.values():
            readers.replace(None, entry.share)
        if readers.items() != self.readers.items():
            found.append(f"readers are {readers.items()} and counted as {self.readers.items()}")
        if found:
            raise AssertionError("; ".join(found))
