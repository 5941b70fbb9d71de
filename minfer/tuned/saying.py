"""What a user is told about rows, once a process."""

from __future__ import annotations

import contextlib
import sys

_said: set[str] = set()


def say(line: str) -> None:
    """One line on stderr, unless it was said before; a stderr that is gone is no error."""
    if line in _said:
        return
    _said.add(line)
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            print(f"minfer: {line}", file=sys.stderr)
