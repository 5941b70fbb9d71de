"""The copying twin of a shared prefix (contract 5.8)."""

from __future__ import annotations

import pytest
from refusals import refused
from stores import FORMATS, A, B, C, D, Told, layout

from minfer.kv.runs import FREE


def forked(cache_type: str = "f32") -> Told:
    """A [0, 6) with 5 rows; B [6, 10) shares 4 and wrote 2; C [10, 16) and D [16, 22) are empty."""
    told = Told(cache_type, n_ctx=24, n_layer=2)
    told.reserve(A, 6, rows=5)
    told.reserve(B, 4)
    told.share(A, B, 4)
    told.write((B, 4, 2))
    told.reserve(C, 6)
    told.reserve(D, 6)
    return told


@pytest.mark.parametrize("cache_type", FORMATS)
def test_copied_rows_are_the_sequences_own(cache_type: str) -> None:
    told = forked(cache_type)
    store = told.store
    told.copy(A, C, 5)
    assert store.spans(C) == [(0, 10, 6)]
    assert (store.written(C), store.cap(C)) == (5, 6)
    stats = store.stats()
    assert (stats.rows_copied, stats.copy_on_writes, stats.shared) == (5, 0, 4)
    for which in "kv":
        cells = store.region(1)["kv".index(which)].arrays[0]
        assert (cells[10:15] == cells[0:5]).all()
    told.write((A, 4, 1))
    told.write((C, 0, 1))
    assert store.stats().copy_on_writes == 0, "neither reads the other"
    told.attend((A, 5, 1), (C, 5, 1))


@pytest.mark.parametrize("cache_type", FORMATS)
def test_both_spans_of_a_sharer_are_copied(cache_type: str) -> None:
    told = forked(cache_type)
    told.copy(B, C, 6)
    assert told.store.spans(C) == [(0, 10, 6)]
    cells = told.store.region(0)[0].arrays[0]
    assert (cells[10:14] == cells[0:4]).all() and (cells[14:16] == cells[6:8]).all()
    assert told.store.stats().rows_copied == 6
    told.copy(B, D, 3)
    assert told.store.stats().rows_copied == 9
    told.attend((D, 3, 3), (B, 6, 2))


@pytest.mark.parametrize("cache_type", FORMATS)
def test_a_fork_of_a_sharer_costs_its_private_rows(cache_type: str) -> None:
    told = forked(cache_type)
    store = told.store
    told.share(B, C, 4)
    told.copy(B, C, 6)
    assert store.spans(C) == [(0, 0, 4), (4, 10, 6)]
    assert (store.written(C), store.cap(C)) == (6, 10)
    assert store.stats().rows_copied == 2
    cells = store.region(1)[1].arrays[0]
    assert (cells[10:12] == cells[6:8]).all()
    told.attend((C, 6, 4), (B, 6, 1))


def test_a_fork_of_the_root_copies_what_lies_above_the_share() -> None:
    told = forked()
    told.share(A, C, 3)
    told.copy(A, C, 5)
    assert told.store.spans(C) == [(0, 0, 3), (3, 10, 6)]
    assert told.store.stats().rows_copied == 2
    told.attend((C, 5, 2), (A, 5, 1))


def test_a_shorter_share_of_the_same_run_reaches_into_both_spans_of_the_source() -> None:
    told = forked()
    told.share(B, C, 2)
    told.copy(B, C, 6)
    assert told.store.spans(C) == [(0, 0, 2), (2, 10, 6)]
    assert told.store.stats().rows_copied == 4
    cells = told.store.region(0)[0].arrays[0]
    assert (cells[10:12] == cells[2:4]).all() and (cells[12:14] == cells[6:8]).all()


def test_a_copy_outlives_its_source() -> None:
    told = forked()
    told.copy(B, C, 5)
    told.release(B)
    told.release(A)
    assert layout(told.store) == [(FREE, 0, 10), (2, 10, 6), (3, 16, 6), (FREE, 22, 2)]
    told.attend((C, 5, 1))


@pytest.mark.parametrize("rows", [5, 6])
def test_a_copy_fills_a_run_to_its_end_and_no_further(rows: int) -> None:
    told = forked()
    told.store.resize(C, 5)
    if rows == 6:
        error = refused(told.store, "5.8", lambda: told.copy(B, C, 6), "6", "5")
        assert error.facts["dst"] == C
    told.copy(B, C, 5)
    assert (told.store.written(C), told.store.cap(C)) == (5, 5)


def test_the_cap_of_a_sharing_target_counts_its_share() -> None:
    told = forked()
    told.share(A, D, 4)
    told.store.resize(D, 1)
    refused(told.store, "5.8", lambda: told.store.copy_prefix(B, D, 6), "6", "5")
    told.copy(B, D, 4)
    assert told.store.stats().rows_copied == 0
    told.copy(A, D, 5)
    assert told.store.stats().rows_copied == 1
