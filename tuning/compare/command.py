"""`python -m tuning compare`: what the library chooses beside its defaults, on held-out shapes."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np

from minfer import registry, tuned
from minfer.device import Device
from minfer.errors import Refusal
from minfer.format import KvFormat
from minfer.registry import Choice
from tuning.bench.protocol import ChildFailed
from tuning.sweep import own_files, planning
from tuning.sweep.cases import held_out
from tuning.sweep.command import FINAL_WIDTH, SAMPLE_SECONDS, setting
from tuning.sweep.configuration import Configuration, Question
from tuning.sweep.crew import Worker, crew_of
from tuning.sweep.decision import Interval
from tuning.sweep.options import add_shared_arguments, checked
from tuning.sweep.paired import TRIM, compare, student
from tuning.sweep.problem import Case
from tuning.sweep.rows import OK
from tuning.sweep.timing import race
from tuning.sweep.trials import prepare, sample

LEAST, MOST, LEVEL = 10, 60, 0.975
TUNED, DEFAULT, CONTROL = "tuned", "default", "control"


@dataclass(frozen=True)
class Compared:
    """One case. ratio: time of the default over that of the choice; noise: of its twin's."""

    question: str
    case: str
    default: str
    tuned: str
    seconds: float
    ratio: Interval
    noise: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the subcommand."""
    add_shared_arguments(parser)
    parser.epilog = "Without --case: shapes that no sweep times. Exit code 1: a promoted row loses."


def run(args: argparse.Namespace) -> int:
    """Time every case whose choice is not the default; 1 if one is slower than the default."""
    args = checked(args)
    own_files.add(args.add, args.device)
    device = Device.parse(args.device)
    listed = held_out(args.op, args.device)
    if not listed and args.case is None:
        what = f"no shapes of {args.op} are held out; name one by --case"
        raise Refusal("10", what, {"op": args.op})
    asked = planning.asked(args, device, listed if args.case is None else None)
    rows: list[Compared] = []
    for question, cases in asked.items():
        for row in _compared(args, question, cases):
            rows.append(row)
            if not args.json:
                print(_line(row), flush=True)
    if args.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
    elif rows:
        mean = math.exp(sum(math.log(row.ratio.mid) for row in rows) / len(rows))
        print(f"{len(rows)} cases: {mean:.3f} times the default's speed, geometric mean")
    else:
        print(f"no promoted row changes what these cases get on {tuned.device_kind(device)}")
    return int(any(row.ratio.high < 1 for row in rows))


def _compared(
    args: argparse.Namespace, question: Question, cases: Sequence[Case]
) -> Iterator[Compared]:
    for case in cases:
        chosen, default = (_choice(question, case, promoted) for promoted in (True, False))
        if chosen != default:
            with crew_of(setting(args, question, [case]), 1, args.timeout) as crew:
                yield _timed(args, question, case, crew.workers[0], chosen, default)


def _choice(question: Question, case: Case, promoted: bool) -> Configuration:
    fmt = KvFormat(question.fmt or "f32")
    found: Choice = registry.select(
        question.op, device=question.device, fmt=fmt, shape=case.shape, promoted=promoted
    )
    return Configuration.of(found.variant, found.config)


def _timed(
    args: argparse.Namespace,
    question: Question,
    case: Case,
    worker: Worker,
    chosen: Configuration,
    default: Configuration,
) -> Compared:
    """Paired rounds of the choice, the default, and the default once more."""
    runs = {TUNED: chosen, DEFAULT: default, CONTROL: default}
    for key, configuration in runs.items():
        reply = prepare(worker, configuration, key, may_spill=True)
        if reply["status"] != OK:
            raise ChildFailed(
                f"{configuration.key} of {case.name} is {reply['status']}: {reply['message']}"
            )
    rounds = race(
        {key: partial(sample, worker, key, case.name) for key in runs},
        target=SAMPLE_SECONDS[Device.parse(args.device).kind],
        width=FINAL_WIDTH, least=LEAST, most=MOST, seconds=args.seconds,
    )  # fmt: skip
    if missing := [key for key in runs if key not in rounds]:
        raise ChildFailed(f"{case.name}: the {missing[0]} gives no times")
    centres, variances = compare(np.log([rounds[key] for key in runs]))
    n = len(rounds[DEFAULT])
    half = student(LEVEL, n - 2 * int(TRIM * n) - 1) * math.sqrt(variances[1, 0])
    return Compared(
        question=question.key,
        case=case.name,
        default=default.key,
        tuned=chosen.key,
        seconds=float(np.median(rounds[TUNED])),
        ratio=Interval(*(math.exp(centres[1, 0] + x) for x in (-half, 0.0, half))),
        noise=float(abs(math.expm1(centres[1, 2]))),
    )


def _line(row: Compared) -> str:
    ratio = f"{row.ratio.mid:.3f} ({row.ratio.low:.3f} to {row.ratio.high:.3f})"
    return (
        f"{row.question}, {row.case}: {row.seconds * 1e6:.1f} us, {ratio} times the speed of "
        f"{row.default}, with {row.tuned}; the default against itself {row.noise:.2%}"
    )
