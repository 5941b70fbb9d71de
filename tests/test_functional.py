"""Attention without a store: regions of the caller's own, any window."""

from __future__ import annotations

import numpy as np
import pytest

import minfer
from minfer import KvFormat, Refusal, Runs, Span
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
    out = np.empty(q.shape)
    for i, seen in enumerate(cells):
        for head in range(q.shape[1]):
            keys, values = (x[seen, head // 2].astype(np.float64) for x in (k, v))
            score = keys @ q[i, head].astype(np.float64) * scale
            p = np.exp(score - score.max())
            out[i, head] = p @ values / p.sum()
    return out


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
    assert (error <= 0.57 * step).all() and error.max() > 0


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"fmt": "q8_0"}, "fmt is q8_0 and the regions hold f32"),
        ({"variant": "split"}, "is for decode, not prefill"),
        ({"config": {"speed": 9}}, "no tunable speed"),
        ({"window": Span(np.array([[0, 41]] * 6, np.int32))}, r"outside cells \[0, 40\)"),
        ({"window": Span(np.array([[0, 4]], np.int32))}, "fits no mode for 6 queries"),
    ],
)
def test_bad_calls_are_refused(rows, how: dict, message: str) -> None:
    q, k, v = rows
    window = how.pop("window", Span(np.array([[0, 20]] * 6, np.int32)))
    with pytest.raises(Refusal, match=message):
        minfer.attention(q, region(k), region(v), window, positions=np.full(6, 19, np.int32), **how)


def test_a_query_of_another_width_is_refused(rows) -> None:
    q, k, v = rows
    with pytest.raises(Refusal, match=r"\[n_q, n_head, 32\]"):
        minfer.attention(q[..., :16], region(k), region(v), minfer.Causal())
