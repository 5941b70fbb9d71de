"""Removal of positions: what moves, what is turned, what is cleared (contract 5.7, 4.7)."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from refusals import refused, state
from stores import HEAD_DIM, N_HEAD_KV, A, B, C, Told, layout, make_store, seed_rows, turned

from minfer import reference
from minfer.format import KvFormat
from minfer.kv import arena
from minfer.kv.runs import FREE
from minfer.kv.store import KvStore
from minfer.rope import Linear, Llama3, Rope, Yarn, yarn_temperature

ROPE = Rope(HEAD_DIM, 10000.0)
PARTIAL = Rope(HEAD_DIM // 2, 500.0)
YARN = Rope(HEAD_DIM, 10000.0, Yarn(4.0, 64, yarn_temperature(4.0)))
LLAMA3 = Rope(HEAD_DIM, 10000.0, Llama3(8.0, 1.0, 4.0, 32))


def company(cache_type: str) -> Told:
    """B reads 3 rows of A and has 5 of its own; A has 8 rows; C is alone with 4."""
    told = Told(cache_type, n_ctx=32, n_layer=2)
    told.reserve(C, 5, rows=4)
    told.reserve(A, 9, rows=8)
    told.reserve(B, 7)
    told.share(A, B, 3)
    told.write((B, 3, 5))
    return told


@pytest.mark.parametrize("cache_type", ["f32", "q8_0"])
def test_rows_that_are_not_turned_move_verbatim(cache_type: str) -> None:
    told = company(cache_type)
    tables = [told.store.spans(seq) for seq in (A, B, C)], layout(told.store)
    told.remove(A, 4, 2)
    told.remove(B, 3, 1)
    told.remove(C, 0, 2)
    assert ([told.store.spans(seq) for seq in (A, B, C)], layout(told.store)) == tables
    assert [told.store.written(seq) for seq in (A, B, C)] == [6, 7, 2]
    told.attend((A, 6, 1), (B, 7, 1), (C, 2, 3))
    told.attend((A, 7, 1), (B, 8, 2), kind="decode")


@pytest.mark.parametrize("cache_type", ["f32", "q8_0"])
def test_shift_drops_the_first_rows(cache_type: str) -> None:
    told = company(cache_type)
    told.store.shift(C, 3, rope=None)
    del told.seeds[C][:3]
    told.check()
    assert told.store.written(C) == 1
    told.remove(C, 0, 1)
    assert told.store.written(C) == 0
    told.attend((C, 0, 5))


@pytest.mark.parametrize("cache_type", ["f32", "q8_0"])
def test_freed_cells_are_cleared_and_no_other_changes(cache_type: str) -> None:
    told = company(cache_type)
    store = told.store
    before = [r.arrays[0].copy() for layer in range(2) for r in store.region(layer)]
    told.remove(A, 4, 3)  # row 7 moves from cell 12 to cell 9; cells 10 to 12 are free
    for region, old in zip(
        [r for layer in range(2) for r in store.region(layer)], before, strict=True
    ):
        now = region.arrays[0]
        same = np.r_[0:9, 13:32]
        assert (now[same] == old[same]).all()
        assert (now[9] == old[12]).all()
        rows = reference.decode_rows(now[10:13], store.fmt, N_HEAD_KV * HEAD_DIM)
        assert np.isnan(rows).all() if store.sanitize else not now[10:13].any()


def test_the_tail_of_a_sequence_may_be_removed() -> None:
    told = company("f32")
    told.remove(B, 6, 2)
    told.remove(A, 3, 5)
    assert (told.store.written(A), told.store.written(B)) == (3, 6)
    told.attend((A, 3, 2), (B, 6, 1))


# --- turning --------------------------------------------------------------------------------------


def assert_one_rounding(found: np.ndarray, exact: np.ndarray, fmt: KvFormat) -> None:
    """float32 error for f32; for q8_0 the bound of contract 4.4 of each block beside it."""
    if fmt is KvFormat.F32:
        largest = np.abs(exact).max(axis=-1, keepdims=True)
        assert (np.abs(found - exact) <= 1e-6 * largest).all()
        return
    blocks = exact.reshape(-1, 32)
    amax = np.abs(blocks).max(axis=1, keepdims=True)
    d = amax / 127
    s = d.astype(np.float32).astype(np.float16).astype(np.float64)
    bound = 0.50002 * d + 127 * np.abs(s - d) + 2e-6 * amax
    assert (np.abs(found.reshape(-1, 32) - blocks) <= bound).all()


@pytest.mark.parametrize("cache_type", ["f32", "q8_0"])
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("rope", [ROPE, PARTIAL, YARN, LLAMA3], ids=["all", "half", "yarn", "l3"])
def test_later_keys_turn_back_and_values_stay(cache_type: str, pairing: str, rope: Rope) -> None:
    told = company(cache_type)
    store = told.store
    old = {seq: [store.export(seq, layer, "k") for layer in (0, 1)] for seq in (A, B, C)}
    bytes_before = {seq: store.export_cells(seq, 1, "k") for seq in (A, B, C)}
    values = {seq: store.export_cells(seq, 1, "v") for seq in (A, B, C)}
    store.remove(A, 3, 2, rope=rope, pairing=pairing)
    store.shift(C, 1, rope=rope, pairing=pairing)
    for seq, start, length in ((A, 3, 2), (C, 0, 1)):
        for layer in (0, 1):
            found = store.export(seq, layer, "k")
            np.testing.assert_array_equal(found[:start], old[seq][layer][:start])
            exact = turned(old[seq][layer][start + length :], rope, -length, pairing)
            assert_one_rounding(found[start:], exact, store.fmt)
            assert np.abs(found[start:] - old[seq][layer][start + length :]).max() > 0.1
        kept = np.delete(values[seq], slice(start, start + length), axis=0)
        np.testing.assert_array_equal(store.export_cells(seq, 1, "v"), kept)
    np.testing.assert_array_equal(store.export_cells(B, 1, "k"), bytes_before[B])
    np.testing.assert_array_equal(store.export_cells(B, 1, "v"), values[B])
    if rope.n_rot < HEAD_DIM and cache_type == "f32":
        rest = store.export(A, 0, "k")[3:, :, rope.n_rot :]
        np.testing.assert_array_equal(rest, old[A][0][5:, :, rope.n_rot :])


@pytest.mark.parametrize("cache_type", ["f32", "q8_0"])
def test_layers_turn_by_a_rope_of_their_own(cache_type: str) -> None:
    told = company(cache_type)
    store = told.store
    old = [store.export(A, layer, "k")[6:] for layer in (0, 1)]
    store.remove(A, 5, 1, rope=[PARTIAL, None])
    exact = turned(old[0], PARTIAL, -1, "half")
    assert_one_rounding(store.export(A, 0, "k")[5:], exact, store.fmt)
    np.testing.assert_array_equal(store.export(A, 1, "k")[5:], old[1])


def test_a_turned_key_equals_one_written_at_the_lower_position() -> None:
    """Rows that were turned by position: the re-roped key is the one of its new position."""
    store = make_store("f32", n_ctx=12)
    store.reserve(A, 12)
    plain, v = seed_rows([(A, pos, 0) for pos in range(9)], 0)
    keys = np.stack([turned(plain[pos], YARN, pos, "half") for pos in range(9)])
    store.import_rows(A, (1.3 * keys)[None].astype(np.float32), v[None])
    store.remove(A, 2, 4, rope=YARN)
    wanted = np.stack([turned(1.3 * plain[pos], YARN, pos - 4, "half") for pos in (6, 7, 8)])
    found = store.export(A, 0, "k")[2:]
    assert np.abs(found - wanted).max() <= 2e-6 * np.abs(wanted).max()


@pytest.mark.parametrize("cache_type", ["f32", "q8_0"])
def test_many_rows_are_turned_and_cleared_in_pieces(
    cache_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, pieces = company(cache_type), company(cache_type)
    whole.store.remove(A, 3, 2, rope=ROPE)
    whole.store.shift(C, 1, rope=ROPE)
    monkeypatch.setattr(arena, "ROWS_AT_ONCE", 2)
    pieces.store.remove(A, 3, 2, rope=ROPE)
    pieces.store.shift(C, 1, rope=ROPE)
    assert state(pieces.store) == state(whole.store)


# --- what is refused ------------------------------------------------------------------------------


def filled(cache_type: str) -> KvStore:
    store = make_store(cache_type, n_ctx=10)
    store.reserve(A, 8)
    k, v = seed_rows([(A, pos, 0) for pos in range(6)], 0)
    store.import_rows(A, k[None], v[None])
    return store


@pytest.mark.parametrize("rope", [ROPE, None], ids=["turned", "plain"])
def test_f16_is_refused_where_f32_and_q8_0_remove(rope: Rope | None) -> None:
    store = filled("f16")
    for call in (
        partial(store.remove, A, 1, 2, rope=rope),
        partial(store.remove, A, 4, 2, rope=rope),  # a tail too: truncate does that
        partial(store.shift, A, 1, rope=rope),
    ):
        error = refused(store, "5.7", call, "f16", "map", "truncate")
        assert "f16" in [str(fact) for fact in error.facts.values()]
    for cache_type in ("f32", "q8_0"):
        control = filled(cache_type)
        old = control.export(A, 0, "v")
        control.remove(A, 1, 2, rope=rope)
        np.testing.assert_array_equal(control.export(A, 0, "v"), np.delete(old, [1, 2], axis=0))
        assert layout(control) == [(0, 0, 8), (FREE, 8, 2)]


@pytest.mark.parametrize(
    ("rule", "arguments"),
    [
        ("5.7", {"rope": Rope(HEAD_DIM + 2, 100.0)}),
        ("5.7", {"rope": [ROPE]}),
        ("5.7", {"rope": [ROPE, ROPE, ROPE]}),
        ("5.7", {"rope": [ROPE, Rope(HEAD_DIM + 2, 100.0)]}),
        ("5.7", {"rope": 10000.0}),
        ("5.7", {"rope": Rope(HEAD_DIM, 0.0)}),
        ("5.7", {"rope": [ROPE, Rope(HEAD_DIM, float("nan"))]}),
        ("5.7", {"rope": Rope(HEAD_DIM, 100.0, Linear(0.0))}),
        ("5.7", {"rope": ROPE, "pairing": "halves"}),
        ("5.7", {"rope": ROPE, "pairing": None}),
    ],
)
@pytest.mark.parametrize("cache_type", ["f32", "q8_0"])
def test_a_rope_that_does_not_fit(cache_type: str, rule: str, arguments: dict) -> None:
    told = company(cache_type)
    refused(told.store, rule, lambda: told.store.remove(A, 4, 2, **arguments))
    refused(told.store, rule, lambda: told.store.shift(C, 1, **arguments))
