"""Positions out of the middle of a sequence (contract 5.7): what happens to the tables."""

from __future__ import annotations

from minfer.errors import Refusal
from minfer.kv.cells import CellTables
from minfer.kv.change import Change, Draft
from minfer.kv.checks import whole_number


def remove(tables: CellTables, seq: int, start: int, length: int) -> Change:
    """Drop positions [start, start + length) of `seq`: later rows move down, freed cells are wiped.

    Turning the K rows that moved is the store's part.
    """
    draft = Draft(tables, "remove")
    seq, entry = draft.known(seq)
    start = whole_number(start, "start", "5.7")
    length = whole_number(length, "length", "5.7", low=1)
    end, run = start + length, draft.run(entry.run)
    if end > entry.written:
        raise Refusal(
            "5.7",
            f"positions [{start}, {end}) of sequence {seq} reach past its {entry.written} rows; "
            "give a start and a length inside them",
            {"seq": seq, "start": start, "length": length, "written": entry.written},
        )
    read = max(entry.base, draft.readers.longest(run.id))
    if start < read:
        whose = "lie in its share" if entry.base else "are read by other sequences"
        raise Refusal(
            "5.7",
            f"positions [{start}, {end}) of sequence {seq} begin below {read}, and rows [0, {read})"
            f" {whose}; remove from {read} on, or copy_prefix the sequence first",
            {"seq": seq, "start": start, "length": length, "read": read},
        )
    first = run.start - entry.base
    kept = entry.written - end
    draft.move(run.id, first + end, first + start, kept)
    draft.cleared = range(first + start + kept, first + entry.written)
    draft.put(seq, entry.with_rows(entry.written - length, entry.share))
    return draft.done()
