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
    """What finals say.

    numeric: the chosen class; free: its contender by n_q. ties: classes that are not set apart from
    the best, the chosen one included, and free_ties contenders of the class by n_q, likewise.
    speedup: time of the default over that of the chosen, geometric mean over cases, and speedups by
    case; these intervals hold together with the ties. noise: what the control differs from the
    default by, root mean square over cases, as a part of the time. rerun_differs: probability that
    other rounds of the same finals choose otherwise. rate: of decisions among equals that set
    something apart. default_ties: the default is chosen, there is nothing to promote.
    """

    numeric: str
    free: Mapping[int, str]
    ties: tuple[str, ...]
    free_ties: Mapping[int, tuple[str, ...]]
    speedup: Interval
    speedups: Mapping[str, Interval]
    noise: float
    rerun_differs: float
    rate: float
    default_ties: bool

    @property
    def loses(self) -> str | None:
        """A case in which the default is faster than what was chosen, None if there is none."""
        return next((case for case, ratio in self.speedups.items() if ratio.high < 1), None)
