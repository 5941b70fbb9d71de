"""The picture of questions: a row each, the search on the left and the finals on the right."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minfer import atomic
from tuning.report.contest import BEHIND, CHOSEN, CONTROL, TIED
from tuning.report.history import History
from tuning.report.panels import SLOWEST, Course, Panels, Rung, panels

WIDTH, DPI = 12.0, 100  # inches, dots an inch
LANE = 0.06  # of the height of the left panel, for what has no place on its axis
ROOM = 0.04  # of it, above and below the scores
WINDOW = (0.98, 1.02)  # ratios that are always shown, so that noise looks like noise
LABEL, VERDICT = 26, 62  # letters in a line
FAINT, FAILED = "0.45", "#b03030"
CASES = ("#7570b3", "#e7298a", "#1b9e77", "#e6ab02", "#a6761d", "#66a61e")
SLOW = "slow"
SMALL = 8.5
FINE = (0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 4)
COARSE = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 4)
MARKS = {  # of a contender in a case: marker, size, filled, and its name in the legend
    CHOSEN: ("*", 11, True, "chosen"),
    TIED: ("o", 6, True, "in the tie set"),
    BEHIND: ("o", 5, False, "outside it"),
    CONTROL: ("|", 8, True, ""),
}


def draw(histories: Sequence[History], path: Path) -> None:
    """Written whole or not at all, in the format that the name's end says."""
    figure = figure_of([panels(history) for history in histories])
    made = io.BytesIO()
    figure.savefig(made, format=path.suffix[1:])
    with atomic.replacing(path, made.tell()) as part:
        part.write(made.getvalue())


def figure_of(shown: Sequence[Panels]) -> Any:
    """A matplotlib figure with two axes a question; it needs no display."""
    from matplotlib.figure import Figure

    heights = [max(3.9, 1.9 + 0.42 * len(one.rungs)) for one in shown]
    figure = Figure(figsize=(WIDTH, sum(heights)), dpi=DPI, layout="constrained")
    rows = figure.subfigures(len(shown), 1, squeeze=False, height_ratios=heights)[:, 0]
    for row, one in zip(rows, shown, strict=True):
        row.suptitle(one.title, fontsize=12, fontweight="bold", x=0.01, ha="left")
        left, right = row.subplots(1, 2, width_ratios=(1.1, 1))
        draw_course(left, one.course)
        draw_finals(right, one.rungs)
        verdict = "\n".join(textwrap.fill(line, VERDICT) for line in one.verdict.split("\n"))
        right.set_title(verdict, fontsize=SMALL + 0.5, loc="left")
    return figure


def draw_course(axes: Any, course: Course) -> None:
    """Scores on a log scale: filled where all cases were timed, hollow where pruned."""
    colours = {variant: f"C{i}" for i, variant in enumerate(course.variants)}
    lanes = [*course.failed, *([SLOW] if course.slow else [])]
    scale(axes, [1.0, *(p.score for p in course.points)], len(lanes))
    for variant, colour in colours.items():
        own = [p for p in course.points if p.variant == variant]
        axes.scatter(
            [p.number for p in own], [p.score for p in own], s=17, linewidths=0.9, zorder=3,
            c=["none" if p.pruned else colour for p in own], edgecolors=colour,
        )  # fmt: skip
        axes.scatter([], [], s=17, color=colour, label=variant)
    if any(p.pruned for p in course.points):
        axes.scatter([], [], s=17, facecolors="none", edgecolors=FAINT, label="pruned")
    if course.best:
        numbers, scores = zip(*course.best, strict=True)
        axes.step(
            [*numbers, course.trials], [*scores, scores[-1]],
            where="post", color="black", lw=1.2, label="best so far",
        )  # fmt: skip
    axes.axhline(1, color=FAINT, ls="--", lw=0.9, zorder=1, label="default")
    for lane, name in enumerate(lanes):
        if name == SLOW:
            marks = [(p.number, colours[p.variant]) for p in course.slow]
            draw_lane(axes, lane, "^", marks, f"{len(marks)} above {SLOWEST:g}x", FAINT)
        else:
            marks = [(number, FAILED) for number in course.failed[name]]
            draw_lane(axes, lane, "|", marks, f"{len(marks)} {name}", FAILED)
    edge = 0.02 * course.trials + 0.3
    axes.set(xlabel="trial", ylabel="time / time of the default")
    axes.set_xlim(1 - edge, course.trials + edge)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_title(course.title, fontsize=SMALL + 0.5, loc="left")
    axes.grid(alpha=0.25)
    legend(axes)


def draw_lane(
    axes: Any, lane: int, marker: str, marks: Sequence[tuple[int, str]], label: str, colour: str
) -> None:
    """One of the lanes at the top, which have no height. marks: number of a trial, and colour."""
    height = 1 - LANE * (lane + 0.5)
    axes.scatter(
        [number for number, _ in marks], [height] * len(marks), c=[c for _, c in marks],
        marker=marker, s=26, linewidths=0.9, transform=axes.get_xaxis_transform(),
    )  # fmt: skip
    axes.text(
        1.01, height, label, transform=axes.transAxes, va="center", fontsize=SMALL, color=colour
    )


def scale(axes: Any, scores: Sequence[float], lanes: int) -> None:
    """A log axis of the scores, with ticks that can be read and room for `lanes` at the top."""
    from matplotlib.ticker import FuncFormatter, NullLocator

    low, high = math.log(min(scores)), math.log(max(scores))
    unit = max(high - low, math.log(1.1)) / (1 - LANE * lanes - 2 * ROOM)
    bottom = low - ROOM * unit
    top = bottom + unit * (1 - LANE * lanes)
    axes.axhline(math.exp(top), color="0.85", lw=0.8)
    axes.set_yscale("log")
    axes.set_ylim(math.exp(bottom), math.exp(bottom + unit))
    ticks = FINE if high - low < math.log(6) else COARSE
    axes.set_yticks([tick for tick in ticks if bottom < math.log(tick) < top])
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def draw_finals(axes: Any, rungs: Sequence[Rung]) -> None:
    """Ratios with intervals, cases by colour, from the top down."""
    if not rungs:
        axes.set_axis_off()
        axes.text(0.5, 0.5, "no finals", ha="center", color=FAINT, transform=axes.transAxes)
        return
    cases = list(rungs[0].cases)
    for i, case in enumerate(cases):
        colour, aside = CASES[i % len(CASES)], (i - (len(cases) - 1) / 2) * 0.6 / len(cases)
        for place, rung in enumerate(rungs):
            draw_mark(axes, place + aside, rung, case, colour)
        axes.plot([], [], "s", ms=6, color=colour, label=case)
    seen = {mark for rung in rungs for mark in rung.marks.values()}
    for mark, (marker, size, filled, name) in MARKS.items():
        if mark in seen and name:
            face = FAINT if filled else "white"
            axes.plot([], [], marker, ms=size, color=FAINT, mfc=face, ls="", label=name)
    for place in range(1, len(rungs), 2):
        axes.axhspan(place - 0.5, place + 0.5, color="0.96", lw=0, zorder=0)
    axes.axvline(1, color=FAINT, ls="--", lw=0.9, zorder=1)
    axes.plot(WINDOW, (0, 0), alpha=0)
    labels = [textwrap.fill(rung.label, LABEL) for rung in rungs]
    axes.set_yticks(range(len(rungs)), labels, fontsize=SMALL)
    axes.set(ylim=(len(rungs) - 0.5, -0.5), xlabel="time / time of the default, by case")
    axes.grid(axis="x", alpha=0.25)
    legend(axes)


def draw_mark(axes: Any, height: float, rung: Rung, case: str, colour: str) -> None:
    """A contender in a case."""
    ratio, (marker, size, filled, _) = rung.cases[case], MARKS[rung.marks[case]]
    axes.errorbar(
        ratio.mid, height, xerr=[[ratio.mid - ratio.low], [ratio.high - ratio.mid]],
        fmt=marker, ms=size, color=colour, mfc=colour if filled else "white",
        elinewidth=1.3, capsize=2, zorder=3,
    )  # fmt: skip


def legend(axes: Any) -> None:
    """Below the axes, where it hides nothing."""
    axes.legend(
        loc="upper center", bbox_to_anchor=(0.5, -0.15),
        ncols=3, fontsize=SMALL, frameon=False, columnspacing=1.2, handletextpad=0.4,
    )  # fmt: skip
