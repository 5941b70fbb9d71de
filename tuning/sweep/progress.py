"""How a sweep goes on: a bar on a terminal with the best so far, else a line for each best."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from minfer.commands.columns import printable
from tuning.sweep.budget import Budget
from tuning.sweep.rows import OK, PRUNED, Trial


class Progress:
    """On stderr. quiet: nothing at all. timed: whether times mean anything."""

    def __init__(self, title: str, quiet: bool = False, timed: bool = True) -> None:
        self.title, self.quiet, self.timed = title, quiet, timed
        self.best: Trial | None = None
        self.counts: Counter[str] = Counter()
        self._bar: Any = None

    def __enter__(self) -> Progress:
        if sys.stderr.isatty() and not self.quiet:
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bar

            columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=20))
            console = Console(stderr=True)
            self._bar = Bar(*columns, TimeElapsedColumn(), console=console, transient=True)
            self._task = self._bar.add_task(self.title, total=1.0)
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def at(self, budget: Budget, trials: int, seconds: float) -> None:
        """How much of the budget is spent."""
        if self._bar is not None:
            text = f"{budget.text(trials, seconds)}{self._best_text()}"
            share = budget.share(trials, seconds)
            self._bar.update(self._task, completed=share, description=text)

    def row(self, trial: Trial) -> None:
        """A trial is done."""
        self.counts[trial.status] += 1
        if trial.status == OK and trial.score is not None:
            if self._is_best(trial) and self.timed:
                self.say(f"{trial.score:.3f} of the default's time: {trial.configuration.key}")
        elif trial.status not in (OK, PRUNED):
            self.say(f"{trial.status}: {trial.configuration.key}: {trial.message}")

    def _is_best(self, trial: Trial) -> bool:
        """Whether it is the best so far, which it is from now on."""
        assert trial.score is not None
        best = self.best is None or trial.score < (self.best.score or 0)
        self.best = trial if best else self.best
        return best

    def known(self, trials: Sequence[Trial]) -> None:
        """Trials of earlier runs: what is worse than their best is no news."""
        for trial in trials:
            if trial.status == OK and trial.score is not None:
                self._is_best(trial)

    def say(self, text: str) -> None:
        """A line that stays."""
        if self.quiet:
            return
        text = printable(text)  # parts of it are a user's
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(f"{self.title}: {text}", file=sys.stderr, flush=True)

    def _best_text(self) -> str:
        failed = sum(n for status, n in self.counts.items() if status not in (OK, PRUNED))
        text = f", {failed} failed" if failed else ""
        if self.timed and self.best is not None and self.best.score is not None:
            text += f", best {self.best.score:.3f}: {self.best.configuration.key}"
        return text
