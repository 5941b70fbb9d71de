"""Shared prefixes, orphans and their readers: tables and rows (contract 1, 5.2, 5.4, 5.11)."""

from __future__ import annotations

import pytest
from refusals import state
from stores import FORMATS, A, B, C, D, Told, layout

from minfer import window
from minfer.kv.runs import FREE, Slot


def family(cache_type: str = "f32") -> Told:
    """A [0, 6) with 5 rows; B [6, 9) shares 4 and wrote 1; C [9, 12) shares 2 of the same run."""
    told = Told(cache_type, n_ctx=20, n_layer=2)
    told.reserve(A, 6, rows=5)
    told.reserve(B, 3)
    told.reserve(C, 3)
    told.share(A, B, 4)
    told.write((B, 4, 1))
    told.share(B, C, 2)
    return told


@pytest.mark.parametrize("cache_type", FORMATS)
def test_sharing_moves_no_byte(cache_type: str) -> None:
    told = Told(cache_type, n_ctx=12, n_layer=2)
    told.reserve(A, 4, rows=4)
    told.reserve(B, 3)
    before, generation = state(told.store), told.store.generation
    told.share(A, B, 3)
    digest, _, bytes_after = state(told.store)
    assert bytes_after == before[2]
    assert digest != before[0] and told.store.generation > generation
    assert told.store.spans(B) == [(0, 0, 3), (3, 4, 3)]
    assert (told.store.written(B), told.store.cap(B)) == (3, 6)
    assert layout(told.store) == [(0, 0, 4), (1, 4, 3), (FREE, 7, 5)]


def test_the_windows_of_a_sharer() -> None:
    told = Told(n_ctx=12)
    told.reserve(A, 4, rows=4)
    told.reserve(B, 3)
    told.share(A, B, 4)
    spans = told.store.spans(B)
    assert window.runs(spans, 2) == [(0, 3)]
    assert window.runs(spans, 4) == [(0, 4), (4, 1)]
    assert window.runs(spans, 5) == [(0, 4), (4, 2)]
    assert window.runs(spans, 5, width=2) == [(4, 2)]
    assert window.runs(spans, 5, width=3) == [(3, 1), (4, 2)]
    step = told.attend((B, 4, 2))
    assert step.inputs.window.tolist() == [
        [[0, 4], [4, 1], [0, 0], [0, 0]],
        [[0, 4], [4, 2], [0, 0], [0, 0]],
    ]
    assert step.inputs.cells.tolist() == [4, 5]


def test_a_sharer_hands_on_the_root_run() -> None:
    told = family()
    store = told.store
    assert store.spans(B) == [(0, 0, 4), (4, 6, 3)]
    assert store.spans(C) == [(0, 0, 2), (2, 9, 3)]
    told.release(B)
    assert store.spans(C) == [(0, 0, 2), (2, 9, 3)], "C reads A's run, not B's"
    told.reserve(D, 3)
    told.share(C, D, 2)
    assert store.spans(D) == [(0, 0, 2), (2, 6, 3)]
    assert store.sequences() == [A, C, D]


def test_statistics_of_shares() -> None:
    stats = family().store.stats()
    assert (stats.n_ctx, stats.reserved, stats.free_cells) == (20, 12, 8)
    assert (stats.shared, stats.orphaned, stats.sequences) == (4, 0, 3)
    assert stats.written == 5 + 1 + 0
    assert (stats.free_runs, stats.largest_free_run) == (1, 8)
    assert (stats.copy_on_writes, stats.rows_copied, stats.defrags) == (0, 0, 0)


def test_a_released_donor_leaves_what_is_read() -> None:
    told = family()
    store = told.store
    told.release(A)
    assert not store.has(A)
    assert layout(store) == [(0, 0, 4), (FREE, 4, 2), (1, 6, 3), (2, 9, 3), (FREE, 12, 8)]
    stats = store.stats()
    assert (stats.orphaned, stats.shared, stats.reserved, stats.free_cells) == (4, 4, 6, 10)
    assert stats.written == 4 + 1 + 0
    told.release(B)
    assert layout(store) == [(0, 0, 2), (FREE, 2, 7), (2, 9, 3), (FREE, 12, 8)]
    assert store.stats().orphaned == 2
    told.release(C)
    assert layout(store) == [(FREE, 0, 20)]
    stats = store.stats()
    assert (stats.orphaned, stats.shared, stats.written, stats.sequences) == (0, 0, 0, 0)


def test_an_orphan_can_be_shared_on_and_its_id_is_kept() -> None:
    told = family()
    told.release(A)
    told.reserve(A, 2)
    assert told.store.spans(A) == [(0, 4, 2)], "the lowest free run"
    told.share(B, A, 4)
    assert told.store.spans(A) == [(0, 0, 4), (4, 4, 2)]
    assert layout(told.store)[:2] == [(0, 0, 4), (3, 4, 2)]
    told.release(B)
    assert layout(told.store)[0] == (0, 0, 4), "A reads 4 rows of what was its own run"


def test_a_released_reader_costs_the_donor_nothing() -> None:
    told = family()
    told.release(B)
    told.release(C)
    assert told.store.spans(A) == [(0, 0, 6)]
    assert told.store.stats().shared == 0
    step = told.write((A, 0, 2))
    assert step.moves == ()
    assert told.store.spans(A) == [(0, 0, 6)]


def test_truncating_a_sharer_shrinks_its_share() -> None:
    told = family()
    store = told.store
    told.release(A)
    told.truncate(B, 4)
    assert (store.spans(B), store.cap(B)) == ([(0, 0, 4), (4, 6, 3)], 7)
    told.truncate(B, 3)
    assert (store.spans(B), store.cap(B)) == ([(0, 0, 3), (3, 6, 3)], 6)
    assert layout(store)[:2] == [(0, 0, 3), (FREE, 3, 3)]
    told.truncate(B, 1)
    assert layout(store)[:2] == [(0, 0, 2), (FREE, 2, 4)], "C reads 2"
    told.truncate(C, 0)
    assert (store.spans(C), store.cap(C)) == ([(0, 9, 3)], 3)
    assert layout(store)[:2] == [(0, 0, 1), (FREE, 1, 5)]
    told.truncate(B, 0)
    assert (store.spans(B), store.cap(B)) == ([(0, 6, 3)], 3)
    assert layout(store)[0] == (FREE, 0, 6)
    told.attend((B, 0, 3), (C, 0, 2))


def test_truncating_a_donor_leaves_its_readers_theirs() -> None:
    told = family()
    told.truncate(A, 1)
    assert told.store.spans(A) == [(0, 0, 6)]
    assert told.store.cap(A) == 6
    stats = told.store.stats()
    assert (stats.written, stats.shared) == (4 + 1, 4)
    told.reserve(D, 2)
    told.share(B, D, 4)
    assert told.store.spans(D) == [(0, 0, 4), (4, 12, 2)], "readers hand on what A forgot"
    told.attend((B, 5, 1), (C, 2, 1), (D, 4, 2))


def test_a_sequence_without_rows_may_share_after_it_was_emptied() -> None:
    told = family()
    told.truncate(B, 0)
    told.share(A, B, 5)
    assert told.store.spans(B) == [(0, 0, 5), (5, 6, 3)]
    told.write((B, 5, 3))


def test_reserving_again_gives_a_sharer_its_own_run() -> None:
    told = family()
    generation = told.store.generation
    assert told.store.reserve(B, 3) == Slot(B, 1, 6, 3)
    assert told.store.reserve(B, 1) == Slot(B, 1, 6, 3)
    assert told.store.generation == generation


def test_readers_of_a_batch_see_the_old_rows_of_the_other() -> None:
    told = family()
    step = told.attend((A, 5, 1), (B, 5, 1), (C, 2, 3))
    assert step.moves == ()
    assert step.inputs.window.tolist() == [
        [[0, 6], [0, 0], [0, 0], [0, 0]],
        [[0, 4], [6, 2], [0, 0], [0, 0]],
        [[0, 2], [9, 1], [0, 0], [0, 0]],
        [[0, 2], [9, 2], [0, 0], [0, 0]],
        [[0, 2], [9, 3], [0, 0], [0, 0]],
    ]


def test_import_rows_appends_to_a_sharer() -> None:
    told = family()
    k, v = (told.store.export(B, 0, which)[None].repeat(2, axis=0) for which in "kv")
    told.store.import_rows(B, k[:, 4:5], v[:, 4:5])
    assert told.store.written(B) == 6
    for which, rows in (("k", k), ("v", v)):
        assert (told.store.export(B, 0, which)[5] == rows[0, 4]).all()
    assert told.store.stats().copy_on_writes == 0


def test_counts_of_readers_are_kept_not_copied() -> None:
    """A copy a sequence would make a batch of n readers of one run cost n * n."""
    told = family()
    readers = told.store._tables.readers
    counts = readers._by_run[told.store.owners()[0]]
    told.write((B, 5, 1))
    told.truncate(B, 4)
    told.write((B, 2, 1), (C, 2, 1))
    assert readers._by_run[told.store.owners()[0]] is counts and counts == {2: 2}
