"""A parser, and how a command is added to one."""

from __future__ import annotations

import argparse
from typing import NoReturn

from minfer.errors import Refusal


class Parser(argparse.ArgumentParser):
    """A parser whose complaints are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(Refusal.exit_code, f"{self.prog}: {message} (see {self.prog} --help)\n")


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
