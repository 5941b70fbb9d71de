"""The rows of a sweep's database: one JSON object a line, of a schema with a number.

A row is read strictly: another schema, a field that is missing, unknown or of another type is a
`BadField` that names it. Floats come back bit for bit; values of tunables keep their JSON types.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

from tuning.sweep.configuration import Configuration, Question
from tuning.sweep.decision import Contender, Decision
from tuning.sweep.fields import BadField, reader, to_json

SCHEMA = 1
OK, PRUNED, TIMEOUT = "ok", "pruned", "timeout"
FAILED = ("wrong", "compile-failed", "spills", "crashed", TIMEOUT, "impossible", "refused")
STATUSES = (OK, PRUNED, *FAILED)


@dataclass(frozen=True)
class Session:
    """One run of the sweep. date: ISO 8601, UTC. sources: `<op>_<variant>` -> hash."""

    id: str
    date: str
    questions: tuple[Question, ...]
    options: Mapping[str, Any]
    environment: Mapping[str, Any]
    sources: Mapping[str, str]
    command: tuple[str, ...]


@dataclass(frozen=True)
class CaseTimes:
    """Seconds of one call in one case. low, high: the interval of the median.

    samples: each over `calls` calls in a row, a call. floor: seconds it takes at least, if known.
    """

    case: str
    n_q: int
    samples: tuple[float, ...]
    calls: int
    low: float
    median: float
    high: float
    floor: float | None


@dataclass(frozen=True)
class Trial:
    """One configuration on the cases of a question, in the order in which they were timed.

    source: hash of the variant. message: why it failed. score: geometric mean over the cases of
    time / time of the default, of ok and pruned trials. seconds: that the whole trial took.
    """

    session: str
    question: Question
    configuration: Configuration
    source: str
    status: str
    message: str
    cases: tuple[CaseTimes, ...]
    score: float | None
    resources: Mapping[str, float]
    seconds: float

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise BadField(f"{self.status!r} is none of {', '.join(STATUSES)}", "status")
        if self.score is not None and (self.status in FAILED or self.score <= 0):
            raise BadField(f"{self.score!r} is no score of a trial that is {self.status}", "score")
        if self.score is None and self.status == OK:
            raise BadField("a trial that is ok has a score", "score")


@dataclass(frozen=True)
class Finals:
    """Paired rounds of the best. sources: variant -> hash. cases: name -> n_q.

    default, control: keys of contenders. configurations: contender's key -> what it ran.
    """

    session: str
    question: Question
    sources: Mapping[str, str]
    contenders: tuple[Contender, ...]
    default: str
    control: str
    configurations: Mapping[str, Configuration]
    cases: Mapping[str, int]


@dataclass(frozen=True)
class Decided:
    """What was decided from finals. source: hash of the chosen variant. chosen: by n_q."""

    session: str
    question: Question
    source: str
    decision: Decision
    chosen: Mapping[int, Configuration]
    evidence: Mapping[str, Any]


Row = Session | Trial | Finals | Decided
KINDS = {"session": Session, "trial": Trial, "finals": Finals, "decision": Decided}
READERS = {name: reader(kind) for name, kind in KINDS.items()}
SUM = ', "sum": '  # the last field of a line
NAMES = {kind: name for name, kind in KINDS.items()}


def _sum(text: str) -> str:
    """xxh3 of a row's text without its sum."""
    return str(xxhash.xxh3_64_hexdigest(text.encode()))


def to_line(row: Row) -> str:
    """A row as one line of JSON, without its end, checked by reading it; raises BadField."""
    line = sealed({"schema": SCHEMA, "row": NAMES[type(row)], **to_json(row)})
    from_line(line)
    return line


def sealed(row: Mapping[str, Any]) -> str:
    """The line of a JSON object, with its sum."""
    text = json.dumps({**row})
    return f'{text[:-1]}{SUM}"{_sum(text)}"}}'


def from_line(line: str | bytes) -> Row:
    """The row of a line; raises BadField."""
    try:
        found = json.loads(line if isinstance(line, str) else line.decode())
    except (ValueError, RecursionError):  # not JSON, or not UTF-8
        raise BadField("damaged, it is no JSON") from None
    if type(found) is not dict:
        raise BadField("damaged, it is no JSON object")
    schema = found.pop("schema", None)
    if type(schema) is not int or schema < 1:
        raise BadField("missing" if schema is None else f"{schema!r} is no version", "schema")
    if schema > SCHEMA:
        raise BadField(f"written by a newer minfer: schema {schema}")
    text, _, _ = (line if isinstance(line, str) else line.decode()).rpartition(SUM)
    if found.pop("sum", None) != _sum(text + "}"):
        raise BadField("damaged, its sum is that of another text")
    name = found.pop("row", None)
    if type(name) is not str or name not in KINDS:
        raise BadField(f"{name!r} is none of {', '.join(KINDS)}", "row")
    made: Row = READERS[name](found)
    return made
