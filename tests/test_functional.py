"""Attention without a store: regions of the caller's own, any window."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from refusals import refused

import minfer
from minfer import KvFormat, Runs, Span, reference
from minfer.errors import Refusal
from minfer.format import Region
from minfer.kernels_numba import empty_region
from minfer.registry import select

N_CELLS, N_HEAD_KV, D = 40, 2, 32


def region(rows: np.ndarray, fmt: KvFormat = KvFormat.F32) -> Region:
    made = empty_region(fmt, len(rows), N_HEAD_KV, D)
    store = select("store_cells", fmt=fmt)
    cells = np.arange(len(rows), dtype=np.int32)
    return store.launch(made, rows, cells, fmt=fmt, config=store.config)


@pytest.fixture
def rows() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(7)
    q = rng.standard_normal((6, 4, D), dtype=np.float32)
    k, v = rng.standard_normal((2, N_CELLS, N_HEAD_KV, D), dtype=np.float32)
    return q, k, v


def expected(q, k, v, cells: list[list[int]], scale: float) -> np.ndarray:
    """The oracle over `cells` of each query, one by one."""
    runs = [np.array([(cell, 1) for cell in seen]) for seen in cells]
    last = np.array([len(seen) - 1 for seen in cells])
    regions = region(k), region(v)
    return reference.attention(q, *regions, last, runs, fmt=KvFormat.F32, scale=scale, width=0)


def test_a_span_that_grows(rows) -> None:
    q, k, v = rows
    spans = np.array([[9, 20 + i] for i in range(6)], np.int32)
    out = minfer.attention(q, region(k), region(v), Span(spans))
    want = expected(q, k, v, [list(range(lo, hi)) for lo, hi in spans], D**-0.5)
    assert np.abs(out - want).max() < 1e-5


def test_spans_of_unrelated_queries(rows) -> None:
    q, k, v = rows
    spans = np.array([[0, 1], [3, 30], [3, 29], [39, 40], [7, 12], [7, 13]], np.int32)
    out = minfer.attention(q, region(k), region(v), Span(spans), scale=0.5)
    want = expected(q, k, v, [list(range(lo, hi)) for lo, hi in spans], 0.5)
    assert np.abs(out - want).max() < 1e-5


def test_runs_that_grow_into_a_new_run(rows) -> None:
    q, k, v = rows
    runs = np.zeros((6, 4, 2), np.int32)
    cells = []
    for i in range(6):
        runs[i, 0] = (30, min(5 + i, 8))
        if i > 3:
            runs[i, 1] = (2, i - 3)
        cells.append([c + j for c, n in runs[i] for j in range(n)])
    out = minfer.attention(q, region(k), region(v), Runs(runs))
    assert np.abs(out - expected(q, k, v, cells, D**-0.5)).max() < 1e-5
    decode = minfer.attention(q, region(k), region(v), Runs(runs), kind="decode")
    assert np.abs(decode - expected(q, k, v, cells, D**-0.5)).max() < 1e-5


def test_causal_queries_are_the_last_ones(rows) -> None:
    q, k, v = rows
    out = minfer.attention(q, region(k), region(v), minfer.Causal(), width=10)
    cells = [list(range(34 + i - 9, 34 + i + 1)) for i in range(6)]
    assert np.abs(out - expected(q, k, v, cells, D**-0.5)).max() < 1e-5


def test_tiles_change_no_bit(rows) -> None:
    q, k, v = rows
    spans = Span(np.array([[9, 20 + i] for i in range(6)], np.int32))
    expected = minfer.attention(q, region(k), region(v), spans)
    for block_m in (1, 4):
        out = minfer.attention(q, region(k), region(v), spans, config={"block_m": block_m})
        assert np.array_equal(out, expected)


def test_quantize_and_dequantize_are_inverse_to_half_a_step(rows) -> None:
    _, k, _ = rows
    flat = k.reshape(N_CELLS, -1)
    back = minfer.dequantize(minfer.quantize(flat), flat.shape[1])
    step = np.abs(flat).reshape(N_CELLS, 2, 32).max(axis=2, keepdims=True) / 127
    error = np.abs(back - flat).reshape(N_CELLS, 2, 32)
    # Half a step, and up to 127 times what rounding the scale to f16 takes from a step.
    assert (error <= (0.5 + 127 * 2**-11) * step).all() and error.max() > 0


def test_the_codec_refuses_other_arrays(rows) -> None:
    flat = rows[1].reshape(N_CELLS, -1)
    cells = minfer.quantize(flat)
    for rule, call, words in (
        ("10", lambda: minfer.quantize(flat[0]), "rows must have 2 dimensions"),
        ("4.2", lambda: minfer.quantize(flat.astype(np.float64)), "not float64"),
        ("3.3", lambda: minfer.quantize(flat[:, :48]), "whole blocks of 32"),
        ("3.4", lambda: minfer.dequantize(cells.tolist(), 64), "are uint8 [rows, 68]"),
        ("3.4", lambda: minfer.dequantize(cells, 32), "are uint8 [rows, 36]"),
        ("3.3", lambda: minfer.dequantize(cells, 64.5), "whole blocks of 32"),
    ):
        refused(None, rule, call, words)


GROWING = np.array([[9, 20 + i] for i in range(6)], np.int32)
RUNS = np.array([[[4, 20], [0, 0], [0, 0], [0, 0]]] * 6, np.int32)
BAD_CALLS = {
    "another format": ("3.2", {"fmt": "q8_0"}, "fmt is q8_0 and the regions hold f32"),
    "unknown format": ("3.1", {"fmt": "q8"}, "cache type 'q8'"),
    "variant of another kind": ("6.6", {"variant": "split"}, "is for decode, not prefill"),
    "unknown kind": ("1", {"kind": "draft"}, "kind 'draft' is none of prefill, decode"),
    "unknown tunable": ("6.4", {"config": {"speed": 9}}, "no tunable speed"),
    "tile of text": ("6.4", {"config": {"block_m": "x"}}, "block_m 'x' of attn_window_flash"),
    "tile of no query": ("6.4", {"config": {"block_m": 0}}, "is below 1"),
    "tile past 32 bits": ("6.4", {"config": {"block_m": 2**31}}, "is above 2147483647"),
    "half a thread": ("10", {"threads": 1.5}, "threads 1.5 is no whole number"),
    "half a thread by config": ("6.4", {"config": {"threads": 1.5}}, "threads 1.5 of"),
    "cell past the end": ("2.5", {"window": Span(GROWING + 21)}, "outside cells [0, 40)"),
    "one span": ("2.2", {"window": Span(GROWING[:1])}, "fits no mode for 6 queries"),
    "five spans": ("2.2", {"window": Span(GROWING[:5])}, "fits no mode for 6 queries"),
    "runs as a span": ("2.2", {"window": Span(RUNS)}, "does not hold 48 numbers"),
    "a span as runs": ("2.2", {"window": Runs(GROWING)}, "does not hold 12 numbers"),
    "floats as a span": ("10", {"window": Span(GROWING * 1.0)}, "the window holds float64"),
    "a span that wraps": ("10", {"window": Span(GROWING + np.int64(2**32))}, "is no int32"),
    "an array as window": ("2.2", {"window": GROWING}, "window is a ndarray"),
    "one position": ("10", {"positions": np.full(1, 19)}, "positions holds int64 [1]"),
    "float positions": ("10", {"positions": np.full(6, 19.0)}, "positions holds float64"),
    "positions that wrap": ("10", {"positions": np.full(6, 2**32 + 19)}, "is no int32"),
    "half a width": ("2.4", {"width": 2.5}, "sliding width 2.5 is no whole number"),
    "scale of text": ("10", {"scale": "x"}, "scale 'x' is no finite float32"),
    "scale past float64": ("10", {"scale": 10**400}, "is no finite float32"),
    "endless scale": ("10", {"scale": float("inf")}, "scale inf is no finite float32"),
}


@pytest.mark.parametrize(("rule", "how", "words"), BAD_CALLS.values(), ids=BAD_CALLS.keys())
def test_bad_calls_are_refused(rows, rule: str, how: dict, words: str) -> None:
    q, k, v = rows
    good = {"window": Span(GROWING), "positions": np.arange(20, 26)}
    regions = region(k), region(v)
    refused(None, rule, lambda: minfer.attention(q, *regions, **{**good, **how}), words)
    minfer.attention(q, *regions, **good)


def test_bad_queries_are_refused(rows) -> None:
    q, k, v = rows
    for rule, bad, words in (
        ("10", q[..., :16], "q has shape [6, 4, 16]; wanted is [6, 4, 32]"),
        ("10", q[0], "q has shape [4, 32]"),
        ("10", q.tolist(), "q is a list"),
        ("4.2", q.astype(np.float64), "q holds float64"),
        ("2.8", q[:, :3], "q has 3 heads"),
    ):
        call = partial(minfer.attention, bad, region(k), region(v), minfer.Causal())
        refused(None, rule, call, words)


def test_kernels_without_spans_take_causal_windows_only(rows, causal_only: None) -> None:
    q, k, v = rows
    regions = region(k), region(v)
    minfer.attention(q, *regions, minfer.Causal())
    for window in (Span(GROWING), Runs(RUNS)):
        call = partial(minfer.attention, q, *regions, window)
        refused(None, "2.6", call, f"read causal windows only and this one is {window.mode.value}")


def test_what_is_no_region_is_refused(rows) -> None:
    q, k, v = rows
    span = Span(np.array([[0, 20]] * 6, np.int32))
    with pytest.raises(Refusal, match="k is a NoneType; give"):
        minfer.attention(q, None, region(v), span)
    whole = region(k)
    for sizes, arrays in (((0, D), whole.arrays), ((2, np.int32(D)), whole.arrays), ((2, D), ())):
        with pytest.raises(Refusal, match="needs an array and whole numbers"):
            Region(KvFormat.F32, "canonical", *sizes, arrays)


def test_an_empty_window_names_its_query(rows) -> None:
    q, k, v = rows
    spans = Span(np.array([[0, 20]] * 3 + [[4, 4]] + [[0, 20]] * 2, np.int32))
    with pytest.raises(Refusal, match="query 3 is at position -1"):
        minfer.attention(q, region(k), region(v), spans)
