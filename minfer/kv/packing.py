"""Compaction: runs move together so that free cells lie in a row (contract 5.6)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from minfer import settings
from minfer.errors import Refusal
from minfer.kv.cells import CellTables
from minfer.kv.change import Change, Draft
from minfer.kv.checks import whole_number
from minfer.kv.runs import Move, Run


def defrag(tables: CellTables, need: int | None = None) -> Change:
    """Pack runs downward until `need` free cells lie in a row, or all of them (5.6)."""
    draft = Draft(tables, "defrag")
    if defrag_is_off():
        raise Refusal(
            "5.6",
            "MINFER_NO_KV_DEFRAG=1 turns compaction off; unset it to compact the store",
            {"MINFER_NO_KV_DEFRAG": "1"},
        )
    if need is not None:
        need = whole_number(need, "need", "5.6", low=1)
        refuse_above_free("5.6", tables, need, f"a gap of {need} cells")
        if tables.free.largest >= need:
            return draft.done()
    pack(draft, packed(tables.runs.values(), need))
    return draft.done()


def defrag_is_off() -> bool:
    """Whether compaction is turned off."""
    return settings.flag("MINFER_NO_KV_DEFRAG")


def refuse_above_free(rule: str, tables: CellTables, need: int, what: str, **facts: object) -> None:
    """Refuse what all free cells together cannot give."""
    free = tables.free.cells
    if need > free:
        raise Refusal(
            rule,
            f"{what} needs {need} free cells; of {tables.n_ctx}, {free} are free; release "
            "sequences, or shrink them with resize",
            {"need": need, "free": free, "n_ctx": tables.n_ctx, **facts},
        )


def in_order(runs: Iterable[Run]) -> list[Run]:
    """Runs by their place in the arena."""
    return sorted(runs, key=lambda run: run.start)


def packed(runs: Iterable[Run], need: int | None = None) -> dict[int, int]:
    """New starts by run id: each run at the end of the one below it.

    Stops as soon as `need` cells are free below the next run.
    """
    starts, end = {}, 0
    for run in in_order(runs):
        if need is not None and run.start - end >= need:
            break
        if run.start != end:
            starts[run.id] = end
        end += run.cap
    return starts


def grown(runs: Iterable[Run], larger: Run, cap: int) -> dict[int, int]:
    """New starts by run id, with room for `cap` cells at the run `larger`.

    All up to it are packed; those above move up only as far as they are pushed.
    """
    starts, end, passed = {}, 0, False
    for run in in_order(runs):
        start = max(run.start, end) if passed else end
        if start != run.start:
            starts[run.id] = start
        end = start + (cap if run.id == larger.id else run.cap)
        passed = passed or run.id == larger.id
    return starts


def first_gap(runs: Iterable[Run], need: int) -> int:
    """The lowest cell from which `need` or more are free; there is room at the top at least."""
    end = 0
    for run in in_order(runs):
        if run.start - end >= need:
            break
        end = run.end
    return end


def pack(draft: Draft, starts: Mapping[int, int]) -> None:
    """Move runs to new starts, their rows in an order that overwrites none too early."""
    moves = []
    for run_id, start in starts.items():
        run = draft.run(run_id)
        moves.append(Move(run_id, run.start, start, draft.rows_read(run)))
        draft.put_run(replace(run, start=start))
    draft.moves += order_moves(moves)
    draft.count(defrags=int(bool(moves)), cells_moved=sum(move.rows for move in moves))


def order_moves(moves: Iterable[Move]) -> list[Move]:
    """Upward moves first, from the top down, then downward moves from the bottom up (5.6).

    For moves that keep the order of the runs: a run is then never written over one that has still
    to move.
    """
    by_source = sorted(moves, key=lambda move: move.src)
    up = [move for move in reversed(by_source) if move.dst > move.src]
    return up + [move for move in by_source if move.dst < move.src]
