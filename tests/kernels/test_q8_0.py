"""q8_0 kernels against the numpy bit oracle, on every input that has a rule of its own."""

from __future__ import annotations

import numpy as np
import pytest
from under_test import configs_of, default, interpreted, op

from minfer import reference
from minfer.errors import Refusal

quantize, dequantize, dot = (op(f"{verb}_q8_0") for verb in ("quantize", "dequantize", "dot"))
MANY = 60 if interpreted() else 250_000  # blocks
STEP = 2600 if interpreted() else 1  # between scales
LAST_SCALE = 0x7BFF  # the largest finite f16


def wild_blocks(n: int, seed: int) -> np.ndarray:
    """f32 [n, 32] with block exponents from 2**-149 to 2**120 and some spread inside a block."""
    rng = np.random.default_rng(seed)
    exponents = rng.integers(-149, 121, (n, 1)) - rng.integers(0, 9, (n, 32))
    return np.ldexp(rng.uniform(-1, 1, (n, 32)), exponents).astype(np.float32)


def assert_same_bytes(blocks: np.ndarray) -> np.ndarray:
    """Kernel and oracle agree on f32 [n, 32]; returns the bytes."""
    found = quantize(blocks)
    wanted = reference.quantize_q8_0(blocks)
    bad = np.flatnonzero((found != wanted).any(axis=1))
    assert bad.size == 0, f"{bad.size} blocks differ, first {blocks[bad[0]]}"
    return found


def scales_of(cells: np.ndarray) -> np.ndarray:
    return cells[:, :2].copy().view("<u2")[:, 0]


def test_a_block_of_known_bytes() -> None:
    block = np.zeros((1, 32), np.float32)
    block[0, :4] = [1, -1, 0.5, -0.25]
    cell = quantize(block)[0]
    # d = 1/127, f16 0x2008; 0.5 * 127 = 63.5 and -0.25 * 127 = -31.75
    assert cell[:6].tolist() == [0x08, 0x20, 127, 129, 64, 224]
    assert not cell[6:].any()
    assert cell.size == 36  # 34 bytes and two of padding


@pytest.mark.parametrize("seed", range(4))
def test_wild_blocks(seed: int) -> None:
    cells = assert_same_bytes(wild_blocks(MANY, seed))
    scales = scales_of(cells)
    if interpreted():
        return
    assert (scales == 0).any() and (scales == reference.F16_NAN).any()
    assert ((scales > 0) & (scales < 0x400)).any()  # subnormal scales are kept


def test_every_scale_exactly_and_at_its_rounding_borders() -> None:
    scales = np.arange(LAST_SCALE + 1, dtype=np.uint16).view(np.float16).astype(np.float64)
    above = np.append(scales[1:], 65536.0)
    exact = (scales * 127).astype(np.float32)[::STEP]
    border = ((scales + above) / 2 * 127).astype(np.float32)[::STEP]
    rng = np.random.default_rng(0)
    seen = set()
    for amax in (exact, border, np.nextafter(border, np.float32(0)), np.nextafter(border, 1e38)):
        amax = amax.astype(np.float32)
        blocks = (rng.uniform(-1, 1, (len(amax), 32)) * amax[:, None]).astype(np.float32)
        place = rng.integers(0, 32, len(amax))
        blocks[np.arange(len(amax)), place] = amax * rng.choice([-1, 1], len(amax))
        seen |= set(scales_of(assert_same_bytes(blocks)).tolist())
    assert STEP > 1 or seen == set(range(LAST_SCALE + 1)) | {reference.F16_NAN}
    ones = np.zeros((len(exact), 32), np.float32)
    ones[:, 5] = exact
    assert (scales_of(assert_same_bytes(ones)) == np.arange(0, LAST_SCALE + 1, STEP)).all()


@pytest.mark.parametrize("damage", [np.nan, -np.nan, np.inf, -np.inf])
def test_damage_anywhere_poisons_the_block_and_only_it(damage: float) -> None:
    blocks = np.tile(np.linspace(-1, 1, 32, dtype=np.float32), (33, 1))
    blocks[np.arange(32), np.arange(32)] = damage
    cells = assert_same_bytes(blocks)
    assert (scales_of(cells[:32]) == 0x7E00).all()
    assert not cells[:32, 2:].any()
    decoded = dequantize(cells, n=32)
    assert np.isnan(decoded[:32]).all() and np.isfinite(decoded[32]).all()


def test_a_nan_with_any_payload_poisons() -> None:
    blocks = np.ones((4, 32), np.float32)
    blocks.view(np.uint32)[:, 7] = [0x7F800001, 0xFFFFFFFF, 0x7FC00123, 0xFF800001]
    assert (scales_of(assert_same_bytes(blocks)) == 0x7E00).all()


def test_the_largest_and_the_smallest_scales() -> None:
    top = np.float32(65520) * np.float32(127)  # d = 65520 rounds to inf
    low = np.float32(127 * 2.0**-25)  # d = 2**-25, half of the smallest f16, rounds to 0
    blocks = np.zeros((5, 32), np.float32)
    blocks[:, 3] = [top, np.nextafter(top, np.float32(0)), low, np.nextafter(low, 1), 1e-45]
    assert scales_of(assert_same_bytes(blocks)).tolist() == [0x7E00, LAST_SCALE, 0, 1, 0]
    codes = quantize(blocks)[:, 5].view(np.int8)
    assert codes.tolist() == [0, 127, 0, 127, 0]


def test_ties_go_to_even_and_negative_zero_is_code_zero() -> None:
    block = np.zeros((1, 32), np.float32)
    block[0, :8] = [127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, -0.0]
    cell = assert_same_bytes(block)[0]
    assert cell[2:10].view(np.int8).tolist() == [127, 0, 2, 2, 0, -2, -2, 0]
    assert (scales_of(assert_same_bytes(-np.zeros((1, 32), np.float32))) == 0).all()


def test_codes_stay_within_the_error_bound() -> None:
    blocks = wild_blocks(min(MANY, 50_000), 9)
    cells = quantize(blocks)
    scales, codes = reference.split_q8_0(cells, 32)
    kept = np.isfinite(scales[:, 0])
    x, s = blocks[kept].astype(np.float64), scales[kept].astype(np.float64)
    code = codes[kept, 0].astype(np.float64)
    amax = np.abs(blocks[kept]).max(axis=1, keepdims=True)
    d = (amax / np.float32(127)).astype(np.float64)
    bound = np.where(s > 0, 0.50002 * d + np.abs(code) * np.abs(s - d), amax)
    assert (np.abs(x - s * code) <= bound).all()
    assert np.abs(code).max() == 127


@pytest.mark.parametrize("m", [32, 64, 96, 576, 1024])
def test_rows_pad_with_zeros_and_decode_exactly(m: int) -> None:
    rows = np.random.default_rng(m).standard_normal((13, m)).astype(np.float32)
    cells = quantize(rows)
    assert (cells == reference.quantize_q8_0(rows)).all()
    assert not cells[:, m // 32 * 34 :].any()
    decoded = dequantize(cells, n=m)
    assert (decoded == reference.dequantize_q8_0(cells, n=m)).all()


def test_dot_is_exact_per_block_and_ordered() -> None:
    rng = np.random.default_rng(3)
    a, b = (quantize(wild_blocks(4096, s).reshape(64, -1)) for s in (1, 2))
    finite = [c for c in range(64) if np.isfinite(reference.dot_q8_0(a, b, n=2048)[c])]
    x = rng.standard_normal((64, 2048)).astype(np.float32)
    for left, right in ((a, b), (quantize(x), a)):
        found = dot(left, right, n=2048)
        assert np.array_equal(found, reference.dot_q8_0(left, right, n=2048), equal_nan=True)
    assert len(finite) < 64  # poison reaches the product
    c = quantize(x)
    exact = (reference.dequantize_q8_0(c, n=2048).astype(np.float64) ** 2).sum(axis=1)
    assert np.allclose(dot(c, c, n=2048), exact, rtol=1e-6, atol=0)


def test_dot_of_no_elements_is_zero() -> None:
    empty = np.zeros((3, 0), np.uint8)
    assert dot(empty, empty, n=0).tolist() == [0, 0, 0]


def test_dot_takes_the_code_that_the_quantizer_never_writes() -> None:
    cells = np.zeros((1, 36), np.uint8)
    cells[0, :2] = [0x00, 0x3C]  # scale 1
    cells[0, 2:34] = 0x80  # code -128
    assert dot(cells, cells, n=32).tolist() == [32 * 128 * 128]


@pytest.mark.parametrize("rows", [3] if interpreted() else [*range(1, 18), 63, 64, 65])
def test_a_row_does_not_depend_on_other_rows_or_free_tunables(rows: int) -> None:
    n = 9 if interpreted() else 65
    x = wild_blocks(n * 3, 5).reshape(n, 96)
    whole = quantize(x)
    for config in configs_of(default("quantize_q8_0")):
        assert (quantize(x[:rows], config=config) == whole[:rows]).all()
    alone = dot(whole[:1], whole[n - rows : n - rows + 1], n=96)
    for config in configs_of(default("dot_q8_0")):
        dots = dot(whole[:rows], whole[n - rows :], n=96, config=config)
        assert np.array_equal(dots[:1], alone, equal_nan=True)


def test_part_blocks_and_narrow_cells_are_refused() -> None:
    with pytest.raises(Refusal, match=r"33 elements .* blocks of 32") as caught:
        quantize(np.zeros((2, 33), np.float32))
    assert caught.value.rule == "3.3"
    with pytest.raises(Refusal, match=r"uint8 \[rows, 68\]"):
        dequantize(np.zeros((2, 36), np.uint8), n=64)
    with pytest.raises(Refusal, match="1 cells cannot be multiplied by 2"):
        cells = np.zeros((2, 36), np.uint8)
        dot(cells[:1], cells, n=32)
