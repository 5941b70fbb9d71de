"""Argument checks of the cell store: whole numbers, never bools or floats."""

from __future__ import annotations

from numbers import Integral

from minfer.errors import Refusal

INT32_MAX = 2**31 - 1


def whole_number(
    value: object, name: str, rule: str, low: int = 0, high: int = INT32_MAX, way_out: str = ""
) -> int:
    """`value` as an int in [low, high]; numpy integers count, bools and floats are refused.

    name: what the message calls it. way_out: a sentence added to the message.
    """
    if type(value) is int and low <= value <= high:
        return value
    if not isinstance(value, Integral) or isinstance(value, bool):
        problem = f"is no whole number ({type(value).__name__})"
    elif not low <= int(value) <= high:
        problem = f"lies outside [{low}, {high}]"
    else:
        return int(value)
    tail = f"; {way_out}" if way_out else ""
    raise Refusal(rule, f"{name} {value!r} {problem}{tail}", {name: value, "low": low})


def sequence_id(value: object) -> int:
    """A sequence id, the caller's own number in [0, 2^31 - 1] (contract 5.2)."""
    return whole_number(value, "sequence id", "5.2")
