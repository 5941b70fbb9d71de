"""Stores, moves and maps of cells and the q8_0 codec as problems, judged to the byte.

store_cells, map_q8_0_cells: `512-h8-d128` is 512 cells of 8 heads of 128.
qkv_rope_store: `512-h32/8-d128` is 512 rows of 32 query heads, and cells of 8 KV heads.
move_cells: `64x16-h8-d128` is 64 moves of 16 cells, each to cells that no move reads.
quantize_q8_0, dequantize_q8_0, dot_q8_0: `r512-w4096` is 512 rows of 4096.

Cells that a call does not name hold any bytes, and must keep them. K rows are turned in float32
with every operation rounded by itself, as all packages do.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import numpy as np

from minfer import reference
from minfer.cases import MOVE_CASES, TURN_CASES, TurnCase, turn_inputs
from minfer.format import BLOCK, BLOCK_BYTES, Bytes, Floats, Int32, KvFormat, Region, cell_bytes
from minfer.ops import HALF, INTERLEAVED, Shape
from tuning.bench.cases import ELEMENT_BYTES
from tuning.sweep.rowwise import plain_rope, tables
from tuning.sweep.sized import Entry, Form, Given, Make, Sized, Wanted, kind_of

Rng = np.random.Generator
SMALL = ((1, 1, 32), (15, 3, 5), (17, 3, 32), (33, 1, 16), (4, 3, 96))  # cells, heads, head_dim
SMALL_QKV = tuple((n, 2 * heads, heads, d) for n, heads, d in SMALL)
SMALL_ROWS = ((1, 32), (15, 64), (17, 96), (33, 576))  # rows, width
MOVED_HEADS = (3, 32)  # of the named cases of moves


class OfCells(Sized):
    """A call of an op of the table."""

    table: ClassVar[dict[str, Entry]] = {}


def _oracle(op: str, *tensors: Any, **scalars: Any) -> list[Wanted]:
    """What the bit oracle makes of copies."""
    return [Wanted(getattr(reference, op)(*deepcopy(tensors), **scalars))]


def _qkv_truth(
    q: Floats, k: Floats, v: Floats, k_region: Region, v_region: Region, positions: Int32,
    cells: Int32, cos: Floats, sin: Floats, *, fmt: KvFormat, pairing: str,
) -> list[Wanted]:  # fmt: skip
    """q within twice the error of plain float32, cells to the byte."""
    turns: Any = {"positions": positions, "cos": cos, "sin": sin, "pairing": pairing}
    exact = reference.rope(q, **turns)
    allowed = 2 * np.abs(plain_rope(q, **turns) - exact).max(initial=0) + 1e-6
    stored = (
        reference.store_cells(deepcopy(region), rows, cells, fmt=fmt)
        for region, rows in ((k_region, plain_rope(k, **turns)), (v_region, v))
    )
    return [Wanted(exact, float(allowed)), *map(Wanted, stored)]


def _any_region(rng: Rng, fmt: KvFormat, n_cells: int, heads: int, d: int) -> Region:
    """A canonical region of random bytes; the padding of its cells, which is no value, is zero."""
    width, used = cell_bytes(fmt, heads * d), int(ELEMENT_BYTES[fmt.value] * heads * d)
    cells = np.frombuffer(rng.bytes(n_cells * width), np.uint8).reshape(n_cells, width).copy()
    cells[:, used:] = 0
    return Region(fmt, "canonical", heads, d, (cells,))


def _two_runs(n: int) -> Int32:
    """n cells of 2 n + 3: a run, and after it in order a lower one; odd cells lie around them."""
    high = n // 2
    runs = (np.arange(n + 2, n + 2 + high), np.arange(1, 1 + n - high))
    return np.concatenate(runs).astype(np.int32)


def _rows(rng: Rng, *shape: int) -> Floats:
    return rng.standard_normal(shape, dtype=np.float32)


def _stored(rng: Rng, fmt: KvFormat, n: int, heads: int, d: int) -> Given:
    region = _any_region(rng, fmt, 2 * n + 3, heads, d)
    rows, again = (_rows(rng, n, heads, d) for _ in range(2))
    return Given((region, rows, _two_runs(n)), {1: again}, {"fmt": fmt})


def _qkv(part: int, pairing: str) -> Make:
    """Makes arguments of qkv_rope_store; the first d // part dimensions turn."""

    def make(rng: Rng, fmt: KvFormat, n: int, n_head: int, heads: int, d: int) -> Given:
        regions = [_any_region(rng, fmt, 2 * n + 3, heads, d) for _ in "kv"]
        first, again = (
            (_rows(rng, n, n_head, d), _rows(rng, n, heads, d), _rows(rng, n, heads, d))
            for _ in range(2)
        )
        positions = rng.permutation(2 * n)[:n].astype(np.int32)
        turned = tables(2 * n, d // part // 2)
        tensors = (*first, *regions, positions, _two_runs(n), *turned)
        return Given(tensors, dict(enumerate(again)), {"fmt": fmt, "pairing": pairing})

    return make


def _turned(rng: Rng, fmt: KvFormat, n: int, heads: int, d: int) -> Given:
    """Cells of rows, between cells of any bytes."""
    cells = _two_runs(n)

    def region() -> Region:
        made = _any_region(rng, fmt, 2 * n + 3, heads, d)
        made.arrays[0][cells] = reference.quantize_q8_0(_rows(rng, n, heads * d))
        return made

    (first, again), (cos, sin) = (region(), region()), tables(2, d // 2)
    return Given((first, cells, cos[1:], sin[1:]), {0: again}, {"pairing": HALF})


def _named_turn(case: TurnCase) -> Given:
    other = turn_inputs(replace(case, name=f"{case.name}-other"))
    return Given(turn_inputs(case), dict(enumerate(other)), {"pairing": case.pairing})


def _moved(rng: Rng, fmt: KvFormat, n_moves: int, n: int, heads: int, d: int) -> Given:
    """Blocks of n cells, each to the block above it."""
    source = 2 * n * np.arange(n_moves)
    moves = np.stack([source, source + n, np.full(n_moves, n)], axis=1).astype(np.int32)
    first, again = (_any_region(rng, fmt, 2 * n * n_moves, heads, d) for _ in range(2))
    return Given((first, moves), {0: again}, {})


def _named_moves() -> list[Given]:
    """Moves that overlap and chain, in every format."""
    rng = np.random.default_rng(0)
    made = []
    for case in MOVE_CASES:
        for fmt in KvFormat:
            first, again = (_any_region(rng, fmt, case.n_cells, *MOVED_HEADS) for _ in "01")
            made.append(Given((first, case.array), {0: again}, {}))
    return made


def _wild(rng: Rng, rows: int, width: int) -> Floats:
    """Rows [rows, width] whose blocks reach from scales that become zero to infinite ones."""
    made = _rows(rng, rows, width).reshape(-1, BLOCK)
    sizes = 10.0 ** rng.uniform(-9, 8, (len(made), 1)) * (rng.random((len(made), 1)) < 0.9)
    return (made * sizes).astype(np.float32).reshape(rows, width)


def _cells(rng: Rng, rows: int, width: int, blocks: Any) -> Bytes:
    cells: Bytes = reference.quantize_q8_0(blocks(rng, rows, width))
    return cells


def _quantized(blocks: Any) -> Make:
    def make(rng: Rng, _: KvFormat, rows: int, width: int) -> Given:
        return Given((blocks(rng, rows, width),), {0: blocks(rng, rows, width)}, {})

    return make


def _decoded(blocks: Any, count: int) -> Make:
    """Makes `count` sets of cells; the first differs between versions."""

    def make(rng: Rng, _: KvFormat, rows: int, width: int) -> Given:
        again, *tensors = (_cells(rng, rows, width, blocks) for _ in range(count + 1))
        return Given(tuple(tensors), {0: again}, {"n": width})

    return make


def _codec(op: str, values: int, cells: int, *ways: Make) -> Entry:
    """An entry of a codec op; values, cells: rows in f32 and in q8_0 that it reads and writes."""
    return Entry(
        Form("r512-w4096"),
        shape=lambda rows, width: Shape(),
        bytes=lambda fmt, rows, width: rows * width * (4 * values + cells * BLOCK_BYTES / BLOCK),
        truth=partial(_oracle, op),
        ways=ways,
        small=lambda rows, width: (*SMALL_ROWS, (3, width)),
        stored=KvFormat.Q8_0,
    )


def _cell_rows(fmt: KvFormat, n: int, *elements: int) -> int:
    """Bytes of n cells."""
    return n * cell_bytes(fmt, int(np.prod(elements)))


OfCells.table |= {
    "store_cells": Entry(
        Form("512-h8-d128"),
        shape=lambda n, heads, d: Shape(kind_of(n), n, heads, heads, d),
        bytes=lambda fmt, n, heads, d: 4 * n * heads * d + _cell_rows(fmt, n, heads, d),
        truth=partial(_oracle, "store_cells"),
        ways=(_stored,),
        small=lambda n, heads, d: (*SMALL, (15, heads, d)),
        changed=(0,),
    ),
    "qkv_rope_store": Entry(
        Form("512-h32/8-d128"),
        shape=lambda n, n_head, heads, d: Shape(kind_of(n), n, n_head, heads, d),
        bytes=lambda fmt, n, n_head, heads, d: (
            8 * n * (n_head + heads) * d + 2 * _cell_rows(fmt, n, heads, d)
        ),
        truth=_qkv_truth,
        ways=(_qkv(1, HALF), _qkv(1, INTERLEAVED), _qkv(2, HALF), _qkv(2, INTERLEAVED)),
        small=lambda n, n_head, heads, d: (*SMALL_QKV, (15, n_head, heads, d)),
        changed=(3, 4),
    ),
    "map_q8_0_cells": Entry(
        Form("512-h8-d128"),
        shape=lambda n, heads, d: Shape(),
        bytes=lambda fmt, n, heads, d: 2 * _cell_rows(fmt, n, heads, d),
        truth=partial(_oracle, "map_q8_0_cells"),
        ways=(_turned,),
        small=lambda n, heads, d: ((1, heads, d), (15, heads, d)),
        extra=lambda: [_named_turn(case) for case in TURN_CASES],
        stored=KvFormat.Q8_0,
        changed=(0,),
    ),
    "move_cells": Entry(
        Form("64x16-h8-d128"),
        shape=lambda n_moves, n, heads, d: Shape(),
        bytes=lambda fmt, n_moves, n, heads, d: 2 * _cell_rows(fmt, n_moves * n, heads, d),
        truth=partial(_oracle, "move_cells"),
        ways=(_moved,),
        small=lambda n_moves, n, heads, d: ((1, 33, heads, d), (15, 1, heads, d)),
        extra=_named_moves,
        changed=(0,),
    ),
    "quantize_q8_0": _codec("quantize_q8_0", 1, 1, _quantized(_rows), _quantized(_wild)),
    "dequantize_q8_0": _codec("dequantize_q8_0", 1, 1, _decoded(_rows, 1), _decoded(_wild, 1)),
    "dot_q8_0": _codec("dot_q8_0", 0, 2, _decoded(_rows, 2), _decoded(_wild, 2)),
}
