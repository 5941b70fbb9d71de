"""Bits of attention depend on a row and its window alone (contract 6.1, 6.2), kernel by kernel.

Every comparison is exact. `test_control` shows that moving the partitions by one key does change
bits, so the comparisons can fail.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from under_test import (
    compiled_only,
    config_of,
    configs_of,
    find,
    interpreted,
    launch,
    package,
    same_bits,
    variants,
)

from minfer import cases, window
from minfer.cases import CAUSAL, RUNS, SPAN, Case, Rows, Spans
from minfer.format import BLOCK, KvFormat
from minfer.ops import DECODE, PREFILL, Shape
from minfer.window import CellSpan, WindowMode

SETUPS = [
    (kind, v.name, fmt)
    for kind in (DECODE, PREFILL)
    for v in variants("attn_map")
    if v.invariant and kind in (v.limits.kinds or (DECODE, PREFILL))
    for fmt in v.formats
]
for_every_variant = pytest.mark.parametrize(("kind", "name", "fmt"), SETUPS, ids=lambda x: str(x))
HEADS, HEAD_DIM = (6, 2), 64


def sequence(
    seed: int, first: int, n: int, heads: tuple[int, int] = HEADS, head_dim: int = HEAD_DIM
) -> Rows:
    case = Case("one", DECODE, heads, head_dim, ((first, n),))
    return cases.rows(np.random.default_rng(seed), case)[0]


def last_queries(kind: str) -> Rows:
    """A sequence of 530 rows with 3 (decode) or 45 (prefill) queries, over partition borders."""
    return sequence(1, 527, 3) if kind == DECODE else sequence(1, 485, 45)


def at(cell: int, length: int) -> Spans:
    return [CellSpan(0, cell, length)]


def attend(
    name: str,
    fmt: KvFormat,
    kind: str,
    rows: Sequence[Rows],
    spans: Sequence[Spans],
    mode: WindowMode,
    *,
    width: int = 0,
    clip: int = 0,
    fill: float = np.nan,
    cut: int = 0,
    extra_tiles: int = 0,
    config: Any = None,
) -> Any:
    """out [n_q, n_head, d] of `rows` lying at `spans`; all other cells hold `fill`.

    cut: queries of a tile at most, as many as the variant likes if 0.
    """
    variant = find(mode.op, name)
    config = config or config_of(variant)
    n_cells = max(part.cell + part.length for parts in spans for part in parts) + 3
    k, v = (
        cases.region(fmt, [getattr(r, which) for r in rows], spans, n_cells, fill)
        for which in ("k", "v")
    )
    q = np.concatenate([r.q for r in rows])
    positions = np.concatenate([np.arange(r.first, len(r.k), dtype=np.int32) for r in rows])
    tiles = window.tiles(
        [len(r.q) for r in rows], cut or config.get("block_m", 1), decode=kind == DECODE
    )
    tiles = np.pad(tiles, ((0, extra_tiles), (0, 0)))
    array = cases.windows(mode, rows, spans, clip).array
    tensors = (q, k, v, positions, array, tiles)
    return launch(variant, *tensors, fmt=fmt, scale=0.125, width=width, config=config)


def scattered(seed: int, lengths: Sequence[int], pieces: int) -> list[Spans]:
    """Odd runs of every sequence in shuffled places."""
    rng = np.random.default_rng(seed)
    spans, _ = cases.scatter(rng, [cases.cut(rng, n, pieces) for n in lengths])
    return spans


@compiled_only()
@for_every_variant
def test_window_modes_and_placement(kind: str, name: str, fmt: KvFormat) -> None:
    rows = last_queries(kind)
    n = len(rows.k)
    base = attend(name, fmt, kind, [rows], [at(0, n)], CAUSAL)
    assert np.isfinite(base).all()
    for cell in (0, 1, 16, 37):
        for mode in (SPAN, RUNS):
            assert same_bits(attend(name, fmt, kind, [rows], [at(cell, n)], mode), base)
    for pieces in (2, 3, 4):
        for seed in (pieces, 10 * pieces):
            spans = scattered(seed, [n], pieces)
            assert same_bits(attend(name, fmt, kind, [rows], spans, RUNS), base)


@compiled_only()
@for_every_variant
def test_what_lies_elsewhere(kind: str, name: str, fmt: KvFormat) -> None:
    rows = last_queries(kind)
    spans = scattered(3, [len(rows.k)], 4)
    base = attend(name, fmt, kind, [rows], spans, RUNS, width=300)
    for fill in (0.0, -7.0, 60000.0):
        out = attend(name, fmt, kind, [rows], spans, RUNS, width=300, fill=fill)
        assert same_bits(out, base)


@compiled_only()
@for_every_variant
def test_sliding_width_and_clipped_windows(kind: str, name: str, fmt: KvFormat) -> None:
    rows = last_queries(kind)
    n = len(rows.k)
    for width in (1, 13, 256, 300, 485):
        base = attend(name, fmt, kind, [rows], [at(0, n)], CAUSAL, width=width)
        for clip in (0, width):
            moved = attend(name, fmt, kind, [rows], [at(5, n)], SPAN, width=width, clip=clip)
            assert same_bits(moved, base)
            spans = scattered(width, [n], 4)
            moved = attend(name, fmt, kind, [rows], spans, RUNS, width=width, clip=clip)
            assert same_bits(moved, base)
    unlimited = attend(name, fmt, kind, [rows], [at(0, n)], CAUSAL)
    wide = attend(name, fmt, kind, [rows], [at(0, n)], CAUSAL, width=n)
    assert same_bits(wide, unlimited)


@compiled_only()
@for_every_variant
def test_other_sequences_in_the_batch(kind: str, name: str, fmt: KvFormat) -> None:
    rows = last_queries(kind)
    others = [sequence(5, 0, 1), sequence(6, 300, 4), sequence(7, 700, 7)]
    alone = {
        id(r): attend(name, fmt, kind, [r], [at(0, len(r.k))], CAUSAL) for r in (rows, *others)
    }
    a, b, c = others
    for order in ([rows, a], [b, rows], [c, b, a, rows], [a, rows, c, b]):
        spans = scattered(len(order), [len(r.k) for r in order], 3)
        out = attend(name, fmt, kind, order, spans, RUNS)
        expected = np.concatenate([alone[id(r)] for r in order])
        assert same_bits(out, expected)


@compiled_only()
@for_every_variant
def test_signs_of_zero(kind: str, name: str, fmt: KvFormat) -> None:
    """Weights times subnormal values round to zeros of either sign; masked keys add +0."""
    rows = sequence(9, 0, 40)
    rng = np.random.default_rng(9)
    tiny = {KvFormat.F32: -1e-45, KvFormat.F16: -6e-8, KvFormat.Q8_0: -1e-7}[fmt]
    values = np.where(rng.random(rows.v.shape) < 0.1, tiny, 0).astype(np.float32)
    rows = Rows(8 * rows.q, rows.k, values)
    whole = attend(name, fmt, kind, [rows], [at(0, 40)], CAUSAL)
    for begin in range(40):
        some = part(rows, begin, begin + 1)
        out = attend(name, fmt, kind, [some], [at(0, begin + 1)], CAUSAL)
        assert same_bits(out, whole[begin : begin + 1])


def part(rows: Rows, begin: int, end: int) -> Rows:
    """Queries begin .. end-1 of a sequence whose queries start at 0, and the rows they need."""
    return Rows(rows.q[begin:end], rows.k[:end], rows.v[:end])


@compiled_only()
@for_every_variant
def test_chunks_of_a_prompt(kind: str, name: str, fmt: KvFormat) -> None:
    rows = sequence(2, 0, 275)
    whole = attend(name, fmt, kind, [rows], [at(0, 275)], CAUSAL)
    for chunk in (7, 64):
        for begin in range(0, 275, chunk):
            some = part(rows, begin, min(begin + chunk, 275))
            out = attend(name, fmt, kind, [some], [at(0, len(some.k))], CAUSAL)
            assert same_bits(out, whole[begin : begin + chunk])
    for begin in [0, 1, 15, 16, 17, 63, 64, 255, 256, 257, 274]:
        some = part(rows, begin, begin + 1)
        out = attend(name, fmt, kind, [some], [at(0, len(some.k))], CAUSAL)
        assert same_bits(out, whole[begin : begin + 1])


@compiled_only()
@for_every_variant
@pytest.mark.parametrize("heads", [(1, 1), (4, 1), (7, 1), (8, 1)], ids=str)
def test_one_to_eight_rows_of_a_group(
    kind: str, name: str, fmt: KvFormat, heads: tuple[int, int]
) -> None:
    rows = sequence(3, 0, 520, heads)
    for n in range(1, 9):
        some = part(rows, 520 - n, 520)
        together = attend(name, fmt, kind, [some], scattered(n, [520], 2), RUNS)
        for i in range(n):
            alone = part(rows, 520 - n + i, 521 - n + i)
            out = attend(name, fmt, kind, [alone], [at(0, len(alone.k))], CAUSAL)
            assert same_bits(together[i], out[0])


SIZED = [(head_dim, width) for head_dim in cases.HEADS_OF_DIM for width in cases.WIDTHS]
if interpreted():
    SIZED = [(64, 33)]
SIZES = [
    (*setup, head_dim, width)
    for setup in SETUPS
    for head_dim, width in SIZED
    if not (interpreted() and setup[1] == "rows")
    if setup[2] is not KvFormat.Q8_0 or head_dim % BLOCK == 0
    if find("attn_map", setup[1]).limits.why_not(
        Shape(setup[0], head_dim=head_dim), package().compute_capability(), setup[2]
    )
    is None
]


@pytest.mark.parametrize(("kind", "name", "fmt", "head_dim", "width"), SIZES, ids=str)
def test_every_head_size(kind: str, name: str, fmt: KvFormat, head_dim: int, width: int) -> None:
    """Modes, placement, chunks down to one row, and batch mates, for every head_dim."""
    heads = (2, 1) if interpreted() else cases.HEADS_OF_DIM[head_dim]
    first, n = (521, 3) if kind == DECODE else (505, 10 if interpreted() else 20)
    rows, mate = sequence(1, first, n, heads, head_dim), sequence(2, 37, 5, heads, head_dim)
    length = first + n
    base = attend(name, fmt, kind, [rows], [at(0, length)], CAUSAL, width=width)
    assert np.isfinite(base).all()
    out = attend(name, fmt, kind, [rows], [at(37, length)], SPAN, width=width, clip=width)
    assert same_bits(out, base)
    spans = scattered(head_dim, [len(mate.k), length], 3)
    out = attend(name, fmt, kind, [mate, rows], spans, RUNS, width=width)
    assert same_bits(out[len(mate.q) :], base)
    for begin, end in ((0, 1), (1, 2), (2, 3), (3, 10), (10, 20)):
        if end > n:
            break
        some = Rows(rows.q[begin:end], rows.k[: first + end], rows.v[: first + end])
        spans = scattered(begin, [first + end], 4)
        out = attend(name, fmt, kind, [some], spans, RUNS, width=width, cut=8)
        assert same_bits(out, base[begin:end])


@compiled_only()
@for_every_variant
def test_tiles(kind: str, name: str, fmt: KvFormat) -> None:
    rows = last_queries(kind)
    spans = scattered(4, [len(rows.k)], 4)
    base = attend(name, fmt, kind, [rows], spans, RUNS)
    most = config_of(find("attn_map", name)).get("block_m", 64)
    for cut in {1, 8, min(45, most), most}:
        out = attend(name, fmt, kind, [rows], spans, RUNS, cut=cut, extra_tiles=3)
        assert same_bits(out, base)


@for_every_variant
def test_tunables_that_are_free_and_a_second_run(kind: str, name: str, fmt: KvFormat) -> None:
    """Workers (1, 2, 3 and 5 of them), stages, whatever the variant has (contract 6.4)."""
    variant, rows = find("attn_map", name), [last_queries(kind), sequence(8, 300, 5)]
    configs = configs_of(variant)
    if interpreted():  # extremes of what an interpreter sees, over few keys
        seen = {n: (t.values[0], t.values[-1]) for n, t in variant.space.items()
                if not t.numeric and n != "stages"}  # fmt: skip
        configs = [config_of(variant, **{n: v}) for n, values in seen.items() for v in values]
        if not configs:
            pytest.skip("has nothing free that an interpreter sees")
        rows = [sequence(1, *((520, 1) if kind == DECODE else (0, 70)), (2, 1))]
    spans = scattered(9, [len(r.k) for r in rows], 3)
    base = attend(name, fmt, kind, rows, spans, RUNS)
    for config in configs:
        assert same_bits(attend(name, fmt, kind, rows, spans, RUNS, config=config), base)


@compiled_only()
@for_every_variant
def test_control(kind: str, name: str, fmt: KvFormat) -> None:
    """The same keys one position later fall into other partitions: some bits differ."""
    rows = sequence(1, 527, 3)
    ahead = sequence(4, 0, 1)
    later = Rows(rows.q, *(np.concatenate([getattr(ahead, x), getattr(rows, x)]) for x in "kv"))
    spans = [at(0, len(rows.k))]
    base = attend(name, fmt, kind, [rows], spans, CAUSAL, width=400)
    moved = attend(name, fmt, kind, [later], [at(0, len(later.k))], CAUSAL, width=400)
    assert (base != moved).any()
    exact = find("attn_map", name).numerics(fmt).prob == "f32"
    assert np.allclose(base, moved, atol=1e-5 if exact else 2e-3)  # f16 weights of another maximum
