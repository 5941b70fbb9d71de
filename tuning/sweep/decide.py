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
from numpy.typing import NDArray

from tuning.sweep.decision import Contender, Decision, Interval
from tuning.sweep.evidence import Evidence
from tuning.sweep.paired import Array
from tuning.sweep.ties import Layout, Verdicts, critical


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
    candidates, cases = ordered[:-1], tuple(sorted(buckets))
    names = tuple(dict.fromkeys(c.numeric for c in candidates))
    sizes = tuple(dict.fromkeys(buckets[case] for case in cases))
    layout = Layout(
        tuple(names.index(c.numeric) for c in candidates),
        tuple(sizes.index(buckets[case]) for case in cases),
    )
    evidence = Evidence.of([_logs(ordered, case) for case in cases])
    bound = critical(layout, evidence.rounds, evidence.scales, rate)
    verdicts = evidence.judge(layout, bound)
    again = evidence.rerun(seed).judge(layout, bound)
    chosen = verdicts.chosen[0]
    mean, by_case = _speedups(evidence, chosen[list(layout.buckets)], bound)
    of_class = layout.classes[chosen[0]]
    tied = set(np.flatnonzero(verdicts.tied[0]).tolist()) | {of_class}
    return Decision(
        numeric=names[of_class],
        free={n_q: candidates[k].key for n_q, k in zip(sizes, chosen, strict=True)},
        ties=tuple(name for a, name in enumerate(names) if a in tied),
        free_ties=_free_ties(candidates, sizes, verdicts),
        speedup=mean,
        speedups=dict(zip(cases, by_case, strict=True)),
        noise=math.expm1(evidence.noise[0]),
        rerun_differs=float((again.chosen != chosen).any(axis=-1).mean()),
        rate=rate,
        default_ties=not chosen.any(),
    )


@dataclass(frozen=True)
class Beside:
    """A contender beside the default: time of the default over its own, and noise as `Decision`."""

    speedup: Interval
    speedups: Mapping[str, Interval]
    noise: float


def beside_default(
    contender: Contender, default: Contender, control: Contender, rate: float = 0.05
) -> Beside:
    """How one contender does in its cases, without a choice; its intervals hold together."""
    ordered = _in_order([contender, default, control], default.key, control.key)
    cases = tuple(default.rounds)
    layout = Layout((0, 1), tuple(range(len(cases))))
    evidence = Evidence.of([_logs(ordered, case) for case in cases])
    bound = critical(layout, evidence.rounds, evidence.scales, rate)
    mean, by_case = _speedups(evidence, np.ones(len(cases), np.intp), bound)
    return Beside(mean, dict(zip(cases, by_case, strict=True)), math.expm1(evidence.noise[0]))


def _speedups(
    evidence: Evidence, picked: NDArray[np.intp], bound: float
) -> tuple[Interval, list[Interval]]:
    """The default's time over that of the candidate picked for each case: their mean, and each."""
    where = (np.arange(len(picked)), 0, picked)
    mids, errors = evidence.centres[0][where], np.sqrt(evidence.variances[0][where])
    mean = _interval(mids.mean(), bound * math.hypot(*errors) / len(picked))
    return mean, [_interval(mid, bound * error) for mid, error in zip(mids, errors, strict=True)]


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
