"""Barrier deletion: is every barrier of a kernel missed when it is gone?"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from metalsim.context import Launched, checking_edited_only, launches
from metalsim.errors import MetalError

Span = tuple[int, int]

_BARRIER = re.compile(
    r"(?P<comment>//[^\n]*|/\*.*?\*/)|\b(?:threadgroup|simdgroup)_barrier\s*\([^()]*\)\s*;",
    re.DOTALL,
)


def barriers(text: str) -> list[Span]:
    """The spans of the barrier statements of an MSL text, comments left out."""
    return [m.span() for m in _BARRIER.finditer(text) if not m["comment"]]


def without(text: str, span: Span) -> str:
    """`text` with an empty statement in place of `span`; lines keep their numbers."""
    start, end = span
    return text[:start] + ";" + "\n" * text.count("\n", start, end) + text[end:]


class Unnoticed(NamedTuple):
    """A barrier whose deletion no check noticed."""

    kernel: str
    line: int
    text: str  # of the line


def unnoticed(thunk: Callable[[], Any]) -> list[Unnoticed]:
    """Runs `thunk` once for each barrier of each kernel text it launches, without that barrier.

    Only launches of the changed text run checked, the others fast. `thunk` should reach every
    barrier, on inputs as small as may be; a deletion is noticed by a MetalError.
    """
    with launches() as seen:
        thunk()
    missed = []
    for name, text in dict.fromkeys(seen):
        for span in barriers(text):
            if not _notices(thunk, Launched(name, text), span):
                line = text.count("\n", 0, span[0])
                missed.append(Unnoticed(name, line + 1, text.split("\n")[line].strip()))
    return missed


def _notices(thunk: Callable[[], Any], target: Launched, span: Span) -> bool:
    def delete(name: str, text: str) -> str:
        return without(text, span) if (name, text) == target else text

    try:
        with checking_edited_only(delete):
            thunk()
    except MetalError:
        return True
    return False
