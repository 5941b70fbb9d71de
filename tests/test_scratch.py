"""The variant `scratch`: q8_0 cells decoded once, then the f32 kernel (contract 4.6)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from under_test import attend, config_of, find, same_bits

from minfer import cases, reference
from minfer.format import Floats, Int32, KvFormat, Region
from minfer.kernels_numba import _scratch
from minfer.reference.attention import seen_cells
from minfer.window import CellSpan

CASES = [
    pytest.param(case, id=case.name)
    for case in (*cases.CASES, *cases.LOUD_CASES)
    if case.fits(KvFormat.Q8_0)
]


def decoded(region: Region) -> Region:
    """The same cells as f32."""
    rows = reference.decode_rows(region.arrays[0], region.fmt, region.row_elems)
    cells = reference.encode_rows(rows, KvFormat.F32)
    return Region(KvFormat.F32, region.layout, region.n_head_kv, region.head_dim, (cells,))


def seen(inputs: cases.Inputs) -> Int32:
    """All cells that some query sees, in order."""
    runs: Any = inputs.window.array
    if inputs.op == "attn_window":
        runs = reference.runs_of(inputs.positions, runs)
    per_query = [
        seen_cells(runs[i], int(pos), inputs.width) for i, pos in enumerate(inputs.positions)
    ]
    return np.unique(np.concatenate(per_query)).astype(np.int32)


@pytest.mark.parametrize("case", CASES)
def test_it_has_the_bits_of_flash_over_decoded_cells(case: cases.Case) -> None:
    inputs = cases.make(case, KvFormat.Q8_0)
    out = attend(find(inputs.op, "scratch"), inputs)
    q, k, v, positions, array, tiles = inputs.tensors(32)
    flash = find(inputs.op, "flash")
    tensors = (q, decoded(k), decoded(v), positions, array, tiles)
    scalars = {**inputs.scalars, "fmt": KvFormat.F32}
    expected = flash.launch(*tensors, **scalars, config=config_of(flash))
    assert same_bits(out, expected)


@pytest.mark.parametrize("case", CASES)
def test_every_cell_that_is_seen_is_decoded_once_and_no_other(
    case: cases.Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, asked = _scratch.load_cells, []

    def spy(region: Region, cells: Int32, threads: int) -> Floats:
        asked.append(cells.copy())
        return load(region, cells, threads)

    monkeypatch.setattr(_scratch, "load_cells", spy)
    inputs = cases.make(case, KvFormat.Q8_0)
    attend(find(inputs.op, "scratch"), inputs)
    assert len(asked) == 2  # K, then V
    for cells in asked:
        assert np.array_equal(cells, seen(inputs))


def test_sequences_that_read_the_same_cells_share_their_rows() -> None:
    """Three queries: runs inside one another, runs that only touch, a run of its own."""
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 40, 1, 32)).astype(np.float32)
    spans = [[CellSpan(0, 2, 40)]]
    regions = [cases.region(KvFormat.Q8_0, [rows], spans, 44) for rows in (k, v)]
    runs = np.zeros((3, 4, 2), np.int32)
    runs[0, :2] = (4, 6), (10, 3)
    runs[1, :2] = (5, 2), (12, 4)
    runs[2, :1] = (30, 5)
    positions = np.array([8, 5, 9], np.int32)
    q = rng.standard_normal((3, 2, 32)).astype(np.float32)
    tiles = np.array([[0, 1], [1, 1], [2, 1]], np.int32)
    variant = find("attn_map", "scratch")
    out = variant.launch(
        q, *regions, positions, runs, tiles,
        fmt=KvFormat.Q8_0, scale=0.2, width=0, config=config_of(variant),
    )  # fmt: skip
    exact = reference.attn_map(
        q, *regions, positions, runs, tiles, fmt=KvFormat.Q8_0, scale=0.2, width=0
    )
    assert np.abs(out - exact).max() < 1e-6
