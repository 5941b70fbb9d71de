"""Rotary position tables: computed once in float64 and shared by every backend (contract 4.8).

Rotary embeddings: Su et al., RoFormer, arXiv 2104.09864.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from minfer.format import Floats


def inverse_frequencies(n_rot: int, base: float) -> NDArray[np.float64]:
    """Radians a position for each of the n_rot / 2 pairs: base ** (-2 i / n_rot)."""
    return base ** -(np.arange(0, n_rot, 2, dtype=np.float64) / n_rot)


def table_bytes(n_ctx: int, n_rot: int) -> int:
    """Bytes of `tables`."""
    return 2 * n_ctx * (n_rot // 2) * 4


def tables(n_ctx: int, n_rot: int, base: float) -> tuple[Floats, Floats]:
    """cos and sin, float32 [n_ctx, n_rot / 2], of every position."""
    angle = np.arange(n_ctx, dtype=np.float64)[:, None] * inverse_frequencies(n_rot, base)
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
