"""Products with a weight in three formats: values, bits, and rows that depend on nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import under_test
from arrays import normal
from under_test import config_of, configs_of, default, interpreted, op, same_bits

from minfer import reference
from minfer.errors import Refusal
from minfer.format import BLOCK, BLOCK_BYTES, KvFormat

F32, F16, Q8_0 = KvFormat
ROWS = 18 if interpreted() else 65
ROW_COUNTS = [1, 2, 17, ROWS] if interpreted() else [*range(1, 18), 63, 64, ROWS]
# Triton's interpreter multiplies the bits of bf16 numbers as whole numbers.
ROUNDED = ["f16"] if interpreted() else ["f16", "bf16"]
COLUMNS = [1, 17] if interpreted() else [1, 2, 15, 16, 31, 32, 33, 63, 64, 65, 130]
NAMES = ("matvec", "matmul")
EACH = pytest.mark.parametrize(("name", "fmt"), [(n, f) for f in KvFormat for n in NAMES], ids=str)
# n_in, n_out: single elements, tails of lanes, of panels and of k blocks
SIZES = [(1, 1), (15, 63), (17, 65), (33, 64), (255, 3), (257, 130), (576, 1), (577, 65)]
BLOCK_SIZES = [(32, 1), (64, 15), (96, 16), (576, 33), (768, 64), (800, 130), (1536, 31)]


@pytest.fixture(autouse=True)
def threads_from_the_first_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU small weights would be left to one thread."""
    if under_test.device == "cpu":
        monkeypatch.setattr(under_test.module("matvec"), "ALONE_BYTES", 0)


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


@pytest.mark.parametrize("fmt", [F32, F16], ids=str)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("n_in", "n_out"), SIZES)
@pytest.mark.parametrize("n", [3] if interpreted() else [1, 3, 17])
def test_products_are_close_to_float64(
    name: str, fmt: KvFormat, n_in: int, n_out: int, n: int
) -> None:
    """Of the rows as the variant rounds them, and of the weight as it is stored."""
    weight, x = reference.encode_weight(normal(n_out, n_in), fmt), normal(n, n_in, seed=1)
    out = op(name, fmt)(weight, x, fmt=fmt)
    seen = reference.round_query(x, default(name, fmt).numerics(fmt).query)
    exact = reference.matvec(weight, seen, fmt=fmt)
    assert out.dtype == np.float32 and out.shape == exact.shape
    plain = np.abs(plain_product(weight.astype(np.float32), seen) - exact).max()
    assert np.abs(out - exact).max() <= 2 * plain + 1e-6


@pytest.mark.parametrize("fmt", [F32, F16], ids=str)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("activations", ROUNDED)
def test_products_of_rounded_operands_are_close_to_float64_and_rows_stand_alone(
    name: str, fmt: KvFormat, activations: str
) -> None:
    """What a variant with the tunable `activations` makes of operands rounded to that type."""
    chosen = default(name, fmt)
    if "activations" not in chosen.space:
        pytest.skip(f"{name}_{chosen.name} takes activations as they are")
    weight, x = reference.encode_weight(normal(70, 577), fmt), normal(ROWS, 577, seed=1)
    config = config_of(chosen, activations=activations)
    out = op(name, fmt)(weight, x, fmt=fmt, config=config)
    wide, seen = (reference.round_query(a.astype(np.float32), activations) for a in (weight, x))
    exact = reference.matvec(wide, seen, fmt=F32)
    plain = np.abs(plain_product(wide, seen) - exact).max()
    # Tensor cores cut sums off where numpy rounds them, which is twice the error each time (Fasi,
    # Higham, Mikaitis and Pranesh, PeerJ Computer Science 7:e330, 2021).
    assert np.abs(out - exact).max() <= 2 * 2 * plain + 1e-6
    for n in (1, 16, 17):
        part = op(name, fmt)(weight, x[ROWS - n :], fmt=fmt, config=config)
        assert same_bits(part, out[ROWS - n :])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("n_in", "n_out"), BLOCK_SIZES)
@pytest.mark.parametrize("n", [3, 17] if interpreted() else [1, 3, 6, 17, 31])
def test_q8_0_equals_the_oracle_to_the_bit(name: str, n_in: int, n_out: int, n: int) -> None:
    weight, x = reference.encode_weight(normal(n_out, n_in), Q8_0), normal(n, n_in, seed=1)
    wanted = reference.matvec(weight, x, fmt=Q8_0)
    for config in configs_of(default(name, Q8_0)):
        found = op(name, Q8_0)(weight, x, fmt=Q8_0, config=config)
        assert found.dtype == np.float32 and (found == wanted).all()


@EACH
def test_no_rows_give_no_rows(name: str, fmt: KvFormat) -> None:
    weight, x = reference.encode_weight(normal(33, 64), fmt), normal(0, 64)
    assert op(name, fmt)(weight, x, fmt=fmt).shape == (0, 33)
    assert reference.matvec(weight, x, fmt=fmt).shape == (0, 33)


def test_q8_0_is_close_to_the_weight_it_came_from() -> None:
    weight, x = normal(70, 576), normal(9, 576, seed=1)
    out = op("matvec", Q8_0)(reference.encode_weight(weight, Q8_0), x, fmt=Q8_0)
    exact = reference.matvec(weight, x, fmt=F32)
    # both sides are off by up to half a step of 127, the errors of 576 products are independent
    assert np.abs(out - exact).max() < 4 * np.sqrt(2 * 576) * np.abs(weight).max() / 254


@EACH
def test_products_of_small_integers_are_exact(name: str, fmt: KvFormat) -> None:
    rng = np.random.default_rng(2)
    n_in = 576 if fmt is Q8_0 else 577
    many = (35, 20) if interpreted() else (131, 400)
    weight, x = (rng.integers(-8, 9, (n, n_in)).astype(np.float32) for n in many)
    if fmt is Q8_0:  # scales are 1, so that codes are the numbers
        weight[:, ::BLOCK] = x[:, ::BLOCK] = 127
    found = op(name, fmt)(reference.encode_weight(weight, fmt), x, fmt=fmt)
    assert (found == reference.matmul(weight, x, fmt=F32)).all()


@EACH
@pytest.mark.parametrize("n_in", [577] if interpreted() else [576, 577])
def test_a_product_row_depends_on_itself_only(name: str, fmt: KvFormat, n_in: int) -> None:
    n_in, n = n_in // BLOCK * BLOCK if fmt is Q8_0 else n_in, ROWS + 1 if interpreted() else 260
    n_out = 35 if interpreted() else 131
    weight, x = reference.encode_weight(normal(n_out, n_in), fmt), normal(n, n_in, seed=1)
    product = op(name, fmt)
    whole = product(weight, x, fmt=fmt)
    for config in configs_of(default(name, fmt)):
        assert (product(weight, x, fmt=fmt, config=config) == whole).all()
        for n in ROW_COUNTS:
            start = ROWS - n
            part = product(weight, x[start:ROWS], fmt=fmt, config=config)
            assert (part == whole[start:ROWS]).all(), n


@EACH
def test_a_product_over_nothing_is_zero(name: str, fmt: KvFormat) -> None:
    weight, x = reference.encode_weight(normal(70, 0), fmt), normal(19, 0)
    out = op(name, fmt)(weight, x, fmt=fmt)
    assert out.shape == (19, 70) and (out == 0).all()


@EACH
def test_a_product_column_depends_on_its_weights_only(name: str, fmt: KvFormat) -> None:
    weight, x = reference.encode_weight(normal(131, 96), fmt), normal(19, 96, seed=1)
    whole = op(name, fmt)(weight, x, fmt=fmt)
    for n in COLUMNS:
        part = op(name, fmt)(weight[:n], x, fmt=fmt)
        assert (part == whole[:, :n]).all(), n


@EACH
def test_damage_stays_in_its_row_and_column(name: str, fmt: KvFormat) -> None:
    weight, x = normal(70, 64), normal(19, 64, seed=1)
    clean = op(name, fmt)(reference.encode_weight(weight, fmt), x, fmt=fmt)
    weight[66, 49], x[2, 3] = np.nan, np.inf
    out = op(name, fmt)(reference.encode_weight(weight, fmt), x, fmt=fmt)
    assert np.isnan(out[:, 66]).all() and not np.isfinite(out[2]).any()
    kept = np.delete(np.delete(out, 66, axis=1), 2, axis=0)
    assert (kept == np.delete(np.delete(clean, 66, axis=1), 2, axis=0)).all()


@EACH
def test_products_refuse_widths_that_differ(name: str, fmt: KvFormat) -> None:
    weight = reference.encode_weight(normal(4, 64), fmt)
    with pytest.raises(Refusal, match=rf"a {fmt} weight of 4 rows of 64 cannot multiply rows \[2"):
        op(name, fmt)(weight, normal(2, 32), fmt=fmt)


@pytest.mark.parametrize("fmt", KvFormat)
@pytest.mark.parametrize("m", [32, 96, 33])
def test_embed_decodes_the_rows_it_is_asked_for(fmt: KvFormat, m: int) -> None:
    m = m // BLOCK * BLOCK if fmt is Q8_0 else m
    weight, tokens = reference.encode_weight(normal(5, m), fmt), np.array([4, 0, 4], np.int32)
    embed = op("embed", fmt)
    out = embed(weight, tokens, fmt=fmt)
    assert out.dtype == np.float32 and (out == reference.embed(weight, tokens, fmt=fmt)).all()
    for token in (5, -1):
        with pytest.raises(Refusal, match=f"token {token} is not in the vocabulary of 5"):
            embed(weight, np.array([0, token]), fmt=fmt, host=True)
