"""Timing: samples until an interval is narrow, and paired interleaved rounds. No libraries here.

Both stop by how narrow intervals are, when time is up or at most samples: never by who leads, so
that looking at the samples on the way does not favour anyone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from tuning.bench.statistics import rotated
from tuning.sweep.paired import TRIM, Array, inflation, student, trimmed

Sample = Callable[[int], float]  # seconds of one call, over about n calls in a row

ALPHA = 0.05  # intervals hold with 95 %
CALLS_MAX = 100_000


class Lost(Exception):
    """A contestant cannot go on; the race does without it."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class NotATime(Lost):
    """A sample that is no time: not finite, zero or negative."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"a sample of {seconds} seconds is no time")
        self.seconds = seconds


@dataclass(frozen=True)
class Measured:
    """Seconds of one call. calls: in each sample.

    low, high: interval of the median by order statistics, which holds with 95 % from six samples
    on; of fewer it is their range (94 % of five).
    """

    samples: tuple[float, ...]
    calls: int
    low: float
    median: float
    high: float

    @classmethod
    def of(cls, samples: Sequence[float], calls: int) -> Measured:
        ordered = sorted(samples)
        outside = _outside(len(ordered))
        middle = float(np.median(ordered))
        return cls(tuple(samples), calls, ordered[outside], middle, ordered[-1 - outside])

    @property
    def width(self) -> float:
        """Of the interval, as a part of the median."""
        return (self.high - self.low) / self.median


def measure(
    sample: Sample,
    *,
    target: float,
    width: float = 0.01,
    least: int = 5,
    most: int = 60,
    seconds: float = 2.0,
    now: Callable[[], float] = time.perf_counter,
) -> Measured:
    """Samples of about `target` seconds until the interval of their median is narrower than width.

    Or until there are `most`, or `seconds` are spent; never fewer than `least`. What was reached is
    in the result. Raises NotATime, and whatever `sample` raises.
    """
    began = now()
    calls = _calls(sample, target)
    samples: list[float] = []
    while True:
        samples.append(_timed(sample, calls))
        measured = Measured.of(samples, calls)
        narrow = 0.5 ** len(samples) <= ALPHA / 2 and measured.width < width
        enough = len(samples) >= least and (narrow or now() - began >= seconds)
        if enough or len(samples) >= most:
            return measured


def race(
    samples: Mapping[str, Sample],
    *,
    target: float,
    width: float,
    least: int,
    most: int,
    seconds: float,
    on_round: Callable[[int], None] | None = None,
    on_lost: Callable[[str, Lost], None] | None = None,
    now: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of a call of each contestant in every round; once a round each, in rotated order.

    Ends when the interval of everyone's ratio to the contestant in the middle is narrower than
    width, after `most` rounds, or when `seconds` are spent; never before `least` rounds. A
    contestant whose sample raises `Lost`, or is no time, leaves with all its rounds.
    on_round: takes the number of rounds done. on_lost: takes the key and why.
    """
    began = now()
    calls: dict[str, int] = {}
    rounds: dict[str, list[float]] = {key: [] for key in samples}

    def turn(key: str) -> None:
        try:
            if key in calls:
                rounds[key].append(_timed(samples[key], calls[key]))
            else:
                calls[key] = _calls(samples[key], target)
        except Lost as lost:
            del rounds[key]
            if on_lost is not None:
                on_lost(key, lost)

    for key in samples:
        turn(key)
    for done in range(1, most + 1):
        keys = list(rounds)
        for i in rotated(len(keys), done - 1):
            turn(keys[i])
        if not rounds:
            break
        if on_round is not None:
            on_round(done)
        if done >= least and (now() - began >= seconds or widest(list(rounds.values())) < width):
            break
    return rounds


def widest(rounds: Sequence[Sequence[float]]) -> float:
    """Width of the widest 95 % interval of a contestant's ratio to the one in the middle.

    Infinite for a single round; 0 for a single contestant.
    """
    logs: Array = np.log(np.asarray(rounds, dtype=float))
    contestants, n = logs.shape
    if contestants < 2:
        return 0.0
    freedom = n - 2 * int(TRIM * n) - 1
    if freedom < 1:
        return math.inf
    middle = np.argsort(np.median(logs, axis=-1))[contestants // 2]
    ratios = np.delete(logs, middle, axis=0) - logs[middle]
    variance = trimmed(ratios)[1].max() * inflation(ratios)
    half = student(1 - ALPHA / 2, freedom) * math.sqrt(variance)
    return 2 * math.sinh(half)


def _calls(sample: Sample, target: float) -> int:
    """How many calls take about `target` seconds, after a single one."""
    return min(max(1, round(target / _timed(sample, 1))), CALLS_MAX)


def _timed(sample: Sample, calls: int) -> float:
    seconds = sample(calls)
    if not (math.isfinite(seconds) and seconds > 0):
        raise NotATime(seconds)
    return seconds


@lru_cache(maxsize=256)
def _outside(n: int) -> int:
    """How many of n ordered samples lie on either side of the interval of the median."""
    below, k = 0.5**n, 0
    while below + math.comb(n, k + 1) * 0.5**n <= ALPHA / 2:
        k += 1
        below += math.comb(n, k) * 0.5**n
    return k
