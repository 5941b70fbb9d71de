"""Seeded inputs of a case. Whatever no query sees is NaN, so that a kernel which reads it shows."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from minfer import reference, window
from minfer.cases.table import CAUSAL, RUNS, SPAN, Case
from minfer.format import BLOCK, Floats, Int32, KvFormat, Region
from minfer.ops import DECODE
from minfer.window import CellSpan, Window, WindowMode

Spans = list[CellSpan]


@dataclass(frozen=True, eq=False)
class Inputs:
    """Arguments of one call, in numpy and in the canonical layout."""

    q: Floats
    k: Region
    v: Region
    positions: Int32
    window: Window
    groups: tuple[int, ...]
    fmt: KvFormat
    scale: float
    width: int
    kind: str

    @property
    def op(self) -> str:
        return self.window.mode.op

    def tensors(self, block_m: int) -> tuple[Any, ...]:
        """Positional arguments of the op, with tiles of at most `block_m` queries."""
        tiles = window.tiles(self.groups, block_m, decode=self.kind == DECODE)
        return (self.q, self.k, self.v, self.positions, self.window.array, tiles)

    @property
    def scalars(self) -> dict[str, Any]:
        """Keyword arguments of the op, without `config`."""
        return {"fmt": self.fmt, "scale": self.scale, "width": self.width}


@dataclass(frozen=True, eq=False)
class Rows:
    """One sequence before it lies anywhere: K and V [length, n_head_kv, d], queries [n, ...]."""

    q: Floats
    k: Floats
    v: Floats

    @property
    def first(self) -> int:
        """Position of the first query."""
        return len(self.k) - len(self.q)


def rows(rng: np.random.Generator, case: Case) -> list[Rows]:
    """Seeded rows of every sequence; block magnitudes differ, so that q8_0 scales do."""
    if case.loud:
        return [_loud_rows(rng, case, first, n) for first, n in case.sequences]
    n_head, n_head_kv = case.heads
    made = []
    for first, n in case.sequences:
        kv_shape = (first + n, n_head_kv, case.head_dim)
        k, v = (
            (rng.standard_normal(kv_shape) * rng.uniform(0.5, 1.5, (*kv_shape[:2], 1))).astype(
                np.float32
            )
            for _ in range(2)
        )
        q = rng.standard_normal((n, n_head, case.head_dim), dtype=np.float32)
        made.append(Rows(q, k, v))
    return made


def _loud_rows(rng: np.random.Generator, case: Case, first: int, n: int) -> Rows:
    """Whole numbers times a power of two: q up to 8, k and v up to 1."""

    def whole(n_rows: int, n_heads: int, unit: float) -> Floats:
        made = rng.integers(-127, 128, (n_rows, n_heads, case.head_dim))
        made[..., ::BLOCK] = 127  # q8_0 scales are powers of two, codes are the numbers
        return (made * unit).astype(np.float32)

    n_head, n_head_kv = case.heads
    k, v = (whole(first + n, n_head_kv, 2.0**-7) for _ in range(2))
    return Rows(whole(n, n_head, 2.0**-4), k, v)


def cut(rng: np.random.Generator, length: int, pieces: int) -> list[int]:
    """Lengths of `pieces` runs that make up `length`; the first is 1, borders are odd."""
    pieces = min(pieces, length)
    if pieces == 1:
        return [length]
    inner = rng.choice(np.arange(2, length), pieces - 2, replace=False)
    borders = [0, 1, *sorted(int(b) for b in inner), length]
    return [b - a for a, b in itertools.pairwise(borders)]


def scatter(rng: np.random.Generator, runs: Sequence[Sequence[int]]) -> tuple[list[Spans], int]:
    """Put the runs of all sequences into one arena in shuffled order, with gaps of 1 to 3 cells.

    Returns the spans of each sequence and the number of cells.
    """
    spans: list[Spans] = [[CellSpan(0, 0, 0)] * len(lengths) for lengths in runs]
    order = [(s, i) for s, lengths in enumerate(runs) for i in range(len(lengths))]
    cell = 0
    for index in rng.permutation(len(order)):
        s, i = order[index]
        cell += int(rng.integers(1, 4))
        spans[s][i] = CellSpan(sum(runs[s][:i]), cell, runs[s][i])
        cell += runs[s][i]
    return spans, cell + 2


def region(
    fmt: KvFormat,
    held: Sequence[Floats],
    spans: Sequence[Spans],
    n_cells: int,
    fill: float = np.nan,
    hidden: Sequence[int] = (),
) -> Region:
    """A canonical region with `held` rows [length, n_head_kv, d] of each sequence in its spans.

    Every other cell holds `fill`, and so do the first `hidden[s]` positions of sequence s.
    """
    _, n_head_kv, head_dim = held[0].shape
    arena = np.full((n_cells, n_head_kv * head_dim), fill, np.float32)
    for s, (own, parts) in enumerate(zip(held, spans, strict=True)):
        for position, cell, length in parts:
            arena[cell : cell + length] = own[position : position + length].reshape(length, -1)
            unseen = max(0, min(length, (hidden[s] if hidden else 0) - position))
            arena[cell : cell + unseen] = fill
    cells = reference.encode_rows(arena, fmt)
    return Region(fmt, "canonical", n_head_kv, head_dim, (cells,))


def make(case: Case, fmt: KvFormat) -> Inputs:
    """The inputs of `case`: equal for equal names, formats and versions of numpy."""
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    sequences = rows(rng, case)
    lengths = [cut(rng, len(s.k), case.pieces) for s in sequences]
    spans, n_cells = scatter(rng, lengths)
    if case.mode is CAUSAL:
        spans, n_cells = [[CellSpan(0, 0, len(sequences[0].k))]], len(sequences[0].k) + 3
    hidden = [max(0, s.first + 1 - case.width) if case.width else 0 for s in sequences]
    k, v = (
        region(fmt, [getattr(s, name) for s in sequences], spans, n_cells, hidden=hidden)
        for name in ("k", "v")
    )
    return Inputs(
        q=np.concatenate([s.q for s in sequences]),
        k=k,
        v=v,
        positions=np.concatenate([np.arange(s.first, len(s.k), dtype=np.int32) for s in sequences]),
        window=windows(case.mode, sequences, spans, case.width if case.clipped else 0),
        groups=tuple(len(s.q) for s in sequences),
        fmt=fmt,
        scale=case.head_dim**-0.5 if case.scale is None else case.scale,
        width=case.width,
        kind=case.kind,
    )


def windows(
    mode: WindowMode, sequences: Sequence[Rows], spans: Sequence[Spans], width: int
) -> Window:
    """The window of every query, in `mode`; clipped to `width` where it is not 0."""
    groups = [
        (parts, range(own.first, len(own.k))) for own, parts in zip(sequences, spans, strict=True)
    ]
    if mode is SPAN:
        return window.Span(window.span_array(groups, width))
    if mode is RUNS:
        return window.Runs(window.runs_array(groups, width))
    return window.Causal()
