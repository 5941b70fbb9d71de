"""What the tables of a cell store hold, and what follows from it (contract 1, 5.1).

Pure values and pure functions. A `Run` is a stretch of cells; an `Entry` is one sequence: the run
it owns, the prefix it may read in another run, and how many rows are readable. Span lists, the
owner table and the occupied rows are derived, never stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from minfer.window import CellSpan

FREE = -1


@dataclass(frozen=True, slots=True)
class Run:
    """Cells [start, start + cap). `owner` is a sequence, or None once only readers are left."""

    id: int
    start: int
    cap: int
    owner: int | None

    @property
    def end(self) -> int:
        return self.start + self.cap


@dataclass(frozen=True, slots=True)
class Share:
    """The first `rows` positions of a sequence, read in run `run`, which begins at position 0."""

    run: int
    rows: int


class LastRow(NamedTuple):
    """What made the last readable row of a sequence, for who proves that it can be made again.

    token: its id. kind: of the batch that fed it. logits: xxh3 of its float32 logits, 64 bits, 0
    where they are unknown.
    """

    token: int
    kind: str
    logits: int


@dataclass(frozen=True, slots=True)
class Entry:
    """One sequence: its own run by id, its readable positions [0, written), its share.

    last: of its last row, None where no model fed it or the rows before it were others.
    """

    run: int
    written: int = 0
    share: Share | None = None
    last: LastRow | None = None

    @property
    def base(self) -> int:
        """Position of the first cell of the own run."""
        return self.share.rows if self.share else 0

    @property
    def private_rows(self) -> int:
        """Readable rows in the own run."""
        return self.written - self.base

    def with_rows(self, written: int, share: Share | None) -> Entry:
        """With other readable rows; what made the last one is known while it stays the last."""
        last = self.last if written == self.written else None
        return Entry(self.run, written, share, last)


class Slot(NamedTuple):
    """What a reservation gave: sequence `seq` owns cells [start, start + cap) as run `run`."""

    seq: int
    run: int
    start: int
    cap: int


class Move(NamedTuple):
    """`rows` cells copied verbatim from cell `src` on to cell `dst` on.

    run: who holds them afterwards. A run that is moved whole is named by its old and its new
    start, though only rows that somebody reads are copied; there may be none.
    """

    run: int
    src: int
    dst: int
    rows: int


@dataclass(frozen=True, slots=True)
class Counts:
    """What the store did so far (contract 5.9).

    defrags: compactions that moved a run, and cells_moved: the rows they copied. copy_on_writes:
    sequences that a step parted from a shared prefix. rows_copied: by that, and by copies of a
    prefix.
    """

    defrags: int = 0
    cells_moved: int = 0
    copy_on_writes: int = 0
    rows_copied: int = 0


@dataclass(frozen=True, slots=True)
class Stats:
    """Counts of cells, unless the name says otherwise (contract 5.9). The last four are `Counts`.

    reserved: in runs that a sequence owns. shared: read by a sequence that does not own them.
    orphaned: in runs without an owner. written: hold a row that somebody reads.
    """

    n_ctx: int
    reserved: int
    shared: int
    orphaned: int
    written: int
    free_cells: int
    free_runs: int
    largest_free_run: int
    sequences: int
    defrags: int
    cells_moved: int
    copy_on_writes: int
    rows_copied: int


def span_list(entry: Entry, runs: Mapping[int, Run]) -> tuple[CellSpan, ...]:
    """Where the positions of a sequence lie: the share, then the whole own run.

    The own run counts in full, written or not: spans say where a row lies, `written` says
    whether it may be read.
    """
    run = runs[entry.run]
    own = CellSpan(entry.base, run.start, run.cap)
    if entry.share is None:
        return (own,)
    return CellSpan(0, runs[entry.share.run].start, entry.share.rows), own


def written_cells(entry: Entry, runs: Mapping[int, Run]) -> tuple[range, ...]:
    """Cells of the readable rows of a sequence in position order, one range a span."""
    ranges = []
    for span in span_list(entry, runs):
        rows = min(span.length, entry.written - span.position)
        if rows > 0:
            ranges.append(range(span.cell, span.cell + rows))
    return tuple(ranges)


def owner_table(runs: Iterable[Run], n_ctx: int) -> list[int]:
    """The run id of every cell, FREE where there is none."""
    table = [FREE] * n_ctx
    for run in runs:
        table[run.start : run.end] = [run.id] * run.cap
    return table


def rows_read(entries: Iterable[Entry]) -> dict[int, int]:
    """By run id, the rows somebody reads: the owner's own or a reader's share, the larger."""
    rows: dict[int, int] = {}
    for entry in entries:
        rows[entry.run] = max(rows.get(entry.run, 0), entry.private_rows)
        if entry.share is not None:
            rows[entry.share.run] = max(rows.get(entry.share.run, 0), entry.share.rows)
    return rows


def problems(n_ctx: int, runs: Mapping[int, Run], entries: Mapping[int, Entry]) -> list[str]:
    """Every way in which the tables contradict themselves; empty if they are sound."""
    found = []
    end, last = 0, -1
    for run in sorted(runs.values(), key=lambda r: r.start):
        if run.start < end:
            found.append(f"run {run.id} begins at cell {run.start}, inside run {last}")
        if run.cap < 1 or run.end > n_ctx:
            found.append(f"run {run.id} [{run.start}, {run.end}) leaves the arena of {n_ctx}")
        end, last = max(end, run.end), run.id
        if run.owner is not None and run.owner not in entries:
            found.append(f"run {run.id} belongs to sequence {run.owner}, which is unknown")
    for seq, entry in entries.items():
        own = runs.get(entry.run)
        if own is None or own.owner != seq:
            found.append(f"sequence {seq} names run {entry.run} and does not own it")
        if entry.written < entry.base:
            found.append(f"sequence {seq} shares {entry.base} rows and reads {entry.written}")
        if entry.share is not None:
            found += _share_problems(seq, entry.share, runs, entries)
    rows = rows_read(entries.values())
    for run in runs.values():
        read = rows.get(run.id, 0)
        if read > run.cap:
            found.append(f"run {run.id} of {run.cap} cells holds {read} rows")
        if run.owner is None and read < run.cap:
            found.append(f"run {run.id} has no owner and {run.cap} cells, of which {read} are read")
    return found


def _share_problems(
    seq: int, share: Share, runs: Mapping[int, Run], entries: Mapping[int, Entry]
) -> list[str]:
    if share.rows < 1:
        return [f"sequence {seq} shares {share.rows} rows"]
    root = runs.get(share.run)
    if root is None or root.owner == seq:
        return [f"sequence {seq} shares run {share.run}, which is unknown or its own"]
    donor = None if root.owner is None else entries.get(root.owner)
    if donor is not None and donor.share is not None:
        return [f"sequence {seq} shares run {share.run}, which does not begin at position 0"]
    return []
