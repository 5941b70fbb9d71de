"""What a sweep that goes on knows already: trials of the same questions, asked in the same way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sweep_rows import OTHER, QUESTION, SESSION, SPLIT, trial

from tuning.sweep import sessions
from tuning.sweep.database import Database
from tuning.sweep.rows import Session, Trial

CASES = ["decode-16", "decode-1"]


def session(name: str, made_with: str = "a", **options: Any) -> Session:
    asked = {"threads": 1, "timeout": 10.0, "cases": {QUESTION.key: CASES}}
    environment = {"made_with": {"numba": made_with}}
    return replace(SESSION, id=name, options={**asked, **options}, environment=environment)


NOW = session("now")
LATE = trial(OTHER, session="old", status="timeout", cases=(), score=None)


@pytest.fixture
def database(tmp_path: Path) -> Database:
    return Database(tmp_path / "sweeps.jsonl")


def known(database: Database, now: Session, *rows: Session | Trial) -> list[Trial]:
    for row in rows:
        database.append(row)
    return sessions.known(database, now, QUESTION)


@pytest.mark.parametrize(
    "other",
    [
        session("other", threads=2),
        session("other", made_with="b"),
        session("other", cases={QUESTION.key: CASES[:1]}),
        session("other", cases={}),
    ],
    ids=["threads", "versions", "cases", "no cases"],
)
def test_later_trials_of_another_kind_hide_none(database: Database, other: Session) -> None:
    mine = trial(SPLIT, session="old")
    theirs = trial(SPLIT, session="other"), replace(LATE, session="other")
    assert known(database, NOW, session("old"), mine, other, *theirs) == [mine]


@pytest.mark.parametrize(("timeout", "counts"), [(5.0, True), (10.0, True), (10.5, False)])
def test_what_took_too_long_may_take_longer(
    database: Database, timeout: float, counts: bool
) -> None:
    mine = trial(SPLIT, session="old")
    now = session("now", timeout=timeout)
    assert known(database, now, session("old"), mine, LATE) == [mine, LATE][: 1 + counts]
