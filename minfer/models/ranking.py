"""The order of scores, as far as it is needed.

top-k, top-p and min-p each keep a leading part of the tokens in falling order of score, so together
they are one number: how many are kept. A vocabulary of 262144 is never sorted as a whole for it.

In all functions `scores` is float64 [n_vocab], -inf for a token that is banned, and of equal scores
the lowest id comes first.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Doubles: TypeAlias = NDArray[np.float64]
Ids: TypeAlias = NDArray[np.intp]

GROUP = 64  # scores that share a maximum
FIRST = 1024  # how many of the highest are looked at first
MORE = 8  # times as many are looked at then


def highest(scores: Doubles, size: int) -> Ids:
    """Ids of the `size` highest scores, in falling order."""
    n = len(scores)
    if size < n:
        peaks = scores[: n - n % GROUP].reshape(GROUP, -1).max(axis=0)
        # Each of `size` groups has a score that reaches the lowest of their maxima.
        pool = peaks if size <= len(peaks) else scores
        floor = np.partition(pool, len(pool) - size)[len(pool) - size]
        ids = np.flatnonzero(scores >= floor)
    else:
        ids = np.arange(n)
    return ids[np.argsort(-scores[ids], kind="stable")[:size]]


def kept(scores: Doubles, n_allowed: int, top_k: int, top_p: float, min_p: float) -> int:
    """How many of the highest stay, at least one.

    n_allowed: how many scores are above -inf. top_k: at most so many, 0 all. top_p: the fewest
    whose probabilities, among the top_k, add up to it. min_p: those that have this fraction of the
    highest probability.
    """
    size = among = min(top_k or n_allowed, n_allowed)
    if top_p < 1:
        _, running, total = _leading(scores, among, 1.0, top_p)
        size = min(among, int(np.searchsorted(running, top_p * total)) + 1)
    if min_p > 0:
        size = min(size, int(np.count_nonzero(scores >= scores.max() + math.log(min_p))))
    return size


def draw(scores: Doubles, size: int, temperature: float, point: float) -> int:
    """The id among the `size` highest at whose probability the running sum passes `point`.

    Probabilities are the softmax of those scores / temperature; point: in [0, 1).
    """
    ids, running, total = _leading(scores, size, temperature, point)
    at = int(np.searchsorted(running, point * total, side="right"))
    # Rounding may put the point at the very end, where probabilities of 0 may stand.
    return int(ids[min(at, int(np.searchsorted(running, running[-1])))])


def weights(scores: Doubles, best: float, temperature: float) -> Doubles:
    """exp((score - best) / temperature): probabilities but for their common factor."""
    with np.errstate(over="ignore"):  # a tiny temperature: what is below the best has none
        found: Doubles = np.exp((scores - best) / temperature)
    return found


def _leading(
    scores: Doubles, size: int, temperature: float, share: float
) -> tuple[Ids, Doubles, float]:
    """As many of the `size` highest as hold `share` of their weight, or more.

    Returns their ids, the running sums of their weights, and the weight of all `size`.
    """
    best, part, total = float(scores.max()), size, None
    if size > FIRST and size == np.count_nonzero(scores > -np.inf):
        part, total = FIRST, float(weights(scores, best, temperature).sum())
    while True:
        ids = highest(scores, part)
        running = np.cumsum(weights(scores[ids], best, temperature))
        if total is None:
            return ids, running, float(running[-1])
        if part == size or running[-1] > share * total:
            return ids, running, total
        part = min(size, MORE * part)
