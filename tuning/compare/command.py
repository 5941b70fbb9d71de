"""`python -m tuning compare`: what the library chooses beside its defaults, on held-out shapes."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from minfer import registry, settings, tuned
from minfer.device import Device
from minfer.errors import Refusal
from minfer.registry import Choice
from tuning.bench.protocol import ChildFailed
from tuning.sweep import own_files, planning
from tuning.sweep.cases import held_out
from tuning.sweep.command import FINAL_WIDTH, SAMPLE_SECONDS, setting
from tuning.sweep.configuration import Configuration, Question
from tuning.sweep.crew import crew_of
from tuning.sweep.decide import Beside, beside_default
from tuning.sweep.decision import Contender, Interval
from tuning.sweep.options import add_shared_arguments, checked
from tuning.sweep.problem import Case
from tuning.sweep.sittings import Rounds, sit
from tuning.sweep.trials import Ended, Precision

EXAMPLES = """Without --case: shapes that no sweep times. Exit code 1: a row loses in a case.

examples:
  python -m tuning compare --op attn_window --device cuda --fmt q8_0
  python -m tuning compare --op add --case r3-w896 --add my_add.py
"""
TUNED, DEFAULT, CONTROL = "tuned", "default", "control"


@dataclass(frozen=True)
class Compared:
    """The cases of a question whose choice is not the default. tuned: by case, what is chosen."""

    question: str
    default: str
    tuned: Mapping[str, str]
    beside: Beside


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the subcommand."""
    add_shared_arguments(parser)
    parser.epilog = EXAMPLES


def run(args: argparse.Namespace) -> int:
    """Time every case whose choice is not the default; 1 if one is slower than the default."""
    args = checked(args)
    own_files.add(args.add, args.device)
    device = Device.parse(args.device)
    listed = held_out(args.op, args.device)
    if not listed and args.case is None:
        what = f"no shapes of {args.op} are held out; name one by --case"
        raise Refusal("10", what, {"op": args.op})
    asked = planning.asked(args, device, listed)
    rows = []
    for question, cases in asked.items():
        row = _compared(args, question, cases)
        if row is not None:
            rows.append(row)
            if not args.json:
                print(_told(row), flush=True)
    if args.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
    elif not rows:
        kind = tuned.device_kind(device)
        off = " (MINFER_NO_TUNED=1 leaves rows out)" if settings.flag("MINFER_NO_TUNED") else ""
        print(f"no promoted row changes what these cases get on {kind}{off}")
    return int(any(_loses(row, ratio) for row in rows for ratio in row.beside.speedups.values()))


def _loses(row: Compared, ratio: Interval) -> bool:
    """Whether the default is faster, by more than it differs from itself."""
    return ratio.high < 1 and ratio.mid < 1 / (1 + row.beside.noise)


def _compared(
    args: argparse.Namespace, question: Question, cases: Sequence[Case]
) -> Compared | None:
    """Rounds of every case, in a process of its own; None where all get the default."""
    chosen: dict[str, str] = {}
    rounds: Rounds = {TUNED: {}, DEFAULT: {}, CONTROL: {}}
    default = ""
    for case in cases:
        runs = {role: _choice(question, case, role == TUNED) for role in rounds}
        if runs[TUNED] == runs[DEFAULT]:
            continue
        chosen[case.name], default = runs[TUNED].key, runs[DEFAULT].key
        found = _rounds(args, question, case, runs)
        for role, seconds in found.items():
            rounds[role] |= seconds
    if not chosen:
        return None
    contenders = {role: Contender(role, role, (), times) for role, times in rounds.items()}
    beside = beside_default(contenders[TUNED], contenders[DEFAULT], contenders[CONTROL])
    return Compared(question.key, default, chosen, beside)


def _choice(question: Question, case: Case, promoted: bool) -> Configuration:
    found: Choice = registry.select(
        question.op,
        device=question.device,
        fmt=question.stored,
        shape=case.shape,
        promoted=promoted,
    )
    return Configuration.of(found.variant, found.config)


def _rounds(
    args: argparse.Namespace, question: Question, case: Case, runs: Mapping[str, Configuration]
) -> Rounds:
    """Paired rounds of the choice, the default, and the default once more."""
    how = Precision(SAMPLE_SECONDS[Device.parse(args.device).kind], FINAL_WIDTH, args.seconds)
    with crew_of(setting(args, question, [case]), 1, args.timeout) as crew:
        try:
            return sit(crew, [case], runs, tuple(runs), how, args.sittings).rounds
        except Ended as ended:
            what = f"{runs[ended.who].key} of {case.name} is {ended.status}: {ended}"
            raise ChildFailed(what) from None


def _told(row: Compared) -> str:
    lines = [f"{row.question}, beside {row.default}: {_times(row.beside.speedup)}"]
    lines += [
        f"  {case}: {_times(ratio)}, {row.tuned[case]}" + "; it loses" * _loses(row, ratio)
        for case, ratio in row.beside.speedups.items()
    ]
    lines.append(f"  the default against itself: {row.beside.noise:.2%}")
    return "\n".join(lines)


def _times(ratio: Interval) -> str:
    return f"{ratio.mid:.3f} times the speed ({ratio.low:.3f} to {ratio.high:.3f})"
