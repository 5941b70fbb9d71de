"""Rotation of heads by RoPE: shared by `rope`, `qkv_rope_store` and `map_q8_0_cells`."""

import triton
import triton.language as tl

from minfer.ops import INTERLEAVED as INTERLEAVED_PAIRS


@triton.jit
def partner_of(dim, HALF: tl.constexpr):
    """The dimension that `turn_halves` turns together with `dim`; past 2 * HALF itself."""
    other = tl.where(dim < HALF, dim + HALF, dim - HALF)
    return tl.where(dim < 2 * HALF, other, dim)


@triton.jit
def turn_halves(x, partner, cos, sin, HALF: tl.constexpr):
    """Heads x f32 [n, d] turned by a row cos, sin [HALF] of the tables: pairs (i, i + HALF).

    partner: the values at `partner_of` each dimension. A pair (a, b) becomes
    (a * c - b * s, b * c + a * s), every operation rounded by itself.
    """
    dim = tl.broadcast_to(tl.arange(0, x.shape[1])[None, :], x.shape)
    turns, first = dim < 2 * HALF, dim < HALF
    pair = tl.where(first, dim, dim - HALF)
    c = tl.load(cos + pair, mask=turns, other=1.0)
    s = tl.load(sin + pair, mask=turns, other=0.0)
    part = partner * s
    return tl.where(turns, x * c + tl.where(first, -part, part), x)


@triton.jit
def turn_interleaved(x, cos, sin, HALF: tl.constexpr):
    """As `turn_halves`, with pairs (2i, 2i + 1)."""
    n: tl.constexpr = x.shape[0]
    n_pairs: tl.constexpr = x.shape[1] // 2
    a, b = tl.split(tl.reshape(x, [n, n_pairs, 2]))
    pair = tl.broadcast_to(tl.arange(0, n_pairs)[None, :], [n, n_pairs])
    turns = pair < HALF
    c = tl.load(cos + pair, mask=turns, other=1.0)
    s = tl.load(sin + pair, mask=turns, other=0.0)
    first = tl.where(turns, a * c - b * s, a)
    second = tl.where(turns, b * c + a * s, b)
    return tl.reshape(tl.join(first, second), x.shape)


@triton.jit
def load_turned(
    x,  # float32 heads [n_head, D] of one row
    head,  # int32 [n]
    mask,  # [n, BLOCK_D]
    position,
    cos,  # float32 [n_pos, HALF]
    sin,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Heads [n, BLOCK_D] turned by the angles of a position; 0 where not `mask`."""
    dim = tl.arange(0, BLOCK_D)[None, :]
    start, row = head[:, None] * D, position.to(tl.int64) * HALF
    own = tl.load(x + start + dim, mask=mask, other=0.0)
    if INTERLEAVED:
        return turn_interleaved(own, cos + row, sin + row, HALF)
    partner = tl.load(x + start + partner_of(dim, HALF), mask=mask, other=0.0)
    return turn_halves(own, partner, cos + row, sin + row, HALF)


def interleaved(pairing: str) -> bool:
    """Whether pairs are dimensions 2i and 2i + 1."""
    return pairing == INTERLEAVED_PAIRS
