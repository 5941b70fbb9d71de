"""Decisions from the rounds of finals: a winner where there is one, a tie where there is none.

Scores are mean logarithms over cases. A numeric class has the score of its best free
configurations, chosen bucket by bucket. Whatever the interval of its distance from the best does
not set apart is tied with it. All intervals hold together at the stated rate (`ties.critical`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tuning.sweep.evidence import Evidence
from tuning.sweep.paired import Array
from tuning.sweep.ties import Layout, Verdicts, critical


@dataclass(frozen=True)
class Contender:
    """A configuration in the finals.

    resources compare in order, fewer first. rounds: by case, seconds a call in each round; round i
    of all contenders ran side by side.
    """

    key: str
    numeric: str
    resources: tuple[float, ...]
    rounds: Mapping[str, tuple[float, ...]]


@dataclass(frozen=True)
class Interval:
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


def decide(
    contenders: Sequence[Contender],
    *,
    default: str,
    control: str,
    buckets: Mapping[str, int],
    rate: float = 0.05,
    seed: int = 0,
) -> Decision:
    """The decision of finals with a default and a control, which is the default timed once more.

    buckets: n_q of each case. rate: of false winners among equals. ValueError: default or control
    is missing, contenders lack cases or differ in rounds, a case has less than two rounds, or a
    time is not a positive number.
    """
    ordered = _in_order(contenders, default, control)
    candidates, cases = ordered[:-1], tuple(buckets)
    names = tuple(dict.fromkeys(c.numeric for c in candidates))
    sizes = tuple(dict.fromkeys(buckets.values()))
    layout = Layout(
        tuple(names.index(c.numeric) for c in candidates),
        tuple(sizes.index(n_q) for n_q in buckets.values()),
    )
    evidence = Evidence.of([_logs(ordered, case) for case in cases])
    bound = critical(layout, evidence.rounds, evidence.scales, rate)
    verdicts = evidence.judge(layout, bound)
    again = evidence.rerun(seed).judge(layout, bound)
    chosen = verdicts.chosen[0]
    where = (np.arange(len(cases)), 0, chosen[list(layout.buckets)])
    mids, errors = evidence.centres[0][where], np.sqrt(evidence.variances[0][where])
    of_class = layout.classes[chosen[0]]
    tied = set(np.flatnonzero(verdicts.tied[0]).tolist()) | {of_class}
    return Decision(
        numeric=names[of_class],
        free={n_q: candidates[k].key for n_q, k in zip(sizes, chosen, strict=True)},
        ties=tuple(name for a, name in enumerate(names) if a in tied),
        free_ties=_free_ties(candidates, sizes, verdicts),
        speedup=_interval(mids.mean(), bound * math.hypot(*errors) / len(cases)),
        speedups={
            case: _interval(mid, bound * error)
            for case, mid, error in zip(cases, mids, errors, strict=True)
        },
        noise=math.expm1(evidence.noise[0]),
        rerun_differs=float((again.chosen != chosen).any(axis=-1).mean()),
        rate=rate,
        default_ties=not chosen.any(),
    )


def _in_order(contenders: Sequence[Contender], default: str, control: str) -> list[Contender]:
    """The default, the others by resources and name, and the control."""
    by_key = {c.key: c for c in contenders}
    if len(by_key) != len(contenders):
        raise ValueError("two contenders have the same key")
    if missing := {default, control} - by_key.keys():
        raise ValueError(f"{', '.join(sorted(missing))} is not among the contenders")
    first, last = by_key.pop(default), by_key.pop(control)
    return [first, *sorted(by_key.values(), key=lambda c: (c.resources, c.key)), last]


def _logs(contenders: Sequence[Contender], case: str) -> Array:
    """(contenders, rounds): logarithms of the times of a case."""
    rows = [c.rounds.get(case, ()) for c in contenders]
    if len({len(row) for row in rows}) != 1 or len(rows[0]) < 2:
        raise ValueError(f"{case}: contenders need the same rounds, two at least")
    times = np.array(rows, dtype=float)
    if not (np.isfinite(times) & (times > 0)).all():
        raise ValueError(f"{case}: a time is not a positive number")
    logs: Array = np.log(times)
    return logs


def _free_ties(
    candidates: Sequence[Contender], sizes: Sequence[int], verdicts: Verdicts
) -> dict[int, tuple[str, ...]]:
    numeric = candidates[verdicts.chosen[0, 0]].numeric
    found = {}
    for q, n_q in enumerate(sizes):
        tied = np.flatnonzero(verdicts.free_tied[0, q])
        keep = sorted({*tied.tolist(), int(verdicts.chosen[0, q])})
        found[n_q] = tuple(candidates[k].key for k in keep if candidates[k].numeric == numeric)
    return found


def _interval(mid: float, half: float) -> Interval:
    return Interval(*(math.exp(x) for x in (mid - half, mid, mid + half)))
