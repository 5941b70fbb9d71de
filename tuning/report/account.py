"""All that is said of a question, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tuning.report.contest import Contest, contest
from tuning.report.findings import Failure, Knob, Result, best, counted, failures, knobs
from tuning.report.history import History
from tuning.sweep.configuration import Question
from tuning.sweep.fields import to_json
from tuning.sweep.rows import Decided


@dataclass(frozen=True)
class Account:
    """Of one question.

    sessions: id -> when it began. trials: status -> how many. default: its key, "" where no row
    tells.
    """

    question: Question
    sessions: Mapping[str, str]
    trials: Mapping[str, int]
    left_out: int
    default: str
    best: tuple[Result, ...]
    finals: Contest | None
    decided: Decided | None
    failures: tuple[Failure, ...]
    tunables: tuple[Knob, ...]

    @classmethod
    def of(cls, history: History, top: int) -> Account:
        """With the `top` best configurations."""
        return cls(
            question=history.question,
            sessions=dict(history.dates),
            trials=counted(history),
            left_out=history.left_out,
            default="" if history.default is None else history.default.key,
            best=tuple(best(history, top)),
            finals=contest(history),
            decided=history.decided,
            failures=tuple(failures(history)),
            tunables=tuple(knobs(history)),
        )

    def as_dict(self) -> dict[str, Any]:
        """What `json.dumps` takes; `key` names the question in a line."""
        return {"key": self.question.key, **to_json(self)}
