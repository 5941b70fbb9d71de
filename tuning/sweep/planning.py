"""What a sweep will try: its questions, their variants, and what is known already."""

from __future__ import annotations

import argparse
import contextlib
import secrets
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from minfer import registry, tuned
from minfer.device import Device, DeviceKind
from minfer.errors import Refusal
from minfer.format import KvFormat
from minfer.ops import OPS, Variant
from tuning.bench.environment import environment
from tuning.sweep.cases import cases_of, questions
from tuning.sweep.configuration import Question
from tuning.sweep.database import Database
from tuning.sweep.problem import Case
from tuning.sweep.rows import TIMEOUT, Session, Trial

Asked = dict[Question, list[Case]]
RECORDED = ("threads", "search", "pruner", "seed", "budget", "finals", "seconds", "timeout")


def asked(args: argparse.Namespace, device: Device, listed: Sequence[str] | None = None) -> Asked:
    """The questions of the arguments, with their cases; refuses what has none.

    listed: cases that are chosen from; None for those that sweeps time.
    """
    kind, found = tuned.device_kind(device), Asked()
    refusal: Refusal | None = None
    for fmt in _formats(args, device):
        try:
            stored = KvFormat(fmt) if fmt else None
            cases = cases_of(args.op, args.device, args.case, stored, listed)
        except Refusal as no_case:  # another format may have some
            refusal = no_case
            continue
        found |= questions(args.op, args.device, kind, fmt, cases)
    if not found and refusal is not None:
        raise refusal
    return found


def _formats(args: argparse.Namespace, device: Device) -> list[str]:
    """The one that was asked for, or each that some variant reads; "" where the op has none."""
    if not OPS[args.op].formats:
        return [""]
    return [args.fmt] if args.fmt else [f.value for f in KvFormat if _read(args.op, device, f)]


def _read(op: str, device: Device, fmt: KvFormat) -> bool:
    return any(fmt in variant.formats for variant in registry.variants(op, device))


def variants_for(
    question: Question, cases: Sequence[Case], names: Sequence[str] | None
) -> dict[str, Variant]:
    """Those that take all cases, by name. names: only these, which must take them."""
    device = Device.parse(question.device)
    there = {v.name: v for v in registry.variants(question.op, device)}
    for name in names or ():
        if name not in there:
            what = f"{question.op} has no variant {name!r} on {device}; there are "
            raise Refusal("6.6", what + ", ".join(there), {"variant": name})
    refused: dict[str, str] = {}
    for name, variant in there.items():
        if (why := _why_not(variant, question, cases, device)) is not None:
            refused[name] = why
    chosen = names or [name for name in there if name not in refused]
    for name in chosen:
        if name in refused:
            what = f"{question.op}_{name} cannot answer {question.key}: it {refused[name]}"
            raise Refusal("6.6", what, {"variant": name})
    if not chosen:
        why = "; ".join(f"{name} {reason}" for name, reason in refused.items())
        raise Refusal("6.6", f"no variant can answer {question.key}: {why}", {"op": question.op})
    return {name: there[name] for name in chosen}


def _why_not(
    variant: Variant, question: Question, cases: Sequence[Case], device: Device
) -> str | None:
    """Why a variant does not take some case, None if it takes them all."""
    fmt = KvFormat(question.fmt) if question.fmt else None
    if fmt is not None and fmt not in variant.formats:
        return f"does not read {fmt}"
    capability = device.package().compute_capability()
    reasons = (variant.limits.why_not(case.shape, capability, fmt) for case in cases)
    return next((why for why in reasons if why is not None), None)


def default_of(question: Question, cases: Sequence[Case]) -> Variant:
    """What the library takes for the cases by itself, promoted rows left out."""
    fmt = KvFormat(question.fmt or "f32")
    found = {
        choice.variant.name: choice.variant
        for case in cases
        for choice in [
            registry.select(
                question.op, device=question.device, fmt=fmt, shape=case.shape, promoted=False
            )
        ]
    }
    if len(found) > 1:
        what = f"cases of {question.key} have different defaults ({', '.join(found)}); "
        raise Refusal("6.4", what + "sweep them apart, by --case", {"defaults": list(found)})
    (variant,) = found.values()
    return variant


def session_of(
    args: argparse.Namespace, device: Device, asked: Asked, used: Mapping[str, Variant]
) -> Session:
    """The row that begins a run. used: every variant that it tries, by `<op>_<variant>`."""
    return Session(
        id=secrets.token_hex(8),
        date=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        questions=tuple(asked),
        options={
            **{name: getattr(args, name) for name in RECORDED},
            "cases": {q.key: [case.name for case in cases] for q, cases in asked.items()},
        },
        environment={
            **environment(),
            "made_with": dict(tuned.made_with(device)),
            "package": device.package().environment(),
            "clocks": clocks(device),
        },
        sources={name: tuned.source_of(variant) for name, variant in used.items()},
        command=("python", "-m", "tuning", *sys.argv[1:]),
    )


def clocks(device: Device) -> dict[str, Any]:
    """Clocks, and of an NVIDIA GPU its driver and temperature, where the system tells them."""
    if device.kind is DeviceKind.CPU:
        with contextlib.suppress(OSError):
            lines = Path("/proc/cpuinfo").read_text().splitlines()
            mhz = [float(line.partition(":")[2]) for line in lines if line.startswith("cpu MHz")]
            return {"cpu MHz": mhz} if mhz else {}
    if device.kind is not DeviceKind.CUDA:
        return {}
    names = ("driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "temperature.gpu")
    query = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader"]
    try:
        text = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    first = text.splitlines()[0] if text else ""
    return dict(zip(names, (part.strip() for part in first.split(",")), strict=False))


def known(database: Database, session: Session, question: Question) -> list[Trial]:
    """Trials of earlier runs that answer the same: equal sources, versions, threads and cases.

    A trial that took too long is not known where it may take longer now.
    """
    sources = {
        name.removeprefix(f"{question.op}_"): source for name, source in session.sources.items()
    }
    sessions = [row for row in database.rows() if isinstance(row, Session)]
    wanted = asked_alike(session, question)
    alike = {row.id: row for row in sessions if asked_alike(row, question) == wanted}

    def answers(trial: Trial) -> bool:
        if (old := alike.get(trial.session)) is None:
            return False
        return trial.status != TIMEOUT or old.options["timeout"] >= session.options["timeout"]

    return list(database.trials(question, sources, answers).values())


def asked_alike(session: Session, question: Question) -> tuple[Any, ...]:
    """What two sessions have in common whose trials answer the same."""
    cases = session.options.get("cases", {})
    named = cases.get(question.key) if isinstance(cases, dict) else None
    return session.options.get("threads"), session.environment.get("made_with"), named
