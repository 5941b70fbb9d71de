"""What attention launchers share: layouts kept by value, scales of any sign, workers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from test_kernels import case_named, config, find, launch

from minfer import cases, reference
from minfer.errors import Refusal
from minfer.format import KvFormat
from minfer.kernels_numba import _call
from minfer.kernels_numba._call import ALONE_PRODUCTS, Call, ordered_tiles, prepare


def prepared(inputs: cases.Inputs, **changes: Any) -> Call:
    q, k, v, positions, array, _ = inputs.tensors(32)
    return prepare(inputs.op, q, k, v, positions, array, **{**inputs.scalars, **changes})


def test_equal_windows_share_a_layout_that_nobody_can_write() -> None:
    inputs = cases.make(case_named("batch"), KvFormat.F32)
    first = prepared(inputs).layout
    assert prepared(replace(inputs, positions=inputs.positions.copy())).layout is first
    assert prepared(inputs, width=7).layout is not first
    tiles = inputs.tensors(32)[5]
    order = ordered_tiles(tiles, first)
    assert ordered_tiles(tiles.copy(), first) is order
    for array in (*first.slots, order):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


@pytest.mark.parametrize("name", ["rows", "split", "flash", "scratch"])
def test_arrays_changed_in_place_between_calls_are_read_anew(name: str) -> None:
    inputs = cases.make(case_named("span-clipped"), KvFormat.Q8_0)
    variant, span = find("attn_window", name), inputs.window.array
    assert span is not None
    before = launch(variant, inputs)
    inputs.positions[:] -= 3  # every query sees the three keys at its end no more
    span[:, 1] -= 3
    out = launch(variant, inputs)
    exact = reference.attn_window(*inputs.tensors(1), **inputs.scalars)
    assert np.abs(out - exact).max() < 2e-2 < np.abs(before - exact).max()
    inputs.positions[5] = -1
    with pytest.raises(Refusal, match="query 5 is at position -1"):
        launch(variant, inputs)


def test_tiles_changed_in_place_between_calls_are_checked_anew() -> None:
    inputs = cases.make(case_named("batch"), KvFormat.F32)
    q, k, v, positions, runs, tiles = inputs.tensors(32)
    variant = find("attn_map", "flash")
    how = {**inputs.scalars, "config": config(variant)}
    variant.launch(q, k, v, positions, runs, tiles, **how)
    tiles[0, 1] += 1
    with pytest.raises(Refusal, match="do not cover 54 queries"):
        variant.launch(q, k, v, positions, runs, tiles, **how)


@pytest.mark.parametrize("name", ["rows", "split", "flash", "scratch"])
@pytest.mark.parametrize("fmt", KvFormat, ids=str)
def test_a_scale_of_any_sign_multiplies_scores(name: str, fmt: KvFormat) -> None:
    inputs = cases.make(case_named("drafts" if name == "split" else "batch"), fmt)
    variant = find("attn_map", name)
    plain = launch(variant, inputs)
    turned = launch(variant, replace(inputs, q=-inputs.q, scale=-inputs.scale))
    assert np.array_equal(turned.view(np.int32), plain.view(np.int32))
    assert not np.array_equal(launch(variant, replace(inputs, scale=-inputs.scale)), plain)
    level = replace(inputs, scale=0.0)
    exact = reference.attn_map(*level.tensors(1), **level.scalars)  # the mean of the values
    assert np.abs(launch(variant, level) - exact).max() < 1e-6


@pytest.mark.parametrize(
    ("scalar", "words"),
    [
        ({"scale": True}, "scale True is no finite float32"),
        ({"scale": np.bool_(True)}, "is no finite float32"),
        ({"width": True}, "width True is no sliding width"),
        ({"width": False}, "width False is no sliding width"),
    ],
)
def test_a_bool_is_no_scale_and_no_width(scalar: dict[str, Any], words: str) -> None:
    inputs = cases.make(case_named("one-cell"), KvFormat.F32)
    with pytest.raises(Refusal, match=words):
        prepared(inputs, **scalar)


@pytest.mark.parametrize("scale", [0.2, -0.2])
@pytest.mark.parametrize("name", ["rows", "split", "flash"])
def test_a_score_of_minus_infinity_weighs_nothing(name: str, scale: float) -> None:
    case = cases.Case("lost", "decode", (1, 1), 64, ((300, 1),), cases.SPAN)
    inputs = replace(cases.make(case, KvFormat.F32), scale=scale)
    assert inputs.window.array is not None
    first = int(inputs.window.array[0, 0])
    keys = inputs.k.arrays[0].view(np.float32)
    keys[first + 70] = np.sign(inputs.q[0, 0]) * np.float32(-3e38 * np.sign(scale))
    out = launch(find("attn_window", name), inputs)
    exact = reference.attn_window(*inputs.tensors(1), **inputs.scalars)
    assert np.abs(out - exact).max() < 1e-6


def test_a_small_call_wakes_no_other_worker() -> None:
    case = case_named("drafts")
    few = prepared(cases.make(case, KvFormat.F32))
    assert few.layout.n_keys == 41 + 42 + 43 + 256 + sum(range(601, 609))
    n_head, head_dim = case.heads[0], case.head_dim
    assert few.layout.n_keys * n_head * head_dim > ALONE_PRODUCTS
    assert few.workers(3) == 3
    one = prepared(cases.make(case_named("one-cell"), KvFormat.F32))
    assert one.workers(3) == 1
    with pytest.raises(Refusal, match="threads 0"):
        one.workers(0)


def test_bits_do_not_depend_on_whether_others_are_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, case in (("split", "wide-heads"), ("flash", "prompt-32"), ("rows", "sliding")):
        inputs = cases.make(case_named(case), KvFormat.F32)
        alone = launch(find("attn_map", name), inputs, threads=1)
        monkeypatch.setattr(_call, "ALONE_PRODUCTS", 0)
        assert np.array_equal(launch(find("attn_map", name), inputs, threads=3), alone)
        monkeypatch.undo()
