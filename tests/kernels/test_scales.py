"""The scale of scores: of any sign, zero, and so large that a score is not finite."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from attention_oracle import assert_within_budget
from under_test import attend, find, same_bits, short, variants

from minfer import cases, reference
from minfer.format import KvFormat

EVERY = [(v.name, fmt) for v in variants("attn_map") for fmt in v.formats]


@pytest.mark.parametrize(("name", "fmt"), EVERY, ids=str)
def test_a_scale_of_any_sign_multiplies_scores(name: str, fmt: KvFormat) -> None:
    inputs = cases.make(short("batch" if name == "flash" else "drafts"), fmt)
    variant = find("attn_map", name)
    plain = attend(variant, inputs)
    turned = attend(variant, replace(inputs, q=-inputs.q, scale=-inputs.scale))
    assert same_bits(turned, plain)
    assert not np.array_equal(attend(variant, replace(inputs, scale=-inputs.scale)), plain)
    level = replace(inputs, scale=0.0)  # the mean of the values
    assert_within_budget(variant, fmt, level, attend(variant, level))


@pytest.mark.parametrize("scale", [0.2, -0.2])
@pytest.mark.parametrize("name", [name for name, fmt in EVERY if fmt is KvFormat.F32])
def test_a_score_of_minus_infinity_weighs_nothing(name: str, scale: float) -> None:
    case = cases.Case("lost", "decode", (1, 1), 64, ((300, 1),), cases.SPAN)
    inputs = replace(cases.make(case, KvFormat.F32), scale=scale)
    assert inputs.window.array is not None
    first = int(inputs.window.array[0, 0])
    keys = inputs.k.arrays[0].view(np.float32)
    keys[first + 70] = np.sign(inputs.q[0, 0]) * np.float32(-3e38 * np.sign(scale))
    out = attend(find("attn_window", name), inputs)
    exact = reference.attn_window(*inputs.tensors(1), **inputs.scalars)
    assert np.abs(out - exact).max() < 1e-6
