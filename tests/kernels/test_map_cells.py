"""q8_0 cells turned where they lie: to the bit decode, rope and store (contract 4.7, 5.7)."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
from under_test import (
    arranged,
    canonical,
    config_of,
    configs_of,
    interpreted,
    launch,
    op,
    variants,
)

from minfer import reference
from minfer.cases import TURN_CASES, TurnCase, any_bytes, turn_inputs
from minfer.errors import Refusal
from minfer.format import BLOCK_BYTES, KvFormat, Region
from minfer.ops import HALF, INTERLEAVED, PAIRINGS, Variant

VARIANTS = variants("map_q8_0_cells")
MATRIX = [
    pytest.param(v, case, id=f"{v.name}-{case.name}")
    for v in VARIANTS
    for case in TURN_CASES
    if not interpreted() or len(case.cells) < 100
]
turn = op("map_q8_0_cells")


def rows_in(region: Region, cells: Any) -> Any:
    """The rows of a canonical region, decoded: f32 [n, n_head_kv, d]."""
    decoded = reference.decode_rows(region.arrays[0][cells], region.fmt, region.row_elems)
    return decoded.reshape(len(cells), region.n_head_kv, region.head_dim)


@pytest.mark.parametrize(("variant", "case"), MATRIX)
def test_bytes_are_those_of_the_oracle(variant: Variant, case: TurnCase) -> None:
    region, cells, cos, sin = turn_inputs(case)
    before = region.arrays[0].copy()
    wanted = reference.map_q8_0_cells(deepcopy(region), cells, cos, sin, pairing=case.pairing)
    for config in configs_of(variant):
        turned = launch(variant, region, cells, cos, sin, pairing=case.pairing, config=config)
        assert (turned.arrays[0] == wanted.arrays[0]).all()
    others = np.delete(np.arange(case.n_cells), cells)
    assert (wanted.arrays[0][others] == before[others]).all()
    if case.n_rot and len(cells):
        assert (wanted.arrays[0][cells] != before[cells]).any()


@pytest.mark.parametrize(("variant", "case"), MATRIX)
def test_a_turn_is_decode_then_rope_then_store(variant: Variant, case: TurnCase) -> None:
    region, cells, cos, sin = turn_inputs(case)
    at = np.zeros(len(cells), np.int32)
    rotated = op("rope")(rows_in(region, cells), at, cos, sin, pairing=case.pairing)
    wanted = op("store_cells", KvFormat.Q8_0)(region, rotated, cells, fmt=KvFormat.Q8_0)
    turned = launch(variant, region, cells, cos, sin, pairing=case.pairing)
    assert (turned.arrays[0] == wanted.arrays[0]).all()


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_a_row_moves_by_its_rotation_and_one_rounding(pairing: str) -> None:
    """Half a code of every block, and what lies past n_rot keeps its bytes."""
    case = TurnCase("near", 2, 64, 32, pairing, tuple(range(40)), 40)
    rows = np.random.default_rng(0).standard_normal((40, 128)).astype(np.float32)
    cells = np.arange(40, dtype=np.int32)
    region = Region(KvFormat.Q8_0, "canonical", 2, 64, (reference.quantize_q8_0(rows),))
    held = rows_in(region, cells)
    _, _, cos, sin = turn_inputs(case)
    exact = reference.rope(held, np.zeros(40, np.int32), cos, sin, pairing=pairing)
    turned = turn(region, cells, cos, sin, pairing=pairing)
    found = rows_in(turned, cells)
    largest = np.abs(exact).reshape(40, 2, 2, 32).max(axis=3).repeat(32, axis=2).reshape(40, 2, 64)
    assert (np.abs(found - exact) <= 0.57 * largest / 127).all()
    assert np.abs(found - held).max() > 0.1
    blocks, kept = (r.arrays[0][:, :136].reshape(40, 2, 2, BLOCK_BYTES) for r in (turned, region))
    assert (blocks[:, :, 1] == kept[:, :, 1]).all()


def one_row(codes: dict[int, int], scale: float, n: int = 64) -> Region:
    """A region of one cell of one head: the codes by dimension, one scale for all blocks."""
    values = np.zeros((1, n // 32, 32), np.int8)
    for dim, code in codes.items():
        values[0, dim // 32, dim % 32] = code
    cells = np.zeros((1, n // 32, 34), np.uint8)
    cells[..., :2] = np.float16(scale).reshape(1).view(np.uint8)
    cells[..., 2:] = values.view(np.uint8)
    return Region(KvFormat.Q8_0, "canonical", 1, n, (cells.reshape(1, -1),))


QUARTER = np.zeros((1, 32), np.float32), np.ones((1, 32), np.float32)  # cos, sin of 90 degrees
FIRST = np.zeros(1, np.int32)


@pytest.mark.parametrize(("pairing", "partner"), [(HALF, 37), (INTERLEAVED, 4)])
@pytest.mark.parametrize("scale", [1.0, 2.0**-15, 2.0**-24])
def test_a_quarter_turn_swaps_a_pair_even_at_subnormal_scales(
    pairing: str, partner: int, scale: float
) -> None:
    region = one_row({5: 127, 20: 127, 52: 127}, scale)
    turned = turn(region, FIRST, *QUARTER, pairing=pairing)
    found = rows_in(turned, FIRST)[0, 0] / np.float32(scale)
    assert found[partner] == (127 if pairing == HALF else -127)
    assert found[5] == 0


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_damage_stays_visible_and_spreads_to_partners_only(pairing: str) -> None:
    region = one_row({5: 127, 70: 127}, 1.0, n=128)
    region.arrays[0][0, :2] = np.frombuffer(np.uint16(reference.F16_NAN).tobytes(), np.uint8)
    turned = turn(region, FIRST, *QUARTER, pairing=pairing)
    found = np.isnan(rows_in(turned, FIRST)[0, 0]).reshape(4, 32)
    assert found.all(axis=1).tolist() == [True, pairing == HALF, False, False]
    assert found.any(axis=1).tolist() == [True, pairing == HALF, False, False]


def test_turns_that_do_not_fit_are_refused_and_change_no_byte() -> None:
    region = arranged(any_bytes(KvFormat.Q8_0, 6, 2, 32))
    before = canonical(region).arrays[0]
    table, cells = np.ones((1, 16), np.float32), np.array([1, 4])
    wide, two = np.ones((1, 17), np.float32), np.ones((2, 16), np.float32)
    for rule, message, tensors, pairing in (
        ("2.5", "cell 6 of row 1 is outside", (region, np.array([1, 6]), table, table), HALF),
        ("5.7", "cell 4 of row 2 was named before",
         (region, np.array([4, 1, 4]), table, table), HALF),
        ("5.7", "tables [1, 17] and [1, 17] are not one row", (region, cells, wide, wide), HALF),
        ("5.7", "tables [2, 16] and [2, 16]", (region, cells, two, two), HALF),
        ("5.7", "tables [1, 16] and [1, 8]", (region, cells, table, table[:, :8]), HALF),
        ("5.7", "'neox' is neither half nor interleaved", (region, cells, table, table), "neox"),
        ("4.2", "float64", (region, cells, table.astype(np.float64), table), HALF),
        ("10", "float64", (region, cells + 0.5, table, table), HALF),
    ):  # fmt: skip
        with pytest.raises(Refusal) as caught:
            VARIANTS[0].launch(*tensors, pairing=pairing, config=config_of(VARIANTS[0]))
        assert caught.value.rule == rule and message in caught.value.message
    assert (canonical(region).arrays[0] == before).all()
    for fmt in (KvFormat.F32, KvFormat.F16):
        other = any_bytes(fmt, 6, 2, 32)
        with pytest.raises(Refusal, match=f"wants .*q8_0 cells .* holds .* {fmt}"):
            turn(other, cells, table, table, pairing=HALF, host=True)
