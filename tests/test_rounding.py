"""What the oracle rounds, and how far rounded weights may move an answer (contract 4.6)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from arrays import normal
from attention_oracle import CAPS, cap
from under_test import case_named, find

from minfer import cases, reference
from minfer.format import KvFormat
from minfer.ops import Numerics
from minfer.reference.attention import seen_cells
from minfer.reference.rounding import I16_CODES, rounded, weight_error

EXACT = Numerics("f32", "f16", "f32", "f16", "f32")


def test_narrow_types_round_to_nearest_even() -> None:
    torch = pytest.importorskip("torch")
    x = normal(4000) * 10.0 ** np.linspace(-30, 30, 4000).astype(np.float32)
    ties = np.array([1 + 2.0**-8, 1 + 3 * 2.0**-8, -1 - 2.0**-8, np.inf, 0, -0.0], np.float32)
    for values in (x, ties):
        wanted = torch.from_numpy(values).bfloat16().float().numpy()
        assert (rounded(values, "bf16").view(np.int32) == wanted.view(np.int32)).all()
    assert np.isnan(rounded(np.array([np.nan], np.float32), "bf16")[0])
    halves = np.array([1 + 2.0**-11, 1 + 3 * 2.0**-11, 65520, 2.0**-25], np.float32)
    assert rounded(halves, "f16").tolist() == [1, 1 + 2.0**-9, np.inf, 0]
    assert rounded(x, "f32") is x
    with pytest.raises(ValueError, match="no oracle rounds to f8"):
        rounded(x, "f8")


def test_fixed_point_is_relative_to_the_largest_of_a_row() -> None:
    x = normal(3, 5, 64) * np.array([1e-3, 1, 1e3], np.float32)[:, None, None]
    seen = rounded(x, "i16")
    step = np.abs(x).max(axis=2, keepdims=True) / I16_CODES
    assert (np.abs(seen - x) <= 0.502 * step).all() and (seen != x).mean() > 0.9
    assert np.allclose(np.rint(seen / step) * step, seen, rtol=1e-6, atol=0)
    assert not rounded(np.zeros((2, 8), np.float32), "i16").any()


@pytest.mark.parametrize(("how", "dtype"), [("f16", np.float16), ("f32", np.float32)])
def test_weights_move_by_no_more_than_stated(how: str, dtype: type) -> None:
    p = np.concatenate([2.0 ** -np.linspace(0, 40, 20_001), np.float16([2.0**-24, 6e-8])])
    p = p.astype(np.float32).astype(np.float64)
    moved = np.abs(p.astype(dtype).astype(np.float64) - p)
    assert (moved <= weight_error(p, how)).all()
    assert how == "f32" or moved.max() > 0.9 * weight_error(p, how)[0] / 2


@pytest.mark.parametrize("name", ["drafts", "tiny-heads", "gemma3", "prompt-16"])
def test_an_answer_of_rounded_weights_stays_within_the_bound_and_uses_it(name: str) -> None:
    inputs = cases.make(case_named(name), KvFormat.F16)
    runs = inputs.window.array
    if inputs.op == "attn_window":
        runs = reference.runs_of(inputs.positions, runs)
    call = (inputs.q, inputs.k, inputs.v, inputs.positions, runs)
    how = replace(EXACT, prob="f16")
    bound = reference.rounded_weights_error(*call, **inputs.scalars, numerics=how)
    exact = reference.attention(*call, **inputs.scalars)
    error = np.abs(with_rounded_weights(inputs, runs) - exact)
    assert (error <= bound).all()
    assert bound.max() < 5e-4 * 6 and error.max() > bound.max() / 200
    assert not reference.rounded_weights_error(*call, **inputs.scalars, numerics=EXACT).any()


def with_rounded_weights(inputs: cases.Inputs, runs: np.ndarray) -> np.ndarray:
    """The answer with weights rounded to f16, and their sum as it is, in float64."""
    k = inputs.k
    out = np.empty(inputs.q.shape)
    for i, q in enumerate(inputs.q.astype(np.float64)):
        pos = int(inputs.positions[i])
        cells = seen_cells(runs[i], pos, inputs.width)
        keys, values = (
            reference.decode_rows(r.arrays[0][cells], r.fmt, r.row_elems)
            .reshape(len(cells), k.n_head_kv, k.head_dim)
            .astype(np.float64)
            for r in (inputs.k, inputs.v)
        )
        for head in range(len(q)):
            kv = head // (len(q) // k.n_head_kv)
            scores = keys[:, kv] @ q[head] * inputs.scale
            p = np.exp(scores - scores.max())
            out[i, head] = p.astype(np.float16).astype(np.float64) @ values[:, kv] / p.sum()
    return out


def test_a_cap_is_that_of_the_coarsest_rounding() -> None:
    rows, split = (find("attn_map", name) for name in ("rows", "split"))
    assert cap(rows, KvFormat.F16) == CAPS["f32"]
    assert cap(split, KvFormat.Q8_0) == CAPS["q8_0"]
    halves = replace(split, query={}, prob={KvFormat.Q8_0: "f16"}, decoded={})
    assert cap(halves, KvFormat.Q8_0) == CAPS["f16"]
    assert cap(replace(split, decoded={KvFormat.F16: "bf16"}), KvFormat.F16) == CAPS["bf16"]


def test_only_what_is_declared_is_rounded() -> None:
    inputs = cases.make(case_named("drafts"), KvFormat.Q8_0)
    call = (inputs.q, inputs.k, inputs.v, inputs.positions, inputs.window.array)
    plain = reference.attention(*call, **inputs.scalars)
    same = replace(EXACT, key="q8_0", value="q8_0")
    assert (reference.attention(*call, **inputs.scalars, numerics=same) == plain).all()
    for what in ("query", "key", "value"):
        how = replace(same, **{what: "f16"})
        moved = np.abs(reference.attention(*call, **inputs.scalars, numerics=how) - plain).max()
        assert 1e-6 < moved < 2e-3, what
