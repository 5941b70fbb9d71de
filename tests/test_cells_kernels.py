"""Stores and loads of cells in the three formats, and the array helpers around them."""

from __future__ import annotations

import numpy as np
import pytest

from minfer import kernels_numba as backend
from minfer import reference
from minfer.errors import Refusal
from minfer.format import KvFormat, Region, cell_bytes
from minfer.kernels_numba.cells import qkv_rope_store_rows, store_cells_rows
from minfer.kernels_numba.dense import rope_rows

ONE, TWO = {"threads": 1}, {"threads": 2}
DIMS = {KvFormat.F32: (1, 5, 32), KvFormat.F16: (1, 5, 16, 32), KvFormat.Q8_0: (32, 64, 96)}
CASES = [(fmt, n_head_kv, d) for fmt in KvFormat for n_head_kv in (1, 3) for d in DIMS[fmt]]


def dirty_region(fmt: KvFormat, n_cells: int, n_head_kv: int, d: int) -> Region:
    """A region whose bytes are all 0xA5."""
    width = cell_bytes(fmt, n_head_kv * d)
    cells = np.full((n_cells, width), 0xA5, np.uint8)
    return Region(fmt, backend.LAYOUT, n_head_kv, d, (cells,))


def rows_of(n: int, n_head_kv: int, d: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, n_head_kv, d)).astype(np.float32)


@pytest.mark.parametrize(("fmt", "n_head_kv", "d"), CASES)
def test_store_writes_the_oracles_bytes_and_nothing_else(
    fmt: KvFormat, n_head_kv: int, d: int
) -> None:
    cells, rows = np.array([3, 10, 0, 7], np.int32), rows_of(4, n_head_kv, d)
    found, wanted = (dirty_region(fmt, 11, n_head_kv, d) for _ in range(2))
    for config in (ONE, TWO):
        assert store_cells_rows(found, rows, cells, fmt=fmt, config=config) is found
        reference.store_cells(wanted, rows, cells, fmt=fmt)
        assert (found.arrays[0] == wanted.arrays[0]).all()
    untouched = np.delete(found.arrays[0], cells, axis=0)
    assert (untouched == 0xA5).all()
    decoded = backend.decode_cells(found, cells)
    flat = reference.decode_rows(found.arrays[0][cells], fmt, n_head_kv * d)
    assert (decoded == flat.reshape(decoded.shape)).all()


@pytest.mark.parametrize("fmt", KvFormat)
def test_a_store_large_enough_for_threads_writes_the_same_bytes(fmt: KvFormat) -> None:
    rows = rows_of(300, 2, 32)
    cells = np.random.default_rng(1).permutation(512)[:300].astype(np.int32)
    wanted = dirty_region(fmt, 512, 2, 32)
    reference.store_cells(wanted, rows, cells, fmt=fmt)
    for config in (ONE, TWO):
        found = dirty_region(fmt, 512, 2, 32)
        store_cells_rows(found, rows, cells, fmt=fmt, config=config)
        assert (found.arrays[0] == wanted.arrays[0]).all()


def test_padding_becomes_zero() -> None:
    for fmt, n_head_kv, d, used in ((KvFormat.F16, 3, 5, 30), (KvFormat.Q8_0, 1, 32, 34)):
        region = dirty_region(fmt, 2, n_head_kv, d)
        row = rows_of(1, n_head_kv, d)
        store_cells_rows(region, row, np.array([1]), fmt=fmt, config=ONE)
        assert region.arrays[0].shape[1] == used + 2
        assert region.arrays[0][1, used:].tolist() == [0, 0]


def f16_through_a_cell(values: np.ndarray) -> np.ndarray:
    """The f16 bits that a store makes of f32 values."""
    region = dirty_region(KvFormat.F16, 1, 1, values.size)
    row = values.astype(np.float32).reshape(1, 1, -1)
    store_cells_rows(region, row, np.zeros(1, np.int32), fmt=KvFormat.F16, config=ONE)
    return region.arrays[0].view(np.uint16)[0, : values.size]


def test_every_f16_value_survives() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    values = bits.view(np.float16)
    stored = f16_through_a_cell(values.astype(np.float32))
    nan = np.isnan(values)
    assert (stored == bits)[~nan].all()
    assert np.isnan(stored.view(np.float16)[nan]).all()
    region = dirty_region(KvFormat.F16, 1, 1, 1 << 16)
    backend.write_cells(region, np.zeros(1, np.int32), bits.view(np.uint8)[None])
    decoded = backend.decode_cells(region, np.zeros(1, np.int32))[0, 0]
    assert np.array_equal(decoded, values.astype(np.float32), equal_nan=True)
    assert (np.signbit(decoded) == np.signbit(values))[~nan].all()


def test_f16_rounds_to_nearest_even() -> None:
    f16 = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float64)
    halfway = ((f16[:-1] + f16[1:]) / 2).astype(np.float32)
    random = np.random.default_rng(0).integers(0, 1 << 32, 1 << 20, dtype=np.uint64)
    edges = np.array([65504, 65519.996, 65520, 1e30, np.inf, 2.0**-25, 2.0**-24, 1e-45, 0])
    parts = [
        halfway,
        np.nextafter(halfway, np.float32(0)),
        np.nextafter(halfway, np.float32(1e38)),
        random.astype(np.uint32).view(np.float32),
        edges.astype(np.float32),
    ]
    values = np.concatenate([*parts, *(-part for part in parts)])
    with np.errstate(over="ignore", invalid="ignore"):
        wanted = values.astype(np.float16)
    found = f16_through_a_cell(values)
    nan = np.isnan(values)
    assert (found == wanted.view(np.uint16))[~nan].all()
    assert np.isnan(found.view(np.float16)[nan]).all()


@pytest.mark.parametrize("fmt", KvFormat)
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("n", [1, 4, 300])  # the last one is shared by threads
def test_qkv_rope_store_is_rope_and_two_stores(fmt: KvFormat, pairing: str, n: int) -> None:
    q, k, v = rows_of(n, 6, 32), rows_of(n, 2, 32, seed=1), rows_of(n, 2, 32, seed=2)
    rng = np.random.default_rng(3)
    positions = rng.integers(0, 8, n).astype(np.int32)
    cells = rng.permutation(512)[:n].astype(np.int32)
    angles = np.arange(8)[:, None] * 10.0 ** -np.linspace(0, 4, 16)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    regions, wanted = ([dirty_region(fmt, 512, 2, 32) for _ in range(2)] for _ in range(2))
    out, *returned = qkv_rope_store_rows(
        q, k, v, *regions, positions, cells, cos, sin, fmt=fmt, pairing=pairing, config=TWO
    )
    assert np.abs(out - reference.rope(q, positions, cos, sin, pairing=pairing)).max() < 1e-6
    assert returned[0] is regions[0] and returned[1] is regions[1]
    rotated = rope_rows(k, positions, cos, sin, pairing=pairing, config=ONE)
    for region, target, rows in zip(regions, wanted, (rotated, v), strict=True):
        reference.store_cells(target, rows, cells, fmt=fmt)
        assert (region.arrays[0] == target.arrays[0]).all()
    assert np.abs(rotated - reference.rope(k, positions, cos, sin, pairing=pairing)).max() < 1e-6


def test_a_refused_store_changes_no_byte() -> None:
    region = dirty_region(KvFormat.F16, 4, 2, 8)
    rows = rows_of(2, 2, 8)
    for cells, fmt, message in (
        ([0, 4], KvFormat.F16, "cell 4 of row 1 is outside the region of 4 cells"),
        ([-1, 0], KvFormat.F16, "cell -1 of row 0 is outside"),
        ([0, 1, 2], KvFormat.F16, r"rows \[2, 2, 8\] for 3 cells .* must be \[3, 2, 8\]"),
        ([0, 1], KvFormat.F32, "wants canonical f32 cells and the region holds canonical f16"),
    ):
        with pytest.raises(Refusal, match=message):
            store_cells_rows(region, rows, np.array(cells), fmt=fmt, config=ONE)
    tables = np.ones((2, 1, 4), np.float32)
    good, bad = np.zeros(2, np.int32), np.array([0, 1], np.int32)
    for v, cells, positions, message in (
        (rows, [0, 9], good, "cell 9 of row 1 is outside"),
        (rows[:1], [0, 1], good, r"v \[1, 2, 8\] for 2 cells"),
        (rows, [0, 1], bad, "position 1 of row 1 is not in the rope table of 1"),
    ):
        regions, at = (region, region), np.array(cells)
        with pytest.raises(Refusal, match=message):
            qkv_rope_store_rows(
                rows, rows, v, *regions, positions, at, *tables,
                fmt=KvFormat.F16, pairing="half", config=ONE,
            )  # fmt: skip
    assert (region.arrays[0] == 0xA5).all()


@pytest.mark.parametrize("fmt", KvFormat)
def test_regions_start_as_zero_or_nan_and_cells_can_be_cleared(fmt: KvFormat) -> None:
    everything = np.arange(5, dtype=np.int32)
    zero = backend.empty_region(fmt, 5, 1, 32)
    assert zero.arrays[0].shape == (5, cell_bytes(fmt, 32))
    assert (backend.decode_cells(zero, everything) == 0).all()
    region = backend.empty_region(fmt, 5, 1, 32, fill=float("nan"))
    assert np.isnan(backend.decode_cells(region, everything)).all()
    backend.clear_cells(region, np.array([1, 3]))
    cleared = backend.decode_cells(region, everything)[:, 0]
    assert (cleared[[1, 3]] == 0).all() and np.isnan(cleared[[0, 2, 4]]).all()
    with pytest.raises(Refusal, match="0 or NaN, not 2"):
        backend.clear_cells(region, np.array([0]), fill=2.0)
    with pytest.raises(Refusal, match="0 or NaN, not 2"):
        backend.empty_region(fmt, 5, 1, 32, fill=2.0)


def test_cells_move_verbatim() -> None:
    region = dirty_region(KvFormat.Q8_0, 6, 1, 32)
    given = np.random.default_rng(0).integers(0, 256, (2, 36)).astype(np.uint8)
    backend.write_cells(region, np.array([4, 1]), given)
    assert (backend.read_cells(region, np.array([1, 4])) == given[::-1]).all()
    assert (region.arrays[0][[0, 2, 3, 5]] == 0xA5).all()
    with pytest.raises(Refusal, match=r"uint8 \[1, 36\], not uint8 \[2, 36\]"):
        backend.write_cells(region, np.array([0]), given)
    for call in (backend.read_cells, backend.decode_cells):
        with pytest.raises(Refusal, match="cell 6 of row 0 is outside"):
            call(region, np.array([6]))
