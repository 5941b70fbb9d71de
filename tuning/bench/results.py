"""The rows of a report, as plain data: JSON has everything, the table the most of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tuning.bench import statistics
from tuning.bench.cases import Case, Work
from tuning.bench.contestants import CONTROL, OURS
from tuning.bench.rounds import Contestant

Row = dict[str, Any]


def rows(case: Case, racers: Sequence[Contestant], rates: Mapping[str, float]) -> list[Row]:
    """One row for each measure and format. Times are seconds of one call."""
    made = [
        row(case, measure, fmt, {r.column.name: r for r in racers if r.fmt == fmt}, rates)
        for measure in case.measures
        for fmt in case.formats
        if case.takes(fmt, measure) and any(r.fmt == fmt for r in racers)
    ]
    for one in made:
        one["of_f16"] = _of_f16(one, made)
    return made


def _of_f16(row: Row, rows: Sequence[Row]) -> Row | None:
    """How many times our own time in f16, in the same rounds; None for that row itself."""
    for other in rows:
        if other["measure"] == row["measure"] and other["format"] == "f16" != row["format"]:
            ours, theirs = (r["columns"].get(OURS, {}).get("samples", []) for r in (row, other))
            if ours and len(ours) == len(theirs):
                return statistics.ratios(ours, theirs)._asdict()
    return None


def row(
    case: Case,
    measure: str,
    fmt: str,
    racers: Mapping[str, Contestant],
    rates: Mapping[str, float],
) -> Row:
    """What is known of one measure in one format."""
    work = case.work(fmt, measure)
    floor, peer_floor = statistics.floor(work, rates), statistics.peer_floor(work, rates)
    ours = racers.get(OURS)
    base = ours.samples.get(measure, []) if ours and ours.status == "timed" else []
    noise = None
    if base and CONTROL in racers and racers[CONTROL].status == "timed":
        noise = statistics.noise(racers[CONTROL].samples[measure], base)
    return {
        "what": case.what,
        "case": case.message(),
        "label": case.label(measure),
        "measure": measure,
        "format": fmt,
        "tokens": case.tokens(measure),
        "cold": case.cold,
        "work": None if work is None else vars(work),
        "floor": floor,
        "noise": noise,
        "columns": {
            name: cell(
                racer, measure, base, noise, work, peer_floor if racer.column.is_peer else floor
            )
            for name, racer in racers.items()
        },
    }


def cell(
    racer: Contestant,
    measure: str,
    base: Sequence[float],
    noise: float | None,
    work: Work | None,
    floor: float | None,
) -> Row:
    """One column of a row. base: samples of ours. floor: that of this column."""
    found: Row = {"status": racer.status, "note": racer.note, "format": racer.computed_in}
    if racer.why:
        found["why"] = racer.why
    if racer.check is not None:
        found["check"] = racer.check._asdict()
    samples = racer.samples.get(measure, [])
    if racer.status != "timed" or not samples:
        return found
    time = statistics.summarize(samples)
    found |= {"seconds": time._asdict(), "samples": samples}
    if work is not None and (speed := statistics.speed(work, time.median)):
        found |= speed
    if floor:
        found["of_floor"] = floor / time.median
    if statistics.impossible(time.median, floor):
        found |= {"status": "impossible", "why": f"the floor is {floor:.3g} s"}
    elif racer.column.name != OURS and len(samples) == len(base):
        ratio = statistics.ratios(samples, base)
        found["ratio"] = ratio._asdict()
        found["tie"] = noise is not None and statistics.tied(ratio.median, noise)
    return found
