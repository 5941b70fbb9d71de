"""What finals say of each contender: its time over that of the default, by case."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tuning.report.history import History
from tuning.sweep.configuration import Configuration
from tuning.sweep.decision import Decision, Interval
from tuning.sweep.evidence import Evidence
from tuning.sweep.paired import TRIM, Array, student
from tuning.sweep.rows import Finals

LEVEL = 0.95  # of each interval by itself; a decision's intervals hold together and are wider
CHOSEN, TIED, BEHIND, CONTROL = "chosen", "tied", "behind", "control"


@dataclass(frozen=True)
class Standing:
    """A contender. ratio: its time over the default's, geometric mean over cases; 1 for that.

    marks: by case, chosen, tied (in the tie set), behind, or control; empty without a decision.
    """

    key: str
    configuration: Configuration | None
    ratio: Interval
    cases: Mapping[str, Interval]
    marks: Mapping[str, str]


@dataclass(frozen=True)
class Contest:
    """Finals, the default first, then the fastest, and the control last. rounds: by case."""

    session: str
    date: str
    stale: bool
    default: str
    control: str
    rounds: Mapping[str, int]
    standings: tuple[Standing, ...]


def contest(history: History) -> Contest | None:
    """Of the last finals; None where there were none, or their rounds cannot be compared."""
    rows = history.finals
    if rows is None or not _comparable(rows):
        return None
    decision = None if history.decided is None else history.decided.decision
    made = _standings(rows, decision)
    place = {rows.default: 0, rows.control: 2}
    ordered = sorted(made, key=lambda one: (place.get(one.key, 1), one.ratio.mid))
    return Contest(
        session=rows.session,
        date=history.dates[rows.session],
        stale=history.stale,
        default=rows.default,
        control=rows.control,
        rounds={case: len(rows.contenders[0].rounds[case]) for case in rows.cases},
        standings=tuple(ordered),
    )


def _comparable(rows: Finals) -> bool:
    """Whether the default is there, and all have the same rounds of every case, two at least."""
    if rows.default not in {c.key for c in rows.contenders}:
        return False
    for case in rows.cases:
        rounds = [c.rounds.get(case, ()) for c in rows.contenders]
        if len({len(own) for own in rounds}) > 1 or len(rounds[0]) < 2:
            return False
        if min(map(min, rounds)) <= 0:
            return False
    return bool(rows.cases)


def _standings(rows: Finals, decision: Decision | None) -> list[Standing]:
    one = [c.key for c in rows.contenders].index(rows.default)
    evidence = Evidence.of(
        [np.log([c.rounds[name] for c in rows.contenders]) for name in rows.cases]
    )
    centres = evidence.centres[0, :, :, one].T  # (contenders, cases)
    halves = np.sqrt(evidence.variances[0, :, :, one].T) * [_student(n) for n in evidence.rounds]
    return [
        Standing(
            key=contender.key,
            configuration=rows.configurations.get(contender.key),
            ratio=_interval(centre.mean(), math.hypot(*half) / len(rows.cases)),
            cases={
                case: _interval(mid, wide)
                for case, mid, wide in zip(rows.cases, centre, half, strict=True)
            },
            marks={} if decision is None else _marks(i, rows, decision, centres),
        )
        for i, (contender, centre, half) in enumerate(
            zip(rows.contenders, centres, halves, strict=True)
        )
    ]


def _marks(i: int, rows: Finals, decision: Decision, centres: Array) -> dict[str, str]:
    """By case. Of another class that is tied, its fastest of each n_q are: they were compared."""
    me = rows.contenders[i]
    if me.key == rows.control:
        return dict.fromkeys(rows.cases, CONTROL)
    marks = {}
    for case, n_q in rows.cases.items():
        bucket = [other == n_q for other in rows.cases.values()]
        scores = centres[:, bucket].mean(axis=1)
        rivals = [k for k, c in enumerate(rows.contenders) if c.numeric == me.numeric]
        if decision.free.get(n_q) == me.key:
            marks[case] = CHOSEN
        elif me.numeric == decision.numeric:
            marks[case] = TIED if me.key in decision.free_ties.get(n_q, ()) else BEHIND
        else:
            tied = me.numeric in decision.ties and min(rivals, key=scores.__getitem__) == i
            marks[case] = TIED if tied else BEHIND
    return marks


def _student(rounds: int) -> float:
    """Standard errors on either side of a trimmed mean."""
    freedom = rounds - 2 * int(TRIM * rounds) - 1
    return student((1 + LEVEL) / 2, freedom)


def _interval(mid: float, half: float) -> Interval:
    return Interval(*(float(math.exp(x)) for x in (mid - half, mid, mid + half)))
