"""Measuring one case: prepare and check every contestant, then time them in interleaved rounds.

Children stay alive and wait between their turns. In every round each contestant is timed once,
in an order that changes; after each turn the idle workers of its library get time to fall asleep.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tuning.bench.cases import Case, Model
from tuning.bench.checks import Check, check_ours, check_peer
from tuning.bench.contestants import OURS, Column
from tuning.bench.protocol import Absent, ChildFailed, Message, unpack
from tuning.bench.statistics import rotated

SAMPLE_SECONDS = 0.02  # a sample repeats short calls until it is about that long
GPU_SAMPLE_SECONDS = 0.01
MODEL_SAMPLE_SECONDS = 0.25
CALLS_MAX = 1000
SETTLE_SECONDS = 0.015  # libgomp's workers spin up to 10 ms after a call


@dataclass(frozen=True)
class Options:
    """threads: of every column. rounds: at most. seconds: rounds of a measure end after that.
    rotate: bytes that inputs of a cold case rotate over. settle: seconds after every turn. sample:
    how long one is about. model: name or file of whole models.
    """

    threads: int
    rounds: int
    seconds: float
    rotate: int
    settle: float = SETTLE_SECONDS
    sample: float = SAMPLE_SECONDS
    model: str = "smollm2"


@dataclass
class Contestant:
    """A column in one format.

    why: reason of a status other than `timed`. computed_in: the format it takes in its place.
    """

    column: Column
    fmt: str
    status: str = "timed"
    why: str = ""
    note: str = ""
    computed_in: str = ""
    check: Check | None = None
    values: Any = None
    samples: dict[str, list[float]] = field(default_factory=dict)

    def lose(self, status: str, why: object) -> None:
        """Take it out of the race."""
        self.status, self.why = status, str(why)


def measure(case: Case, columns: Sequence[Column], options: Options) -> list[Contestant]:
    """All contestants of `case`; those whose column or format we do not have are left out."""
    racers = _prepare(case, columns, options)
    try:
        for name in case.measures:
            takes = [r for r in racers if r.status == "timed" and case.takes(r.fmt, name)]
            _race(case, name, takes, options)
    finally:
        for column in columns:
            column.forget()
    return racers


def _prepare(case: Case, columns: Sequence[Column], options: Options) -> list[Contestant]:
    racers: list[Contestant] = []
    for fmt in case.formats:
        ours: Contestant | None = None
        for column in columns:
            if column.missing or case.what not in column.suites:
                continue
            racer = Contestant(column, fmt)
            racers.append(racer)
            _ready(racer, case, ours, options)
            if column.child is None:
                _ready_again(racer, racers, case, ours, options)
            if column.name == OURS:
                ours = racer
            if column.name == OURS and racer.status == "absent":
                racers.remove(racer)
                break  # a row is a format of ours
    return racers


def _ready_again(
    lost: Contestant,
    racers: Sequence[Contestant],
    case: Case,
    ours: Contestant | None,
    options: Options,
) -> None:
    """The other formats in the next child of a column whose child is gone: one costs its row."""
    for racer in racers:
        if racer.column is lost.column and racer.status == "timed":
            _ready(racer, case, ours, options)
            _lose_with_its_child(racer, racers)


def _ready(racer: Contestant, case: Case, ours: Contestant | None, options: Options) -> None:
    """Prepare one contestant and check its answer."""
    request = {
        "key": racer.fmt,
        "fmt": racer.fmt,
        "case": case.message(),
        "threads": options.threads,
        "rotate": options.rotate,
    }
    reply = _asked(racer, do="prepare", **request)
    if reply is None:
        return
    racer.note, racer.values = reply["note"], unpack(reply["values"])
    racer.computed_in = reply["facts"].get("format", racer.fmt)
    for name, seconds in reply["seconds"].items():
        racer.samples[name] = [seconds]
    reference = None if ours is None else ours.values
    if racer.column.is_peer or (isinstance(case, Model) and reference is not None):
        racer.check = check_peer(case, racer.fmt, racer.values, reply["facts"], reference)
    else:
        racer.check = check_ours(case, racer.fmt, racer.values, reply["facts"])
    if not racer.check.passed:
        check = racer.check
        racer.lose(
            "failed",
            f"wrong answer: error {check.error:.2e} {check.unit}, allowed {check.tolerance:.0e}",
        )


def _asked(racer: Contestant, **request: Any) -> Message | None:
    """The reply, or None after the contestant was taken out."""
    try:
        return racer.column.ask(**request)
    except Absent as why:
        racer.lose("absent", why)
    except ChildFailed as why:
        racer.lose("failed", why)
    return None


def _lose_with_its_child(racer: Contestant, racers: Sequence[Contestant]) -> None:
    """A child that is gone took all that was prepared in it along."""
    if racer.status == "failed" and racer.column.child is None:
        for other in racers:
            if other.column is racer.column and other.status == "timed":
                other.lose("failed", racer.why)


def _race(case: Case, name: str, racers: list[Contestant], options: Options) -> None:
    """Rounds of one measure. The first one has single calls and says how many a sample takes."""
    for racer in racers:
        if name not in racer.samples and racer.status == "timed":
            racer.samples[name] = []
            _turn(racer, name, 1, options)
            _lose_with_its_child(racer, racers)
    running = _running(racers, name)
    target = MODEL_SAMPLE_SECONDS if isinstance(case, Model) else options.sample
    calls = {id(r): calls_of(r.samples[name][0], target) for r in running}
    cost = sum(calls[id(r)] * r.samples[name][0] for r in running)
    first = 1
    if any(n > 1 for n in calls.values()):  # single calls were too short to keep
        first = 0
        for racer in running:
            racer.samples[name].clear()
    for turn in range(first, rounds_of(options.rounds, cost, options.seconds)):
        for index in rotated(len(running), turn):
            if running[index].status == "timed":
                _turn(running[index], name, calls[id(running[index])], options)
                _lose_with_its_child(running[index], racers)


def _running(racers: Sequence[Contestant], name: str) -> list[Contestant]:
    return [r for r in racers if r.status == "timed" and r.samples.get(name)]


def calls_of(seconds: float, target: float) -> int:
    """Calls of one sample that make it about `target` seconds long."""
    return max(1, min(CALLS_MAX, math.ceil(target / max(seconds, 1e-9))))


def rounds_of(asked: int, cost: float, limit: float) -> int:
    """How many rounds of `cost` seconds: as many as were asked and `limit` seconds hold.

    At least 2, so that there is a spread, but for rounds that take four times the limit.
    """
    least = 2 if cost <= 4 * limit else 1
    return min(asked, max(least, int(limit / max(cost, 1e-9))))


def _turn(racer: Contestant, name: str, calls: int, options: Options) -> None:
    reply = _asked(racer, do="time", key=racer.fmt, measure=name, calls=calls)
    if reply is not None:
        racer.samples[name].append(reply["seconds"])
    sleep(options.settle)


sleep: Callable[[float], None] = time.sleep
