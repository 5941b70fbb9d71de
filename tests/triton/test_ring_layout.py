"""`ring` run in numpy against attention in float64: indices, masks, tree, and splits."""

from __future__ import annotations

import numpy as np
import pytest
from gluon_in_numpy import Pointer, kernel

from minfer.kernels_triton._ring import _attn_ring_kernel
from minfer.window import PARTITION

HEADS_KV = 2


def quantized(rng, n_cells, d):
    """Codes int8 [n_cells, n], scales f16 [n_cells, n / 32], and what they decode to."""
    x = rng.standard_normal((n_cells, HEADS_KV * d // 32, 32)).astype(np.float32)
    scales = (abs(x).max(2) / 127).astype(np.float16)
    codes = np.rint(x / scales[..., None]).clip(-127, 127).astype(np.int8)
    decoded = codes * scales[..., None].astype(np.float32)
    return codes.reshape(n_cells, -1), scales, decoded.reshape(n_cells, HEADS_KV, d)


def run(q, k, v, positions, window, width, n_split, W=2, BN=16, STAGES=3):
    """state [n_q, n_head, rows, 2] and acc [n_q, n_head, rows, d] of every program."""
    n_q, n_head, d = q.shape
    group, rows = n_head // HEADS_KV, 64
    state = np.full((n_q, n_head, rows, 2), np.nan, np.float32)
    acc = np.full((n_q, n_head, rows, d), np.nan, np.float32)
    scale = np.int64 if d == 128 else np.int32
    mode = {None: 0, 2: 1, 3: 2}[window if window is None else window.ndim]
    pointers = [Pointer(q.ravel())]
    for codes, scales, _ in (k, v):
        pointers += [Pointer(codes.view(np.int32).ravel()), Pointer(scales.view(scale).ravel())]
    pointers.append(Pointer(positions))
    pointers.append(Pointer((positions if window is None else window).ravel()))
    pointers += [Pointer(state.reshape(-1)), Pointer(acc.reshape(-1))]
    factor = np.float32(np.log2(np.e) / np.sqrt(d))
    for program in range(n_q * n_split * HEADS_KV * -(-group // 4)):
        run_program = kernel(_attn_ring_kernel, program, W)
        sizes = (HEADS_KV, group, d, mode, W, BN, STAGES)
        run_program(*pointers, width, factor, n_split, rows, *sizes)
    return state, acc


def join(parts):
    """One (m, l, acc) of a list over aligned groups, None where a partition is absent."""
    while len(parts) > 1:
        parts += [None] * (len(parts) % 2)
        parts = [both(*parts[i : i + 2]) for i in range(0, len(parts), 2)]
    return parts[0]


def both(a, b):
    if a is None or b is None:
        return b if a is None else a
    m = max(a[0], b[0])
    wa, wb = np.exp2(a[0] - m), np.exp2(b[0] - m)
    return m, a[1] * wa + b[1] * wb, a[2] * wa + b[2] * wb


def combine(state, acc, firsts, positions, streams):
    """What `combine` makes of the partials."""
    out = np.empty(acc.shape[:2] + acc.shape[3:], np.float32)
    for i, (first, pos) in enumerate(zip(firsts, positions, strict=True)):
        keys = PARTITION
        while pos // keys - first // keys >= streams:
            keys *= 2
        lo, n = first // keys, pos // keys - first // keys + 1
        assert np.isnan(state[i, :, n:streams]).all()  # nobody else wrote
        for head in range(acc.shape[1]):
            rows = [(*state[i, head, r], acc[i, head, r]) for r in range(n)]
            _, total, mixed = join([None] * lo + rows)
            out[i, head] = mixed / total
    return out


def expected(q, k, v, cells):
    """Attention in float64, per query over its cells."""
    n_q, n_head, d = q.shape
    out = np.empty(q.shape)
    for i in range(n_q):
        keys, values = (np.repeat(r[2][cells[i]], n_head // HEADS_KV, 1) for r in (k, v))
        s = np.einsum("hd,nhd->hn", q[i].astype(float), keys) / np.sqrt(d)
        p = np.exp(s - s.max(1, keepdims=True))
        out[i] = np.einsum("hn,nhd->hd", p / p.sum(1, keepdims=True), values)
    return out


def windows(mode, width):
    """Positions, window input, first visible index and cells of two queries."""
    positions = np.array([700, 1043], np.int32)
    if mode == "causal":
        window, cells = None, [np.arange(p + 1) for p in positions]
    elif mode == "span":
        window = np.array([[5, 706], [30, 1000]], np.int32)
        cells = [np.arange(*row) for row in window]
    else:
        window = np.zeros((2, 4, 2), np.int32)
        window[0, :3] = [[300, 257], [4, 100], [900, 344]]
        window[1, :4] = [[7, 3], [600, 254], [100, 460], [900, 327]]
        cells = [np.concatenate([np.arange(c, c + n) for c, n in row]) for row in window]
    cells = [c[-width:] if width else c for c in cells]
    firsts = [p + 1 - len(c) for p, c in zip(positions, cells, strict=True)]
    return positions, window, firsts, cells


@pytest.mark.parametrize(
    ("d", "group", "mode", "width"),
    [
        (128, 4, "causal", 0),
        (128, 1, "span", 0),
        (128, 6, "runs", 0),
        (64, 3, "causal", 300),
        (64, 4, "runs", 0),
        (64, 2, "span", 20),
    ],
)
def test_attention(d, group, mode, width):
    rng = np.random.default_rng(d + group)
    positions, window, firsts, cells = windows(mode, width)
    k, v = quantized(rng, 1300, d), quantized(rng, 1300, d)
    unseen = np.setdiff1d(np.arange(1300), np.concatenate(cells))
    k[1][unseen] = v[1][unseen] = np.nan  # NaN scales: a cell that is read by mistake shows
    q = rng.standard_normal((2, HEADS_KV * group, d)).astype(np.float32)
    if group == 4:
        q[0, 1] = 0
    outs = []
    for n_split, W, stages in ((1, 1, 3), (1, 2, 4), (1, 8, 2), (5, 2, 3)):
        state, acc = run(q, k, v, positions, window, width, n_split, W, STAGES=stages)
        outs.append(combine(state, acc, firsts, positions, W * n_split))
    assert all(np.array_equal(out, outs[0]) for out in outs)
    assert np.abs(outs[0] - expected(q, k, v, cells)).max() < 2e-3


def test_poison_shows():
    rng = np.random.default_rng(0)
    positions, q = np.array([90], np.int32), rng.standard_normal((1, 4, 64)).astype(np.float32)
    k, v = quantized(rng, 91, 64), quantized(rng, 91, 64)
    for region, row in ((k, slice(None)), (v, slice(30, 31))):
        kept = region[1].copy()
        region[1][row, 1] = np.nan  # second block of KV head 0
        state, acc = run(q, k, v, positions, None, 0, 1)
        out = combine(state, acc, [0], positions, 2)[0]
        seen = np.isnan(out[:2])
        assert seen.all() if region is k else seen[:, 32:].all() and not seen[:, :32].any()
        assert np.isfinite(out[2:]).all()
        region[1][...] = kept
