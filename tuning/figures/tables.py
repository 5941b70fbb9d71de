"""The picture `tables`: what an operation on the tables of a store costs beside many sequences.

Counts are checked before anything is timed and tables after every sample; all sizes are timed in
interleaved rounds. A compaction is divided by the number of sequences.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tuning.bench.statistics import summarize
from tuning.bench.store_cases import Tables
from tuning.bench.suites import TABLES
from tuning.columns.ours_tables import tables

ROUNDS = 15
CALLS = 1000  # at most; a sample takes as many as there are guests
AIM = 50.0  # microseconds: 20,000 operations a second
PER_SEQUENCE = ("defrag",)


def measure() -> dict[str, Any]:
    """Microseconds of a call by operation and number of sequences: median and quartiles."""
    from tqdm import tqdm

    subjects = {case.sequences: tables(case, {}) for case in TABLES}
    for n, subject in subjects.items():
        assert np.array_equal(*subject.values), n
    samples: dict[str, dict[int, list[float]]] = {
        name: {n: [] for n in subjects} for name in Tables.measures
    }
    for _ in tqdm(range(ROUNDS), unit="round"):
        for n, subject in subjects.items():
            for name in Tables.measures:
                per = n if name in PER_SEQUENCE else 1
                samples[name][n].append(subject.measures[name].sample(CALLS) * 1e6 / per)
    return {
        "points": {
            name: {str(n): summarize(values)._asdict() for n, values in by_size.items()}
            for name, by_size in samples.items()
        }
    }


def draw(report: dict[str, Any], path: Path) -> None:
    """The picture, as PNG; the dearest operation leads the legend."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 4.2), dpi=130)
    sizes = [case.sequences for case in TABLES]
    colour_of = pyplot.get_cmap("tab20")
    by_cost = sorted(report["points"].items(), key=lambda item: -item[1][str(sizes[-1])]["median"])
    for index, (name, points) in enumerate(by_cost):
        label = f"{name} / sequences" if name in PER_SEQUENCE else name
        medians, low, high = (
            [points[str(n)][key] for n in sizes] for key in ("median", "low", "high")
        )
        axes.plot(sizes, medians, "o-", color=colour_of(index), label=label, ms=4, lw=1.3)
        axes.fill_between(sizes, low, high, color=colour_of(index), alpha=0.15, lw=0)
    axes.axhline(AIM, color="black", ls=":", lw=1)
    axes.text(sizes[0], AIM * 1.06, "20,000 a second", fontsize=8)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="sequences in the store",
        ylabel="\u00b5s a call",
        title="Bookkeeping of the cell store, bytes left out",
    )
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def lines(report: dict[str, Any]) -> list[str]:
    """The report as text."""
    sizes = [str(case.sequences) for case in TABLES]
    shown = [f"{'us a call':16}" + "".join(f"{n:>12}" for n in sizes)]
    for name, points in report["points"].items():
        label = f"{name} / n" if name in PER_SEQUENCE else name
        shown.append(f"{label:16}" + "".join(f"{points[n]['median']:12.1f}" for n in sizes))
    return shown
