"""Sittings: paired rounds of the same contenders, again and again in a new process.

Where its memory happens to lie gives a contender a small advantage that lasts as long as its
process, and that no number of rounds averages out. A new process deals it anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

from tuning.bench.statistics import rotated
from tuning.sweep.configuration import Configuration
from tuning.sweep.crew import Crew, Worker
from tuning.sweep.problem import Case
from tuning.sweep.rows import OK
from tuning.sweep.timing import Lost, race
from tuning.sweep.trials import Ended, Precision, prepare, sample

SITTINGS = 8
LEAST = 5  # rounds of a sitting

Rounds = dict[str, dict[str, tuple[float, ...]]]  # contender -> case -> seconds of a call
Resources = dict[str, Mapping[str, float]]
Refuse = Callable[[str, Case, float], None]


@dataclass(frozen=True)
class Sat:
    """What all sittings gave: round i of all contenders ran side by side."""

    rounds: Rounds
    resources: Resources


def sit(
    crew: Crew,
    cases: Sequence[Case],
    runs: Mapping[str, Configuration],
    may_spill: Sequence[str],
    how: Precision,
    sittings: int,
    refuse: Refuse = lambda who, case, seconds: None,
    tell: Callable[[str], None] = lambda text: None,
) -> Sat:
    """Rounds of `runs` by key on every case; raises `Ended` of one that cannot go on.

    may_spill: keys of contenders whose registers may spill. how: of all sittings together. refuse:
    is shown the median of every contender, case and sitting.
    """
    once = replace(
        how,
        seconds=how.seconds / sittings,
        least=max(LEAST, math.ceil(how.least / sittings)),
        most=max(LEAST, math.ceil(how.most / sittings)),
    )
    rounds: Rounds = {key: {case.name: () for case in cases} for key in runs}
    resources: Resources = {}
    for first in range(0, sittings, len(crew.workers)):
        some = range(first, min(sittings, first + len(crew.workers)))
        task = partial(_prepare_all, runs=runs, may_spill=may_spill)
        for worker, sitting, taken in crew.together(some, task):
            resources |= taken
            for case in cases:
                tell(f"sitting {sitting + 1} of {sittings}, {len(runs)} contenders: {case.name}")
                for key, seconds in _raced(worker, runs, case, once).items():
                    refuse(key, case, median(seconds))
                    rounds[key][case.name] += tuple(seconds)
            worker.close()
    return Sat(rounds, resources)


def _prepare_all(
    worker: Worker, sitting: int, runs: Mapping[str, Configuration], may_spill: Sequence[str]
) -> Resources:
    """All contenders in a new process of the worker, each sitting in another order."""
    worker.close()
    keys, taken = list(runs), Resources()
    for i in rotated(len(keys), sitting):
        reply = prepare(worker, runs[keys[i]], keys[i], may_spill=keys[i] in may_spill)
        if reply["status"] != OK:
            raise Ended(keys[i], reply["status"], reply["message"])
        taken[keys[i]] = reply["resources"]
    return taken


def _raced(
    worker: Worker, runs: Mapping[str, Configuration], case: Case, how: Precision
) -> dict[str, list[float]]:
    return race(
        {key: partial(sample, worker, key, case.name) for key in runs},
        target=how.target, width=how.width, least=how.least, most=how.most, seconds=how.seconds,
        on_lost=_lost,
    )  # fmt: skip


def _lost(key: str, lost: Lost) -> None:
    raise Ended(key, "impossible", lost.reason)
