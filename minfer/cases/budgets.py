"""How far the attention of a kernel may be off (contract 4.6).

The oracle rounds where the variant says it does and nowhere else. The kernel's error may be twice
what float32 numpy makes of the same rounded inputs, plus 1e-6, plus what rounded weights can do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from minfer import reference
from minfer.cases.inputs import Inputs
from minfer.format import Floats
from minfer.ops import Numerics


@dataclass(frozen=True, eq=False)
class AttentionBudget:
    """What the answer of a call may be: `wide` [n_q, n_head, d], and how far from it.

    weights: what rounded weights can do to each element. budget: what arithmetic in float32 may.
    """

    wide: Any
    weights: Any
    budget: float

    @classmethod
    def of(cls, numerics: Numerics, inputs: Inputs) -> AttentionBudget:
        """For a variant that rounds as `numerics` says."""
        runs: Any = inputs.window.array
        if inputs.op == "attn_window":
            runs = reference.runs_of(inputs.positions, runs)
        return cls.over(numerics, inputs.q, inputs.k, inputs.v, inputs.positions, runs,
                        **inputs.scalars)  # fmt: skip

    @classmethod
    def over(cls, numerics: Numerics, *tensors: Any, **scalars: Any) -> AttentionBudget:
        """The same of q, k, v, positions, runs and the scalars of `reference.attention`."""
        wide, single = (
            reference.attention(*tensors, **scalars, numerics=numerics, dtype=dtype)
            for dtype in (np.float64, np.float32)
        )
        weights = reference.rounded_weights_error(*tensors, **scalars, numerics=numerics)
        return cls(wide, weights, float(2 * np.abs(single - wide).max(initial=0) + 1e-6))

    def beyond(self, out: Floats) -> float:
        """The largest error beyond what rounded weights explain; NaN for an answer with NaN."""
        return float((np.abs(out - self.wide) - self.weights).max(initial=0))
