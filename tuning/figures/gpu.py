"""The picture `gpu`: attention beside its peers, from a report of `bench --device cuda --out`.

Bars are medians, lines on them quartiles, dotted lines what a copy or a product of matrices reached
in the same run.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from minfer.errors import Refusal
from tuning.bench.contestants import CONTROL, OTHERWISE, OURS

LEFT_OUT = (CONTROL, *OTHERWISE)


class Bar(NamedTuple):
    """A speed: that of the median time, and of the quartiles."""

    median: float
    low: float
    high: float


class Panel(NamedTuple):
    """One kind of case. speed: its key in a report, in `unit`s of `by`. rate, factor: the most."""

    kind: str
    speed: str
    unit: str
    by: float
    rate: str
    factor: float


PANELS = (
    Panel("decode", "bytes_per_second", "GB/s of K and V", 1e9, "read", 1e-9),
    Panel("prefill", "flops", "TFLOP/s", 1e12, "fma", 2e-12),
)
Rows = dict[str, dict[str, Bar]]


def measure() -> dict[str, Any]:
    """Refuses: a GPU is measured by the benchmark."""
    raise Refusal(
        "0.1",
        "gpu is drawn from a report: python -m tuning bench --device cuda --what attn --peers "
        "--out FILE, then python -m tuning figure gpu --from FILE",
    )


def bars(report: Mapping[str, Any], panel: Panel) -> Rows:
    """Every contestant by row: ours in each format, peers beside our f16 alone."""
    found: Rows = {}
    for row in report["rows"]:
        if row["what"] != "batch" or not row["label"].startswith(panel.kind):
            continue
        of_row = found.setdefault(row["label"].removeprefix(f"{panel.kind} "), {})
        for name, cell in row["columns"].items():
            taken = name == OURS or (row["format"] == "f16" and name not in LEFT_OUT)
            if taken and cell["status"] == "timed":
                seconds = cell["seconds"]
                work = cell[panel.speed] / panel.by * seconds["median"]
                bar = Bar(*(work / seconds[key] for key in ("median", "high", "low")))
                of_row[f"{name} {row['format']}" if name == OURS else name] = bar
    return found


def draw(report: Mapping[str, Any], path: Path) -> None:
    """The picture, as PNG: a panel of decode and one of prefill."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import patches, pyplot

    shown = [bars(report, panel) for panel in PANELS]
    names = dict.fromkeys(name for rows in shown for of_row in rows.values() for name in of_row)
    ordered = sorted(names, key=lambda name: not name.startswith(OURS))
    figure, panels = pyplot.subplots(2, 1, figsize=(9, 8), dpi=130)
    for axes, panel, rows in zip(panels, PANELS, shown, strict=True):
        draw_panel(axes, rows, {name: f"C{i}" for i, name in enumerate(ordered)})
        axes.axhline(report["rates"][panel.rate] * panel.factor, color="black", ls=":", lw=1)
        axes.set(ylabel=panel.unit, title=f"{panel.kind}: sequences x cells, heads, head_dim")
        axes.grid(axis="y", alpha=0.3)
    handles = [patches.Patch(color=f"C{i}") for i in range(len(ordered))]
    figure.legend(handles, ordered, fontsize=8, ncols=8, loc="lower center")
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def draw_panel(axes: Any, rows: Rows, colours: Mapping[str, str]) -> None:
    """Groups of bars, a group for each row. colours: of all names, in their order."""
    names = [name for name in colours if any(name in of_row for of_row in rows.values())]
    width = 0.85 / max(1, len(names))
    for i, name in enumerate(names):
        there = [(group, of[name]) for group, of in enumerate(rows.values()) if name in of]
        places = [group + (i + 0.5) * width - 0.425 for group, _ in there]
        heights = [bar.median for _, bar in there]
        spread = [
            [bar.median - bar.low for _, bar in there],
            [bar.high - bar.median for _, bar in there],
        ]
        axes.bar(places, heights, width, yerr=spread, color=colours[name], error_kw={"lw": 0.8})
    axes.set_xticks(range(len(rows)), [label.replace(" ", "\n", 1) for label in rows], fontsize=8)


def lines(report: Mapping[str, Any]) -> list[str]:
    """The bars as text."""
    return [
        f"{panel.kind} {label}: {name} {bar.median:.0f} {panel.unit}"
        for panel in PANELS
        for label, of_row in bars(report, panel).items()
        for name, bar in of_row.items()
    ]
