"""The options of `python -m tuning sweep`, and what is refused before anything starts."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from minfer.device import Device, DeviceKind, cores
from minfer.errors import Refusal
from minfer.format import KvFormat
from minfer.kv.checks import THREADS_MAX, whole_number
from minfer.ops import OPS
from tuning.sweep.budget import Budget
from tuning.sweep.search import PRUNERS, SAMPLERS, by_name
from tuning.sweep.sittings import SITTINGS

DATABASE = Path("tuning/results/sweeps.jsonl")
WEEK = 7 * 86400  # seconds; what no clock overflows at
EXAMPLES = """examples:
  python -m tuning sweep --op attn_window --device cpu --fmt q8_0 --case 'decode-*' --budget 200
  python -m tuning sweep --op attn_window --device cuda --search tpe --budget 5m --jobs 8
  python -m tuning sweep --op attn_window --device cpu --fmt f32 --add my_attention.py \\
      --variant mine --case decode-1x777-h6/2-d64
  python -m tuning sweep --op attn_window --fmt q8_0 --case 'decode-*' --resume    after a break
"""


def add_shared_arguments(parser: argparse.ArgumentParser) -> None:
    """What is timed and how: options of every subcommand that has workers."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--op", required=True, help=f"one of {', '.join(OPS)}")
    add("--device", default="cpu", help="cpu, cuda or metal; default cpu")
    add("--fmt", help="f32, f16 or q8_0; default each that the op reads")
    add("--case", metavar="GLOB", help="cases by name, or the exact name of any size")
    add("--threads", type=int, default=cores(), metavar="N", help="of CPU kernels; default all")
    add("--add", action="append", default=[], metavar="FILE", help="a .py file with variants")
    add("--seconds", type=float, metavar="S",
        help="of the final rounds of a case, at most; default 20, on cuda 8")  # fmt: skip
    add("--sittings", type=int, default=SITTINGS, metavar="N",
        help="processes that the final rounds are spread over; default %(default)s")  # fmt: skip
    add("--timeout", type=float, default=120.0, metavar="S",
        help="after which a worker is given up; default 120")  # fmt: skip
    add("--json", action="store_true", help="print JSON, and no progress")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `sweep`."""
    add_shared_arguments(parser)
    parser.epilog = EXAMPLES
    add = parser.add_argument
    add("--variant", action="append", metavar="V",
        help="may be repeated, --list shows them; default all that fit")  # fmt: skip
    add("--search", default="tpe", metavar="S", help=f"{', '.join(SAMPLERS)}; default tpe")
    add("--pruner", default="threshold", metavar="P",
        help=f"{', '.join(PRUNERS)}; default threshold, half as slow again as the default",
    )  # fmt: skip
    add("--budget", default="200",
        help="trials or time of each question, finals not included: 10m, 1h30m, 45s; default 200",
    )  # fmt: skip
    add("--resume", action="store_true",
        help="with the same options: trials that were made are not made again")  # fmt: skip
    add("--jobs", type=int, metavar="N",
        help="workers that compile and check at once; one is timed at a time; default 1, on cuda "
        "half the cores, 8 at most")  # fmt: skip
    add("--database", type=Path, default=DATABASE, metavar="FILE", help=f"default {DATABASE}")
    add("--finals", type=int, default=6, metavar="N",
        help="configurations that go into the finals; 0 for none; default 6")  # fmt: skip
    add("--seed", type=int, default=0, help="of the search; default 0")
    add("--list", action="store_true", help="print questions, cases and sizes, and try nothing")


def checked_sweep(args: argparse.Namespace) -> argparse.Namespace:
    """`checked`, and what only `sweep` has."""
    importlib.import_module("optuna")  # its absence shows before anything is tried
    by_name(SAMPLERS, args.search, "search")
    by_name(PRUNERS, args.pruner, "pruner")
    args = checked(args)
    if args.jobs is None:
        args.jobs = min(8, max(1, cores() // 2)) if args.device == "cuda" else 1
    whole_number(args.jobs, "--jobs", "10", low=1, high=64)
    whole_number(args.finals, "--finals", "10", low=0, high=32)
    Budget.parse(args.budget)
    return args


def checked(args: argparse.Namespace) -> argparse.Namespace:
    """The shared options, or a refusal of the first thing that is wrong."""
    if args.op not in OPS:
        raise Refusal("0.3", f"op {args.op!r} is none of {', '.join(OPS)}", {"op": args.op})
    device = Device.parse(args.device)
    if (reason := device.unavailable()) is not None:
        raise Refusal("0.3", reason, {"device": args.device})
    formats = [fmt.value for fmt in KvFormat]
    if args.fmt not in (None, *formats):
        what = f"--fmt {args.fmt!r} is none of {', '.join(formats)}; leave it out for all"
        raise Refusal("3.1", what, {"fmt": args.fmt})
    if args.fmt is not None and not OPS[args.op].formats:
        what = f"{args.op} has no formats; leave --fmt out"
        raise Refusal("3.1", what, {"op": args.op, "fmt": args.fmt})
    whole_number(args.sittings, "--sittings", "10", low=1, high=64)
    whole_number(args.threads, "--threads", "10", low=1, high=THREADS_MAX)
    if args.seconds is None:
        args.seconds = 8.0 if device.kind is DeviceKind.CUDA else 20.0
    for name in ("timeout", "seconds"):
        if not 0 < getattr(args, name) <= WEEK:
            what = f"--{name} {getattr(args, name)} is no time; give seconds above 0, "
            what += f"{WEEK} at most"
            raise Refusal("10", what, {name: getattr(args, name)})
    args.add = [str(Path(file).resolve()) for file in args.add]
    return args
