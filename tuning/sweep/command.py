"""`python -m tuning sweep`: questions, one after the other, and what was decided."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from minfer import tuned
from minfer.device import Device, DeviceKind
from minfer.errors import Refusal
from tuning.bench.environment import last_level_cache
from tuning.bench.protocol import Message
from tuning.sweep import own_files, planning, sessions
from tuning.sweep.budget import Budget
from tuning.sweep.configuration import Configuration, Question
from tuning.sweep.crew import crew_of
from tuning.sweep.database import Database
from tuning.sweep.exploring import Exploration, Plan
from tuning.sweep.fields import to_json
from tuning.sweep.options import DATABASE, add_arguments, checked_sweep
from tuning.sweep.problem import Case
from tuning.sweep.progress import Progress
from tuning.sweep.rows import Decided, Session
from tuning.sweep.space import Space
from tuning.sweep.summary import listed, summary
from tuning.sweep.trials import Course, Precision

__all__ = ["add_arguments", "run"]

ROTATE_CACHES = 8  # cold inputs rotate over this many last-level caches
GPU_ROTATE = 256 << 20  # several times the L2 of any GPU
SAMPLE_SECONDS = {DeviceKind.CPU: 0.02, DeviceKind.CUDA: 0.004, DeviceKind.METAL: 0.02}
TRIAL_SECONDS = 0.8  # of a case
FINAL_WIDTH = 0.004  # of the interval of a ratio, at which rounds end


def run(args: argparse.Namespace) -> None:
    """Explore every question that the arguments ask."""
    args = checked_sweep(args)
    own_files.add(args.add, args.device)
    device = Device.parse(args.device)
    asked = planning.asked(args, device)
    database = Database(args.database)
    plans = _plans(args, asked)
    if args.list:
        print(listed({q: asked[q] for q in plans}, plans, args.json))
        return
    used = {f"{args.op}_{v.name}": v for plan in plans.values() for v in plan.used}
    session = sessions.session_of(args, device, asked, used)
    if args.database == DATABASE:
        args.database.parent.mkdir(exist_ok=True)
    database.append(session)
    made = []
    for question, plan in plans.items():
        row = _explored(args, question, asked[question], plan, session, database)
        if row is not None:
            made.append(row)
            if not args.json:
                print(summary(row, args.database, args.add), flush=True)
    if args.json:
        print(json.dumps([to_json(row) for row in made], indent=1))


def _plans(args: argparse.Namespace, asked: planning.Asked) -> dict[Question, Plan]:
    """Of the questions that some variant can answer; refuses where that is none."""
    found: dict[Question, Plan] = {}
    for question, cases in asked.items():
        try:
            found[question] = _plan(args, question, cases)
        except Refusal as refusal:  # a variant that was named is for another format, or kind
            why = refusal
    if not found:
        raise why
    return found


def _plan(args: argparse.Namespace, question: Question, cases: Sequence[Case]) -> Plan:
    default = planning.default_of(question, cases)
    return Plan(
        space=Space(list(planning.variants_for(question, cases, args.variant).values())),
        baseline=default,
        default=Configuration.default(default),
        sampler=args.search,
        pruner=args.pruner,
        seed=args.seed,
        budget=Budget.parse(args.budget),
        finals=0 if question.device_kind in tuned.SIMULATED else args.finals,
        final_precision=Precision(
            target=SAMPLE_SECONDS[Device.parse(args.device).kind],
            width=FINAL_WIDTH,
            seconds=args.seconds,
        ),
        sittings=args.sittings,
    )


def setting(args: argparse.Namespace, question: Question, cases: Sequence[Case]) -> Message:
    """What a worker is started with."""
    on_gpu = Device.parse(args.device).kind is DeviceKind.CUDA
    return {
        "op": args.op,
        "device": args.device,
        "fmt": question.fmt,
        "threads": args.threads,
        "rotate": GPU_ROTATE if on_gpu else ROTATE_CACHES * last_level_cache(),
        "add": args.add,
        "cases": [case.name for case in cases],
    }


def _explored(
    args: argparse.Namespace,
    question: Question,
    cases: Sequence[Case],
    plan: Plan,
    session: Session,
    database: Database,
) -> Decided | None:
    """One question, with workers of its own."""
    kind = Device.parse(args.device).kind
    course = Course(
        question=question,
        session=session.id,
        cases=cases,
        sources={v.name: session.sources[f"{args.op}_{v.name}"] for v in plan.used},
        precision=Precision(target=SAMPLE_SECONDS[kind], width=0.02, seconds=TRIAL_SECONDS),
        rates={},
        default={},
    )
    known = sessions.known(database, session, question) if args.resume else []
    with (
        Progress(question.key, args.json, question.device_kind not in tuned.SIMULATED) as bar,
        crew_of(setting(args, question, cases), args.jobs, args.timeout) as crew,
    ):
        if known:
            bar.say(f"{len(known)} trials of earlier runs are known")
            bar.known(known)
        try:
            return Exploration(crew, course, plan, database, bar, known).run()
        except KeyboardInterrupt:
            bar.say("stopped; the same command with --resume goes on")
            raise
