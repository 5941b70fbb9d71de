"""What trials say: the best, what failed, and which tunables matter."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tuning.report.history import History
from tuning.sweep.configuration import Configuration
from tuning.sweep.rows import FAILED, OK, STATUSES, CaseTimes, Trial

ENOUGH = 5  # trials that were timed on all cases, before a variant's tunables are compared


@dataclass(frozen=True)
class CaseResult:
    """Seconds of a call with their interval. of_floor: the least that it can take, over them."""

    case: str
    n_q: int
    low: float
    median: float
    high: float
    floor: float | None
    of_floor: float | None


@dataclass(frozen=True)
class Result:
    """A configuration that was timed on all cases. score: time over that of the default."""

    key: str
    configuration: Configuration
    score: float
    cases: tuple[CaseResult, ...]
    resources: Mapping[str, float]


@dataclass(frozen=True)
class Failure:
    """Trials that failed alike. message: of the first, and configuration: its key."""

    status: str
    message: str
    trials: int
    configuration: str


@dataclass(frozen=True)
class Value:
    """One value of a tunable. score: the best with it, None where none was timed on all cases.

    ok: how many were; trials: how many were tried.
    """

    value: Any
    score: float | None
    ok: int
    trials: int


@dataclass(frozen=True)
class Knob:
    """A tunable of a variant. effect: the best score of its worst value over that of its best."""

    variant: str
    name: str
    effect: float
    values: tuple[Value, ...]


def counted(history: History) -> dict[str, int]:
    """Trials by status, good ones first."""
    found = Counter(t.status for t in history.trials)
    return {status: found[status] for status in STATUSES if found[status]}


def best(history: History, count: int) -> list[Result]:
    """At most `count` configurations, fastest first."""
    done = sorted(history.done, key=_score)
    return [
        Result(
            key=t.configuration.key,
            configuration=t.configuration,
            score=_score(t),
            cases=tuple(_result(times) for times in t.cases),
            resources=dict(t.resources),
        )
        for t in done[:count]
    ]


def failures(history: History) -> list[Failure]:
    """By status and message, numbers in messages aside; the most frequent first."""
    groups: dict[tuple[str, str], list[Trial]] = {}
    for trial in history.trials:
        if trial.status in FAILED:
            alike = re.sub(r"\d+", "0", trial.message)
            groups.setdefault((trial.status, alike), []).append(trial)
    found = [
        Failure(status, group[0].message, len(group), group[0].configuration.key)
        for (status, _), group in groups.items()
    ]
    return sorted(found, key=lambda failure: -failure.trials)


def knobs(history: History) -> list[Knob]:
    """Tunables of every variant with enough trials, of each what moves the score most first."""
    found: list[Knob] = []
    for variant in dict.fromkeys(t.configuration.variant for t in history.trials):
        own = [t for t in history.trials if t.configuration.variant == variant]
        if sum(t.status == OK for t in own) >= ENOUGH:
            made = [_knob(variant, name, own) for name, _ in own[0].configuration.values]
            moving = [knob for knob in made if len(knob.values) > 1]
            found += sorted(moving, key=lambda knob: -knob.effect)
    return found


def _knob(variant: str, name: str, trials: Sequence[Trial]) -> Knob:
    by_value: dict[str, list[Trial]] = {}  # by text: 1 and True are two values
    for trial in trials:
        by_value.setdefault(repr(trial.configuration.config.get(name)), []).append(trial)
    values = [_value(group[0].configuration.config.get(name), group) for group in by_value.values()]
    scores = [value.score for value in values if value.score is not None]
    return Knob(variant, name, max(scores) / min(scores), tuple(sorted(values, key=_order)))


def _value(value: Any, trials: Sequence[Trial]) -> Value:
    scores = [_score(t) for t in trials if t.status == OK]
    return Value(value, min(scores, default=None), len(scores), len(trials))


def _order(value: Value) -> tuple[bool, Any]:
    """Numbers by size, then the rest by text."""
    number = isinstance(value.value, int | float)
    return not number, value.value if number else str(value.value)


def _score(trial: Trial) -> float:
    assert trial.score is not None  # a trial that is ok has one
    return trial.score


def _result(times: CaseTimes) -> CaseResult:
    of_floor = None if times.floor is None else times.floor / times.median
    return CaseResult(
        times.case, times.n_q, times.low, times.median, times.high, times.floor, of_floor
    )
