"""Random calls: which operation, with which arguments, how often."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from minfer.testing import arguments as to
from minfer.testing.cache import offers
from minfer.testing.checked import Checked
from minfer.testing.draws import SEQS, Drawn, There


class Call(NamedTuple):
    """One operation and its arguments; it prints as it is written down."""

    name: str
    args: tuple[Any, ...]

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(map(repr, self.args))})"

    def on(self, checked: Checked) -> None:
        """Do it."""
        getattr(checked, self.name)(*self.args)


class Kind(NamedTuple):
    """A kind of call: how to choose arguments, when it would do something, how often it comes."""

    name: str
    arguments: Callable[[Drawn], Sequence[Any]]
    when: Callable[[There], object]
    weight: int = 1

    def calls(self, drawn: Drawn) -> list[Call]:
        return [Call(self.name, tuple(self.arguments(drawn)))]


class Fork(Kind):
    """A sequence that is reserved to share: chance alone seldom does both."""

    def calls(self, drawn: Drawn) -> list[Call]:
        src, dst, cap, rows = self.arguments(drawn)
        return [Call("reserve", (dst, cap)), Call("share_prefix", (src, dst, rows))]


def _anything(there: There) -> object:
    return there.written


KINDS = (
    Kind("reserve", to.reserve, lambda there: there.free()[1]),
    Kind("append", to.append, to.can_append, 2),
    Kind("write", to.write, _anything),
    Kind("step", to.step, _anything),
    Fork("share_prefix", to.fork, to.can_fork, 2),
    Kind("step", to.rewrite_share, to.has_sharer, 2),
    Kind("step", to.rewrite_given, to.has_donor, 3),
    Kind("failing_step", to.failing_step, _anything),
    Kind("release", to.release, _anything),
    Kind("truncate", to.truncate, _anything),
    Kind("share_prefix", to.share_prefix, to.can_share),
    Kind("copy_prefix", to.copy_prefix, to.can_copy),
    Kind("remove", to.remove, to.can_remove),
    Kind("shift", to.shift, to.can_shift),
    Kind("resize", to.resize, _anything),
    Kind("resize_with_defrag", to.resize_with_defrag, _anything),
    Kind("reserve_with_defrag", to.reserve_with_defrag, lambda there: there.free()[0]),
    Kind("defrag", to.defrag, There.can_move, 2),
)


def choose(checked: Checked, numbers: Iterable[int]) -> list[Call]:
    """The next calls: an operation that the cache offers, with arguments chosen by `numbers`."""
    drawn = Drawn(iter(numbers), checked)
    kinds = [
        kind
        for kind in KINDS
        if offers(checked.cache, kind.name) and kind.when(drawn)
        for _ in range(kind.weight)
    ]
    # An arena that is full of orphans does not come about: their readers can be released.
    return kinds[drawn.number(0, len(kinds) - 1)].calls(drawn)


def family(checked: Checked, numbers: Iterable[int]) -> list[Call]:
    """A beginning: a sequence at the bottom, one with rows above it, and some that share these."""
    drawn = Drawn(iter(numbers), checked)
    below, cap = drawn.number(0, 3), drawn.number(0, 5)
    rows = max(1, cap - drawn.number(0, 1))
    calls = [Call("reserve", (SEQS, below))] if below else []
    if cap:
        calls += [Call("reserve", (0, cap)), Call("write", (0, 0, rows))]
    if cap and offers(checked.cache, "share_prefix"):
        for seq in range(1, 1 + drawn.number(0, 2)):
            calls.append(Call("reserve", (seq, drawn.number(1, 4))))
            calls.append(Call("share_prefix", (0, seq, drawn.number(1, rows))))
    return calls
