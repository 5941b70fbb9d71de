"""Columns of the benchmark whose children are fakes with scripted times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tuning.bench import checks, rounds
from tuning.bench.cases import Attention
from tuning.bench.contestants import Column
from tuning.bench.protocol import Message, pack
from tuning.bench.rounds import Options
from tuning.bench.suites import from_message

CASE = Attention(1, 5, 2, 1, 32)
OPTIONS = Options(threads=2, rounds=4, seconds=25, rotate=1 << 10, settle=0)
SUITES = ("attn", "batch")
RATES = {"read": 1e9, "fma": 1e9, "int8": 4e9}


class FakeChild:
    """Answers rightly; a call takes `seconds(turn)`. log: what every fake was asked, in order."""

    def __init__(self, name: str, log: list[Any], seconds: Callable[[int], float]) -> None:
        self.name, self.log, self.seconds = name, log, seconds
        self.turn, self.wrong, self.trouble = 0, False, {}
        self.first: dict[str, float] = {}

    def ask(self, request: Message, timeout: float) -> Message:
        self.log.append((self.name, request["do"], request.get("key"), request.get("calls")))
        trouble: dict[tuple[str, Any], Exception] = self.trouble
        for key in ((request["do"], request.get("key")), (request["do"], None)):
            if key in trouble:
                raise trouble[key]
        return {"hello": self.hello, "prepare": self.prepare, "time": self.time}.get(
            request["do"], lambda request: {"rates": RATES}
        )(request)

    def hello(self, request: Message) -> Message:
        return {"versions": {"fake": "1"}, "suites": list(SUITES)}

    def prepare(self, request: Message) -> Message:
        truth = checks.expected(from_message(request["case"]), request["fmt"], "f32")
        assert truth is not None
        values = truth.exact.astype(np.float32) * (-1 if self.wrong else 1)
        return {"values": pack(values), "note": "fake", "facts": {}, "seconds": dict(self.first)}

    def time(self, request: Message) -> Message:
        self.turn += 1
        return {"seconds": self.seconds(self.turn), "idle": {"cpu": 0.004, "wall": 1.0}}

    def close(self) -> None:
        self.log.append((self.name, "close", None, None))


def fakes(*names: str, seconds: float = 0.1) -> tuple[list[Column], list[Any]]:
    log: list[Any] = []
    found = []
    for name in names:
        child = FakeChild(name, log, lambda _turn: seconds)
        found.append(Column(name, lambda child=child: child, suites=SUITES))  # type: ignore[misc]
    return found, log


def child_of(column: Column) -> FakeChild:
    made = column.start()
    assert isinstance(made, FakeChild)
    return made


def by_name(racers: list[rounds.Contestant], fmt: str = "f32") -> dict[str, rounds.Contestant]:
    return {r.column.name: r for r in racers if r.fmt == fmt}


def racer(name: str, samples: list[float], fmt: str = "f32") -> rounds.Contestant:
    made = rounds.Contestant(Column(name, lambda: None), fmt, samples={"call": samples})  # type: ignore[arg-type, return-value]
    made.computed_in = fmt
    return made
