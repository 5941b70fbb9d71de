"""SmolLM2-135M: text, agreement with transformers, and contract 6 on a real model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from minfer import Batch, Engine
from minfer.format import KvFormat

pytestmark = pytest.mark.model

FORMATS = [fmt.value for fmt in KvFormat]
TEXT = (
    "The old lighthouse keeper climbed the stairs every evening. He lit the lamp, wrote a line in "
    "his book, and watched the ships. One night in 1882 no ship came, and he wrote: 'Quiet sea.'"
)


@pytest.fixture(scope="module")
def engines(smollm2: Path) -> dict[str, Engine]:
    """One engine a cache format over the same f32 weights."""
    return with_every_cache(smollm2, "f32")


def with_every_cache(path: Path, weights: str) -> dict[str, Engine]:
    first = Engine.load(path, cache_type="f32", n_ctx=512, weights=weights)
    return {"f32": first, **{fmt: first.with_cache(fmt) for fmt in ("f16", "q8_0")}}


@pytest.fixture
def engine(request: pytest.FixtureRequest, engines: dict[str, Engine]) -> Engine:
    """An engine with an empty store."""
    engine = engines[request.param]
    for seq in range(4):
        if engine.store.has(seq):
            engine.store.release(seq)
    return engine


@pytest.mark.parametrize("engine", FORMATS, indirect=True)
def test_the_capital_of_france_is_paris(engine: Engine) -> None:
    made = list(engine.generate(engine.tokenizer.encode("The capital of France is"), 8))
    assert engine.tokenizer.decode(made).startswith(" Paris.")


@pytest.mark.parametrize("weights", ["f16", "q8_0"])
def test_every_format_of_weights_and_cache_knows_the_capital(smollm2: Path, weights: str) -> None:
    for engine in with_every_cache(smollm2, weights).values():
        made = list(engine.generate(engine.tokenizer.encode("The capital of France is"), 2))
        assert engine.tokenizer.decode(made) == " Paris."
        products = [r for r in engine.receipts() if r.op in ("matvec", "matmul")]
        assert {r.fmt for r in products} == {weights}


def test_q8_0_takes_3_76_times_less_than_f32(engines: dict[str, Engine]) -> None:
    sizes = {fmt: engine.cache_bytes() for fmt, engine in engines.items()}
    assert round(sizes["f32"] / sizes["q8_0"], 2) == 3.76
    assert sizes["f32"] / sizes["f16"] == 2.0
    assert sizes["q8_0"] == engines["f32"].cache_bytes(KvFormat.Q8_0) == 2 * 30 * 512 * 51 * 4


@pytest.mark.parametrize("engine", FORMATS, indirect=True)
def test_a_prompt_in_chunks_equals_one_chunk(engine: Engine) -> None:
    tokens = engine.tokenizer.encode(TEXT)
    for seq in range(4):
        engine.store.reserve(seq, 64)
    whole = engine.prefill(tokens, 0)
    for seq, chunk in ((1, 7), (2, 1), (3, 64)):
        assert np.array_equal(engine.prefill(tokens, seq, chunk=chunk), whole)
        for layer in (0, 29):
            for which in "kv":
                assert np.array_equal(
                    engine.store.export_cells(seq, layer, which),
                    engine.store.export_cells(0, layer, which),
                )


@pytest.mark.parametrize("engine", FORMATS, indirect=True)
def test_two_sequences_in_a_batch_equal_two_single_runs(engine: Engine) -> None:
    prompts = [engine.tokenizer.encode(TEXT[:90]), engine.tokenizer.encode("Once upon a time")]
    alone = []
    for seq, prompt in enumerate(prompts):
        engine.store.reserve(seq, 64)
        rows = [engine.prefill(prompt, seq)]
        for _ in range(3):
            rows.append(engine.decode(int(np.argmax(rows[-1])), seq))
        alone.append(np.stack(rows))
    together: list[list[np.ndarray]] = [[], []]
    seqs = [seq for seq in (2, 3) for _ in prompts[seq - 2]]
    at = [i for prompt in prompts for i in range(len(prompt))]
    for seq in (2, 3):
        engine.store.reserve(seq, 64)
    logits = engine.forward(Batch(seqs, at, "prefill", [t for p in prompts for t in p]))
    for row, rows in zip(logits, together, strict=True):
        rows.append(row)
    for step in range(3):
        tokens = [int(np.argmax(rows[-1])) for rows in together]
        positions = [len(prompt) + step for prompt in prompts]
        for row, rows in zip(
            engine.forward(Batch([2, 3], positions, "decode", tokens)), together, strict=True
        ):
            rows.append(row)
    for ours, expected in zip(together, alone, strict=True):
        assert np.array_equal(np.stack(ours), expected)


@pytest.mark.parametrize("engine", FORMATS, indirect=True)
def test_the_number_of_threads_changes_no_bit(engine: Engine, smollm2: Path) -> None:
    tokens = engine.tokenizer.encode(TEXT)
    engine.store.reserve(0, 64)
    expected = engine.prefill(tokens, 0)
    decoded = engine.decode(5, 0)
    alone = Engine.load(smollm2, cache_type=engine.store.fmt.value, n_ctx=64, threads=1)
    alone._loaded.weights.update(engine._loaded.weights)
    alone.store.reserve(0, 64)
    assert np.array_equal(alone.prefill(tokens, 0), expected)
    assert np.array_equal(alone.decode(5, 0), decoded)
