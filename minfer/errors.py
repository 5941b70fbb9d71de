"""The one exception class users of minfer see when something is refused (contract 0.2)."""

from __future__ import annotations

from collections.abc import Mapping


class Refusal(Exception):
    """A request that is refused before anything changed.

    `rule` is the number of the contract rule, `message` names the numbers involved and the way
    out, `facts` holds the same numbers for programs. The command line prints the message on one
    line and leaves with `exit_code`.
    """

    exit_code = 2

    def __init__(self, rule: str, message: str, facts: Mapping[str, object] | None = None) -> None:
        super().__init__(message)
        self.rule = rule
        self.message = message
        self.facts = dict(facts or {})

    def __reduce__(self) -> tuple[type[Refusal], tuple[str, str, dict[str, object]]]:
        """Pickled by its parts, so that it crosses from one process to another."""
        return type(self), (self.rule, self.message, self.facts)

    def __str__(self) -> str:
        return f"{self.message} (contract {self.rule})"


class Damaged(Refusal):
    """A file whose bytes cannot be what they claim to be: cut short, corrupt or foreign."""

    exit_code = 3
