"""A subject is one prepared contestant: calls to time, and values to check first."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tuning.bench import suites
from tuning.bench.cases import Case
from tuning.bench.protocol import Handler, Message, pack, serve

Call = Callable[[], Any]


@dataclass
class Measure:
    """What is timed of a subject.

    calls: equal work on rotating inputs. reset: before a sample. most: how many calls may follow
    one reset; with 1 there is no untimed call before it. after: a check of what a sample left,
    which raises.
    """

    calls: Sequence[Call]
    reset: Call | None = None
    most: int = 1000
    turn: int = 0
    after: Call | None = None

    def sample(self, n: int) -> float:
        """Seconds of one call, over at most n of them; an untimed one wakes the workers."""
        if self.reset is not None:
            self.reset()
        n = min(n, self.most)
        if self.most > 1:
            self._next()()
        chosen = [self._next() for _ in range(n)]
        start = time.perf_counter()
        for call in chosen:
            call()
        seconds = (time.perf_counter() - start) / n
        if self.after is not None:
            self.after()
        return seconds

    def _next(self) -> Call:
        self.turn += 1
        return self.calls[self.turn % len(self.calls)]


@dataclass
class Subject:
    """measures by name. values: what the oracle is compared with. note: how it was called.

    seconds: of measures that were taken already while values were made, where one call is long.
    """

    measures: dict[str, Measure]
    values: NDArray[Any]
    note: str
    facts: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


Prepare = Callable[[Case, Message], Subject]


def run_column(
    prepare: Mapping[str, Prepare],
    versions: Callable[[], dict[str, str]],
    more: Mapping[str, Handler] | None = None,
    guard: Callable[[Handler], Handler] = lambda handler: handler,
) -> None:
    """Serve requests: prepare maps a suite's name to what makes its subjects.

    guard: wraps every handler.
    """
    held: dict[str, Subject] = {}

    def do_prepare(request: Message) -> Message:
        case = suites.from_message(request["case"])
        subject = prepare[case.what](case, request)
        held[request["key"]] = subject
        return {
            "values": pack(subject.values),
            "note": subject.note,
            "facts": subject.facts,
            "seconds": subject.seconds,
        }

    def do_time(request: Message) -> Message:
        measure = held[request["key"]].measures[request["measure"]]
        return {"seconds": measure.sample(request["calls"])}

    def do_drop(_request: Message) -> Message:
        held.clear()
        return {}

    handlers = {
        "hello": lambda _request: {"versions": versions(), "suites": sorted(prepare)},
        "prepare": do_prepare,
        "time": do_time,
        "drop": do_drop,
        **(more or {}),
    }
    serve({verb: guard(handler) for verb, handler in handlers.items()})


def finite(values: NDArray[Any], whole: NDArray[Any]) -> NDArray[Any]:
    """`values`, or NaN where the whole result holds something that is not finite."""
    return values if np.isfinite(whole).all() else np.full_like(values, np.nan)
