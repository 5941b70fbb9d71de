"""Rotary position tables: computed once in float64 and shared by every backend (contract 4.8).

Rotary embeddings: Su et al., RoFormer, arXiv 2104.09864.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from minfer.format import Floats

CHUNK = 4096  # positions


def inverse_frequencies(n_rot: int, base: float) -> NDArray[np.float64]:
    """Radians a position for each of the n_rot / 2 pairs: base ** (-2 i / n_rot)."""
    return base ** -(np.arange(0, n_rot, 2, dtype=np.float64) / n_rot)


def table_bytes(n_ctx: int, n_rot: int) -> int:
    """Bytes of `tables`."""
    return 2 * n_ctx * (n_rot // 2) * 4


def tables(n_ctx: int, n_rot: int, base: float) -> tuple[Floats, Floats]:
    """cos and sin, float32 [n_ctx, n_rot / 2], of every position."""
    cos, sin = np.empty((2, n_ctx, n_rot // 2), np.float32)
    frequencies = inverse_frequencies(n_rot, base)
    for first in range(0, n_ctx, CHUNK):  # float64 angles of few positions at a time
        some = slice(first, min(first + CHUNK, n_ctx))
        angle = np.arange(some.start, some.stop, dtype=np.float64)[:, None] * frequencies
        cos[some], sin[some] = np.cos(angle), np.sin(angle)
    return cos, sin
