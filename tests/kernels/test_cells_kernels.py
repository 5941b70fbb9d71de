"""Stores and loads of cells in the three formats, and the array helpers around them."""

from __future__ import annotations

import numpy as np
import pytest
from under_test import canonical, configs_of, default, interpreted, launch, op, package

from minfer import reference
from minfer.errors import Refusal
from minfer.format import KvFormat, Region, cell_bytes

DIMS = {KvFormat.F32: (1, 5, 32), KvFormat.F16: (1, 5, 16, 32), KvFormat.Q8_0: (32, 64, 96)}
CASES = [(fmt, n_head_kv, d) for fmt in KvFormat for n_head_kv in (1, 3) for d in DIMS[fmt]]
MANY = 40 if interpreted() else 300  # rows, enough for threads


def dirty_region(fmt: KvFormat, n_cells: int, n_head_kv: int, d: int) -> Region:
    """A canonical region whose elements are all bytes of 0xA5; padding is zero."""
    cells = np.full((n_cells, cell_bytes(fmt, n_head_kv * d)), 0xA5, np.uint8)
    cells[:, used_bytes(fmt, n_head_kv * d) :] = 0
    return Region(fmt, "canonical", n_head_kv, d, (cells,))


def used_bytes(fmt: KvFormat, n: int) -> int:
    """Bytes of the elements of a cell, without padding."""
    return {KvFormat.F32: 4 * n, KvFormat.F16: 2 * n, KvFormat.Q8_0: n // 32 * 34}[fmt]


def rows_of(n: int, n_head_kv: int, d: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, n_head_kv, d)).astype(np.float32)


def everything(region: Region) -> np.ndarray:
    return np.arange(region.n_cells, dtype=np.int32)


@pytest.mark.parametrize(("fmt", "n_head_kv", "d"), CASES)
def test_store_writes_the_oracles_bytes_and_nothing_else(
    fmt: KvFormat, n_head_kv: int, d: int
) -> None:
    cells, rows = np.array([3, 10, 0, 7], np.int32), rows_of(4, n_head_kv, d)
    wanted = dirty_region(fmt, 11, n_head_kv, d)
    untouched = np.delete(wanted.arrays[0], cells, axis=0)
    reference.store_cells(wanted, rows, cells, fmt=fmt)
    store = default("store_cells", fmt)
    for config in configs_of(store):
        given = dirty_region(fmt, 11, n_head_kv, d)
        found = launch(store, given, rows, cells, fmt=fmt, config=config)
        assert (found.arrays[0] == wanted.arrays[0]).all()
        assert (np.delete(found.arrays[0], cells, axis=0) == untouched).all()


@pytest.mark.parametrize(("fmt", "n_head_kv", "d"), CASES)
def test_cells_decode_as_the_oracle_says(fmt: KvFormat, n_head_kv: int, d: int) -> None:
    region = package().empty_region(fmt, 5, n_head_kv, d)
    given = reference.encode_rows(rows_of(3, 1, n_head_kv * d)[:, 0], fmt)
    at = np.array([4, 0, 2], np.int32)
    region = package().write_cells(region, at, given)
    decoded = package().to_host(package().decode_cells(region, at))
    assert decoded.shape == (3, n_head_kv, d) and decoded.dtype == np.float32
    assert (decoded.reshape(3, -1) == reference.decode_rows(given, fmt, n_head_kv * d)).all()


@pytest.mark.parametrize("fmt", KvFormat)
def test_a_store_of_many_rows_writes_the_same_bytes(fmt: KvFormat) -> None:
    rows = rows_of(MANY, 2, 32)
    cells = np.random.default_rng(1).permutation(512)[:MANY].astype(np.int32)
    wanted = dirty_region(fmt, 512, 2, 32)
    reference.store_cells(wanted, rows, cells, fmt=fmt)
    store = default("store_cells", fmt)
    for config in configs_of(store):
        given = dirty_region(fmt, 512, 2, 32)
        found = launch(store, given, rows, cells, fmt=fmt, config=config)
        assert (found.arrays[0] == wanted.arrays[0]).all()


def f16_through_a_cell(values: np.ndarray) -> np.ndarray:
    """The f16 bits that a store makes of f32 values."""
    region = dirty_region(KvFormat.F16, 1, 1, values.size)
    row = values.astype(np.float32).reshape(1, 1, -1)
    stored = op("store_cells", KvFormat.F16)(region, row, np.zeros(1, np.int32), fmt=KvFormat.F16)
    return stored.arrays[0].view(np.uint16)[0, : values.size]


def test_every_f16_value_survives() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    values = bits.view(np.float16)
    stored = f16_through_a_cell(values.astype(np.float32))
    nan = np.isnan(values)
    assert (stored == bits)[~nan].all()
    assert np.isnan(stored.view(np.float16)[nan]).all()
    region, at = package().empty_region(KvFormat.F16, 1, 1, 1 << 16), np.zeros(1, np.int32)
    region = package().write_cells(region, at, bits.view(np.uint8)[None])
    decoded = package().to_host(package().decode_cells(region, at))[0, 0]
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
    values = np.concatenate([*parts, *(-part for part in parts)])[:: 50 if interpreted() else 1]
    with np.errstate(over="ignore", invalid="ignore"):
        wanted = values.astype(np.float16)
    found = f16_through_a_cell(values)
    nan = np.isnan(values)
    assert (found == wanted.view(np.uint16))[~nan].all()
    assert np.isnan(found.view(np.float16)[nan]).all()


@pytest.mark.parametrize("fmt", KvFormat)
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("n", [1, 4, MANY])
def test_qkv_rope_store_is_rope_and_two_stores(fmt: KvFormat, pairing: str, n: int) -> None:
    q, k, v = rows_of(n, 6, 32), rows_of(n, 2, 32, seed=1), rows_of(n, 2, 32, seed=2)
    rng = np.random.default_rng(3)
    positions = rng.integers(0, 8, n).astype(np.int32)
    cells = rng.permutation(512)[:n].astype(np.int32)
    angles = np.arange(8)[:, None] * 10.0 ** -np.linspace(0, 4, 16)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    given = [dirty_region(fmt, 512, 2, 32) for _ in range(2)]
    out, *found = op("qkv_rope_store", fmt)(
        q, k, v, *given, positions, cells, cos, sin, fmt=fmt, pairing=pairing
    )
    assert np.abs(out - reference.rope(q, positions, cos, sin, pairing=pairing)).max() < 1e-6
    rotated = op("rope")(k, positions, cos, sin, pairing=pairing)
    for region, rows in zip(found, (rotated, v), strict=True):
        wanted = dirty_region(fmt, 512, 2, 32)
        reference.store_cells(wanted, rows, cells, fmt=fmt)
        assert (region.arrays[0] == wanted.arrays[0]).all()
    assert np.abs(rotated - reference.rope(k, positions, cos, sin, pairing=pairing)).max() < 1e-6


def test_a_refused_store_changes_no_byte() -> None:
    fmt = KvFormat.F16
    store, fused = default("store_cells", fmt), default("qkv_rope_store", fmt)
    cells = np.arange(4, dtype=np.int32)
    region = package().empty_region(fmt, 4, 2, 8)
    region = package().write_cells(region, cells, dirty_region(fmt, 4, 2, 8).arrays[0])
    rows, one = rows_of(2, 2, 8), {"config": store.config()}
    for at, asked, message in (
        ([0, 4], fmt, "cell 4 of row 1 is outside the region of 4 cells"),
        ([-1, 0], fmt, "cell -1 of row 0 is outside"),
        ([0, 1, 2], fmt, r"rows \[2, 2, 8\] for 3 cells .* must be \[3, 2, 8\]"),
        ([0, 1], KvFormat.F32, "wants .*f32 cells .* holds .* f16"),
    ):
        with pytest.raises(Refusal, match=message):
            store.launch(region, rows, np.array(at), fmt=asked, **one)
    tables = np.ones((2, 1, 4), np.float32)
    good, bad = np.zeros(2, np.int32), np.array([0, 1], np.int32)
    for v, at, positions, message in (
        (rows, [0, 9], good, "cell 9 of row 1 is outside"),
        (rows[:1], [0, 1], good, r"v \[1, 2, 8\] for 2 cells"),
        (rows, [0, 1], bad, "position 1 of row 1 is not in the rope table of 1"),
    ):
        with pytest.raises(Refusal, match=message):
            fused.launch(
                rows, rows, v, region, region, positions, np.array(at), *tables,
                fmt=fmt, pairing="half", config=fused.config(),
            )  # fmt: skip
    assert (canonical(region).arrays[0] == 0xA5).all()


@pytest.mark.parametrize("fmt", KvFormat)
def test_regions_start_as_zero_or_nan_and_cells_can_be_cleared(fmt: KvFormat) -> None:
    kernels = package()

    def decoded(region: Region) -> np.ndarray:
        values: np.ndarray = kernels.to_host(kernels.decode_cells(region, everything(region)))
        return values

    zero = kernels.empty_region(fmt, 5, 1, 32)
    assert canonical(zero).arrays[0].shape == (5, cell_bytes(fmt, 32))
    assert not canonical(zero).arrays[0].any() and (decoded(zero) == 0).all()
    region = kernels.empty_region(fmt, 5, 1, 32, fill=float("nan"))
    assert np.isnan(decoded(region)).all()
    region = kernels.clear_cells(region, np.array([1, 3], np.int32))
    cleared = decoded(region)[:, 0]
    assert (cleared[[1, 3]] == 0).all() and np.isnan(cleared[[0, 2, 4]]).all()
    with pytest.raises(Refusal, match="0 or NaN, not 2"):
        kernels.clear_cells(region, np.array([0]), fill=2.0)
    with pytest.raises(Refusal, match="0 or NaN, not 2"):
        kernels.empty_region(fmt, 5, 1, 32, fill=2.0)


@pytest.mark.parametrize("fmt", KvFormat)
def test_a_region_holds_the_bytes_that_its_format_says(fmt: KvFormat) -> None:
    for n_head_kv, d in ((3, 96), (1, 32), (2, 64)):
        for region in package().empty_regions(2, fmt, 7, n_head_kv, d):
            assert region.layout == package().LAYOUT
            held = sum(array.nbytes for array in region.arrays)
            assert held == 7 * cell_bytes(fmt, n_head_kv * d)


def test_cells_are_written_and_read_verbatim() -> None:
    kernels, region = package(), package().empty_region(KvFormat.Q8_0, 6, 1, 32)
    given = np.random.default_rng(0).integers(0, 256, (2, 36)).astype(np.uint8)
    given[:, 34:] = 0
    region = kernels.write_cells(region, np.array([4, 1]), given)
    assert (kernels.read_cells(region, np.array([1, 4])) == given[::-1]).all()
    assert not kernels.read_cells(region, np.array([0, 2, 3, 5])).any()
    with pytest.raises(Refusal, match=r"uint8 \[1, 36\], not uint8 \[2, 36\]"):
        kernels.write_cells(region, np.array([0]), given)
    for call in (kernels.read_cells, kernels.decode_cells):
        with pytest.raises(Refusal, match="cell 6 of row 0 is outside"):
            call(region, np.array([6]))
