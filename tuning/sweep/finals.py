"""Finals: the best configurations, the default and its twin, side by side on every case."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from minfer.ops import Variant
from tuning.sweep.configuration import Configuration
from tuning.sweep.crew import Crew
from tuning.sweep.decision import Contender
from tuning.sweep.rows import OK, Finals, Trial
from tuning.sweep.sittings import Sat, sit
from tuning.sweep.trials import Course, Ended, Precision

CONTROL = "the default once more"
NEAR = 1.25  # finalists are at most this much slower than the best trial
RESOURCES = ("shared", "registers")  # fewer are better, in this order

Tell = Callable[[str], None]


def finalists(
    trials: Sequence[Trial], variants: Mapping[str, Variant], n_qs: Sequence[int], count: int
) -> list[Configuration]:
    """At most `count` configurations: the best, the best of each n_q, then by score.

    Whatever is best for one n_q can be chosen for it only with its numeric class, so all n_q of
    the class of the best come first.
    """
    done = sorted((t for t in trials if t.status == OK and t.score), key=lambda t: t.score or 0)
    done = [t for t in done if (t.score or 0) <= NEAR * (done[0].score or 0)]
    if not done:
        return []
    numeric = {t.configuration: t.configuration.numeric_key(_of(t, variants)) for t in done}
    best = numeric[done[0].configuration]
    same = [t for t in done if numeric[t.configuration] == best]
    chosen = [done[0].configuration]
    chosen += [min(same, key=partial(_seconds, n_q=n)).configuration for n in n_qs]
    chosen += [t.configuration for t in done]
    return list(dict.fromkeys(chosen))[:count]


def _of(trial: Trial, variants: Mapping[str, Variant]) -> Variant:
    return variants[trial.configuration.variant]


def _seconds(trial: Trial, n_q: int) -> float:
    """Of the trial's cases with that n_q, relative to nothing: compared within a class only."""
    product = 1.0
    for case in trial.cases:
        product *= case.median if case.n_q == n_q else 1.0
    return product


def run_finals(
    crew: Crew,
    course: Course,
    asked: Sequence[Configuration],
    default: Configuration,
    variants: Mapping[str, Variant],
    how: Precision,
    sittings: int,
    tell: Tell,
) -> Finals | None:
    """Rounds of `asked`, the default and its twin; None where the default or the twin is lost.

    A contender that cannot go on is left out, and the others begin anew.
    """
    runs = {c.key: c for c in (*asked, default)} | {CONTROL: default}
    allowed = (default.key, CONTROL)
    while True:
        try:
            sat = sit(
                crew, course.cases, runs, allowed, how, sittings, course.refuse_impossible, tell
            )
            break
        except Ended as lost:
            tell(f"{lost.who} left the finals: {lost}")
            if lost.who in allowed:
                return None
            del runs[lost.who]
    contenders = tuple(
        Contender(key, c.numeric_key(variants[c.variant]), _resources(sat, key), sat.rounds[key])
        for key, c in runs.items()
    )
    return Finals(
        session=course.session,
        question=course.question,
        sources={c.variant: course.sources[c.variant] for c in runs.values()},
        contenders=contenders,
        default=default.key,
        control=CONTROL,
        configurations=dict(runs),
        cases={case.name: case.shape.n_q for case in course.cases},
    )


def _resources(sat: Sat, key: str) -> tuple[float, ...]:
    return tuple(float(sat.resources[key].get(name, 0)) for name in RESOURCES)
