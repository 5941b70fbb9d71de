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


# A kind that cannot be is replaced by one of those after it.
KINDS = (
    Kind("reserve", to.reserve, lambda there: there.free()[1]),
    Kind("append", to.append, to.can_append, 2),
    Kind("step", to.rewrite_share, to.has_sharer, 2),
    Fork("share_prefix", to.fork, to.can_fork, 2),
    Kind("write", to.write, _anything),
    Kind("remove", to.remove, to.can_remove, 2),
    Kind("step", to.rewrite_given, to.has_donor, 3),
    Kind("share_prefix", to.share_prefix, to.can_share),
    Kind("step", to.step, _anything),
    Kind("release", to.release, _anything),
    Kind("copy_prefix", to.copy_prefix, to.can_copy),
    Kind("truncate", to.truncate, _anything, 2),
    Kind("shift", to.shift, to.can_shift),
    Kind("failing_step", to.failing_step, _anything),
    Kind("defrag", to.defrag, There.can_move, 2),
    Kind("resize", to.resize, _anything),
    Kind("resize_with_defrag", to.resize_with_defrag, _anything),
    Kind("reserve_with_defrag", to.reserve_with_defrag, lambda there: there.free()[0]),
)
_OFTEN = tuple(kind for kind in KINDS for _ in range(kind.weight))


def choose(checked: Checked, numbers: Iterable[int]) -> list[Call]:
    """The next calls: an operation that the cache offers, with arguments chosen by `numbers`.

    A number means the same kind wherever that can be, so that a run is shortened well; else it
    means the next kind that can. A reservation or a release always can.
    """
    drawn = Drawn(iter(numbers), checked)
    first = drawn.number(0, len(_OFTEN) - 1)
    return next(
        kind.calls(drawn)
        for kind in (*_OFTEN[first:], *_OFTEN)
        if offers(checked.cache, kind.name) and kind.when(drawn)
    )


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
