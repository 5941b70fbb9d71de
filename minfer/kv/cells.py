"""The tables of a cell store: who owns which cells, and what is readable (contract 5).

Pure bookkeeping without arrays: every call checks first and changes afterwards, so one that
refuses leaves the tables as they were.
"""

from __future__ import annotations

import hashlib

from minfer.errors import Refusal
from minfer.kv.batch import Batch
from minfer.kv.checks import sequence_id, whole_number
from minfer.kv.free import FreeCells
from minfer.kv.plan import Plan, known, make_plan
from minfer.kv.runs import (
    Entry,
    Move,
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

__all__ = ["CellTables", "Move", "Slot", "Stats"]


class CellTables:
    """Runs and sequences of one arena of `n_ctx` cells; the same for all layers.

    `generation` rises with every change, so that a plan made before it is known to be stale.
    """

    def __init__(self, n_ctx: int) -> None:
        self.n_ctx = whole_number(
            n_ctx, "n_ctx", "10", low=1, way_out="a store needs a cell for every token it keeps"
        )
        self.generation = 0
        self._runs: dict[int, Run] = {}
        self._entries: dict[int, Entry] = {}
        self._free = FreeCells(self.n_ctx)
        self._next_run = 0
        self._open: Plan | None = None

    def reserve(self, seq: int, cap: int) -> Slot:
        """Cells for `cap` positions of `seq`: the lowest free run that holds them (5.2).

        A sequence that holds `cap` cells or more keeps its run.
        """
        seq = sequence_id(seq)
        cap = whole_number(cap, "cap", "5.2", low=1)
        self._refuse_while_open("reserve")
        entry = self._entries.get(seq)
        if entry is not None:
            run = self._runs[entry.run]
            if cap > run.cap:
                raise Refusal(
                    "5.2",
                    f"sequence {seq} holds {run.cap} cells and asks for {cap}; "
                    "a larger run is a matter for resize",
                    {"seq": seq, "cap": run.cap, "asked": cap},
                )
            return Slot(seq, run.id, run.start, run.cap)
        start = self._free.first_fit(cap)
        if start is None:
            raise self._no_room(seq, cap)
        self._free.take(start, cap)
        run = Run(self._next_run, start, cap, owner=seq)
        self._next_run += 1
        self._runs[run.id] = run
        self._entries[seq] = Entry(run.id)
        self.generation += 1
        return Slot(seq, run.id, start, cap)

    def _no_room(self, seq: int, cap: int) -> Refusal:
        free, largest = self._free.cells, self._free.largest
        return Refusal(
            "5.2",
            f"sequence {seq} asks for {cap} cells in a row; of {self.n_ctx}, {free} are free, "
            f"the largest run {largest}; release a sequence or ask for {largest} or fewer",
            {"seq": seq, "asked": cap, "free": free, "largest": largest, "n_ctx": self.n_ctx},
        )

    def release(self, seq: int) -> None:
        """Forget `seq` and free its run (5.2)."""
        seq, entry = self._known(seq)
        self._refuse_while_open("release")
        run = self._runs.pop(entry.run)
        del self._entries[seq]
        self._free.give(run.start, run.cap)
        self.generation += 1

    def truncate(self, seq: int, rows: int) -> None:
        """Keep the first `rows` positions of `seq`; tables only (5.11)."""
        seq, entry = self._known(seq)
        rows = whole_number(
            rows,
            f"rows of sequence {seq}",
            "5.11",
            high=entry.written,
            way_out=f"it has {entry.written} rows to keep",
        )
        self._refuse_while_open("truncate")
        self._entries[seq] = Entry(entry.run, rows, entry.share)
        self.generation += 1

    def plan(self, batch: Batch) -> Plan:
        """What `batch` would do (5.5); changes nothing."""
        self._refuse_while_open("a second step")
        return make_plan(batch, self.generation, self._entries, self._runs)

    def apply(self, plan: Plan) -> None:
        """Open the step of `plan`: rows from each group's first position on become unreadable."""
        self._refuse_while_open("a second step")
        if plan.generation != self.generation:
            raise Refusal(
                "5.5",
                f"a plan of generation {plan.generation} is stale, the store is at generation "
                f"{self.generation}; plan the batch again",
                {"plan": plan.generation, "store": self.generation},
            )
        self._open = plan
        self._install(plan, plan.during)

    def commit(self, plan: Plan) -> None:
        """End the open step well: its rows become readable."""
        if plan is not self._open:
            raise Refusal("5.5", "this plan is not the open step of the store; apply it first")
        self._install(plan, plan.after)
        self._open = None

    def rollback(self, plan: Plan) -> None:
        """If `plan` is still open, end it badly: its groups are truncated to their first position.

        Safe to repeat, and after a commit that was interrupted.
        """
        if plan is self._open:
            self._install(plan, plan.during)
            self._open = None

    def _install(self, plan: Plan, entries: tuple[Entry, ...]) -> None:
        self._entries.update(
            (group.seq, entry) for group, entry in zip(plan.groups, entries, strict=True)
        )
        self.generation += 1

    def spans(self, seq: int) -> list[CellSpan]:
        """Where positions of `seq` lie, in position order; the own run counts in full.

        `written(seq)` says up to where they may be read.
        """
        return list(span_list(self._known(seq)[1], self._runs))

    def has(self, seq: int) -> bool:
        """Whether `seq` holds a run."""
        return sequence_id(seq) in self._entries

    def cap(self, seq: int) -> int:
        """Number of positions `seq` has cells for: its share and its own run."""
        entry = self._known(seq)[1]
        return entry.base + self._runs[entry.run].cap

    def written(self, seq: int) -> int:
        """Number of readable rows of `seq`."""
        return self._known(seq)[1].written

    def written_cells(self, seq: int) -> tuple[range, ...]:
        """Cells of the readable rows of `seq`, in position order."""
        return written_cells(self._known(seq)[1], self._runs)

    def owners(self) -> list[int]:
        """The run id of every cell, FREE (-1) where there is none."""
        return owner_table(self._runs.values(), self.n_ctx)

    def stats(self) -> Stats:
        """Counts of the whole store (5.9)."""
        return Stats(
            n_ctx=self.n_ctx,
            reserved=self.n_ctx - self._free.cells,
            written=sum(rows_read(self._entries.values()).values()),
            free_cells=self._free.cells,
            free_runs=self._free.count,
            largest_free_run=self._free.largest,
            sequences=len(self._entries),
        )

    def digest(self) -> str:
        """A hash of everything the tables hold, generation aside; equal tables, equal digest."""
        held = (
            self.n_ctx,
            sorted(self._runs.items()),
            sorted(self._entries.items()),
            self._free.runs(),
            self._next_run,
            self._open is not None,
        )
        return hashlib.blake2b(repr(held).encode(), digest_size=16).hexdigest()

    def check(self) -> None:
        """Raise AssertionError with every contradiction in the tables (a test's tool)."""
        found = problems(self.n_ctx, self._runs, self._entries)
        free, cell = [], 0
        for run in sorted(self._runs.values(), key=lambda r: r.start):
            if run.start > cell:
                free.append((cell, run.start - cell))
            cell = run.end
        if cell < self.n_ctx:
            free.append((cell, self.n_ctx - cell))
        if free != self._free.runs():
            found.append(f"free runs are {free} and the free list says {self._free.runs()}")
        if self._free.cells != sum(n for _, n in free):
            found.append(f"{self._free.cells} cells are counted free of {free}")
        if self._free.largest != max((n for _, n in free), default=0):
            found.append(f"the largest of {free} is not {self._free.largest}")
        if found:
            raise AssertionError("; ".join(found))

    def _known(self, seq: int) -> tuple[int, Entry]:
        seq = sequence_id(seq)
        return seq, known(self._entries, seq)

    def _refuse_while_open(self, what: str) -> None:
        if self._open is not None:
            seqs = [group.seq for group in self._open.groups]
            raise Refusal(
                "5.5",
                f"{what} has to wait: a step over sequences {seqs} is open; end its block first",
                {"open": seqs},
            )
