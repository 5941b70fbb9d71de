"""What a sweep knows already, who gets into the finals, and what may be asked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from sweep_rows import QUESTION, SESSION, times, trial

from minfer.ops import Tunable, Variant
from tuning.sweep.configuration import Configuration
from tuning.sweep.database import Database
from tuning.sweep.finals import finalists
from tuning.sweep.rows import Session, Trial
from tuning.sweep.sessions import known

ASKED = {QUESTION.key: ["decode-16", "decode-1"]}


def session(name: str, **changes: Any) -> Session:
    options = {"threads": 2, "cases": ASKED, **changes.pop("options", {})}
    made_with = changes.pop("made_with", {"numba": "0.61"})
    return replace(
        SESSION, id=name, options=options, environment={"made_with": made_with}, **changes
    )


def tried(name: str, ahead: float, **changes: Any) -> Trial:
    return trial(Configuration("split", (("ahead", ahead),)), session=name, **changes)


def test_trials_of_the_same_question_cases_versions_and_threads_are_known(tmp_path: Path) -> None:
    database = Database(tmp_path / "rows.jsonl")
    fewer = {"cases": {QUESTION.key: ["decode-16"]}}
    wrong: dict[str, Any] = {"status": "wrong", "cases": (), "score": None}
    other = replace(QUESTION, fmt="f16")
    for row in (
        session("old"),
        tried("old", 1),
        tried("old", 2, **wrong),
        tried("old", 3, source="beef"),
        tried("old", 4, question=other),
        session("fewer", options=fewer),
        tried("fewer", 5, cases=(times(),)),
        tried("fewer", 6, **wrong),
        session("threads", options={"threads": 1}),
        tried("threads", 7),
        session("versions", made_with={"numba": "0.62"}),
        tried("versions", 8),
    ):
        database.append(row)
    found = known(database, session("new"), QUESTION)
    assert [t.configuration.config["ahead"] for t in found] == [1, 2]
    found = known(database, session("new", options=fewer), QUESTION)
    assert [t.configuration.config["ahead"] for t in found] == [5, 6]


def _launch(rows: Any, *, config: Any) -> None: ...


SPACE = {"ahead": Tunable(1, (1, 2)), "exact": Tunable(0, (1, 2), numeric=True)}
SPLIT = Variant("split", "split", _launch, (), None, {}, {}, {}, {}, True, SPACE, True)  # type: ignore[arg-type]


def timed(ahead: int, exact: int, at_16: float, at_1: float, **changes: Any) -> Trial:
    one = Configuration("split", (("ahead", ahead), ("exact", exact)))
    both = (times("decode-16", at_16, 16), times("decode-1", at_1, 1))
    return trial(one, cases=both, score=(at_16 * at_1) ** 0.5, **changes)


def test_finalists_are_the_best_and_the_best_of_each_n_q_in_its_numeric_class() -> None:
    trials = [
        timed(1, 1, 1.0, 1.0),
        timed(2, 1, 1.2, 0.9),  # of the class of the best, and best at n_q 1
        timed(1, 2, 1.0, 1.02),
        timed(2, 2, 1.3, 0.8),  # better still at n_q 1, with other bits
        timed(3, 2, 1.3, 1.3),  # too slow by far
        timed(4, 1, 0.1, 0.1, status="pruned"),
    ]
    found = finalists(trials, {"split": SPLIT}, [1, 16], 3)
    assert [(c.config["ahead"], c.config["exact"]) for c in found] == [(1, 1), (2, 1), (1, 2)]
    every = finalists(trials, {"split": SPLIT}, [1, 16], 9)
    assert [(c.config["ahead"], c.config["exact"]) for c in every[3:]] == [(2, 2)]
    assert finalists([timed(1, 1, 1, 1, status="pruned")], {"split": SPLIT}, [1], 3) == []
