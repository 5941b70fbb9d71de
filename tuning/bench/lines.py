"""A report of a GPU as it grows: a table in Markdown, row by row, and notes in the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tuning.bench.contestants import CONTROL, OURS
from tuning.bench.protocol import NO_GRAPH
from tuning.bench.table import TITLES, notes, ratio_of, time_of

Row = Mapping[str, Any]


class Printer:
    """Prints the rows of a report that were not there when it was last shown."""

    def __init__(self) -> None:
        self.shown, self.what = 0, ""

    def show(self, report: Mapping[str, Any]) -> None:
        """The new rows, below a head where another kind of case begins."""
        for row in report["rows"][self.shown :]:
            peers = peers_of(report, row["what"])
            if row["what"] != self.what:
                self.what = row["what"]
                print("\n".join(["", *head(report, self.what, peers)]))
            print(line(row, peers), flush=True)
        self.shown = len(report["rows"])

    def end(self, report: Mapping[str, Any]) -> None:
        """What is left of the whole report."""
        self.show(report)
        print("\n".join(["", rates(report), *notes(report), *not_replayed(report)]), flush=True)


def peers_of(report: Mapping[str, Any], what: str) -> list[str]:
    """Columns beside ours and its control that are there and have such cases."""
    return [
        name
        for name, column in report["columns"].items()
        if name not in (OURS, CONTROL) and what in column["suites"]
    ]


def rates(report: Mapping[str, Any]) -> str:
    """What was measured as the most that the machine can do."""
    rates, gpu = report["rates"], report["columns"][OURS]["versions"].get("gpu", "no GPU")
    return (
        f"{gpu}: copy {rates['read'] / 1e9:.0f} GB/s; products of {rates['fma'] * 2e-12:.0f} (f16) "
        f"and {rates['bf16'] * 2e-12:.0f} (bf16) TFLOP/s"
    )


def head(report: Mapping[str, Any], what: str, peers: Sequence[str]) -> list[str]:
    """Title, rates so far, and the head of the table."""
    names = ["case", "format", "ours", "speed", "of floor", "A/A noise", "/ f16"]
    names += [f"{name} / ours" for name in peers]
    return [
        f"{TITLES[what]}: median (quartiles) of one call. {rates(report)}",
        "",
        f"| {' | '.join(names)} |",
        "|" + "---|" * len(names),
    ]


def line(row: Row, peers: Sequence[str]) -> str:
    """One row of the table."""
    ours, noise, of_f16 = row["columns"].get(OURS, {}), row["noise"], row["of_f16"]
    shown = [
        row["label"],
        row["format"],
        time_of(ours, row),
        speed_of(ours),
        f"{ours['of_floor']:.0%}" if "of_floor" in ours else "",
        "" if noise is None else f"{noise:.1%}",
        "" if of_f16 is None else f"{of_f16['median']:.2f}x",
    ]
    shown += [of_peer(row["columns"].get(name, {}), row) for name in peers]
    return f"| {' | '.join(shown)} |"


def speed_of(cell: Row) -> str:
    """`3854 GB/s` or `640 TFLOP/s`."""
    if "bytes_per_second" in cell:
        return f"{cell['bytes_per_second'] / 1e9:.0f} GB/s"
    return f"{cell['flops'] / 1e12:.0f} TFLOP/s" if "flops" in cell else ""


def of_peer(cell: Row, row: Row) -> str:
    """How many times our time, or why not; the format where it is not the row's."""
    if cell.get("status") != "timed":
        return time_of(cell, row)
    ratio = ratio_of(cell) or time_of(cell, row)
    return ratio if cell["format"] == row["format"] else f"{cell['format']} {ratio}"


def not_replayed(report: Mapping[str, Any]) -> list[str]:
    """Contestants whose launches are part of their times."""
    return [
        f"{name}, {row['label']} {row['format']}: {cell['note']}"
        for row in report["rows"]
        for name, cell in row["columns"].items()
        if NO_GRAPH in cell["note"]
    ]
