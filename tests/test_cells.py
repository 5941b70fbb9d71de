"""The tables of the cell store: reservations, truncation, statistics (contract 1, 5)."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from cell_tables import Tables, feed
from refusals import refused

from minfer.errors import Refusal
from minfer.kv.batch import Batch
from minfer.kv.runs import (
    FREE,
    Entry,
    Slot,
)


def test_reserve_takes_the_lowest_free_run_that_fits() -> None:
    tables = Tables(16)
    assert tables.reserve(5, 4) == Slot(seq=5, run=0, start=0, cap=4)
    assert tables.reserve(6, 3) == Slot(6, 1, 4, 3)
    assert tables.reserve(7, 5) == Slot(7, 2, 7, 5)
    tables.release(6)
    assert tables.reserve(8, 4) == Slot(8, 3, 12, 4)
    assert tables.reserve(9, 2) == Slot(9, 4, 4, 2)
    assert tables.owners() == [0] * 4 + [4] * 2 + [FREE] + [2] * 5 + [3] * 4
    tables.check()


def test_reserving_again_keeps_the_run_and_a_larger_cap_is_refused() -> None:
    tables = Tables(16)
    slot = tables.reserve(5, 4)
    digest, generation = tables.digest(), tables.generation
    assert tables.reserve(5, 4) == slot
    assert tables.reserve(5, 2) == slot
    assert (tables.digest(), tables.generation) == (digest, generation)
    error = refused(tables, "5.2", lambda: tables.reserve(5, 5))
    assert "resize" in error.message
    assert error.facts == {"seq": 5, "cap": 4, "asked": 5}


def test_no_room_names_free_and_largest() -> None:
    tables = Tables(10)
    for seq, cap in ((1, 3), (2, 4), (3, 3)):
        tables.reserve(seq, cap)
    tables.release(1)
    tables.release(3)
    error = refused(tables, "5.2", lambda: tables.reserve(4, 4))
    assert error.facts == {"seq": 4, "asked": 4, "free": 6, "largest": 3, "n_ctx": 10}
    assert tables.reserve(4, 3).run == 3, "a refused reservation uses up no run id"


def test_release_joins_neighbours_on_both_sides() -> None:
    tables = Tables(12)
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
    tables = Tables(4)
    refused(tables, "5.2", lambda: tables.reserve(seq, 1))


@pytest.mark.parametrize("cap", [0, -1, True, 2.0, None])
def test_bad_caps(cap: object) -> None:
    tables = Tables(4)
    refused(tables, "5.2", lambda: tables.reserve(1, cap))


@pytest.mark.parametrize("n_ctx", [0, -3, True, 4.0])
def test_bad_arenas(n_ctx: object) -> None:
    with pytest.raises(Refusal) as caught:
        Tables(n_ctx)
    assert caught.value.rule == "10"
    assert repr(n_ctx) in caught.value.message


def test_numpy_integers_name_the_same_sequence() -> None:
    tables = Tables(8)
    tables.reserve(np.int64(3), np.uint8(4))
    assert tables.written(3) == 0
    assert tables.cap(np.int32(3)) == 4


def test_unknown_sequences_are_refused_everywhere() -> None:
    tables = Tables(8)
    tables.reserve(1, 4)
    for call in (
        lambda: tables.release(2),
        lambda: tables.truncate(2, 0),
        lambda: tables.spans(2),
        lambda: tables.written(2),
        lambda: tables.tables.written_cells(2),
        lambda: tables.plan(Batch([1, 2], [0, 0], "prefill")),
    ):
        assert refused(tables, "2.5", call).facts == {"seq": 2}
    assert not tables.has(2)
    assert tables.has(1)


def test_truncate_keeps_the_first_rows() -> None:
    tables = Tables(8)
    tables.reserve(1, 6)
    feed(tables, 1, 5)
    assert tables.tables.written_cells(1) == (range(5),)
    tables.truncate(1, 2)
    assert tables.written(1) == 2
    assert tables.tables.written_cells(1) == (range(2),)
    for rows in (3, -1, 1.0):
        refused(tables, "5.11", partial(tables.truncate, 1, rows))
    tables.truncate(1, 0)
    assert tables.tables.written_cells(1) == ()


def test_statistics() -> None:
    tables = Tables(20)
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


def test_check_sees_a_free_list_that_is_wrong() -> None:
    tables = Tables(8)
    tables.reserve(1, 4)
    tables.tables.free.take(4, 1)
    with pytest.raises(AssertionError, match="free list says"):
        tables.check()


def test_check_reports_what_problems_finds() -> None:
    tables = Tables(8)
    tables.reserve(1, 4)
    tables.tables.entries[1] = Entry(0, 5)
    with pytest.raises(AssertionError, match="holds 5 rows"):
        tables.check()
