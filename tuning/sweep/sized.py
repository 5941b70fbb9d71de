"""Cases whose name is their op's form with other numbers, as rows of tables.

`r512-w4096` has the form of `r1-w576`. A table says for each op what its forms mean, how arguments
of given sizes are made, and what answers must be.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from minfer.format import BLOCK, KvFormat, Region
from minfer.ops import DECODE, PREFILL, Numerics, Shape
from minfer.tuned.rows import HEADED
from tuning.bench.cases import Work
from tuning.bench.checks import Check
from tuning.sweep.problem import Case, Problem, misshapen, same_values, within

DECODE_ROWS = 64  # rows of a step are those of decode up to this many, of prefill above
CACHES = 4 << 30  # bytes that no cache holds
Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Form:
    """example: a name; every number in it stands for a size of at least 1."""

    example: str

    def sizes(self, name: str) -> Sizes | None:
        """The numbers of a name, None if it has another form."""
        pattern = re.sub("[0-9]+", "([1-9][0-9]*)", re.escape(self.example))
        found = re.fullmatch(pattern, name)
        return tuple(map(int, found.groups())) if found else None


class Given(NamedTuple):
    """Arguments: tensors, by index what takes their place in version 1, and scalars."""

    tensors: tuple[Any, ...]
    other: Mapping[int, Any]
    scalars: Mapping[str, Any]


class Wanted(NamedTuple):
    """One part of an answer; allowed: how far a number may be off, None for not in one bit."""

    value: Any
    allowed: float | None = None


Make = Callable[..., Given]  # of a generator, the format that is stored, and sizes


@dataclass(frozen=True)
class Entry:
    """One op.

    shape: of sizes, what a choice of variant sees. bytes: of a format and sizes, how many a call
    reads and writes at least. truth: of a call's tensors and scalars, its answer. ways: how the op
    may be called; the first is timed, and each is gated at all `small` sizes, which come of those
    of the case. extra: more gate calls. stored: the one format it knows, None for any. row: index
    of the size that is whole blocks in q8_0. changed: regions that the op changes.
    """

    form: Form
    shape: Callable[..., Shape]
    bytes: Callable[..., float]
    truth: Callable[..., list[Wanted]]
    ways: tuple[Make, ...]
    small: Callable[..., Iterable[Sizes]]
    extra: Callable[[], Sequence[Given]] = list
    stored: KvFormat | None = None
    row: int = -1
    changed: tuple[int, ...] = ()

    def fits(self, fmt: KvFormat, sizes: Sizes) -> bool:
        """Whether rows of these sizes are whole blocks, where the format needs it."""
        return (self.stored or fmt) is not KvFormat.Q8_0 or sizes[self.row] % BLOCK == 0

    def problem(self, op: str, given: Given) -> Problem:
        """A call as a problem, judged in full."""
        tensors, other, scalars = given
        versions = (tensors, tuple(other.get(i, t) for i, t in enumerate(tensors)))

        @cache
        def truth(version: int) -> list[Wanted]:
            return self.truth(*versions[version], **scalars)

        def judge(version: int, numerics: Numerics, out: Any) -> Check:
            return compared(out, truth(version))

        return Problem(op, tensors, scalars, other, judge, changed=self.changed)


@dataclass(frozen=True)
class Sized(Case):
    """A case of a table."""

    table: ClassVar[Mapping[str, Entry]]
    op: str  # type: ignore[misc]
    sizes: Sizes

    @classmethod
    def parse(cls, op: str, name: str) -> Self | None:
        """The case of that name; None if it is not a name of such a case."""
        entry = cls.table[op]
        sizes = entry.form.sizes(name)
        if sizes is None:
            return None
        case = cls(name=name, op=op, sizes=sizes)
        whole = case.shape.n_head % case.shape.n_head_kv == 0
        return case if whole else None

    @property
    def entry(self) -> Entry:
        return self.table[self.op]

    @property
    def shape(self) -> Shape:
        return self.entry.shape(*self.sizes)

    @property
    def head_dim(self) -> int:
        return self.shape.head_dim if self.op in HEADED else 0

    def fits(self, fmt: KvFormat) -> bool:
        return self.entry.fits(fmt, self.sizes)

    def work(self, fmt: KvFormat) -> Work:
        """What no cache can hold of the bytes; nothing is claimed of smaller calls."""
        least = self.entry.bytes(self.entry.stored or fmt, *self.sizes)
        return Work(bytes=max(0.0, least - CACHES))

    def problem(self, fmt: KvFormat) -> Problem:
        return self._problem(self.entry.ways[0], fmt, self.sizes)

    def gate(self, fmt: KvFormat) -> list[Problem]:
        """Small odd calls, in every way that the op is called."""
        entry = self.entry
        small = [sizes for sizes in entry.small(*self.sizes) if entry.fits(fmt, sizes)]
        made = [self._problem(way, fmt, sizes) for way in entry.ways for sizes in small]
        return [*made, *(entry.problem(self.op, given) for given in entry.extra())]

    def _problem(self, way: Make, fmt: KvFormat, sizes: Sizes) -> Problem:
        rng = np.random.default_rng([zlib.crc32(self.op.encode()), *sizes])
        return self.entry.problem(self.op, way(rng, self.entry.stored or fmt, *sizes))


def kind_of(rows: int) -> str:
    """The kind of a step of that many rows."""
    return DECODE if rows <= DECODE_ROWS else PREFILL


def compared(out: Any, wanted: Sequence[Wanted]) -> Check:
    """A check of all parts of an answer: the first that fails, else the first."""
    parts = out if isinstance(out, tuple) else (out,)
    if len(parts) != len(wanted):
        return Check(False, float("nan"), 0, f"an answer of {len(parts)} parts")
    checks = [_part(part, *told) for part, told in zip(parts, wanted, strict=True)]
    return next((check for check in checks if not check.passed), checks[0])


def _part(found: Any, value: Any, allowed: float | None) -> Check:
    if isinstance(value, Region):
        return _same_cells(found, value)
    if (wrong := misshapen(found, value.shape, np.float32 if allowed else value.dtype)) is not None:
        return wrong
    if allowed is None:
        return same_values(found, value)
    return within(np.abs(found - value).max(initial=0), allowed, "absolute")


def _same_cells(found: Any, wanted: Region) -> Check:
    """Equal regions, byte for byte, cells that nothing was to touch included."""
    if not isinstance(found, Region) or replace(found, arrays=wanted.arrays) != wanted:
        return Check(False, float("nan"), 0, f"no region of {wanted.fmt} cells like the one given")
    (cells,), (told,) = found.arrays, wanted.arrays
    if (wrong := misshapen(cells, told.shape, told.dtype)) is not None:
        return wrong
    return within(np.count_nonzero(cells != told), 0, "bytes of cells that differ")
