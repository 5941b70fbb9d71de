"""Resizing in place, and the two calls that compact when there is no room (contract 5.3)."""

from __future__ import annotations

import pytest
from refusals import refused
from stores import A, B, C, D, Told, free_runs, layout

from minfer.kv.runs import FREE, Move, Slot


def three(n_ctx: int = 20, rows: int = 3) -> Told:
    """A [0, 4), B [4, 8), C [8, 12), each with `rows` rows, in 20 cells."""
    told = Told(n_ctx=n_ctx, n_layer=2)
    for seq in (A, B, C):
        told.reserve(seq, 4, rows=rows)
    return told


# --- in place -------------------------------------------------------------------------------------


def test_a_run_shrinks_to_its_rows_and_grows_back() -> None:
    told = three()
    store = told.store
    assert store.resize(B, 3) == Slot(B, 1, 4, 3)
    assert (store.cap(B), free_runs(store)) == (3, [(7, 8), (12, 20)])
    assert store.resize(B, 4) == Slot(B, 1, 4, 4)
    assert layout(store) == [(0, 0, 4), (1, 4, 4), (2, 8, 4), (FREE, 12, 8)]
    assert store.resize(C, 12) == Slot(C, 2, 8, 12)
    assert free_runs(store) == []
    told.check()
    told.attend((C, 3, 9), (B, 3, 1))
    assert store.resize(C, 12) == Slot(C, 2, 8, 12), "its own size again"


def test_the_cap_is_that_of_the_own_run() -> None:
    told = three()
    told.truncate(C, 0)
    told.share(A, C, 3)
    assert told.store.cap(C) == 3 + 4
    assert told.store.resize(C, 6) == Slot(C, 2, 8, 6)
    assert told.store.cap(C) == 3 + 6
    assert told.store.spans(C) == [(0, 0, 3), (3, 8, 6)]
    told.attend((C, 3, 5))
    error = refused(told.store, "5.3", lambda: told.store.resize(C, 4), "5", "4")
    assert error.facts["seq"] == C
    assert told.store.resize(C, 5).cap == 5


def test_a_donor_keeps_what_its_readers_read() -> None:
    told = three()
    told.truncate(C, 0)
    told.share(A, C, 3)
    told.truncate(A, 1)
    refused(told.store, "5.3", lambda: told.store.resize(A, 2), "3", "2")
    assert told.store.resize(A, 3) == Slot(A, 0, 0, 3)
    told.release(C)
    assert told.store.resize(A, 1) == Slot(A, 0, 0, 1)
    told.check()


def test_growth_takes_the_cells_just_above_and_no_others() -> None:
    told = three()
    told.release(B)
    store = told.store
    refused(store, "5.3", lambda: store.resize(A, 9), "9")
    assert store.resize(A, 8) == Slot(A, 0, 0, 8)
    assert layout(store) == [(0, 0, 8), (2, 8, 4), (FREE, 12, 8)]
    refused(store, "5.3", lambda: store.resize(C, 13), "13")
    told.check()


# --- with compaction ------------------------------------------------------------------------------


def test_no_moves_where_there_is_room_already() -> None:
    told = three()
    store = told.store
    assert store.resize_with_defrag(C, 6) == (Slot(C, 2, 8, 6), [])
    assert store.resize_with_defrag(B, 3) == (Slot(B, 1, 4, 3), [])
    assert store.reserve_with_defrag(D, 5) == (Slot(D, 3, 14, 5), [])
    assert store.reserve_with_defrag(A, 4) == (Slot(A, 0, 0, 4), []), "held already"
    assert store.stats().defrags == 0


def test_growing_the_first_of_three_runs() -> None:
    told = three(n_ctx=14)
    store = told.store
    slot, moves = store.resize_with_defrag(A, 6)
    assert slot == Slot(A, 0, 0, 6)
    assert moves == [Move(2, 8, 10, 3), Move(1, 4, 6, 3)]
    assert layout(store) == [(0, 0, 6), (1, 6, 4), (2, 10, 4)]
    told.check()
    stats = store.stats()
    assert (stats.defrags, stats.cells_moved, stats.rows_copied) == (1, 6, 0)
    told.attend((A, 3, 3), (B, 3, 1), (C, 3, 1))


def test_growing_between_holes_packs_downward_and_pushes_upward() -> None:
    told = Told(n_ctx=16, n_layer=2)
    for seq, cap in ((9, 2), (A, 4), (B, 3), (8, 1), (C, 4)):
        told.reserve(seq, cap, rows=min(cap, 3) - 1)
    told.release(9)
    told.release(8)
    store = told.store
    assert layout(store) == [
        (FREE, 0, 2), (1, 2, 4), (2, 6, 3), (FREE, 9, 1), (4, 10, 4), (FREE, 14, 2)
    ]  # fmt: skip
    slot, moves = store.resize_with_defrag(A, 9)
    assert slot == Slot(A, 1, 0, 9)
    assert [run for run, *_ in layout(store)] == [1, 2, 4]
    assert layout(store) == [(1, 0, 9), (2, 9, 3), (4, 12, 4)]
    assert moves == [Move(4, 10, 12, 2), Move(2, 6, 9, 2), Move(1, 2, 0, 2)]
    told.check()
    told.attend((A, 2, 7), (B, 2, 1), (C, 2, 2))


def test_reserving_where_only_compaction_makes_room() -> None:
    told = three(n_ctx=14)
    told.release(B)
    store = told.store
    refused(store, "5.2", lambda: store.reserve(D, 6), "6")
    slot, moves = store.reserve_with_defrag(D, 6)
    told.seeds[D] = []
    assert moves == [Move(2, 8, 4, 3)]
    assert slot == Slot(D, 3, 8, 6)
    assert layout(store) == [(0, 0, 4), (2, 4, 4), (3, 8, 6)]
    told.check()
    told.attend((D, 0, 6), (C, 3, 1), (A, 3, 1))


def test_sharers_follow_the_run_they_read() -> None:
    told = Told(n_ctx=16, n_layer=2)
    told.reserve(9, 3)
    told.reserve(A, 4, rows=4)
    told.reserve(B, 3)
    told.share(A, B, 3)
    told.write((B, 3, 1))
    told.release(9)
    slot, moves = told.store.resize_with_defrag(B, 12)
    assert moves == [Move(1, 3, 0, 4), Move(2, 7, 4, 1)]
    assert slot == Slot(B, 2, 4, 12)
    assert told.store.spans(B) == [(0, 0, 3), (3, 4, 12)]
    told.check()
    told.attend((B, 4, 8))


@pytest.mark.parametrize("flag", ["0", "1"])
def test_the_flag_forbids_compaction_only(monkeypatch: pytest.MonkeyPatch, flag: str) -> None:
    monkeypatch.setenv("MINFER_NO_KV_DEFRAG", flag)
    told = three(n_ctx=14)
    told.release(B)
    store = told.store
    assert store.reserve_with_defrag(D, 4) == (Slot(D, 3, 4, 4), [])
    assert store.resize_with_defrag(C, 6) == (Slot(C, 2, 8, 6), [])
    told.release(A)
    store.resize(C, 4)
    if flag == "1":
        words = "MINFER_NO_KV_DEFRAG", "5"
        refused(store, "5.3", lambda: store.reserve_with_defrag(A, 5), *words)
        refused(store, "5.3", lambda: store.resize_with_defrag(D, 5), *words)
        refused(store, "5.6", store.defrag, "MINFER_NO_KV_DEFRAG")
    else:
        slot, moves = store.reserve_with_defrag(A, 5)
        assert (slot.start, moves) == (8, [Move(3, 4, 0, 0), Move(2, 8, 4, 3)])


def test_more_than_is_free_is_refused_by_number() -> None:
    told = three(n_ctx=14)
    store = told.store
    error = refused(store, "5.3", lambda: store.reserve_with_defrag(D, 3), "3", "2")
    assert error.facts["seq"] == D
    error = refused(store, "5.3", lambda: store.resize_with_defrag(A, 7), "7", "2")
    assert error.facts["seq"] == A
    refused(store, "5.3", lambda: store.resize_with_defrag(A, 2), "3", "2")
    refused(store, "5.2", lambda: store.reserve_with_defrag(A, 5), "resize")
    refused(store, "2.5", lambda: store.resize_with_defrag(D, 2))
