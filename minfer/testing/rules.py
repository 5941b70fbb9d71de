"""The hypothesis machine: random calls on a `Checked` cache."""

from __future__ import annotations

import unittest
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import hypothesis
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from minfer.testing import arguments as to
from minfer.testing import draws
from minfer.testing.cache import Cache, offers
from minfer.testing.checked import Checked


def _random(
    name: str,
    args: Callable[[draws.Drawn], Sequence[Any]],
    when: Callable[[draws.There], object] = lambda there: there.written,
) -> Callable[..., None]:
    """The rule that calls `name`, if the cache offers it and the call would do something."""

    def call(self: StoreMachine, args: tuple[Any, ...]) -> None:
        getattr(self.checked, name)(*args)

    def holds(self: StoreMachine) -> object:
        return self.offers(name) and when(draws.There(self.checked))

    call.__name__ = name
    return precondition(holds)(rule(args=draws.drawn(args))(call))


class StoreMachine(RuleBasedStateMachine):
    """Every operation that the cache offers, in any order."""

    make: ClassVar[Callable[[], Cache]]
    refusals: ClassVar[Any]
    tally: ClassVar[Counter[tuple[str, str]]]

    def __init__(self) -> None:
        super().__init__()
        self.checked = Checked(type(self).make(), self.refusals)

    def offers(self, name: str) -> bool:
        return offers(self.checked.cache, name)

    def teardown(self) -> None:
        self.tally.update(self.checked.tally)
        if self.checked.layout is not None:
            events = self.checked.layout.events
            self.tally.update({(event, "seen"): n for event, n in events.items()})

    reserve = _random("reserve", to.reserve, lambda there: there.free()[1])
    release = _random("release", to.release)
    truncate = _random("truncate", to.truncate)
    resize = _random("resize", to.resize)
    defrag = _random("defrag", to.defrag, draws.There.can_move)
    reserve_with_defrag = _random(
        "reserve_with_defrag", to.reserve_with_defrag, lambda there: there.free()[0]
    )
    resize_with_defrag = _random("resize_with_defrag", to.resize_with_defrag)
    share_prefix = _random("share_prefix", to.share_prefix, to.can_share)
    copy_prefix = _random("copy_prefix", to.copy_prefix, to.can_copy)
    remove = _random("remove", to.remove, to.can_remove)
    shift = _random("shift", to.shift, to.can_shift)
    write = _random("write", to.write)
    append = _random("append", to.append, to.can_append)
    step = _random("step", to.step)
    rewrite = _random("step", to.rewrite, to.can_rewrite)
    failing_step = _random("failing_step", to.failing_step)

    @initialize(args=draws.drawn(to.family))
    def family(self, args: tuple[Any, ...]) -> None:
        """Some sequences to begin with: one with rows, others that share them."""
        below, cap, rows, forks = args
        if below:
            self.checked.reserve(draws.SEQS, below)
        if cap:
            self.checked.reserve(0, cap)
            self.checked.write(0, 0, rows)
        for seq, (own, shared) in enumerate(forks if self.offers("share_prefix") else (), 1):
            self.fork((0, seq, own, shared))

    @precondition(
        lambda self: self.offers("share_prefix") and to.can_fork(draws.There(self.checked))
    )
    @rule(args=draws.drawn(to.fork))
    def fork(self, args: tuple[int, int, int, int]) -> None:
        """A sequence that is reserved to share: chance alone seldom does both."""
        src, dst, cap, rows = args
        self.checked.reserve(dst, cap)
        self.checked.share_prefix(src, dst, rows)


def test_case(
    make_cache: Callable[[], Cache],
    *,
    examples: int | None,
    steps: int | None,
    seed: int | None,
    refusals: type[Exception] | tuple[type[Exception], ...],
) -> type[unittest.TestCase]:
    """See `minfer.testing.machine`."""
    body = {"make": staticmethod(make_cache), "refusals": refusals, "tally": Counter()}
    made: Any = type("StoreMachine", (StoreMachine,), body)
    if seed is not None:
        made = hypothesis.seed(seed)(made)
    case: Any = made.TestCase
    given = {"max_examples": examples, "stateful_step_count": steps}
    case.settings = hypothesis.settings(
        case.settings,
        report_multiple_bugs=False,
        phases=[phase for phase in case.settings.phases if phase is not hypothesis.Phase.explain],
        **{name: value for name, value in given.items() if value is not None},
    )
    case.tally = made.tally
    return case  # type: ignore[no-any-return]
