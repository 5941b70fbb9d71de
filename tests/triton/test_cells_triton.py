"""What kernels write into cells, on a GPU or in Triton's interpreter, to the byte of the oracle."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from minfer import kernels_triton as backend  # noqa: E402
from minfer import reference  # noqa: E402
from minfer.cases import (  # noqa: E402
    any_bytes,
)
from minfer.errors import Refusal  # noqa: E402
from minfer.format import KvFormat, Region  # noqa: E402
from minfer.kernels_triton import cells as kernels  # noqa: E402
from minfer.kernels_triton._arguments import interpreted  # noqa: E402
from minfer.kernels_triton._move import launches  # noqa: E402
from minfer.ops import HALF, INTERLEAVED, PAIRINGS  # noqa: E402
from minfer.reference.dense import rotated  # noqa: E402

GPU = torch.cuda.is_available() and not interpreted()
on_gpu = pytest.mark.skipif(not GPU, reason="needs a GPU")
needs_triton = pytest.mark.skipif(
    not (GPU or interpreted()), reason="needs a GPU, or TRITON_INTERPRET=1"
)
pytestmark = needs_triton

WIDTHS = {
    KvFormat.F32: ((1, 1), (3, 5), (2, 32), (3, 200)),
    KvFormat.F16: ((1, 1), (3, 5), (2, 32), (8, 128)),
    KvFormat.Q8_0: ((1, 32), (3, 32), (1, 96), (8, 128)),
}
SHAPES = [(fmt, *heads) for fmt in KvFormat for heads in WIDTHS[fmt]]
DIRTY = 0x5A


def rows_of(n: int, n_head_kv: int, d: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, n_head_kv, d)).astype(np.float32)


def dirty_region(fmt: KvFormat, n_cells: int, n_head_kv: int, d: int) -> Region:
    """A region whose bytes are all DIRTY, padding too."""
    region = backend.empty_region(fmt, n_cells, n_head_kv, d)
    for plane in region.arrays:
        plane.view(torch.uint8).fill_(DIRTY)
    return region


def at_home(region: Region) -> Region:
    """A canonical region as one of this package."""
    made = backend.empty_region(region.fmt, region.n_cells, region.n_head_kv, region.head_dim)
    return backend.write_cells(made, np.arange(region.n_cells), region.arrays[0])


def bytes_of(region: Region) -> np.ndarray:
    return backend.read_cells(region, np.arange(region.n_cells))


def planes_of(region: Region) -> list[np.ndarray]:
    """Every byte of the region, padding too."""
    return [backend.to_host(plane.view(torch.uint8)) for plane in region.arrays]


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
            kernels.store_cells_rows(region, rows, cells, fmt=fmt, config={})
    elif op == "qkv_rope_store":
        kernels.qkv_rope_store_rows(
            rows, rows, rows, k, v, [0], cells, table, table, fmt=fmt, pairing=HALF, config={}
        )
    elif fmt is not KvFormat.Q8_0:
        pytest.skip("turns are of q8_0 cells")
    else:
        for region in (k, v):
            kernels.map_q8_0_cells_rows(region, cells, table, table, pairing=HALF, config={})
    for region in (k, v):
        padding = planes_of(region)[-1][:, -2:]
        assert padding.tolist() == [[DIRTY, DIRTY], [0, 0]]


def f16_through_a_cell(values: np.ndarray) -> np.ndarray:
    """The f16 bits that a store makes of f32 values, 4096 to a cell."""
    rows = np.zeros((-(-values.size // 4096), 1, 4096), np.float32)
    rows.reshape(-1)[: values.size] = values
    region = backend.empty_region(KvFormat.F16, len(rows), 1, 4096)
    kernels.store_cells_rows(region, rows, np.arange(len(rows)), fmt=KvFormat.F16, config={})
    return bytes_of(region).view(np.uint16).reshape(-1)[: values.size]


def f16_bits(values: np.ndarray) -> np.ndarray:
    """numpy's conversion; a NaN is quiet and keeps its sign and the front of its payload."""
    bits = values.view(np.uint32)
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = values.astype(np.float16).view(np.uint16)
    nan = (bits >> 16 & 0x8000) | 0x7E00 | (bits >> 13 & 0x1FF)
    return np.where(np.isnan(values), nan, rounded).astype(np.uint16)


def test_every_f16_value_survives_and_nans_keep_their_bits() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    values = bits.view(np.float16).astype(np.float32)
    quiet = np.where(np.isnan(values), bits | 0x200, bits)
    assert (f16_through_a_cell(values) == quiet).all()
    region = backend.empty_region(KvFormat.F16, 16, 1, 4096)
    backend.write_cells(region, np.arange(16), bits.view(np.uint8).reshape(16, -1))
    decoded = backend.to_host(backend.decode_cells(region, np.arange(16))).reshape(-1)
    assert np.array_equal(decoded, values, equal_nan=True)
    known = ~np.isnan(values)
    assert (np.signbit(decoded) == np.signbit(values))[known].all()


def angles(n_pos: int, half: int) -> tuple[np.ndarray, np.ndarray]:
    at = np.arange(n_pos)[:, None] * 10.0 ** -np.linspace(0, 4, half)
    return np.cos(at).astype(np.float32), np.sin(at).astype(np.float32)


def in_one_product(*parts: np.ndarray) -> list[Any]:
    """Rows [n, heads, d] as column slices of one tensor."""
    n, d = len(parts[0]), parts[0].shape[2]
    product = backend.from_host(np.concatenate([part.reshape(n, -1) for part in parts], axis=1))
    ends = np.cumsum([0, *(part.shape[1] * d for part in parts)])
    return [product[:, a:b].view(n, -1, d) for a, b in itertools.pairwise(ends.tolist())]


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
def test_qkv_rope_store_is_rope_and_two_stores(
    fmt: KvFormat, n_head: int, n_head_kv: int, d: int, half: int, pairing: str
) -> None:
    n = 4
    q, k, v = (rows_of(n, h, d, i) for i, h in enumerate((n_head, n_head_kv, n_head_kv)))
    k[0, 0, :4], k[1, 0, -2:] = [-0.0, 0.0, 1e-42, 6e4], [-0.0, -1.0]
    if 2 * half < d:
        k[2, 0, -1] = np.inf  # does not turn, so stays what it is
    rng = np.random.default_rng(3)
    positions = rng.integers(0, 8, n).astype(np.int32)
    cells = rng.permutation(23)[:n].astype(np.int32)
    cos, sin = angles(8, half)
    c, s = cos[positions][:, None], sin[positions][:, None]
    turned = [rotated(x, c, s, pairing) for x in (q, k)]
    tables = [backend.from_host(x) for x in (positions, cells, cos, sin)]
    for given, places in (
        ((q, k, v), (positions, cells, cos, sin)),
        (in_one_product(q, k, v), tables),
    ):
        regions = [dirty_region(fmt, 23, n_head_kv, d) for _ in range(2)]
        out, *returned = kernels.qkv_rope_store_rows(
            *given, *regions, *places, fmt=fmt, pairing=pairing, config={}
        )
        assert out.is_contiguous()
        assert (backend.to_host(out).view(np.int32) == turned[0].view(np.int32)).all()
        assert returned[0] is regions[0] and returned[1] is regions[1]
        for region, rows in zip(regions, (turned[1], v), strict=True):
            wanted = reference.encode_rows(rows.reshape(n, -1), fmt)
            assert (bytes_of(region)[cells] == wanted).all()
            for plane in planes_of(region):
                assert (np.delete(plane, cells, axis=0) == DIRTY).all()


@on_gpu
def test_a_captured_launch_follows_its_inputs() -> None:
    q, k, v = (backend.from_host(rows_of(2, h, 64, seed=h)) for h in (9, 3, 3))
    cos, sin = (backend.from_host(table) for table in angles(8, 32))
    at, cells = (backend.from_host(np.array(x, np.int32)) for x in ([0, 1], [4, 5]))

    def regions() -> list[Region]:
        return [dirty_region(KvFormat.Q8_0, 8, 3, 64) for _ in range(2)]

    def store(pair: list[Region]) -> Any:
        how = {"fmt": KvFormat.Q8_0, "pairing": INTERLEAVED, "config": {}}
        return kernels.qkv_rope_store_rows(q, k, v, *pair, at, cells, cos, sin, **how)[0]

    store(regions())
    captured, direct, graph = regions(), regions(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = store(captured)
    at.copy_(torch.tensor([7, 3]))
    cells.copy_(torch.tensor([6, 1]))
    graph.replay()
    assert (out == store(direct)).all()
    for found, wanted in zip(captured, direct, strict=True):
        assert (bytes_of(found) == bytes_of(wanted)).all()
        assert (bytes_of(found)[[4, 5]] == bytes_of(found)[[0, 0]]).all()


# -- moves ----------------------------------------------------------------------------------------


LONG = {
    "apart": ((0, 2500, 2400), (10, 2400, 100), (2400, 30, 2300)),
    "by one": ((0, 1, 4999), (2, 1, 4998)),
    "by less than a block": ((0, 130, 4870), (4500, 4450, 500), (99, 0, 4900)),
    "by more than a block": ((0, 1500, 3500), (1501, 100, 3499)),
    "a chain": ((0, 70, 64), (70, 140, 64), (140, 210, 63), (210, 5, 64), (6, 4, 64)),
}


@pytest.mark.parametrize("name", LONG)
def test_long_moves_act_in_order(name: str) -> None:
    moves = np.array(LONG[name], np.int32)
    region = any_bytes(KvFormat.Q8_0, 5000, 3, 32)
    ours = at_home(region)
    region.arrays[0][:] = bytes_of(ours)
    wanted = reference.move_cells(region, moves).arrays[0]
    assert (bytes_of(kernels.move_cells_rows(ours, moves, config={})) == wanted).all()


def test_moves_that_overlap_are_not_spread_over_the_grid() -> None:
    moves = [[0, 90, 80], [0, 64, 64], [0, 63, 64], [70, 7, 64], [0, 200, 63], [90, 9, 70]]
    found = launches(np.array(moves, np.int32))
    assert found == [(0, 1, 80), (1, 2, 64), (2, 5, 1), (5, 6, 70)]


@on_gpu
@pytest.mark.parametrize("fmt", KvFormat, ids=str)
def test_cells_beyond_the_reach_of_32_bits(fmt: KvFormat) -> None:
    n_head_kv, d, last = 8, 512, (1 << 31) // (8 * 512) + 4
    k, v = (backend.empty_region(fmt, last + 1, n_head_kv, d) for _ in range(2))
    rows, table = rows_of(1, n_head_kv, d), np.zeros((1, d // 2), np.float32)
    wanted = reference.encode_rows(rows.reshape(1, -1), fmt)
    cell, low = np.array([last]), np.array([0, 1, last - 1])
    kernels.store_cells_rows(k, rows, cell, fmt=fmt, config={})
    assert (backend.read_cells(k, cell) == wanted).all()
    kernels.qkv_rope_store_rows(
        rows, rows, rows, k, v, [0], cell, table + 1, table, fmt=fmt, pairing=HALF, config={}
    )
    for region in (k, v):
        assert (backend.read_cells(region, cell) == wanted).all()
        assert not backend.read_cells(region, low).any()
    kernels.move_cells_rows(k, [[last, last - 1, 1], [last - 1, 1, 1]], config={})
    assert (backend.read_cells(k, [1, last - 1]) == wanted).all()
    assert (backend.decode_cells(k, cell) == backend.decode_cells(k, [1])).all()
    if fmt is KvFormat.Q8_0:
        kernels.map_q8_0_cells_rows(k, cell, table - 1, table, pairing=HALF, config={})
        assert (backend.decode_cells(k, cell) == -backend.decode_cells(k, [1])).all()


# -- refusals -------------------------------------------------------------------------------------

FIRST, TABLE = np.zeros(2, np.int32), np.ones((1, 4), np.float32)
ROWS = rows_of(2, 2, 8)


def refused(region: Region, rule: str, message: str, call: Any, *args: Any, **how: Any) -> None:
    before = bytes_of(region)
    with pytest.raises(Refusal) as caught:
        call(*args, **how, config={})
    assert caught.value.rule == rule and message in caught.value.message
    assert (bytes_of(region) == before).all()


@pytest.mark.parametrize(
    ("change", "rule", "message"),
    [
        ({"cells": np.array([0, 9])}, "2.5", "cell 9 of row 1 is outside"),
        ({"v": ROWS[:1]}, "10", "v [1, 2, 8] for 2 cells of this region must be [2, 2, 8]"),
        ({"k": ROWS[:, :1]}, "10", "k [2, 1, 8] for 2 cells of this region must be [2, 2, 8]"),
        ({"q": ROWS[..., :4]}, "10", "q [2, 2, 4] must be [2, n_head, 8]"),
        ({"positions": np.array([0, 1])}, "7.5", "position 1 of row 1 is not in the rope table of"),
        ({"positions": np.array([0])}, "10", "1 positions do not fit rows [2, 2, 8]"),
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
    refused(region, rule, message, kernels.qkv_rope_store_rows, **how)
