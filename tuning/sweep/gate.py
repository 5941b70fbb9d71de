"""The gate: nothing is timed before its answers are right.

Every call is made twice with the same arrays in two contents, then once more in the first one, so
that an answer kept from before is a wrong one; outputs lie in poisoned memory, and what an op
changes is a copy each time.
"""

from __future__ import annotations

from minfer.device import Device
from minfer.ops import Numerics
from minfer.registry import Choice
from tuning.sweep.bound import Bound
from tuning.sweep.poison import poisoned
from tuning.sweep.problem import VERSIONS


class WrongAnswer(Exception):
    """An answer that is not that of the oracle; the text says by how much."""


def check(bound: Bound, choice: Choice, numerics: Numerics, device: Device) -> None:
    """Raise `WrongAnswer` unless the variant answers right in every version of the problem."""
    once = bound.arguments(choice, fresh=True)
    bound.launch(choice, once)  # what is compiled now does not meet poisoned memory
    for version in (*VERSIONS, VERSIONS[0]):
        bound.turn(version)
        arguments = bound.arguments(choice, fresh=True)
        with poisoned(device):
            found = bound.answer(bound.launch(choice, arguments))
        judge(bound, version, numerics, found)


def judge(bound: Bound, version: int, numerics: Numerics, found: object) -> None:
    """Raise `WrongAnswer` unless the oracle agrees."""
    try:
        seen = bound.problem.judge(version, numerics, found)
    except (AttributeError, TypeError, ValueError) as odd:  # not even an array of that kind
        raise WrongAnswer(f"an answer that cannot be compared: {odd}") from None
    if not seen.passed:
        what = f"error {seen.error:.3g} {seen.unit}, allowed {seen.tolerance:.3g}"
        raise WrongAnswer(what)
