"""A matrix of weights as it is stored, and how it came about."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from minfer.format import BLOCK, BLOCK_BYTES, KvFormat


@dataclass(frozen=True, eq=False)
class Weight:
    """A matrix [n_out, n_in] in one of three formats.

    array: float32 or float16 [n_out, n_in]; q8_0: uint8 [n_out, n_in / 32 * 34], whole blocks.
    origin: how it came about, for receipts.
    """

    array: Any
    fmt: KvFormat = KvFormat.F32
    origin: str = ""

    @property
    def shape(self) -> tuple[int, int]:
        """n_out and n_in."""
        n_out, width = self.array.shape
        blocks = self.fmt is KvFormat.Q8_0
        return int(n_out), int(width // BLOCK_BYTES * BLOCK if blocks else width)

    def rows(self, first: int, end: int) -> Weight:
        """Rows first .. end-1, not copied."""
        return replace(self, array=self.array[first:end])
