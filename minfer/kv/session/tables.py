"""The tables of a session file: runs, sequences, spans, owners, counters (contract 8.1).

Runs and sequences say everything. Spans and owners are written as well, derived from them, so that
a reader can tell tables that were tampered with or made by other rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minfer.kv.cells import CellTables
from minfer.kv.runs import FREE, Counts, Entry, LastRow, Run, Share, problems, rows_read, span_list
from minfer.kv.session.header import INT32_MAX, RECORDS, Header, damaged
from minfer.ops import KINDS

NONE = -1  # no share
COUNTER_MAX = 2**53  # no store gets there, and one that goes on counting stays within 64 bits
RUN = np.dtype([("id", "<i8"), ("start", "<i4"), ("cap", "<i4"), ("rows", "<i4"), ("zero", "<i4")])
SEQUENCE = np.dtype(
    [
        *(("id", "<i4"), ("written", "<i4"), ("run", "<i8"), ("share_run", "<i8")),
        *(("share_rows", "<i4"), ("kind", "<i4"), ("token", "<i4"), ("zero", "<i4")),
        ("logits", "<u8"),
    ]
)
SPAN = np.dtype([("seq", "<i4"), ("position", "<i4"), ("cell", "<i4"), ("length", "<i4")])
OWNER = np.dtype([("run", "<i8"), ("start", "<i4"), ("cells", "<i4")])
COUNTERS = np.dtype([(name, "<i8") for name in (*asdict(Counts()), "next_run")])
DTYPES = dict(zip(RECORDS, (RUN, SEQUENCE, SPAN, OWNER, COUNTERS), strict=True))
Records = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Tables:
    """What a store knows of its cells, apart from the store. runs by id, entries by sequence."""

    n_ctx: int
    runs: Mapping[int, Run]
    entries: Mapping[int, Entry]
    counts: Counts
    next_run: int

    @classmethod
    def of(cls, tables: CellTables) -> Tables:
        """Those of a store, as they stand."""
        runs, entries = dict(sorted(tables.runs.items())), dict(sorted(tables.entries.items()))
        return cls(tables.n_ctx, runs, entries, tables.counts, tables.next_run)

    def written(self) -> list[range]:
        """The cells that hold a row which somebody reads, ascending."""
        rows = rows_read(self.entries.values())
        runs = sorted(self.runs.values(), key=lambda run: run.start)
        return [range(r.start, r.start + rows[r.id]) for r in runs if rows.get(r.id)]

    def sizes(self) -> dict[str, int]:
        """The counts of a header: records of each table, and rows."""
        counted = {f"n_{name}": len(array) for name, array in self.records().items()}
        del counted["n_counters"]
        return {**counted, "n_rows": sum(map(len, self.written()))}

    def records(self) -> Records:
        """Every table as an array of its records."""
        rows = rows_read(self.entries.values())
        runs = [(r.id, r.start, r.cap, rows.get(r.id, 0), 0) for r in self.runs.values()]
        spans = [
            (seq, *span)
            for seq, entry in self.entries.items()
            for span in span_list(entry, self.runs)
        ]
        listed = {
            "runs": runs,
            "sequences": [_sequence(seq, entry) for seq, entry in self.entries.items()],
            "spans": spans,
            "owners": owners(self.runs.values(), self.n_ctx),
            "counters": [(*asdict(self.counts).values(), self.next_run)],
        }
        return {name: np.array(listed[name], dtype) for name, dtype in DTYPES.items()}


def without_logits(tables: Tables) -> Tables:
    """The same, but that nobody knows which logits the last rows gave."""
    entries = {
        seq: entry if entry.last is None else replace(entry, last=entry.last._replace(logits=0))
        for seq, entry in tables.entries.items()
    }
    return replace(tables, entries=entries)


def owners(runs: Iterable[Run], n_ctx: int) -> list[tuple[int, int, int]]:
    """The arena in stretches (run id, first cell, cells), in cell order; FREE is no run's."""
    stretches, cell = [], 0
    for run in sorted(runs, key=lambda r: r.start):
        if run.start > cell:
            stretches.append((FREE, cell, run.start - cell))
        stretches.append((run.id, run.start, run.cap))
        cell = run.end
    if cell < n_ctx:
        stretches.append((FREE, cell, n_ctx - cell))
    return stretches


def _sequence(seq: int, entry: Entry) -> tuple[int, ...]:
    share = (NONE, 0) if entry.share is None else (entry.share.run, entry.share.rows)
    kind, token, logits = 0, 0, 0
    if entry.last is not None:
        kind, token, logits = KINDS.index(entry.last.kind) + 1, entry.last.token, entry.last.logits
    return seq, entry.written, entry.run, *share, kind, token, 0, logits


def parse(header: Header, records: Records, where: str) -> Tables:
    """The tables that `records` hold; raises Damaged for any contradiction in them (8.2)."""
    for name, array in records.items():
        if name in ("runs", "sequences") and array["zero"].any():
            raise damaged(where, f"a reserved field of the {name} is not zero")
        if name in ("runs", "sequences") and any(a >= b for a, b in pairwise(array["id"].tolist())):
            raise damaged(where, f"the ids of its {name} do not ascend")
    entries = _entries(records["sequences"], where)
    owned = {entry.run: seq for seq, entry in entries.items()}
    *counts, next_run = records["counters"].item()
    runs = {
        id: Run(id, start, cap, owned.get(id)) for id, start, cap, _, _ in records["runs"].tolist()
    }
    if (
        min(next_run, *counts) < 0
        or max(next_run, *counts) > COUNTER_MAX
        or next_run <= max(runs, default=NONE)
        or min(runs, default=0) < 0
    ):
        raise damaged(
            where, f"counters {counts} and the next run {next_run} fit no {len(runs)} runs"
        )
    found = problems(header.n_ctx, runs, entries)
    if found:
        raise damaged(where, "; ".join(found[:3]))
    tables = Tables(header.n_ctx, runs, entries, Counts(*counts), next_run)
    for name, derived in tables.records().items():
        if derived.tobytes() != records[name].tobytes():  # numpy's comparison swallows interrupts
            raise damaged(where, f"its {name} are not those of its runs and sequences")
    if sum(map(len, tables.written())) != header.n_rows:
        raise damaged(where, f"it says {header.n_rows} rows and its tables say otherwise")
    return tables


def _entries(sequences: NDArray[Any], where: str) -> dict[int, Entry]:
    entries = {}
    for seq, written, run, share_run, rows, kind, token, _, logits in sequences.tolist():
        share = None if share_run == NONE else Share(share_run, rows)
        last = None
        if kind:
            if not 1 <= kind <= len(KINDS) or not 0 <= token <= INT32_MAX or not written:
                raise damaged(
                    where, f"the last row of sequence {seq} is of kind {kind}, token {token}"
                )
            last = LastRow(token, KINDS[kind - 1], logits)
        if seq < 0 or written < 0:
            raise damaged(where, f"sequence {seq} has {written} rows")
        entries[seq] = Entry(run, written, share, last)
    return entries
