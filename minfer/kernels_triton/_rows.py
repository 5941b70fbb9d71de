"""One query head after the other, one sweep over key tiles: every head_dim, every format, exact.

K and V are decoded to f32 and products are sums of f32 products, so this is also what other
variants are compared with.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from minfer.kernels_triton._arguments import planes
from minfer.kernels_triton._call import Call
from minfer.kernels_triton._gather import cell_of, query_window
from minfer.kernels_triton._softmax import weight
from minfer.kernels_triton._tile import FORMATS, load_rows
from minfer.ops import Config


@triton.jit
def _attn_rows_kernel(
    q,  # float32 [n_q, n_head, d]
    k,
    k_scales,
    v,
    v_scales,
    window,
    positions,
    out,  # float32 [n_q, n_head, d]
    n_head,
    n_head_kv,
    width,
    factor,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STRIDE: tl.constexpr,
    SCALES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FMT: tl.constexpr,
    MODE: tl.constexpr,
):
    row = tl.program_id(0)
    query, head = row // n_head, row % n_head // (n_head // n_head_kv)
    pos = tl.load(positions + query)
    first, e0, e1, e2, b0, b1, b2, b3 = query_window(window, query, pos, width, MODE)
    d = tl.arange(0, BLOCK_D)
    at = row.to(tl.int64) * D + d
    q_row = tl.load(q + at, mask=d < D, other=0.0)
    m, l = pos * 0.0 + float("-inf"), pos * 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    for index in range(first // BLOCK_N * BLOCK_N, pos + 1, BLOCK_N):
        keys = index + tl.arange(0, BLOCK_N)
        seen = (keys >= first) & (keys <= pos)
        cells = cell_of(keys, e0, e1, e2, b0, b1, b2, b3, MODE).to(tl.int64)
        k_tile = load_rows(
            k, k_scales, head, 0, cells, seen, D, BLOCK_D, STRIDE, SCALES, FMT, tl.float32
        )
        v_tile = load_rows(
            v, v_scales, head, 0, cells, seen, D, BLOCK_D, STRIDE, SCALES, FMT, tl.float32
        )
        s = tl.where(seen, tl.sum(k_tile * q_row[None, :], axis=1), float("-inf"))
        top = tl.maximum(m, tl.max(s, axis=0))
        p = tl.where(seen, tl.exp2((s - top) * factor), 0.0)
        decay = weight(m, top, factor)
        l = l * decay + tl.sum(p, axis=0)
        acc = acc * decay + tl.sum(v_tile * p[:, None], axis=0)
        m = top
    # adding +0 leaves no negative zero, which masked keys could flip
    tl.store(out + at, acc / l + 0.0, mask=d < D)


def attend_rows(call: Call, config: Config) -> torch.Tensor:
    """Run `rows` on a checked call."""
    out, (stride, scale_stride) = call.empty_out(), call.strides
    if call.n_q:
        _attn_rows_kernel[(call.n_q * call.n_head,)](
            call.q,
            *planes(call.k),
            *planes(call.v),
            call.window_or_positions,
            call.positions,
            out,
            call.n_head,
            call.n_head_kv,
            call.width,
            call.factor,
            D=call.head_dim,
            BLOCK_D=triton.next_power_of_2(call.head_dim),
            STRIDE=stride,
            SCALES=scale_stride,
            BLOCK_N=config["block_n"],
            FMT=FORMATS[call.fmt],
            MODE=call.mode_value,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return out
