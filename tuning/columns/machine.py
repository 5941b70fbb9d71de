"""What the machine can do: rates that no kernel exceeds, measured with loops of our emitter."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from minfer.format import Bytes
from minfer.kernels_numba._emit import LANES, VF, VI, Emitter
from minfer.kernels_numba._ir import address, intrinsic_of
from minfer.kernels_numba._jit import kernel
from minfer.kernels_numba._workers import Worker, read, run, share

CHAINS = 12  # independent sums, more than latency times throughput of any core
STEPS = 500_000
LINE = 64
PAGE_LINES = 64
TRIALS = 15


def _emit_read(e: Emitter, start: Any, pages: Any, out: Any) -> None:
    """Add up every line of `pages` pages of 64 lines from start on."""
    sums = [e.variable(e.const(VI, 0)) for _ in range(8)]
    with e.loop(pages) as page:
        base = e.add(start, e.mul(page, LINE * PAGE_LINES))
        for line in range(PAGE_LINES):
            e.prefetch(base, LINE * (line + 2 * PAGE_LINES))
            slot = sums[line % len(sums)]
            e.set(slot, e.builder.add(e.get(slot), e.load(VI, base, LINE * line)))
    for i, slot in enumerate(sums):
        e.store(e.get(slot), out, LINE * i)


def _emit_fma(e: Emitter, steps: Any, out: Any) -> None:
    """Chains of x = x * a + b on 16 lanes."""
    sums = [e.variable(e.const(VF, float(i))) for i in range(CHAINS)]
    a, b = e.load(VF, out, 0), e.load(VF, out, LINE)
    with e.loop(steps):
        for slot in sums:
            e.set(slot, e.fma(e.get(slot), a, b))
    for i, slot in enumerate(sums):
        e.store(e.get(slot), out, LINE * i)


def _emit_dot(e: Emitter, steps: Any, out: Any) -> None:
    """Chains of byte products on 16 lanes of four."""
    sums = [e.variable(e.const(VI, i)) for i in range(CHAINS)]
    a, b = e.load(VI, out, 0), e.load(VI, out, LINE)
    with e.loop(steps):
        for slot in sums:
            e.set(slot, e.dot_u8_s8(e.get(slot), a, b))
    for i, slot in enumerate(sums):
        e.store(e.get(slot), out, LINE * i)


_read = intrinsic_of("ppp:v", _emit_read)
_fma = intrinsic_of("pp:v", _emit_fma)
_dot = intrinsic_of("pp:v", _emit_dot)


@Worker
@kernel
def _read_kernel(t: Any, n_threads: Any, pointer: Any) -> int:
    data, out = read(pointer)
    begin, end = share(t, n_threads, data.shape[0])
    _read(address(data[begin]), end - begin, address(out[t]))
    return 0


@Worker
@kernel
def _fma_kernel(t: Any, n_threads: Any, pointer: Any) -> int:
    out, steps = read(pointer)
    _fma(steps, address(out[t]))
    return 0


@Worker
@kernel
def _dot_kernel(t: Any, n_threads: Any, pointer: Any) -> int:
    out, steps = read(pointer)
    _dot(steps, address(out[t]))
    return 0


@lru_cache(maxsize=1)
def _pages(n_bytes: int) -> Bytes:
    """Memory to read, every page of it touched, and two pages that are only prefetched."""
    return np.ones((n_bytes // (LINE * PAGE_LINES) + 2, LINE * PAGE_LINES), np.uint8)


def rates(threads: int, read_bytes: int, trials: int = TRIALS) -> dict[str, float]:
    """Bytes read, f32 and int8 multiply-adds a second, on `threads` threads.

    read_bytes: size of the memory that is read, many times the last-level cache. trials: of each.
    """
    data = _pages(read_bytes)
    out = np.ones((threads, CHAINS, LANES), np.float32)
    whole = data[:-2]
    products = threads * STEPS * CHAINS * LANES
    args = (out, STEPS)
    return {
        "read": whole.nbytes / best(lambda: run(threads, _read_kernel, None, (whole, out)), trials),
        "fma": products / best(lambda: run(threads, _fma_kernel, None, args), trials),
        "int8": 4 * products / best(lambda: run(threads, _dot_kernel, None, args), trials),
    }


def best(call: Callable[[], object], trials: int) -> float:
    """Seconds of the fastest of a few calls: a limit, not a typical time."""
    call()
    seconds = []
    for _ in range(trials):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
