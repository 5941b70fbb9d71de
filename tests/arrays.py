"""Arrays of random values."""

from __future__ import annotations

import numpy as np


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
