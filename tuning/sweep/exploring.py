"""Exploring one question: trials until the budget is spent, finals, and the decision."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from minfer.ops import Variant
from tuning.bench.protocol import ChildFailed
from tuning.sweep.budget import Budget
from tuning.sweep.configuration import Configuration
from tuning.sweep.crew import START_SECONDS, Crew
from tuning.sweep.database import Database
from tuning.sweep.decide import decide
from tuning.sweep.finals import finalists, run_finals
from tuning.sweep.progress import Progress
from tuning.sweep.rows import OK, Decided, Finals, Trial
from tuning.sweep.search import Search
from tuning.sweep.space import Space
from tuning.sweep.trials import Course, Precision, prepare, run_trial


@dataclass(frozen=True)
class Plan:
    """How a question is explored.

    baseline, default: what the library chooses by itself, of promoted rows aside. finals:
    configurations beside the default that go into the finals; 0 leaves them out.
    """

    variants: Mapping[str, Variant]
    baseline: Variant
    default: Configuration
    sampler: str
    pruner: str
    seed: int
    budget: Budget
    finals: int
    final_precision: Precision
    sittings: int

    @property
    def used(self) -> list[Variant]:
        """All variants that run."""
        others = [v for name, v in self.variants.items() if name != self.baseline.name]
        return [*others, self.baseline]


def explore(
    crew: Crew,
    course: Course,
    plan: Plan,
    known: Sequence[Trial],
    database: Database,
    bar: Progress,
) -> Decided | None:
    """All trials and the finals, each row written at once; None where nothing was decided.

    known: trials of earlier runs, which are not made again.
    """
    space = Space(list(plan.variants.values()))
    trials = list(known)
    _take_rates(crew, course)
    default = _default(crew, course, plan, trials, database, bar)
    course.default |= {case.case: case.median for case in default.cases}
    if default not in trials:
        trials.append(default)
    search = Search(space, plan.sampler, plan.seed, trials, plan.pruner, default=plan.default)
    _search(crew, course, plan, search, trials, database, bar)
    if not plan.finals:
        bar.say(f"{told(trials)}; no finals, so nothing is decided")
        return None
    return _decide(crew, course, plan, trials, database, bar)


def told(trials: Sequence[Trial]) -> str:
    """How many trials ended how, in words."""
    counts = Counter(trial.status for trial in trials)
    return ", ".join(f"{n} {status}" for status, n in counts.most_common())


def _take_rates(crew: Crew, course: Course) -> None:
    """Rates of the machine now; the best that were seen count."""
    reply = crew.workers[0].ask(START_SECONDS, do="machine")
    for name, rate in reply["rates"].items():
        course.rates[name] = max(rate, course.rates.get(name, 0.0))


def _default(
    crew: Crew,
    course: Course,
    plan: Plan,
    trials: Sequence[Trial],
    database: Database,
    bar: Progress,
) -> Trial:
    """The trial of the default, which all others are compared with; made unless it is known."""
    known = [t for t in trials if t.configuration == plan.default and t.status == OK]
    if known:
        return known[-1]
    bar.say(f"the default: {plan.default.key}")
    worker = crew.workers[0]
    prepared = prepare(worker, plan.default, may_spill=True)
    made = run_trial(worker, course, plan.default, prepared, lambda step, score: False)
    database.append(made)
    bar.row(made)
    if made.status != OK:
        raise ChildFailed(
            f"the default {plan.default.key} of {course.question.key} is {made.status}: "
            f"{made.message}; there is nothing to compare with"
        )
    return made


def _search(
    crew: Crew,
    course: Course,
    plan: Plan,
    search: Search,
    trials: list[Trial],
    database: Database,
    bar: Progress,
) -> None:
    """Trials until the budget is spent or everything was tried; known ones count as trials."""
    start = time.monotonic()
    while not plan.budget.spent(len(trials), time.monotonic() - start):
        bar.at(plan.budget, len(trials), time.monotonic() - start)
        asked: list[Configuration] = []
        for _ in crew.workers:
            room = plan.budget.trials is None or len(trials) + len(asked) < plan.budget.trials
            configuration = search.ask() if room else None
            if configuration is None:
                break
            asked.append(configuration)
        if not asked:
            bar.say("every configuration was tried")
            return
        for worker, configuration, prepared in crew.together(asked, prepare):
            prune = partial(search.should_prune, configuration)
            made = run_trial(worker, course, configuration, prepared, prune)
            database.append(made)
            search.tell(made)
            trials.append(made)
            bar.row(made)
            bar.at(plan.budget, len(trials), time.monotonic() - start)


def _decide(
    crew: Crew,
    course: Course,
    plan: Plan,
    trials: Sequence[Trial],
    database: Database,
    bar: Progress,
) -> Decided | None:
    """Finals, and what they say."""
    n_qs = sorted({case.shape.n_q for case in course.cases})
    variants = {v.name: v for v in plan.used}
    best = finalists(trials, variants, n_qs, plan.finals)
    _take_rates(crew, course)
    rows = run_finals(
        crew, course, best, plan.default, variants, plan.final_precision, plan.sittings, bar.say
    )
    if rows is None:
        bar.say("no decision: the default did not go through the finals")
        return None
    database.append(rows)
    made = decided(rows, course, plan)
    database.append(made)
    return made


def decided(rows: Finals, course: Course, plan: Plan) -> Decided:
    """The decision row of finals."""
    found = decide(
        rows.contenders, default=rows.default, control=rows.control, buckets=dict(rows.cases)
    )
    chosen = {n_q: rows.configurations[key] for n_q, key in found.free.items()}
    (variant,) = {configuration.variant for configuration in chosen.values()}
    return Decided(
        session=course.session,
        question=course.question,
        source=course.sources[variant],
        decision=found,
        chosen=chosen,
        evidence=evidence(rows, course),
    )


def evidence(rows: Finals, course: Course) -> dict[str, Any]:
    """What a reader needs to doubt or repeat it, beside the session's row."""
    return {
        "rounds": {case: len(rows.contenders[0].rounds[case]) for case in rows.cases},
        "contenders": [contender.key for contender in rows.contenders],
        "rates": dict(course.rates),
    }
