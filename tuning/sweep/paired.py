"""Contenders that ran side by side, compared round by round, for one case or many at once.

The difference of two contenders in a round is the logarithm of the ratio of their times: what slows
a whole round drops out. Differences are summed up by Yuen's trimmed mean, a fifth cut off at either
end, whose variance comes from the winsorized sum of squares: outliers and second modes move it
little. Two things make that variance too small, and are added to it: rounds that resemble their
neighbours (`inflation`), and clocks that count in steps (`tick`).
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating[Any]]

TRIM = 0.2  # of the rounds, at either end
ALIKE = 0.8  # correlation of neighbouring rounds that is reckoned with at most


def trimmed(values: Array) -> tuple[Array, Array]:
    """Trimmed means along the last axis, of two values or more, and the variances of these."""
    n = values.shape[-1]
    cut = int(TRIM * n)
    kept = n - 2 * cut
    ordered = np.sort(values, axis=-1)
    core = ordered[..., cut : n - cut]
    ends = ordered[..., [cut, n - cut - 1]]
    mean = core.mean(axis=-1)
    winsorized = mean + cut * (ends - mean[..., None]).sum(axis=-1) / n
    squares = ((core - winsorized[..., None]) ** 2).sum(axis=-1)
    squares += cut * ((ends - winsorized[..., None]) ** 2).sum(axis=-1)
    return mean, squares / (kept * (kept - 1))


def differences(logs: Array) -> Array:
    """(..., pairs, rounds) of logs (..., contenders, rounds), pairs as in np.triu_indices."""
    first, second = np.triu_indices(logs.shape[-2], 1)
    return logs[..., first, :] - logs[..., second, :]


def compare(logs: Array) -> tuple[Array, Array]:
    """How much slower every contender is than every other one.

    logs: (..., contenders, rounds), logarithms of times. Returns centres and their variances, both
    (..., contenders, contenders), positive where the first is slower than the second.
    """
    m = logs.shape[-2]
    first, second = np.triu_indices(m, 1)
    mean, variance = trimmed(differences(logs))
    centres = np.zeros((*logs.shape[:-2], m, m))
    variances = np.zeros_like(centres)
    centres[..., first, second], centres[..., second, first] = mean, -mean
    variances[..., first, second] = variances[..., second, first] = variance
    return centres, variances


def inflation(values: Array) -> Array:
    """How much more a mean of rounds varies than one of as many unrelated rounds, at least 1.

    values: (..., pairs, rounds) of `differences`; one number for all pairs, by what neighbours have
    in common where trimming does not cut.
    """
    n = values.shape[-1]
    cut = int(TRIM * n)
    ordered = np.sort(values, axis=-1)
    values = np.clip(values, ordered[..., cut, None], ordered[..., n - cut - 1, None])
    values -= values.mean(axis=-1, keepdims=True)
    squares = np.maximum((values**2).sum(axis=(-1, -2)), np.finfo(float).tiny)
    alike = (values[..., 1:] * values[..., :-1]).sum(axis=(-1, -2)) / squares
    # of n rounds the estimate is too low by about that much
    alike = np.clip(alike + (1 + 3 * alike) / n, 0, ALIKE)
    factor: Array = (1 + alike) / (1 - alike)
    return factor


def tick(logs: Array) -> Array:
    """The step of the clock, as a part of the time; 0 where no contender's time comes twice.

    logs: (..., contenders, rounds).
    """
    gaps = np.diff(np.sort(logs, axis=-1), axis=-1)
    twice = (gaps == 0).any(axis=-1)
    step = np.where(gaps > 0, gaps, np.inf).min(axis=-1)
    widest: Array = np.where(twice & np.isfinite(step), step, 0.0).max(axis=-1)
    return widest


def student(level: float, freedom: float) -> float:
    """What Student's t is below with probability `level`; within 0.5 % from 5 degrees on."""
    z = NormalDist().inv_cdf(level)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return math.fsum(term / freedom**power for power, term in enumerate(terms))
