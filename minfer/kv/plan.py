"""The plan of a step: what a batch does to the tables, as a value (contract 5.5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from minfer.errors import Refusal
from minfer.kv.batch import Batch, Group
from minfer.kv.runs import Entry, Move, Run, span_list
from minfer.window import CellSpan, WindowMode


@dataclass(frozen=True, slots=True)
class Plan:
    """A batch resolved against the tables of one generation; one item a group in every tuple.

    after: the entry as it stands once the step ended well. cells: where the rows of the group go.
    spans: span list of the sequence during the step.
    copies: rows to copy before anything is written. mode: how windows are written down.
    """

    generation: int
    kind: str
    groups: tuple[Group, ...]
    after: tuple[Entry, ...]
    cells: tuple[range, ...]
    spans: tuple[tuple[CellSpan, ...], ...]
    mode: WindowMode
    copies: tuple[Move, ...] = ()

    @property
    def during(self) -> tuple[Entry, ...]:
        """The entries while the step runs, and for good if it fails: readable up to `t`."""
        return tuple(
            replace(entry, written=group.t)
            for entry, group in zip(self.after, self.groups, strict=True)
        )


def make_plan(
    batch: Batch, generation: int, entries: Mapping[int, Entry], runs: Mapping[int, Run]
) -> Plan:
    """Resolve `batch`, or refuse it (5.5, 2.5). Changes nothing."""
    after, cells, spans = [], [], []
    for group in batch.groups:
        entry = known(entries, group.seq)
        _refuse_gap(group, entry)
        run = runs[entry.run]
        after.append(replace(entry, written=max(entry.written, group.t + group.n)))
        cells.append(store_cells_of(group, entry, run))
        spans.append(span_list(entry, runs))
    return Plan(
        generation=generation,
        kind=batch.kind,
        groups=batch.groups,
        after=tuple(after),
        cells=tuple(cells),
        spans=tuple(spans),
        mode=mode_of_spans(spans),
    )


def known(entries: Mapping[int, Entry], seq: int) -> Entry:
    """The entry of a sequence; one that holds no run is refused."""
    entry = entries.get(seq)
    if entry is None:
        message = f"sequence {seq} is unknown to the store; reserve cells for it first"
        raise Refusal("2.5", message, {"seq": seq})
    return entry


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
            f"position {room}; reserve {end - entry.base} or more",
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
