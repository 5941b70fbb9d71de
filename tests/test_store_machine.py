"""Random operations on the cell store, in every format, against plain models of it (contract 5)."""

from __future__ import annotations

from typing import Any

import pytest
from refusals import refused

from minfer import testing
from minfer.kv.store import KvStore
from minfer.testing.kv_store import KvStoreCache

STEPS = 50


def make(cache_type: str, n_ctx: int, sanitize: bool) -> testing.Cache:
    """n_kv_embd 96: a q8_0 cell has padding."""
    return KvStoreCache(
        KvStore(2, n_ctx, 3, 32, cache_type=cache_type, threads=1, sanitize=sanitize)
    )


@pytest.mark.parametrize(
    ("cache_type", "n_ctx", "sanitize", "examples"),
    [
        ("f32", 18, False, 150),
        ("f32", 12, True, 100),
        ("f16", 24, True, 60),
        ("q8_0", 16, False, 100),
        ("q8_0", 20, True, 100),
    ],
)
def test_the_store_agrees_with_its_models(
    cache_type: str, n_ctx: int, sanitize: bool, examples: int
) -> None:
    case: Any = testing.machine(
        lambda: make(cache_type, n_ctx, sanitize), examples=examples, steps=STEPS
    )
    case("runTest").debug()
    for seen in ("sharer copies, rows kept", "donor copies, rows kept", "share of a share"):
        assert case.tally[seen, "seen"], f"no run came across: {seen}"


@pytest.mark.parametrize("cache_type", ["f32", "f16", "q8_0"])
def test_a_cell_of_another_sequence_is_told_apart(cache_type: str) -> None:
    """What the adapter would say of a store that reads or keeps wrong rows."""
    cache = KvStoreCache(KvStore(2, 8, 3, 32, cache_type=cache_type, threads=1, sanitize=True))
    cache.reserve(1, 4)
    cache.step([(1, 0, [7, 300])])
    assert cache.read(1) == [7, 300]
    cache.check()
    k, v = cache.store.region(1)
    kept = v.arrays[0][1].copy()
    v.arrays[0][1] = k.arrays[0][1]  # K where V belongs
    with pytest.raises(AssertionError, match="row 1 of sequence 1 in layer 1, v, is no row"):
        cache.read(1)
    v.arrays[0][1] = v.arrays[0][0]  # another row of the same kind
    with pytest.raises(AssertionError, match=r"layers of sequence 1 differ: \[7, 300\] and \[7, 7"):
        cache.read(1)
    v.arrays[0][1] = kept
    k.arrays[0][5] = 0
    with pytest.raises(AssertionError, match=r"cells \[5\] of layer 1, k, are free or unwritten"):
        cache.check()


def test_a_refusal_that_changes_a_byte_is_seen() -> None:
    cache = KvStoreCache(KvStore(1, 8, 3, 32, cache_type="f32", threads=1))
    state = cache.state()
    refused(cache.store, "2.5", lambda: cache.step([(1, 0, [7])]))
    assert cache.state() == state
    cache.store.region(0)[0].arrays[0][3, 5] = 1
    assert cache.state() != state


def test_inside_a_step_everything_else_is_tried() -> None:
    cache = KvStoreCache(KvStore(1, 8, 3, 32, cache_type="f32", threads=1))
    cache.reserve(1, 8)
    tried = []
    for name in ("release", "truncate", "resize", "defrag", "share_prefix", "remove", "shift"):

        def spy(*args: Any, name: str = name, **named: Any) -> Any:
            tried.append(name)
            return getattr(KvStore, name)(cache.store, *args, **named)

        vars(cache.store)[name] = spy
    for t in range(8):
        cache.step([(1, t, [t])])
    for _ in range(8):
        cache.step([(1, 7, [7])])
    assert set(tried) == {
        "release",
        "truncate",
        "resize",
        "defrag",
        "share_prefix",
        "remove",
        "shift",
    }


def test_an_operation_that_an_open_step_lets_through_is_reported() -> None:
    cache = KvStoreCache(KvStore(1, 8, 3, 32, cache_type="f32", threads=1))
    cache.reserve(1, 8)
    vars(cache.store)["reserve"] = lambda seq, cap: None
    with pytest.raises(AssertionError, match="operation 0 is not refused in an open step"):
        cache.step([(1, 0, [1])])
