"""How far rows lie from a reference, summed up head by head."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from minfer.format import Floats

Sums = np.ndarray[Any, np.dtype[np.float64]]


class Deviation:
    """Rows of the same positions, [n, n_head_kv, head_dim], against those of a reference.

    Sums are float64 [n_head_kv]. lost: elements that are finite on one side alone; no other figure
    has them in it.
    """

    def __init__(self, n_head_kv: int) -> None:
        self.largest, self.squares, self.scale, self.n = np.zeros((4, n_head_kv))
        self.lost = 0

    def add(self, reference: Floats, rows: Floats) -> None:
        """Count some rows in."""
        wide = reference.astype(np.float64)
        finite = np.isfinite(reference), np.isfinite(rows)
        with np.errstate(invalid="ignore"):
            away = rows - wide
        away[~(finite[0] & finite[1])] = 0.0
        wide[~finite[0]] = 0.0
        self.lost += int((finite[0] != finite[1]).sum())
        if len(rows):
            np.maximum(self.largest, np.abs(away).max(axis=(0, 2)), out=self.largest)
        self.squares += np.einsum("nhd,nhd->h", away, away)
        self.scale += np.einsum("nhd,nhd->h", wide, wide)
        self.n += rows.shape[0] * rows.shape[2]

    def add_equal(self, n_rows: int, head_dim: int) -> None:
        """Count rows in that are those of the reference; `relative` means nothing then."""
        self.n += n_rows * head_dim

    def join(self, other: Deviation) -> None:
        """Count in what another one has counted."""
        np.maximum(self.largest, other.largest, out=self.largest)
        self.squares += other.squares
        self.scale += other.scale
        self.n += other.n
        self.lost += other.lost

    @property
    def max_abs(self) -> float:
        """The largest difference of an element."""
        return float(self.largest.max())

    @property
    def rms(self) -> float:
        """Root mean square of the differences."""
        n = float(self.n.sum())
        return math.sqrt(float(self.squares.sum()) / n) if n else 0.0

    @property
    def relative(self) -> float:
        """`rms` by that of the reference; 0 where both are."""
        scale = float(self.scale.sum())
        return math.sqrt(float(self.squares.sum()) / scale) if scale else 0.0

    @property
    def relative_by_head(self) -> Sums:
        """The same, a head each."""
        with np.errstate(invalid="ignore", divide="ignore"):
            share = np.sqrt(self.squares / self.scale)
        return np.where(self.scale > 0, share, 0.0)

    def as_dict(self) -> dict[str, float]:
        """Its figures by name."""
        figures = {"max_abs": self.max_abs, "rms": self.rms, "relative_rms": self.relative}
        return {**figures, "lost": self.lost}
