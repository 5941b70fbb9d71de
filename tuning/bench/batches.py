"""Attention of a batch of sequences on a GPU, as data: sizes, rows, cells, and what must come out.

A number of an input is a hash of where it stands, so every process makes the part that it needs,
alone and where it needs it: a child all of it on the GPU, the parent the rows that it checks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

from minfer import reference
from minfer.format import Floats, Int32, KvFormat
from minfer.window import CellSpan, runs_array, span_array
from tuning.bench.cases import FORMATS, Attention, Work
from tuning.bench.inputs import Expected, checked_heads, region

INPUTS = ("q", "k", "v")
LOW = (1 << 32) - 1


@dataclass(frozen=True)
class Batch(Attention):
    """The last n_q of n_cells positions in each of `batch` sequences, all in one arena.

    kinds: formats of the cells. torn: also measured with each sequence's rows in several runs.
    """

    what: ClassVar[str] = "batch"
    batch: int = 1
    kinds: tuple[str, ...] = FORMATS
    torn: bool = False

    @property
    def formats(self) -> tuple[str, ...]:
        return self.kinds

    @property
    def checked(self) -> tuple[list[int], list[int]]:
        """Queries, numbered through the batch, and KV heads that are compared with the oracle."""
        sequences = sorted({0, self.batch // 3, self.batch - 1})
        queries, kv_heads = super().checked
        return [s * self.n_q + i for s in sequences for i in queries], kv_heads

    def work(self, fmt: str, measure: str) -> Work:
        """Every product counts alike: matrix units make them."""
        one = super().work(fmt, measure)
        return Work(bytes=self.batch * one.bytes, fma=self.batch * (one.fma + one.int8))

    def label(self, measure: str) -> str:
        heads = f"{self.n_head}/{self.n_head_kv} d{self.head_dim}"
        return f"{self.kind} {self.batch}x{self.n_cells} {heads}"

    @property
    def positions(self) -> Int32:
        """int32 [batch * n_q]."""
        one = np.arange(self.n_cells - self.n_q, self.n_cells, dtype=np.int32)
        return np.tile(one, self.batch)


def numbers(index: Any) -> Any:
    """Numbers in [-2, 2), of deviation 1.15, from an int64 numpy array or torch tensor.

    The same float32 from both, exactly. The mixing is that of MurmurHash3.
    """
    x = index * 0x9E3779B1 & LOW
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ x >> shift) * factor & LOW
    x = ((x ^ x >> 16) - (1 << 31) >> 8) * 2.0**-22
    return x.astype(np.float32) if isinstance(x, np.ndarray) else x


def rows_of(case: Batch, name: str, rows: Any, heads: Any, dims: Any) -> Any:
    """Numbers [rows, heads, dims] of an input of INPUTS.

    rows: numbered through the batch. All three are int64 vectors of numpy or torch.
    """
    n_heads = case.n_head if name == "q" else case.n_head_kv
    index = (rows[:, None, None] * n_heads + heads[:, None]) * case.head_dim + dims
    return numbers(index + (INPUTS.index(name) << 30))


def placed(case: Batch, n_runs: int) -> list[list[CellSpan]]:
    """Where every sequence's rows lie: in n_runs runs with odd borders, which fill the arena.

    The last runs of all sequences come first.
    """
    n = case.n_cells
    inner = [(n * r // n_runs + n // 100) | 1 for r in range(1, n_runs)]
    cuts = [0, *inner, n]
    spans: list[list[CellSpan]] = [[] for _ in range(case.batch)]
    cell = 0
    for first, end in reversed(list(pairwise(cuts))):
        for of_sequence in spans:
            of_sequence.insert(0, CellSpan(first, cell, end - first))
            cell += end - first
    return spans


def cells_of(spans: list[list[CellSpan]]) -> Int32:
    """The cell of every row, sequence after sequence."""
    runs = [np.arange(s.cell, s.cell + s.length) for sequence in spans for s in sequence]
    return np.concatenate(runs).astype(np.int32)


def window_of(case: Batch, spans: list[list[CellSpan]]) -> Int32:
    """What every query sees: [lo, hi) of one run, else a table of runs."""
    positions = case.positions[: case.n_q].tolist()
    table = span_array if len(spans[0]) == 1 else runs_array
    return table([(of_sequence, positions) for of_sequence in spans])


def expected_batch(case: Batch, fmt: KvFormat) -> Expected:
    """The float64 answer over K and V as `fmt` stores them, for the checked queries and heads."""
    exact = np.concatenate(list(_answers(case, fmt)))
    return Expected(exact, exact, 0.0)


def _answers(case: Batch, fmt: KvFormat) -> Iterator[Any]:
    by_sequence: dict[int, list[int]] = {}
    for query in case.checked[0]:
        by_sequence.setdefault(query // case.n_q, []).append(query)
    for sequence, own in by_sequence.items():
        k, v = (region(fmt, rows) for rows in _checked_cells(case, sequence))
        heads = np.array(checked_heads(case))
        q = rows_of(case, "q", np.array(own), heads, np.arange(case.head_dim))
        positions = case.positions[own]
        runs, scale = reference.runs_of(positions, None), case.head_dim**-0.5
        yield reference.attention(q, k, v, positions, runs, fmt=fmt, scale=scale, width=0)


@lru_cache(maxsize=3)  # the sequences of a case, for every format
def _checked_cells(case: Batch, sequence: int) -> list[Floats]:
    """K and V [n_cells, checked KV heads, d] of one sequence."""
    rows = sequence * case.n_cells + np.arange(case.n_cells)
    dims = np.arange(case.head_dim)
    return [rows_of(case, name, rows, np.array(case.checked[1]), dims) for name in ("k", "v")]
