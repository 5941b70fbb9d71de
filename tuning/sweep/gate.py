"""The gate: nothing is timed before its answers are right.

Every call is made twice with the same arrays in two contents, then once more in the first one, so
that an answer kept from before is a wrong one; outputs lie in poisoned memory, and what an op
changes is a copy each time. Later calls leave an answer as it is, and arguments that are only read
too. Values of free tunables, which a choice takes by the number of queries, must give the bits of
their defaults (contract 6.4).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from minfer.device import Device
from minfer.format import Region
from minfer.ops import OPS, Numerics
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
    refuse_changes(bound)
    answers = []
    for version in (*VERSIONS, VERSIONS[0]):
        bound.turn(version)
        arguments = bound.arguments(choice, fresh=True)
        with poisoned(device):
            out = bound.launch(choice, arguments)
            found = bound.answer(out)
        judge(bound, version, numerics, found)
        answers.append((version, out))
    for version, out in answers[:-1]:
        try:
            judge(bound, version, numerics, bound.answer(out))
        except WrongAnswer as wrong:
            raise WrongAnswer(f"a later call changed an answer: {wrong}") from None
    refuse_changes(bound)


def refuse_changes(bound: Bound) -> None:
    """Raise `WrongAnswer` where a call wrote into what it may only read."""
    if changed := bound.altered():
        names = ", ".join(OPS[bound.problem.op].parameters[i] for i in changed)
        raise WrongAnswer(f"it changes its {names}, which it may only read")


def same_bits(bound: Bound, choice: Choice, plain: Choice) -> None:
    """Raise `WrongAnswer` where a choice has other bits than with free tunables at defaults."""
    answers = []
    for one in (choice, plain):
        out = bound.launch(one, bound.arguments(one, fresh=True))
        answers.append(b"".join(_bits(bound.answer(out))))
    if answers[0] != answers[1]:
        what = "other bits than with free tunables at their defaults; what changes bits is numeric"
        raise WrongAnswer(f"{what} (contract 6.4)")


def _bits(found: object) -> Iterator[bytes]:
    if isinstance(found, tuple | list):
        for part in found:
            yield from _bits(part)
    elif isinstance(found, Region):
        yield from _bits(found.arrays)
    else:
        yield np.asarray(found).tobytes()


def judge(bound: Bound, version: int, numerics: Numerics, found: object) -> None:
    """Raise `WrongAnswer` unless the oracle agrees."""
    try:
        seen = bound.problem.judge(version, numerics, found)
    except (AttributeError, TypeError, ValueError) as odd:  # not even an array of that kind
        raise WrongAnswer(f"an answer that cannot be compared: {odd}") from None
    if not seen.passed:
        what = f"error {seen.error:.3g} {seen.unit}, allowed {seen.tolerance:.3g}"
        raise WrongAnswer(what)
