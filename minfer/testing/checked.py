"""A cache beside its models: every call goes to both, and they must agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, cast

from minfer.errors import Refusal
from minfer.testing.cache import Cache, offers
from minfer.testing.contents import Contents, Group, Impossible
from minfer.testing.layout import Layout, Moved
from minfer.testing.places import compare_places

# Of the contract, by operation.
RULES = {
    "reserve": "5.2",
    "release": "5.2",
    "truncate": "5.11",
    "resize": "5.3",
    "reserve_with_defrag": "5.2, 5.3",
    "resize_with_defrag": "5.3",
    "defrag": "5.6",
    "share_prefix": "5.4",
    "copy_prefix": "5.8",
    "remove": "5.7",
    "shift": "5.7",
    "step": "5.5",
    "failing_step": "5.5",
}


class Checked:
    """Calls a cache and checks it after every call.

    What is wrong is an AssertionError with the calls so far as a note, which can be run again.
    refusals: the exceptions by which the cache refuses. A cache that tells its owners is held to
    the placement of contract 5; of another one only contents are checked, and where room decides,
    it may do as it likes. tally counts (operation, outcome), and what happened inside.
    """

    def __init__(
        self, cache: Cache, refusals: type[Exception] | tuple[type[Exception], ...] = Refusal
    ) -> None:
        self.cache = cast(Any, cache)
        self.refusals = refusals
        self.contents = Contents()
        self.layout = Layout(len(self.cache.owners())) if offers(self.cache, "owners") else None
        self.calls: list[str] = []
        self.tally: Counter[tuple[str, str]] = Counter()
        self._run_ids: dict[int, int] = {}
        self._last_value = 0

    def reserve(self, seq: int, cap: int) -> None:
        self._do("reserve", (seq, cap), self._same_slot)

    def release(self, seq: int) -> None:
        self._do("release", (seq,))

    def truncate(self, seq: int, rows: int) -> None:
        self._do("truncate", (seq, rows))

    def resize(self, seq: int, cap: int) -> None:
        self._do("resize", (seq, cap), self._same_slot)

    def defrag(self, need: int | None = None) -> None:
        self._do("defrag", (need,), self._same_moves)

    def reserve_with_defrag(self, seq: int, cap: int) -> None:
        self._do("reserve_with_defrag", (seq, cap), self._same_slot_and_moves)

    def resize_with_defrag(self, seq: int, cap: int) -> None:
        self._do("resize_with_defrag", (seq, cap), self._same_slot_and_moves)

    def share_prefix(self, src: int, dst: int, rows: int) -> None:
        self._do("share_prefix", (src, dst, rows))

    def copy_prefix(self, src: int, dst: int, rows: int) -> None:
        self._do("copy_prefix", (src, dst, rows))

    def remove(self, seq: int, start: int, length: int) -> None:
        self._do("remove", (seq, start, length))

    def shift(self, seq: int, drop: int) -> None:
        self._do("shift", (seq, drop))

    def write(self, seq: int, position: int, n: int) -> None:
        """`n` fresh rows of one sequence."""
        ((_, _, values),) = groups = self._fresh([(seq, position, n)])
        self._do(
            "write", (seq, position, n), model=("step", (groups,)), sent=(seq, position, values)
        )

    def append(self, seq: int, n: int) -> None:
        """`n` fresh rows at the end of a sequence."""
        ((_, _, values),) = groups = self._fresh([(seq, self.contents.written.get(seq, 0), n)])
        self._do("append", (seq, n), model=("step", (groups,)), sent=(seq, values))

    def step(self, groups: Sequence[tuple[int, int, int]]) -> None:
        """Fresh rows for every (sequence, position, number of rows)."""
        filled = self._fresh(groups)
        self._do("step", (groups,), self._same_copies, ("step", (filled,)), (filled,))

    def failing_step(self, groups: Sequence[tuple[int, int, int]], layers: int) -> None:
        """A step that breaks off after `layers` of its layers, or after the last of them."""
        filled = self._fresh(groups)
        self._do(
            "failing_step", (groups, layers), None, ("failing_step", (filled,)), (filled, layers)
        )

    def check(self) -> None:
        """Every row of every sequence, the tables, the statistics."""
        for seq in self.contents.written:
            got, wanted = list(self.cache.read(seq)), self.contents.read(seq)
            assert got == wanted, f"sequence {seq} reads {got}; it must read {wanted}"
        if offers(self.cache, "sequences"):
            known = sorted(self.cache.sequences())
            assert known == sorted(self.contents.written), f"the cache knows sequences {known}"
        if offers(self.cache, "check"):
            self.cache.check()
        if self.layout is not None:
            self._run_ids = compare_places(self.cache, self.layout, self._run_ids)

    def _fresh(self, groups: Sequence[tuple[int, int, int]]) -> list[Group]:
        filled: list[Group] = []
        for seq, position, n in groups:
            first = self._last_value + 1
            self._last_value += n
            filled.append((seq, position, list(range(first, first + n))))
        return filled

    def _do(
        self,
        name: str,
        args: tuple[Any, ...],
        compare: Callable[[Any, Any], None] | None = None,
        model: tuple[str, tuple[Any, ...]] | None = None,
        sent: tuple[Any, ...] | None = None,
    ) -> None:
        """One call. model: name and arguments on the models, sent: arguments to the cache."""
        self.calls.append(f"checked.{name}({', '.join(map(repr, args))})")
        operation, model_args = model or (name, args)
        try:
            self._call(name, args if sent is None else sent, operation, model_args, compare)
        except Exception as error:
            error.add_note("\n".join(["after these calls:", *self.calls]))
            raise

    def _call(
        self,
        name: str,
        args: tuple[Any, ...],
        operation: str,
        model_args: tuple[Any, ...],
        compare: Callable[[Any, Any], None] | None,
    ) -> None:
        contents, layout = self.contents.copy(), self.layout and self.layout.copy()
        impossible, wanted = None, None
        try:
            getattr(contents, operation)(*model_args)
            if name in getattr(self.cache, "never", ()):
                raise Impossible(f"this cache never does {name}")
            wanted = layout and getattr(layout, operation)(*model_args)
        except Impossible as reason:
            impossible = reason
        certain = layout is not None and impossible is None
        before = None if certain else self._state()
        try:
            answer = getattr(self.cache, name)(*args)
        except self.refusals as refusal:
            assert not certain, f"{name} is refused, and nothing speaks against it: {refusal}"
            _cites_a_rule(refusal, operation)
            assert self._state() == before, f"{name} was refused and changed something"
            self.tally[name, "refused"] += 1
            return
        assert impossible is None, f"{name} is not refused: {impossible}"
        self.tally[name, "done"] += 1
        self.contents, self.layout = contents, layout
        if layout is not None:
            self.tally.update({(event, "seen"): n for event, n in layout.events.items()})
            layout.events.clear()
        self.check()
        if layout is not None and compare is not None:
            compare(wanted, answer)

    def _state(self) -> object:
        """What a refusal must leave as it is."""
        if offers(self.cache, "state"):
            return self.cache.state()
        return {seq: list(self.cache.read(seq)) for seq in self.contents.written}

    def _same_slot(self, run: int, slot: Any) -> None:
        assert self.layout is not None
        place = self.layout.runs[run]
        wanted = (self._run_ids[run], place.start, place.cap)
        got = (slot.run, slot.start, slot.cap)
        assert got == wanted, f"the slot is run, start, cap {got}; it must be {wanted}"

    def _same_moves(self, wanted: list[Moved], moves: Any) -> None:
        named = [(self._run_ids[run], *rest) for run, *rest in wanted]
        got = [(move.run, move.src, move.dst, move.rows) for move in moves]
        assert got == named, f"moves (run, src, dst, rows) {got}; they must be {named}"

    def _same_slot_and_moves(self, wanted: tuple[int, list[Moved]], answer: Any) -> None:
        self._same_slot(wanted[0], answer[0])
        self._same_moves(wanted[1], answer[1])

    def _same_copies(self, rows: int, moves: Any) -> None:
        got = sum(move.rows for move in moves)
        assert got == rows, f"the step moved {got} rows; it must copy {rows}"


def _cites_a_rule(refusal: Exception, operation: str) -> None:
    """A refusal of minfer cites the operation's rule, or 2.5 for what is not there."""
    if isinstance(refusal, Refusal):
        rules = (*RULES[operation].split(", "), "2.5")
        assert refusal.rule in rules, f"{refusal!r} cites {refusal.rule}; it must be of {rules}"
