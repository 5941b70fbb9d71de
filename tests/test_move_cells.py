"""Cells moved where they lie, in every format, to the byte."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import pytest

from minfer import cases, reference, registry
from minfer.cases import MOVE_CASES, MoveCase, any_bytes
from minfer.errors import Refusal
from minfer.format import KvFormat, Region
from minfer.ops import Variant

VARIANTS = registry.variants("move_cells", "cpu")
# heads, head_dim: cells of one word, of an odd number of elements, of padded ones (q8_0 96: 102
# bytes in 26 words), of more than a page
WIDTHS = {
    KvFormat.F32: ((1, 1), (3, 5), (2, 32), (8, 128)),
    KvFormat.F16: ((1, 1), (3, 5), (2, 32), (8, 256)),
    KvFormat.Q8_0: ((1, 32), (3, 32), (1, 96), (2, 64), (8, 512)),
}
MATRIX = [
    pytest.param(v, fmt, heads, case, id=f"{v.name}-{fmt}-{heads[0]}x{heads[1]}-{case.name}")
    for v in VARIANTS
    for fmt in v.formats
    for heads in WIDTHS[fmt]
    for case in MOVE_CASES
]


def launch(variant: Variant, region: Region, moves: Any) -> Region:
    moved: Region = variant.launch(region, moves, config=variant.config())
    return moved


@pytest.mark.parametrize(("variant", "fmt", "heads", "case"), MATRIX)
def test_cells_move_as_in_a_list(
    variant: Variant, fmt: KvFormat, heads: tuple[int, int], case: MoveCase
) -> None:
    region = any_bytes(fmt, case.n_cells, *heads)
    cells = [cell.tobytes() for cell in region.arrays[0]]
    oracle = reference.move_cells(deepcopy(region), case.array)
    for src, dst, rows in case.moves:
        cells[dst : dst + rows] = cells[src : src + rows]
    moved = launch(variant, region, case.array)
    assert [cell.tobytes() for cell in moved.arrays[0]] == cells
    assert (oracle.arrays[0] == moved.arrays[0]).all()


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
@pytest.mark.parametrize("fmt", KvFormat, ids=str)
def test_thousands_of_random_moves_act_in_order(variant: Variant, fmt: KvFormat) -> None:
    rng = np.random.default_rng(0)
    src, dst = rng.integers(0, 2000 - 12, (2, 3000))
    moves = np.stack([src, dst, rng.integers(0, 13, 3000)], axis=1)
    region = any_bytes(fmt, 2000, 3, 32)
    wanted = reference.move_cells(deepcopy(region), moves.astype(np.int32))
    assert len(np.unique(wanted.arrays[0], axis=0)) > 150
    assert (launch(variant, region, moves).arrays[0] == wanted.arrays[0]).all()


def test_cells_beyond_two_gigabytes_move() -> None:
    width = 1 << 16
    far = (1 << 31) // width + 5
    cells = np.zeros((far + 3, width), np.uint8)  # untouched pages cost nothing
    cells[far] = np.arange(width) % 251
    region = Region(KvFormat.F32, "canonical", 1, width // 4, (cells,))
    launch(VARIANTS[0], region, np.array([[far, far + 2, 1], [far + 2, 1, 1]], np.int32))
    assert (cells[[1, far + 2]] == cells[far]).all() and not cells[[0, 2, far + 1]].any()


REFUSED = {
    "too far": ([[0, 1, 1], [1, 3, 2]], "move 1 of 2 rows from cell 1 to 3 does not lie in the"),
    "from too far": ([[3, 0, 2]], "move 0 of 2 rows from cell 3 to 0"),
    "a start beyond": ([[0, 5, 0]], "move 0 of 0 rows from cell 0 to 5"),
    "negative rows": ([[1, 0, -1]], "move 0 of -1 rows"),
    "a negative start": ([[-1, 0, 1]], "move 0 of 1 rows from cell -1 to 0"),
    "to a negative start": ([[0, -2, 1]], "from cell 0 to -2"),
    "past int32": ([[0, 1, 2**31 - 1]], "move 0 of 2147483647 rows"),
    "pairs": ([[0, 1]], r"moves [1, 2] must be [n, 3]"),
}


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
@pytest.mark.parametrize("name", REFUSED)
def test_a_move_out_of_the_region_is_refused_before_the_first(variant: Variant, name: str) -> None:
    moves, message = REFUSED[name]
    region = cases.any_bytes(KvFormat.F16, 4, 1, 8)
    before = region.arrays[0].copy()
    with pytest.raises(Refusal) as caught:
        launch(variant, region, np.array(moves))
    assert caught.value.rule == "5.6" and message in caught.value.message
    assert (region.arrays[0] == before).all()


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_moves_of_other_types_and_regions_that_cannot_be_written_are_refused(
    variant: Variant,
) -> None:
    region = cases.any_bytes(KvFormat.F32, 4, 1, 8)
    for moves in (np.array([[0.0, 1.0, 1.0]]), np.array([0, 1, 1])):
        with pytest.raises(Refusal) as caught:
            launch(variant, region, moves)
        assert caught.value.rule == "10"
    region.arrays[0].flags.writeable = False
    with pytest.raises(Refusal, match="read-only"):
        launch(variant, region, np.array([[0, 1, 1]]))
