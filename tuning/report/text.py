"""A report for people."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from minfer.commands.columns import printable
from tuning.bench.table import UNITS, WIDE
from tuning.report.account import Account
from tuning.report.contest import BEHIND, CONTROL, Contest, Standing
from tuning.report.findings import CaseResult, Failure, Knob, Result, Value
from tuning.sweep.decision import Interval
from tuning.sweep.summary import summary

SHORT = {CONTROL: "", BEHIND: ""}  # marks that go without saying


def show(accounts: Sequence[Account], database: Path) -> None:
    """Print it on stdout."""
    console = Console(width=None if sys.stdout.isatty() else WIDE, highlight=False)
    for account in accounts:
        for part in parts(account, database):
            console.print(part)


def parts(account: Account, database: Path) -> Iterator[RenderableType]:
    """What is printed of a question, one below the other."""
    yield Text(printable(account.question.key), style="bold")
    yield Text(counts(account))
    if account.best:
        yield best_table(account.best)
    if account.finals is not None:
        yield finals_table(account.finals)
    if account.decided is not None:
        lines = summary(account.decided, database).splitlines()
        yield Text("\n".join(["Decision", *("  " + printable(line) for line in lines), ""]))
    if account.failures:
        yield failures_table(account.failures)
    if account.tunables:
        yield knobs_table(account.tunables)


def counts(account: Account) -> str:
    """`200 trials: 25 ok, 91 pruned`, when, and what is left out."""
    by_status = ", ".join(f"{n} {status}" for status, n in account.trials.items())
    text = f"{sum(account.trials.values())} trials{': ' if by_status else ''}{by_status}"
    dates = sorted(date for date in account.sessions.values() if date)
    if dates:
        text += f"; {dates[0]}" + (f" to {dates[-1]}" if dates[-1] != dates[0] else "")
    if account.default:
        text += f"\ndefault: {account.default}"
    if account.left_out:
        text += f"\n{account.left_out} trials are left out: made again, or under other conditions"
    return "\n".join(map(printable, text.split("\n"))) + "\n"


def best_table(results: Sequence[Result]) -> Table:
    """Score, and of each case the time and how much of it is the floor."""
    table = _table("Best: time over the default's; median of a call, and floor / median")
    table.add_column("configuration")
    table.add_column("score", justify="right")
    for case in results[0].cases:
        table.add_column(Text(printable(case.case)), justify="right", overflow="fold")
    for one in results:
        cells = [_time(case) for case in one.cases]
        table.add_row(*_cells(one.key, f"{one.score:.3f}", *cells))
    return table


def finals_table(contest: Contest) -> Table:
    """The ratio of each contender to the default, with its interval."""
    title = "Finals: time over the default's (95 % interval of each by itself)"
    title += f", {contest.date}" if contest.date else ""
    title += "; under other conditions than the trials" if contest.stale else ""
    table = _table(title)
    table.add_column("contender")
    table.add_column("all cases", justify="right")
    for case, rounds in contest.rounds.items():
        name = Text(f"{printable(case)}\n{rounds} rounds")
        table.add_column(name, justify="right", overflow="fold")
    for one in contest.standings:
        table.add_row(*_cells(*_standing(one, contest)))
    return table


def failures_table(found: Sequence[Failure]) -> Table:
    """Status, the first message, and how many failed alike."""
    table = _table("Failed")
    table.add_column("trials", justify="right")
    for name in ("status", "first message", "of"):
        table.add_column(name)
    for one in found:
        table.add_row(*_cells(str(one.trials), one.status, one.message, one.configuration))
    return table


def knobs_table(found: Sequence[Knob]) -> Table:
    """Tunables of each variant: the best score with each value."""
    table = _table("Tunables: best score with each value (trials timed on all cases / tried)")
    table.add_column("variant")
    table.add_column("tunable")
    table.add_column("worst / best", justify="right")
    table.add_column("values")
    for variant, group in groupby(found, key=lambda knob: knob.variant):
        for i, knob in enumerate(group):
            values = ",  ".join(_value(value) for value in knob.values)
            shown = variant if i == 0 else ""
            table.add_row(*_cells(shown, knob.name, f"{knob.effect:.2f}", values))
    return table


def _table(title: str) -> Table:
    return Table(title=Text(printable(title)), title_justify="left", box=SIMPLE_HEAD)


def _cells(*texts: str) -> list[Text]:
    return [Text(printable(text)) for text in texts]


def _time(case: CaseResult) -> str:
    factor, unit = next((f, u) for limit, f, u in UNITS if case.median < limit)
    shown = f"{case.median * factor:.4g} {unit}"
    return shown if case.of_floor is None else f"{shown} {case.of_floor:4.0%}"


def _standing(one: Standing, contest: Contest) -> list[str]:
    if one.key == contest.default:
        ratios = ["1", *("1" for _ in contest.rounds)]
    else:
        ratios = [_interval(one.ratio), *(_interval(one.cases[case]) for case in contest.rounds)]
    marks = ["", *(SHORT.get(mark, mark) for mark in one.marks.values())]
    name = f"{one.key} (the default)" if one.key == contest.default else one.key
    marked = [f"{mark} {ratio}".strip() for mark, ratio in zip(marks, ratios, strict=False)]
    return [name, *(marked if one.marks else ratios)]


def _interval(ratio: Interval) -> str:
    return f"{ratio.mid:.3f} ({ratio.low:.3f}-{ratio.high:.3f})"


def _value(value: Value) -> str:
    score = "none" if value.score is None else f"{value.score:.3f}"
    return f"{value.value}: {score} ({value.ok}/{value.trials})"
