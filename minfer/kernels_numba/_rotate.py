"""Rotation of one row of heads by RoPE: shared by `rope` and `qkv_rope_store`."""

from __future__ import annotations

from typing import Any

from minfer.format import Floats, Int32
from minfer.kernels_numba._arguments import first_outside
from minfer.kernels_numba._emit import F32, Emitter
from minfer.kernels_numba._ir import address, intrinsic_of
from minfer.kernels_numba._jit import kernel
from minfer.ops import INTERLEAVED, arguments, check_pairing


def _rotated(e: Emitter, a: Any, b: Any, c: Any, s: Any) -> tuple[Any, Any]:
    """(a * c - b * s, b * c + a * s), every operation rounded by itself."""
    build = e.builder
    first = build.fsub(build.fmul(a, c), build.fmul(b, s))
    return first, build.fadd(build.fmul(b, c), build.fmul(a, s))


def _emit_half(e: Emitter, x: Any, cos: Any, sin: Any, half: Any, out: Any) -> None:
    """Pairs (i, i + half), sixteen at a time."""
    gap = e.mul(half, 4)
    for offset, load, store in e.strips(half):
        a, b = load(x, offset), load(e.add(x, gap), offset)
        first, second = _rotated(e, a, b, load(cos, offset), load(sin, offset))
        store(first, out, offset)
        store(second, e.add(out, gap), offset)


def _emit_interleaved(e: Emitter, x: Any, cos: Any, sin: Any, half: Any, out: Any) -> None:
    """Pairs (2i, 2i + 1), one at a time."""
    with e.loop(half) as i:
        at, pair = e.mul(i, 4), e.mul(i, 8)
        a, b = e.load(F32, x, pair), e.load(F32, x, e.add(pair, 4))
        first, second = _rotated(e, a, b, e.load(F32, cos, at), e.load(F32, sin, at))
        e.store(first, out, pair)
        e.store(second, out, e.add(pair, 4))


def _emit_copy(e: Emitter, x: Any, n: Any, out: Any) -> None:
    for offset, load, store in e.strips(n):
        store(load(x, offset), out, offset)


_rotate_half = intrinsic_of("ppppp:v", _emit_half)
_rotate_interleaved = intrinsic_of("ppppp:v", _emit_interleaved)
_copy = intrinsic_of("ppp:v", _emit_copy)


@kernel
def rotate(heads: Any, cos: Any, sin: Any, interleaved: Any, out: Any) -> None:
    """heads f32 [n_head, d] rotated by cos, sin [n_rot / 2] into `out`; the rest is copied."""
    half = cos.size
    for head in range(heads.shape[0]):
        source, target = address(heads[head]), address(out[head])
        if interleaved:
            _rotate_interleaved(source, address(cos), address(sin), half, target)
        else:
            _rotate_half(source, address(cos), address(sin), half, target)
        rest = heads.shape[1] - 2 * half
        if rest > 0:
            _copy(source + 8 * half, rest, target + 8 * half)


def check_rope(x: Floats, positions: Int32, cos: Floats, sin: Floats, pairing: str) -> bool:
    """Refuse what does not fit; returns whether pairs are interleaved."""
    check_pairing(pairing)
    arguments.check_rope(x.shape, len(positions), cos.shape, sin.shape)
    bad = first_outside(positions, len(cos))
    if bad >= 0:
        arguments.refuse_position(positions[bad], bad, len(cos))
    return pairing == INTERLEAVED
