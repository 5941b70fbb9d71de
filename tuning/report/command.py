"""`python -m tuning report`: options, text, JSON, a picture."""

from __future__ import annotations

import argparse
import json
import sys
from fnmatch import fnmatchcase
from pathlib import Path

from minfer.errors import Refusal
from minfer.kv.checks import whole_number
from tuning.report.account import Account
from tuning.report.history import History, histories
from tuning.sweep.database import Database
from tuning.sweep.selection import add_selection, check_selection, is_selected

PICTURES = (".png", ".svg")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the subcommand."""
    add_selection(parser)
    add = parser.add_argument
    add("--question", metavar="GLOB",
        help="only those whose line matches, as in '*decode d128'")  # fmt: skip
    add("--top", type=int, default=10, metavar="N",
        help="configurations that are listed; default %(default)s")  # fmt: skip
    add("--json", action="store_true", help="print everything as JSON")
    add("--plot", type=Path, metavar="FILE", help="draw the questions, as .png or .svg")


def run(args: argparse.Namespace) -> None:
    """Read, choose, draw, print."""
    _check(args)
    found = histories(Database(args.database).rows())
    wanted = [history for history in found if _is_wanted(history, args)]
    if found and not wanted:
        raise _unknown(args, found)
    if not wanted and args.plot is not None:
        message = f"{args.database} holds no trials, there is nothing to draw"
        raise Refusal("0.1", message, {"path": str(args.database)})
    if args.plot is not None:
        from tuning.report import picture

        picture.draw(wanted, args.plot)
        print(f"wrote {args.plot}", file=sys.stderr)
    accounts = [Account.of(history, args.top) for history in wanted]
    if args.json:
        print(json.dumps([account.as_dict() for account in accounts], indent=1))
    elif not accounts:
        print(f"{args.database} holds no trials")
    else:
        from tuning.report import text

        text.show(accounts, args.database)


def _check(args: argparse.Namespace) -> None:
    """Refuse what cannot be meant, before anything is read."""
    whole_number(args.top, "--top", "10", low=1)
    if args.plot is not None and args.plot.suffix not in PICTURES:
        message = f"--plot {args.plot} is no name of a {' or '.join(PICTURES)} file"
        raise Refusal("0.3", message, {"plot": str(args.plot)})
    check_selection(args)


def _is_wanted(history: History, args: argparse.Namespace) -> bool:
    question = history.question
    named = args.question is None or fnmatchcase(question.key, args.question)
    return named and is_selected(question, args)


def _unknown(args: argparse.Namespace, found: list[History]) -> Refusal:
    options = ("op", "device", "fmt", "question")
    asked = [f"--{n} {getattr(args, n)!r}" for n in options if getattr(args, n) is not None]
    keys = [history.question.key for history in found]
    message = f"no question in {args.database} is of {' '.join(asked)}; it holds {'; '.join(keys)}"
    return Refusal("0.1", message, {"questions": keys})
