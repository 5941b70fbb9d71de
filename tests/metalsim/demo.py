"""Kernels that the simulator's own tests run: texts, inputs, and float64 answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from metalsim import metal_kernel

AXPY = """
  uint i = thread_position_in_grid.x;
  out[i] = T(x[i]) * a + y[i];
"""

SOFTMAX = """
  constexpr int NSG = TG / 32;
  threadgroup float part[NSG];
  uint row = threadgroup_position_in_grid.x, t = thread_index_in_threadgroup;
  uint sg = simdgroup_index_in_threadgroup, lane = thread_index_in_simdgroup;
  int n = x_shape[1];
  const device float* r = x + row * n;
  float m = -INFINITY;
  for (int i = t; i < n; i += TG) m = max(m, r[i]);
  m = simd_max(m);
  if (lane == 0) part[sg] = m;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  m = simd_max(lane < NSG ? part[lane] : -INFINITY);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float s = 0;
  for (int i = t; i < n; i += TG) s += fast::exp(r[i] - m);
  s = simd_sum(s);
  if (lane == 0) part[sg] = s;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  s = simd_sum(lane < NSG ? part[lane] : 0.0f);
  for (int i = t; i < n; i += TG) out[row * n + i] = metal::exp(r[i] - m) / s;
"""

# One query of each head over the cells [window[0], window[1]); heads share keys in groups.
DECODE = """
  constexpr int HD = 64;
  threadgroup float sm[NSG], sl[NSG], so[NSG * HD];
  const uint h = threadgroup_position_in_grid.x;
  const uint sg = simdgroup_index_in_threadgroup, lane = thread_index_in_simdgroup;
  const int kvh = h / (NH / NKV), lo = window[0], hi = window[1];
  const float2 q2 = float2(((const device half2*)(q + h * HD))[lane]) * scale;
  float m = -INFINITY, l = 0;
  float2 acc = float2(0.0f);
  for (int c = lo + int(sg); c < hi; c += NSG) {
    const device half2* kp = (const device half2*)(kc + (c * NKV + kvh) * HD);
    const device half2* vp = (const device half2*)(vc + (c * NKV + kvh) * HD);
    float s = simd_sum(dot(q2, float2(kp[lane])));
    float mn = max(m, s), f = fast::exp(m - mn), p = fast::exp(s - mn);
    acc = acc * f + p * float2(vp[lane]);
    l = l * f + p;
    m = mn;
  }
  if (lane == 0) { sm[sg] = m; sl[sg] = l; }
  so[sg * HD + 2 * lane] = acc.x;
  so[sg * HD + 2 * lane + 1] = acc.y;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (sg == 0) {
    float M = -INFINITY, L = 0;
    float2 o = float2(0.0f);
    for (int i = 0; i < NSG; i++) M = max(M, sm[i]);
    for (int i = 0; i < NSG; i++) {
      float f = sl[i] > 0 ? fast::exp(sm[i] - M) : 0.0f;
      L += f * sl[i];
      o += f * float2(so[i * HD + 2 * lane], so[i * HD + 2 * lane + 1]);
    }
    out[h * HD + 2 * lane] = half(L > 0 ? o.x / L : 0.0f);
    out[h * HD + 2 * lane + 1] = half(L > 0 ? o.y / L : 0.0f);
  }
"""

QUANTIZE = """
  uint b = threadgroup_position_in_grid.x * simdgroups_per_threadgroup +
           simdgroup_index_in_threadgroup;
  uint lane = thread_index_in_simdgroup;
  float v = float(x[b * 32 + lane]);
  float amax = simd_max(metal::abs(v));
  float d = amax / 127.0f;
  float id = d != 0.0f ? 1.0f / d : 0.0f;
  codes[b * 32 + lane] = int8_t(rint(v * id));
  if (lane == 0) scale[b] = half(d);
"""

# Tiles of A and B through threadgroup memory, four simdgroups, C = A B^T.
MATMUL = """
  threadgroup half At[32 * 8], Bt[32 * 8];
  uint t = thread_index_in_threadgroup, sg = simdgroup_index_in_threadgroup;
  simdgroup_matrix<float, 8, 8> acc[4];
  for (int j = 0; j < 4; j++) acc[j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  for (int k0 = 0; k0 < K; k0 += 8) {
    for (uint i = t; i < 256; i += 128) {
      At[i] = a[(i / 8) * K + k0 + i % 8];
      Bt[i] = b[(i / 8) * K + k0 + i % 8];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    simdgroup_half8x8 A, B;
    simdgroup_load(A, At + sg * 64, 8);
    for (int j = 0; j < 4; j++) {
      simdgroup_load(B, Bt + j * 64, 8, ulong2(0), true);
      simdgroup_multiply_accumulate(acc[j], A, B, acc[j]);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  for (int j = 0; j < 4; j++) simdgroup_store(acc[j], c + sg * 8 * 32 + j * 8, 32);
"""


@dataclass(frozen=True)
class Demo:
    """A kernel, a call of it, the answer of its first output and how near it must come."""

    name: str
    source: str
    inputs: dict[str, Any]
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    outputs: dict[str, tuple[tuple[int, ...], Any]]
    answer: Callable[[], np.ndarray[Any, Any]]
    tolerance: float
    template: list[tuple[str, Any]] = field(default_factory=list)
    header: str = ""

    def run(self) -> list[Any]:
        shapes, dtypes = zip(*self.outputs.values(), strict=True)
        kernel = metal_kernel(
            self.name, list(self.inputs), list(self.outputs), self.source, self.header
        )
        return kernel(
            inputs=list(self.inputs.values()),
            template=self.template,
            grid=self.grid,
            threadgroup=self.threadgroup,
            output_shapes=list(shapes),
            output_dtypes=list(dtypes),
        )


def normal(shape: tuple[int, ...], dtype: Any, seed: int) -> Any:
    numbers = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return mx.array(numbers).astype(dtype)


def float64(array: Any) -> np.ndarray[Any, Any]:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def _softmax(scores: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    e = np.exp(scores - scores.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def axpy(dtype: Any, tolerance: float, n: int = 1000) -> Demo:
    x, y = normal((n,), dtype, 1), normal((n,), mx.float32, 2)
    return Demo(
        f"axpy_{str(dtype).rpartition('.')[2]}",
        AXPY,
        {"x": x, "y": y, "a": 1.5},
        (n, 1, 1),
        (256, 1, 1),
        {"out": ((n,), mx.float32)},
        lambda: float64(x) * 1.5 + float64(y),
        tolerance,
        [("T", mx.float32)],
    )


def softmax(rows: int = 4, columns: int = 1000) -> Demo:
    x = normal((rows, columns), mx.float32, 3) * 4
    return Demo(
        "softmax",
        SOFTMAX,
        {"x": x},
        (rows * 256, 1, 1),
        (256, 1, 1),
        {"out": ((rows, columns), mx.float32)},
        lambda: _softmax(float64(x)),
        2e-7,
        [("TG", 256)],
    )


def decode(low: int, high: int, heads: int = 8, kv_heads: int = 2, cells: int = 512) -> Demo:
    q, k, v = (
        normal(shape, mx.float16, seed)
        for seed, shape in (
            (4, (heads, 64)),
            (5, (cells, kv_heads, 64)),
            (6, (cells, kv_heads, 64)),
        )
    )

    def answer() -> np.ndarray[Any, Any]:
        group = heads // kv_heads
        keys, values = float64(k)[low:high], float64(v)[low:high]
        rows = [
            _softmax(keys[:, h // group] @ float64(q)[h] / 8) @ values[:, h // group]
            for h in range(heads)
        ]
        return np.stack(rows)

    return Demo(
        "decode",
        DECODE,
        {"q": q, "kc": k, "vc": v, "window": mx.array([low, high]), "scale": 0.125},
        (heads * 128, 1, 1),
        (128, 1, 1),
        {"out": ((heads, 64), mx.float16)},
        answer,
        2e-4,  # half of the step of float16 below 1
        [("NH", heads), ("NKV", kv_heads), ("NSG", 4)],
    )


def quantize(blocks: int = 64) -> Demo:
    x = normal((blocks * 32,), mx.float32, 7)

    def answer() -> np.ndarray[Any, Any]:
        rows = np.array(x).reshape(-1, 32)
        inverse = np.float32(1) / (np.abs(rows).max(1, keepdims=True) / np.float32(127))
        return np.rint(rows * inverse)

    return Demo(
        "quantize",
        QUANTIZE,
        {"x": x},
        (blocks * 32, 1, 1),
        (128, 1, 1),
        {"codes": ((blocks, 32), mx.int8), "scale": ((blocks,), mx.float16)},
        answer,
        0,
    )


def matmul(inner: int = 64) -> Demo:
    a, b = normal((32, inner), mx.float16, 8), normal((32, inner), mx.float16, 9)
    return Demo(
        "matmul",
        MATMUL,
        {"a": a, "b": b},
        (128, 1, 1),
        (128, 1, 1),
        {"c": ((32, 32), mx.float32)},
        lambda: float64(a) @ float64(b).T,
        1e-5,
        [("K", inner)],
        "#include <metal_simdgroup_matrix>\n",
    )
