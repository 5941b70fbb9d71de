"""The cell store: regions, formats, rows in and out, and every refusal (contract 3, 5, 10)."""

from __future__ import annotations

import pickle
from functools import partial

import numpy as np
import pytest
from numpy.typing import NDArray
from refusals import refused

from minfer import reference
from minfer.errors import Refusal
from minfer.format import KvFormat, cell_bytes
from minfer.kv.batch import Batch
from minfer.kv.store import KvStore

N_LAYER, N_HEAD_KV, HEAD_DIM = 2, 2, 32
FORMATS = ("f32", "f16", "q8_0")
Rows = NDArray[np.float32]


def make_store(cache_type: str = "f32", n_ctx: int = 24) -> KvStore:
    return KvStore(N_LAYER, n_ctx, N_HEAD_KV, HEAD_DIM, cache_type=cache_type, threads=1)


def rows(seed: int, n: int) -> Rows:
    """K or V of all layers, float32 [n_layer, n, n_head_kv, head_dim]."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal((N_LAYER, n, N_HEAD_KV, HEAD_DIM), dtype=np.float32)


def bytes_of(store: KvStore) -> bytes:
    regions = [r for layer in range(store.n_layer) for r in store.region(layer)]
    return b"".join(region.arrays[0].tobytes() for region in regions)


def stored(array: Rows, cache_type: str) -> Rows:
    """What a cache of that type keeps of rows [n, n_head_kv, head_dim]."""
    fmt = KvFormat.parse(cache_type)
    flat = array.reshape(len(array), -1)
    cells = reference.encode_rows(flat, fmt)
    return reference.decode_rows(cells, fmt, flat.shape[1]).reshape(array.shape)


@pytest.mark.parametrize("cache_type", FORMATS)
def test_imported_rows_come_back_as_the_format_keeps_them(cache_type: str) -> None:
    store, fresh = make_store(cache_type), make_store(cache_type)
    store.reserve(9, 3)
    store.reserve(4, 8)
    k, v = rows(1, 5), rows(2, 5)
    store.import_rows(4, k[:, :2], v[:, :2])
    store.import_rows(4, k[:, 2:], v[:, 2:])
    assert store.written(4) == 5
    for layer in range(N_LAYER):
        for which, given in (("k", k), ("v", v)):
            np.testing.assert_array_equal(
                store.export(4, layer, which), stored(given[layer], cache_type), strict=True
            )
            wanted = reference.encode_rows(given[layer].reshape(5, -1), store.fmt)
            np.testing.assert_array_equal(store.export_cells(4, layer, which), wanted, strict=True)
            cells, before = (s.region(layer)["kv".index(which)].arrays[0] for s in (store, fresh))
            np.testing.assert_array_equal(cells[3:8], wanted)
            np.testing.assert_array_equal(cells[:3], before[:3], "the neighbour's are untouched")
            np.testing.assert_array_equal(cells[8:], before[8:])


def test_a_sequence_without_rows_exports_none() -> None:
    store = make_store()
    store.reserve(1, 4)
    assert store.export(1, 0).shape == (0, N_HEAD_KV, HEAD_DIM)
    assert store.export_cells(1, 0).shape == (0, cell_bytes(KvFormat.F32, 64))


@pytest.mark.parametrize("cache_type", FORMATS)
def test_import_equals_a_step_that_writes(cache_type: str) -> None:
    one, other = make_store(cache_type), make_store(cache_type)
    k, v = rows(1, 3), rows(2, 3)
    for store in (one, other):
        store.reserve(0, 4)
    one.import_rows(0, k, v)
    with other.step(Batch([0] * 3, range(3), "prefill")) as step:
        for layer in range(N_LAYER):
            step.write(layer, k=k[layer], v=v[layer])
    assert bytes_of(one) == bytes_of(other)
    assert one.digest() == other.digest()


def test_rows_that_are_not_contiguous_arrive_whole() -> None:
    store = make_store()
    store.reserve(0, 4)
    k, v = rows(1, 6)[:, ::2], np.asfortranarray(rows(2, 3))
    store.import_rows(0, k, v)
    np.testing.assert_array_equal(store.export(0, 1, "k"), k[1])
    np.testing.assert_array_equal(store.export(0, 1, "v"), v[1])


def test_the_store_says_where_sequences_lie() -> None:
    store = make_store(n_ctx=8)
    assert tuple(store.reserve(5, 3)) == (5, 0, 0, 3)
    store.reserve(6, 4)
    assert store.spans(6) == [(0, 3, 4)]
    assert store.owners() == [0, 0, 0, 1, 1, 1, 1, -1]
    assert (store.cap(6), store.written(6), store.has(6), store.has(7)) == (4, 0, True, False)
    store.import_rows(6, rows(0, 2), rows(0, 2))
    stats = store.stats()
    assert (stats.reserved, stats.written, stats.free_cells, stats.sequences) == (7, 2, 1, 2)
    store.truncate(6, 1)
    assert store.written(6) == 1
    store.release(5)
    assert store.stats().reserved == 4
    store.check()


@pytest.mark.parametrize(("cache_type", "words"), [("f32", 64), ("f16", 32), ("q8_0", 17)])
def test_bytes_of_a_store(cache_type: str, words: int) -> None:
    store = make_store(cache_type)
    held = sum(r.arrays[0].nbytes for i in range(N_LAYER) for r in store.region(i))
    assert held == 2 * N_LAYER * 24 * words * 4
    assert held == sum(need.n_bytes for need in store.needs(store.fmt))
    assert store.layout == "canonical"


def test_the_cache_type_comes_from_the_argument_then_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MINFER_CACHE_TYPE", "f16")
    assert KvStore(1, 4, 1, 32).fmt is KvFormat.F16
    assert KvStore(1, 4, 1, 32, cache_type="q8_0").fmt is KvFormat.Q8_0
    assert KvStore(1, 4, 1, 32, cache_type=KvFormat.F32).fmt is KvFormat.F32
    assert KvStore(1, 4, 1, 32, cache_type="").fmt is KvFormat.F32, "an empty argument is auto"
    monkeypatch.setenv("MINFER_CACHE_TYPE", "q8")
    with pytest.raises(Refusal) as caught:
        KvStore(1, 4, 1, 32)
    assert caught.value.rule == "3.1"
    monkeypatch.delenv("MINFER_CACHE_TYPE")
    assert KvStore(1, 4, 1, 32).fmt is KvFormat.F32


@pytest.mark.parametrize(
    ("rule", "changed"),
    [
        ("10", {"n_layer": 0}),
        ("10", {"n_ctx": 0}),
        ("10", {"n_ctx": True}),
        ("10", {"n_head_kv": -1}),
        ("10", {"head_dim": 64.0}),
        ("10", {"threads": 0}),
        ("3.1", {"cache_type": "Q8_0"}),
        ("3.1", {"cache_type": " f16"}),
        ("3.3", {"cache_type": "q8_0", "head_dim": 48}),
        ("0.3", {"device": "gpu"}),
    ],
)
def test_bad_stores(rule: str, changed: dict[str, object]) -> None:
    sizes: dict[str, object] = {"n_layer": 1, "n_ctx": 4, "n_head_kv": 2, "head_dim": 32}
    with pytest.raises(Refusal) as caught:
        KvStore(**{**sizes, **changed})
    assert caught.value.rule == rule
    assert repr(next(reversed(changed.values()))) in caught.value.message


def test_an_odd_row_of_f16_fills_half_a_word_with_zero() -> None:
    store = KvStore(1, 4, 1, 3, cache_type="f16")
    store.reserve(0, 4)
    k = np.array([[[[1.5, -2.0, 0.25]]]], dtype=np.float32)
    store.import_rows(0, k, k)
    np.testing.assert_array_equal(store.export(0, 0), k[0])
    assert store.export_cells(0, 0).shape == (1, 8)
    assert not store.export_cells(0, 0)[0, 6:].any()


# --- refusals change nothing ----------------------------------------------------------------------


def filled() -> KvStore:
    store = make_store(n_ctx=12)
    store.reserve(1, 6)
    store.reserve(2, 4)
    store.import_rows(1, rows(1, 3), rows(2, 3))
    return store


def test_tables_refuse_through_the_store() -> None:
    store = filled()
    refused(store, "5.2", lambda: store.reserve(3, 3))
    refused(store, "5.2", lambda: store.reserve(1, 7))
    refused(store, "5.2", lambda: store.reserve(-1, 1))
    refused(store, "2.5", lambda: store.release(3))
    refused(store, "5.11", lambda: store.truncate(1, 4))
    refused(store, "2.5", lambda: store.export(3, 0))
    refused(store, "2.5", lambda: store.spans(3))


def test_bad_exports() -> None:
    store = filled()
    refused(store, "10", lambda: store.export(1, 0, "q"))
    for layer in (-1, N_LAYER, True, 0.0):
        refused(store, "5.5", partial(store.export, 1, layer))


def test_bad_imports() -> None:
    store = filled()
    good = rows(1, 2)
    refused(store, "4.2", lambda: store.import_rows(1, good.astype(np.float64), good))
    refused(store, "4.2", lambda: store.import_rows(1, good, good.astype(np.float16)))
    refused(store, "4.2", lambda: store.import_rows(1, good, good.astype(">f4")))
    refused(store, "10", lambda: store.import_rows(1, good, good.tolist()))
    refused(store, "10", lambda: store.import_rows(1, good[0], good))
    refused(store, "10", lambda: store.import_rows(1, good[:1], good[:1]))
    refused(store, "10", lambda: store.import_rows(1, good, good[:, :1]))
    refused(store, "10", lambda: store.import_rows(1, good[..., :16], good[..., :16]))
    refused(store, "5.5", lambda: store.import_rows(1, good[:, :0], good[:, :0]))
    refused(store, "2.5", lambda: store.import_rows(3, good, good))
    error = refused(store, "2.5", lambda: store.import_rows(1, rows(1, 4), rows(1, 4)))
    assert error.facts["room"] == 6


@pytest.mark.parametrize("cache_type", FORMATS)
def test_a_damaged_row_stays_visible(cache_type: str) -> None:
    store = make_store(cache_type)
    store.reserve(1, 2)
    k = rows(1, 2)
    k[1, 1, 1, 1] = np.nan
    store.import_rows(1, k, k)
    assert np.isnan(store.export(1, 1)[1, 1, 1])
    assert np.isfinite(store.export(1, 1)[0]).all()
    assert np.isfinite(store.export(1, 0)).all()


def test_a_store_that_no_memory_holds_is_refused() -> None:
    with pytest.raises(Refusal, match=r"f32 KV cache of 2147483647 cells 512\.0 TiB") as refused:
        KvStore(1, 2**31 - 1, 1024, 32)
    assert refused.value.rule == "0.1"


def test_a_refusal_crosses_processes() -> None:
    refusal = Refusal("5.5", "no", {"seq": 3})
    copied = pickle.loads(pickle.dumps(refusal))
    assert (copied.rule, copied.message, copied.facts) == ("5.5", "no", {"seq": 3})
