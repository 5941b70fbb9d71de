"""Spans, rows and plans where sequences share a prefix (contract 1, 5.5 with its examples)."""

from __future__ import annotations

import pytest
from cell_tables import Tables, feed

from minfer import window
from minfer.errors import Refusal
from minfer.kv.batch import Batch
from minfer.kv.plan import store_cells_of
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


def shared() -> Tables:
    """A holds 4 rows at [0, 4), B shares them and has cells [4, 8)."""
    tables = Tables(16)
    tables.reserve(A, 4)
    tables.reserve(B, 4)
    feed(tables, A, 4)
    tables.share_prefix(A, B, 4)
    return tables


def test_a_share_shrinks_with_a_sequence_truncated_into_it() -> None:
    tables = shared()
    feed(tables, B, 2)
    tables.truncate(B, 2)
    assert tables.tables.entries[B] == Entry(1, 2, Share(0, 2))
    assert tables.rows(B) == [(A, 0), (A, 1)]
    assert tables.cap(B) == 6
    tables.truncate(B, 0)
    assert tables.tables.entries[B] == Entry(1)
    tables.check()


def test_the_rows_of_a_run_are_the_most_that_anybody_reads() -> None:
    readers = [Entry(1, 5, Share(0, 4)), Entry(2, 2, Share(0, 2))]
    assert rows_read([Entry(0, 1), *readers]) == {0: 4, 1: 1, 2: 0}
    assert rows_read([*readers, Entry(0, 6)]) == {0: 6, 1: 1, 2: 0}


def test_the_cap_of_a_sharer_counts_its_share() -> None:
    tables = shared()
    tables.check()
    assert (tables.cap(A), tables.cap(B)) == (4, 8)
    assert tables.spans(B) == [(0, 0, 4), (4, 4, 4)]


def test_a_plan_over_a_sharer_reads_runs_and_stores_above_the_share() -> None:
    tables = shared()
    feed(tables, B, 1)
    alone = tables.plan(Batch([B], [5], "decode"))
    assert alone.mode is WindowMode.RUNS, "a share of the run at cell 0 is not causal"
    assert alone.cells == (range(5, 6),)
    assert alone.moves == ()


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
        (8, {**runs, 2: Run(2, 2, 1, None)}, sound, "no owner and 1 cells, of which 0 are read"),
        (8, runs, {A: Entry(0, 5), B: Entry(1)}, "holds 5 rows"),
        (8, runs, {A: Entry(0, 4)}, "belongs to sequence 2, which is unknown"),
        (8, runs, {A: Entry(0), B: Entry(0)}, "does not own it"),
        (8, runs, {A: Entry(0), B: Entry(1, 5, Share(0, 5))}, "holds 5 rows"),
        (8, runs, {A: Entry(0), B: Entry(1, 3, Share(0, 4))}, "shares 4 rows and reads 3"),
        (8, {**runs, 2: Run(2, 8, 3, None)}, sound, "leaves the arena"),
        (8, runs, {A: Entry(0), B: Entry(1, 1, Share(1, 1))}, "unknown or its own"),
        (8, runs, {A: Entry(0), B: Entry(1, 0, Share(0, 0))}, "shares 0 rows"),
    ):
        assert any(message in found for found in problems(n_ctx, bad_runs, bad_entries)), message
    chain = {**runs, 2: Run(2, 8, 1, C)}
    entries = {**sound, C: Entry(2, 1, Share(1, 1))}
    assert any("not begin at position 0" in found for found in problems(9, chain, entries))
