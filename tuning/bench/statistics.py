"""What samples say: medians, ratios of the same rounds, ties, and times that cannot be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tuning.bench.cases import Work

SLACK = 0.9  # rates are measured too: a time this much below its floor is no measurement

Samples = Sequence[float]


class Summary(NamedTuple):
    """Median and quartiles of n samples."""

    median: float
    low: float
    high: float
    n: int


def summarize(samples: Samples) -> Summary:
    """Of at least one sample."""
    low, median, high = (float(x) for x in np.percentile(samples, (25, 50, 75)))
    return Summary(median, low, high, len(samples))


def ratios(samples: Samples, ours: Samples) -> Summary:
    """samples over ours, round by round: what slows a whole round drops out."""
    return summarize([a / b for a, b in zip(samples, ours, strict=True)])


def noise(control: Samples, ours: Samples) -> float:
    """How far the quartiles of control over ours lie from 1: two runs of the same thing."""
    paired = ratios(control, ours)
    return max(abs(paired.low - 1), abs(paired.high - 1), abs(paired.median - 1))


def tied(ratio: float, noise: float) -> bool:
    """Whether a ratio is one that two runs of the same thing show too."""
    return 1 / (1 + noise) <= ratio <= 1 + noise


def floor(work: Work | None, rates: Mapping[str, float]) -> float | None:
    """Seconds below which no call can be: bytes and products at the measured rates.

    None where neither is counted.
    """
    if work is None:
        return None
    products = work.fma / rates["fma"] + work.int8 / rates["int8"]
    return max(work.bytes / rates["read"], products) or None


def peer_floor(work: Work | None, rates: Mapping[str, float]) -> float | None:
    """The floor of a peer: it may multiply in a faster arithmetic, but reads what we read.

    On a GPU, whose rates have bf16, that is the faster one of its matrix products.
    """
    if work is None:
        return None
    if "bf16" in rates:
        fastest = max(rates["fma"], rates["bf16"])
        return floor(work, {**rates, "fma": fastest, "int8": fastest})
    return work.bytes / rates["read"]


def speed(work: Work, seconds: float) -> dict[str, float]:
    """Bytes a second where bytes are counted, else floating-point operations a second."""
    if work.bytes:
        return {"bytes_per_second": work.bytes / seconds}
    products = work.fma + work.int8
    return {"flops": 2 * products / seconds} if products else {}


def impossible(seconds: float, floor: float | None) -> bool:
    """Whether a time beats its floor by more than the rates may be wrong."""
    return floor is not None and seconds < SLACK * floor


def rotated(n: int, turn: int) -> list[int]:
    """The order of n contestants in round `turn`: each begins in turn, odd rounds run back."""
    order = [(turn // 2 + i) % n for i in range(n)]
    return order[::-1] if turn % 2 else order
