"""The q8_0 codec and turns of cells, on a GPU or in Triton's interpreter, to the oracle's byte."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from test_cells_triton import GPU, at_home, bytes_of, needs_triton, refused  # noqa: E402

from minfer import kernels_triton as backend  # noqa: E402
from minfer import reference  # noqa: E402
from minfer.cases import TURN_CASES, TurnCase, any_bytes, turn_inputs  # noqa: E402
from minfer.errors import Refusal  # noqa: E402
from minfer.format import KvFormat  # noqa: E402
from minfer.kernels_triton import q8_0  # noqa: E402
from minfer.kernels_triton._arguments import stored  # noqa: E402
from minfer.kernels_triton.cells import map_q8_0_cells_rows  # noqa: E402
from minfer.ops import HALF  # noqa: E402

pytestmark = needs_triton
LAST_SCALE = 0x7BFF  # the largest finite f16
SHARE = 1 if GPU else 10  # of the blocks that the interpreter has time for


def wild_blocks(n: int, seed: int) -> np.ndarray:
    """f32 [n, 32] with block exponents from 2**-149 to 2**120 and some spread inside a block."""
    rng = np.random.default_rng(seed)
    exponents = rng.integers(-149, 121, (n, 1)) - rng.integers(0, 9, (n, 32))
    return np.ldexp(rng.uniform(-1, 1, (n, 32)), exponents).astype(np.float32)


def quantized(rows: Any) -> np.ndarray:
    return backend.to_host(q8_0.quantize_q8_0_blocks(rows, config={}))


def dequantized(cells: Any, n: int) -> np.ndarray:
    return backend.to_host(q8_0.dequantize_q8_0_blocks(cells, n=n, config={}))


def dots(a: Any, b: Any, n: int) -> np.ndarray:
    return backend.to_host(q8_0.dot_q8_0_blocks(a, b, n=n, config={}))


def cells_of(blocks: np.ndarray) -> np.ndarray:
    """Cells of a block each that the kernel made of f32 [n, 32], equal to the oracle's.

    The kernel sees rows of 64 blocks: fewer programs, and a block in every place of one.
    """
    n = -(-len(blocks) // 64)
    rows = np.zeros((n * 64, 32), np.float32)
    rows[: len(blocks)] = blocks
    found = quantized(rows.reshape(n, -1)).reshape(-1, 34)[: len(blocks)]
    wanted = reference.quantize_q8_0(blocks)
    bad = np.flatnonzero((found != wanted[:, :34]).any(axis=1))
    assert bad.size == 0, f"{bad.size} blocks differ, first {blocks[bad[0]]}"
    return wanted


def scales_of(cells: np.ndarray) -> np.ndarray:
    return cells[:, :2].copy().view("<u2")[:, 0]


def test_a_block_of_known_bytes() -> None:
    block = np.zeros((1, 32), np.float32)
    block[0, :4] = [1, -1, 0.5, -0.25]
    cell = quantized(block)[0]
    # d = 1/127, f16 0x2008; 0.5 * 127 = 63.5 and -0.25 * 127 = -31.75
    assert cell[:6].tolist() == [0x08, 0x20, 127, 129, 64, 224]
    assert cell.size == 36 and not cell[6:].any()


@pytest.mark.parametrize("seed", range(4))
def test_wild_blocks(seed: int) -> None:
    scales = scales_of(cells_of(wild_blocks(250_000 // SHARE, seed)))
    assert (scales == 0).any() and (scales == reference.F16_NAN).any()
    assert ((scales > 0) & (scales < 0x400)).any()  # subnormal scales are kept


def test_every_scale_exactly_and_at_its_rounding_borders() -> None:
    held = np.arange(0, LAST_SCALE + 1, SHARE, dtype=np.uint16)
    held = np.union1d(held, [LAST_SCALE, *range(0x400 // SHARE)]).astype(np.uint16)
    scales = held.view(np.float16).astype(np.float64)
    with np.errstate(over="ignore"):
        above = (held + 1).astype(np.uint16).view(np.float16).astype(np.float64)
    above[-1] = 65536.0
    exact = (scales * 127).astype(np.float32)
    border = ((scales + above) / 2 * 127).astype(np.float32)
    rng = np.random.default_rng(0)
    for amax in (exact, border, np.nextafter(border, np.float32(0)), np.nextafter(border, 1e38)):
        amax = amax.astype(np.float32)
        blocks = (rng.uniform(-1, 1, (len(amax), 32)) * amax[:, None]).astype(np.float32)
        place = rng.integers(0, 32, len(amax))
        blocks[np.arange(len(amax)), place] = amax * rng.choice([-1, 1], len(amax))
        cells_of(blocks)
    ones = np.zeros((len(exact), 32), np.float32)
    ones[:, 5] = exact
    assert (scales_of(cells_of(ones)) == held).all()


@pytest.mark.parametrize("damage", [np.nan, -np.nan, np.inf, -np.inf])
def test_damage_anywhere_poisons_the_block_and_only_it(damage: float) -> None:
    blocks = np.tile(np.linspace(-1, 1, 32, dtype=np.float32), (33, 1))
    blocks[np.arange(32), np.arange(32)] = damage
    cells = cells_of(blocks)
    assert (scales_of(cells[:32]) == 0x7E00).all() and not cells[:32, 2:].any()
    decoded = dequantized(cells, 32)
    assert np.isnan(decoded[:32]).all() and np.isfinite(decoded[32]).all()


def test_a_nan_with_any_payload_poisons() -> None:
    blocks = np.ones((4, 32), np.float32)
    blocks.view(np.uint32)[:, 7] = [0x7F800001, 0xFFFFFFFF, 0x7FC00123, 0xFF800001]
    assert (scales_of(cells_of(blocks)) == 0x7E00).all()


def test_the_largest_and_the_smallest_scales() -> None:
    top = np.float32(65520) * np.float32(127)  # d = 65520 rounds to inf
    low = np.float32(127 * 2.0**-25)  # d = 2**-25, half of the smallest f16, rounds to 0
    blocks = np.zeros((5, 32), np.float32)
    blocks[:, 3] = [top, np.nextafter(top, np.float32(0)), low, np.nextafter(low, 1), 1e-45]
    cells = cells_of(blocks)
    assert scales_of(cells).tolist() == [0x7E00, LAST_SCALE, 0, 1, 0]
    assert cells[:, 5].view(np.int8).tolist() == [0, 127, 0, 127, 0]


def test_ties_go_to_even_and_negative_zero_is_code_zero() -> None:
    block = np.zeros((1, 32), np.float32)
    block[0, :8] = [127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, -0.0]
    assert cells_of(block)[0, 2:10].view(np.int8).tolist() == [127, 0, 2, 2, 0, -2, -2, 0]
    assert not cells_of(-np.zeros((1, 32), np.float32)).any()


@pytest.mark.parametrize("m", [0, 32, 64, 96, 2080])
def test_rows_pad_with_zeros_and_decode_exactly(m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, empty = np.random.default_rng(m).standard_normal((5, m)).astype(np.float32), torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **how: empty(*shape, **how).fill_(90))
    cells = quantized(rows)
    assert (cells == reference.quantize_q8_0(rows)).all()
    assert (dequantized(cells, m) == reference.dequantize_q8_0(cells, n=m)).all()


def test_dot_is_exact_per_block_and_ordered() -> None:
    a, b = (reference.quantize_q8_0(wild_blocks(65 * 9, s).reshape(65, -1)) for s in (1, 2))
    x = np.random.default_rng(3).standard_normal((65, 288)).astype(np.float32)
    c = reference.quantize_q8_0(x)
    for left, right in ((a, b), (c, a), (c, c), (c, c[::-1])):
        wanted = reference.dot_q8_0(left, right, n=288)
        assert np.array_equal(dots(left, right, 288), wanted, equal_nan=True)
    low = np.zeros((1, 36), np.uint8)
    low[0, :2], low[0, 2:34] = [0x00, 0x3C], 0x80  # scale 1, and the code no quantizer writes
    assert dots(low, low, 32).tolist() == [32 * 128 * 128]
    assert dots(low[:, :0], low[:, :0], 0).tolist() == [0]


def test_part_blocks_and_narrow_cells_are_refused() -> None:
    narrow = np.zeros((2, 34), np.uint8)
    for rule, message, call in (
        ("3.3", "33 elements", lambda: quantized(np.zeros((2, 33), np.float32))),
        ("4.2", "must be float32, not float64", lambda: quantized(np.zeros((2, 32)))),
        ("10", "must have 2 dimensions", lambda: quantized(np.zeros(32, np.float32))),
        ("3.4", "uint8 [rows, 36], not uint8 [2, 34]", lambda: dequantized(narrow, 32)),
        ("3.4", "uint8 [rows, 36], not int8", lambda: dequantized(narrow.view(np.int8), 32)),
        ("10", "1 cells cannot be multiplied by 2", lambda: dots(narrow[:1, :0], narrow[:, :0], 0)),
    ):
        with pytest.raises(Refusal) as caught:
            call()
        assert caught.value.rule == rule and message in caught.value.message


@pytest.mark.parametrize("case", TURN_CASES, ids=lambda case: case.name)
def test_turned_cells_have_the_oracles_bytes(case: TurnCase) -> None:
    region, cells, cos, sin = turn_inputs(case)
    ours = at_home(region)
    before = bytes_of(ours)
    wanted = reference.map_q8_0_cells(region, cells, cos, sin, pairing=case.pairing).arrays[0]
    turned = map_q8_0_cells_rows(ours, cells, cos, sin, pairing=case.pairing, config={})
    assert turned is ours and (bytes_of(ours) == wanted).all()
    others = np.delete(np.arange(case.n_cells), cells)
    assert (bytes_of(ours)[others] == before[others]).all()


def test_turns_that_do_not_fit_are_refused_and_change_no_byte() -> None:
    table, wide = np.ones((1, 16), np.float32), np.ones((1, 17), np.float32)
    good = {"cells": np.array([1, 4]), "cos": table, "sin": table, "pairing": HALF}
    for rule, message, change in (
        ("2.5", "cell 6 of row 1 is outside", {"cells": np.array([1, 6])}),
        ("5.7", "cell 4 of row 2 was named before", {"cells": np.array([4, 1, 4])}),
        ("5.7", "tables [1, 17] and [1, 17] are not one row", {"cos": wide, "sin": wide}),
        ("5.7", "tables [1, 16] and [1, 8]", {"sin": table[:, :8]}),
        ("5.7", "'neox' is neither half nor interleaved", {"pairing": "neox"}),
        ("4.2", "cos must be float32, not float64", {"cos": table.astype(np.float64)}),
    ):
        region = at_home(any_bytes(KvFormat.Q8_0, 6, 2, 32))
        refused(region, rule, message, map_q8_0_cells_rows, region, **good | change)
    other = at_home(any_bytes(KvFormat.F16, 6, 2, 32))
    message = "wants q8_0 cells in planes and the region holds planes f16"
    refused(other, "3.2", message, map_q8_0_cells_rows, other, **good)


def test_blocks_at_an_odd_address() -> None:
    rows = torch.ones(2, 64, device=backend.home())
    cells = q8_0.quantize_q8_0_blocks(rows, config={})
    shifted = torch.cat([cells.new_zeros(1), cells.flatten()])[1:].view(cells.shape)
    assert shifted.data_ptr() % 2
    assert (dequantized(shifted, 64) == dequantized(cells, 64)).all()
    matrix, _ = stored(shifted, KvFormat.Q8_0)
    assert matrix.data_ptr() % 2 == 0 and torch.equal(matrix, cells)
