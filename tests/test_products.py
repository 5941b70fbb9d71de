"""Products with a weight in three formats: values, bits, and rows that depend on nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from arrays import normal

from minfer import reference, registry
from minfer.errors import Refusal
from minfer.format import BLOCK, BLOCK_BYTES, KvFormat
from minfer.kernels_numba import matmul, matvec
from minfer.kernels_numba.dense import embed_rows
from minfer.kernels_numba.matmul import matmul_blocks, matmul_tiles
from minfer.kernels_numba.matvec import matvec_blocks, matvec_lanes
from minfer.ops import Shape

F32, F16, Q8_0 = KvFormat
ONE, TWO = {"threads": 1}, {"threads": 2}
ROW_COUNTS = [*range(1, 18), 63, 64, 65]
PRODUCTS: dict[tuple[str, KvFormat], Callable[..., Any]] = {
    ("matvec", F32): matvec_lanes,
    ("matvec", F16): matvec_lanes,
    ("matvec", Q8_0): matvec_blocks,
    ("matmul", F32): matmul_tiles,
    ("matmul", F16): matmul_tiles,
    ("matmul", Q8_0): matmul_blocks,
}
EACH = pytest.mark.parametrize(("op", "fmt"), PRODUCTS, ids=lambda p: str(p))
# n_in, n_out: single elements, tails of lanes, of panels and of k blocks
SIZES = [(1, 1), (15, 63), (17, 65), (33, 64), (255, 3), (257, 130), (576, 1), (577, 65)]
BLOCK_SIZES = [(32, 1), (64, 15), (96, 16), (576, 33), (768, 64), (800, 130), (1536, 31)]


@pytest.fixture(autouse=True)
def threads_from_the_first_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small weights would be left to one thread."""
    monkeypatch.setattr(matvec, "ALONE_BYTES", 0)


def test_weights_are_stored_as_files_have_them() -> None:
    weight = normal(5, 96)
    blocks = reference.encode_weight(weight, Q8_0)
    assert blocks.dtype == np.uint8 and blocks.shape == (5, 3 * BLOCK_BYTES)
    cells = reference.quantize_q8_0(weight)
    assert (blocks == cells[:, : 3 * BLOCK_BYTES]).all()
    decoded = reference.decode_weight(blocks, Q8_0)
    assert (decoded == reference.dequantize_q8_0(cells, n=96)).all()
    for fmt, dtype in ((F32, np.float32), (F16, np.float16)):
        stored = reference.encode_weight(weight, fmt)
        assert stored.dtype == dtype and (stored == weight.astype(dtype)).all()
        assert (reference.decode_weight(stored, fmt) == weight.astype(dtype)).all()


def plain_product(weight: np.ndarray, x: np.ndarray) -> np.ndarray:
    """x @ weight.T in f32, one product after the other added to one sum."""
    return np.stack([np.cumsum(weight * row, axis=1, dtype=np.float32)[:, -1] for row in x])


@pytest.mark.parametrize("op", ["matvec", "matmul"])
@pytest.mark.parametrize(("n_in", "n_out"), SIZES)
@pytest.mark.parametrize("n", [1, 3, 17])
def test_products_are_close_to_float64(op: str, n_in: int, n_out: int, n: int) -> None:
    weight, x = normal(n_out, n_in), normal(n, n_in, seed=1)
    out = PRODUCTS[op, F32](weight, x, fmt=F32, config=TWO)
    exact = reference.matvec(weight, x, fmt=F32)
    assert out.dtype == np.float32 and out.shape == exact.shape
    plain = np.abs(plain_product(weight, x) - exact).max()
    assert np.abs(out - exact).max() <= 2 * plain + 1e-6


@pytest.mark.parametrize("op", ["matvec", "matmul"])
@pytest.mark.parametrize(("n_in", "n_out"), SIZES)
@pytest.mark.parametrize("n", [1, 3, 17])
def test_f16_equals_f32_over_the_decoded_weight(op: str, n_in: int, n_out: int, n: int) -> None:
    weight, x = reference.encode_weight(normal(n_out, n_in), F16), normal(n, n_in, seed=1)
    out = PRODUCTS[op, F16](weight, x, fmt=F16, config=TWO)
    wide = weight.astype(np.float32)
    assert (out == PRODUCTS[op, F32](wide, x, fmt=F32, config=TWO)).all()


@pytest.mark.parametrize("op", ["matvec", "matmul"])
@pytest.mark.parametrize(("n_in", "n_out"), BLOCK_SIZES)
@pytest.mark.parametrize("n", [1, 3, 6, 17, 31])
def test_q8_0_equals_the_oracle_to_the_bit(op: str, n_in: int, n_out: int, n: int) -> None:
    weight, x = reference.encode_weight(normal(n_out, n_in), Q8_0), normal(n, n_in, seed=1)
    wanted = reference.matvec(weight, x, fmt=Q8_0)
    for config in (ONE, TWO):
        found = PRODUCTS[op, Q8_0](weight, x, fmt=Q8_0, config=config)
        assert found.dtype == np.float32 and (found == wanted).all()


@EACH
def test_no_rows_give_no_rows(op: str, fmt: KvFormat) -> None:
    weight, x = reference.encode_weight(normal(33, 64), fmt), normal(0, 64)
    assert PRODUCTS[op, fmt](weight, x, fmt=fmt, config=TWO).shape == (0, 33)
    assert reference.matvec(weight, x, fmt=fmt).shape == (0, 33)


def test_q8_0_is_close_to_the_weight_it_came_from() -> None:
    weight, x = normal(70, 576), normal(9, 576, seed=1)
    out = matvec_blocks(reference.encode_weight(weight, Q8_0), x, fmt=Q8_0, config=TWO)
    exact = reference.matvec(weight, x, fmt=F32)
    # both sides are off by up to half a step of 127, the errors of 576 products are independent
    assert np.abs(out - exact).max() < 4 * np.sqrt(2 * 576) * np.abs(weight).max() / 254


@EACH
def test_products_of_small_integers_are_exact(op: str, fmt: KvFormat) -> None:
    rng = np.random.default_rng(2)
    n_in = 576 if fmt is Q8_0 else 577
    weight, x = (rng.integers(-8, 9, (n, n_in)).astype(np.float32) for n in (131, 400))
    if fmt is Q8_0:  # scales are 1, so that codes are the numbers
        weight[:, ::BLOCK] = x[:, ::BLOCK] = 127
    found = PRODUCTS[op, fmt](reference.encode_weight(weight, fmt), x, fmt=fmt, config=TWO)
    assert (found == reference.matmul(weight, x, fmt=F32)).all()


@EACH
@pytest.mark.parametrize("n_in", [576, 577])
def test_a_product_row_depends_on_itself_only(op: str, fmt: KvFormat, n_in: int) -> None:
    n_in = n_in // BLOCK * BLOCK if fmt is Q8_0 else n_in
    weight, x = reference.encode_weight(normal(131, n_in), fmt), normal(260, n_in, seed=1)
    product = PRODUCTS[op, fmt]
    whole = product(weight, x, fmt=fmt, config=ONE)
    for config in (ONE, TWO, {"threads": 3}):
        assert (product(weight, x, fmt=fmt, config=config) == whole).all()
        for n in ROW_COUNTS:
            start = 65 - n
            part = product(weight, x[start:65], fmt=fmt, config=config)
            assert (part == whole[start:65]).all(), n


@EACH
def test_a_product_over_nothing_is_zero(op: str, fmt: KvFormat) -> None:
    weight, x = reference.encode_weight(normal(70, 0), fmt), normal(19, 0)
    for config in (ONE, TWO):
        out = PRODUCTS[op, fmt](weight, x, fmt=fmt, config=config)
        assert out.shape == (19, 70) and (out == 0).all()


@EACH
def test_a_product_column_depends_on_its_weights_only(op: str, fmt: KvFormat) -> None:
    weight, x = reference.encode_weight(normal(131, 96), fmt), normal(19, 96, seed=1)
    whole = PRODUCTS[op, fmt](weight, x, fmt=fmt, config=TWO)
    for n in (1, 2, 15, 16, 31, 32, 33, 63, 64, 65, 130):
        part = PRODUCTS[op, fmt](weight[:n], x, fmt=fmt, config=TWO)
        assert (part == whole[:, :n]).all(), n


def test_few_bytes_are_left_to_one_thread_without_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    run = matvec.run
    monkeypatch.setattr(matvec, "run", lambda threads, *how: asked.append(threads) or run(1, *how))
    monkeypatch.setattr(matvec, "ALONE_BYTES", 64 * 96 * 4 * 2)
    for fmt, n_out in ((F32, 64), (F16, 64), (Q8_0, 64)):
        weight = reference.encode_weight(normal(n_out, 96), fmt)
        for n in (1, 2, 16):
            PRODUCTS["matvec", fmt](weight, normal(n, 96), fmt=fmt, config=TWO)
    assert asked == [1, 2, 2, 1, 1, 2, 1, 1, 2]


@EACH
def test_damage_stays_in_its_row_and_column(op: str, fmt: KvFormat) -> None:
    weight, x = normal(70, 64), normal(19, 64, seed=1)
    clean = PRODUCTS[op, fmt](reference.encode_weight(weight, fmt), x, fmt=fmt, config=TWO)
    weight[66, 49], x[2, 3] = np.nan, np.inf
    out = PRODUCTS[op, fmt](reference.encode_weight(weight, fmt), x, fmt=fmt, config=TWO)
    assert np.isnan(out[:, 66]).all() and not np.isfinite(out[2]).any()
    kept = np.delete(np.delete(out, 66, axis=1), 2, axis=0)
    assert (kept == np.delete(np.delete(clean, 66, axis=1), 2, axis=0)).all()


@EACH
def test_weights_mapped_read_only_need_no_other_compilation(op: str, fmt: KvFormat) -> None:
    weight, x = reference.encode_weight(normal(4, 32), fmt), normal(17, 32)
    frozen = weight.copy()
    frozen.flags.writeable = False
    out = [PRODUCTS[op, fmt](w, x, fmt=fmt, config=ONE) for w in (weight, frozen)]
    assert (out[0] == out[1]).all()
    workers = {
        ("matvec", Q8_0): matvec._matvec_blocks_kernel,
        "matvec": matvec.LANES_WORKERS.get(fmt),
        "matmul": matmul.WORKERS[fmt],
    }
    worker = workers.get((op, fmt)) or workers[op]
    assert worker is not None and len(worker.kernel.signatures) == 1
    assert weight.flags.writeable


@EACH
def test_products_refuse_widths_that_differ(op: str, fmt: KvFormat) -> None:
    weight = reference.encode_weight(normal(4, 64), fmt)
    with pytest.raises(Refusal, match=rf"a {fmt} weight of 4 rows of 64 cannot multiply rows \[2"):
        PRODUCTS[op, fmt](weight, normal(2, 32), fmt=fmt, config=ONE)


def test_the_format_of_a_weight_chooses_its_variant() -> None:
    for (op, fmt), launch in PRODUCTS.items():
        choice = registry.select(op, fmt=fmt)
        assert choice.launch is launch
        said = f"x {'q8_0' if fmt is Q8_0 else 'f32'}, weight {fmt}, acc f32"
        assert choice.receipt.numerics == said
    odd = Shape(head_dim=80)  # whole blocks are asked of cells, not of weights
    assert registry.select("matvec", fmt="q8_0", shape=odd).launch is matvec_blocks
    with pytest.raises(Refusal, match="head_dim is 80"):
        registry.select("attn_window", fmt="q8_0", shape=odd)
    with pytest.raises(Refusal, match="does not read q8_0"):
        registry.select("matvec", fmt="q8_0", variant="lanes")


@pytest.mark.parametrize("fmt", KvFormat)
@pytest.mark.parametrize("m", [32, 96, 33])
def test_embed_decodes_the_rows_it_is_asked_for(fmt: KvFormat, m: int) -> None:
    m = m // BLOCK * BLOCK if fmt is Q8_0 else m
    weight, tokens = reference.encode_weight(normal(5, m), fmt), np.array([4, 0, 4], np.int32)
    out = embed_rows(weight, tokens, fmt=fmt, config=ONE)
    assert out.dtype == np.float32 and (out == reference.embed(weight, tokens, fmt=fmt)).all()
    for token in (5, -1):
        with pytest.raises(Refusal, match=f"token {token} is not in the vocabulary of 5"):
            embed_rows(weight, np.array([0, token]), fmt=fmt, config=ONE)
