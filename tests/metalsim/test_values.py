"""What the simulated operations compute, to the bit where the bits are fixed."""

from __future__ import annotations

from typing import Any

import pytest

mx = pytest.importorskip("mlx.core")

import numpy as np  # noqa: E402

from metalsim import Mode, demo, metal_kernel, running  # noqa: E402

N = 4096


def compute(source: str, inputs: dict[str, Any], n: int, dtype: Any, header: str = "") -> Any:
    """`n` threads of up to 64 a threadgroup, one output element each; in both modes."""
    source = "uint i = thread_position_in_grid.x, lane = thread_index_in_simdgroup;\n" + source
    kernel = metal_kernel("value", list(inputs), ["out"], source, header)
    with running(Mode.CHECKED):
        return kernel(
            inputs=list(inputs.values()),
            grid=(n, 1, 1),
            threadgroup=(64, 1, 1),
            output_shapes=[(n,)],
            output_dtypes=[dtype],
        )[0]


def halves(seed: int, n: int = N) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(n).astype(np.float16)


def test_half_arithmetic_rounds_at_every_operation() -> None:
    a, b, c = halves(1), halves(2), halves(3)
    inputs = {"a": mx.array(a), "b": mx.array(b), "c": mx.array(c)}
    out = compute("out[i] = a[i] * b[i] + c[i];", inputs, N, mx.float16)
    np.testing.assert_array_equal(np.array(out), a * b + c)
    assert (a * b + c != (a.astype(np.float64) * b + c).astype(np.float16)).any()


def test_half_fma_rounds_once() -> None:
    # The first sum lies 2**-31 below the middle of two halves: as a float it would be the middle.
    a = np.array([2.0**-11 * (1 + 2.0**-10), *halves(4)], np.float16)
    b = np.array([1 - 2.0**-10, *halves(5)], np.float16)
    c = np.array([1 + 2.0**-10, *halves(6)], np.float16)
    inputs = {"a": mx.array(a), "b": mx.array(b), "c": mx.array(c)}
    out = compute("out[i] = fma(a[i], b[i], c[i]);", inputs, N + 1, mx.float16)
    exact = a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)
    np.testing.assert_array_equal(np.array(out), exact.astype(np.float16))


def test_float_is_not_contracted() -> None:
    a, b, c = (np.random.default_rng(s).standard_normal(N).astype(np.float32) for s in (1, 2, 3))
    inputs = {"a": mx.array(a), "b": mx.array(b), "c": mx.array(c)}
    out = compute("out[i] = a[i] * b[i] + c[i];", inputs, N, mx.float32)
    np.testing.assert_array_equal(np.array(out), a * b + c)
    fused = compute("out[i] = metal::fma(a[i], b[i], c[i]);", inputs, N, mx.float32)
    exact = (a.astype(np.float64) * b + c).astype(np.float32)
    assert (np.array(fused) == exact).mean() > 0.999  # float64 rounds a second time, rarely
    assert (a * b + c != exact).any()


def test_literals_are_float() -> None:
    a = np.abs(np.random.default_rng(1).standard_normal(N)).astype(np.float32)
    out = compute("out[i] = a[i] * 0.1;", {"a": mx.array(a)}, N, mx.float32)
    np.testing.assert_array_equal(np.array(out), a * np.float32(0.1))
    assert (a * np.float32(0.1) != (a * np.float64(0.1)).astype(np.float32)).any()


def test_bfloat_arithmetic_is_that_of_mlx() -> None:
    a, b = demo.normal((N,), mx.bfloat16, 7), demo.normal((N,), mx.bfloat16, 8)
    out = compute("out[i] = a[i] * b[i];", {"a": a, "b": b}, N, mx.bfloat16)
    assert mx.array_equal(out, a * b).item()
    out = compute("out[i] = bfloat(float(a[i]) / 3.0f);", {"a": a}, N, mx.bfloat16)
    assert mx.array_equal(out, (a.astype(mx.float32) / 3).astype(mx.bfloat16)).item()


def test_division_and_root_are_ieee() -> None:
    a = np.abs(np.random.default_rng(9).standard_normal(N)).astype(np.float32)
    for source, expected in {
        "out[i] = 1.0f / a[i];": np.float32(1) / a,
        "out[i] = precise::divide(1.0f, a[i]);": np.float32(1) / a,
        "out[i] = sqrt(a[i]);": np.sqrt(a),
        "out[i] = rint(a[i] * 10);": np.rint(a * np.float32(10)),
    }.items():
        out = compute(source, {"a": mx.array(a)}, N, mx.float32)
        np.testing.assert_array_equal(np.array(out), expected)


@pytest.mark.parametrize("lanes", [32, 20])
def test_simd_sum_follows_the_fixed_tree(lanes: int) -> None:
    x = np.random.default_rng(10).standard_normal(lanes).astype(np.float32)
    tree = list(x)
    for distance in (16, 8, 4, 2, 1):
        for i in range(min(distance, max(0, lanes - distance))):
            tree[i] = tree[i] + tree[i + distance]
    out = compute("out[i] = simd_sum(x[i]);", {"x": mx.array(x)}, lanes, mx.float32)
    assert set(np.array(out)) == {tree[0]}


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("simd_max(x[i])", lambda x: np.full(32, x.max())),
        ("simd_min(x[i])", lambda x: np.full(32, x.min())),
        ("simd_product(x[i])", lambda x: np.full(32, np.prod(x))),
        ("simd_or(x[i])", lambda x: np.full(32, np.bitwise_or.reduce(x))),
        ("simd_and(x[i])", lambda x: np.full(32, np.bitwise_and.reduce(x))),
        ("simd_xor(x[i])", lambda x: np.full(32, np.bitwise_xor.reduce(x))),
        ("int(simd_any(x[i] == 5))", lambda x: np.full(32, int((x == 5).any()))),
        ("int(simd_all(x[i] < 100))", lambda x: np.full(32, int((x < 100).all()))),
        ("simd_prefix_inclusive_sum(x[i])", np.cumsum),
        ("simd_prefix_exclusive_sum(x[i])", lambda x: np.cumsum(x) - x),
        ("simd_broadcast(x[i], 9)", lambda x: np.full(32, x[9])),
        ("simd_broadcast_first(x[i])", lambda x: np.full(32, x[0])),
        (
            "simd_broadcast(x[i], 0) * 100 + simd_broadcast(x[i] + 1, 0)",
            lambda x: np.full(32, x[0] * 101 + 1),
        ),
        ("simd_shuffle(x[i], (lane * 7) % 32)", lambda x: x[np.arange(32) * 7 % 32]),
        ("simd_shuffle_xor(x[i], 5)", lambda x: x[np.arange(32) ^ 5]),
        ("simd_shuffle_down(x[i], 3)", lambda x: np.concatenate([x[3:], x[-3:]])),
        ("simd_shuffle_up(x[i], 3)", lambda x: np.concatenate([x[:3], x[:-3]])),
        (
            "simd_shuffle_and_fill_down(x[i], -x[i], 3)",
            lambda x: np.concatenate([x[3:], -x[:3]]),
        ),
        (
            "simd_shuffle_and_fill_up(x[i], -x[i], 3)",
            lambda x: np.concatenate([-x[-3:], x[:-3]]),
        ),
    ],
)
def test_simd_functions(expression: str, expected: Any) -> None:
    x = (np.arange(32) * 37 % 53 + 2).astype(np.int32)
    out = compute(f"out[i] = {expression};", {"x": mx.array(x)}, 32, mx.int32)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(np.array(out), expected(x).astype(np.int32))


@pytest.mark.parametrize(
    ("dtype", "name"), [(mx.float32, "float"), (mx.float16, "half"), (mx.bfloat16, "bfloat")]
)
def test_matrix_product_adds_fused_terms_in_order(dtype: Any, name: str) -> None:
    source = f"""
      simdgroup_matrix<{name}, 8, 8> A, B;
      simdgroup_float8x8 C;
      simdgroup_load(A, a);
      simdgroup_load(B, b + 3, 19, ulong2(1, 0), true);
      simdgroup_load(C, c);
      simdgroup_multiply_accumulate(C, A, B, C);
      simdgroup_store(C, out);
    """
    a, b = demo.normal((8, 8), dtype, 1), demo.normal((200,), dtype, 2)
    c = demo.normal((8, 8), mx.float32, 3)
    kernel = metal_kernel("product", ["a", "b", "c"], ["out"], source)
    with running(Mode.CHECKED):
        out = kernel(
            inputs=[a, b, c],
            grid=(32, 1, 1),
            threadgroup=(32, 1, 1),
            output_shapes=[(8, 8)],
            output_dtypes=[mx.float32],
        )[0]
    rows = np.arange(8)
    right = demo.float64(b)[4 + rows[None, :] * 19 + rows[:, None]]  # element (k, n) of B
    expected = np.array(c)
    for k in rows:  # products of float32 are exact in float64
        term = demo.float64(a)[:, k, None] * right[k]
        expected = (expected.astype(np.float64) + term).astype(np.float32)
    np.testing.assert_array_equal(np.array(out), expected)


def test_vectors() -> None:
    header = """
    constant float table[4] = {1, 2, 4, 8};
    struct Sum { float of; thread Sum& add(float x) { of += x; return *this; } };
    template <typename T, int N> METAL_FUNC float squares(const device T* p) {
      float s = 0;
      for (int k = 0; k < N; k++) s += float(p[k]) * float(p[k]);
      return s;
    }
    """
    source = """
      char4 c = as_type<char4>(w[i]);
      half4 h = half4(float4(short4(c) * short4(2)));
      h.xy = h.yx;
      float4 f = float4(h);
      f = select(f, float4(-1.0f), f > 100.0f);
      f = clamp(f, -90.0f, 90.0f);
      float2 two = ((const device packed_float2*)(x + 1))[0];
      Sum sum = {0};
      sum.add(dot(f, float4(1.0f, 0.5f, float2(0.25f, 0.125f)))).add(squares<float, 4>(x));
      int2 halves = int2(uint2(3u, 4u));
      float rest = (metal::isnan(NAN) ? 0 : 1) + (any(f > 1000.0f) ? 1 : 0) + x[0] * 0.5h;
      rest += halves.x + min(halves.x, 3) + metal::abs(float(halves.y));
      out[i] = sum.of + table[i % 4] + two.x + 10 * two.y + rest;
    """
    w = np.random.default_rng(12).integers(-(2**31), 2**31, 64).astype(np.int32)
    x = np.arange(8, dtype=np.float32)
    out = compute(source, {"x": mx.array(x), "w": mx.array(w)}, 64, mx.float32, header)
    f = w.view(np.int8).reshape(64, 4).astype(np.float64)[:, [1, 0, 2, 3]] * 2
    f = np.clip(np.where(f > 100, -1, f), -90, 90)
    expected = f @ [1, 0.5, 0.25, 0.125] + 14 + 2.0 ** (np.arange(64) % 4) + 1 + 20 + 3 + 3 + 4
    np.testing.assert_array_equal(np.array(out), expected.astype(np.float32))


def test_a_matrix_of_one_number_is_diagonal_or_filled() -> None:
    source = """
      simdgroup_float8x8 A = simdgroup_float8x8(3.0f);
      simdgroup_float8x8 B = make_filled_simdgroup_matrix<float, 8, 8>(2.0f);
      simdgroup_store(A, diagonal);
      simdgroup_store(B, filled);
    """
    kernel = metal_kernel("constants", [], ["diagonal", "filled"], source)
    with running(Mode.CHECKED):
        diagonal, filled = kernel(
            inputs=[],
            grid=(32, 1, 1),
            threadgroup=(32, 1, 1),
            output_shapes=[(8, 8)] * 2,
            output_dtypes=[mx.float32] * 2,
        )
    np.testing.assert_array_equal(np.array(diagonal), 3 * np.eye(8))
    np.testing.assert_array_equal(np.array(filled), np.full((8, 8), 2))
