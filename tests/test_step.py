"""Steps: how they end, what a graph fills from, which variant they take (contract 5.5, 6.6)."""

from __future__ import annotations

import gc
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
from interrupts import interrupted_at
from stores import (
    BATCH,
    FORMATS,
    Rows,
    assert_attends,
    batch_rows,
    forward,
    make_store,
    scattered,
    tokens,
)

from minfer import reference, registry, window
from minfer.errors import Refusal
from minfer.format import KvFormat, Region
from minfer.ops import Config, Tunable, variant

# --- steps that fail, rows that are written again ------------------------------------------------


@pytest.mark.parametrize("cache_type", FORMATS)
def test_a_step_that_raises_equals_one_that_never_was(cache_type: str) -> None:
    broken, plain = scattered(cache_type), scattered(cache_type)
    digest = broken.digest()
    batch = tokens((1, 5, 2), (2, 6, 2))
    q, k, v = batch_rows(batch, salt=50)
    with pytest.raises(ZeroDivisionError), broken.step(batch) as step:
        step.write(0, k=k, v=v)
        step.attend(0, q=q)
        raise ZeroDivisionError
    assert broken.digest() == digest == plain.digest()
    for follow in (tokens((1, 5, 1)), tokens((2, 6, 3), (1, 6, 2), kind="decode")):
        np.testing.assert_array_equal(forward(broken, follow), forward(plain, follow))


def test_overwritten_rows_are_read_and_the_tail_stays() -> None:
    store = make_store()
    store.reserve(1, 9)
    forward(store, tokens((1, 0, 6)))
    before = store.export(1, 0, "k")
    batch = tokens((1, 2, 2))
    forward(store, batch, salt=50)
    after = store.export(1, 0, "k")
    np.testing.assert_array_equal(after[2:4], batch_rows(batch, salt=50)[1])
    np.testing.assert_array_equal(after[[0, 1, 4, 5]], before[[0, 1, 4, 5]])


@pytest.mark.parametrize("failure", [ZeroDivisionError, KeyboardInterrupt])
def test_a_failed_overwrite_truncates_to_its_first_position(failure: type[BaseException]) -> None:
    store = make_store()
    store.reserve(1, 9)
    forward(store, tokens((1, 0, 6)))
    with pytest.raises(failure), store.step(tokens((1, 2, 2))):
        raise failure
    assert store.written(1) == 2
    store.release(1)


# --- the inputs a graph fills from ----------------------------------------------------------------


def test_the_inputs_of_a_step() -> None:
    store = scattered("f32")
    with pytest.raises(Refusal), store.step(tokens((2, 6, 2), (3, 2, 2))) as step:
        inputs = step.inputs
    assert inputs.kind == "prefill"
    assert inputs.groups == (2, 2)
    assert inputs.n_tokens == 4
    np.testing.assert_array_equal(inputs.positions, np.array([6, 7, 2, 3], np.int32), strict=True)
    np.testing.assert_array_equal(inputs.cells, np.array([23, 24, 2, 3], np.int32), strict=True)
    spans = np.array([[17, 24], [17, 25], [0, 3], [0, 4]], np.int32)
    np.testing.assert_array_equal(inputs.window, spans, strict=True)
    np.testing.assert_array_equal(inputs.cut(1)[:4], [[0, 1], [1, 1], [2, 1], [3, 1]])
    np.testing.assert_array_equal(inputs.cut(8), [[0, 2], [2, 2], [0, 0]])


@pytest.mark.usefixtures("added")
def test_a_variant_gets_tiles_of_its_own_height() -> None:
    seen = []

    @variant(space={"block_m": Tunable(3, (3,))})
    def attn_window_spy(
        q: Rows,
        k: Region,
        v: Region,
        positions: window.Int32,
        span: window.Int32 | None,
        tiles: window.Int32,
        *,
        fmt: KvFormat,
        scale: float,
        width: int,
        config: Config,
    ) -> Rows:
        seen.append(tiles)
        return np.zeros_like(q)

    module = ModuleType("spy")
    attn_window_spy.__module__ = module.__name__
    module.attn_window_spy = attn_window_spy
    registry.add(module)
    store = make_store()
    store.reserve(1, 8)
    forward(store, tokens((1, 0, 7)), variant="spy")
    forward(store, tokens((1, 7, 1), kind="decode"), variant="spy")
    np.testing.assert_array_equal(seen[0], [[0, 3], [3, 3], [6, 1], [0, 0]])
    np.testing.assert_array_equal(seen[1], [[0, 1]])


def test_decode_tiles_have_one_query_each() -> None:
    store = scattered("f32")
    with pytest.raises(Refusal), store.step(tokens((2, 6, 2), (1, 5, 1), kind="decode")) as step:
        np.testing.assert_array_equal(step.inputs.cut(32), [[0, 1], [1, 1], [2, 1]])


def test_a_graph_may_store_by_itself() -> None:
    store = make_store()
    store.reserve(1, 4)
    batch = tokens((1, 0, 2))
    q, k, v = batch_rows(batch)
    with store.step(batch) as step:
        fresh = [replace(r, arrays=(r.arrays[0].copy(),)) for r in step.region(0)]
        for region, array in zip(fresh, (k, v), strict=True):
            reference.store_cells(region, array, step.inputs.cells, fmt=KvFormat.F32)
        step.stored(0, *fresh)
        out = step.attend(0, q=q)
    assert list(store.region(0)) == fresh, "the store keeps the regions an op returns"
    np.testing.assert_array_equal(store.export(1, 0, "v"), v)
    assert_attends(store, step.receipts[0], 1, 0, q, out)


# --- choice of the variant ------------------------------------------------------------------------


def test_a_named_variant_is_obeyed_and_receipted() -> None:
    store = make_store()
    store.reserve(1, 4)
    q, k, v = batch_rows(BATCH)
    with store.step(BATCH) as step:
        step.write(0, k=k, v=v)
        step.attend(0, q=q, variant="rows")
        assert step.receipts[0].variant == "rows"
        assert step.receipts[0].reason == "asked for by name"
        step.attend(0, q=q)
        assert step.receipts[0].reason == "the default for this shape"


def test_the_flag_against_the_fused_read_asks_for_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINFER_NO_FUSED_Q8_KV", "1")
    for fmt, wanted in (("f16", "flash"), ("q8_0", "scratch")):
        store = make_store(fmt)
        store.reserve(1, 4)
        q, k, v = batch_rows(BATCH)
        with store.step(BATCH) as step:
            step.write(0, k=k, v=v)
            step.attend(0, q=q, variant="rows")
            assert step.receipts[0].variant == "rows"
            step.attend(0, q=q)
            assert step.receipts[0].variant == wanted


def test_an_interrupt_between_any_two_lines_leaves_the_store_usable() -> None:
    for line in range(1, 500):
        store = make_store()
        store.reserve(1, 8)
        stopped = False
        try:
            with interrupted_at(line), store.step(BATCH) as step:
                for region in (step.region(0),):
                    step.stored(0, *region)
        except KeyboardInterrupt:
            stopped = True
        gc.collect(0)  # an interrupt inside contextlib leaves the block to the collector
        store.check()
        assert store.written(1) in (0, BATCH.n_tokens)
        with store.step(BATCH) as step:
            step.stored(0, *step.region(0))
        assert store.written(1) == BATCH.n_tokens
        if not stopped:
            break
    assert line > 50 and not stopped  # it went through every line once
