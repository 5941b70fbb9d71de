"""`python -m tuning bench`: the run and its report."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from minfer import settings
from minfer.device import Device
from minfer.errors import Refusal
from minfer.pull import resolve_model
from tuning.bench.cases import Case, Model
from tuning.bench.contestants import OURS, Column, opened
from tuning.bench.environment import environment
from tuning.bench.lines import Printer
from tuning.bench.options import (
    add_arguments,
    cases_of,
    columns_of,
    options_of,
    refuse_device,
    refuse_place,
)
from tuning.bench.protocol import ChildFailed
from tuning.bench.results import rows
from tuning.bench.rounds import Contestant, Options, measure

__all__ = ["add_arguments", "measured", "run"]

READ_ROTATIONS = 2  # the read rate is that of twice as many bytes as cold inputs have
QUANTIZER = "llama-cpp-python"  # whose version ggml's column tells


def run(args: argparse.Namespace) -> None:
    """Measure and report."""
    on_gpu = refuse_device(Device.parse(args.device))
    options = options_of(args, on_gpu)
    if args.out is not None:
        refuse_place(args.out)
    cases = cases_of(args, on_gpu)
    started, facts = time.monotonic(), {**environment(), "device": args.device}

    def whole(report: dict[str, Any]) -> dict[str, Any]:
        return {"environment": facts, **report, "seconds": time.monotonic() - started}

    printer = Printer() if on_gpu and not args.json else None

    def keep(report: dict[str, Any]) -> None:
        if printer is not None:
            printer.show(report)
        if args.out is not None:
            with contextlib.suppress(OSError):  # said in the end
                args.out.write_text(json.dumps(whole(report), indent=1) + "\n")

    with opened(columns_of(args, cases, on_gpu)) as found:
        report = whole(measured(cases, found, options, keep))
    text = json.dumps(report, indent=1)
    try:
        if args.json:
            print(text, flush=True)
        elif printer is None:
            from tuning.bench.table import show

            show(report)
        else:
            printer.end(report)
    finally:  # a long run is kept where either can be written
        if args.out is not None:
            args.out.write_text(text + "\n")


def measured(
    cases: Sequence[Case],
    found: list[Column],
    options: Options,
    keep: Callable[[dict[str, Any]], None] = lambda report: None,
) -> dict[str, Any]:
    """All cases, with the machine's rates taken again before each; the best ones count.

    keep: is given the report so far after each case.
    """
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
            keep(report_of(done, skipped, found, rates, options))
        _take_rates(ours, rates, options)
    return report_of(done, skipped, found, rates, options)


def report_of(
    done: Sequence[tuple[Case, list[Contestant]]],
    skipped: Sequence[str],
    found: Sequence[Column],
    rates: dict[str, float],
    options: Options,
) -> dict[str, Any]:
    """All that is known, as plain data."""
    return {
        "threads": options.threads,
        "rounds": options.rounds,
        "rotate_bytes": options.rotate,
        "settle_seconds": options.settle,
        "rates": dict(rates),
        "columns": {
            c.name: {
                "missing": c.missing,
                "versions": c.versions,
                "suites": list(c.suites),
                "idle_cpu_seconds": c.idle,
            }
            for c in found
        },
        "skipped": list(skipped),
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
    source = resolve_model(options.model)
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
