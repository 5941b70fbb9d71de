"""A prefix of one sequence for another: shared in place, or copied (contract 5.4, 5.8)."""

from __future__ import annotations

from minfer.errors import Refusal
from minfer.kv.cells import CellTables
from minfer.kv.change import Change, Draft
from minfer.kv.checks import whole_number
from minfer.kv.runs import Entry, Share, written_cells


def share(tables: CellTables, src: int, dst: int, rows: int) -> Change:
    """Let `dst` read the first `rows` rows of `src` where they lie; no bytes move (5.4)."""
    draft = Draft(tables, "share_prefix")
    (src, source), (dst, entry) = _two(draft, "5.4", src, dst)
    rows = whole_number(rows, "rows", "5.4", low=1)
    root, most = (source.run, source.written)
    if source.share is not None:
        root, most = source.share.run, source.share.rows
    if rows > most:
        what = "shares" if source.share else "has"
        raise Refusal(
            "5.4",
            f"sequence {dst} asks for {rows} rows of sequence {src}, which {what} {most}; "
            f"ask for {most} or fewer, or use copy_prefix",
            {"src": src, "dst": dst, "rows": rows, "most": most},
        )
    _refuse_unless_empty(draft, "5.4", dst, entry)
    draft.put(dst, entry.with_rows(rows, Share(root, rows)))
    return draft.done()


def copy(tables: CellTables, src: int, dst: int, rows: int) -> Change:
    """Give `dst` its own copies of the first `rows` rows of `src` (5.8).

    A `dst` that shares rows which `src` reads in the same cells keeps them: only those above are
    copied.
    """
    draft = Draft(tables, "copy_prefix")
    (src, source), (dst, entry) = _two(draft, "5.8", src, dst)
    rows = whole_number(
        rows,
        f"rows of sequence {src}",
        "5.8",
        low=1,
        high=source.written,
        way_out=f"it has {source.written} rows to copy",
    )
    held = _rows_in_common(draft, source, entry)
    if not held:
        _refuse_unless_empty(draft, "5.8", dst, entry)
    run = draft.run(entry.run)
    if not held <= rows <= held + run.cap:
        raise Refusal(
            "5.8",
            f"{rows} rows of sequence {src} cannot be copied to sequence {dst}, which holds {held} "
            f"and has cells for {held + run.cap}; ask for {held} to {held + run.cap}, or resize it",
            {"src": src, "dst": dst, "rows": rows, "held": held, "room": held + run.cap},
        )
    position = 0
    for cells in written_cells(source, tables.runs):
        first, last = max(position, held), min(position + len(cells), rows)
        if first < last:
            cell = cells.start + first - position
            draft.move(run.id, cell, run.start + first - held, last - first)
        position += len(cells)
    if rows > held:
        draft.put(dst, entry.with_rows(rows, entry.share))
        draft.count(rows_copied=rows - held)
    return draft.done()


def _two(
    draft: Draft, rule: str, src: int, dst: int
) -> tuple[tuple[int, Entry], tuple[int, Entry]]:
    """Both sequences, known and different."""
    source, target = draft.known(src), draft.known(dst)
    if source[0] == target[0]:
        message = f"sequence {source[0]} is both source and target; name two sequences"
        raise Refusal(rule, message, {"src": source[0], "dst": target[0]})
    return source, target


def _rows_in_common(draft: Draft, source: Entry, entry: Entry) -> int:
    """Rows that `entry` holds by a share alone and that `source` reads in the same cells."""
    share = entry.share
    if share is None or entry.private_rows:
        return 0
    same = source.share.run == share.run if source.share else source.run == share.run
    read = source.share.rows if source.share else source.written
    return share.rows if same and share.rows <= read else 0


def _refuse_unless_empty(draft: Draft, rule: str, dst: int, entry: Entry) -> None:
    """Refuse a target that holds rows, or whose run others read."""
    readers = draft.readers.longest(entry.run)
    if entry.written or readers:
        what = f"others read {readers} rows of its run"
        if entry.written:
            shared = f", {entry.base} of them shared" if entry.base else ""
            what = f"it has {entry.written} rows{shared}"
        raise Refusal(
            rule,
            f"sequence {dst} cannot take a prefix: {what}; give an empty sequence",
            {"dst": dst, "written": entry.written, "shared": entry.base, "readers": readers},
        )
