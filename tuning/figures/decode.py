"""The picture `decode`: one decode query over a growing cache, in three formats.

Every point is checked against the f32 kernel before it is timed, then all formats are timed in
interleaved rounds. Caches rotate over more bytes than the last-level cache holds, so that the
floor (bytes of the window over the measured read rate) is a fair one.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from minfer.device import cores
from minfer.format import KvFormat, Region, cell_bytes
from minfer.functional import attention
from minfer.window import Span
from tuning.columns import machine
from tuning.columns.regions import pairs

N_HEAD, N_HEAD_KV, HEAD_DIM = 32, 8, 128
CELLS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
ROTATE_BYTES = 128 << 20
ROUNDS = 15
TOLERANCE = {KvFormat.F32: 1e-5, KvFormat.F16: 2e-3, KvFormat.Q8_0: 3e-2}


def point(n: int) -> dict[str, dict[str, float]]:
    """Median and quartiles in ms of one query over n cells, for each format."""
    rng = np.random.default_rng(n)
    q = rng.standard_normal((1, N_HEAD, HEAD_DIM), dtype=np.float32)
    k, v = rng.standard_normal((2, n, N_HEAD_KV, HEAD_DIM), dtype=np.float32)
    span = Span(np.array([[0, n]], np.int32))
    sets: dict[KvFormat, list[tuple[Region, Region]]] = {}
    expected = None
    for fmt in KvFormat:
        size = 2 * n * cell_bytes(fmt, N_HEAD_KV * HEAD_DIM)
        sets[fmt] = pairs(fmt, k, v, max(1, ROTATE_BYTES // size))
        out = attention(q, *sets[fmt][0], span, kind="decode")
        expected = out if expected is None else expected
        assert np.abs(out - expected).max() < TOLERANCE[fmt], (fmt, n)
    samples: dict[KvFormat, list[float]] = {fmt: [] for fmt in KvFormat}
    for turn in range(ROUNDS):
        for fmt, regions in sets.items():
            inner = max(1, 8192 // n)
            chosen = [regions[(turn * inner + i) % len(regions)] for i in range(inner)]
            start = time.perf_counter()
            for pair in chosen:
                attention(q, *pair, span, kind="decode")
            samples[fmt].append((time.perf_counter() - start) / inner * 1e3)
    return {fmt.value: summary(values) for fmt, values in samples.items()}


def summary(values: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": middle, "low": low, "high": high}


def draw(report: dict[str, Any], path: Path) -> None:
    """The picture, as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 4.2), dpi=130)
    for fmt, colour in (("f32", "#c44e52"), ("f16", "#4c72b0"), ("q8_0", "#2e8b57")):
        points = [report["points"][str(n)][fmt] for n in CELLS]
        axes.plot(CELLS, [p["median"] for p in points], "o-", color=colour, label=fmt, ms=4)
        axes.fill_between(
            CELLS,
            [p["low"] for p in points],
            [p["high"] for p in points],
            color=colour,
            alpha=0.15,
            lw=0,
        )
        floor = [report["floors"][str(n)][fmt] for n in CELLS]
        axes.plot(CELLS, floor, ":", color=colour, lw=1)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="cells in the window",
        ylabel="ms a query",
        title=f"Decode attention, {N_HEAD}/{N_HEAD_KV} heads of {HEAD_DIM}, {report['threads']} "
        "threads (dotted: bytes / read rate)",
    )
    axes.set_xscale("log", base=2)
    axes.set_xticks(CELLS, [str(n) for n in CELLS])
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def measure() -> dict[str, Any]:
    """All points, and the floor of each at the read rate of this machine."""
    from tqdm import tqdm

    rate = machine.rates(cores(), 4 * ROTATE_BYTES)["read"]
    bytes_per_cell = {fmt.value: 2 * cell_bytes(fmt, N_HEAD_KV * HEAD_DIM) for fmt in KvFormat}
    return {
        "threads": cores(),
        "read_gb_per_second": rate / 1e9,
        "points": {str(n): point(n) for n in tqdm(CELLS, unit="size")},
        "floors": {
            str(n): {fmt: n * size / rate * 1e3 for fmt, size in bytes_per_cell.items()}
            for n in CELLS
        },
    }


def lines(report: dict[str, Any]) -> list[str]:
    """The report as text."""
    shown = [f"read rate {report['read_gb_per_second']:.1f} GB/s"]
    for n, formats in report["points"].items():
        row = "  ".join(
            f"{fmt} {one['median']:8.3f} ms "
            f"({report['floors'][n][fmt] / one['median']:4.0%} of the floor)"
            for fmt, one in formats.items()
        )
        shown.append(f"{n:>6} cells  {row}")
    return shown
