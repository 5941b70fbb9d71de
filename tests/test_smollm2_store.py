"""What a store does to its rows is invisible to SmolLM2: contract 5 and 6.1 on a real model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from minfer import Batch, Engine
from minfer.format import KvFormat

pytestmark = pytest.mark.model

FORMATS = [fmt.value for fmt in KvFormat]
PROMPT = (
    "The old lighthouse keeper climbed the stairs every evening. He lit the lamp, wrote a line in "
    "his book, and watched the ships."
)
ENDINGS = (" One night no ship came", " His cat, however,", " Then the war began, and", " Years")


@pytest.fixture(scope="module")
def engines(smollm2: Path) -> dict[str, Engine]:
    """One engine a cache format over the same weights."""
    first = Engine.load(smollm2, cache_type="f32", n_ctx=256)
    return {"f32": first, **{fmt: first.with_cache(fmt) for fmt in ("f16", "q8_0")}}


@pytest.fixture(params=FORMATS)
def engine(request: pytest.FixtureRequest, engines: dict[str, Engine]) -> Engine:
    """An engine with an empty store."""
    engine = engines[request.param]
    for seq in engine.store.sequences():
        engine.store.release(seq)
    return engine


def alone(engine: Engine, text: str, tokens: list[int]) -> list[np.ndarray]:
    """Logits after a prompt and after each of `tokens`, of a sequence with cells of its own."""
    seq = 99
    engine.store.reserve(seq, 64)
    rows = [engine.prefill(engine.encode(text), seq)]
    rows += [engine.decode(token, seq) for token in tokens]
    engine.store.release(seq)
    return rows


def assert_same_cells(engine: Engine, seq: int, other: int, rows: int) -> None:
    for layer in range(engine.hp.n_layer):
        for which in "kv":
            ours, theirs = (engine.store.export_cells(s, layer, which) for s in (seq, other))
            np.testing.assert_array_equal(ours[:rows], theirs[:rows])


def test_a_shared_prefix_equals_one_recomputed(engine: Engine) -> None:
    prompt, ending = engine.encode(PROMPT), engine.tokenizer.encode(ENDINGS[0])
    store = engine.store
    for seq in (1, 2, 3):
        store.reserve(seq, 64)
    engine.prefill(prompt, 1)
    store.share_prefix(1, 2, len(prompt))
    engine.prefill(prompt, 3)
    shared, own = (engine.prefill(ending, seq) for seq in (2, 3))
    np.testing.assert_array_equal(shared, own)
    for token in (5, 17):
        shared, own = (engine.decode(token, seq) for seq in (2, 3))
        np.testing.assert_array_equal(shared, own)
    assert_same_cells(engine, 2, 3, len(prompt) + len(ending) + 2)
    assert store.stats().shared == len(prompt)


def test_forks_in_one_batch_equal_each_alone(engine: Engine) -> None:
    prompt, store = engine.encode(PROMPT), engine.store
    store.reserve(0, 48)
    engine.prefill(prompt, 0)
    endings = [engine.tokenizer.encode(text) for text in ENDINGS]
    for seq, ending in enumerate(endings, 1):
        store.reserve(seq, 12)
        store.share_prefix(0, seq, len(prompt))
        engine.prefill(ending, seq)
    tokens, logits = [7, 8, 9, 10], []
    for _ in range(3):
        positions = [store.written(seq) for seq in (1, 2, 3, 4)]
        logits.append(engine.forward(Batch([1, 2, 3, 4], positions, "decode", tokens)))
        tokens = [int(np.argmax(row)) for row in logits[-1]]
    for row, text in enumerate(ENDINGS):
        fed = [7 + row] + [int(np.argmax(some[row])) for some in logits[:-1]]
        expected = alone(engine, PROMPT + text, fed)[1:]
        np.testing.assert_array_equal(np.stack([some[row] for some in logits]), np.stack(expected))


def test_copy_on_write_keeps_both_histories(engine: Engine) -> None:
    """The sharer, then the donor, go another way from the middle of what they share."""
    prompt, store = engine.encode(PROMPT), engine.store
    store.reserve(1, 48)
    store.reserve(2, 40)
    engine.prefill(prompt, 1)
    store.share_prefix(1, 2, len(prompt))
    for seq, cut, text in ((2, 9, ENDINGS[1]), (1, 5, ENDINGS[2])):
        ending = engine.tokenizer.encode(text)
        store.truncate(seq, cut)
        logits = engine.prefill(ending, seq)
        store.reserve(9, 64)
        engine.prefill(prompt[:cut], 9)
        np.testing.assert_array_equal(engine.prefill(ending, 9), logits)
        assert_same_cells(engine, seq, 9, cut + len(ending))
        store.release(9)
    assert store.stats().copy_on_writes == 1, "the donor alone: the sharer was truncated first"


def test_compaction_between_steps_leaves_the_next_logits(engine: Engine) -> None:
    store, prompt = engine.store, engine.encode(PROMPT)
    expected = alone(engine, PROMPT, [11, 12, 13])
    for seq, cap in ((5, 30), (6, 7), (1, 60)):
        store.reserve(seq, cap)
    store.reserve(2, 10)
    logits = [engine.prefill(prompt, 1)]
    store.share_prefix(1, 2, len(prompt))
    branch = [engine.decode(21, 2)]
    for token, gone in ((11, 5), (12, 6), (13, None)):
        if gone is not None:
            store.release(gone)
        moves = store.defrag()
        assert bool(moves) == (gone is not None)
        logits.append(engine.decode(token, 1))
        branch.append(engine.decode(token + 20, 2))
    np.testing.assert_array_equal(np.stack(logits), np.stack(expected))
    np.testing.assert_array_equal(
        np.stack(branch), np.stack(alone(engine, PROMPT, [21, 31, 32, 33])[1:])
    )
    assert store.spans(1)[0].cell == 0


def test_truncate_equals_never_having_written(engine: Engine) -> None:
    prompt, store = engine.encode(PROMPT), engine.store
    store.reserve(1, 64)
    engine.prefill(prompt, 1)
    engine.prefill(engine.tokenizer.encode(ENDINGS[3]), 1)
    engine.decode(3, 1)
    store.truncate(1, len(prompt))
    expected = alone(engine, PROMPT, [40, 41])[1:]
    np.testing.assert_array_equal([engine.decode(token, 1) for token in (40, 41)], expected)
