"""`python -m tuning bench`: options, the run, the report."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from minfer import settings
from minfer.device import Device, cores
from minfer.errors import Refusal
from minfer.kv.checks import THREADS_MAX, whole_number
from minfer.pull import resolve_model
from tuning.bench.cases import Case, Model
from tuning.bench.contestants import ANSWER_SECONDS, OURS, Column, columns, opened
from tuning.bench.environment import environment, last_level_cache
from tuning.bench.protocol import ChildFailed
from tuning.bench.results import rows
from tuning.bench.rounds import Contestant, Options, measure
from tuning.bench.suites import QUICK, SUITES

PEERS = Path(".venv-peers/bin/python")
ROUNDS, QUICK_ROUNDS, SECONDS = 15, 2, 15.0
ROTATE_CACHES = 8  # cold inputs rotate over this many last-level caches
READ_ROTATIONS = 2  # and the read rate is that of twice as many bytes
QUICK_ROTATE = 1 << 16
MODEL = "smollm2"
QUANTIZER = "llama-cpp-python"  # whose version ggml's column tells


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the subcommand."""
    add = parser.add_argument
    add("--device", default="cpu", help="what is measured: cpu")
    add("--what", nargs="+", choices=list(SUITES), default=list(SUITES), metavar="SUITE",
        help=f"any of {', '.join(SUITES)}; default all")  # fmt: skip
    add("--peers", nargs="?", type=Path, const=PEERS, metavar="PYTHON",
        help=f"also time ggml and torch, in this interpreter; default {PEERS}")  # fmt: skip
    add("--json", action="store_true", help="print everything as JSON instead of tables")
    add("--out", type=Path, metavar="FILE", help="write the JSON to a file as well")
    add("--threads", type=int, default=cores(), help="threads of every column; default %(default)s")
    add("--rounds", type=int, default=ROUNDS, help="at most; default %(default)s")
    add("--seconds", type=float, default=SECONDS,
        help="rounds of a shape end after that; default %(default)s")  # fmt: skip
    add("--quick", action="store_true", help="tiny sizes and two rounds: does everything run?")


def run(args: argparse.Namespace) -> None:
    """Measure and report."""
    device = Device.parse(args.device)
    if device.name != "cpu":
        raise Refusal("0.3", f"bench measures the cpu, not {device.name}", {"device": device.name})
    rounds = whole_number(args.rounds, "--rounds", "10", low=1)
    if not 0 < args.seconds < math.inf:
        what = f"--seconds {args.seconds} is no time; give a finite number above 0"
        raise Refusal("10", what, {"seconds": args.seconds})
    if args.out is not None:
        refuse_place(args.out)
    options = Options(
        threads=whole_number(args.threads, "--threads", "10", low=1, high=THREADS_MAX),
        rounds=QUICK_ROUNDS if args.quick else rounds,
        seconds=args.seconds,
        rotate=QUICK_ROTATE if args.quick else ROTATE_CACHES * last_level_cache(),
    )
    suites = QUICK if args.quick else SUITES
    started, facts = time.monotonic(), environment()
    peers = args.peers.absolute() if args.peers else None  # a link to the base stays a link
    with opened(columns(peers)) as found:
        report = measured([case for what in args.what for case in suites[what]], found, options)
    report = {"environment": facts, **report, "seconds": time.monotonic() - started}
    text = json.dumps(report, indent=1)
    try:
        if args.json:
            print(text, flush=True)
        else:
            from tuning.bench.table import show

            show(report)
    finally:  # a long run is kept where either can be written
        if args.out is not None:
            args.out.write_text(text + "\n")


def refuse_place(out: Path) -> None:
    """Refuse, before anything is measured, a file that cannot be written."""
    if out.is_dir() or not os.access(out if out.exists() else out.parent, os.W_OK):
        message = f"--out {out} cannot be written; name a file in a folder that can"
        raise Refusal("0.1", message, {"out": str(out)})


def measured(cases: Sequence[Case], found: list[Column], options: Options) -> dict[str, Any]:
    """All cases, with the machine's rates taken again before each; the best ones count."""
    ours = next(column for column in found if column.name == OURS)
    if ours.missing:
        raise ChildFailed(f"the column of minfer itself {ours.missing}")
    rates: dict[str, float] = {}
    done: list[tuple[Case, list[Contestant]]] = []
    skipped: list[str] = []
    with progress(len(cases)) as step:
        for case in cases:
            step(f"{case.what}: {case.label(case.measures[0])}")
            _take_rates(ours, rates, options)
            try:
                case = with_file(case, found, options) if isinstance(case, Model) else case
            except (Refusal, ChildFailed) as why:
                skipped.append(f"{case.label(case.measures[0])}: {why}")
                continue
            done.append((case, measure(case, found, options)))
        _take_rates(ours, rates, options)
    return {
        "threads": options.threads,
        "rounds": options.rounds,
        "rotate_bytes": options.rotate,
        "settle_seconds": options.settle,
        "rates": rates,
        "columns": {
            c.name: {"missing": c.missing, "versions": c.versions, "idle_cpu_seconds": c.idle}
            for c in found
        },
        "skipped": skipped,
        "rows": [row for case, racers in done for row in rows(case, racers, rates)],
    }


def _take_rates(ours: Column, rates: dict[str, float], options: Options) -> None:
    reply = ours.ask(
        do="machine", threads=options.threads, read_bytes=READ_ROTATIONS * options.rotate
    )
    for name, rate in reply["rates"].items():
        rates[name] = max(rate, rates.get(name, 0.0))


def with_file(case: Model, found: Sequence[Column], options: Options) -> Model:
    """The case with its model file: the pulled one, or one that ggml's own tool makes of it.

    Made files are kept, one for each size of the pulled one and version of the tool. Without ggml
    the one that is there is taken.
    """
    source = resolve_model(MODEL)
    if case.weights == "q4_1":
        return replace(case, path=str(source))
    folder = settings.cache_dir() / "bench"
    name = f"{source.stem}-{source.stat().st_size}-{case.weights}"
    ggml = next((c for c in found if c.name == "ggml" and not c.missing), None)
    if ggml is None:
        kept = sorted(folder.glob(f"{name}-*.gguf"))
        if len(kept) != 1:
            raise Refusal(
                "0.3",
                f"{folder} has {len(kept)} files {name}-VERSION.gguf, and ggml, which makes them, "
                "is not there to say which; use --peers",
                {"path": str(folder), "files": [path.name for path in kept]},
            )
        return replace(case, path=str(kept[0]))
    target = folder / f"{name}-{ggml.versions[QUANTIZER]}.gguf"
    if not target.exists():
        ggml.ask(
            ANSWER_SECONDS,
            do="requantize",
            source=str(source),
            target=str(target),
            weights=case.weights,
            threads=options.threads,
        )
    return replace(case, path=str(target))


@contextmanager
def progress(total: int) -> Iterator[Any]:
    """A bar on stderr, on a terminal; yields what is called with the name of each step."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("", total=total)
        steps = iter(range(total + 1))

        def step(name: str) -> None:
            bar.update(task, completed=next(steps), description=name)

        yield step
