"""The integer arrays of a step, which kernels and graphs read (contract 2, 7.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from minfer import window
from minfer.format import Int32
from minfer.kv.plan import Plan
from minfer.ops import DECODE
from minfer.window import WindowMode


@dataclass(frozen=True, eq=False)
class StepInputs:
    """The integer inputs of a step, one row a token.

    positions: int32 [n_tokens]. cells: int32 [n_tokens], where each row is stored. window:
    int32 [n_tokens, 2] (span), [n_tokens, 4, 2] (runs) or None (causal). groups: rows a sequence.
    """

    kind: str
    mode: WindowMode
    groups: tuple[int, ...]
    positions: Int32
    cells: Int32
    window: Int32 | None

    @classmethod
    def of(cls, plan: Plan) -> StepInputs:
        """The arrays of `plan`."""
        ranges = [range(group.t, group.t + group.n) for group in plan.groups]
        seen = list(zip(plan.spans, ranges, strict=True))
        array = None
        if plan.mode is WindowMode.SPAN:
            array = window.span_array(seen)
        elif plan.mode is WindowMode.RUNS:
            array = window.runs_array(seen)
        return cls(
            kind=plan.kind,
            mode=plan.mode,
            groups=tuple(group.n for group in plan.groups),
            positions=joined(ranges),
            cells=joined(plan.cells),
            window=array,
        )

    @property
    def n_tokens(self) -> int:
        return len(self.positions)

    def cut(self, block_m: int) -> Int32:
        """int32 [n_tiles_max, 2] of (first query, count); decode has one query a tile."""
        if self.kind == DECODE:
            return window.tiles(self.groups, 1, decode=True)
        return window.tiles(self.groups, block_m)


def joined(ranges: Sequence[range]) -> Int32:
    """The numbers of all `ranges` in one int32 array."""
    arrays = [np.arange(some.start, some.stop, dtype=np.int32) for some in ranges]
    return np.concatenate(arrays) if arrays else np.empty(0, np.int32)
