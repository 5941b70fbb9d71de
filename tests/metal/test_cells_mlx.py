"""What kernels write into cells on MLX, to the byte of the oracle, and the memory that it takes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import under_test

mx = pytest.importorskip("mlx.core")

from minfer import kernels_mlx as backend  # noqa: E402
from minfer import reference  # noqa: E402
from minfer.cases import MOVE_CASES, any_bytes  # noqa: E402
from minfer.format import KvFormat, Region  # noqa: E402
from minfer.kernels_mlx import _move, q8_0  # noqa: E402
from minfer.kernels_mlx import cells as kernels  # noqa: E402
from minfer.ops import HALF, INTERLEAVED  # noqa: E402

pytestmark = pytest.mark.skipif(under_test.device != "metal", reason="runs by --on metal")

MIB = 1 << 20
DIRTY = 0x5A
WORDS = {mx.float32: 0x5A5A5A5A, mx.float16: 0x5A5A, mx.int8: 0x5A}


def rows_of(n: int, n_head_kv: int, d: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, n_head_kv, d)).astype(np.float32)


def dirty_region(fmt: KvFormat, n_cells: int, n_head_kv: int, d: int) -> Region:
    """A region whose bytes are all DIRTY, padding too."""
    region = backend.empty_region(fmt, n_cells, n_head_kv, d)
    for plane in region.arrays:
        of_size = {4: mx.uint32, 2: mx.uint16, 1: mx.uint8}[plane.itemsize]
        plane[:] = mx.full(plane.shape, WORDS[plane.dtype], of_size).view(plane.dtype)
    return region


def at_home(region: Region) -> Region:
    """A canonical region as one of this package."""
    made = backend.empty_region(region.fmt, region.n_cells, region.n_head_kv, region.head_dim)
    return backend.write_cells(made, np.arange(region.n_cells), region.arrays[0])


def bytes_of(region: Region) -> np.ndarray:
    return backend.read_cells(region, np.arange(region.n_cells))


def planes_of(region: Region) -> list[np.ndarray]:
    """Every byte of the region, padding too."""
    return [backend.to_host(plane).view(np.uint8) for plane in region.arrays]


# -- stores ---------------------------------------------------------------------------------------


def test_rows_that_lie_in_steps_are_stored_and_quantized() -> None:
    rows = rows_of(6, 2, 32)
    steps = mx.array(np.ascontiguousarray(rows.transpose(2, 1, 0))).transpose(2, 1, 0)
    region = backend.empty_region(KvFormat.Q8_0, 6, 2, 32)
    kernels.store_cells_rows(region, steps, np.arange(6), fmt=KvFormat.Q8_0, config={})
    wanted = reference.quantize_q8_0(rows.reshape(6, 64))
    assert (bytes_of(region) == wanted).all()
    every_other = mx.repeat(mx.array(wanted), 2, axis=0)[::2]
    found = q8_0.dequantize_q8_0_blocks(every_other, n=64, config={})
    assert (backend.to_host(found) == reference.dequantize_q8_0(wanted, n=64)).all()


def test_scales_are_multiplied_before_the_products_of_codes() -> None:
    a, b = (reference.quantize_q8_0(rows_of(40, 1, 96, seed)[:, 0]) for seed in (1, 2))
    found = backend.to_host(q8_0.dot_q8_0_blocks(a, b, n=96, config={}))
    assert under_test.same_bits(found, reference.dot_q8_0(a, b, n=96))


def test_a_call_of_no_rows_launches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.MetalKernel, "__call__", None)
    region, none = dirty_region(KvFormat.Q8_0, 2, 1, 32), np.zeros((0, 1, 32), np.float32)
    cells, table, how = [], np.ones((1, 16), np.float32), {"pairing": HALF, "config": {}}
    kernels.store_cells_rows(region, none, cells, fmt=KvFormat.Q8_0, config={})
    out, *_ = kernels.qkv_rope_store_rows(
        none, none, none, region, region, [], cells, table, table, fmt=KvFormat.Q8_0, **how
    )
    kernels.map_q8_0_cells_rows(region, cells, table, table, **how)
    assert out.shape == (0, 1, 32)
    assert q8_0.quantize_q8_0_blocks(none[:, 0], config={}).shape == (0, 36)
    packed = np.zeros((0, 36), np.uint8)
    assert q8_0.dequantize_q8_0_blocks(packed, n=32, config={}).shape == (0, 32)
    assert q8_0.dot_q8_0_blocks(packed, packed, n=32, config={}).shape == (0,)
    assert all((plane == DIRTY).all() for plane in planes_of(region))


# -- moves ----------------------------------------------------------------------------------------

LONG = {
    "apart": ((0, 2500, 2400), (10, 2400, 100), (2400, 30, 2300)),
    "by one": ((0, 1, 4999), (2, 1, 4998)),
    "by less than a batch": ((0, 130, 4870), (4500, 4450, 500), (99, 0, 4900)),
    "by more than a batch": ((0, 1500, 3500), (1501, 100, 3499)),
    "a chain": ((0, 70, 64), (70, 140, 64), (140, 210, 63), (210, 5, 64), (6, 4, 64)),
}


@pytest.mark.parametrize("most", [1, 1000, 6000])
@pytest.mark.parametrize("name", LONG)
def test_long_moves_act_in_order(name: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    n_cells = 5000 if most > 1 else 300
    moves = np.array(LONG[name], np.int32)
    moves = moves if most > 1 else moves * n_cells // 5000
    region = any_bytes(KvFormat.Q8_0, n_cells, 3, 32)
    monkeypatch.setattr(_move, "BATCH_BYTES", most * region.row_bytes)
    ours = at_home(region)
    region.arrays[0][:] = bytes_of(ours)
    wanted = reference.move_cells(region, moves).arrays[0]
    assert (bytes_of(kernels.move_cells_rows(ours, moves, config={})) == wanted).all()


def random_moves(rng: np.random.Generator, n_cells: int) -> tuple[tuple[int, int, int], ...]:
    src, dst = rng.integers(0, n_cells, (2, 12))
    rows = rng.integers(0, n_cells + 1 - np.maximum(src, dst))
    return tuple(zip(src.tolist(), dst.tolist(), rows.tolist(), strict=True))


@pytest.mark.parametrize("most", [1, 2, 3, 7, 100])
def test_batches_act_as_their_moves_in_order(most: int) -> None:
    """Taken whole and put in any order within a batch."""
    rng = np.random.default_rng(most)
    cases = [(case.n_cells, case.moves) for case in MOVE_CASES]
    cases += [(n, random_moves(rng, n)) for n in (2, 5, 30, 30, 200, 200)]
    for n_cells, moves in cases:
        wanted, found = list(range(n_cells)), np.arange(n_cells)
        for src, dst, rows in moves:
            wanted[dst : dst + rows] = wanted[src : src + rows]
        table = np.array(moves, np.int32).reshape(-1, 3)
        for src, dst in _move.batches(table, n_cells, most):
            assert 0 < len(src) == len(dst) <= most
            assert len(set(dst.tolist())) == len(dst)
            order = rng.permutation(len(dst))
            found[dst[order]] = found[src][order]
        assert found.tolist() == wanted


def test_a_batch_ends_where_a_row_meets_one_that_it_wrote() -> None:
    def lengths(*moves: tuple[int, int, int], most: int = 100) -> list[int]:
        table = np.array(moves, np.int32)
        return [len(src) for src, _ in _move.batches(table, 50, most)]

    assert lengths((0, 10, 5), (20, 30, 5)) == [10]
    assert lengths((0, 1, 40)) == [40]  # an overlap with itself is no matter: it is taken first
    assert lengths((0, 10, 5), (20, 0, 5)) == [10]  # nor is what it has read
    assert lengths((0, 10, 5), (14, 20, 5)) == [5, 5]
    assert lengths((0, 10, 5), (20, 14, 5)) == [5, 5]
    assert lengths((0, 10, 25), most=10) == [10, 10, 5][::-1]  # up: from the top
    assert lengths((10, 0, 25), most=10) == [10, 10, 5]
    assert lengths((0, 10, 5), (14, 20, 5), (30, 10, 5)) == [5, 10]  # of this batch, not before
    assert lengths((3, 3, 9), (0, 4, 0)) == []


# -- memory ---------------------------------------------------------------------------------------

LARGE = 256 * MIB


def peak_of(call: Callable[[], object], region: Region) -> int:
    """Bytes by which the call raises what MLX has allocated, at most."""
    mx.eval(region.arrays)
    mx.synchronize()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    call()
    mx.eval(region.arrays)
    mx.synchronize()
    return int(max(0, mx.get_peak_memory() - before))


@pytest.mark.parametrize("fmt", KvFormat, ids=str)
def test_no_operation_holds_a_region_twice(fmt: KvFormat) -> None:
    n_head_kv, d = 8, 128
    row_bytes = backend.empty_region(fmt, 1, n_head_kv, d).row_bytes
    region = backend.empty_region(fmt, LARGE // row_bytes, n_head_kv, d)
    last, by = region.n_cells - 1, 2 * _move.batch_rows(region) + 5
    rows, table = rows_of(3, n_head_kv, d), np.ones((1, d // 2), np.float32)
    cells, at, how = np.array([last, 0, 7]), [0, 0, 0], {"fmt": fmt, "config": {}}
    raw = np.zeros((3, row_bytes), np.uint8)
    moves = [(0, 1, 3 * by), (by, 0, 2 * by), *((i, i + 9, 5) for i in range(0, 600, 6))]
    calls: dict[str, Callable[[], object]] = {
        "store_cells": lambda: kernels.store_cells_rows(region, rows, cells, **how),
        "qkv_rope_store": lambda: kernels.qkv_rope_store_rows(
            rows, rows, rows, region, region, at, cells, table, table, pairing=HALF, **how
        ),
        "move_cells": lambda: kernels.move_cells_rows(region, moves, config={}),
        "clear_cells": lambda: backend.clear_cells(region, np.arange(region.n_cells), np.nan),
        "write_cells": lambda: backend.write_cells(region, cells, raw),
    }
    if fmt is KvFormat.Q8_0:
        calls["map_q8_0_cells"] = lambda: kernels.map_q8_0_cells_rows(
            region, np.arange(by), table, table, pairing=HALF, config={}
        )
    for name, call in calls.items():
        peak = peak_of(call, region)
        assert peak < 8 * MIB, f"{name} took {peak / MIB:.1f} MiB"
    mx.clear_cache()


@pytest.mark.parametrize("fmt", KvFormat, ids=str)
def test_who_else_holds_the_planes_keeps_them_as_they_were(fmt: KvFormat) -> None:
    rows, table, cells = rows_of(2, 2, 32), np.ones((1, 16), np.float32), np.array([3, 1])
    how, raw = {"fmt": fmt, "config": {}}, np.zeros((2, 2 * 32 * 4), np.uint8)
    calls: list[Callable[[Region], object]] = [
        lambda region: kernels.store_cells_rows(region, rows, cells, **how),
        lambda region: kernels.qkv_rope_store_rows(
            rows, rows, rows, region, region, [0, 0], cells, table, table, pairing=HALF, **how
        ),
        lambda region: kernels.move_cells_rows(region, [(0, 1, 4), (3, 0, 2)], config={}),
        lambda region: backend.clear_cells(region, cells, np.nan),
        lambda region: backend.write_cells(region, cells, raw[:, : region.row_bytes]),
    ]
    if fmt is KvFormat.Q8_0:
        calls.append(
            lambda region: kernels.map_q8_0_cells_rows(
                region, cells, -table, table, pairing=INTERLEAVED, config={}
            )
        )
    for call in calls:
        region = at_home(any_bytes(fmt, 5, 2, 32))
        before, others = planes_of(region), [mx.array(plane) for plane in region.arrays]
        call(region)
        assert any((a != b).any() for a, b in zip(planes_of(region), before, strict=True))
        for other, was in zip(others, before, strict=True):
            assert (backend.to_host(other).view(np.uint8) == was).all()
