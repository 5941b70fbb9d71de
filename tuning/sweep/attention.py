"""Attention as problems: batches that are timed, and small odd windows that must be right first.

A name says all: `decode-16x8192-h32/8-d128` is 16 sequences of 8192 cells, 32 query heads over 8
KV heads of 128; `prefill-1x4096q512-...` the last 512 of 4096 positions; `-r4` in four runs.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, ClassVar

import numpy as np

from minfer import cases, reference, registry, window
from minfer.cases.budgets import AttentionBudget
from minfer.device import Device, DeviceKind
from minfer.format import BLOCK, KvFormat, Region
from minfer.ops import DECODE, PREFILL, Numerics, Shape
from minfer.window import KV_MAP_MAX_SPANS, WindowMode
from tuning.bench.batches import Batch, cells_of, placed, rows_of, window_of
from tuning.bench.cases import Work
from tuning.bench.checks import Check
from tuning.bench.inputs import checked_heads
from tuning.sweep.problem import TILES, Case, Problem, Truths, misshapen, within

NAME = re.compile(
    r"(?P<kind>decode|prefill)-(?P<batch>\d+)x(?P<cells>\d+)(?:q(?P<n_q>[1-9]\d*))?"
    r"-h(?P<heads>\d+)/(?P<kv>\d+)-d(?P<d>\d+)(?:-r(?P<runs>[1-9]\d*))?"
)
HOST = Device(DeviceKind.CPU)
FLIPPED = -1.0  # queries of version 1 are those of version 0 times this


@dataclass(frozen=True)
class Attention(Case):
    """The last n_q of n_cells positions of every sequence of a batch."""

    batch: Batch
    runs: int

    @classmethod
    def parse(cls, name: str) -> Attention | None:
        """The case of that name; None if it is not a name of such a case."""
        found = NAME.fullmatch(name)
        if found is None:
            return None
        size = {key: int(text) for key, text in found.groupdict("0").items() if key != "kind"}
        decode, runs = found["kind"] == DECODE, size["runs"] or 1
        n_q = 1 if decode else size["n_q"] or size["cells"]
        whole = min(size["batch"], size["cells"], size["heads"], size["kv"], size["d"]) > 0
        if not whole or size["heads"] % size["kv"] or not 0 < n_q <= size["cells"]:
            return None
        if (decode and size["n_q"]) or runs > min(KV_MAP_MAX_SPANS, size["cells"]):
            return None
        if not decode and n_q == 1:  # one query is decode, whatever it is called
            return None
        kind = WindowAttention if runs == 1 else MapAttention
        batch = Batch(n_q, size["cells"], size["heads"], size["kv"], size["d"], size["batch"])
        return kind(name, batch, runs)

    @property
    def shape(self) -> Shape:
        b = self.batch
        return Shape(b.kind, b.batch * b.n_q, b.n_head, b.n_head_kv, b.head_dim)

    @property
    def cold(self) -> bool:
        return self.batch.cold

    @property
    def gate_key(self) -> Hashable:
        b = self.batch
        return b.kind, b.n_head, b.n_head_kv, b.head_dim

    @property
    def head_dim(self) -> int:
        return self.batch.head_dim

    def fits(self, fmt: KvFormat) -> bool:
        return fmt is not KvFormat.Q8_0 or self.head_dim % BLOCK == 0

    def work(self, fmt: KvFormat) -> Work:
        one = super(Batch, self.batch).work(fmt.value, "call")
        n = self.batch.batch
        return Work(bytes=n * one.bytes, fma=n * one.fma, int8=n * one.int8)

    def problem(self, fmt: KvFormat) -> Problem:
        b, spans = self.batch, placed(self.batch, self.runs)
        q = np.concatenate([_rows(b, "q", sequence) for sequence in range(b.batch)])
        k, v = (Cells(b, fmt, name, self.runs) for name in ("k", "v"))
        one = self.runs == 1 and b.batch == 1
        seen = None if one else window_of(b, spans)  # one sequence in one run is causal
        groups = [b.n_q] * b.batch
        return Problem(
            self.op,
            (q, k, v, b.positions, seen, TILES),
            {"fmt": fmt, "scale": b.head_dim**-0.5, "width": 0},
            {0: np.float32(FLIPPED) * q},
            _Judge(b, fmt),
            read=(1, 2),
            tiles=lambda block_m: window.tiles(groups, block_m, decode=b.n_q == 1),
        )

    def gate(self, fmt: KvFormat) -> list[Problem]:
        """Windows of this op with the heads of this case."""
        b = self.batch
        modes = {"attn_map": (WindowMode.RUNS,)}.get(self.op, (WindowMode.CAUSAL, WindowMode.SPAN))
        small = [case for mode in modes for case in SMALL[b.kind, mode]]
        sized = [replace(c, heads=(b.n_head, b.n_head_kv), head_dim=b.head_dim) for c in small]
        return [_small(case, fmt) for case in sized]


class WindowAttention(Attention):
    op: ClassVar[str] = "attn_window"


class MapAttention(Attention):
    op: ClassVar[str] = "attn_map"


def _small_cases(kind: str, mode: WindowMode) -> list[cases.Case]:
    """Windows that start and end inside a block and on both sides of a partition's border."""
    many = {DECODE: ((0, 1), (15, 2), (255, 1), (600, 5)), PREFILL: ((3, 35), (255, 2), (505, 13))}
    lone = {DECODE: ((256, 1),), PREFILL: ((250, 37),)}
    sequences = lone[kind] if mode is WindowMode.CAUSAL else many[kind]
    pieces = KV_MAP_MAX_SPANS - 1 if mode is WindowMode.RUNS else 1
    clipped = mode is not WindowMode.CAUSAL
    one = cases.Case(f"gate-{kind}-{mode.value}", kind, (1, 1), 1, sequences, mode, pieces)
    return [one, replace(one, name=f"{one.name}-sliding", width=100, clipped=clipped)]


SMALL = {(k, m): _small_cases(k, m) for k in (DECODE, PREFILL) for m in WindowMode}


def _small(case: cases.Case, fmt: KvFormat) -> Problem:
    """A small case as a problem; every answer of it is judged."""
    given = cases.make(case, fmt)
    flipped = replace(given, q=np.float32(FLIPPED) * given.q)
    versions = (given, flipped)
    truths = Truths(lambda version, numerics: AttentionBudget.of(numerics, versions[version]))

    def judge(version: int, numerics: Numerics, out: Any) -> Check:
        if (wrong := misshapen(out, given.q.shape)) is not None:
            return wrong
        allowed = truths(version, numerics)
        return within(allowed.beyond(out), allowed.budget, f"in {case.name}")

    *tensors, _ = given.tensors(1)
    return Problem(
        given.op,
        (*tensors, TILES),
        given.scalars,
        {0: flipped.q},
        judge,
        tiles=lambda block_m: given.tensors(block_m)[-1],
    )


class _Judge:
    """Of a batch: some queries and heads against the oracle, all of them finite."""

    def __init__(self, batch: Batch, fmt: KvFormat) -> None:
        self.batch, self.fmt = batch, fmt
        self.truths = Truths(self._truth)

    def __call__(self, version: int, numerics: Numerics, out: Any) -> Check:
        b, heads = self.batch, checked_heads(self.batch)
        if (wrong := misshapen(out, (b.batch * b.n_q, b.n_head, b.head_dim))) is not None:
            return wrong
        if not np.isfinite(out).all():
            return within(np.nan, 0, "values that are not finite")
        found = [
            within(allowed.beyond(out[own][:, heads]), allowed.budget, "absolute")
            for own, allowed in self.truths(version, numerics)
        ]
        return max(found, key=lambda check: check.error / check.tolerance)

    def _truth(self, version: int, numerics: Numerics) -> list[tuple[list[int], AttentionBudget]]:
        """By sequence: its checked queries, and what their answers may be."""
        b, made = self.batch, []
        heads, dims = np.array(checked_heads(b)), np.arange(b.head_dim)
        for sequence in sorted({query // b.n_q for query in b.checked[0]}):
            own = [query for query in b.checked[0] if query // b.n_q == sequence]
            k, v = (_stored_checked(b, self.fmt, name, sequence) for name in ("k", "v"))
            q = rows_of(b, "q", np.array(own), heads, dims) * np.float32(FLIPPED**version)
            positions = b.positions[own]
            tensors = (q, k, v, positions, reference.runs_of(positions, None))
            scalars: Any = {"fmt": self.fmt, "scale": b.head_dim**-0.5, "width": 0}
            made.append((own, AttentionBudget.over(numerics, *tensors, **scalars)))
        return made


@lru_cache(maxsize=8)
def _stored_checked(b: Batch, fmt: KvFormat, name: str, sequence: int) -> Region:
    """The checked KV heads of one sequence, in order."""
    rows = sequence * b.n_cells + np.arange(b.n_cells)
    made = rows_of(b, name, rows, np.array(b.checked[1]), np.arange(b.head_dim))
    encoded = reference.encode_rows(made.reshape(b.n_cells, -1), fmt)
    return Region(fmt, "canonical", len(b.checked[1]), b.head_dim, (encoded,))


@dataclass(frozen=True)
class Cells:
    """K or V of a batch, made where it is used: on a GPU by its own kernels."""

    batch: Batch
    fmt: KvFormat
    name: str
    runs: int

    def on(self, device: Device) -> Region:
        """A region of the device's package."""
        b, package = self.batch, device.package()
        store = registry.select("store_cells", device=device, fmt=self.fmt)
        made: Region = package.empty_region(self.fmt, b.batch * b.n_cells, b.n_head_kv, b.head_dim)
        for sequence, spans in enumerate(placed(b, self.runs)):
            rows, cells = _rows(b, self.name, sequence, device), cells_of([spans])
            made = store.launch(made, rows, cells, fmt=self.fmt, config=store.config)
        return made


def _rows(b: Batch, name: str, sequence: int, device: Device = HOST) -> Any:
    """An input of one sequence [n, heads, d], in arrays of the device."""
    n, heads = (b.n_q, b.n_head) if name == "q" else (b.n_cells, b.n_head_kv)
    count: Any = np.arange
    if device.kind is DeviceKind.CUDA:
        import torch

        where = "cuda" if torch.cuda.is_available() else "cpu"
        count = partial(torch.arange, device=where)
    made = rows_of(b, name, sequence * n + count(n), count(heads), count(b.head_dim))
    return made if isinstance(made, np.ndarray) else made.float()
