"""How far the attention of a kernel may be off (contract 4.6).

The oracle rounds where the variant says it does and nowhere else. The kernel's error may be twice
what float32 numpy makes of the same rounded inputs, plus 1e-6, plus what rounded weights can do;
against the exact answer a cap holds, that of the coarsest rounding.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from minfer import cases, reference
from minfer.format import KvFormat
from minfer.ops import Variant

CAPS = {"f32": 1e-5, "f16": 5e-4, "i16": 5e-4, "bf16": 4e-3, "q8_0": 2e-2}  # of max |v|


def exact(inputs: cases.Inputs) -> Any:
    """The answer in float64, of inputs that nobody rounded."""
    return getattr(reference, inputs.op)(*inputs.tensors(32), **inputs.scalars)


def visible_max(inputs: cases.Inputs) -> float:
    values = reference.decode_rows(inputs.v.arrays[0], inputs.fmt, inputs.v.row_elems)
    return float(np.nanmax(np.abs(values)))


def assert_within_budget(variant: Variant, fmt: KvFormat, inputs: cases.Inputs, out: Any) -> None:
    how = variant.numerics(fmt)
    runs: Any = inputs.window.array
    if inputs.op == "attn_window":
        runs = reference.runs_of(inputs.positions, runs)
    call = (inputs.q, inputs.k, inputs.v, inputs.positions, runs)
    wide, single = (
        reference.attention(*call, **inputs.scalars, numerics=how, dtype=dtype)
        for dtype in (np.float64, np.float32)
    )
    budget = 2 * np.abs(single - wide).max() + 1e-6
    weights = reference.rounded_weights_error(*call, **inputs.scalars, numerics=how)
    beyond = np.abs(out - wide) - weights
    assert beyond.max() <= budget, f"{beyond.max():.3g} beyond rounded weights, of {budget:.3g}"


def cap(variant: Variant, fmt: KvFormat) -> float:
    """The part of the largest |v| that the roundings of a variant may make of an answer."""
    how = variant.numerics(fmt)
    decoded = {how.key, how.value} - {fmt.value}
    return max(CAPS[rounding] for rounding in (how.query, how.prob, *decoded))
