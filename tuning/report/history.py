"""What a database holds of each question."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tuning.sweep.configuration import Configuration, Question
from tuning.sweep.rows import OK, Decided, Finals, Row, Session, Trial
from tuning.sweep.sessions import asked_alike

DEFAULTS_SCORE = 1.0  # exactly: the default's time over itself


@dataclass(frozen=True)
class History:
    """Of one question.

    trials: the latest of each configuration, in the order in which they were made, under the
    conditions of the last one: equal kernels, versions, threads and cases. left_out: how many
    trials are not among them. cases: names, in the order of timing. decided: of the last finals.
    dates: session -> when it began. stale: the finals were held under other conditions.
    """

    question: Question
    trials: tuple[Trial, ...]
    left_out: int
    cases: tuple[str, ...]
    finals: Finals | None
    decided: Decided | None
    dates: Mapping[str, str]
    stale: bool

    @property
    def default(self) -> Configuration | None:
        """What all others are compared with; None where no row tells."""
        if self.finals is not None and not self.stale:
            return self.finals.configurations.get(self.finals.default)
        return next((t.configuration for t in self.done if t.score == DEFAULTS_SCORE), None)

    @property
    def done(self) -> tuple[Trial, ...]:
        """The trials that were timed on all cases."""
        return tuple(t for t in self.trials if t.status == OK)


def histories(rows: Iterable[Row]) -> list[History]:
    """One a question, in the order in which they first come."""
    sessions: dict[str, Session] = {}
    by_question: dict[Question, list[Trial | Finals | Decided]] = {}
    for row in rows:
        if isinstance(row, Session):
            sessions[row.id] = row
        else:
            by_question.setdefault(row.question, []).append(row)
    return [_history(question, own, sessions) for question, own in by_question.items()]


def _history(
    question: Question, rows: Sequence[Trial | Finals | Decided], sessions: Mapping[str, Session]
) -> History:
    trials = [row for row in rows if isinstance(row, Trial)]
    finals = next((row for row in reversed(rows) if isinstance(row, Finals)), None)
    decided = [row for row in rows if isinstance(row, Decided)]
    if finals is not None:
        decided = [row for row in decided if row.session == finals.session]
    asked = {row.session: sessions.get(row.session) for row in rows}
    conditions = {name: one and asked_alike(one, question) for name, one in asked.items()}
    alike = [t for t in trials if conditions[t.session] == conditions[trials[-1].session]]
    sources = {t.configuration.variant: t.source for t in alike}
    alike = [t for t in alike if t.source == sources[t.configuration.variant]]
    cases = _cases(alike)
    latest: dict[Configuration, Trial] = {}
    for trial in alike:
        if _timed(trial) == cases[: len(trial.cases)]:
            latest.pop(trial.configuration, None)
            latest[trial.configuration] = trial
    fresh = not (finals and alike) or (
        conditions[finals.session] == conditions[alike[-1].session]
        and tuple(finals.cases) == cases
        and all(sources.get(name, source) == source for name, source in finals.sources.items())
    )
    return History(
        question=question,
        trials=tuple(latest.values()),
        left_out=len(trials) - len(latest),
        cases=cases or (() if finals is None else tuple(finals.cases)),
        finals=finals,
        decided=decided[-1] if decided else None,
        dates={name: one.date if one else "" for name, one in asked.items()},
        stale=not fresh,
    )


def _cases(trials: Sequence[Trial]) -> tuple[str, ...]:
    """Those of the last trial that was timed on all of them, else the most of any."""
    whole = [_timed(t) for t in trials if t.status == OK]
    return whole[-1] if whole else max((_timed(t) for t in trials), key=len, default=())


def _timed(trial: Trial) -> tuple[str, ...]:
    return tuple(times.case for times in trial.cases)
