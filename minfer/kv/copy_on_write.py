"""Copy-on-write: a store never writes into cells that another sequence reads (contract 5.5).

Rows that a step writes are not copied; rows above them, which lose their cell, are.
"""

from __future__ import annotations

from dataclasses import replace

from minfer.errors import Refusal
from minfer.kv.batch import Group
from minfer.kv.cells import CellTables
from minfer.kv.change import Draft
from minfer.kv.reservations import shortened
from minfer.kv.runs import Run, Share


def part(draft: Draft, tables: CellTables, groups: tuple[Group, ...]) -> None:
    """Part the sequences of a step from the rows others read: sharers first, then donors.

    In order of their ids, so that places do not depend on the order of the groups.
    """
    ordered = sorted(groups)
    sharers = [group for group in ordered if group.t < draft.entry(group.seq).base]
    owners = [group for group in ordered if not draft.entry(group.seq).base]
    if not sharers and all(_is_clear(draft, group) for group in owners):
        return
    with draft.searching():
        for group in sharers:
            _part_sharer(draft, group)
        for group in owners:
            if not _is_clear(draft, group):
                _part_donor(draft, tables, group)
    copied = sum(move.rows for move in draft.moves)
    draft.count(rows_copied=copied)


def _is_clear(draft: Draft, group: Group) -> bool:
    """Whether no other sequence reads what the group writes."""
    return group.t >= draft.readers.longest(draft.entry(group.seq).run)


def _part_sharer(draft: Draft, group: Group) -> None:
    """Cut the share at t: private rows slide up, rows of the share above the group join them."""
    entry = draft.entry(group.seq)
    share, run = entry.share, draft.run(entry.run)
    assert share is not None
    _refuse_without_room(group, entry.written, run)
    end = group.t + group.n
    own = run.start - group.t  # the cell of position 0, were it in the run
    first = max(end, share.rows)
    draft.move(run.id, run.start + first - share.rows, own + first, entry.written - first)
    draft.move(run.id, draft.run(share.run).start + end, own + end, share.rows - end)
    draft.put(group.seq, replace(entry, share=shortened(share, group.t)))
    draft.count(copy_on_writes=1)


def _refuse_without_room(group: Group, written: int, run: Run) -> None:
    need, room = max(written, group.t + group.n), group.t + run.cap
    if need > room:
        raise Refusal(
            "5.5",
            f"sequence {group.seq} stores position {group.t} inside its share: its own run then "
            f"holds positions [{group.t}, {need}) and has {run.cap} cells; resize it to "
            f"{need - group.t}, or truncate it first",
            {"seq": group.seq, "position": group.t, "needed": need - group.t, "cap": run.cap},
        )


def _part_donor(draft: Draft, tables: CellTables, group: Group) -> None:
    """Leave the rows that others read to them, and go on in a new run above a share of them."""
    entry = draft.entry(group.seq)
    run, end = draft.run(entry.run), group.t + group.n
    need = run.cap - group.t
    draft.abandon(run)
    start = tables.free.first_fit(need)
    if start is None:
        raise _no_room_for_donor(tables, group, need, run)
    new = draft.add_run(start, need, group.seq)
    draft.move(new.id, run.start + end, start + group.n, entry.written - end)
    share = Share(run.id, group.t) if group.t else None
    draft.put(group.seq, replace(entry, run=new.id, share=share))
    draft.count(copy_on_writes=1)


def _no_room_for_donor(tables: CellTables, group: Group, need: int, run: Run) -> Refusal:
    free, largest = tables.free.cells, tables.free.largest
    readers = sorted(
        seq for seq, one in tables.entries.items() if one.share and one.share.run == run.id
    )
    return Refusal(
        "5.5",
        f"sequence {group.seq} stores position {group.t}, which sequences {readers} read too; its "
        f"new run needs {need} cells in a row, {free} are free, the largest run {largest}; release "
        "a reader, compact the store, or make room first",
        {
            "seq": group.seq,
            "position": group.t,
            "needed": need,
            "free": free,
            "largest": largest,
            "readers": readers,
        },
    )
