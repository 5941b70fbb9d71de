"""Draw a picture of the documentation: `python -m tuning figure [decode | tables | gpu]`."""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from typing import Any

from minfer.errors import Refusal

FIGURES = ("decode", "tables", "gpu")
FOLDER = Path("docs/images")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the subcommand."""
    parser.add_argument("figure", nargs="?", choices=FIGURES, default="decode",
        help="decode: attention over a growing cache; tables: bookkeeping of the store; "
        "gpu: attention beside its peers; default %(default)s")  # fmt: skip
    parser.add_argument("--out", type=Path, help=f"default {FOLDER}/FIGURE.png")
    parser.add_argument("--from", dest="source", type=Path, metavar="FILE",
        help="draw what --json printed before, or for gpu what the benchmark wrote, and measure "
        "nothing")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def run(args: argparse.Namespace) -> None:
    """Measure or read, draw, print."""
    import matplotlib  # noqa: F401  # missing? said before minutes of measuring

    module = importlib.import_module(f"tuning.figures.{args.figure}")
    report = module.measure() if args.source is None else read(args.source)
    module.draw(report, args.out or FOLDER / f"{args.figure}.png")
    print(json.dumps(report) if args.json else "\n".join(module.lines(report)))


def read(source: Path) -> Any:
    """A report in a file; refuses one that is none."""
    try:
        return json.loads(source.read_text())
    except (OSError, ValueError) as error:
        message = f"--from {source} is no report in JSON: {error}"
        raise Refusal("0.1", message, {"from": str(source)}) from None
