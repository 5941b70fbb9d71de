"""Named attention cases with seeded inputs: the same ones serve tests, sweeps and examples.

Every size is odd on purpose: windows that start and end inside a tile of 16 and inside a
partition, runs of length 1, lengths on both sides of a partition border. Whatever no query sees
is NaN, so a kernel that reads outside a window shows it.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from minfer import reference, window
from minfer.format import BLOCK, Floats, Int32, KvFormat, Region
from minfer.ops import DECODE, PREFILL, Shape
from minfer.window import CellSpan, Window, WindowMode

Spans = list[CellSpan]


@dataclass(frozen=True)
class Case:
    """A batch of one kind.

    sequences: (first position, number of queries) of each. pieces: runs each sequence is cut
    into. clipped: the window input itself starts at the sliding width, not only the mask.
    """

    name: str
    kind: str
    heads: tuple[int, int]  # n_head, n_head_kv
    head_dim: int
    sequences: tuple[tuple[int, int], ...]
    mode: WindowMode = WindowMode.RUNS
    pieces: int = 1
    width: int = 0
    clipped: bool = False

    def fits(self, fmt: KvFormat) -> bool:
        """Whether head rows are whole blocks, where the format needs it (contract 3.3)."""
        return fmt is not KvFormat.Q8_0 or self.head_dim % BLOCK == 0

    @property
    def shape(self) -> Shape:
        """What a choice of variant depends on."""
        return Shape(
            kind=self.kind,
            n_q=sum(n for _, n in self.sequences),
            n_head=self.heads[0],
            n_head_kv=self.heads[1],
            head_dim=self.head_dim,
        )


CAUSAL, SPAN, RUNS = WindowMode.CAUSAL, WindowMode.SPAN, WindowMode.RUNS

CASES = (
    Case("one-cell", DECODE, (9, 3), 64, ((0, 1),), CAUSAL),
    Case("partition-less-one", DECODE, (4, 4), 80, ((254, 1),), SPAN),
    Case("partition", DECODE, (9, 3), 64, ((255, 1),), CAUSAL),
    Case("partition-and-one", DECODE, (4, 1), 96, ((256, 1),), SPAN),
    Case("two-partitions-and-one", DECODE, (14, 2), 128, ((512, 1),), RUNS, pieces=4),
    Case("wide-heads", DECODE, (8, 1), 256, ((300, 1),), RUNS, pieces=2),
    Case("tiny-heads", DECODE, (5, 1), 32, ((33, 1),), RUNS, pieces=3),
    Case("tiniest-heads", DECODE, (2, 1), 16, ((17, 2),), SPAN),
    Case("drafts", DECODE, (9, 3), 64, ((40, 3), (255, 1), (600, 8)), RUNS, pieces=3),
    Case("drafts-span", DECODE, (8, 2), 64, ((15, 2), (700, 5)), SPAN),
    Case("sliding", DECODE, (3, 1), 64, ((512, 2),), RUNS, pieces=4, width=100),
    Case("sliding-clipped", DECODE, (3, 1), 64, ((512, 2),), RUNS, 4, width=300, clipped=True),
    Case("sliding-one", DECODE, (4, 2), 64, ((270, 3),), CAUSAL, width=1),
    Case("first-token", PREFILL, (9, 3), 64, ((0, 1),), CAUSAL),
    Case("prompt", PREFILL, (9, 3), 64, ((0, 70),), CAUSAL),
    Case("chunk-over-border", PREFILL, (9, 3), 64, ((250, 13),), RUNS, pieces=4),
    Case("batch", PREFILL, (8, 2), 64, ((0, 33), (500, 20), (7, 1)), RUNS, pieces=3),
    Case("batch-span", PREFILL, (4, 4), 64, ((3, 35), (255, 2)), SPAN),
    Case("prompt-80", PREFILL, (4, 4), 80, ((17, 19),), RUNS, pieces=2),
    Case("prompt-96", PREFILL, (7, 1), 96, ((200, 60),), SPAN),
    Case("prompt-128", PREFILL, (8, 1), 128, ((509, 7),), RUNS, pieces=4),
    Case("prompt-256", PREFILL, (3, 1), 256, ((1, 34),), CAUSAL),
    Case("prompt-32", PREFILL, (6, 2), 32, ((90, 17),), RUNS, pieces=3),
    Case("prompt-16", PREFILL, (2, 1), 16, ((5, 33),), CAUSAL),
    Case("prompt-sliding", PREFILL, (9, 3), 64, ((0, 100),), CAUSAL, width=40),
    Case("chunk-sliding", PREFILL, (4, 2), 64, ((505, 37),), RUNS, pieces=4, width=300),
    Case("chunk-clipped", PREFILL, (4, 2), 64, ((505, 37),), RUNS, 4, width=271, clipped=True),
    Case("span-clipped", PREFILL, (4, 2), 64, ((250, 37),), SPAN, width=33, clipped=True),
)


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
        scale=case.head_dim**-0.5,
        width=case.width,
        kind=case.kind,
    )


def windows(
    mode: WindowMode, sequences: Sequence[Rows], spans: Sequence[Spans], width: int
) -> Window:
    """The window of every query, in `mode`; clipped to `width` where it is not 0."""
    groups = [
        (parts, range(rows.first, len(rows.k)))
        for rows, parts in zip(sequences, spans, strict=True)
    ]
    if mode is SPAN:
        return window.Span(window.span_array(groups, width))
    if mode is RUNS:
        return window.Runs(window.runs_array(groups, width))
    return window.Causal()
