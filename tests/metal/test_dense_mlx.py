"""Dense steps and products where Metal kernels have their own way: long rows, slices, blocks.

What every package promises of them is in tests/kernels, which runs with `--on metal` too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import under_test

mx = pytest.importorskip("mlx.core")

from arrays import normal  # noqa: E402
from under_test import apart, same_bits  # noqa: E402

from minfer import kernels_mlx as backend  # noqa: E402
from minfer import reference  # noqa: E402
from minfer.errors import Refusal  # noqa: E402
from minfer.format import KvFormat  # noqa: E402
from minfer.kernels_mlx import dense, matmul, matvec  # noqa: E402
from minfer.kernels_mlx._kernel import MetalKernel  # noqa: E402

pytestmark = pytest.mark.skipif(under_test.device != "metal", reason="runs by --on metal")

F32, F16, Q8_0 = KvFormat
PRODUCTS: dict[str, dict[KvFormat, Any]] = {
    "matvec": {F32: matvec.matvec_lanes, F16: matvec.matvec_lanes, Q8_0: matvec.matvec_blocks},
    "matmul": {F32: matmul.matmul_tiles, F16: matmul.matmul_tiles, Q8_0: matmul.matmul_blocks},
}
EACH = pytest.mark.parametrize("name", PRODUCTS)
LONG = [1023, 1024, 1025, 2100, 5000]  # of several strips, and of several simdgroups


def product(name: str, fmt: KvFormat, weight: np.ndarray, x: Any) -> np.ndarray:
    """The product of a weight in `fmt` and rows, numpy or of mlx."""
    x = backend.from_host(x) if isinstance(x, np.ndarray) else x
    return backend.to_host(PRODUCTS[name][fmt](backend.from_host(weight), x, fmt=fmt, config={}))


# -- steps ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("m", LONG)
def test_a_norm_of_a_long_row(m: int) -> None:
    x, weight = normal(5, m) * 3, normal(m, seed=1)
    out = backend.to_host(dense.rms_norm_rows(x, weight, eps=1e-5, config={}))
    wanted = reference.rms_norm(x, weight, eps=1e-5)
    # 2**-24 for each of the three last roundings, and as much for the sum and the root together
    assert (np.abs(out - wanted) <= 2**-22 * np.abs(wanted)).all()
    alone = backend.to_host(dense.rms_norm_rows(x[3:4], weight, eps=1e-5, config={}))
    assert same_bits(alone, out[3:4])


@pytest.mark.parametrize("m", LONG)
def test_steps_cover_every_element_of_a_long_row(m: int) -> None:
    x, y = normal(3, m), normal(3, m, seed=1)
    for found, wanted in (
        (dense.silu_mul_rows(x, y, config={}), reference.silu_mul(x, y)),
        (dense.gelu_mul_rows(x, y, config={}), reference.gelu_mul(x, y)),
        (dense.softcap_rows(x, cap=2.0, config={}), reference.softcap(x, cap=2.0)),
    ):
        assert np.allclose(backend.to_host(found), wanted, rtol=3e-7, atol=0)


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize(("n_head", "d"), [(16, 64), (33, 64), (3, 700)])
def test_rope_turns_heads_across_strips_to_the_bit(pairing: str, n_head: int, d: int) -> None:
    x, at = normal(3, n_head, d), np.array([4, 0, 6], np.int32)
    angles = np.arange(7)[:, None] * 10.0 ** -np.linspace(0, 4, d // 2 - 1)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    out = backend.to_host(dense.rope_rows(x, at, cos, sin, pairing=pairing, config={}))
    wanted = reference.dense.rotated(x, cos[at][:, None], sin[at][:, None], pairing)
    assert same_bits(out, wanted)


def test_rows_of_activations_are_taken_by_number() -> None:
    """The rows of a batch whose logits are wanted, named by an array of mlx."""
    x, at = normal(6, 1100), np.array([5, 0, 5], np.int32)
    found = dense.embed_rows(backend.from_host(x), backend.from_host(at), fmt=F32, config={})
    assert same_bits(backend.to_host(found), x[at])


def test_no_rows_launch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Metal takes no empty grid."""
    monkeypatch.setattr(MetalKernel, "__call__", lambda *args, **how: pytest.fail("launched"))
    x, heads, none = normal(0, 40), normal(0, 3, 8), np.zeros(0, np.int32)
    table, weight = normal(4, 4), reference.encode_weight(normal(5, 64), Q8_0)
    for out in (
        dense.rms_norm_rows(x, normal(40), eps=1e-5, config={}),
        dense.silu_mul_rows(x, x, config={}),
        dense.softcap_rows(x, cap=2.0, config={}),
        dense.add_rows(x, x, config={}),
        dense.scale_rows(x, factor=2.0, config={}),
    ):
        assert out.shape == (0, 40) and out.dtype == mx.float32
    turned = dense.rope_rows(heads, none, table, table, pairing="half", config={})
    assert turned.shape == (0, 3, 8)
    assert dense.embed_rows(weight, none, fmt=Q8_0, config={}).shape == (0, 64)
    for name, launches in PRODUCTS.items():
        for fmt in launches:
            weight = reference.encode_weight(normal(5, 64), fmt)
            assert product(name, fmt, weight, normal(0, 64)).shape == (0, 5)
            assert product(name, fmt, weight[:0], normal(2, 64)).shape == (2, 0)


# -- products -------------------------------------------------------------------------------------


@EACH
@pytest.mark.parametrize("fmt", KvFormat, ids=str)
@pytest.mark.parametrize("n", [1, 5, 33])
@pytest.mark.parametrize(("shift", "extra"), [(0, 32), (16, 16), (3, 5)])
def test_products_read_slices(name: str, fmt: KvFormat, n: int, shift: int, extra: int) -> None:
    weight, x = reference.encode_weight(normal(9, 96), fmt), normal(n, 96, seed=1)
    found = product(name, fmt, weight, apart(x, shift, extra))
    assert same_bits(found, product(name, fmt, weight, x))


@EACH
@pytest.mark.parametrize("fmt", [F32, F16], ids=str)
@pytest.mark.parametrize("n_in", [3, 31, 127, 129, 1100])
def test_sums_are_fma_chains_in_k_order(name: str, fmt: KvFormat, n_in: int) -> None:
    """To the bit: 32 chains of four neighbours, added as the simulator does it; or one chain."""
    weight, x = reference.encode_weight(normal(5, n_in), fmt), normal(2, n_in, seed=1)
    found = product(name, fmt, weight, x)
    wide = weight.astype(np.float32)
    if name == "matmul":
        assert same_bits(found, _chain(wide, x, np.ones(n_in, bool)))
        return
    lane_of = np.arange(n_in) // 4 % 32
    lanes = [_chain(wide, x, lane_of == lane) for lane in range(32)]
    if mx.metal.is_available():  # a GPU adds lanes in an order of its own
        assert np.allclose(found, sum(lanes), rtol=0, atol=1e-4)
        return
    for distance in (16, 8, 4, 2, 1):
        lanes = [lanes[i] + lanes[i + distance] for i in range(distance)]
    assert same_bits(found, lanes[0])


def _chain(weight: np.ndarray, x: np.ndarray, taken: np.ndarray) -> np.ndarray:
    """x @ weight.T over the k taken, one fused multiply-add after the other: f32 [n, n_out].

    Two f32 multiply exactly in f64; the sum there and then in f32 rounds twice, which is once
    unless the first lands on a tie of the second. Random numbers do not.
    """
    sums = np.zeros((len(x), len(weight)), np.float32)
    for k in np.flatnonzero(taken):
        products = np.multiply.outer(x[:, k].astype(np.float64), weight[:, k].astype(np.float64))
        sums = (products + sums).astype(np.float32)
    return sums


@EACH
@pytest.mark.parametrize("n", [1, 4, 18])
def test_damaged_blocks_reach_their_row_and_column_only(name: str, n: int) -> None:
    weight, x = normal(19, 96), normal(n, 96, seed=1)
    weight[18, 95], x[n - 1, 40] = np.inf, np.nan  # in the last row, which other lanes read again
    stored = reference.encode_weight(weight, Q8_0)
    stored[16, -34:-32] = np.frombuffer(np.float16(np.inf).tobytes(), np.uint8)  # a last block's
    out, wanted = product(name, Q8_0, stored, x), reference.matvec(stored, x, fmt=Q8_0)
    assert np.isnan(out[n - 1]).all() and np.isnan(out[:, 18]).all()
    assert np.isinf(out[: n - 1, 16]).all() and np.isfinite(out[: n - 1, :16]).all()
    assert (out[: n - 1, :18] == wanted[: n - 1, :18]).all()


@EACH
@pytest.mark.parametrize("n", [1, 3, 9])
def test_blocks_of_extreme_scales(name: str, n: int) -> None:
    """Zero blocks, subnormal scales on both sides, and codes of -127 throughout."""
    weight, x = normal(35, 1088), normal(n, 1088, seed=1)
    x[0, :64], x[-1, 70:200], weight[3, :200] = 0, 1e-5, 3e-6
    weight[4], x[n // 2, 256:] = -2, -3
    stored = reference.encode_weight(weight, Q8_0)
    assert same_bits(product(name, Q8_0, stored, x), reference.matvec(stored, x, fmt=Q8_0))


@EACH
@pytest.mark.parametrize("fmt", [F16, Q8_0], ids=str)
def test_no_decoded_weight_is_kept(name: str, fmt: KvFormat) -> None:
    weight = backend.from_host(reference.encode_weight(normal(1024, 1024), fmt))
    x = backend.from_host(normal(9, 1024, seed=1))
    mx.eval(weight, x)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(PRODUCTS[name][fmt](weight, x, fmt=fmt, config={}))
    assert mx.get_peak_memory() - before < 1 << 18  # the weight is 4 MiB in float32


def test_products_refuse_rows_of_another_type() -> None:
    with pytest.raises(Refusal, match="x must be float32, not float16"):
        product("matvec", F32, normal(2, 8), normal(2, 8).astype(np.float16))
