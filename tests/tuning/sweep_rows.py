"""Rows of a sweep, made up."""

from __future__ import annotations

from typing import Any

from tuning.sweep.configuration import Configuration, Question
from tuning.sweep.decision import Contender, Decision, Interval
from tuning.sweep.rows import CaseTimes, Decided, Finals, Session, Trial

QUESTION = Question("attn_window", "cpu", "amd-epyc-9b45-2-cores", "q8_0", "decode", 128)
SPLIT = Configuration("split", (("heads", 4), ("exact", True), ("mode", "a"), ("ahead", 1.5)))
OTHER = Configuration("split", (("heads", 1), ("exact", True), ("mode", None), ("ahead", 1.5)))


def times(case: str = "decode-16", median: float = 0.1 + 0.2, n_q: int = 16) -> CaseTimes:
    return CaseTimes(case, n_q, (median, 5e-324, 1e300), 30, median, median, 1 / 3, None)


def trial(configuration: Configuration = SPLIT, **changes: Any) -> Trial:
    fields: dict[str, Any] = {
        "session": "ab12",
        "question": QUESTION,
        "configuration": configuration,
        "source": "f00d",
        "status": "ok",
        "message": "",
        "cases": (times(), times("decode-1", 0.25, 1)),
        "score": 1 / 7,
        "resources": {"registers": 64.0, "spills": 0.0},
        "seconds": 2.5,
    }
    return Trial(**{**fields, **changes})


SESSION = Session(
    id="ab12",
    date="2031-05-06T07:08:09+00:00",
    questions=(QUESTION,),
    options={"search": "tpe", "budget": None, "cases": ["decode-*"]},
    environment={"numba": "0.61", "load": [0.5, 1], "clocks": {"now": 2.6, "fixed": False}},
    sources={"attn_window_split": "f00d"},
    command=("python", "-m", "tuning", "sweep"),
)
FINALS = Finals(
    session="ab12",
    question=QUESTION,
    sources={"split": "f00d"},
    contenders=(Contender("split heads=4", "split", (64.0,), {"decode-16": (0.1, 0.3)}),),
    default="split heads=4",
    control="control",
    configurations={"split heads=4": SPLIT},
    cases={"decode-16": 16},
)
DECIDED = Decided(
    session="ab12",
    question=QUESTION,
    source="f00d",
    decision=Decision(
        numeric="split",
        free={1: "split heads=4", 16: "split heads=1"},
        ties=("split",),
        free_ties={1: ("split heads=4", "split heads=1"), 16: ("split heads=1",)},
        speedup=Interval(1.01, 1.02, 1.03),
        speedups={"decode-16": Interval(0.9, 1.0, 1.1)},
        noise=0.001,
        rerun_differs=0.25,
        rate=0.05,
        default_ties=False,
    ),
    chosen={1: SPLIT, 16: OTHER},
    evidence={"commit": "1234567", "date": "2031-05-06"},
)
ROWS = (SESSION, trial(), FINALS, DECIDED)
