"""How far the attention of a kernel may be off (contract 4.6).

The budget is that of `minfer.cases.budgets`; against the exact answer a cap holds, that of the
coarsest rounding.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from minfer import cases, reference
from minfer.cases.budgets import AttentionBudget
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
    allowed = AttentionBudget.of(variant.numerics(fmt), inputs)
    beyond = allowed.beyond(out)
    assert beyond <= allowed.budget, f"{beyond:.3g} beyond rounded weights, of {allowed.budget:.3g}"


def cap(variant: Variant, fmt: KvFormat) -> float:
    """The part of the largest |v| that the roundings of a variant may make of an answer."""
    how = variant.numerics(fmt)
    decoded = {how.key, how.value} - {fmt.value}
    return max(CAPS[rounding] for rounding in (how.query, how.prob, *decoded))
