"""The decisions of a database, as rows to promote, or why not."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minfer import registry, tuned
from minfer.device import Device
from minfer.errors import Refusal
from minfer.format import KvFormat
from minfer.ops import OPS, Variant
from minfer.tuned import Row
from tuning.sweep.configuration import Question
from tuning.sweep.decision import Decision, Interval
from tuning.sweep.rows import Decided, Session
from tuning.sweep.rows import Row as SweptRow


class NotPromoted(Exception):
    """A decision that makes no row; the text says why."""


@dataclass(frozen=True)
class Candidate:
    """A decision and the row made of it. row: None where `why` says why there is none."""

    decided: Decided
    row: Row | None
    why: str = ""

    @property
    def question(self) -> Question:
        return self.decided.question


def latest(rows: Iterable[SweptRow]) -> tuple[list[Decided], dict[str, Session]]:
    """The last decision of each question in a database, and the sessions by id."""
    found: dict[Question, Decided] = {}
    sessions: dict[str, Session] = {}
    for row in rows:
        if isinstance(row, Session):
            sessions[row.id] = row
        elif isinstance(row, Decided):
            found[row.question] = row
    return list(found.values()), sessions


def candidates(found: Sequence[Decided], sessions: Mapping[str, Session]) -> list[Candidate]:
    """One a decision. Those of a family whose decisions disagree make no row."""
    made = [_candidate(decided, sessions.get(decided.session)) for decided in found]
    return [_agreed(candidate, made) for candidate in made]


def _candidate(decided: Decided, session: Session | None) -> Candidate:
    try:
        return Candidate(decided, _row(decided, session))
    except NotPromoted as why:
        return Candidate(decided, None, str(why))


def _row(decided: Decided, session: Session | None) -> Row:
    question, decision = decided.question, decided.decision
    if question.device_kind in tuned.SIMULATED:
        raise NotPromoted(f"it was made on {question.device_kind}, where times mean nothing")
    if not re.fullmatch("[a-z0-9-]+", question.device_kind):
        raise NotPromoted(f"{question.device_kind!r} is no kind of device")
    if decision.default_ties:
        raise NotPromoted(f"the default is as fast as any: {_interval(decision.speedup)}")
    if loss := _loss(decision):
        raise NotPromoted(f"the default is faster in {loss}")
    if session is None:
        raise NotPromoted(f"its session {decided.session} is not in the database")
    asked = asked_of(question)
    variant = _variant(decided, asked)
    values = {n_q: configuration.config for n_q, configuration in decided.chosen.items()}
    numeric, free = _split(variant, values)
    row = Row(
        op=question.op,
        fmt=question.fmt,
        head_dim=question.head_dim,
        kind=question.kind,
        variant=variant.name,
        module=tuned.module_of(variant, asked.device),
        numeric=numeric,
        free=tuple(sorted(free.items())),
        source=decided.source,
        made_with=_made_with(session),
        evidence=_evidence(decided, session),
    )
    try:
        row = Row.read(row.as_dict())
    except ValueError as error:
        raise NotPromoted(f"it makes no row: {error}") from None
    if problem := tuned.unfit(row, asked) or tuned.odd(row, asked):
        raise NotPromoted(f"it names {problem}")
    return row


def _loss(decision: Decision) -> str:
    """A case where the default is faster than what was chosen, "" where there is none."""
    case = decision.loses
    return "" if case is None else f"{case}: {_interval(decision.speedups[case])}"


def asked_of(question: Question | Row, device: str = "") -> tuned.Asked:
    """What rows are checked against; whether the device is here does not matter."""
    try:
        parsed = Device.parse(question.device if isinstance(question, Question) else device)
        package = parsed.backend.package
        known = {
            op: {v.name: v for v in registry.declared(op, package)}
            for op in tuned.family(question.op)
        }
        fmt = KvFormat.parse(question.fmt) if question.fmt else KvFormat.F32
    except Refusal as refusal:
        raise NotPromoted(refusal.message) from None
    except ImportError as error:
        raise NotPromoted(f"kernels of {parsed} cannot be looked at: {error}") from None
    return tuned.Asked(question.op, parsed, fmt, 1, known, lambda variant: None, {})


def source_now(variant: Variant) -> str:
    """The hash of a variant's text, "" where it cannot be read."""
    try:
        return tuned.source_of(variant)
    except (OSError, ValueError, SyntaxError):
        return ""


def _variant(decided: Decided, asked: tuned.Asked) -> Variant:
    op = decided.question.op
    if op not in OPS:
        raise NotPromoted(f"op {op!r} is none of {', '.join(OPS)}")
    names = {configuration.variant for configuration in decided.chosen.values()}
    if len(names) != 1:
        raise NotPromoted(f"it chose {', '.join(sorted(names)) or 'nothing'}, not one variant")
    (name,) = names
    if name not in asked.variants[op]:
        raise NotPromoted(f"there is no variant {op}_{name} here; --add FILE makes a user's known")
    if source_now(asked.variants[op][name]) != decided.source:
        raise NotPromoted("the code of its kernels was another; sweep again")
    return asked.variants[op][name]


def _split(
    variant: Variant, values: Mapping[int, Mapping[str, Any]]
) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
    """Numeric values, which all n_q have in common, and free ones by n_q."""
    numeric_names = {name for name, tunable in variant.space.items() if tunable.numeric}
    numerics = [{n: v for n, v in c.items() if n in numeric_names} for c in values.values()]
    if any(one != numerics[0] for one in numerics):
        raise NotPromoted("its numeric values differ by n_q (contract 6.4)")
    free = {
        n_q: {n: v for n, v in config.items() if n not in numeric_names}
        for n_q, config in values.items()
    }
    return numerics[0], free


def _made_with(session: Session) -> dict[str, str]:
    made = session.environment.get("made_with")
    if not isinstance(made, dict) or not made:
        raise NotPromoted(f"its session {session.id} does not say what it was made with")
    return {str(name): str(value) for name, value in made.items()}


def _evidence(decided: Decided, session: Session) -> dict[str, Any]:
    decision, told = decided.decision, session.environment
    return {
        "speedup": _rounded(decision.speedup),
        "noise": round(decision.noise, 5),
        "rerun_differs": round(decision.rerun_differs, 3),
        "rate": decision.rate,
        "ties": list(decision.ties),
        "cases": {case: _rounded(ratio) for case, ratio in decision.speedups.items()},
        "date": session.date,
        "commit": told.get("commit"),
        "minfer": told.get("minfer"),
    }


def _rounded(ratio: Interval) -> list[float]:
    return [round(bound, 4) for bound in (ratio.low, ratio.mid, ratio.high)]


def _interval(ratio: Interval) -> str:
    return f"{ratio.mid:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"


def _agreed(candidate: Candidate, made: Sequence[Candidate]) -> Candidate:
    """The candidate, or without its row where another op of its family decided otherwise."""
    if candidate.row is None:
        return candidate
    chosen = candidate.decided.decision.numeric
    for other in made:
        if not _related(candidate.question, other.question):
            continue
        decision = other.decided.decision
        if (loss := _loss(decision)) and decision.numeric == chosen:
            why = f"{other.question.op} would take it too, and there the default is faster in "
            return Candidate(candidate.decided, None, why + loss)
        settles = other.row is not None or decision.default_ties or loss
        fits = decision.numeric == chosen or (other.row is None and chosen in decision.ties)
        if settles and not fits:
            why = f"{candidate.question.op} chose {chosen} and {other.question.op}"
            why += f" {decision.numeric}, and their bits must be equal (contract 6.1)"
            return Candidate(candidate.decided, None, why)
    return candidate


def _related(one: Question, other: Question) -> bool:
    """Whether two questions are of different ops of a family, and else the same."""
    return (
        one.op != other.op
        and other.op in tuned.family(one.op)
        and (one.device, one.device_kind, one.fmt, one.kind, one.head_dim)
        == (other.device, other.device_kind, other.fmt, other.kind, other.head_dim)
    )
