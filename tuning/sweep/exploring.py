"""Exploring one question: trials until the budget is spent, finals, and the decision."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
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

    baseline, default: what the library chooses without promoted rows. finals:
    configurations beside the default that go into the finals; 0 leaves them out.
    """

    space: Space
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
        others = [v for v in self.space.variants if v.name != self.baseline.name]
        return [*others, self.baseline]


def told(trials: Sequence[Trial]) -> str:
    """How many trials ended how, in words."""
    counts = Counter(trial.status for trial in trials)
    return ", ".join(f"{n} {status}" for status, n in counts.most_common())


@dataclass
class Exploration:
    """One question on its way. trials: those of earlier runs, which are not made again, and on."""

    crew: Crew
    course: Course
    plan: Plan
    database: Database
    bar: Progress
    trials: list[Trial]

    def run(self) -> Decided | None:
        """Trials and finals, each row written at once; None where nothing was decided."""
        self._take_rates()
        default = self._default()
        self.course.default |= {case.case: case.median for case in default.cases}
        if default not in self.trials:
            self.trials.append(default)
        self._search()
        if not self.plan.finals:
            self.bar.say(f"{told(self.trials)}; no finals, so nothing is decided")
            return None
        return self._decide()

    def _take_rates(self) -> None:
        """Rates of the machine now; the best that were seen count."""
        rates = self.course.rates
        for name, rate in self.crew.workers[0].ask(START_SECONDS, do="machine")["rates"].items():
            rates[name] = max(rate, rates.get(name, 0.0))

    def _default(self) -> Trial:
        """The trial of the default, which others are compared with; made unless it is known."""
        wanted = self.plan.default
        known = [t for t in self.trials if t.configuration == wanted and t.status == OK]
        if known:
            return known[-1]
        self.bar.say(f"the default: {wanted.key}")
        worker = self.crew.workers[0]
        prepared = prepare(worker, wanted, may_spill=True)
        made = run_trial(worker, self.course, wanted, prepared, lambda step, score: False)
        self.database.append(made)
        self.bar.row(made)
        if made.status != OK:
            raise ChildFailed(
                f"the default {wanted.key} of {self.course.question.key} is {made.status}: "
                f"{made.message}; there is nothing to compare with"
            )
        return made

    def _search(self) -> None:
        """Trials until the budget is spent or everything was tried; known ones count as trials."""
        plan, start = self.plan, time.monotonic()
        search = Search(
            plan.space, plan.sampler, plan.seed, self.trials, plan.pruner, default=plan.default
        )
        while not plan.budget.spent(len(self.trials), time.monotonic() - start):
            self.bar.at(plan.budget, len(self.trials), time.monotonic() - start)
            asked = self._asked(search)
            if not asked:
                self.bar.say("every configuration was tried")
                return
            for worker, configuration, prepared in self.crew.together(asked, prepare):
                prune = partial(search.should_prune, configuration)
                made = run_trial(worker, self.course, configuration, prepared, prune)
                self.database.append(made)
                search.tell(made)
                self.trials.append(made)
                self.bar.row(made)
                self.bar.at(plan.budget, len(self.trials), time.monotonic() - start)

    def _asked(self, search: Search) -> list[Configuration]:
        """One configuration a worker, as far as the budget and the space go."""
        asked: list[Configuration] = []
        most = self.plan.budget.trials
        for _ in self.crew.workers:
            room = most is None or len(self.trials) + len(asked) < most
            configuration = search.ask() if room else None
            if configuration is None:
                break
            asked.append(configuration)
        return asked

    def _decide(self) -> Decided | None:
        """Finals, and what they say."""
        course, plan = self.course, self.plan
        n_qs = sorted({case.shape.n_q for case in course.cases})
        variants = {v.name: v for v in plan.used}
        best = finalists(self.trials, variants, n_qs, plan.finals)
        self._take_rates()
        how = (plan.final_precision, plan.sittings, self.bar.say)
        rows = run_finals(self.crew, course, best, plan.default, variants, *how)
        if rows is None:
            self.bar.say("no decision: the default did not go through the finals")
            return None
        self.database.append(rows)
        made = decided(rows, course, plan)
        self.database.append(made)
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
