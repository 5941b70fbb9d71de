"""`python -m tuning COMMAND`: measuring minfer."""

from __future__ import annotations

import argparse
import importlib
import sys

from minfer.errors import Refusal
from tuning.bench.protocol import ChildFailed

COMMANDS = {  # name: its module, imported when asked for, and what it does
    "bench": ("tuning.bench.command", "time the kernels, and peers beside them"),
    "compile": ("tuning.compiled.command", "compile the CUDA kernels, which takes no GPU"),
    "sweep": ("tuning.sweep.command", "try configurations of kernels, and decide"),
    "compare": ("tuning.compare.command", "time what is promoted beside the defaults"),
    "report": ("tuning.report.command", "show what sweeps found, as text and pictures"),
    "promote": ("tuning.promote.command", "take what sweeps decided into minfer, as a diff"),
    "figure": ("tuning.figure", "draw a picture of the documentation"),
}
EXTRAS = {  # by module: what installs it
    "optuna": "tune",
    "rich": "bench",
    "matplotlib": "bench",
    "torch": "cuda",
    "triton": "cuda",
}


def main(argv: list[str] | None = None) -> int:
    """Run a command; 0 done, 2 or 3 refused or not written, 70 a column that does not run.

    1: a kernel that does not compile, or a default that spills.
    """
    parser = argparse.ArgumentParser(prog="python -m tuning", description="Measuring minfer.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    given = sys.argv[1:] if argv is None else argv
    try:
        for name, (module, text) in COMMANDS.items():
            sub = commands.add_parser(name, help=text)
            if given[:1] == [name]:
                command = importlib.import_module(module)
                command.add_arguments(sub)
                sub.set_defaults(run=command.run)
        args = parser.parse_args(given)
        return int(args.run(args) or 0)
    except Refusal as refusal:
        print(refusal, file=sys.stderr)
        return refusal.exit_code
    except ModuleNotFoundError as missing:
        if missing.name not in EXTRAS:
            raise
        way_out = f"pip install -e '.[{EXTRAS[missing.name]}]'"
        print(f"{missing.name} is not installed; {way_out}", file=sys.stderr)
        return Refusal.exit_code
    except ChildFailed as failure:
        print(failure, file=sys.stderr)
        return 70
    except OSError as error:  # a full disk, a reader that left
        print(f"{error.filename or 'output'}: {error.strerror}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
