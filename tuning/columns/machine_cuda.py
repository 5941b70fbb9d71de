"""What the GPU can do: rates that no kernel exceeds, measured with torch's own copy and product."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from tuning.columns.replay import DEVICE, events

SIZE = 8192 if DEVICE == "cuda" else 64  # of square matrices
TRIALS = 15


def rates(read_bytes: int) -> dict[str, float]:
    """Bytes and multiply-adds a second.

    read: of a device copy, bytes read and bytes written. fma: of a product of f16 matrices; bf16:
    of bf16 ones. int8: that of f16, which is what q8_0 values are decoded to.
    """
    source = torch.ones(read_bytes // 4, device=DEVICE)
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / best(partial(target.copy_, source))
    products = {}
    for name, dtype in (("fma", torch.float16), ("bf16", torch.bfloat16)):
        a, b = (torch.randn(SIZE, SIZE, device=DEVICE).to(dtype) for _ in range(2))
        products[name] = SIZE**3 / best(partial(torch.matmul, a, b))
    return {"read": copied, **products, "int8": products["fma"]}


def best(call: Callable[[], Any]) -> float:
    """Seconds of the fastest of a few calls: a limit, not a typical time."""
    call()
    if DEVICE == "cpu":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    marks = events(TRIALS + 1)
    for mark in marks[:-1]:
        mark.record()
        call()
    marks[-1].record()
    marks[-1].synchronize()
    return float(min(a.elapsed_time(b) for a, b in pairwise(marks))) / 1e3
