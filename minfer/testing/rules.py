"""The hypothesis machine: random calls on a `Checked` cache."""

from __future__ import annotations

import unittest
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import hypothesis
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from minfer.testing.cache import Cache
from minfer.testing.calls import Call, choose, family
from minfer.testing.checked import Checked

# The same strategy for every call: hypothesis mutates what it drew, and a number that does not fit
# in its new place would become the smallest.
NUMBERS = st.binary(min_size=8, max_size=12)


def _calls(
    by: Callable[[Checked, Iterable[int]], list[Call]],
) -> st.SearchStrategy[list[Call]]:
    """Calls on the cache of the machine that draws, chosen by drawn numbers."""

    @st.composite
    def chosen(draw: Callable[[st.SearchStrategy[Any]], Any]) -> list[Call]:
        return by(draw(st.runner()).checked, draw(NUMBERS))

    return chosen()


class StoreMachine(RuleBasedStateMachine):
    """Every operation that the cache offers, in any order."""

    make: ClassVar[Callable[[], Cache]]
    refusals: ClassVar[Any]
    tally: ClassVar[Counter[tuple[str, str]]]

    def __init__(self) -> None:
        super().__init__()
        self.checked = Checked(type(self).make(), self.refusals)

    @initialize(calls=_calls(family))
    def begin(self, calls: list[Call]) -> None:
        """Chance alone seldom makes sequences that share."""
        self.do(calls)

    @rule(calls=_calls(choose))
    def go_on(self, calls: list[Call]) -> None:
        """One operation, or two that belong together."""
        self.do(calls)

    def do(self, calls: list[Call]) -> None:
        """Make the calls, each checked."""
        for call in calls:
            call.on(self.checked)

    def teardown(self) -> None:
        self.tally.update(self.checked.tally)


def test_case(
    make_cache: Callable[[], Cache],
    *,
    examples: int | None,
    steps: int | None,
    seed: int | None,
    refusals: type[Exception] | tuple[type[Exception], ...],
) -> type[unittest.TestCase]:
    """See `minfer.testing.machine`."""
    body: dict[str, Any] = {
        "make": staticmethod(make_cache),
        "refusals": refusals,
        "tally": Counter(),
    }
    made: Any = type("StoreMachine", (StoreMachine,), body)
    if seed is not None:
        made = hypothesis.seed(seed)(made)
    case: Any = made.TestCase
    given: dict[str, Any] = {"max_examples": examples, "stateful_step_count": steps}
    if seed is not None:  # a run kept from before would come first
        case.settings = hypothesis.settings(case.settings, database=None)
    case.settings = hypothesis.settings(
        case.settings,
        report_multiple_bugs=False,
        phases=[phase for phase in case.settings.phases if phase is not hypothesis.Phase.explain],
        **{name: value for name, value in given.items() if value is not None},
    )
    case.tally = made.tally
    return case  # type: ignore[no-any-return]
