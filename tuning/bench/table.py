"""A report for people."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tuning.bench.contestants import CONTROL, OURS

TITLES = {
    "attn": "Attention",
    "batch": "Attention of a batch",
    "dense": "Products",
    "model": "Whole models",
    "session": "The cell store: a chat",
    "store": "The cell store: sharing, copying, moving",
    "file": "Session files",
    "tables": "The tables of the cell store",
}
WIDE = 180  # columns where the output is no terminal
UNITS = ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms"), (float("inf"), 1.0, "s"))


def show(report: Mapping[str, Any]) -> None:
    """Print the report on stdout."""
    console = Console(width=None if sys.stdout.isatty() else WIDE, highlight=False)
    env, rates = report["environment"], report["rates"]
    console.print(
        f"{env['cpu']}, {report['threads']} threads, minfer {env['minfer']} "
        f"{(env['commit'] or 'no commit')[:12]}; measured here: "
        f"read {rates['read'] / 1e9:.1f} GB/s, "
        f"f32 {rates['fma'] / 1e9:.1f} and int8 {rates['int8'] / 1e9:.0f} G multiply-adds/s"
    )
    for what in dict.fromkeys(row["what"] for row in report["rows"]):
        console.print(table(what, [row for row in report["rows"] if row["what"] == what]))
    for line in notes(report):
        console.print(Text(line))


def table(what: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """The rows of one suite."""
    peers = [
        name
        for name in dict.fromkeys(name for row in rows for name in row["columns"])
        if name not in (OURS, CONTROL)
    ]
    out = Table(
        title=f"{TITLES[what]}: median (quartiles) of one call",
        title_justify="left",
        box=SIMPLE_HEAD,
    )
    out.add_column("case")
    for name in ("format", "ours", "of floor", "A/A noise"):
        out.add_column(name, justify="right")
    for name in peers:
        out.add_column(name, justify="right")
        out.add_column(f"{name} / ours", justify="right")
    last = ""
    for row in rows:
        cells, ours = row["columns"], row["columns"].get(OURS, {})
        label = row["label"] + (" (cold)" if row["cold"] else "")
        shown = [label if label != last else "", row["format"], time_of(ours, row)]
        shown.append(f"{ours['of_floor']:.0%}" if "of_floor" in ours else "")
        shown.append("" if row["noise"] is None else f"{row['noise']:.1%}")
        for name in peers:
            shown += [time_of(cells.get(name, {}), row), ratio_of(cells.get(name, {}))]
        out.add_row(*shown)
        last = label
    return out


def time_of(cell: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    """`0.41 ms (0.40-0.43)`, or tokens a second, or why there is none."""
    if cell.get("status") != "timed":
        return {"absent": "-"}.get(cell.get("status", "absent"), str(cell.get("status")))
    seconds = cell["seconds"]
    median, low, high = (seconds[key] for key in ("median", "low", "high"))
    if row["tokens"]:
        rate, ends = row["tokens"] / median, (row["tokens"] / high, row["tokens"] / low)
        return f"{rate:.1f} tokens/s ({ends[0]:.1f}-{ends[1]:.1f})"
    factor, unit = next((f, u) for limit, f, u in UNITS if median < limit)
    shown = f"{median * factor:.3g} {unit} ({low * factor:.3g}-{high * factor:.3g})"
    if row["work"] and row["work"]["moved"]:
        shown += f", {row['work']['moved'] / median / 1e9:.1f} GB/s"
    return shown if cell["format"] == row["format"] else f"{cell['format']} {shown}"


def ratio_of(cell: Mapping[str, Any]) -> str:
    """`8.2x (8-8.4)`: how many times our time; `tie` where the control shows as much."""
    if "ratio" not in cell or cell["status"] != "timed":
        return ""
    ratio = cell["ratio"]
    shown = f"{ratio['median']:.3g}x ({ratio['low']:.3g}-{ratio['high']:.3g})"
    return shown + " tie" if cell["tie"] else shown


def notes(report: Mapping[str, Any]) -> list[str]:
    """Columns that are not there, contestants that failed, workers that do not sleep."""
    lines = []
    env = report["environment"]
    if env["load"] and env["load"][0] > env["cores"] / 2:
        lines.append(f"the machine was busy: load {env['load'][0]:.1f} on {env['cores']} cores")
    for name, column in report["columns"].items():
        if column["missing"]:
            lines.append(f"{name} is absent: {column['missing']}")
        elif 0 < report["settle_seconds"] < column["idle_cpu_seconds"]:
            lines.append(
                f"{name} used {column['idle_cpu_seconds'] * 1e3:.0f} ms of CPU time while it "
                f"waited, more than the {report['settle_seconds'] * 1e3:.0f} ms it is given"
            )
    for row in report["rows"]:
        for name, cell in row["columns"].items():
            if cell["status"] in ("failed", "impossible"):
                where = f"{row['label']} {row['format']}"
                lines.append(f"{name}, {where}: {cell['status']}: {cell.get('why', '')}")
    lines += [f"left out: {line}" for line in report["skipped"]]
    return list(dict.fromkeys(lines))
