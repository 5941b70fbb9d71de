"""Cells for sequences: reserve, release, truncate, resize (contract 5.2, 5.3, 5.11)."""

from __future__ import annotations

from dataclasses import replace

from minfer.errors import Refusal
from minfer.kv.cells import CellTables
from minfer.kv.change import Change, Draft
from minfer.kv.checks import sequence_id, whole_number
from minfer.kv.packing import defrag_is_off, first_gap, grown, pack, packed, refuse_above_free
from minfer.kv.runs import Entry, Run, Share


def reserve(tables: CellTables, seq: int, cap: int, *, defrag: bool = False) -> Change:
    """Cells for `cap` positions of `seq`: the lowest free run that holds them (5.2).

    A sequence that holds `cap` cells or more keeps its run. defrag: compact where no free run is
    large enough and all free cells together are (5.3).
    """
    draft = Draft(tables, "reserve")
    seq, cap = sequence_id(seq), whole_number(cap, "cap", "5.2", low=1)
    held = tables.entries.get(seq)
    if held is not None:
        _refuse_larger(seq, tables.runs[held.run], cap)
        return draft.done()
    start = tables.free.first_fit(cap)
    if start is None:
        start = _room_by_packing(draft, tables, seq, cap, defrag)
    run = draft.add_run(start, cap, seq)
    draft.put(seq, Entry(run.id))
    return draft.done()


def _room_by_packing(draft: Draft, tables: CellTables, seq: int, cap: int, defrag: bool) -> int:
    free, largest = tables.free.cells, tables.free.largest
    if not defrag or free < cap or defrag_is_off():
        most = free if defrag and not defrag_is_off() else largest
        way_out = f"release a sequence or ask for {most} or fewer" if most else "release a sequence"
        if free >= cap and defrag_is_off():
            way_out = "MINFER_NO_KV_DEFRAG=1 turns compaction off, which would make room"
        elif free >= cap:
            way_out = f"reserve_with_defrag makes room, or {way_out}"
        raise Refusal(
            "5.3" if defrag else "5.2",
            f"sequence {seq} asks for {cap} cells in a row; of {tables.n_ctx}, {free} are free, "
            f"the largest run {largest}; {way_out}",
            {"seq": seq, "asked": cap, "free": free, "largest": largest, "n_ctx": tables.n_ctx},
        )
    pack(draft, packed(tables.runs.values(), need=cap))
    return first_gap(draft.runs.values(), cap)


def _refuse_larger(seq: int, run: Run, cap: int) -> None:
    if cap > run.cap:
        raise Refusal(
            "5.2",
            f"sequence {seq} holds {run.cap} cells and asks for {cap}; "
            "a larger run is a matter for resize",
            {"seq": seq, "cap": run.cap, "asked": cap},
        )


def release(tables: CellTables, seq: int) -> Change:
    """Forget `seq` and free its run; what others read of it stays as an orphan (5.2)."""
    draft = Draft(tables, "release")
    seq, entry = draft.known(seq)
    draft.put(seq, None)
    draft.abandon(draft.run(entry.run))
    return draft.done()


def truncate(tables: CellTables, seq: int, rows: int) -> Change:
    """Keep the first `rows` positions of `seq`; a share shrinks with them (5.11)."""
    draft = Draft(tables, "truncate")
    seq, entry = draft.known(seq)
    rows = whole_number(
        rows,
        f"rows of sequence {seq}",
        "5.11",
        high=entry.written,
        way_out=f"it has {entry.written} rows to keep",
    )
    if rows < entry.written:
        draft.put(seq, entry.with_rows(rows, shortened(entry.share, rows)))
    return draft.done()


def shortened(share: Share | None, rows: int) -> Share | None:
    """At most the first `rows` rows of a share; none is no share."""
    if share is None or share.rows <= rows:
        return share
    return Share(share.run, rows) if rows else None


def resize(tables: CellTables, seq: int, cap: int, *, defrag: bool = False) -> Change:
    """Give the run of `seq` `cap` cells, in place: fewer, or more from those just above (5.3).

    defrag: move other runs where the cells above are taken and enough are free elsewhere.
    """
    draft = Draft(tables, "resize")
    seq, entry = draft.known(seq)
    cap = whole_number(cap, "cap", "5.3", low=1)
    run = draft.run(entry.run)
    _refuse_below_rows(draft, seq, run, cap)
    above = tables.free.length_at(run.end)
    if cap - run.cap > above:
        if not defrag or defrag_is_off():
            raise _no_room_above(tables, seq, run, cap, above, defrag)
        asks = f"sequence {seq} holds {run.cap} cells, asks for {cap} and"
        refuse_above_free("5.3", tables, cap - run.cap, asks, seq=seq, cap=run.cap, asked=cap)
        pack(draft, grown(tables.runs.values(), run, cap))
        run = draft.run(run.id)
    if cap != run.cap:
        draft.put_run(replace(run, cap=cap))
    return draft.done()


def _refuse_below_rows(draft: Draft, seq: int, run: Run, cap: int) -> None:
    rows, read = draft.rows_read(run), draft.readers.longest(run.id)
    if cap < rows:
        who = "other sequences read" if read == rows else "it holds"
        raise Refusal(
            "5.3",
            f"sequence {seq} cannot shrink to {cap} cells: {who} {rows} rows of its run; "
            "truncate or release first",
            {"seq": seq, "asked": cap, "rows": rows, "readers": read},
        )


def _no_room_above(
    tables: CellTables, seq: int, run: Run, cap: int, above: int, defrag: bool
) -> Refusal:
    way_out = "resize_with_defrag moves what lies above"
    if defrag:
        way_out = "MINFER_NO_KV_DEFRAG=1 turns compaction off, which could make room"
    return Refusal(
        "5.3",
        f"sequence {seq} holds cells [{run.start}, {run.end}) and asks for {cap}; {above} are free "
        f"just above, {tables.free.cells} in all; {way_out}",
        {"seq": seq, "cap": run.cap, "asked": cap, "above": above, "free": tables.free.cells},
    )
