"""Rotary position tables: computed once in float64 and shared by every backend (contract 4.8).

Rotary embeddings: Su et al., RoFormer, arXiv 2104.09864. A scaling stretches the context that a
model was trained for: it divides the frequency of each pair by a number of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from minfer.format import Floats

CHUNK = 4096  # positions

Doubles = NDArray[np.float64]


@dataclass(frozen=True)
class Rope:
    """How a layer turns `n_rot` dimensions of each head, pair by pair."""

    n_rot: int
    base: float
    scaling: Scaling | None = None

    def frequencies(self) -> Doubles:
        """Radians a position for each of the n_rot / 2 pairs: base ** (-2 i / n_rot), scaled."""
        plain = inverse_frequencies(self.n_rot, self.base)
        return plain if self.scaling is None else plain / self.scaling.divisors(self)

    @property
    def temperature(self) -> float:
        """What cos and sin are multiplied by, once each."""
        return 1.0 if self.scaling is None else self.scaling.temperature


@dataclass(frozen=True)
class Linear:
    """Every frequency divided by `factor` (Chen et al., arXiv 2306.15595)."""

    factor: float
    temperature: ClassVar[float] = 1.0

    def divisors(self, rope: Rope) -> Doubles:
        return np.full(rope.n_rot // 2, self.factor)


@dataclass(frozen=True)
class Divided:
    """Each frequency divided by a factor of its own, as the tensor rope_freqs.weight lists them."""

    factors: tuple[float, ...]
    temperature: ClassVar[float] = 1.0

    def divisors(self, rope: Rope) -> Doubles:
        return np.array(self.factors, np.float64)


@dataclass(frozen=True)
class Llama3:
    """Slow pairs divided by `factor`, fast ones kept, those between blended (Llama 3.1).

    A pair is fast if it turns `high_freq_factor` times or more in `original_context` positions,
    slow if `low_freq_factor` times or less.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int
    temperature: ClassVar[float] = 1.0

    def divisors(self, rope: Rope) -> Doubles:
        plain = inverse_frequencies(rope.n_rot, rope.base)
        turns = self.original_context * plain / (2 * math.pi)
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return _blended(np.clip(kept, 0, 1), self.factor)


@dataclass(frozen=True)
class Yarn:
    """As `Llama3`, but blended by the index of the pair (Peng et al., YaRN, arXiv 2309.00071).

    beta_fast, beta_slow: turns in `original_context` positions. The indices where these fall are
    rounded outwards to whole ones, as transformers and llama.cpp do it. temperature: see
    `yarn_temperature`.
    """

    factor: float
    original_context: int
    temperature: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    def divisors(self, rope: Rope) -> Doubles:
        first = max(math.floor(self._pair_that_turns(self.beta_fast, rope)), 0)
        last = min(math.ceil(self._pair_that_turns(self.beta_slow, rope)), rope.n_rot - 1)
        width = last - first if last != first else 0.001
        kept = 1 - np.clip((np.arange(rope.n_rot // 2) - first) / width, 0, 1)
        return _blended(kept, self.factor)

    def _pair_that_turns(self, times: float, rope: Rope) -> float:
        wavelength = self.original_context / times
        return rope.n_rot * math.log(wavelength / (2 * math.pi)) / (2 * math.log(rope.base))


Scaling = Linear | Divided | Llama3 | Yarn


def yarn_temperature(factor: float) -> float:
    """0.1 ln(factor) + 1, the square root of 1 / t of the paper: it multiplies q and k alike."""
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0


def inverse_frequencies(n_rot: int, base: float) -> Doubles:
    """Radians a position without scaling: base ** (-2 i / n_rot)."""
    return base ** -(np.arange(0, n_rot, 2, dtype=np.float64) / n_rot)


def _blended(kept: Doubles, factor: float) -> Doubles:
    """Divisors: 1 where all of a frequency is kept, `factor` where nothing is."""
    return 1 / ((1 - kept) / factor + kept)


def table_bytes(n_ctx: int, n_rot: int) -> int:
    """Bytes of `tables`."""
    return 2 * n_ctx * (n_rot // 2) * 4


def turn(rope: Rope, by: int) -> tuple[Floats, Floats]:
    """cos and sin, float32 [1, n_rot / 2], that turn a rotated row on by `by` positions.

    `by` may be negative. The temperature is left out: the row holds it already.
    """
    angle = by * rope.frequencies()[None]
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def tables(n_ctx: int, rope: Rope) -> tuple[Floats, Floats]:
    """cos and sin, float32 [n_ctx, n_rot / 2], of every position, times the temperature."""
    cos, sin = np.empty((2, n_ctx, rope.n_rot // 2), np.float32)
    frequencies, temperature = rope.frequencies(), rope.temperature
    for first in range(0, n_ctx, CHUNK):  # float64 angles of few positions at a time
        some = slice(first, min(first + CHUNK, n_ctx))
        angle = np.arange(some.start, some.stop, dtype=np.float64)[:, None] * frequencies
        cos[some], sin[some] = temperature * np.cos(angle), temperature * np.sin(angle)
    return cos, sin
