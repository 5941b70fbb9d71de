"""Cells moved where they lie, in every format, to the byte."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import under_test
from under_test import (
    arranged,
    canonical,
    compiled_only,
    config_of,
    interpreted,
    launch,
    package,
    variants,
)

from minfer import cases, reference
from minfer.cases import MOVE_CASES, MoveCase
from minfer.errors import Refusal
from minfer.format import BLOCK, BLOCK_BYTES, KvFormat, Region
from minfer.ops import Variant

VARIANTS = variants("move_cells")
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
    for heads in (WIDTHS[fmt][2:3] if interpreted() else WIDTHS[fmt])
    for case in MOVE_CASES
]


def any_bytes(fmt: KvFormat, n_cells: int, n_head_kv: int, head_dim: int) -> Region:
    """`cases.any_bytes` with zeros in the padding, where a package need not keep anything else."""
    region, n = cases.any_bytes(fmt, n_cells, n_head_kv, head_dim), n_head_kv * head_dim
    used = {KvFormat.F32: 4 * n, KvFormat.F16: 2 * n, KvFormat.Q8_0: n // BLOCK * BLOCK_BYTES}
    region.arrays[0][:, used[fmt] :] = 0
    return region


@pytest.mark.parametrize(("variant", "fmt", "heads", "case"), MATRIX)
def test_cells_move_as_in_a_list(
    variant: Variant, fmt: KvFormat, heads: tuple[int, int], case: MoveCase
) -> None:
    region = any_bytes(fmt, case.n_cells, *heads)
    cells = [cell.tobytes() for cell in region.arrays[0]]
    moved = launch(variant, region, case.array)
    oracle = reference.move_cells(region, case.array)
    for src, dst, rows in case.moves:
        cells[dst : dst + rows] = cells[src : src + rows]
    assert [cell.tobytes() for cell in moved.arrays[0]] == cells
    assert (oracle.arrays[0] == moved.arrays[0]).all()


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
@pytest.mark.parametrize("fmt", KvFormat, ids=str)
def test_thousands_of_random_moves_act_in_order(variant: Variant, fmt: KvFormat) -> None:
    rng, n, n_cells = np.random.default_rng(0), 40 if interpreted() else 3000, 2000
    src, dst = rng.integers(0, n_cells - 12, (2, n))
    moves = np.stack([src, dst, rng.integers(0, 13, n)], axis=1).astype(np.int32)
    region = any_bytes(fmt, n_cells, 3, 32)
    wanted = reference.move_cells(deepcopy(region), moves)
    assert interpreted() or len(np.unique(wanted.arrays[0], axis=0)) > 150
    assert (launch(variant, region, moves).arrays[0] == wanted.arrays[0]).all()


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
@pytest.mark.parametrize("fmt", KvFormat, ids=str)
def test_long_moves_by_a_few_cells_have_memmove_semantics(variant: Variant, fmt: KvFormat) -> None:
    """Many more rows than a kernel holds at a time, up and down, by less and more than a tile."""
    n = 100 if interpreted() else 5000
    region = any_bytes(fmt, n + 300, 3, 32)
    for by in (1, 7, 64, 300):
        for moves in ([[0, by, n]], [[by, 0, n]]):
            array = np.array(moves, np.int32)
            wanted = reference.move_cells(deepcopy(region), array)
            assert (launch(variant, region, array).arrays[0] == wanted.arrays[0]).all()


# MLX fills what it allocates, so that one format is enough there
FAR = [KvFormat.Q8_0] if under_test.device == "metal" else list(KvFormat)


@compiled_only()
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
@pytest.mark.parametrize("fmt", FAR, ids=str)
def test_cells_beyond_two_gigabytes_move(variant: Variant, fmt: KvFormat) -> None:
    kernels, n = package(), 1 << 16
    far = (1 << 31) // n + 5  # past 2^31 bytes in every format
    region = kernels.empty_region(fmt, far + 3, 1, n)
    row = any_bytes(fmt, 1, 1, n).arrays[0]
    region = kernels.write_cells(region, np.array([far]), row)
    moves = kernels.from_host(np.array([[far, far + 2, 1], [far + 2, 1, 1]], np.int32))
    region = variant.launch(region, moves, config=config_of(variant))
    found = kernels.read_cells(region, np.array([1, far, far + 2, 0, 2, far + 1]))
    assert (found[:3] == row).all() and not found[3:].any()


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
    region = any_bytes(KvFormat.F16, 4, 1, 8)
    held = arranged(region)
    with pytest.raises(Refusal) as caught:
        variant.launch(held, np.array(moves), config=config_of(variant))
    assert caught.value.rule == "5.6" and message in caught.value.message
    assert (canonical(held).arrays[0] == region.arrays[0]).all()


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_moves_of_other_types_are_refused(variant: Variant) -> None:
    region: Any = any_bytes(KvFormat.F32, 4, 1, 8)
    for moves in (np.array([[0.0, 1.0, 1.0]]), np.array([0, 1, 1])):
        with pytest.raises(Refusal) as caught:
            launch(variant, region, moves, host=True)
        assert caught.value.rule == "10"
