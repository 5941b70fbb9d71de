"""The rule of a decision: leaders, tie sets and what is chosen of them, for many finals at once.

One critical value stands behind every comparison. Finals of equal contenders, in the same layout
and with as many rounds, are simulated and judged by the same rule: it is what the largest of all
their statistics exceeds at the stated rate. So the rate is that of a decision, however many
contenders, free choices and buckets are compared.

Measured at a rate of 5 %, 2 and 8 contenders, 8 to 60 rounds: something is set apart among equals
in 0 to 4.5 of 100 finals, be the noise Gaussian, skewed or bimodal, with drift, jumps or outliers,
and in up to 5.6 where noise sticks to a contender from round to round (correlation 0.3).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from tuning.sweep.paired import Array, compare

Index = NDArray[np.intp]
Truth = NDArray[np.bool_]

NOTHING = 1e-9  # a standard error is taken to be at least that
DRAWS = 2000  # simulated finals of equal contenders
CHUNK = 250


@dataclass(frozen=True)
class Layout:
    """Candidates in order of preference, the default first.

    classes: numeric class of each, numbered as they come. buckets: that of each case, likewise.
    """

    classes: tuple[int, ...]
    buckets: tuple[int, ...]

    @property
    def members(self) -> list[Index]:
        """Candidates of each class."""
        return [np.flatnonzero(np.equal(self.classes, a)) for a in range(max(self.classes) + 1)]

    @property
    def parts(self) -> list[Index]:
        """Cases of each bucket."""
        return [np.flatnonzero(np.equal(self.buckets, q)) for q in range(max(self.buckets) + 1)]


@dataclass(frozen=True)
class Verdicts:
    """Of many finals: what the rule says.

    tied: (finals, classes). free_tied: (finals, buckets, candidates), with the best of its class.
    chosen: (finals, buckets), a candidate each. largest: (finals,), of all statistics.
    """

    tied: Truth
    free_tied: Truth
    chosen: Index
    largest: Array


class Comparisons:
    """Comparisons of candidates. centres, variances: (finals, cases, candidates, candidates)."""

    def __init__(self, centres: Array, variances: Array, layout: Layout) -> None:
        self.layout = layout
        self.centres = np.stack([centres[:, p].sum(axis=1) for p in layout.parts], axis=1)
        self.variances = np.stack([variances[:, p].sum(axis=1) for p in layout.parts], axis=1)
        self.scores: Array = self.centres.mean(axis=-1)  # (finals, buckets, candidates)

    def judge(self, critical: float, noise: Array) -> Verdicts:
        """noise: (finals,), logarithm of what the default differs from itself by.

        A class offers its first tied choices where these are tied with the leader and faster than
        the default, else its best ones. What is chosen is itself faster than the default: to be
        tied with something faster is not enough.
        """
        best = self._best()
        top = best[np.arange(len(best)), self._pick(self.scores, best).argmin(-1)][:, None]
        by_class, by_member = self._contrast(best, top), self._within(best)
        free_tied = by_member <= critical
        liked = self._liked(free_tied)
        default = np.zeros_like(top)
        by_liked, by_default = self._contrast(liked, top), self._contrast(default, best)
        good = (by_liked <= critical) & (self._contrast(default, liked) > critical)
        options = np.where(good[..., None], liked, best)
        tied = by_class <= critical
        faster = self._contrast(default, options) > critical
        faster &= self._ahead(options) > noise[:, None]
        stays = (self._contrast(default, top)[:, 0] <= critical) & (liked[:, 0] == 0).all(-1)
        able = tied & faster & ~stays[:, None]
        # the class of the default is 0, others follow by the last of their choices in preference
        order = np.where(able, options.max(-1) + 1, self.scores.shape[-1] + 1)
        order[:, 0] = np.where(able[:, 0], 0, order[:, 0])
        picked = options[np.arange(len(best)), order.argmin(-1)]
        chosen = np.where(able.any(-1, keepdims=True), picked, 0)
        by_all = np.concatenate([by_class, by_liked, np.abs(by_default)], axis=1)
        largest = np.maximum(by_all.max(-1), by_member.max(axis=(-1, -2)))
        return Verdicts(tied, free_tied, chosen, largest)

    def _best(self) -> Index:
        """(finals, classes, buckets): the fastest candidate."""
        return np.stack([m[self.scores[..., m].argmin(-1)] for m in self.layout.members], axis=1)

    def _liked(self, free_tied: Truth) -> Index:
        """(finals, classes, buckets): the first candidate among those tied."""
        return np.stack([m[free_tied[..., m].argmax(-1)] for m in self.layout.members], axis=1)

    def _pick(self, of: Array, choice: Index) -> Array:
        """Sum over buckets of (finals, buckets, candidates) at (finals, n, buckets)."""
        picked: Array = np.take_along_axis(of, choice.swapaxes(1, 2), axis=-1).sum(axis=1)
        return picked

    def _ahead(self, choice: Index) -> Array:
        """(finals, n): mean over cases of the log ratio of the default's time to a choice's."""
        return self._pick(self.centres[:, :, 0], choice) / len(self.layout.buckets)

    def _contrast(self, first: Index, second: Index) -> Array:
        """(finals, n): how much slower choices are than others, in standard errors."""
        finals, buckets = self.scores.shape[:2]
        where = (np.arange(finals)[:, None, None], np.arange(buckets), first, second)
        return _ratio(self.centres[where].sum(-1), self.variances[where].sum(-1))

    def _within(self, best: Index) -> Array:
        """(finals, buckets, candidates): how much slower each is than the best of its class."""
        finals, buckets, candidates = self.scores.shape
        mine = best[:, list(self.layout.classes)].swapaxes(1, 2)
        rows = np.arange(finals)[:, None, None], np.arange(buckets)[:, None]
        where = (*rows, np.arange(candidates), mine)
        return _ratio(self.centres[where], self.variances[where])


@lru_cache(maxsize=64)
def critical(
    layout: Layout, rounds: tuple[int, ...], scales: tuple[float, ...], rate: float
) -> float:
    """What the largest statistic among equal contenders exceeds with probability `rate`.

    rounds, scales: of each case; scales say how noisy cases are, compared with each other.
    """
    rng = np.random.default_rng(0)
    largest = []
    for _ in range(DRAWS // CHUNK):
        shapes = ((CHUNK, len(layout.classes), n) for n in rounds)
        drawn = zip(scales, shapes, strict=True)
        pairs = [compare(scale * rng.standard_normal(shape)) for scale, shape in drawn]
        centres, variances = (np.stack(part, axis=1) for part in zip(*pairs, strict=True))
        verdicts = Comparisons(centres, variances, layout).judge(np.inf, np.zeros(CHUNK))
        largest.append(verdicts.largest)
    return float(np.quantile(np.concatenate(largest), 1 - rate))


def _ratio(centres: Array, variances: Array) -> Array:
    statistic: Array = centres / np.maximum(np.sqrt(variances), NOTHING)
    return statistic
