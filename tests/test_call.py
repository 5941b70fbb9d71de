"""What attention launchers share: layouts kept by value, scales of any sign, workers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from under_test import attend, case_named, config_of, find

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
    before = attend(variant, inputs)
    inputs.positions[:] -= 3  # every query sees the three keys at its end no more
    span[:, 1] -= 3
    out = attend(variant, inputs)
    exact = reference.attn_window(*inputs.tensors(1), **inputs.scalars)
    assert np.abs(out - exact).max() < 2e-2 < np.abs(before - exact).max()
    inputs.positions[5] = -1
    with pytest.raises(Refusal, match="query 5 is at position -1"):
        attend(variant, inputs)


def test_tiles_changed_in_place_between_calls_are_checked_anew() -> None:
    inputs = cases.make(case_named("batch"), KvFormat.F32)
    q, k, v, positions, runs, tiles = inputs.tensors(32)
    variant = find("attn_map", "flash")
    how = {**inputs.scalars, "config": config_of(variant)}
    variant.launch(q, k, v, positions, runs, tiles, **how)
    tiles[0, 1] += 1
    with pytest.raises(Refusal, match="do not cover 54 queries"):
        variant.launch(q, k, v, positions, runs, tiles, **how)


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
        alone = attend(find("attn_map", name), inputs, threads=1)
        monkeypatch.setattr(_call, "ALONE_PRODUCTS", 0)
        assert np.array_equal(attend(find("attn_map", name), inputs, threads=3), alone)
        monkeypatch.undo()
