"""The options of `python -m tuning bench`, and what they mean on each device."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minfer.device import Device, DeviceKind, cores
from minfer.errors import Refusal
from minfer.kv.checks import THREADS_MAX, whole_number
from minfer.pull import resolve_model
from tuning.bench.cases import Case, Model
from tuning.bench.contestants import Column, columns, gpu_columns
from tuning.bench.environment import last_level_cache
from tuning.bench.rounds import GPU_SAMPLE_SECONDS, Options
from tuning.bench.suites import GPU_QUICK, GPU_SUITES, QUICK, SUITES

PEERS = Path(".venv-peers/bin/python")
BESIDE = Path()  # --peers without a name
ROUNDS, QUICK_ROUNDS, SECONDS, GPU_SECONDS = 15, 2, 15.0, 4.0
ROTATE_CACHES = 8  # cold inputs rotate over this many last-level caches
QUICK_ROTATE = 1 << 16
GPU_ROTATE = 1 << 30  # many times the L2 of any GPU
MODEL = "smollm2"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the subcommand."""
    add = parser.add_argument
    add("--device", default="cpu", help="what is measured: cpu or cuda")
    add("--what", nargs="+", choices=list(SUITES), metavar="SUITE",
        help=f"any of {', '.join(SUITES)}; default all that the device has")  # fmt: skip
    add("--peers", nargs="?", type=Path, const=BESIDE, metavar="PYTHON",
        help=f"also time peers, in this interpreter; default {PEERS}, on cuda the one that "
        "runs this")  # fmt: skip
    add("--json", action="store_true", help="print everything as JSON instead of tables")
    add("--out", type=Path, metavar="FILE",
        help="write the JSON to a file as well, whole again after every shape")  # fmt: skip
    add("--threads", type=int, default=cores(), help="threads of every column; default %(default)s")
    add("--rounds", type=int, default=ROUNDS, help="at most; default %(default)s")
    add("--seconds", type=float,
        help=f"rounds of a shape end after that; default {SECONDS:g}, on cuda {GPU_SECONDS:g}",
    )  # fmt: skip
    add("--model", default=MODEL, help="a GGUF file, or the name of one; default %(default)s")
    add("--quick", action="store_true", help="tiny sizes and two rounds: does everything run?")


def refuse_device(device: Device) -> bool:
    """Whether it is a GPU; refuses one that is not measured, or not there."""
    if device.kind not in (DeviceKind.CPU, DeviceKind.CUDA):
        what = f"bench measures cpu and cuda, not {device.name}"
        raise Refusal("0.3", what, {"device": device.name})
    if (reason := device.unavailable()) is not None:
        raise Refusal("0.3", reason, {"device": device.name})
    return device.kind is DeviceKind.CUDA


def options_of(args: argparse.Namespace, on_gpu: bool) -> Options:
    """How everything is measured; refuses what would measure nothing."""
    rounds = whole_number(args.rounds, "--rounds", "10", low=1)
    seconds = args.seconds if args.seconds is not None else GPU_SECONDS if on_gpu else SECONDS
    if not 0 < seconds < math.inf:
        what = f"--seconds {seconds} is no time; give a finite number above 0"
        raise Refusal("10", what, {"seconds": seconds})
    threads = whole_number(args.threads, "--threads", "10", low=1, high=THREADS_MAX)
    rotate = GPU_ROTATE if on_gpu else ROTATE_CACHES * last_level_cache()
    how: dict[str, Any] = {"sample": GPU_SAMPLE_SECONDS, "settle": 0.0} if on_gpu else {}
    return Options(
        threads=threads,
        rounds=QUICK_ROUNDS if args.quick else rounds,
        seconds=seconds,
        rotate=QUICK_ROTATE if args.quick else rotate,
        model=args.model,
        **how,
    )


def cases_of(args: argparse.Namespace, on_gpu: bool) -> list[Case]:
    """What is measured; refuses a suite that the device lacks, and a model that is not there."""
    full, tiny = (GPU_SUITES, GPU_QUICK) if on_gpu else (SUITES, QUICK)
    suites = tiny if args.quick else full
    asked = args.what or list(suites)
    if lacking := [what for what in asked if what not in suites]:
        what = f"{args.device} has no suite {lacking[0]}, only {', '.join(suites)}"
        raise Refusal("10", what, {"suite": lacking[0], "suites": tuple(suites)})
    cases = [case for what in asked for case in suites[what]]
    named = args.model != MODEL  # then it must be there before anything is measured
    if named and any(isinstance(case, Model) for case in cases):
        resolve_model(args.model)
    return cases


def columns_of(args: argparse.Namespace, cases: Sequence[Case], on_gpu: bool) -> list[Column]:
    """Whose code runs."""
    default = Path(sys.executable) if on_gpu else PEERS
    peers = default if args.peers == BESIDE else args.peers
    peers = peers.absolute() if peers else None  # a link to the base stays a link
    return gpu_columns(peers, [case.what for case in cases]) if on_gpu else columns(peers)


def refuse_place(out: Path) -> None:
    """Refuse, before anything is measured, a file that cannot be written."""
    if out.is_dir() or not os.access(out if out.exists() else out.parent, os.W_OK):
        message = f"--out {out} cannot be written; name a file in a folder that can"
        raise Refusal("0.1", message, {"out": str(out)})
