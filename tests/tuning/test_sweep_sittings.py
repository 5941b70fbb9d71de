"""Finals in several processes: what a process deals a contender is no advantage of its own."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from tuning.sweep.cases import case_named
from tuning.sweep.configuration import Configuration
from tuning.sweep.crew import Crew
from tuning.sweep.decide import decide
from tuning.sweep.decision import Contender, Decision
from tuning.sweep.sittings import sit
from tuning.sweep.trials import Ended, Precision

KEYS = ("default", "a", "b", "c", "control")
SITTINGS, ROUNDS, FINALS = 8, 6, 60
MOST = 9  # of 60 finals at a rate of 5 %: more come once in a thousand times


def decided(rng: np.random.Generator, faster: float) -> Decision:
    """Finals in which every process slows each contender by something of its own."""

    def dealt(spread: float) -> Any:
        return np.repeat(rng.normal(0, spread, SITTINGS), ROUNDS)

    machine = dealt(0.02)
    logs = {k: machine + dealt(0.008) + rng.normal(0, 0.004, SITTINGS * ROUNDS) for k in KEYS}
    logs["a"] = logs["a"] - faster
    contenders = [Contender(k, k, (), {"case": tuple(np.exp(log))}) for k, log in logs.items()]
    return decide(contenders, default="default", control="control", buckets={"case": 1})


def test_equals_are_rarely_promoted_and_three_percent_are_found() -> None:
    rng = np.random.default_rng(0)
    assert sum(not decided(rng, 0).default_ties for _ in range(FINALS)) <= MOST
    assert sum(decided(rng, 0.03).free[1] == "a" for _ in range(FINALS)) >= FINALS - MOST


class Child:
    """A worker that counts its lives; a contender takes 1 s, `b` 2 s, in its third life 3 s."""

    def __init__(self, lose: str = "") -> None:
        self.lives, self.lose = 0, lose
        self.prepared: list[list[str]] = []

    def close(self) -> None:
        if not self.prepared or self.prepared[-1]:
            self.prepared.append([])

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        if do == "prepare":
            self.prepared[-1].append(request["key"])
            status = "wrong" if request["key"] == self.lose and len(self.prepared) == 3 else "ok"
            return {"status": status, "message": "", "resources": {"shared": 7}, "seconds": 0}
        seconds = 1.0 + (request["key"] == "b") * (1 + (len(self.prepared) == 3))
        return {"status": "ok", "seconds": seconds}


def test_every_sitting_is_a_new_process_with_another_order() -> None:
    worker = Child()
    crew = Crew({}, 1, 1)
    crew.workers = [cast(Any, worker)]
    case = case_named("add", "r1-w96")
    runs = {key: Configuration("rows") for key in ("a", "b")}
    seen: list[tuple[str, float]] = []
    sat = sit(
        crew, [case], runs, (), Precision(1.0, 0.01, 1e9, least=15, most=15), 3,
        lambda who, case, seconds: seen.append((who, seconds)),
    )  # fmt: skip
    assert [keys for keys in worker.prepared if keys] == [["a", "b"], ["b", "a"], ["b", "a"]]
    assert sat.rounds == {"a": {case.name: (1.0,) * 15}, "b": {case.name: (2.0,) * 10 + (3.0,) * 5}}
    assert seen == [("a", 1.0), ("b", 2.0)] * 2 + [("a", 1.0), ("b", 3.0)]
    assert sat.resources["b"] == {"shared": 7}


def test_who_cannot_go_on_is_named() -> None:
    crew = Crew({}, 1, 1)
    crew.workers = [cast(Any, Child(lose="b"))]
    runs = {key: Configuration("rows") for key in ("a", "b")}
    with pytest.raises(Ended) as ended:
        sit(crew, [case_named("add", "r1-w96")], runs, (), Precision(1.0, 0.01, 1e9), 3)
    assert (ended.value.who, ended.value.status) == ("b", "wrong")
