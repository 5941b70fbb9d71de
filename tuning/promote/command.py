"""`python -m tuning promote`: options, the differences, the files."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from minfer.commands.columns import printable
from minfer.errors import Refusal
from minfer.tuned.table import FOLDER
from tuning.promote.decisions import Candidate, candidates, latest
from tuning.promote.files import Change, change_of
from tuning.sweep import own_files
from tuning.sweep.database import Database
from tuning.sweep.selection import add_selection, check_selection, is_selected

EXAMPLES = """examples:
  python -m tuning promote                              show what would change
  python -m tuning promote --op attn_window --write     write it
  python -m tuning promote --add my_add.py --into rows --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the subcommand."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    add_selection(parser)
    add = parser.add_argument
    add("--add", action="append", default=[], metavar="FILE",
        help="a .py file of yours whose variants were swept")  # fmt: skip
    add("--into", type=Path, default=FOLDER, metavar="FOLDER",
        help="where the files of rows are; default minfer/tuned")  # fmt: skip
    add("--write", action="store_true", help="write the files, not only the differences")
    add("--json", action="store_true", help="print everything as JSON")


def run(args: argparse.Namespace) -> None:
    """Show what would change, and change it if asked to."""
    _check(args)
    changes, fates = promoted(args)
    if args.write:
        for change in changes:
            change.write()
    (_print_json if args.json else _print_text)(args, changes, fates)


def promoted(args: argparse.Namespace) -> tuple[list[Change], list[Candidate]]:
    """The files that change, and the fate of each decision that was asked for."""
    made = candidates(*latest(Database(args.database).rows()))
    wanted = [one for one in made if is_selected(one.question, args)]
    changes: list[Change] = []
    fates = [one for one in wanted if one.row is None]
    for kind in sorted({one.question.device_kind for one in wanted if one.row is not None}):
        some = [one for one in wanted if one.row and one.question.device_kind == kind]
        change, settled = change_of(args.into, kind, some)
        fates += settled
        if any(one.row for one in settled) and change.new != change.old:
            changes.append(change)
    return changes, fates


def _check(args: argparse.Namespace) -> None:
    """Refuse what cannot be meant, before anything is read."""
    check_selection(args)
    if not args.into.is_dir():
        message = f"{args.into} is no folder; make it first"
        raise Refusal("8.3", message, {"path": str(args.into)})
    own_files.add([str(Path(file).resolve()) for file in args.add], args.device or "cpu")


def _why_not(fates: Sequence[Candidate]) -> dict[str, str]:
    """Question -> why it makes no row."""
    return {printable(o.question.key): printable(o.why) for o in fates if o.row is None}


def _print_text(
    args: argparse.Namespace, changes: Sequence[Change], fates: Sequence[Candidate]
) -> None:
    for change in changes:
        print(change.difference, end="")
    for question, why in _why_not(fates).items():
        print(f"not promoted: {question}: {why}", file=sys.stderr)
    if not changes:
        print("nothing to promote" if fates else "there is no such decision", file=sys.stderr)
    elif args.write:
        print(f"wrote {', '.join(str(change.path) for change in changes)}", file=sys.stderr)
    else:
        print("nothing is written; --write does", file=sys.stderr)


def _print_json(
    args: argparse.Namespace, changes: Sequence[Change], fates: Sequence[Candidate]
) -> None:
    report = {
        "files": {str(change.path): change.difference for change in changes},
        "written": args.write,
        "promoted": [{"question": o.question.key, **o.row.as_dict()} for o in fates if o.row],
        "not_promoted": _why_not(fates),
    }
    print(json.dumps(report, indent=1))
