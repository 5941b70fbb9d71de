"""The plan of a step: what a batch does to the tables, as a value (contract 5.5)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from minfer.errors import Refusal
from minfer.kv import copy_on_write
from minfer.kv.batch import Batch, Group
from minfer.kv.cells import CellTables
from minfer.kv.change import Change, Draft
from minfer.kv.runs import Entry, Move, Run, span_list
from minfer.window import CellSpan, WindowMode


@dataclass(frozen=True, slots=True)
class Plan:
    """A batch resolved against the tables of one generation; one item a group in every tuple.

    begin: copy-on-write, and every sequence cut at its first position; it stays if the step fails.
    after: the entry as it stands once the step ended well. cells: where the rows of the group go.
    spans: span list of the sequence during the step. mode: how windows are written down.
    """

    begin: Change
    kind: str
    groups: tuple[Group, ...]
    after: tuple[Entry, ...]
    cells: tuple[range, ...]
    spans: tuple[tuple[CellSpan, ...], ...]
    mode: WindowMode

    @property
    def moves(self) -> tuple[Move, ...]:
        """The rows that are copied before anything is written, in order."""
        return self.begin.moves

    @property
    def kept(self) -> frozenset[int]:
        """Cells of rows above each group, which nobody may read before the step ends well."""
        above = []
        for group, cells, entry in zip(self.groups, self.cells, self.after, strict=True):
            rows = entry.written - group.t - group.n
            above.append(range(cells.stop, cells.stop + rows))
        return frozenset(cell for some in above for cell in some)


def make_plan(tables: CellTables, batch: Batch) -> Plan:
    """Resolve `batch`, or refuse it (5.5, 2.5). Changes nothing."""
    draft = Draft(tables, "a second step")
    for group in batch.groups:
        _refuse_gap(group, draft.entry(group.seq))
    copy_on_write.part(draft, tables, batch.groups)
    after, cells, spans = [], [], []
    for group in batch.groups:
        entry = draft.entry(group.seq)
        run = draft.run(entry.run)
        cells.append(store_cells_of(group, entry, run))
        end = max(entry.written, group.t + group.n)
        after.append(replace(entry, written=end, last=None))
        named = {run.id: run}
        if entry.share is not None:
            named[entry.share.run] = draft.run(entry.share.run)
        spans.append(span_list(entry, named))
    for group in batch.groups:
        entry = draft.entry(group.seq)
        draft.put(group.seq, entry.with_rows(group.t, entry.share))
    return Plan(
        begin=draft.done(),
        kind=batch.kind,
        groups=batch.groups,
        after=tuple(after),
        cells=tuple(cells),
        spans=tuple(spans),
        mode=mode_of_spans(spans),
    )


def _refuse_gap(group: Group, entry: Entry) -> None:
    if group.t > entry.written:
        raise Refusal(
            "5.5",
            f"sequence {group.seq} has {entry.written} rows and a group begins at position "
            f"{group.t}; begin at {entry.written} or below",
            {"seq": group.seq, "position": group.t, "written": entry.written},
        )


def store_cells_of(group: Group, entry: Entry, run: Run) -> range:
    """Cells of the positions of `group` in the own run of its sequence (contract 5.5)."""
    if group.t < entry.base:
        raise Refusal(
            "5.5",
            f"position {group.t} of sequence {group.seq} lies in its share, [0, {entry.base}), "
            "and rows that another sequence reads are never written",
            {"seq": group.seq, "position": group.t, "share": entry.base},
        )
    end, room = group.t + group.n, entry.base + run.cap
    if end > room:
        raise Refusal(
            "2.5",
            f"sequence {group.seq} needs position {end - 1} and its {run.cap} cells end before "
            f"position {room}; resize it to {end - entry.base} or more",
            {"seq": group.seq, "position": end - 1, "cap": run.cap, "room": room},
        )
    first = run.start + group.t - entry.base
    return range(first, first + group.n)


def mode_of_spans(spans: Sequence[Sequence[CellSpan]]) -> WindowMode:
    """Causal where cell equals position for all, else one span, else runs (contract 2.6)."""
    if any(len(own) > 1 for own in spans):
        return WindowMode.RUNS
    if len(spans) == 1 and spans[0][0].cell == 0:
        return WindowMode.CAUSAL
    return WindowMode.SPAN
