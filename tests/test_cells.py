"""The tables of the cell store: reservations, spans, plans (contract 1, 2.5, 2.6, 5)."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minfer import window
from minfer.errors import Refusal
from minfer.kv.batch import Batch
from minfer.kv.cells import CellTables, Slot
from minfer.kv.free import FreeCells
from minfer.kv.plan import make_plan, store_cells_of
from minfer.kv.runs import (
    FREE,
    Entry,
    Run,
    Share,
    owner_table,
    problems,
    rows_read,
    span_list,
    written_cells,
)
from minfer.window import WindowMode


def refused(tables: CellTables, rule: str, call: Callable[[], object]) -> Refusal:
    """The refusal of `call`, which cites `rule` and changed nothing."""
    digest, generation = tables.digest(), tables.generation
    with pytest.raises(Refusal) as caught:
        call()
    assert caught.value.rule == rule, caught.value
    assert (tables.digest(), tables.generation) == (digest, generation)
    tables.check()
    return caught.value


def feed(tables: CellTables, seq: int, n: int, t: int | None = None) -> None:
    """A step that ends well: positions [t, t + n) of `seq`."""
    t = tables.written(seq) if t is None else t
    plan = tables.plan(Batch([seq] * n, range(t, t + n), "prefill"))
    tables.apply(plan)
    tables.commit(plan)


def test_reserve_takes_the_lowest_free_run_that_fits() -> None:
    tables = CellTables(16)
    assert tables.reserve(5, 4) == Slot(seq=5, run=0, start=0, cap=4)
    assert tables.reserve(6, 3) == Slot(6, 1, 4, 3)
    assert tables.reserve(7, 5) == Slot(7, 2, 7, 5)
    tables.release(6)
    assert tables.reserve(8, 4) == Slot(8, 3, 12, 4)
    assert tables.reserve(9, 2) == Slot(9, 4, 4, 2)
    assert tables.owners() == [0] * 4 + [4] * 2 + [FREE] + [2] * 5 + [3] * 4
    tables.check()


def test_reserving_again_keeps_the_run_and_a_larger_cap_is_refused() -> None:
    tables = CellTables(16)
    slot = tables.reserve(5, 4)
    digest, generation = tables.digest(), tables.generation
    assert tables.reserve(5, 4) == slot
    assert tables.reserve(5, 2) == slot
    assert (tables.digest(), tables.generation) == (digest, generation)
    error = refused(tables, "5.2", lambda: tables.reserve(5, 5))
    assert "resize" in error.message
    assert error.facts == {"seq": 5, "cap": 4, "asked": 5}


def test_no_room_names_free_and_largest() -> None:
    tables = CellTables(10)
    for seq, cap in ((1, 3), (2, 4), (3, 3)):
        tables.reserve(seq, cap)
    tables.release(1)
    tables.release(3)
    error = refused(tables, "5.2", lambda: tables.reserve(4, 4))
    assert error.facts == {"seq": 4, "asked": 4, "free": 6, "largest": 3, "n_ctx": 10}
    assert tables.reserve(4, 3).run == 3, "a refused reservation uses up no run id"


def test_release_joins_neighbours_on_both_sides() -> None:
    tables = CellTables(12)
    for seq in range(4):
        tables.reserve(seq, 3)
    tables.release(0)
    tables.release(2)
    assert tables.stats().free_runs == 2
    tables.release(1)
    stats = tables.stats()
    assert (stats.free_cells, stats.free_runs, stats.largest_free_run) == (9, 1, 9)
    tables.check()


@pytest.mark.parametrize("seq", [-1, 2**31, True, 1.0, "1", None])
def test_bad_sequence_ids(seq: object) -> None:
    tables = CellTables(4)
    refused(tables, "5.2", lambda: tables.reserve(seq, 1))  # type: ignore[arg-type]


@pytest.mark.parametrize("cap", [0, -1, True, 2.0, None])
def test_bad_caps(cap: object) -> None:
    tables = CellTables(4)
    refused(tables, "5.2", lambda: tables.reserve(1, cap))  # type: ignore[arg-type]


@pytest.mark.parametrize("n_ctx", [0, -3, True, 4.0])
def test_bad_arenas(n_ctx: object) -> None:
    with pytest.raises(Refusal) as caught:
        CellTables(n_ctx)  # type: ignore[arg-type]
    assert caught.value.rule == "10"
    assert repr(n_ctx) in caught.value.message


def test_numpy_integers_name_the_same_sequence() -> None:
    tables = CellTables(8)
    tables.reserve(np.int64(3), np.uint8(4))  # type: ignore[arg-type]
    assert tables.written(3) == 0
    assert tables.cap(np.int32(3)) == 4  # type: ignore[arg-type]


def test_unknown_sequences_are_refused_everywhere() -> None:
    tables = CellTables(8)
    tables.reserve(1, 4)
    for call in (
        lambda: tables.release(2),
        lambda: tables.truncate(2, 0),
        lambda: tables.spans(2),
        lambda: tables.written(2),
        lambda: tables.written_cells(2),
        lambda: tables.plan(Batch([1, 2], [0, 0], "prefill")),
    ):
        assert refused(tables, "2.5", call).facts == {"seq": 2}
    assert not tables.has(2)
    assert tables.has(1)


def test_truncate_keeps_the_first_rows() -> None:
    tables = CellTables(8)
    tables.reserve(1, 6)
    feed(tables, 1, 5)
    assert tables.written_cells(1) == (range(5),)
    tables.truncate(1, 2)
    assert tables.written(1) == 2
    assert tables.written_cells(1) == (range(2),)
    for rows in (3, -1, 1.0):
        refused(tables, "5.11", partial(tables.truncate, 1, rows))  # type: ignore[arg-type]
    tables.truncate(1, 0)
    assert tables.written_cells(1) == ()


def test_statistics() -> None:
    tables = CellTables(20)
    tables.reserve(1, 6)
    tables.reserve(2, 4)
    tables.reserve(3, 5)
    feed(tables, 1, 4)
    feed(tables, 3, 5)
    tables.release(2)
    stats = tables.stats()
    assert (stats.n_ctx, stats.reserved, stats.written, stats.sequences) == (20, 11, 9, 2)
    assert (stats.free_cells, stats.free_runs, stats.largest_free_run) == (9, 2, 5)
    assert (stats.shared, stats.orphaned, stats.defrags, stats.cells_moved) == (0, 0, 0, 0)
    assert (stats.copy_on_writes, stats.rows_copied) == (0, 0)


# --- plans -------------------------------------------------------------------------------------


def test_a_plan_resolves_every_group() -> None:
    tables = CellTables(16)
    tables.reserve(1, 6)
    tables.reserve(2, 6)
    feed(tables, 2, 3)
    plan = tables.plan(Batch([2, 2, 1], [3, 4, 0], "prefill"))
    assert plan.cells == (range(9, 11), range(0, 1))
    assert plan.spans == (((0, 6, 6),), ((0, 0, 6),))
    assert plan.before == (Entry(1, 3), Entry(0, 0))
    assert plan.after == (Entry(1, 5), Entry(0, 1))
    assert plan.mode is WindowMode.SPAN
    assert plan.copies == ()
    assert plan.generation == tables.generation
    assert tables.written(2) == 3, "planning changes nothing"


def test_rows_become_readable_at_the_commit() -> None:
    tables = CellTables(8)
    tables.reserve(1, 6)
    feed(tables, 1, 3)
    plan = tables.plan(Batch([1, 1], [3, 4], "prefill"))
    tables.apply(plan)
    assert tables.written(1) == 3
    tables.commit(plan)
    assert tables.written(1) == 5


def test_a_failed_step_at_the_end_leaves_the_digest() -> None:
    tables = CellTables(8)
    tables.reserve(1, 6)
    feed(tables, 1, 3)
    digest, generation = tables.digest(), tables.generation
    plan = tables.plan(Batch([1, 1], [3, 4], "prefill"))
    tables.apply(plan)
    tables.rollback(plan)
    assert tables.digest() == digest
    assert tables.generation > generation


def test_overwriting_in_the_middle_keeps_the_tail_and_failing_truncates() -> None:
    tables = CellTables(8)
    tables.reserve(1, 6)
    feed(tables, 1, 5)
    feed(tables, 1, 2, t=1)
    assert tables.written(1) == 5
    plan = tables.plan(Batch([1, 1], [1, 2], "prefill"))
    tables.apply(plan)
    assert tables.written(1) == 1
    tables.rollback(plan)
    assert tables.written(1) == 1


def test_a_group_may_not_begin_past_the_written_rows() -> None:
    tables = CellTables(8)
    tables.reserve(1, 6)
    feed(tables, 1, 2)
    error = refused(tables, "5.5", lambda: tables.plan(Batch([1], [3], "decode")))
    assert error.facts == {"seq": 1, "position": 3, "written": 2}


def test_a_group_may_not_leave_its_run() -> None:
    tables = CellTables(8)
    tables.reserve(1, 4)
    feed(tables, 1, 3)
    assert tables.plan(Batch([1], [3], "decode")).cells == (range(3, 4),)
    error = refused(tables, "2.5", lambda: tables.plan(Batch([1, 1], [3, 4], "decode")))
    assert error.facts == {"seq": 1, "position": 4, "cap": 4, "room": 4}
    assert "reserve 5" in error.message


def test_one_bad_group_refuses_the_whole_batch() -> None:
    tables = CellTables(8)
    tables.reserve(1, 4)
    tables.reserve(2, 4)
    refused(tables, "5.5", lambda: tables.plan(Batch([1, 2], [0, 1], "prefill")))


def test_a_stale_plan_is_refused() -> None:
    tables = CellTables(16)
    tables.reserve(1, 4)
    for change in (
        lambda: tables.reserve(2, 4),
        lambda: feed(tables, 2, 2),
        lambda: tables.truncate(2, 1),
        lambda: tables.release(2),
    ):
        plan = tables.plan(Batch([1], [0], "prefill"))
        change()
        error = refused(tables, "5.5", partial(tables.apply, plan))
        assert error.facts == {"plan": plan.generation, "store": tables.generation}


def test_one_step_is_open_at_a_time() -> None:
    tables = CellTables(16)
    tables.reserve(1, 4)
    tables.reserve(2, 4)
    plan, other = (tables.plan(Batch([seq], [0], "prefill")) for seq in (1, 2))
    refused(tables, "5.5", lambda: tables.commit(plan))
    tables.apply(plan)
    for call in (
        lambda: tables.plan(Batch([2], [0], "prefill")),
        lambda: tables.apply(other),
        lambda: tables.reserve(3, 1),
        lambda: tables.release(2),
        lambda: tables.truncate(2, 0),
    ):
        error = refused(tables, "5.5", call)
        assert "a step over sequences [1] is open" in error.message
    refused(tables, "5.5", lambda: tables.commit(other))
    refused(tables, "5.5", lambda: tables.rollback(other))
    tables.commit(plan)
    refused(tables, "5.5", lambda: tables.commit(plan))
    tables.release(2)


def test_the_window_mode_of_a_plan() -> None:
    tables = CellTables(16)
    tables.reserve(1, 4)
    tables.reserve(2, 4)
    assert tables.plan(Batch([1], [0], "prefill")).mode is WindowMode.CAUSAL
    assert tables.plan(Batch([2], [0], "prefill")).mode is WindowMode.SPAN
    assert tables.plan(Batch([1, 2], [0, 0], "prefill")).mode is WindowMode.SPAN


# --- what follows from a share (contract 5.5, its worked examples) --------------------------------

A, B, C = 1, 2, 3


def test_spans_of_a_sharer_before_and_after_its_copy_on_write() -> None:
    runs = {0: Run(0, 0, 4, A), 1: Run(1, 4, 4, B)}
    sharer = Entry(1, 6, Share(0, 4))
    assert span_list(Entry(0, 4), runs) == ((0, 0, 4),)
    assert span_list(sharer, runs) == ((0, 0, 4), (4, 4, 4))
    assert written_cells(sharer, runs) == (range(0, 4), range(4, 6))
    slid = Entry(1, 6, Share(0, 3))
    assert span_list(slid, runs) == ((0, 0, 3), (3, 4, 4))
    assert written_cells(slid, runs) == (range(0, 3), range(4, 7))
    assert window.runs(span_list(slid, runs), 5) == [(0, 3), (4, 3)]


def test_spans_owners_and_rows_with_an_orphan() -> None:
    runs = {0: Run(0, 0, 4, None), 1: Run(1, 6, 3, B), 2: Run(2, 9, 4, A)}
    entries = {A: Entry(2, 5, Share(0, 2)), B: Entry(1, 5, Share(0, 4))}
    assert problems(16, runs, entries) == []
    assert span_list(entries[A], runs) == ((0, 0, 2), (2, 9, 4))
    assert written_cells(entries[A], runs) == (range(0, 2), range(9, 12))
    assert owner_table(runs.values(), 16) == [0] * 4 + [FREE] * 2 + [1] * 3 + [2] * 4 + [FREE] * 3
    assert rows_read(entries.values()) == {0: 4, 1: 1, 2: 3}


def test_a_sequence_truncated_into_its_share_has_no_private_rows() -> None:
    runs = {0: Run(0, 0, 4, A), 1: Run(1, 4, 4, B)}
    entry = Entry(1, 2, Share(0, 4))
    assert entry.private_rows == 0
    assert written_cells(entry, runs) == (range(0, 2),)
    assert rows_read([entry]) == {1: 0, 0: 4}


def test_the_rows_of_a_run_are_the_most_that_anybody_reads() -> None:
    readers = [Entry(1, 5, Share(0, 4)), Entry(2, 2, Share(0, 2))]
    assert rows_read([Entry(0, 1), *readers]) == {0: 4, 1: 1, 2: 0}
    assert rows_read([*readers, Entry(0, 6)]) == {0: 6, 1: 1, 2: 0}


def test_the_cap_of_a_sharer_counts_its_share() -> None:
    tables = CellTables(8)
    tables.reserve(A, 4)
    tables.reserve(B, 3)
    tables._entries[B] = Entry(1, 4, Share(0, 4))
    tables._entries[A] = Entry(0, 4)
    tables.check()
    assert (tables.cap(A), tables.cap(B)) == (4, 7)
    assert tables.spans(B) == [(0, 0, 4), (4, 4, 3)]


def test_a_plan_over_a_sharer_reads_runs_and_stores_above_the_share() -> None:
    runs = {0: Run(0, 0, 4, A), 1: Run(1, 4, 4, B)}
    entries = {A: Entry(0, 4), B: Entry(1, 5, Share(0, 4))}
    plan = make_plan(Batch([A, B], [4 - 1, 5], "decode"), 7, entries, runs)
    assert plan.mode is WindowMode.RUNS
    assert plan.cells == (range(3, 4), range(5, 6))
    alone = make_plan(Batch([B], [5], "decode"), 7, entries, runs)
    assert alone.mode is WindowMode.RUNS, "a share of the run at cell 0 is not causal"


def test_the_resolver_refuses_a_position_inside_a_share() -> None:
    (group,) = Batch([B], [3], "decode").groups
    with pytest.raises(Refusal) as caught:
        store_cells_of(group, Entry(1, 5, Share(0, 4)), Run(1, 4, 4, B))
    assert caught.value.rule == "5.5"
    assert caught.value.facts == {"seq": B, "position": 3, "share": 4}


def test_room_of_a_sharer_counts_from_the_end_of_its_share() -> None:
    (group,) = Batch([B] * 2, [7, 8], "decode").groups
    with pytest.raises(Refusal) as caught:
        store_cells_of(group, Entry(1, 7, Share(0, 4)), Run(1, 4, 4, B))
    assert caught.value.rule == "2.5"
    assert caught.value.facts["room"] == 8


def test_contradictions_are_found() -> None:
    runs = {0: Run(0, 0, 4, A), 1: Run(1, 4, 4, B)}
    sound = {A: Entry(0, 4), B: Entry(1, 6, Share(0, 4))}
    assert problems(8, runs, sound) == []
    for n_ctx, bad_runs, bad_entries, message in (
        (7, runs, sound, "leaves the arena of 7"),
        (8, {0: Run(0, 0, 5, A), 1: runs[1]}, sound, "inside run 0"),
        (8, {**runs, 2: Run(2, 2, 1, None)}, sound, "no owner and no reader"),
        (8, runs, {A: Entry(0, 5), B: Entry(1)}, "holds 5 rows"),
        (8, runs, {A: Entry(0, 4)}, "belongs to sequence 2, which is unknown"),
        (8, runs, {A: Entry(0), B: Entry(0)}, "does not own it"),
        (8, runs, {A: Entry(0), B: Entry(1, 0, Share(0, 5))}, "holds 5 rows"),
        (8, runs, {A: Entry(0), B: Entry(1, 0, Share(1, 1))}, "unknown or its own"),
        (8, runs, {A: Entry(0), B: Entry(1, 0, Share(0, 0))}, "shares 0 rows"),
    ):
        assert any(message in found for found in problems(n_ctx, bad_runs, bad_entries)), message
    chain = {**runs, 2: Run(2, 8, 1, C)}
    entries = {**sound, C: Entry(2, 1, Share(1, 1))}
    assert any("not begin at position 0" in found for found in problems(9, chain, entries))


# --- the free list, and many operations ----------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.randoms(use_true_random=False))
def test_first_fit_agrees_with_a_scan(n_cells: int, rng: random.Random) -> None:
    free, owned = FreeCells(n_cells), [False] * n_cells
    held: list[tuple[int, int]] = []
    for _ in range(60):
        n = rng.randint(1, max(1, n_cells // 3))
        fits = [c for c in range(n_cells - n + 1) if not any(owned[c : c + n])]
        assert free.first_fit(n) == (fits[0] if fits else None)
        if fits and rng.random() < 0.6:
            free.take(fits[0], n)
            held.append((fits[0], n))
            owned[fits[0] : fits[0] + n] = [True] * n
        elif held:
            start, n = held.pop(rng.randrange(len(held)))
            free.give(start, n)
            owned[start : start + n] = [False] * n
        edges = [c for c in range(n_cells) if not owned[c] and (c == 0 or owned[c - 1])]
        assert [start for start, _ in free.runs()] == edges
        assert free.cells == owned.count(False)
        assert free.largest == max((n for _, n in free.runs()), default=0)


def test_taking_cells_that_are_not_free_is_a_bug() -> None:
    free = FreeCells(8)
    free.take(0, 4)
    for start, n in ((0, 1), (5, 1), (4, 5)):
        with pytest.raises(AssertionError, match="do not begin a free run"):
            free.take(start, n)


def test_check_sees_a_free_list_that_is_wrong() -> None:
    tables = CellTables(8)
    tables.reserve(1, 4)
    tables._free.take(4, 1)
    with pytest.raises(AssertionError, match="free list says"):
        tables.check()


def test_check_reports_what_problems_finds() -> None:
    tables = CellTables(8)
    tables.reserve(1, 4)
    tables._entries[1] = Entry(0, 5)
    with pytest.raises(AssertionError, match="holds 5 rows"):
        tables.check()
