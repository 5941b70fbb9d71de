"""What attention over a store must equal (contract 5.5, 6.1)."""

from __future__ import annotations

import numpy as np
import pytest
from stores import (
    FORMATS,
    HEAD_DIM,
    N_HEAD,
    N_HEAD_KV,
    assert_attends,
    batch_rows,
    forward,
    make_store,
    scattered,
    tokens,
)

from minfer.kv.store import KvStore
from minfer.window import WindowMode

# --- values -------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache_type", FORMATS)
@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_attention_over_scattered_sequences(cache_type: str, kind: str) -> None:
    store = scattered(cache_type)
    batch = tokens((2, 6, 2), (1, 5, 3), kind=kind)
    q, k, v = batch_rows(batch)
    with store.step(batch) as step:
        step.write(0, k=k, v=v)
        out = step.attend(0, q=q)
    assert step.inputs.mode is WindowMode.SPAN
    assert_attends(store, step.receipts[0], 2, 6, q[:2], out[:2])
    assert_attends(store, step.receipts[0], 1, 5, q[2:], out[2:])


@pytest.mark.parametrize("cache_type", FORMATS)
@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_attention_over_one_sequence_at_cell_zero(cache_type: str, kind: str) -> None:
    store = make_store(cache_type)
    store.reserve(1, 30)
    forward(store, tokens((1, 0, 11)))
    batch = tokens((1, 11, 4), kind=kind)
    q, k, v = batch_rows(batch)
    with store.step(batch) as step:
        step.write(0, k=k, v=v)
        out = step.attend(0, q=q)
        clipped = step.attend(0, q=q, width=5)
        doubled = step.attend(0, q=q, scale=2 / np.sqrt(HEAD_DIM))
    assert step.inputs.mode is WindowMode.CAUSAL
    assert_attends(store, step.receipts[0], 1, 11, q, out)
    assert_attends(store, step.receipts[0], 1, 11, q, clipped, width=5)
    assert_attends(store, step.receipts[0], 1, 11, 2 * q, doubled)


@pytest.mark.parametrize("cache_type", FORMATS)
def test_attention_reads_the_stored_rows(cache_type: str) -> None:
    store = make_store(cache_type)
    store.reserve(1, 2)
    batch = tokens((1, 0, 1), kind="decode")
    out = forward(store, batch)
    kept = store.export(1, 0, "v")
    np.testing.assert_array_equal(out[0], np.repeat(kept[0], N_HEAD // N_HEAD_KV, axis=0))
    fresh = batch_rows(batch)[2]
    assert (kept == fresh).all() == (cache_type == "f32")


@pytest.mark.parametrize("cache_type", FORMATS)
@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_a_shared_prefix_reads_as_rows_of_its_own(cache_type: str, kind: str) -> None:
    store, alone = make_store(cache_type), make_store(cache_type)
    store.reserve(8, 3)
    store.reserve(1, 6)
    store.reserve(2, 9)
    forward(store, tokens((1, 0, 5)))
    store.share_prefix(1, 2, 4)
    alone.reserve(2, 20)
    alone.import_rows(2, *(store.export(1, 0, which)[None, :4] for which in "kv"))
    for batch in (tokens((2, 4, 3), kind=kind), tokens((2, 7, 2), kind=kind)):
        q, k, v = batch_rows(batch)
        with store.step(batch) as step:
            step.write(0, k=k, v=v)
            out = step.attend(0, q=q[:, ::-1])
        assert step.inputs.mode is WindowMode.RUNS
        assert step.receipts[0].op == "attn_map"
        with alone.step(batch) as plain:
            plain.write(0, k=k, v=v)
            np.testing.assert_array_equal(plain.attend(0, q=q[:, ::-1]), out)
        assert_attends(store, step.receipts[0], 2, batch.positions[0], q[:, ::-1], out)
    for which in "kv":
        np.testing.assert_array_equal(store.export(2, 0, which), alone.export(2, 0, which))


# --- invariance, bit for bit ----------------------------------------------------------------------


@pytest.mark.parametrize("cache_type", FORMATS)
@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_neighbours_and_placement_change_no_bit(cache_type: str, kind: str) -> None:
    together = forward(scattered(cache_type), tokens((2, 6, 3), (3, 3, 1), (1, 5, 2), kind=kind))
    turned = forward(scattered(cache_type), tokens((1, 5, 2), (2, 6, 3), kind=kind))
    for seq, t, n, first, again in ((2, 6, 3, 0, 2), (1, 5, 2, 4, 0)):
        alone = make_store(cache_type)
        alone.reserve(seq, 12)
        forward(alone, tokens((seq, 0, t)))
        batch = tokens((seq, t, n), kind=kind)
        out = forward(alone, batch)
        np.testing.assert_array_equal(together[first : first + n], out)
        np.testing.assert_array_equal(turned[again : again + n], out)


@pytest.mark.parametrize("cache_type", FORMATS)
def test_chunks_of_a_prompt_change_no_bit(cache_type: str) -> None:
    whole = make_store(cache_type)
    whole.reserve(1, 30)
    out = forward(whole, tokens((1, 0, 23)))
    for chunk in (1, 7):
        cut = make_store(cache_type)
        cut.reserve(5, 9)
        cut.reserve(1, 23)
        parts = [forward(cut, tokens((1, t, min(chunk, 23 - t)))) for t in range(0, 23, chunk)]
        np.testing.assert_array_equal(np.concatenate(parts), out)


@pytest.mark.parametrize("cache_type", FORMATS)
def test_a_long_sequence_reads_alike_anywhere_and_on_any_threads(cache_type: str) -> None:
    outs = []
    for start, threads in ((0, 1), (5, 2), (262, 1)):
        store = KvStore(1, 600, N_HEAD_KV, HEAD_DIM, cache_type=cache_type, threads=threads)
        if start:
            store.reserve(9, start)
        store.reserve(1, 300)
        assert store.spans(1)[0].cell == start
        prompt = forward(store, tokens((1, 0, 290)))
        outs.append(np.concatenate([prompt, forward(store, tokens((1, 290, 3), kind="decode"))]))
    np.testing.assert_array_equal(outs[1], outs[0])
    np.testing.assert_array_equal(outs[2], outs[0])


@pytest.mark.parametrize("cache_type", FORMATS)
def test_truncating_equals_never_having_written(cache_type: str) -> None:
    cut, plain = make_store(cache_type), make_store(cache_type)
    for store in (cut, plain):
        store.reserve(1, 20)
        forward(store, tokens((1, 0, 4)))
    forward(cut, tokens((1, 4, 9)), salt=50)
    cut.truncate(1, 4)
    assert cut.digest() == plain.digest()
    for batch in (tokens((1, 4, 3)), tokens((1, 7, 2), kind="decode")):
        np.testing.assert_array_equal(forward(cut, batch), forward(plain, batch))
