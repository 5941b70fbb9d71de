"""A run of the sweep as a row, and what earlier runs know."""

from __future__ import annotations

import argparse
import contextlib
import secrets
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from minfer import tuned
from minfer.device import Device, DeviceKind
from minfer.ops import Variant
from tuning.bench.environment import environment
from tuning.sweep.configuration import Question
from tuning.sweep.database import Database
from tuning.sweep.planning import Asked
from tuning.sweep.rows import TIMEOUT, Session, Trial

RECORDED = (
    "threads",
    "search",
    "pruner",
    "seed",
    "budget",
    "finals",
    "sittings",
    "seconds",
    "timeout",
)


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
