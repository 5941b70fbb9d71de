"""What a picture of a question shows, apart from drawing it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tuning.report.contest import CONTROL, Contest, Standing, contest
from tuning.report.findings import counted
from tuning.report.history import History
from tuning.sweep.configuration import Configuration
from tuning.sweep.decision import Interval
from tuning.sweep.rows import FAILED, OK, PRUNED
from tuning.sweep.summary import times

DEFAULT_LABEL, CONTROL_LABEL = "default", "default once more"
NOTHING = object()  # the value of a tunable that the default does not have
SLOWEST = 4.0  # times the default's time: what is slower is told of, and not drawn to scale


@dataclass(frozen=True)
class Point:
    """A trial that has a score. number: of the trial, from 1 on."""

    number: int
    score: float
    variant: str
    pruned: bool


@dataclass(frozen=True)
class Course:
    """Trials in their order. variants: those of points, in the order in which they come.

    points: scores up to SLOWEST; slow: those above, which would flatten the others. failed:
    status -> numbers. best: (number, score) of each new best.
    """

    title: str
    trials: int
    variants: tuple[str, ...]
    points: tuple[Point, ...]
    slow: tuple[Point, ...]
    failed: Mapping[str, tuple[int, ...]]
    best: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Rung:
    """A contender: its time over the default's by case, and whether it is in the tie set there."""

    label: str
    cases: Mapping[str, Interval]
    marks: Mapping[str, str]


@dataclass(frozen=True)
class Panels:
    """Both panels of a question. verdict: the decision. rungs: from the top down."""

    title: str
    verdict: str
    course: Course
    rungs: tuple[Rung, ...]


def panels(history: History) -> Panels:
    """Of one question."""
    found = contest(history)
    rungs = () if found is None else tuple(_rung(one, found) for one in found.standings)
    return Panels(history.question.key, verdict(history), course(history), rungs)


def course(history: History) -> Course:
    """The left panel."""
    numbered = list(enumerate(history.trials, 1))
    best: list[tuple[int, float]] = []
    for number, trial in numbered:
        if trial.status == OK and trial.score and (not best or trial.score < best[-1][1]):
            best.append((number, trial.score))
    points = [
        Point(number, trial.score, trial.configuration.variant, trial.status == PRUNED)
        for number, trial in numbered
        if trial.score
    ]
    counts = ", ".join(f"{n} {status}" for status, n in counted(history).items())
    return Course(
        title=f"{len(numbered)} trials: {counts}" if numbered else "no trials",
        trials=len(numbered),
        variants=tuple(dict.fromkeys(p.variant for p in points)),
        points=tuple(p for p in points if p.score <= SLOWEST),
        slow=tuple(p for p in points if p.score > SLOWEST),
        failed={
            status: numbers
            for status in FAILED
            if (numbers := tuple(n for n, trial in numbered if trial.status == status))
        },
        best=tuple(best),
    )


def short(configuration: Configuration, default: Configuration) -> str:
    """What differs from the default: the variant, and values that it lacks or has otherwise."""
    own = default.config
    values = [f"{n}={v}" for n, v in configuration.values if own.get(n, NOTHING) != v]
    other = [configuration.variant] if configuration.variant != default.variant else []
    return " ".join(other + values) or DEFAULT_LABEL


def verdict(history: History) -> str:
    """What was decided, in two lines or one."""
    if history.decided is None:
        return "nothing was decided"
    found, default = history.decided.decision, history.default
    if found.default_ties:
        return "the default is in the tie set: it stays"
    named: dict[str, list[str]] = {}
    for n_q, one in history.decided.chosen.items():
        named.setdefault(one.key if default is None else short(one, default), []).append(str(n_q))
    many = len(named) > 1
    chosen = (f"{k} (n_q {', '.join(n_qs)})" if many else k for k, n_qs in named.items())
    return f"chosen: {'; '.join(chosen)}\n{times(found.speedup)}"


def _rung(one: Standing, found: Contest) -> Rung:
    default = next(s.configuration for s in found.standings if s.key == found.default)
    if one.key == found.control:
        label = CONTROL_LABEL
    elif one.configuration is None or default is None:
        label = one.key
    else:
        label = short(one.configuration, default)
    return Rung(label, one.cases, one.marks or dict.fromkeys(one.cases, CONTROL))
