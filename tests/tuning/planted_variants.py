"""Variants of `attn_window` with a fault each, for `--add`: what a sweep must not let through."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import numpy as np

from minfer import variant
from minfer.kernels_numba._query import ROUNDING
from minfer.kernels_numba.attn_window import attn_window_split
from minfer.ops import Tunable

CONFIG = {"threads": 1, "ahead": 4, "heads": 4, "draw": 1, "span": 16}
_kept: dict[Any, Any] = {}


def _right(q, k, v, positions, span, tiles, **scalars):
    return attn_window_split(q, k, v, positions, span, tiles, **scalars, config=CONFIG)


@variant(query=ROUNDING)
def attn_window_shifted(q, k, v, positions, span, tiles, *, fmt, scale, width, config):
    """Every query sees one cell less than it should, where it sees more than one."""
    if span is not None:
        span = np.stack([span[:, 0], np.maximum(span[:, 1] - 1, span[:, 0] + 1)], axis=1)
        positions = np.minimum(positions, span[:, 1] - span[:, 0] - 1)
    else:
        positions = np.maximum(positions - 1, 0)
    return _right(q, k, v, positions, span, tiles, fmt=fmt, scale=scale, width=width)


@variant(query=ROUNDING)
def attn_window_half(q, k, v, positions, span, tiles, *, fmt, scale, width, config):
    """Writes the first half of the heads only."""
    right = _right(q, k, v, positions, span, tiles, fmt=fmt, scale=scale, width=width)
    out, half = np.empty_like(right), right.shape[1] // 2
    out[:, :half] = right[:, :half]
    return out


@variant(query=ROUNDING)
def attn_window_cached(q, k, v, positions, span, tiles, *, fmt, scale, width, config):
    """Answers what it answered when it last saw these arrays, without a look into them."""
    key = (q.ctypes.data, k.arrays[0].ctypes.data, positions.tobytes(), width)
    if key not in _kept:
        _kept[key] = _right(q, k, v, positions, span, tiles, fmt=fmt, scale=scale, width=width)
    return _kept[key].copy()


@variant(query=ROUNDING)
def attn_window_nothing(q, k, v, positions, span, tiles, *, fmt, scale, width, config):
    """Writes nothing."""
    return np.empty_like(q)


@variant(query=ROUNDING)
def attn_window_memo(q, k, v, positions, span, tiles, *, fmt, scale, width, config):
    """Right, and too fast: it knows the two contents that a case has."""
    key = (k.arrays[0].shape, float(q[0, 0, 0]), float(q[-1, -1, -1]), width, len(positions))
    if key not in _kept:
        _kept[key] = _right(q, k, v, positions, span, tiles, fmt=fmt, scale=scale, width=width)
    return _kept[key]


@variant(query=ROUNDING)
def attn_window_killed(q, k, v, positions, span, tiles, *, fmt, scale, width, config):
    """Takes its process along."""
    os.kill(os.getpid(), signal.SIGKILL)


@variant(query=ROUNDING)
def attn_window_hung(q, k, v, positions, span, tiles, *, fmt, scale, width, config):
    """Does not come back."""
    time.sleep(3600)


@variant(query=ROUNDING)
def attn_window_raising(q, k, v, positions, span, tiles, *, fmt, scale, width, config):
    """Has a bug that Python finds."""
    return q[0].missing


@variant(query=ROUNDING)
def attn_window_uncompiled(q, k, v, positions, span, tiles, *, fmt, scale, width, config):
    """Has a kernel that does not compile."""
    import numba

    return numba.njit(lambda x: x.missing)(q)


@variant(query=ROUNDING)
def attn_window_late(q, k, v, positions, span, tiles, *, fmt, scale, width, config):
    """Is right when it is looked at, and wrong in the hundredth call."""
    _kept["late"] = _kept.get("late", 0) + 1
    right = _right(q, k, v, positions, span, tiles, fmt=fmt, scale=scale, width=width)
    return right if _kept["late"] < 100 else right * np.float32(1.1)


@variant(query=ROUNDING, space={"step": Tunable(1, (1, 2))})
def attn_window_bent(q, k, v, positions, span, tiles, *, fmt, scale, width, config):
    """Calls a tunable free that changes the last bit."""
    right = _right(q, k, v, positions, span, tiles, fmt=fmt, scale=scale, width=width)
    return right if config["step"] == 1 else np.nextafter(right, np.float32(np.inf))


@variant(query=ROUNDING, space={"step": Tunable(1, (2,))})
def attn_window_lame(q, k, v, positions, span, tiles, *, fmt, scale, width, config):
    """Does not run with its own default."""
    if config["step"] == 1:
        raise MemoryError("too little shared memory")
    return _right(q, k, v, positions, span, tiles, fmt=fmt, scale=scale, width=width)


@variant(query=ROUNDING)
def attn_window_reused(q, k, v, positions, span, tiles, *, fmt, scale, width, config):
    """Gives one output array to all calls of a shape."""
    out = _kept.setdefault(("out", q.shape), np.empty_like(q))
    out[...] = _right(q, k, v, positions, span, tiles, fmt=fmt, scale=scale, width=width)
    return out


@variant(query=ROUNDING)
def attn_window_restless(q, k, v, positions, span, tiles, *, fmt, scale, width, config):
    """Leaves other queries than it was given."""
    right = _right(q, k, v, positions, span, tiles, fmt=fmt, scale=scale, width=width)
    q *= 2
    return right


@variant(query=ROUNDING)
def attn_window_gnawing(q, k, v, positions, span, tiles, *, fmt, scale, width, config):
    """Leaves other cells than it was given, in large calls."""
    right = _right(q, k, v, positions, span, tiles, fmt=fmt, scale=scale, width=width)
    if span is None and len(k.arrays[0]) == 300:
        k.arrays[0][:] = 0
    return right


@variant(query=ROUNDING)
def attn_window_deferred(q, k, v, positions, span, tiles, *, fmt, scale, width, config):
    """Returns before it has an answer."""
    right = _right(q, k, v, positions, span, tiles, fmt=fmt, scale=scale, width=width)
    out = np.zeros_like(right)
    threading.Timer(0.001, np.copyto, (out, right)).start()
    return out


@variant(query=ROUNDING)
def attn_window_spinning(q, k, v, positions, span, tiles, *, fmt, scale, width, config):
    """Right, with a thread that goes on."""
    if "spin" not in _kept:
        _kept["spin"] = threading.Timer(600, print)
        _kept["spin"].start()
    return _right(q, k, v, positions, span, tiles, fmt=fmt, scale=scale, width=width)


@variant(query=ROUNDING)
def attn_window_hasty(q, k, v, positions, span, tiles, *, fmt, scale, width, config):
    """Right, and it stops the clock."""
    time.perf_counter = lambda: 0.0
    return _right(q, k, v, positions, span, tiles, fmt=fmt, scale=scale, width=width)
