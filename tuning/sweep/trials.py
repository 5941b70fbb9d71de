"""One trial: a configuration prepared by a worker, then timed on every case of its question."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tuning.bench.protocol import ChildFailed, ChildHung, Message
from tuning.bench.statistics import floor, impossible
from tuning.sweep.configuration import Configuration, Question
from tuning.sweep.crew import Worker
from tuning.sweep.problem import Case
from tuning.sweep.rows import OK, PRUNED, CaseTimes, Trial
from tuning.sweep.timing import Measured, NotATime, measure

Prune = Callable[[int, float], bool]  # (cases timed so far, score so far)


class Ended(Exception):
    """A configuration that cannot go on: `who`, with the status of its trial; the text says why."""

    def __init__(self, who: str, status: str, why: str) -> None:
        super().__init__(why)
        self.who, self.status = who, status


@dataclass(frozen=True)
class Precision:
    """How a case is timed. target: seconds of a sample. seconds: of a case at most."""

    target: float
    width: float
    seconds: float
    least: int = 5
    most: int = 60


@dataclass
class Course:
    """What the trials of a question have in common.

    rates: of the machine. default: median seconds of the default by case, once it was timed.
    """

    question: Question
    session: str
    cases: Sequence[Case]
    sources: Mapping[str, str]
    precision: Precision
    rates: dict[str, float]
    default: dict[str, float]

    def floor_of(self, case: Case) -> float | None:
        """Seconds below which no call of the case can be; None where no rate is known."""
        work = case.work(self.question.stored)
        return floor(work, self.rates) if self.rates else None

    def refuse_impossible(self, who: str, case: Case, seconds: float) -> None:
        """Raise `Ended` for a time that beats the machine."""
        least = self.floor_of(case)
        if impossible(seconds, least):
            what = f"{case.name} in {seconds:.3g} s, and {least:.3g} s is the least it can take"
            raise Ended(who, "impossible", what)


def prepare(
    worker: Worker, configuration: Configuration, key: str = "", may_spill: bool = False
) -> Message:
    """Compile and check: the reply of the worker, with a status also where it died.

    key: what it is asked for by afterwards; "" is the configuration's own. may_spill: registers;
    the default may, which all others are compared with.
    """
    start = time.monotonic()
    try:
        return worker.ask(
            do="prepare",
            key=key or configuration.key,
            variant=configuration.variant,
            config=configuration.config,
            may_spill=may_spill,
        )
    except ChildFailed as failure:
        seconds = time.monotonic() - start
        return {**_died(failure), "resources": {}, "seconds": seconds}


def _died(failure: ChildFailed) -> Message:
    status = "timeout" if isinstance(failure, ChildHung) else "crashed"
    return {"status": status, "message": " ".join(str(failure).split())}


def run_trial(
    worker: Worker, course: Course, configuration: Configuration, prepared: Message, prune: Prune
) -> Trial:
    """The row of a configuration that `prepare` answered for."""
    start = time.monotonic()
    times: list[CaseTimes] = []
    status, message = prepared["status"], prepared["message"]
    try:
        if status == OK:
            status = _time_all(worker, course, configuration.key, times, prune)
    except Ended as ended:
        status, message = ended.status, str(ended)
    except NotATime as odd:
        status, message = "impossible", odd.reason
    return Trial(
        session=course.session,
        question=course.question,
        configuration=configuration,
        source=course.sources[configuration.variant],
        status=status,
        message=message,
        cases=tuple(times),
        score=_score(times, course.default) if status in (OK, PRUNED) else None,
        resources={name: float(n) for name, n in prepared["resources"].items()},
        seconds=prepared["seconds"] + time.monotonic() - start,
    )


def _time_all(
    worker: Worker, course: Course, key: str, times: list[CaseTimes], prune: Prune
) -> str:
    """Time every case into `times`, and forget what was prepared; ok or pruned."""
    try:
        for case in course.cases:
            times.append(_time(worker, course, key, case))
            score = _score(times, course.default)
            if len(times) < len(course.cases) and prune(len(times), score):
                return PRUNED
        return OK
    finally:
        worker.forget(key)


def _time(worker: Worker, course: Course, key: str, case: Case) -> CaseTimes:
    how = course.precision
    found: Measured = measure(
        lambda calls: sample(worker, key, case.name, calls),
        target=how.target, width=how.width, least=how.least, most=how.most, seconds=how.seconds,
    )  # fmt: skip
    course.refuse_impossible(key, case, found.median)
    return CaseTimes(
        case=case.name,
        n_q=case.shape.n_q,
        samples=found.samples,
        calls=found.calls,
        low=found.low,
        median=found.median,
        high=found.high,
        floor=course.floor_of(case),
    )


def sample(worker: Worker, key: str, case: str, calls: int) -> float:
    """Seconds of a call; raises `Ended` for a wrong answer and a worker that is gone."""
    try:
        reply = worker.ask(do="time", key=key, case=case, calls=calls)
    except ChildFailed as failure:
        reply = _died(failure)
    if reply["status"] != OK:
        raise Ended(key, reply["status"], reply["message"])
    return float(reply["seconds"])


def _score(times: Sequence[CaseTimes], default: Mapping[str, float]) -> float:
    """Geometric mean over the cases of time over the default's; 1 while that is not known."""
    logs = [math.log(t.median / default.get(t.case, t.median)) for t in times]
    return math.exp(sum(logs) / len(logs))
