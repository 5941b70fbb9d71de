"""A machine whose true times are known: noise of many kinds, and a clock that samples advance."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from tuning.bench.statistics import rotated
from tuning.sweep.timing import Sample

SPREAD = 0.01  # of a sample's logarithm

Draw = Callable[[np.random.Generator, tuple[int, int, int]], np.ndarray]  # logarithms


def places(contestants: int, rounds: int) -> np.ndarray:
    """(contestants, rounds): how many samples of a race come before each."""
    found = np.zeros((contestants, rounds), int)
    for i in range(rounds):
        found[rotated(contestants, i), i] = i * contestants + np.arange(contestants)
    return found


def gaussian(rng: np.random.Generator, shape: tuple[int, int, int]) -> np.ndarray:
    return SPREAD * rng.standard_normal(shape)


def lognormal(rng: np.random.Generator, shape: tuple[int, int, int]) -> np.ndarray:
    """Never faster than the true time, and slower with a long tail."""
    return SPREAD * np.exp(rng.standard_normal(shape))


def bimodal(rng: np.random.Generator, shape: tuple[int, int, int]) -> np.ndarray:
    """Three samples in ten are 3 % slower."""
    return gaussian(rng, shape) / 2 + 0.03 * (rng.random(shape) < 0.3)


def drift(rng: np.random.Generator, shape: tuple[int, int, int]) -> np.ndarray:
    """Everything slows down by 30 % on the way."""
    along = places(*shape[1:]) / (shape[1] * shape[2])
    return gaussian(rng, shape) + np.log1p(0.3 * along)


def steps(rng: np.random.Generator, shape: tuple[int, int, int]) -> np.ndarray:
    """The machine jumps by 15 % or so, once in eight rounds, at any place of a round."""
    finals, contestants, rounds = shape
    jumps = rng.random((finals, contestants * rounds)) < 1 / (8 * contestants)
    level = np.cumsum(jumps * rng.normal(0, 0.15, jumps.shape), axis=1)
    return gaussian(rng, shape) + level[:, places(contestants, rounds)]


def outliers(rng: np.random.Generator, shape: tuple[int, int, int]) -> np.ndarray:
    """One sample in twenty takes 2 to 20 times as long."""
    slow = np.where(rng.random(shape) < 0.05, np.log(rng.uniform(2, 20, shape)), 0)
    return gaussian(rng, shape) + slow


def following(rng: np.random.Generator, shape: tuple[int, int, int]) -> np.ndarray:
    """Noise that follows the machine: samples resemble the one before."""
    finals, contestants, rounds = shape
    series = _related(rng, (finals, contestants * rounds), 0.9)
    return gaussian(rng, shape) / 2 + SPREAD * series[:, places(contestants, rounds)]


def sticking(rng: np.random.Generator, shape: tuple[int, int, int]) -> np.ndarray:
    """Noise that sticks to a contestant: its rounds resemble the one before."""
    return SPREAD * _related(rng, shape, 0.3)


def _related(rng: np.random.Generator, shape: tuple[int, ...], share: float) -> np.ndarray:
    series = rng.standard_normal(shape)
    for i in range(1, shape[-1]):
        series[..., i] = share * series[..., i - 1] + (1 - share**2) ** 0.5 * series[..., i]
    return series


NOISES: dict[str, Draw] = {
    noise.__name__: noise
    for noise in (*(gaussian, lognormal, bimodal, drift, steps, outliers, following, sticking),)
}
TICK = 0.01
QUANTIZED = "quantized"
KINDS = (*NOISES, QUANTIZED)


def draw(
    kind: str, rng: np.random.Generator, times: np.ndarray, finals: int, rounds: int
) -> np.ndarray:
    """(finals, contestants, rounds): logarithms of samples of contestants with these true times.

    quantized: a clock whose step is 1 % of the time of one, under gaussian noise.
    """
    shape = (finals, len(times), rounds)
    if kind != QUANTIZED:
        return np.log(times)[:, None] + NOISES[kind](rng, shape)
    exact = times[:, None] * np.exp(gaussian(rng, shape) / 2)
    return np.log(np.round(exact * 1.003 / TICK) * TICK)


class Machine:
    """Plays drawn samples; `now` is the virtual clock. first: what first calls take more."""

    def __init__(self, times: Mapping[str, float], logs: np.ndarray, first: float = 1.0) -> None:
        self.seconds = 0.0
        self.calls: dict[str, list[int]] = {key: [] for key in times}
        self._first = {key: seconds * first for key, seconds in times.items()}
        self._later = dict(zip(times, np.exp(logs).tolist(), strict=True))

    def now(self) -> float:
        return self.seconds

    def sample(self, key: str) -> Sample:
        def once(calls: int) -> float:
            done = self.calls[key]
            seconds: float = self._later[key][len(done) - 1] if done else self._first[key]
            done.append(calls)
            self.seconds += seconds * calls
            return seconds

        return once

    @property
    def samples(self) -> dict[str, Sample]:
        return {key: self.sample(key) for key in self.calls}
