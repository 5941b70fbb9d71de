"""Steps: write, attend, leave; and what attention over a store must equal (contract 5.5, 6.1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import ModuleType

import numpy as np
import pytest
from numpy.typing import NDArray

from minfer import reference, registry, window
from minfer.errors import Refusal
from minfer.format import KvFormat, Region
from minfer.kv.batch import Batch
from minfer.kv.runs import Entry, Share
from minfer.kv.store import KvStore
from minfer.ops import Config, Tunable, variant
from minfer.window import WindowMode

N_HEAD, N_HEAD_KV, HEAD_DIM = 6, 2, 32
FORMATS = ("f32", "f16", "q8_0")
CAP = {"f32": 1e-5, "f16": 5e-4, "q8_0": 2e-2}  # of max |v|, against the oracle without rounding
Rows = NDArray[np.float32]


def make_store(cache_type: str = "f32", n_ctx: int = 40, n_layer: int = 1) -> KvStore:
    return KvStore(n_layer, n_ctx, N_HEAD_KV, HEAD_DIM, cache_type=cache_type, threads=1)


def token_rows(seq: int, positions: Sequence[int], n_head: int, what: int) -> Rows:
    """Rows that depend on sequence and position alone, [n, n_head, head_dim]."""
    made = [
        np.random.default_rng([seq, pos, what]).standard_normal(
            (n_head, HEAD_DIM), dtype=np.float32
        )
        for pos in positions
    ]
    return np.stack(made)


def batch_rows(batch: Batch, salt: int = 0) -> tuple[Rows, Rows, Rows]:
    """q, k and v of a batch."""
    parts = [
        [token_rows(g.seq, range(g.t, g.t + g.n), n, what + salt) for g in batch.groups]
        for n, what in ((N_HEAD, 0), (N_HEAD_KV, 1), (N_HEAD_KV, 2))
    ]
    q, k, v = (np.concatenate(part) for part in parts)
    return q, k, v


def forward(store: KvStore, batch: Batch, *, salt: int = 0, variant: str | None = None) -> Rows:
    """A whole step of one layer; attention of every row."""
    q, k, v = batch_rows(batch, salt)
    with store.step(batch) as step:
        step.write(0, k=k, v=v)
        return step.attend(0, q=q, variant=variant)


def tokens(*groups: tuple[int, int, int], kind: str = "prefill") -> Batch:
    """A batch of (sequence, first position, rows)."""
    seqs = [seq for seq, _, n in groups for _ in range(n)]
    positions = [pos for _, t, n in groups for pos in range(t, t + n)]
    return Batch(seqs, positions, kind)


def oracle(
    store: KvStore, seq: int, t: int, q: Rows, width: int = 0, dtype: type = np.float64
) -> NDArray[np.floating]:
    """softmax(q k / sqrt(d)) v of the queries at t, t + 1, … over the exported rows of `seq`."""
    keys: NDArray[np.floating] = store.export(seq, 0, "k").astype(dtype)
    values: NDArray[np.floating] = store.export(seq, 0, "v").astype(dtype)
    out: NDArray[np.floating] = np.empty(q.shape, dtype)
    for i, query in enumerate(q.astype(dtype)):
        first = max(0, t + i + 1 - width) if width else 0
        for head in range(N_HEAD):
            k, v = (a[first : t + i + 1, head // (N_HEAD // N_HEAD_KV)] for a in (keys, values))
            scores = k @ query[head] * dtype(1 / np.sqrt(HEAD_DIM))
            weights = np.exp(scores - scores.max())
            out[i, head] = weights @ v / weights.sum()
    return out


def assert_attends(
    store: KvStore, receipt: registry.Receipt, seq: int, t: int, q: Rows, out: Rows, width: int = 0
) -> None:
    """Within the cap of the format, and within the budget where the variant rounds."""
    largest = float(np.abs(store.export(seq, 0, "v")).max())
    exact = oracle(store, seq, t, q, width)
    assert np.abs(out - exact).max() <= CAP[store.fmt.value] * largest
    (used,) = (v for v in registry.variants(receipt.op) if v.name == receipt.variant)
    rounded = reference.round_query(q, used.numerics(store.fmt).query)
    wide = oracle(store, seq, t, rounded, width)
    narrow = oracle(store, seq, t, rounded, width, np.float32)
    assert np.abs(out - wide).max() <= 2 * np.abs(narrow - wide).max() + 1e-6


def scattered(cache_type: str) -> KvStore:
    """Sequences 1, 3, 2 at cells 9, 0 and 17 with 5, 4 and 6 rows; cells 4 to 9 are free."""
    store = make_store(cache_type)
    for seq, cap in ((3, 4), (7, 5), (1, 8), (2, 9)):
        store.reserve(seq, cap)
    store.release(7)
    forward(store, tokens((1, 0, 5), (2, 0, 6), (3, 0, 4)))
    return store


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
    assert np.abs(doubled - oracle(store, 1, 11, 2 * q)).max() < 0.05
    assert np.abs(doubled - out).max() > 0.1


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
    store._tables._entries[2] = Entry(2, 4, Share(1, 4))
    store.check()
    alone.reserve(1, 20)
    forward(alone, tokens((1, 0, 4)))
    alone._tables._entries[2] = alone._tables._entries.pop(1)
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


def test_tiles_have_the_height_of_the_default_variant() -> None:
    store = make_store()
    store.reserve(1, 40)
    with store.step(tokens((1, 0, 37))) as step:
        q, k, v = batch_rows(tokens((1, 0, 37)))
        step.write(0, k=k, v=v)
        step.attend(0, q=q)
        block_m = int(step.receipts[0].config.get("block_m", 1))
        np.testing.assert_array_equal(step.inputs.tiles, window.tiles([37], block_m))


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
    module.attn_window_spy = attn_window_spy  # type: ignore[attr-defined]
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
        np.testing.assert_array_equal(step.inputs.tiles, [[0, 1], [1, 1], [2, 1]])


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


# --- refusals -------------------------------------------------------------------------------------


def failed_step(rule: str, use: Callable[[KvStore], object], **kwargs: int) -> Refusal:
    """The refusal of a step that `use` breaks; the tables are as before."""
    store = make_store(**kwargs)  # type: ignore[arg-type]
    store.reserve(1, 8)
    digest = store.digest()
    with pytest.raises(Refusal) as caught:
        use(store)
    assert caught.value.rule == rule, caught.value
    assert store.digest() == digest
    assert store.written(1) == 0
    store.check()
    return caught.value


BATCH = tokens((1, 0, 2))


def test_attend_before_write() -> None:
    def use(store: KvStore) -> None:
        with store.step(BATCH) as step:
            step.attend(0, q=batch_rows(BATCH)[0])

    assert "before its rows are written" in failed_step("5.5", use).message


def test_a_second_write() -> None:
    def use(store: KvStore) -> None:
        _, k, v = batch_rows(BATCH)
        with store.step(BATCH) as step:
            step.write(0, k=k, v=v)
            kept = step.region(0)[0].arrays[0].tobytes()
            try:
                step.write(0, k=-k, v=v)
            finally:
                assert step.region(0)[0].arrays[0].tobytes() == kept

    assert "second time" in failed_step("5.5", use).message


def test_a_second_write_by_a_graph() -> None:
    def use(store: KvStore) -> None:
        _, k, v = batch_rows(BATCH)
        with store.step(BATCH) as step:
            step.write(0, k=k, v=v)
            step.stored(0, *step.region(0))

    failed_step("5.5", use)


def test_leaving_with_a_layer_unwritten() -> None:
    def use(store: KvStore) -> None:
        _, k, v = batch_rows(BATCH)
        with store.step(BATCH) as step:
            step.write(1, k=k, v=v)

    error = failed_step("5.5", use, n_layer=3)
    assert error.facts == {"unwritten": [0, 2], "n_layer": 3}


@pytest.mark.parametrize("layer", [-1, 2, True, 0.0, None])
def test_a_layer_that_is_not_there(layer: int) -> None:
    def use(store: KvStore) -> None:
        _, k, v = batch_rows(BATCH)
        with store.step(BATCH) as step:
            step.write(layer, k=k, v=v)

    failed_step("5.5", use, n_layer=2)


def test_bad_rows() -> None:
    q, k, v = batch_rows(BATCH)

    def write(k: object, v: object, store: KvStore) -> None:
        with store.step(BATCH) as step:
            step.write(0, k=k, v=v)  # type: ignore[arg-type]

    assert "float64" in failed_step("4.2", partial(write, k.astype(np.float64), v)).message
    failed_step("4.2", partial(write, k, v.astype(np.float16)))
    failed_step("4.2", partial(write, k, v.astype(np.int32)))
    failed_step("10", partial(write, k.tolist(), v))
    error = failed_step("10", partial(write, k, v[:1]))
    assert error.facts == {"name": "v", "shape": (1, 2, 32), "wanted": (2, 2, 32)}
    failed_step("10", partial(write, k.reshape(2, -1), v))
    failed_step("10", partial(write, q, v))


def test_bad_queries() -> None:
    q, k, v = batch_rows(BATCH)

    def attend(arguments: dict[str, object], store: KvStore) -> None:
        with store.step(BATCH) as step:
            step.write(0, k=k, v=v)
            step.attend(0, **{"q": q, **arguments})  # type: ignore[arg-type]

    error = failed_step("2.8", partial(attend, {"q": q[:, :5]}))
    assert error.facts == {"n_head": 5, "n_head_kv": 2}
    failed_step("2.8", partial(attend, {"q": q[:, :0]}))
    failed_step("10", partial(attend, {"q": q[:1]}))
    failed_step("10", partial(attend, {"q": q[..., :16]}))
    failed_step("10", partial(attend, {"q": q[0]}))
    failed_step("4.2", partial(attend, {"q": q.astype(np.float64)}))
    failed_step("2.4", partial(attend, {"width": -1}))
    failed_step("10", partial(attend, {"scale": float("nan")}))
    failed_step("6.6", partial(attend, {"variant": "quick"}))


def test_a_second_step_and_changes_of_the_tables_wait() -> None:
    store = scattered("f32")
    batch = tokens((1, 5, 1))
    q, k, v = batch_rows(batch)
    with store.step(batch) as step:
        step.write(0, k=k, v=v)
        digest = store.digest()
        for call in (
            lambda: store.step(tokens((2, 6, 1))).__enter__(),
            lambda: store.reserve(9, 1),
            lambda: store.release(2),
            lambda: store.truncate(2, 0),
            lambda: store.import_rows(2, k[None], v[None]),
        ):
            with pytest.raises(Refusal) as caught:
                call()
            assert caught.value.rule == "5.5"
            assert store.digest() == digest
        step.attend(0, q=q)
    assert store.written(1) == 6


def test_a_step_is_useless_after_its_block() -> None:
    store = make_store()
    store.reserve(1, 4)
    q, k, v = batch_rows(BATCH)
    with store.step(BATCH) as step:
        step.write(0, k=k, v=v)
    for call in (
        lambda: step.write(0, k=k, v=v),
        lambda: step.attend(0, q=q),
        lambda: step.stored(0, *store.region(0)),
        lambda: step.region(0),
    ):
        with pytest.raises(Refusal) as caught:
            call()
        assert caught.value.rule == "5.5"
        assert "over" in caught.value.message


def test_a_refused_plan_opens_no_step() -> None:
    store = scattered("f32")
    digest, generation = store.digest(), store.generation
    for rule, batch in (("5.5", tokens((1, 6, 1))), ("2.5", tokens((3, 4, 1)))):
        with pytest.raises(Refusal) as caught, store.step(batch):
            pass
        assert caught.value.rule == rule
        assert (store.digest(), store.generation) == (digest, generation)
    store.reserve(8, 1)


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
    wanted = (("attn_window", "scratch"), ("attn_map", "scratch"))
    assert make_store("q8_0").named_variants() == wanted
    assert make_store("f16").named_variants() == ()
    monkeypatch.setenv("MINFER_NO_FUSED_Q8_KV", "0")
    assert make_store("q8_0").named_variants() == ()


def test_the_flag_reaches_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KvStore, "named_variants", lambda store: (("attn_window", "rows"),))
    store = make_store()
    store.reserve(1, 4)
    q, k, v = batch_rows(BATCH)
    with store.step(BATCH) as step:
        step.write(0, k=k, v=v)
        step.attend(0, q=q)
    assert step.receipts[0].variant == "rows"
    assert step.receipts[0].reason == "asked for by name"
