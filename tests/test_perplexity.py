"""Perplexity: windows and scores against their definitions, models against transformers."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refusals import refused
from transformers_models import log_probabilities_in_transformers, write_tiny_model

from minfer import Engine
from minfer.format import KvFormat
from minfer.perplexity import Scores, Window, cut, feeding, measure, score, summarize
from minfer.perplexity import scores as scores_module

FORMATS = [fmt.value for fmt in KvFormat]
TOKENS = [int(t) for t in np.random.default_rng(7).integers(3, 289, 150)]


def load(path: Path, cache_type: str = "f32", **how: object) -> Engine:
    return Engine.load(path, cache_type=cache_type, **{"n_ctx": 64, "threads": 2, **how})


def nll(engine: Engine, windows: list[Window], kind: str = "prefill") -> np.ndarray:
    """The scores of `TOKENS`, one a scored token."""
    return np.concatenate([own.nll for (own,) in measure([engine], TOKENS, windows, kind)])


def test_windows_side_by_side_score_their_second_half() -> None:
    assert cut(11, 4) == [Window(0, 3, 4), Window(4, 7, 8)]
    assert cut(1100, 512) == [Window(0, 257, 512), Window(512, 769, 1024)]
    assert cut(6, 3) == [Window(0, 2, 3), Window(3, 5, 6)]
    assert cut(5, 2) == [Window(0, 1, 2), Window(2, 3, 4)]
    assert cut(12, 12) == [Window(0, 7, 12)]


@pytest.mark.parametrize("n_ctx", [2, 3, 8, 40])
@pytest.mark.parametrize("n_tokens", [2, 3, 9, 31, 32, 33])
def test_sliding_windows_score_every_token_but_the_first_once(n_tokens: int, n_ctx: int) -> None:
    for stride in range(1, n_ctx):
        windows = cut(n_tokens, n_ctx, stride)
        scored = [token for w in windows for token in range(w.first, w.stop)]
        assert scored == list(range(1, n_tokens))
        for w in windows:
            assert w.start % stride == 0 and w.stop - w.start <= n_ctx
            # What a token sees: all of the text, or what the stride leaves of a window.
            assert w.first - w.start >= min(w.first, n_ctx - stride)
    side_by_side = cut(n_tokens, n_ctx, n_ctx)
    assert [token for w in side_by_side for token in range(w.first, w.stop)] == [
        token for token in range(n_tokens) if token % n_ctx
    ]


@pytest.mark.parametrize(
    ("sizes", "rule", "words"),
    [
        ((100, 1, None), "10", "n_ctx 1 is below 2"),
        ((100, 2.0, None), "10", "n_ctx 2.0 is no whole number"),
        ((0, 8, None), "1", "the text has 0 tokens"),
        ((1, 8, 4), "1", "the text has 1 tokens"),
        ((7, 8, None), "1", "the text has 7 tokens and a window 8"),
        ((100, 8, 0), "10", "stride 0 is below 1"),
        ((100, 8, 9), "10", "stride 9 is above 8; n_ctx is 8"),
    ],
)
def test_texts_and_windows_that_do_not_fit_are_refused(
    sizes: tuple[Any, ...], rule: str, words: str
) -> None:
    refused(None, rule, lambda: cut(*sizes), words)


@pytest.mark.parametrize("n_vocab", [2, 289, 49152])
def test_a_uniform_model_has_the_perplexity_of_its_vocabulary(n_vocab: int) -> None:
    logits = np.full((100, n_vocab), -3.25, np.float32)
    (own,) = score([logits], [i % n_vocab for i in range(100)])
    assert (own.nll == np.log(n_vocab)).all()
    (result,) = summarize([[own]])
    assert result.perplexity == pytest.approx(n_vocab, rel=1e-14)
    assert result.perplexity_error == pytest.approx(0, abs=1e-9 * n_vocab)


def drawn(seed: int, n: int = 37, n_vocab: int = 503, spread: float = 4.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, spread, (n, n_vocab)).astype(np.float32)


def test_scores_are_those_of_the_definitions() -> None:
    reference, other = drawn(1), drawn(1) + 0.1 * drawn(2)
    came = [int(t) for t in np.random.default_rng(3).integers(0, 503, 37)]
    mine, theirs = score([reference, other], came)
    for i in range(37):
        # Sums in extended precision, straight from the definition.
        a, b = (np.exp(rows[i].astype(np.longdouble)) for rows in (reference, other))
        p, q = a / a.sum(), b / b.sum()
        assert mine.nll[i] == pytest.approx(float(-np.log(p[came[i]])), rel=1e-13)
        assert theirs.nll[i] == pytest.approx(float(-np.log(q[came[i]])), rel=1e-13)
        assert theirs.kl[i] == pytest.approx(float((p * np.log(p / q)).sum()), rel=1e-12)
        assert theirs.agrees[i] == (p.argmax() == q.argmax())
    assert 0 < np.count_nonzero(theirs.agrees) < 37
    assert (mine.kl == 0).all() and mine.agrees.all()


def test_large_logits_do_not_overflow() -> None:
    logits = np.array([[3e38, -3e38, 3e38], [1e4, 1e4 - 1, -1e4]], np.float32)
    (own,) = score([logits], [0, 1])
    assert own.nll[0] == np.log(2)
    assert own.nll[1] == pytest.approx(1 + np.log1p(np.exp(-1)), rel=1e-15)
    assert scores_module.log_softmax(logits)[1, 2] == pytest.approx(
        -2e4 - np.log1p(np.exp(-1)), rel=1e-15
    )


def test_a_row_is_scored_alike_alone_and_among_others(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, came = [drawn(1, 30, 4099), drawn(2, 30, 4099)], list(range(30))
    whole = score(rows, came)
    assert [len(own.nll) for own in score([part[:0] for part in rows], [])] == [0, 0]
    for values in (1, 3 * 4099, 7 * 4099 + 5):
        monkeypatch.setattr(scores_module, "BLOCK_VALUES", values)
        for own, other in zip(whole, score(rows, came), strict=True):
            assert np.array_equal(own.nll, other.nll) and np.array_equal(own.kl, other.kl)
            assert np.array_equal(own.agrees, other.agrees)


def test_a_summary_is_that_of_all_tokens() -> None:
    reference, other = drawn(4), drawn(4) + 0.1 * drawn(5)
    parts = [
        score([reference[at], other[at]], [9] * len(reference[at]))
        for at in (slice(0, 5), slice(5, 6), slice(6, 37))
    ]
    first, second = summarize(parts)
    a, b = (np.concatenate([part[i].nll for part in parts]) for i in (0, 1))
    kl = np.concatenate([part[1].kl for part in parts])
    assert (first.n_scored, first.versus) == (37, None)
    assert first.nll == pytest.approx(a.mean(), rel=1e-14)
    assert first.perplexity == pytest.approx(np.exp(a.mean()), rel=1e-13)
    error = np.exp(a.mean()) * np.sqrt(((a - a.mean()) ** 2).sum() / 36 / 37)
    assert first.perplexity_error == pytest.approx(error, rel=1e-12)
    versus, d = second.versus, b - a
    assert versus is not None
    assert versus.ratio == pytest.approx(second.perplexity / first.perplexity, rel=1e-12)
    error = versus.ratio * np.sqrt(((d - d.mean()) ** 2).sum() / 36 / 37)
    assert versus.ratio_error == pytest.approx(error, rel=1e-12)
    assert (versus.kl_mean, versus.kl_max) == (pytest.approx(kl.mean(), rel=1e-13), kl.max())
    agreement = (reference.argmax(axis=1) == other.argmax(axis=1)).mean()
    assert versus.top1_agreement == agreement and 0 < agreement < 1
    rms = np.sqrt(((np.exp(-b) - np.exp(-a)) ** 2).mean())
    assert versus.prob_rms == pytest.approx(rms, rel=1e-13)


def test_one_token_has_no_standard_error_and_a_hopeless_model_no_bound() -> None:
    (result,) = summarize([score([drawn(1, 1)], [0])])
    assert result.perplexity_error is None and result.n_scored == 1
    lost = Scores(np.array([800.0]), np.zeros(1), np.ones(1, np.bool_), np.zeros(1))
    assert summarize([[lost]])[0].perplexity == math.inf


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_a_format_compared_with_itself_differs_in_nothing(
    tiny_gguf: Path, fmt: str, kind: str
) -> None:
    engine = load(tiny_gguf, fmt)
    scores = list(measure([engine, engine.with_cache(fmt)], TOKENS, cut(150, 64), kind))
    first, second = summarize(scores)
    v = second.versus
    assert v is not None
    assert (v.ratio, v.ratio_error, v.kl_mean, v.kl_max) == (1.0, 0.0, 0.0, 0.0)
    assert (v.top1_agreement, v.prob_rms, second.nll) == (1.0, 0.0, first.nll)


@pytest.mark.parametrize("add_bos", [False, True])
@pytest.mark.parametrize("stride", [None, 24, 64])
def test_a_tiny_llama_scores_as_transformers(
    tmp_path: Path, add_bos: bool, stride: int | None
) -> None:
    path, windows = tmp_path / "m.gguf", cut(150, 64, stride)
    model = write_tiny_model(path, metadata={"tokenizer.ggml.add_bos_token": add_bos}, seed=3)
    expected = []
    for w in windows:
        fed = [1, *TOKENS[w.start + 1 : w.stop]] if add_bos else TOKENS[w.start : w.stop]
        log_p = log_probabilities_in_transformers(model, fed)
        expected += [-log_p[t - w.start - 1, TOKENS[t]] for t in range(w.first, w.stop)]
    ours = nll(load(path), windows)
    assert len(ours) == {None: 62, 24: 149, 64: 147}[stride]
    assert (np.abs(ours - expected) <= 1e-5 * np.maximum(1, expected)).all()


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_pieces_threads_and_placement_change_no_bit(
    tiny_gguf: Path, fmt: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows = cut(150, 60, 40)
    expected = nll(load(tiny_gguf, fmt), windows, kind)
    assert np.array_equal(nll(load(tiny_gguf, fmt, threads=1), windows, kind), expected)
    moved = load(tiny_gguf, fmt, n_ctx=70)
    moved.store.reserve(0, 9)
    assert np.array_equal(nll(moved, windows, kind), expected)
    for name, value in (
        ("LOGITS_BYTES", 7 * 4 * 289),
        ("PREFILL_CHUNK", 5),
        ("DECODE_ROWS_MAX", 1),
        ("LOGITS_BYTES", 0),
    ):
        monkeypatch.setattr(feeding, name, value)
        assert np.array_equal(nll(load(tiny_gguf, fmt), windows, kind), expected)


@pytest.mark.parametrize("limit", [1, 3, 8, 1000])
@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_pieces_are_bounded_and_score_every_token(limit: int, kind: str) -> None:
    for window in (Window(100, 357, 612), Window(0, 1, 2), Window(50, 51, 3000)):
        pieces = list(feeding._pieces(window, limit, kind))
        assert [p.begin for p in pieces] == [0, *(p.end for p in pieces[:-1])]
        assert pieces[-1].end == window.stop - window.start - 1
        scored = [window.start + at + 1 for p in pieces for at in range(p.end - p.n_out, p.end)]
        assert scored == list(range(window.first, window.stop))
        assert all(p.n_out <= limit for p in pieces)
        assert all(p.end - p.begin <= {"prefill": 512, "decode": 8}[kind] for p in pieces)
    if (limit, kind) == (1000, "prefill"):
        assert list(feeding._pieces(Window(100, 357, 612), limit, kind)) == [(0, 511, 255)]


@pytest.mark.parametrize("fmt", FORMATS)
def test_decode_is_measured_by_its_own_kernels(tiny_gguf: Path, fmt: str) -> None:
    windows, read, variants = cut(150, 64), {}, {}
    for kind in ("prefill", "decode"):
        engine = load(tiny_gguf, fmt)
        read[kind] = nll(engine, windows, kind)
        variants[kind] = {
            r.variant for r in engine.receipts() if r.op in ("attn_window", "matmul", "matvec")
        }
    assert variants == {"prefill": {"flash", "tiles"}, "decode": {"split", "lanes"}}
    assert not np.array_equal(read["prefill"], read["decode"])
    # Other kernels round in another order; narrow formats round queries and probabilities too.
    bound = {"f32": 1e-4, "f16": 2e-3, "q8_0": 1e-2}[fmt]
    assert np.abs(read["prefill"] - read["decode"]).max() < bound


def test_logits_that_are_not_finite_are_refused_by_position(tiny_gguf: Path) -> None:
    # The sanitizer would name the cell instead.
    engine, windows, which = load(tiny_gguf, sanitize=False), cut(150, 64), 64 + 40
    embeddings = engine._loaded.weights["token_embd.weight"]
    engine._loaded.weights["output.weight"] = embeddings
    broken = np.array(embeddings.array)
    broken[TOKENS[which]] = np.nan
    engine._loaded.weights["token_embd.weight"] = dataclasses.replace(embeddings, array=broken)
    message = "after token 104 of the text (position 40 of its window) are not finite"
    error = refused(None, "4.2", lambda: nll(engine, windows, "decode"), message)
    assert error.facts == {"token": which, "position": 40, "fmt": "f32"}
    engine = load(tiny_gguf)
    engine._loaded.weights["output_norm.weight"] = np.full(64, np.inf, np.float32)
    refused(None, "4.2", lambda: nll(engine, windows), "after token 32 of the text")
    assert not engine.store.has(feeding.SEQ)


def test_cells_are_given_back(tiny_gguf: Path) -> None:
    engine = load(tiny_gguf)
    reading = measure([engine], TOKENS, cut(150, 64))
    next(reading)
    assert engine.store.stats().free_cells == 0
    reading.close()
    assert engine.store.stats().free_cells == 64
    nll(engine, cut(150, 64))
    assert engine.store.stats().free_cells == 64
    small = engine.with_cache("f32", 32)
    refused(small.store, "5.2", lambda: list(measure([engine, small], TOKENS, cut(150, 64))), "64")
    assert engine.store.stats().free_cells == 64


def test_what_cannot_be_measured_is_refused_at_once(tiny_gguf: Path) -> None:
    engine, windows = load(tiny_gguf), cut(150, 64)
    other = load(tiny_gguf)
    other.hp = dataclasses.replace(other.hp, n_vocab=300)
    for rule, words, call in (
        ("7.5", "token 289 is above 288", lambda: measure([engine], [*TOKENS, 289], windows)),
        ("1", "kind 'draft'", lambda: measure([engine], TOKENS, windows, "draft")),
        ("10", "vocabularies of [289, 300]", lambda: measure([engine, other], TOKENS, windows)),
        ("10", "vocabularies of []", lambda: measure([], TOKENS, windows)),
        ("10", "a text of 127 tokens", lambda: measure([engine], TOKENS[:127], windows)),
        ("10", "first=64", lambda: measure([engine], TOKENS, [Window(64, 64, 65)])),
    ):
        refused(engine.store, rule, call, words)
