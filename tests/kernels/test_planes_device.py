"""What kernels of an accelerator write into cells that lie in planes, to the byte of the oracle."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import under_test
from under_test import default, package

from minfer import planes, reference
from minfer.cases import any_bytes
from minfer.errors import Refusal
from minfer.format import KvFormat, Region
from minfer.ops import HALF, PAIRINGS
from minfer.reference.dense import rotated

pytestmark = pytest.mark.skipif(
    package().LAYOUT != planes.LAYOUT, reason="cells lie in planes on accelerators"
)
DIRTY = 0x5A
TINY = 1e-42 if under_test.device == "cuda" else 1e-30  # GPUs of Macs may flush subnormals


@pytest.fixture(autouse=True)
def checked() -> Iterator[None]:
    with under_test.checked(True):
        yield


def rows_of(n: int, n_head_kv: int, d: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, n_head_kv, d)).astype(np.float32)


def dirty_region(fmt: KvFormat, n_cells: int, n_head_kv: int, d: int) -> Region:
    """A region whose bytes are all DIRTY, padding too."""
    arrays = tuple(
        package().from_host(np.full(shape, DIRTY, np.uint8).repeat(size, axis=1).view(dtype))
        for shape, dtype in planes.shapes(fmt, n_cells, n_head_kv * d)
        for size in [np.dtype(dtype).itemsize]
    )
    return Region(fmt, planes.LAYOUT, n_head_kv, d, arrays)


def bytes_of(region: Region) -> np.ndarray:
    """Every cell, canonical."""
    read: np.ndarray = package().read_cells(region, np.arange(region.n_cells))
    return read


def planes_of(region: Region) -> list[np.ndarray]:
    """Every byte of the region, padding too."""
    return [package().to_host(plane).view(np.uint8) for plane in region.arrays]


# -- stores ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fmt", "n_head_kv", "d"),
    [(KvFormat.F16, 3, 5), (KvFormat.Q8_0, 1, 32), (KvFormat.Q8_0, 3, 96)],
)
@pytest.mark.parametrize("op", ["store_cells", "qkv_rope_store", "map_q8_0_cells"])
def test_padding_becomes_zero(fmt: KvFormat, n_head_kv: int, d: int, op: str) -> None:
    k, v = (dirty_region(fmt, 2, n_head_kv, d) for _ in range(2))
    rows, cells, table = rows_of(1, n_head_kv, d), np.array([1]), np.ones((1, d // 2), np.float32)
    if op == "store_cells":
        for region in (k, v):
            default(op, fmt).launch(region, rows, cells, fmt=fmt, config={})
    elif op == "qkv_rope_store":
        default(op, fmt).launch(
            rows, rows, rows, k, v, [0], cells, table, table, fmt=fmt, pairing=HALF, config={}
        )
    elif fmt is not KvFormat.Q8_0:
        pytest.skip("turns are of q8_0 cells")
    else:
        for region in (k, v):
            default(op, fmt).launch(region, cells, table, table, pairing=HALF, config={})
    for region in (k, v):
        padding = planes_of(region)[-1][:, -2:]
        assert padding.tolist() == [[DIRTY, DIRTY], [0, 0]]


def test_a_nan_keeps_its_sign_and_the_front_of_its_payload() -> None:
    given = np.arange(0x7C01, 0x8000, dtype=np.uint16)
    halves = np.concatenate([given, given | 0x8000]).view(np.float16)
    known = np.array([0x7F800001, 0xFF800001, 0x7FBFE000, 0xFFFFFFFF], np.uint32)
    values = np.concatenate([halves.astype(np.float32), known.view(np.float32)])
    region = package().empty_region(KvFormat.F16, 1, 1, values.size)
    store = default("store_cells", KvFormat.F16)
    store.launch(region, values[None, None], [0], fmt=KvFormat.F16, config={})
    found = bytes_of(region).view(np.uint16)[0, : values.size]
    assert (found[:-4] == halves.view(np.uint16) | 0x200).all()
    assert found[-4:].tolist() == [0x7E00, 0xFE00, 0x7FFF, 0xFFFF]


def angles(n_pos: int, half: int) -> tuple[np.ndarray, np.ndarray]:
    at = np.arange(n_pos)[:, None] * 10.0 ** -np.linspace(0, 4, half)
    return np.cos(at).astype(np.float32), np.sin(at).astype(np.float32)


def in_one_product(*parts: np.ndarray) -> list[Any]:
    """Rows [n, heads, d] as column slices of one array."""
    n, d = len(parts[0]), parts[0].shape[2]
    product = package().from_host(np.concatenate([part.reshape(n, -1) for part in parts], axis=1))
    ends = np.cumsum([0, *(part.shape[1] * d for part in parts)])
    return [product[:, a:b].reshape(n, -1, d) for a, b in itertools.pairwise(ends.tolist())]


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize(
    ("fmt", "n_head", "n_head_kv", "d", "half"),
    [
        (KvFormat.F32, 3, 1, 5, 2),
        (KvFormat.F32, 9, 3, 64, 32),
        (KvFormat.F16, 3, 3, 7, 3),
        (KvFormat.F16, 5, 5, 128, 24),
        (KvFormat.Q8_0, 9, 3, 64, 32),
        (KvFormat.Q8_0, 6, 1, 96, 20),
        (KvFormat.Q8_0, 17, 17, 32, 16),
    ],
    ids=str,
)
def test_qkv_rope_store_is_rope_and_two_stores_of_parts_of_a_product(
    fmt: KvFormat, n_head: int, n_head_kv: int, d: int, half: int, pairing: str
) -> None:
    n = 4
    q, k, v = (rows_of(n, h, d, i) for i, h in enumerate((n_head, n_head_kv, n_head_kv)))
    k[0, 0, :4], k[1, 0, -2:] = [-0.0, 0.0, TINY, 6e4], [-0.0, -1.0]
    if 2 * half < d:
        k[2, 0, -1] = np.inf  # does not turn, so stays what it is
    rng = np.random.default_rng(3)
    positions = rng.integers(0, 8, n).astype(np.int32)
    cells = rng.permutation(23)[:n].astype(np.int32)
    cos, sin = angles(8, half)
    c, s = cos[positions][:, None], sin[positions][:, None]
    turned = [rotated(x, c, s, pairing) for x in (q, k)]
    tables = [package().from_host(x) for x in (positions, cells, cos, sin)]
    for given, places in (
        ((q, k, v), (positions, cells, cos, sin)),
        (in_one_product(q, k, v), tables),
    ):
        regions = [dirty_region(fmt, 23, n_head_kv, d) for _ in range(2)]
        out, *returned = default("qkv_rope_store", fmt).launch(
            *given, *regions, *places, fmt=fmt, pairing=pairing, config={}
        )
        assert under_test.same_bits(package().to_host(out), turned[0])
        assert returned[0] is regions[0] and returned[1] is regions[1]
        for region, rows in zip(regions, (turned[1], v), strict=True):
            wanted = reference.encode_rows(rows.reshape(n, -1), fmt)
            assert (bytes_of(region)[cells] == wanted).all()
            for plane in planes_of(region):
                assert (np.delete(plane, cells, axis=0) == DIRTY).all()


# -- moves ----------------------------------------------------------------------------------------

LONG = {
    "apart": ((0, 2500, 2400), (10, 2400, 100), (2400, 30, 2300)),
    "by one": ((0, 1, 4999), (2, 1, 4998)),
    "by less than a block": ((0, 130, 4870), (4500, 4450, 500), (99, 0, 4900)),
    "by more than a block": ((0, 1500, 3500), (1501, 100, 3499)),
    "a chain": ((0, 70, 64), (70, 140, 64), (140, 210, 63), (210, 5, 64), (6, 4, 64)),
}


@under_test.compiled_only()
@pytest.mark.parametrize("name", LONG)
def test_long_moves_act_in_order(name: str) -> None:
    moves = np.array(LONG[name], np.int32)
    region = any_bytes(KvFormat.Q8_0, 5000, 3, 32)
    ours = under_test.arranged(region)
    region.arrays[0][:] = bytes_of(ours)
    wanted = reference.move_cells(region, moves).arrays[0]
    assert (bytes_of(default("move_cells").launch(ours, moves, config={})) == wanted).all()


# -- refusals -------------------------------------------------------------------------------------

FIRST, TABLE = np.zeros(2, np.int32), np.ones((1, 4), np.float32)
ROWS = rows_of(2, 2, 8)


@pytest.mark.parametrize(
    ("change", "rule", "message"),
    [
        ({"cells": np.array([0, 9])}, "2.5", "cell 9 of row 1 is outside"),
        ({"v": ROWS[:1]}, "10", "v [1, 2, 8] for 2 cells of this region must be [2, 2, 8]"),
        ({"k": ROWS[:, :1]}, "10", "k [2, 1, 8] for 2 cells of this region must be [2, 2, 8]"),
        ({"q": ROWS[..., :4]}, "10", "q [2, 2, 4] must be [2, n_head, 8]"),
        ({"q": ROWS.astype(np.float16)}, "4.2", "q must be float32, not float16"),
        ({"positions": np.array([0, 1])}, "7.5", "position 1 of row 1 is not in the rope table of"),
        ({"positions": np.array([0])}, "10", "1 positions do not fit rows [2, 2, 8]"),
        ({"positions": FIRST.astype(np.float32)}, "10", "positions must be whole numbers (int32)"),
        ({"q": rows_of(3, 2, 8), "positions": [0] * 3}, "10", "3 positions do not fit rows [2, 2"),
        ({"cos": np.ones((1, 5), np.float32)}, "10", "tables [1, 5] and [1, 4]"),
        ({"pairing": "neox"}, "5.7", "'neox' is neither half nor interleaved"),
    ],
)
def test_a_refused_rope_and_store_changes_no_byte(
    change: dict[str, Any], rule: str, message: str
) -> None:
    region = dirty_region(KvFormat.F16, 4, 2, 8)
    how = {"q": ROWS, "k": ROWS, "v": ROWS, "k_region": region, "v_region": region}
    how |= {"positions": FIRST, "cells": np.array([0, 1]), "cos": TABLE, "sin": TABLE}
    how |= {"fmt": KvFormat.F16, "pairing": HALF, **change}
    with pytest.raises(Refusal) as caught:
        default("qkv_rope_store", KvFormat.F16).launch(**how, config={})
    assert caught.value.rule == rule and message in caught.value.message
    assert all((plane == DIRTY).all() for plane in planes_of(region))


def test_cells_are_those_of_the_smaller_region() -> None:
    large, small = (dirty_region(KvFormat.F16, n, 2, 8) for n in (4, 1))
    for k, v in ((large, small), (small, large)):
        with pytest.raises(Refusal, match="cell 1 of row 1 is outside the region of 1 cells"):
            default("qkv_rope_store", KvFormat.F16).launch(
                *(ROWS, ROWS, ROWS, k, v, FIRST, [0, 1], TABLE, TABLE),
                fmt=KvFormat.F16, pairing=HALF, config={},
            )  # fmt: skip
    assert all((plane == DIRTY).all() for region in (large, small) for plane in planes_of(region))
