"""What holds for the CPU's cells alone: ops work in place, and padding is bytes as others are."""

from __future__ import annotations

from copy import deepcopy

import numpy as np
import pytest

from minfer import cases, reference
from minfer.cases import MOVE_CASES, MoveCase
from minfer.errors import Refusal
from minfer.format import KvFormat, Region, cell_bytes
from minfer.kernels_numba.cells import map_q8_0_cells_rows, move_cells_rows, store_cells_rows

ONE = {"threads": 1}


def test_ops_change_the_region_they_are_given() -> None:
    region = cases.any_bytes(KvFormat.Q8_0, 4, 1, 32)
    rows, table = np.ones((1, 1, 32), np.float32), np.ones((1, 16), np.float32)
    at = np.array([2])
    assert store_cells_rows(region, rows, at, fmt=KvFormat.Q8_0, config=ONE) is region
    assert move_cells_rows(region, np.array([[0, 1, 1]]), config={}) is region
    assert map_q8_0_cells_rows(region, at, table, table, pairing="half", config=ONE) is region


def test_padding_becomes_zero_in_a_store() -> None:
    for fmt, n_head_kv, d, used in ((KvFormat.F16, 3, 5, 30), (KvFormat.Q8_0, 1, 32, 34)):
        cells = np.full((2, cell_bytes(fmt, n_head_kv * d)), 0xA5, np.uint8)
        region = Region(fmt, "canonical", n_head_kv, d, (cells,))
        row = np.random.default_rng(0).standard_normal((1, n_head_kv, d)).astype(np.float32)
        store_cells_rows(region, row, np.array([1]), fmt=fmt, config=ONE)
        assert cells.shape[1] == used + 2
        assert cells[1, used:].tolist() == [0, 0] and (cells[0] == 0xA5).all()


@pytest.mark.parametrize("case", MOVE_CASES, ids=lambda case: case.name)
def test_padding_moves_with_its_cell(case: MoveCase) -> None:
    for fmt, heads in ((KvFormat.F16, (3, 5)), (KvFormat.Q8_0, (1, 96))):
        region = cases.any_bytes(fmt, case.n_cells, *heads)
        wanted = reference.move_cells(deepcopy(region), case.array)
        moved = move_cells_rows(region, case.array, config={})
        assert (moved.arrays[0] == wanted.arrays[0]).all()


def test_a_region_that_cannot_be_written_is_refused() -> None:
    region = cases.any_bytes(KvFormat.F32, 4, 1, 8)
    region.arrays[0].flags.writeable = False
    with pytest.raises(Refusal, match="read-only"):
        move_cells_rows(region, np.array([[0, 1, 1]]), config={})
