"""A parser, and how a command is added to one."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from minfer.commands.columns import printable
from minfer.errors import Refusal


class Parser(argparse.ArgumentParser):
    """A parser whose complaints are one line, and of the command that they are about."""

    def error(self, message: str) -> NoReturn:
        what = f"{self.prog}: {printable(message)} (see {self.prog} --help)\n"
        self.exit(Refusal.exit_code, what)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As always, but nothing is left over for the parser above to complain of."""
        found, left = super().parse_known_args(args, namespace)
        if left:
            self.error(f"unrecognized arguments: {' '.join(left)}")
        return found, left


def add(
    commands: argparse._SubParsersAction[Parser],
    name: str,
    command: str,
    summary: str,
    example: str,
    json: str = "print one JSON object for machines",
) -> Parser:
    """A command; `command` is its function below `minfer.commands`, imported when it runs."""
    parser = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=f"examples:\n{example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(command=command)
    parser.add_argument("--json", action="store_true", help=json)
    return parser
