"""What kernels write into cells, on a GPU or in Triton's interpreter, to the byte of the oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from minfer import kernels_triton as backend  # noqa: E402
from minfer import reference  # noqa: E402
from minfer.format import KvFormat, Region  # noqa: E402
from minfer.kernels_triton import cells as kernels  # noqa: E402
from minfer.kernels_triton._arguments import interpreted  # noqa: E402
from minfer.kernels_triton._move import launches  # noqa: E402
from minfer.ops import HALF, INTERLEAVED  # noqa: E402

GPU = torch.cuda.is_available() and not interpreted()
on_gpu = pytest.mark.skipif(not GPU, reason="needs a GPU")
needs_triton = pytest.mark.skipif(
    not (GPU or interpreted()), reason="needs a GPU, or TRITON_INTERPRET=1"
)
pytestmark = needs_triton

DIRTY = 0x5A


def rows_of(n: int, n_head_kv: int, d: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, n_head_kv, d)).astype(np.float32)


def dirty_region(fmt: KvFormat, n_cells: int, n_head_kv: int, d: int) -> Region:
    """A region whose bytes are all DIRTY, padding too."""
    region = backend.empty_region(fmt, n_cells, n_head_kv, d)
    for plane in region.arrays:
        plane.view(torch.uint8).fill_(DIRTY)
    return region


def bytes_of(region: Region) -> np.ndarray:
    return backend.read_cells(region, np.arange(region.n_cells))


# -- stores ---------------------------------------------------------------------------------------


def f16_through_a_cell(values: np.ndarray) -> np.ndarray:
    """The f16 bits that a store makes of f32 values, 4096 to a cell."""
    rows = np.zeros((-(-values.size // 4096), 1, 4096), np.float32)
    rows.reshape(-1)[: values.size] = values
    region = backend.empty_region(KvFormat.F16, len(rows), 1, 4096)
    kernels.store_cells_rows(region, rows, np.arange(len(rows)), fmt=KvFormat.F16, config={})
    return bytes_of(region).view(np.uint16).reshape(-1)[: values.size]


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
