"""What goes into a decision, and what comes out of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Contender:
    """One configuration in the finals.

    numeric: what configurations with equal bits have in common. resources: what it takes, fewer
    is better, in order. rounds: case -> seconds of a call in each round; round i of all contenders
    ran side by side.
    """

    key: str
    numeric: str
    resources: tuple[float, ...]
    rounds: Mapping[str, tuple[float, ...]]


@dataclass(frozen=True)
class Interval:
    """A ratio of times and the bounds that it lies between."""

    low: float
    mid: float
    high: float


@dataclass(frozen=True)
class Decision:
    """What finals say. speedup, speedups: time of the default / time of what was chosen."""

    numeric: str  # chosen numeric class
    free: Mapping[int, str]  # n_q -> key of the chosen contender of that class
    ties: tuple[str, ...]  # numeric classes not to be told from the best, the chosen one included
    free_ties: Mapping[int, tuple[str, ...]]  # n_q -> keys of the class's contenders, likewise
    speedup: Interval  # geometric mean over cases
    speedups: Mapping[str, Interval]  # by case
    noise: float  # what the control differs from the default by
    rerun_differs: float  # probability that another run of the finals would choose otherwise
    rate: float  # stated rate of false winners
    default_ties: bool  # the default is in the tie set: there is nothing to promote
