"""Compaction: what moves where, in which order, and that every byte arrives (contract 5.6)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from stores import FORMATS, A, B, C, Told, free_runs, layout

from minfer import kernels_numba, registry
from minfer.format import KvFormat
from minfer.kv.batch import Batch
from minfer.kv.packing import order_moves
from minfer.kv.runs import FREE, Move
from minfer.kv.store import KvStore


def holes(cache_type: str = "f32") -> Told:
    """A [2, 6) 3 rows, B [9, 12) 2 rows, C [13, 17) shares 2 of A; free [0, 2) [6, 9) [12, 13)."""
    told = Told(cache_type, n_ctx=20, n_layer=2)
    for seq, cap in ((7, 2), (A, 4), (8, 3), (B, 3), (9, 1), (C, 4)):
        told.reserve(seq, cap)
    told.write((A, 0, 3), (B, 0, 2))
    told.share(A, C, 2)
    for seq in (7, 8, 9):
        told.release(seq)
    assert free_runs(told.store) == [(0, 2), (6, 9), (12, 13), (17, 20)]
    return told


@pytest.mark.parametrize("cache_type", FORMATS)
def test_runs_pack_downward_in_cell_order(cache_type: str) -> None:
    told = holes(cache_type)
    store = told.store
    moves = store.defrag()
    assert moves == [Move(1, 2, 0, 3), Move(3, 9, 4, 2), Move(5, 13, 7, 0)]
    assert layout(store) == [(1, 0, 4), (3, 4, 3), (5, 7, 4), (FREE, 11, 9)]
    assert store.spans(C) == [(0, 0, 2), (2, 7, 4)]
    told.check()
    stats = store.stats()
    assert (stats.defrags, stats.cells_moved, stats.rows_copied) == (1, 5, 0)
    told.attend((A, 3, 1), (B, 2, 1), (C, 2, 4))


@pytest.mark.parametrize(
    ("need", "moved"),
    [(1, 0), (3, 0), (4, 1), (5, 1), (6, 2), (7, 3), (9, 3), (None, 3)],
)
def test_packing_stops_once_there_is_a_gap(need: int | None, moved: int) -> None:
    told = holes()
    every = [Move(1, 2, 0, 3), Move(3, 9, 4, 2), Move(5, 13, 7, 0)]
    assert told.store.defrag(need) == every[:moved]
    told.check()
    if need is not None:
        assert told.store.stats().largest_free_run >= need
    assert told.store.stats().defrags == (moved > 0)


def test_a_packed_store_stays_as_it_is() -> None:
    told = holes()
    told.store.defrag()
    digest, generation = told.store.digest(), told.store.generation
    assert told.store.defrag() == []
    assert told.store.defrag(9) == []
    assert (told.store.digest(), told.store.generation) == (digest, generation)
    assert told.store.stats().defrags == 1


def test_an_orphan_moves_with_its_readers() -> None:
    told = holes()
    told.release(A)
    assert layout(told.store)[:3] == [(FREE, 0, 2), (1, 2, 2), (FREE, 4, 5)]
    assert told.store.defrag() == [Move(1, 2, 0, 2), Move(3, 9, 2, 2), Move(5, 13, 5, 0)]
    assert told.store.spans(C) == [(0, 0, 2), (2, 5, 4)]
    told.check()
    told.attend((C, 2, 3), (B, 2, 1))


def test_a_run_moves_as_many_rows_as_anybody_reads() -> None:
    told = holes()
    told.truncate(A, 1)
    assert told.store.defrag(4) == [Move(1, 2, 0, 2)], "C reads 2 rows of the truncated A"
    told.check()


def test_compaction_makes_room_for_a_donor() -> None:
    """Copy-on-write never compacts by itself."""
    told = Told(n_ctx=16, n_layer=2)
    for seq, cap in ((A, 6), (7, 2), (B, 3), (8, 2), (C, 3)):
        told.reserve(seq, cap)
    told.write((A, 0, 6))
    told.share(A, B, 6)
    told.release(7)
    told.release(8)
    refused(told.store, "5.5", lambda: told.write((A, 3, 1)), "3", "4", "2")
    told.store.defrag()
    step = told.attend((A, 3, 1))
    assert [move.rows for move in step.moves] == [2]
    assert told.store.spans(A) == [(0, 0, 3), (3, 12, 3)]


def test_more_than_is_free_is_refused() -> None:
    told = holes()
    refused(told.store, "5.6", lambda: told.store.defrag(10), "10", "9")
    assert told.store.defrag(9) != []


# --- order of moves -------------------------------------------------------------------------------


def test_upward_moves_come_first_from_the_top_down() -> None:
    moves = [Move(0, 1, 0, 2), Move(1, 4, 6, 2), Move(2, 6, 9, 2), Move(3, 12, 11, 1)]
    wanted = [Move(2, 6, 9, 2), Move(1, 4, 6, 2), Move(0, 1, 0, 2), Move(3, 12, 11, 1)]
    assert order_moves(moves) == wanted
    assert order_moves(moves[::-1]) == wanted
    assert order_moves([Move(2, 8, 10, 4), Move(1, 4, 6, 4)]) == order_moves(
        [Move(1, 4, 6, 4), Move(2, 8, 10, 4)]
    )
    assert order_moves([]) == []


@st.composite
def relocations(draw: st.DrawFn) -> tuple[int, list[Move]]:
    """Runs with gaps, and new places that keep their order; caps grow, rows are at most the cap."""
    moves, end, new_end = [], 0, 0
    for run in range(draw(st.integers(1, 6))):
        cap, gap = draw(st.integers(1, 5)), draw(st.integers(0, 4))
        grown, new_gap = cap + draw(st.integers(0, 3)), draw(st.integers(0, 4))
        rows = draw(st.integers(0, cap))
        moves.append(Move(run, end + gap, new_end + new_gap, rows))
        end, new_end = end + gap + cap, new_end + new_gap + grown
    return max(end, new_end), draw(st.permutations(moves))


@settings(max_examples=300, deadline=None)
@given(relocations(), st.sampled_from([KvFormat.F32, KvFormat.Q8_0]))
def test_ordered_moves_leave_every_run_in_place(
    plan: tuple[int, list[Move]], fmt: KvFormat
) -> None:
    n_cells, moves = plan
    cells = [(None, cell) for cell in range(n_cells)]
    for move in moves:
        cells[move.src : move.src + move.rows] = [(move.run, i) for i in range(move.rows)]
    region = kernels_numba.empty_region(fmt, n_cells, 1, 32)
    width = region.row_bytes
    names = {name: i for i, name in enumerate(dict.fromkeys(cells))}
    picture = np.random.default_rng(0).integers(0, 256, (len(names), width)).astype(np.uint8)
    region.arrays[0][:] = picture[[names[name] for name in cells]]
    ordered = order_moves(moves)
    assert {m for m in moves if m.src != m.dst} <= set(ordered) <= set(moves)
    for move in ordered:
        cells[move.dst : move.dst + move.rows] = cells[move.src : move.src + move.rows]
    for move in moves:
        assert cells[move.dst : move.dst + move.rows] == [(move.run, i) for i in range(move.rows)]
    choice = registry.select("move_cells", device="cpu", fmt=fmt)
    array = np.array([move[1:] for move in ordered], np.int32).reshape(-1, 3)
    moved = choice.launch(region, array, config=choice.config)
    assert (moved.arrays[0] == picture[[names[name] for name in cells]]).all()


# --- bytes ----------------------------------------------------------------------------------------


def test_an_odd_cell_moves_whole_between_steps_of_its_neighbours() -> None:
    """96 elements of q8_0: 102 bytes in a cell of 104; the padding moves too."""
    store = KvStore(2, 24, 3, 32, cache_type="q8_0", threads=1)
    rng = np.random.default_rng(5)
    for seq, cap in ((7, 3), (A, 6), (8, 2), (B, 4), (9, 1), (C, 6)):
        store.reserve(seq, cap)

    def arenas() -> list[np.ndarray]:
        return [region.arrays[0] for layer in range(2) for region in store.region(layer)]

    def write(seq: int, t: int, n: int) -> None:
        rows = rng.standard_normal((2, n, 3, 32)).astype(np.float32)
        with store.step(Batch([seq] * n, range(t, t + n), "prefill")) as step:
            for layer in range(2):
                step.write(layer, k=rows[layer], v=-rows[layer])
                step.attend(layer, q=rows[layer])

    for seq in (A, B, C):
        write(seq, 0, 3)
    assert arenas()[0].shape == (24, 104)
    (start,) = (span.cell for span in store.spans(B))
    patterns = [rng.integers(1, 256, (3, 2)).astype(np.uint8) for _ in arenas()]
    for arena, pattern in zip(arenas(), patterns, strict=True):
        arena[start : start + 3, 102:] = pattern
    before = [arena[start : start + 3].copy() for arena in arenas()]
    moved = []
    for gone in (7, 8, 9):
        write(A, store.written(A), 1)
        store.release(gone)
        moved += [move for move in store.defrag() if move.run == 3]
        write(C, store.written(C), 1)
        (now,) = (span.cell for span in store.spans(B))
        for arena, wanted, pattern in zip(arenas(), before, patterns, strict=True):
            assert (arena[now : now + 3] == wanted).all()
            assert (arena[now : now + 3, 102:] == pattern).all()
        store.check()
    assert moved == [Move(3, 11, 8, 3), Move(3, 8, 6, 3)]
    assert store.sequences() == [A, B, C]
