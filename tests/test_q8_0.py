"""q8_0 kernels against the numpy bit oracle, on every input that has a rule of its own."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minfer import reference
from minfer.errors import Refusal
from minfer.kernels_numba._emit import VI, Emitter
from minfer.kernels_numba._ir import address, intrinsic_of
from minfer.kernels_numba._jit import kernel
from minfer.kernels_numba.q8_0 import (
    dequantize_q8_0_blocks,
    dot_q8_0_blocks,
    quantize_q8_0_blocks,
)

ROOT = Path(__file__).parent.parent
ONE, TWO = {"threads": 1}, {"threads": 2}
LAST_SCALE = 0x7BFF  # the largest finite f16


def wild_blocks(n: int, seed: int) -> np.ndarray:
    """f32 [n, 32] with block exponents from 2**-149 to 2**120 and some spread inside a block."""
    rng = np.random.default_rng(seed)
    exponents = rng.integers(-149, 121, (n, 1)) - rng.integers(0, 9, (n, 32))
    return np.ldexp(rng.uniform(-1, 1, (n, 32)), exponents).astype(np.float32)


def assert_same_bytes(blocks: np.ndarray) -> np.ndarray:
    """Kernel and oracle agree on f32 [n, 32]; returns the bytes."""
    found = quantize_q8_0_blocks(blocks, config=TWO)
    wanted = reference.quantize_q8_0(blocks)
    bad = np.flatnonzero((found != wanted).any(axis=1))
    assert bad.size == 0, f"{bad.size} blocks differ, first {blocks[bad[0]]}"
    return found


def scales_of(cells: np.ndarray) -> np.ndarray:
    return cells[:, :2].copy().view("<u2")[:, 0]


def test_a_block_of_known_bytes() -> None:
    block = np.zeros((1, 32), np.float32)
    block[0, :4] = [1, -1, 0.5, -0.25]
    cell = quantize_q8_0_blocks(block, config=ONE)[0]
    # d = 1/127, f16 0x2008; 0.5 * 127 = 63.5 and -0.25 * 127 = -31.75
    assert cell[:6].tolist() == [0x08, 0x20, 127, 129, 64, 224]
    assert not cell[6:].any()
    assert cell.size == 36  # 34 bytes and two of padding


@pytest.mark.parametrize("seed", range(4))
def test_a_million_wild_blocks(seed: int) -> None:
    cells = assert_same_bytes(wild_blocks(250_000, seed))
    scales = scales_of(cells)
    assert (scales == 0).any() and (scales == reference.F16_NAN).any()
    assert ((scales > 0) & (scales < 0x400)).any()  # subnormal scales are kept


def test_every_scale_exactly_and_at_its_rounding_borders() -> None:
    scales = np.arange(LAST_SCALE + 1, dtype=np.uint16).view(np.float16).astype(np.float64)
    above = np.append(scales[1:], 65536.0)
    exact = (scales * 127).astype(np.float32)
    border = ((scales + above) / 2 * 127).astype(np.float32)
    rng = np.random.default_rng(0)
    seen = set()
    for amax in (exact, border, np.nextafter(border, np.float32(0)), np.nextafter(border, 1e38)):
        amax = amax.astype(np.float32)
        blocks = (rng.uniform(-1, 1, (len(amax), 32)) * amax[:, None]).astype(np.float32)
        place = rng.integers(0, 32, len(amax))
        blocks[np.arange(len(amax)), place] = amax * rng.choice([-1, 1], len(amax))
        seen |= set(scales_of(assert_same_bytes(blocks)).tolist())
    assert seen == set(range(LAST_SCALE + 1)) | {reference.F16_NAN}
    ones = np.zeros((len(exact), 32), np.float32)
    ones[:, 5] = exact
    assert (scales_of(assert_same_bytes(ones)) == np.arange(LAST_SCALE + 1)).all()


@pytest.mark.parametrize("damage", [np.nan, -np.nan, np.inf, -np.inf])
def test_damage_anywhere_poisons_the_block_and_only_it(damage: float) -> None:
    blocks = np.tile(np.linspace(-1, 1, 32, dtype=np.float32), (33, 1))
    blocks[np.arange(32), np.arange(32)] = damage
    cells = assert_same_bytes(blocks)
    assert (scales_of(cells[:32]) == 0x7E00).all()
    assert not cells[:32, 2:].any()
    decoded = dequantize_q8_0_blocks(cells, n=32, config=ONE)
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
    codes = quantize_q8_0_blocks(blocks, config=ONE)[:, 5].view(np.int8)
    assert codes.tolist() == [0, 127, 0, 127, 0]


def test_ties_go_to_even_and_negative_zero_is_code_zero() -> None:
    block = np.zeros((1, 32), np.float32)
    block[0, :8] = [127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, -0.0]
    cell = assert_same_bytes(block)[0]
    assert cell[2:10].view(np.int8).tolist() == [127, 0, 2, 2, 0, -2, -2, 0]
    assert (scales_of(assert_same_bytes(-np.zeros((1, 32), np.float32))) == 0).all()


def test_codes_stay_within_the_error_bound() -> None:
    blocks = wild_blocks(50_000, 9)
    cells = quantize_q8_0_blocks(blocks, config=TWO)
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
    cells = quantize_q8_0_blocks(rows, config=TWO)
    assert (cells == reference.quantize_q8_0(rows)).all()
    assert not cells[:, m // 32 * 34 :].any()
    decoded = dequantize_q8_0_blocks(cells, n=m, config=TWO)
    assert (decoded == reference.dequantize_q8_0(cells, n=m)).all()


def test_dot_is_exact_per_block_and_ordered() -> None:
    rng = np.random.default_rng(3)
    a, b = (quantize_q8_0_blocks(wild_blocks(4096, s).reshape(64, -1), config=TWO) for s in (1, 2))
    finite = [c for c in range(64) if np.isfinite(reference.dot_q8_0(a, b, n=2048)[c])]
    x = rng.standard_normal((64, 2048)).astype(np.float32)
    for left, right in ((a, b), (quantize_q8_0_blocks(x, config=ONE), a)):
        found = dot_q8_0_blocks(left, right, n=2048, config=TWO)
        assert np.array_equal(found, reference.dot_q8_0(left, right, n=2048), equal_nan=True)
    assert len(finite) < 64  # poison reaches the product
    c = quantize_q8_0_blocks(x, config=ONE)
    exact = (reference.dequantize_q8_0(c, n=2048).astype(np.float64) ** 2).sum(axis=1)
    assert np.allclose(dot_q8_0_blocks(c, c, n=2048, config=ONE), exact, rtol=1e-6, atol=0)


def test_dot_takes_the_code_that_the_quantizer_never_writes() -> None:
    cells = np.zeros((1, 36), np.uint8)
    cells[0, :2] = [0x00, 0x3C]  # scale 1
    cells[0, 2:34] = 0x80  # code -128
    assert dot_q8_0_blocks(cells, cells, n=32, config=ONE).tolist() == [32 * 128 * 128]


@pytest.mark.parametrize("rows", [*range(1, 18), 63, 64, 65])
def test_a_row_does_not_depend_on_other_rows_or_threads(rows: int) -> None:
    x = wild_blocks(65 * 3, 5).reshape(65, 96)
    whole = quantize_q8_0_blocks(x, config=ONE)
    for config in (ONE, TWO):
        assert (quantize_q8_0_blocks(x[:rows], config=config) == whole[:rows]).all()
        dots = dot_q8_0_blocks(whole[:rows], whole[65 - rows :], n=96, config=config)
        alone = dot_q8_0_blocks(whole[:1], whole[65 - rows : 66 - rows], n=96, config=ONE)
        assert np.array_equal(dots[:1], alone, equal_nan=True)


def test_part_blocks_and_narrow_cells_are_refused() -> None:
    with pytest.raises(Refusal, match=r"33 elements .* blocks of 32") as caught:
        quantize_q8_0_blocks(np.zeros((2, 33), np.float32), config=ONE)
    assert caught.value.rule == "3.3"
    with pytest.raises(Refusal, match=r"uint8 \[rows, 68\]"):
        dequantize_q8_0_blocks(np.zeros((2, 36), np.uint8), n=64, config=ONE)
    with pytest.raises(Refusal, match="1 cells cannot be multiplied by 2"):
        cells = np.zeros((2, 36), np.uint8)
        dot_q8_0_blocks(cells[:1], cells, n=32, config=ONE)


def _emit_byte_products(e: Emitter, unsigned: Any, signed: Any, out: Any) -> None:
    e.store(e.dot_u8_s8(e.load(VI, out), e.load(VI, unsigned), e.load(VI, signed)), out)


_byte_products = intrinsic_of("ppp:v", _emit_byte_products)


@kernel
def byte_products(unsigned, signed, out):
    """out[row, lane] += the products of four neighbouring bytes; rows of 64 bytes."""
    for row in range(out.shape[0]):
        _byte_products(address(unsigned[row]), address(signed[row]), address(out[row]))


def byte_sums() -> np.ndarray:
    """What `byte_products` makes of random and extreme bytes, equal to numpy's."""
    rng = np.random.default_rng(6)
    unsigned = rng.integers(0, 256, (64, 64)).astype(np.uint8)
    signed = rng.integers(-128, 128, (64, 64)).astype(np.int8)
    unsigned[:2], signed[0], signed[1] = 255, 127, -128
    out = np.full((64, 16), -(1 << 20), np.int32)
    byte_products(unsigned, signed, out)
    wanted = (unsigned.astype(np.int32) * signed).reshape(64, 16, 4).sum(axis=2) - (1 << 20)
    assert (out == wanted).all()
    return out


def test_byte_products_are_exact() -> None:
    assert byte_sums()[0, 0] == 4 * 255 * 127 - (1 << 20)


DIGEST = """
import hashlib, sys
import numpy as np
sys.path.insert(0, "tests")
from test_q8_0 import digest_of_everything
from minfer.kernels_numba import environment
print(environment()["isa"], "|", digest_of_everything())
"""


def digest_of_everything() -> str:
    """A hash over what every path-dependent kernel makes of wild data."""
    from test_products import PRODUCTS, normal

    from minfer.format import KvFormat
    from minfer.kernels_numba import decode_cells, empty_region
    from minfer.kernels_numba.cells import store_cells_rows
    from minfer.kernels_numba.dense import silu_mul_rows
    from minfer.reference import encode_weight

    digest = hashlib.sha256()
    x = wild_blocks(4096, 77).reshape(64, 2048)
    cells = quantize_q8_0_blocks(x, config=TWO)
    digest.update(cells.tobytes())
    dots = dot_q8_0_blocks(cells, cells[::-1], n=2048, config=TWO)
    digest.update(np.nan_to_num(dots, nan=-7).tobytes())
    region = empty_region(KvFormat.F16, 64, 1, 2048)
    store_cells_rows(region, x[:, None], np.arange(64), fmt=KvFormat.F16, config=TWO)
    digest.update(region.arrays[0].tobytes())
    digest.update(decode_cells(region, np.arange(64, dtype=np.int32)).tobytes())
    y = np.clip(x, -100, 100)[:, :2041]  # the last group of lanes is not full
    digest.update(byte_sums().tobytes())
    digest.update(silu_mul_rows(y, y, config=TWO).tobytes())
    for fmt in (KvFormat.F16, KvFormat.Q8_0):
        weight, rows = encode_weight(normal(35, 96), fmt), normal(19, 96, seed=1)
        for op in ("matvec", "matmul"):
            for n in (1, 19):
                out = PRODUCTS[op, fmt](weight, rows[:n], fmt=fmt, config=TWO)
                digest.update(out.tobytes())
    return digest.hexdigest()


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="names x86 targets")
@pytest.mark.parametrize(
    ("cpu", "features", "isa"),
    [
        ("x86-64-v3", "+avx2,+fma,+f16c", "portable byte products, hardware f16"),
        ("generic", "", "portable byte products, portable f16"),
    ],
)
def test_portable_paths_give_the_same_bits(cpu: str, features: str, isa: str) -> None:
    env = {**os.environ, "NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": features}
    command = [sys.executable, "-c", DIGEST]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == f"{isa} | {digest_of_everything()}", done.stderr
