"""Copy-on-write: a store may never write into cells that another sequence reads (contract 5.5)."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from refusals import numbers, refused
from stores import FORMATS, A, B, C, D, Told, free_runs, layout, tokens

from minfer.kv.runs import FREE, Move, Slot


def donor_and_reader(
    n_ctx: int, a: tuple[int, int], b: tuple[int, int, int], sanitize: bool | None = None
) -> Told:
    """A with (cap, rows), then B with (cap, rows of A it shares, rows of its own)."""
    told = Told(n_ctx=n_ctx, n_layer=2, sanitize=sanitize)
    told.reserve(A, *a)
    cap, shared, own = b
    told.reserve(B, cap)
    told.share(A, B, shared)
    if own:
        told.write((B, shared, own))
    return told


def counts(told: Told) -> tuple[int, int]:
    stats = told.store.stats()
    return stats.copy_on_writes, stats.rows_copied


# --- the examples of the contract -----------------------------------------------------------------


def test_example_one_a_sharer_writes_into_its_share() -> None:
    told = donor_and_reader(16, (4, 4), (4, 4, 2))
    store = told.store
    assert store.spans(B) == [(0, 0, 4), (4, 4, 4)]
    assert (store.written(B), store.cap(B), counts(told)) == (6, 8, (0, 0))
    step = told.write((B, 3, 1))
    assert step.moves == (Move(run=1, src=4, dst=5, rows=2),)
    assert store.spans(B) == [(0, 0, 3), (3, 4, 4)]
    assert (store.written(B), store.cap(B)) == (6, 7)
    assert store.spans(A) == [(0, 0, 4)]
    assert layout(store) == [(0, 0, 4), (1, 4, 4), (FREE, 8, 8)]
    assert step.inputs.cells.tolist() == [4]
    assert step.inputs.window[0].tolist() == [[0, 3], [4, 1], [0, 0], [0, 0]]
    stats = store.stats()
    assert (stats.shared, stats.written, stats.orphaned) == (3, 4 + 3, 0)
    assert (stats.defrags, stats.cells_moved, *counts(told)) == (0, 0, 1, 2)


def orphan_in_sixteen_cells() -> Told:
    """Example two up to A's store into position 2."""
    told = donor_and_reader(16, (6, 5), (3, 4, 0))
    assert told.store.spans(B) == [(0, 0, 4), (4, 6, 3)]
    step = told.write((A, 2, 1))
    assert step.moves == (Move(run=2, src=3, dst=10, rows=2),)
    assert step.inputs.cells.tolist() == [9]
    return told


def test_example_two_a_donor_writes_below_its_readers() -> None:
    told = orphan_in_sixteen_cells()
    store = told.store
    assert layout(store) == [(0, 0, 4), (FREE, 4, 2), (1, 6, 3), (2, 9, 4), (FREE, 13, 3)]
    assert store.spans(A) == [(0, 0, 2), (2, 9, 4)]
    assert store.spans(B) == [(0, 0, 4), (4, 6, 3)], "unchanged"
    assert (store.written(A), store.cap(A), store.written(B), store.cap(B)) == (5, 6, 4, 7)
    stats = store.stats()
    assert (stats.reserved, stats.orphaned, stats.free_cells) == (7, 4, 5)
    assert (stats.shared, stats.written, stats.sequences) == (4, 4 + 3, 2)
    assert counts(told) == (1, 2)


def test_example_two_goes_on_with_a_third_sequence() -> None:
    told = orphan_in_sixteen_cells()
    store = told.store
    assert store.reserve(C, 3) == Slot(C, 3, 13, 3)
    error = refused(store, "5.4", lambda: store.share_prefix(A, C, 3), "3", "2")
    assert {3, 2} <= numbers(error)
    told.share(A, C, 2)
    assert store.spans(C) == [(0, 0, 2), (2, 13, 3)]
    step = told.write((A, 1, 1))
    assert step.moves == (Move(run=2, src=9, dst=10, rows=3),)
    assert store.spans(A) == [(0, 0, 1), (1, 9, 4)]
    assert store.spans(B) == [(0, 0, 4), (4, 6, 3)]
    assert store.spans(C) == [(0, 0, 2), (2, 13, 3)]
    assert counts(told) == (2, 5)
    error = refused(store, "5.5", lambda: told.write((A, 0, 1)), "5", "4")
    assert {0, 5, 4} <= numbers(error), "5 rows, and a run of 4 cells"
    told.check()
    told.write((A, 1, 4))
    assert store.written(A) == 5


def test_example_three_a_donor_twice_and_no_room() -> None:
    told = donor_and_reader(12, (4, 4), (2, 4, 0))
    store = told.store
    step = told.write((A, 0, 1))
    assert step.moves == (Move(run=2, src=1, dst=7, rows=3),)
    assert layout(store) == [(0, 0, 4), (1, 4, 2), (2, 6, 4), (FREE, 10, 2)]
    assert store.spans(A) == [(0, 6, 4)], "nothing is left to share below position 0"
    assert store.spans(B) == [(0, 0, 4), (4, 4, 2)]
    told.reserve(C, 2)
    told.share(A, C, 4)
    assert store.spans(C) == [(0, 6, 4), (4, 10, 2)]
    error = refused(store, "5.5", lambda: told.write((A, 1, 1)), "3", "0")
    assert {3, 0} <= numbers(error)
    assert [C] in error.facts.values(), "the readers"
    told.release(B)
    assert layout(store) == [(FREE, 0, 6), (2, 6, 4), (3, 10, 2)], "the orphan is gone with B"
    step = told.write((A, 1, 1))
    assert step.moves == (Move(run=4, src=8, dst=1, rows=2),)
    assert layout(store) == [(4, 0, 3), (FREE, 3, 3), (2, 6, 4), (3, 10, 2)]
    assert store.spans(A) == [(0, 6, 1), (1, 0, 3)]
    assert store.spans(C) == [(0, 6, 4), (4, 10, 2)]
    assert (store.stats().orphaned, *counts(told)) == (4, 2, 5)


# --- sharers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "moves"),
    [
        (1, [Move(1, 6, 9, 2), Move(1, 2, 7, 2)]),  # rows 4, 5 slide; 2, 3 come out of the share
        (2, [Move(1, 6, 9, 2), Move(1, 3, 8, 1)]),
        (3, [Move(1, 6, 9, 2)]),
        (4, [Move(1, 7, 10, 1)]),
        (5, []),
        (6, []),
    ],
)
def test_rows_behind_a_short_group_keep_their_values(n: int, moves: list[Move]) -> None:
    told = donor_and_reader(16, (6, 5), (6, 4, 2))
    step = told.write((B, 1, n))
    assert list(step.moves) == moves
    assert told.store.spans(B) == [(0, 0, 1), (1, 6, 6)]
    assert told.store.spans(A) == [(0, 0, 6)]
    assert told.store.written(B) == max(6, 1 + n)
    assert counts(told) == (1, sum(move.rows for move in moves))


def test_a_sharer_that_writes_from_position_zero_shares_no_more() -> None:
    told = donor_and_reader(16, (4, 4), (6, 4, 1))
    step = told.write((B, 0, 2))
    assert step.moves == (Move(1, 4, 8, 1), Move(1, 2, 6, 2))
    assert told.store.spans(B) == [(0, 4, 6)]
    assert (told.store.cap(B), told.store.stats().shared) == (6, 0)
    told.write((A, 0, 1))
    assert told.store.spans(A) == [(0, 0, 4)], "nobody reads it any more"


def test_a_sharer_without_room_for_the_rows_it_loses() -> None:
    told = donor_and_reader(16, (4, 4), (3, 4, 2))
    store = told.store
    error = refused(store, "5.5", lambda: told.write((B, 2, 1)), "4", "3")
    assert {2, 4, 3} <= numbers(error), "positions 2 to 5, and a run of 3 cells"
    told.check()
    told.write((B, 3, 1))
    assert store.cap(B) == 6


def test_the_last_reader_of_an_orphan_frees_what_it_stops_reading() -> None:
    told = donor_and_reader(16, (4, 4), (4, 4, 0))
    told.release(A)
    step = told.write((B, 2, 1))
    assert step.moves == (Move(1, 3, 5, 1),)
    assert layout(told.store) == [(0, 0, 2), (FREE, 2, 2), (1, 4, 4), (FREE, 8, 8)]
    told.write((B, 0, 1))
    assert layout(told.store) == [(FREE, 0, 4), (1, 4, 4), (FREE, 8, 8)]


# --- donors ---------------------------------------------------------------------------------------


def test_a_donor_that_writes_above_its_readers_copies_nothing() -> None:
    told = donor_and_reader(16, (6, 5), (3, 3, 0))
    step = told.write((A, 3, 1))
    assert step.moves == ()
    assert told.store.spans(A) == [(0, 0, 6)]
    assert counts(told) == (0, 0)


def test_the_new_run_of_a_donor_may_overlap_its_old_cells() -> None:
    told = Told(n_ctx=14, n_layer=2)
    told.reserve(A, 8, rows=6)
    told.reserve(C, 2)
    told.reserve(B, 4)
    told.share(A, B, 2)
    told.release(C)
    step = told.write((A, 1, 1))
    assert step.moves == (Move(run=3, src=2, dst=3, rows=4),)
    assert layout(told.store) == [(0, 0, 2), (3, 2, 7), (FREE, 9, 1), (2, 10, 4)]
    assert told.store.spans(A) == [(0, 0, 1), (1, 2, 7)]


def test_a_donor_without_a_gap_is_told_what_there_is() -> None:
    told = donor_and_reader(16, (8, 6), (2, 2, 0))
    error = refused(told.store, "5.5", lambda: told.write((A, 1, 1)), "7", "12", "6")
    assert {7, 12, 6} <= numbers(error), "needed, free, largest run"
    assert [B] in error.facts.values(), "the readers"
    told.check()


def test_a_truncated_donor_leaves_its_readers_their_rows() -> None:
    told = donor_and_reader(20, (6, 5), (3, 4, 2))
    told.truncate(A, 1)
    assert told.store.spans(A) == [(0, 0, 6)]
    step = told.write((A, 1, 2))
    assert step.moves == (), "A has no rows behind its group"
    assert told.store.spans(A) == [(0, 0, 1), (1, 9, 5)]
    assert layout(told.store)[:2] == [(0, 0, 4), (FREE, 4, 2)]
    assert counts(told) == (1, 0)


def test_a_donor_with_several_readers_orphans_what_the_longest_reads() -> None:
    told = donor_and_reader(24, (6, 6), (2, 3, 0))
    told.reserve(C, 2)
    told.share(A, C, 5)
    told.write((A, 4, 1))
    assert told.store.spans(A) == [(0, 0, 4), (4, 10, 2)]
    assert layout(told.store)[:2] == [(0, 0, 5), (FREE, 5, 1)]
    told.release(C)
    assert layout(told.store)[:2] == [(0, 0, 4), (FREE, 4, 2)], "A reads 4 of the orphan, B 3"
    told.truncate(A, 2)
    assert layout(told.store)[:2] == [(0, 0, 3), (FREE, 3, 3)]
    assert told.store.cap(A) == 2 + 2


# --- several groups -------------------------------------------------------------------------------


def test_a_reader_that_leaves_in_the_same_step_spares_the_donor() -> None:
    told = donor_and_reader(16, (6, 5), (4, 4, 1))
    step = told.write((A, 2, 1), (B, 1, 1))
    assert step.moves == (Move(1, 6, 9, 1), Move(1, 2, 7, 2))
    assert told.store.spans(A) == [(0, 0, 6)], "B reads row 0 only, and A writes row 2"
    assert told.store.spans(B) == [(0, 0, 1), (1, 6, 4)]
    assert counts(told) == (1, 3)


def crowded() -> Told:
    """14 cells: an orphan [0, 4) that B reads, D's run of 4 with C as reader, no free cell."""
    told = Told(n_ctx=14, n_layer=2)
    told.reserve(A, 4, rows=4)
    told.reserve(B, 4)
    told.share(A, B, 4)
    told.release(A)
    told.reserve(D, 4, rows=4)
    told.reserve(C, 2)
    told.share(D, C, 2)
    assert free_runs(told.store) == []
    return told


@pytest.mark.parametrize("groups", list(permutations([(B, 1, 1), (D, 1, 1), (C, 2, 1)])), ids=str)
def test_a_donor_takes_cells_that_a_sharer_of_its_step_frees(
    groups: tuple[tuple[int, int, int], ...],
) -> None:
    told = crowded()
    step = told.attend(*groups)
    assert step.moves == (Move(1, 2, 5, 2), Move(4, 10, 2, 2)), "B's rows leave before D's arrive"
    assert layout(told.store) == [
        (0, 0, 1), (4, 1, 3), (1, 4, 4), (2, 8, 2), (FREE, 10, 2), (3, 12, 2)
    ]  # fmt: skip
    assert told.store.spans(B) == [(0, 0, 1), (1, 4, 4)]
    assert told.store.spans(D) == [(0, 8, 1), (1, 1, 3)]
    assert counts(told) == (2, 4)


def pairs(cache_type: str) -> Told:
    """Two donors, 1 and 4, each with a reader, 2 and 3; the second reader has rows of its own."""
    told = Told(cache_type, n_ctx=48, n_layer=2)
    told.reserve(A, 7, rows=6)
    told.reserve(D, 6, rows=6)
    told.reserve(B, 5)
    told.reserve(C, 7)
    told.share(A, B, 5)
    told.share(D, C, 4)
    told.write((C, 4, 2))
    return told


@pytest.mark.parametrize("cache_type", FORMATS)
def test_the_order_of_groups_changes_nothing(cache_type: str) -> None:
    base = None
    for groups in permutations([(A, 2, 1), (B, 5, 2), (C, 3, 1), (D, 1, 2)]):
        told = pairs(cache_type)
        step = told.attend(*groups)
        store = told.store
        answers = {
            seq: store.export_cells(seq, layer, which).tobytes()
            for seq in (A, B, C, D)
            for layer in range(2)
            for which in "kv"
        }
        seen = (
            step.moves, store.digest(), layout(store), store.stats(), answers,
            [store.spans(seq) for seq in (A, B, C, D)],
        )  # fmt: skip
        base = base or seen
        assert seen == base
    assert base is not None
    assert base[3].copy_on_writes == 3


def test_one_refused_group_leaves_the_others_uncopied() -> None:
    told = pairs("f32")
    error = refused(told.store, "5.5", lambda: told.write((A, 2, 1), (C, 0, 1), (D, 7, 1)), "7")
    assert error.facts["seq"] == D
    refused(told.store, "2.5", lambda: told.write((A, 2, 1), (B, 5, 6)))
    told.check()


def test_two_sharers_leave_an_orphan_in_one_step() -> None:
    """It is trimmed twice; what it frees is free once."""
    told = donor_and_reader(16, (4, 4), (4, 4, 0))
    told.reserve(C, 4)
    told.share(A, C, 2)
    told.release(A)
    step = told.write((B, 1, 1), (C, 0, 1))
    assert step.moves == (Move(1, 2, 5, 2), Move(2, 1, 9, 1))
    assert layout(told.store) == [(0, 0, 1), (FREE, 1, 3), (1, 4, 4), (2, 8, 4), (FREE, 12, 4)]
    assert told.store.spans(B) == [(0, 0, 1), (1, 4, 4)]
    assert told.store.spans(C) == [(0, 8, 4)]
    assert counts(told) == (2, 3)


# --- steps that fail ------------------------------------------------------------------------------


@pytest.mark.parametrize("sanitize", [None, True])
@pytest.mark.parametrize("written", [0, 1, 2])
def test_a_failed_step_truncates_its_groups_and_the_moves_stay(
    written: int, sanitize: bool | None
) -> None:
    told = donor_and_reader(24, (6, 5), (5, 4, 2), sanitize)
    told.reserve(C, 4)
    told.share(A, C, 3)
    kept = {seq: list(seeds) for seq, seeds in told.seeds.items()}
    batch = tokens((A, 2, 1), (B, 3, 1))
    rows = np.zeros((2, 2, 32), np.float32)
    with pytest.raises(ZeroDivisionError), told.store.step(batch) as step:
        for layer in range(written):
            step.write(layer, k=rows, v=rows)
        raise ZeroDivisionError
    assert [move.rows for move in step.moves] == [2, 2]
    told.seeds = {A: kept[A][:2], B: kept[B][:3], C: kept[C]}
    told.check()
    assert told.store.spans(B) == [(0, 0, 3), (3, 6, 5)]
    assert told.store.spans(A) == [(0, 0, 2), (2, 15, 4)]
    told.attend((A, 2, 2), (B, 3, 3), (C, 3, 1))
