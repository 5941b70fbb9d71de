"""What to try next: Optuna's samplers and pruners, asked and told one configuration at a time.

Each ask seeds the sampler anew from the seed and the number of configurations seen, and trials of
an earlier run are told first. So a sweep that was stopped goes on with what it would have tried.
"""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import exp, fsum, log
from typing import TYPE_CHECKING, TypeVar

from minfer.errors import Refusal
from tuning.sweep.configuration import Configuration
from tuning.sweep.rows import OK, PRUNED, Trial
from tuning.sweep.space import Space

if TYPE_CHECKING:
    from optuna import Study
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler
    from optuna.trial import Trial as OptunaTrial

TRIES = 5  # of a sampler that repeats itself
STEPS = 50  # away from what it repeats, until the next by number is taken
SLOW = 1.5  # times the default, for the pruner `threshold`


def _random(seed: int) -> BaseSampler:
    from optuna.samplers import RandomSampler

    return RandomSampler(seed=seed)


def _tpe(seed: int) -> BaseSampler:
    from optuna.samplers import TPESampler

    return TPESampler(seed=seed, multivariate=True, group=True, constant_liar=True)


def _median() -> BasePruner:
    from optuna.pruners import MedianPruner

    return MedianPruner(n_startup_trials=5)


def _halving() -> BasePruner:
    from optuna.pruners import SuccessiveHalvingPruner

    return SuccessiveHalvingPruner(min_resource=1, reduction_factor=2)


def _threshold() -> BasePruner:
    from optuna.pruners import ThresholdPruner

    return ThresholdPruner(upper=SLOW)


# Those that need nothing but Optuna and numpy. None: the configurations by number.
SAMPLERS: dict[str, Callable[[int], BaseSampler] | None] = {
    "grid": None,
    "random": _random,
    "tpe": _tpe,
}
PRUNERS: dict[str, Callable[[], BasePruner] | None] = {
    "none": None,
    "median": _median,
    "halving": _halving,
    "threshold": _threshold,
}


@dataclass
class _Running:
    """A trial as Optuna knows it, and how many values it was told of."""

    trial: OptunaTrial
    steps: int = 0

    def report(self, value: float, step: int) -> bool:
        """Whether the pruner would end it here."""
        self.trial.report(value, step)
        self.steps = step
        return self.trial.should_prune()


class Search:
    """Configurations of `space` in the order in which to try them, none of them twice.

    sampler: of SAMPLERS. pruner: of PRUNERS. known: trials of earlier runs, in their order.
    default: the configuration that scores are relative to. Refuses unknown names. Several
    configurations may be out at once, but threads must take turns.
    """

    def __init__(
        self,
        space: Space,
        sampler: str = "tpe",
        seed: int = 0,
        known: Sequence[Trial] = (),
        pruner: str = "none",
        default: Configuration | None = None,
    ) -> None:
        self._space, self._seed, self._default = space, seed, default
        self._sampler = _by_name(SAMPLERS, sampler, "search")
        self._study = _study(_by_name(PRUNERS, pruner, "pruner"))
        self._running: dict[int, _Running] = {}
        self._seen: set[int] = set()
        self._unseen = 0  # no number below it is unseen
        self._default_times: dict[str, float] = {}
        for trial in known:
            self._learn_default(trial)
        for trial in known:
            self.tell(trial)

    @property
    def left(self) -> int:
        """How many configurations were neither known nor asked for."""
        return self._space.size - len(self._seen)

    def ask(self) -> Configuration | None:
        """What to try next, None when nothing is left: the defaults first, then the sampler's."""
        for default in self._space.defaults:
            if (index := self._space.index(default)) not in self._seen:
                return self._begin(index)
        return None if not self.left else self._sampled() or self._begin(self._next_unseen())

    def should_prune(self, configuration: Configuration, step: int, value: float) -> bool:
        """Whether to give a configuration up that was asked for; a default never is.

        step: cases timed so far. value: geometric mean over them of time / time of the default.
        """
        prune = self._running[self._space.index(configuration)].report(value, step)
        return prune and configuration not in self._space.defaults

    def tell(self, trial: Trial) -> None:
        """How it went; a trial that was not asked for is learned from if it is of the space."""
        from optuna.trial import TrialState

        if trial.configuration not in self._space:
            return
        self._learn_default(trial)
        index = self._space.index(trial.configuration)
        if index not in self._running:
            self._begin(index)
        running = self._running.pop(index)
        for step, value in self._values(trial):
            if step > running.steps:
                running.report(value, step)
        states = {OK: TrialState.COMPLETE, PRUNED: TrialState.PRUNED}
        state = states.get(trial.status, TrialState.FAIL)
        self._study.tell(running.trial, trial.score if trial.status == OK else None, state)

    def _sampled(self) -> Configuration | None:
        """What the sampler picks; where it keeps to what was seen, what is near that."""
        from optuna.trial import TrialState

        if self._sampler is None:
            return None
        draw = random.Random(f"{self._seed} {len(self._seen)}")
        with _quiet():
            self._study.sampler = self._sampler(draw.getrandbits(32))
        for _ in range(TRIES):
            trial = self._study.ask()
            configuration = self._space.suggest(trial)
            if (index := self._space.index(configuration)) not in self._seen:
                return self._out(index, trial)
            self._study.tell(trial, state=TrialState.FAIL)
        for _ in range(STEPS):
            configuration = self._space.near(configuration, draw)
            if (index := self._space.index(configuration)) not in self._seen:
                return self._begin(index)
        return None

    def _begin(self, index: int) -> Configuration:
        """A trial of what the sampler was not asked for."""
        self._study.enqueue_trial(self._space.params(self._space.at(index)))
        trial = self._study.ask()
        self._space.suggest(trial)
        return self._out(index, trial)

    def _out(self, index: int, trial: OptunaTrial) -> Configuration:
        self._running[index] = _Running(trial)
        self._seen.add(index)
        return self._space.at(index)

    def _next_unseen(self) -> int:
        while self._unseen in self._seen:
            self._unseen += 1
        return self._unseen

    def _learn_default(self, trial: Trial) -> None:
        if trial.configuration == self._default and trial.status == OK:
            self._default_times = {times.case: times.median for times in trial.cases}

    def _values(self, trial: Trial) -> list[tuple[int, float]]:
        """Step and value after each case, as `should_prune` takes them; the last is the score."""
        logs, values = [], []
        for step, times in enumerate(trial.cases, 1):
            default = self._default_times.get(times.case, 0.0)
            if min(times.median, default) <= 0:
                break
            logs.append(log(times.median / default))
            values.append((step, exp(fsum(logs) / step)))
        if trial.score is None:
            return values
        return [*values[: len(trial.cases) - 1], (len(trial.cases), trial.score)]


Choice = TypeVar("Choice")


def _by_name(table: Mapping[str, Choice], name: str, option: str) -> Choice:
    if name not in table:
        known = ", ".join(table)
        raise Refusal(
            "0.3", f"--{option} {name!r} is none of {known}", {option: name, "known": tuple(table)}
        )
    return table[name]


def _study(pruner: Callable[[], BasePruner] | None) -> Study:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with _quiet():
        made = optuna.pruners.NopPruner() if pruner is None else pruner()
        return optuna.create_study(direction="minimize", pruner=made)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without a word on what Optuna holds to be experimental."""
    from optuna.exceptions import ExperimentalWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        yield
