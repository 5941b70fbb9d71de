"""Which questions of a database are meant: options of the commands that read it."""

from __future__ import annotations

import argparse
from pathlib import Path

from minfer.device import Device
from minfer.errors import Refusal
from minfer.format import KvFormat
from minfer.ops import OPS
from tuning.sweep.configuration import Question
from tuning.sweep.options import DATABASE


def add_selection(parser: argparse.ArgumentParser) -> None:
    """`--database`, `--op`, `--device` and `--fmt`."""
    add = parser.add_argument
    add("--database", type=Path, default=DATABASE, metavar="FILE",
        help="rows of sweeps; default %(default)s")  # fmt: skip
    add("--op", help="only questions of this op")
    add("--device", help="only those of this device: cpu, cuda or metal")
    add("--fmt", help="only those of this format: f32, f16 or q8_0")


def check_selection(args: argparse.Namespace) -> None:
    """Refuse what names nothing that could be there, and a database that is not."""
    if args.op is not None and args.op not in OPS:
        raise Refusal("0.3", f"op {args.op!r} is none of {', '.join(OPS)}", {"op": args.op})
    if args.device is not None:
        Device.parse(args.device)
    if args.fmt is not None:
        KvFormat.parse(args.fmt)
    if not args.database.exists():
        message = f"{args.database} is not there; `python -m tuning sweep` writes it"
        raise Refusal("0.1", message, {"path": str(args.database)})


def is_selected(question: Question, args: argparse.Namespace) -> bool:
    """Whether it is of the op, device and format that were asked for."""
    pairs = ((args.op, question.op), (args.device, question.device), (args.fmt, question.fmt))
    return all(asked in (None, there) for asked, there in pairs)
