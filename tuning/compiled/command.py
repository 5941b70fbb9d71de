"""`python -m tuning compile`: options, the run, the report."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from minfer import settings
from minfer.device import LEAST_CAPABILITY, cores
from minfer.errors import Refusal
from minfer.kv.checks import whole_number
from minfer.window import WindowMode
from tuning.compiled.jobs import Job, Row, compiled, jobs

SPILLED = 1
HEADER = ("kernel", "variant", "cells", "head_dim", "window", "registers", "shared", "warps",
          "spills")  # fmt: skip
PAGE = """# Compiled kernels

What the default kernels of the CUDA backend take of a multiprocessor, by Triton {triton} and its
own `ptxas`, without a GPU. Made by

    python -m tuning compile {options}--markdown {path}

registers: of a thread. shared: bytes of a program. A kernel that several calls launch stands here
once; `split` has one for few rows and one for many. The command fails where a default spills, and
`make test` runs it for heads of 128.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the subcommand."""
    add = parser.add_argument
    add("--arch", nargs="+", type=int, default=[90], metavar="SM",
        help="architectures, as 80 90 100; default 90")  # fmt: skip
    add("--variant", nargs="+", default=[], metavar="NAME",
        help="only these: of an op, a variant or both, as attn_map_split")  # fmt: skip
    add("--defaults", action="store_true", help="only variants that are chosen unnamed")
    add("--head-dim", nargs="+", type=int, default=[128], metavar="N", help="default 128")
    add("--mode", nargs="+", choices=[m.value for m in WindowMode], default=["runs"],
        help="windows of attention; default runs")  # fmt: skip
    add("--spills", type=int, default=0, metavar="BYTES",
        help="that a default may spill; default 0")  # fmt: skip
    add("--jobs", type=int, default=cores(), help="processes; default %(default)s")
    add("--markdown", type=Path, metavar="FILE", help="write the table of the defaults to a page")


def run(args: argparse.Namespace) -> int:
    """Compile and report; 1 if something does not compile or a default spills more than it may."""
    started = time.monotonic()
    if settings.flag("TRITON_INTERPRET"):
        raise Refusal("0.3", "TRITON_INTERPRET=1 compiles nothing; unset it")
    n_jobs = whole_number(args.jobs, "--jobs", "10", low=1)
    whole_number(args.spills, "--spills", "10", low=0)
    prepare()
    major, minor = LEAST_CAPABILITY
    for arch in args.arch:
        whole_number(arch, "--arch", "0.3", low=10 * major + minor)
    for head_dim in args.head_dim:
        whole_number(head_dim, "--head-dim", "3.3", low=1)
    modes = [WindowMode(mode) for mode in args.mode]
    wanted = list(jobs(args.arch, args.head_dim, modes, args.variant, args.defaults))
    if not wanted:
        named = f"is named {', '.join(args.variant)} and " if args.variant else ""
        what = f"no variant {named}takes --head-dim {' '.join(map(str, args.head_dim))}"
        raise Refusal("6.6", f"{what}; `minfer variants --device cuda` lists them")
    found = once(rows(wanted, n_jobs))
    print("\n".join(table(found)))
    bad = [row for row in found if row.bad(args.spills)]
    for row in bad:
        print(f"\n{row.job}: {row.kernel} {row.error or 'spills'}", file=sys.stderr)
    print(f"{len(wanted)} calls, {len(found)} kernels, {time.monotonic() - started:.0f} s")
    if args.markdown is not None:
        args.markdown.write_text(page(found, args))
    return SPILLED if bad else 0


def prepare() -> None:
    """Before Triton is imported: where compiled kernels are kept."""
    os.environ.setdefault("TRITON_CACHE_DIR", str(settings.cache_dir() / "triton"))


def rows(wanted: Sequence[Job], n_jobs: int) -> Iterator[Row]:
    """What every job gives, in order, from so many processes."""
    with ProcessPoolExecutor(n_jobs, get_context("spawn"), prepare) as pool:
        for some in pool.map(compiled, wanted):
            yield from some


def once(found: Iterator[Row]) -> list[Row]:
    """Without kernels that stood before: another call launched the same one."""
    seen: set[str] = set()
    kept = []
    for row in found:
        if row.error or row.digest not in seen:
            kept.append(row)
        seen.add(row.digest)
    return kept


def cells(row: Row) -> tuple[str, ...]:
    """One line of the table, by `HEADER`."""
    job, used = row.job, row.usage
    what = (row.kernel or "-", f"{job.op}_{job.variant}", *job.words)
    if used is None:
        return (*what, "-", "-", "-", "does not compile")
    spilled = f"{used.stack} B, {used.local} instructions" if used.spills else "none"
    return (*what, str(used.registers), str(used.shared), str(used.warps), spilled)


def table(found: Sequence[Row]) -> list[str]:
    """Lines of text, columns aligned, one table an architecture."""
    lines = []
    for arch in dict.fromkeys(row.job.arch for row in found):
        grid = [HEADER, *(cells(row) for row in found if row.job.arch == arch)]
        widths = [max(len(line[i]) for line in grid) for i in range(len(HEADER))]
        lines += [f"sm_{arch}"]
        lines += ["  ".join(w.ljust(n) for w, n in zip(g, widths, strict=True)) for g in grid]
    return [line.rstrip() for line in lines]


def page(found: Sequence[Row], args: argparse.Namespace) -> str:
    """The defaults among the rows as a page of documentation."""
    import triton

    options = f"--variant {' '.join(args.variant)} " if args.variant else ""
    options += f"--arch {' '.join(map(str, args.arch))} --head-dim "
    options += f"{' '.join(map(str, args.head_dim))} --mode {' '.join(args.mode)} --defaults "
    lines = [PAGE.format(triton=triton.__version__, options=options, path=args.markdown)]
    for arch in dict.fromkeys(row.job.arch for row in found):
        lines += [f"## sm_{arch}\n", *map(_line, (HEADER, ("---",) * len(HEADER)))]
        chosen = [row for row in found if row.job.arch == arch and row.job.default]
        lines += [_line(cells(row)) for row in chosen] + [""]
    return "\n".join(lines).rstrip() + "\n"


def _line(words: Sequence[str]) -> str:
    return f"| {' | '.join(words)} |"
