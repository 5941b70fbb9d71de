"""Draw a picture of the documentation: `python -m tuning figure [decode | tables]`."""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path

FIGURES = ("decode", "tables")
FOLDER = Path("docs/images")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the subcommand."""
    parser.add_argument("figure", nargs="?", choices=FIGURES, default="decode",
        help="decode: attention over a growing cache; tables: bookkeeping of the store; "
        "default %(default)s")  # fmt: skip
    parser.add_argument("--out", type=Path, help=f"default {FOLDER}/FIGURE.png")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def run(args: argparse.Namespace) -> None:
    """Measure, draw, print."""
    import matplotlib  # noqa: F401  # missing? said before minutes of measuring

    module = importlib.import_module(f"tuning.figures.{args.figure}")
    report = module.measure()
    module.draw(report, args.out or FOLDER / f"{args.figure}.png")
    print(json.dumps(report) if args.json else "\n".join(module.lines(report)))
