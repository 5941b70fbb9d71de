"""Whole models: against transformers, and against themselves in another shape of batch."""

from __future__ import annotations

from pathlib import Path

import numba
import numpy as np
import pytest
from refusals import refused
from tiny_models import write_tiny_gguf
from transformers_models import logits_in_transformers, write_tiny_model

from minfer import Batch, Engine, loading, memory
from minfer.errors import Refusal
from minfer.format import KvFormat
from minfer.graph.run import output_rows
from minfer.registry import ATTENTION
from minfer.timing import Timing

FORMATS = [fmt.value for fmt in KvFormat]
PROMPT = [5, 90, 41, 7, 201, 33, 33, 12, 150, 6, 77]


def load(path: Path, cache_type: str = "f32", **how: object) -> Engine:
    return Engine.load(path, cache_type=cache_type, **{"n_ctx": 96, "threads": 2, **how})


def run(engine: Engine, prompt: list[int], steps: int, seq: int = 0) -> np.ndarray:
    """Logits after the prompt and after each of `steps` greedy tokens, [steps + 1, n_vocab]."""
    if not engine.store.has(seq):
        engine.store.reserve(seq, 48)
    rows = [engine.prefill(prompt, seq)]
    for _ in range(steps):
        rows.append(engine.decode(int(np.argmax(rows[-1])), seq))
    return np.stack(rows)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "sizes",
    [{"head_dim": 16}, {"head_dim": 32}, {"head_dim": 24, "n_embd": 96, "n_head": 6}],
    ids=["d16", "d32", "d24-gqa3"],
)
def test_a_tiny_llama_gives_the_logits_of_transformers(
    tmp_path: Path, sizes: dict[str, int], tied: bool
) -> None:
    model = write_tiny_model(tmp_path / "m.gguf", tied=tied, seed=3, **sizes)
    engine = load(tmp_path / "m.gguf")
    ours = run(engine, PROMPT, 6)
    fed = PROMPT + [int(t) for t in ours[:-1].argmax(axis=1)]
    theirs = logits_in_transformers(model, fed)[len(PROMPT) - 1 :]
    error = np.abs(ours - theirs).max() / np.abs(theirs).max()
    assert error < 1e-4  # f32 sums in another order, and float64 rope tables here
    assert (ours.argmax(axis=1) == theirs.argmax(axis=1)).all()


def test_narrow_formats_stay_close_to_f32(tiny_gguf: Path) -> None:
    full = run(load(tiny_gguf), PROMPT, 0)
    # Two layers round K and V by 2**-11, or K, V and the query by half a step of 127.
    for fmt, bound in (("f16", 4 * 2**-11), ("q8_0", 6 / 254)):
        other = run(load(tiny_gguf, fmt), PROMPT, 0)
        error = np.abs(other - full).max() / np.abs(full).max()
        assert 0 < error < bound


@pytest.mark.parametrize("fmt", FORMATS)
def test_two_sequences_in_a_batch_equal_two_single_runs(tiny_gguf: Path, fmt: str) -> None:
    other = PROMPT[::-1][:7]
    alone = [run(load(tiny_gguf, fmt), prompt, 3) for prompt in (PROMPT, other)]
    both = load(tiny_gguf, fmt)
    both.store.reserve(1, 40)
    both.store.reserve(2, 40)
    groups = [(2, other), (1, PROMPT)]
    logits = both.forward(
        Batch(
            [seq for seq, tokens in groups for _ in tokens],
            [i for _, tokens in groups for i in range(len(tokens))],
            "prefill",
            [t for _, tokens in groups for t in tokens],
        )
    )
    rows = {2: [logits[0]], 1: [logits[1]]}
    for _ in range(3):
        tokens = [int(np.argmax(rows[seq][-1])) for seq in (1, 2)]
        batch = Batch([1, 2], [both.store.written(1), both.store.written(2)], "decode", tokens)
        for seq, row in zip((1, 2), both.forward(batch), strict=True):
            rows[seq].append(row)
    assert np.array_equal(np.stack(rows[1]), alone[0])
    assert np.array_equal(np.stack(rows[2]), alone[1])


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunks_of_a_prompt_equal_one_chunk(tiny_gguf: Path, fmt: str, chunk: int) -> None:
    prompt = (PROMPT * 7)[:70]
    whole, cut = load(tiny_gguf, fmt), load(tiny_gguf, fmt)
    for engine in (whole, cut):
        engine.store.reserve(0, 96)
    assert np.array_equal(whole.prefill(prompt, 0), cut.prefill(prompt, 0, chunk=chunk))
    for layer in range(whole.hp.n_layer):
        for which in "kv":
            assert np.array_equal(
                whole.store.export_cells(0, layer, which), cut.store.export_cells(0, layer, which)
            )
    assert np.array_equal(whole.decode(9, 0), cut.decode(9, 0))


@pytest.mark.parametrize("fmt", FORMATS)
def test_threads_and_placement_change_no_bit(tiny_gguf: Path, fmt: str) -> None:
    expected = run(load(tiny_gguf, fmt, threads=1), PROMPT, 3)
    for threads in (2, 3):
        assert np.array_equal(run(load(tiny_gguf, fmt, threads=threads), PROMPT, 3), expected)
    moved = load(tiny_gguf, fmt)
    moved.store.reserve(8, 13)
    assert np.array_equal(run(moved, PROMPT, 3, seq=1), expected)
    assert moved.store.spans(1)[0].cell == 13


@pytest.mark.parametrize("fmt", FORMATS)
def test_draft_rows_equal_one_token_at_a_time(tiny_gguf: Path, fmt: str) -> None:
    single, together = load(tiny_gguf, fmt), load(tiny_gguf, fmt)
    expected = run(single, PROMPT, 5)
    drafted = [int(t) for t in expected[:-1].argmax(axis=1)]
    run(together, PROMPT, 0)
    at = range(len(PROMPT), len(PROMPT) + 5)
    logits = together.forward(Batch([0] * 5, list(at), "decode", drafted))
    assert np.array_equal(logits, expected[1:])


@pytest.mark.parametrize("weights", ["f16", "q8_0"])
def test_formats_of_weights_change_no_rule(tiny_gguf: Path, weights: str) -> None:
    """Chunks, threads and batch mates change no bit; the answers are near those of f32 weights."""
    prompt, other = (PROMPT * 3)[:30], PROMPT[::-1][:7]
    expected = run(load(tiny_gguf, "q8_0", weights=weights, threads=1), prompt, 3)
    full = run(load(tiny_gguf, "q8_0"), prompt, 0)
    error = np.abs(expected[0] - full[0]).max() / np.abs(full).max()
    assert 0 < error < {"f16": 2**-9, "q8_0": 8 / 254}[weights]
    for chunk, threads in ((1, 2), (7, 3)):
        engine = load(tiny_gguf, "q8_0", weights=weights, threads=threads)
        engine.store.reserve(1, 9)
        engine.store.reserve(2, 48)
        rows = [engine.prefill(prompt, 2, chunk=chunk)]
        engine.prefill(other, 1)
        for step in range(3):
            tokens = [int(np.argmax(rows[-1])), 9]
            at = [len(prompt) + step, 7 + step]
            mates = slice(None, None if step < 2 else 1)  # sequence 1 ends first
            batch = Batch([2, 1][mates], at[mates], "decode", tokens[mates])
            rows.append(engine.forward(batch)[0])
        assert np.array_equal(np.stack(rows), expected)
        assert {r.fmt for r in engine.receipts() if r.op == "matvec"} == {weights}


def test_logits_rows_follow_the_contract() -> None:
    one = Batch([4] * 5, list(range(5)), "prefill", [0] * 5)
    assert output_rows(one, 1) == [4]
    assert output_rows(one, 3) == [2, 3, 4]
    two = Batch([4, 4, 9], [0, 1, 0], "prefill", [0] * 3)
    assert output_rows(two, 1) == [1, 2]
    decode = Batch([4, 9], [3, 5], "decode", [0] * 2)
    assert output_rows(decode, 1) == [0, 1]
    for batch, n_out in ((one, 0), (one, 6), (one, "1"), (two, 2), (decode, 1.0)):
        refused(None, "7.3", lambda batch=batch, n_out=n_out: output_rows(batch, n_out))


def test_generate_stops_at_its_limit_and_times_itself(tiny_gguf: Path) -> None:
    engine, timing = load(tiny_gguf), Timing()
    made = list(engine.generate(PROMPT, 4, timing=timing))
    assert made == [int(t) for t in run(load(tiny_gguf), PROMPT, 3).argmax(axis=1)]
    assert timing.tokens == {"prefill": 11, "decode": 3}
    assert timing.rate("prefill") > 0


def test_generate_fills_the_cache_to_the_last_cell(tiny_gguf: Path) -> None:
    engine = load(tiny_gguf, n_ctx=14)
    made = list(engine.generate(PROMPT))
    assert len(made) == 4 and engine.store.written(0) == 14


def test_what_does_not_fit_is_refused_before_anything_runs(tiny_gguf: Path) -> None:
    engine = load(tiny_gguf, n_ctx=14)
    for prompt, n, message in (
        ([], 4, "the prompt has no tokens"),
        (PROMPT * 2, 1, "22 prompt tokens and 1 to generate need 22 cells and n_ctx is 14"),
        (PROMPT, 5, "need 15 cells and n_ctx is 14"),
        (PROMPT, 0, "max_tokens 0 is below 1"),
        (PROMPT, "4", "max_tokens '4' is no whole number"),
        ([5, 289], 1, "token 289 is above 288"),
    ):
        with pytest.raises(Refusal, match=message):
            engine.generate(prompt, n)
        assert not engine.store.has(0)
    assert len(list(engine.generate(PROMPT, 4))) == 4


def test_a_sequence_with_few_cells_is_named_by_its_own_limit(tiny_gguf: Path) -> None:
    engine = load(tiny_gguf)
    engine.store.reserve(3, 12)
    for n, message in ((3, "11 prompt tokens and 3 to generate need 13 cells"), (90, "need 100")):
        error = refused(
            engine.store,
            "2.5",
            lambda n=n: engine.generate(PROMPT, n, seq=3),
            message,
            "sequence 3 holds 12 of 96",
        )
        assert (error.facts["cap"], error.facts["n_ctx"]) == (12, 96)
    assert len(list(engine.generate(PROMPT, seq=3))) == 2


def test_a_bad_prompt_is_refused_before_its_first_chunk(tiny_gguf: Path) -> None:
    engine = load(tiny_gguf)
    engine.store.reserve(0, 12)
    for rule, call in (
        ("10", lambda: engine.prefill(PROMPT, chunk=0)),
        ("10", lambda: engine.prefill(PROMPT, chunk=2.0)),
        ("1", lambda: engine.prefill([])),
        ("7.5", lambda: engine.prefill([*PROMPT, 289], chunk=4)),
        ("7.5", lambda: engine.prefill([*PROMPT, 1.0], chunk=4)),
        ("2.5", lambda: engine.prefill([*PROMPT, 5, 5], chunk=4)),
        ("2.5", lambda: engine.prefill(PROMPT, seq=1)),
    ):
        refused(engine.store, rule, call)
    assert engine.store.written(0) == 0


def test_an_engine_takes_the_threads_and_the_name_it_was_given(tiny_gguf: Path) -> None:
    for threads, workers in ((None, numba.config.NUMBA_NUM_THREADS), (1, 1), (5, 5)):
        engine = load(tiny_gguf, threads=threads)
        list(engine.generate(PROMPT, 2))
        assert {r.config["threads"] for r in engine.receipts() if r.config} == {workers}
    assert {graph.params.revision for graph in engine._graphs} == {"tiny.gguf"}


def test_logits_that_are_not_finite_stop_generation(tiny_gguf: Path) -> None:
    engine = load(tiny_gguf)
    engine._loaded.weights["output_norm.weight"] = np.full(64, np.nan, np.float32)
    with pytest.raises(Refusal, match="position 10") as refused:
        list(engine.generate(PROMPT, 2))
    assert refused.value.rule == "4.2"


def test_an_interrupted_warm_up_gives_its_cells_back(
    tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(tiny_gguf)

    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "decode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.warm_up()
    assert engine.store.stats().free_cells == engine.store.n_ctx


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"n_ctx": 0}, "n_ctx 0 is below 1"),
        ({"n_ctx": 8.0}, "n_ctx 8.0 is no whole number"),
        ({"threads": 0}, "threads 0 is below 1"),
        ({"threads": 1025}, "threads 1025 is above 1024"),
        ({"threads": "2"}, "threads '2' is no whole number"),
        ({"cache_type": "q8"}, "cache type 'q8' is none of"),
        ({"weights": "q8"}, "weights 'q8' is none of"),
        ({"device": "tpu"}, "device 'tpu' is none of"),
        ({"device": "metal"}, "device metal needs a Mac"),
    ],
)
def test_load_refuses_bad_arguments(tiny_gguf: Path, how: dict[str, object], message: str) -> None:
    with pytest.raises(Refusal, match=message):
        Engine.load(tiny_gguf, **how)


def test_the_environment_sets_the_format_and_an_argument_wins(
    tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINFER_CACHE_TYPE", "q8_0")
    assert Engine.load(tiny_gguf, n_ctx=8).store.fmt is KvFormat.Q8_0
    assert load(tiny_gguf, "f16").store.fmt is KvFormat.F16
    monkeypatch.setenv("MINFER_CACHE_TYPE", "q8")
    with pytest.raises(Refusal, match="cache type 'q8'"):
        Engine.load(tiny_gguf, n_ctx=8)


def test_two_engines_with_two_formats_live_in_one_process(tiny_gguf: Path) -> None:
    alone = {fmt: run(load(tiny_gguf, fmt), PROMPT, 3) for fmt in ("f32", "q8_0")}
    first, second = load(tiny_gguf, "f32"), load(tiny_gguf, "q8_0")
    a, b = [run(first, PROMPT, 0)[0]], [run(second, PROMPT, 0)[0]]
    for _ in range(3):
        a.append(first.decode(int(np.argmax(a[-1])), 0))
        b.append(second.decode(int(np.argmax(b[-1])), 0))
    assert np.array_equal(np.stack(a), alone["f32"])
    assert np.array_equal(np.stack(b), alone["q8_0"])
    assert not np.array_equal(a[0], b[0])


def test_q8_0_needs_whole_blocks_in_a_head(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "m.gguf", head_dim=16)
    with pytest.raises(Refusal, match="head_dim is 16 and n_kv_embd 32") as refused:
        load(tmp_path / "m.gguf", "q8_0")
    assert refused.value.rule == "3.3"


def test_a_load_that_would_not_fit_is_refused_before_it_starts(
    tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda: 100 << 20)
    monkeypatch.setattr(loading, "load_weights", None)
    with pytest.raises(Refusal, match=r"needs .* \(weights .*, f32 KV cache .*\), 100.0 MiB free"):
        load(tiny_gguf, n_ctx=1 << 20)


def attention_of(engine: Engine) -> set[tuple[str, str]]:
    """(kind, variant) of the attention nodes that ran."""
    return {(r.shape.kind, r.variant) for r in engine.receipts() if r.op in ATTENTION}


def test_a_flag_reads_a_q8_0_cache_through_scratch(
    tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {fmt: load(tiny_gguf, fmt) for fmt in FORMATS}
    plain = {fmt: run(engine, PROMPT, 2) for fmt, engine in before.items()}
    monkeypatch.setenv("MINFER_NO_FUSED_Q8_KV", "1")
    after = {fmt: load(tiny_gguf, fmt) for fmt in FORMATS}
    flagged = {fmt: run(engine, PROMPT, 2) for fmt, engine in after.items()}
    for fmt in ("f32", "f16"):
        assert np.array_equal(flagged[fmt], plain[fmt])
        assert attention_of(after[fmt]) == {("prefill", "flash"), ("decode", "split")}
    assert attention_of(after["q8_0"]) == {("prefill", "scratch"), ("decode", "scratch")}
    # The query is no longer rounded, the cache still is.
    error = np.abs(flagged["q8_0"][0] - plain["q8_0"][0]).max() / np.abs(plain["f32"][0]).max()
    assert 0 < error < 6 / 254
    cut = load(tiny_gguf, "q8_0", threads=1)
    cut.store.reserve(0, 48)
    assert np.array_equal(cut.prefill(PROMPT, 0, chunk=3), flagged["q8_0"][0])


def test_a_conversation_is_rendered_and_typed_control_tokens_stay_text(tiny_gguf: Path) -> None:
    engine = load(tiny_gguf)
    tokens = engine.encode_chat([{"role": "user", "content": "hello"}])
    text = engine.tokenizer.decode(tokens, special=True)
    assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert tokens[0] == 1
    typed = engine.encode_chat([{"role": "user", "content": "b<|im_end|>"}])
    assert [i for i in typed if i < 3] == [1, 2, 1]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "user"}, "message 0 has no text under 'content'"),
        ({"content": "a"}, "message 0 has no text under 'role'"),
        ({"role": "user", "content": ["a"]}, "no text under 'content'"),
        ("hello", "no text under 'role'"),
        ({"role": "<|im_end|>", "content": "a"}, "no plain name"),
    ],
)
def test_a_message_without_its_texts_is_refused(
    tiny_gguf: Path, message: object, words: str
) -> None:
    with pytest.raises(Refusal, match=words):
        load(tiny_gguf).encode_chat([message])


def test_a_model_without_a_template_refuses_a_conversation(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "m.gguf", metadata={"tokenizer.chat_template": None})
    with pytest.raises(Refusal, match=r"m\.gguf has no chat template"):
        load(tmp_path / "m.gguf").encode_chat([{"role": "user", "content": "a"}])


def test_a_warm_up_that_is_interrupted_gives_its_cells_back(
    tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(tiny_gguf)
    free = engine.store.stats().free_cells

    def stop(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "decode", stop)
    with pytest.raises(KeyboardInterrupt):
        engine.warm_up()
    assert engine.store.stats().free_cells == free
