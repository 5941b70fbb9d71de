"""What a sweep tries next: the defaults, then what a sampler picks, nothing twice."""

from __future__ import annotations

import math
import random
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from sweep_rows import times, trial
from test_sweep_space import FLASH, PLAIN, SPLIT, made

from minfer.errors import Refusal
from minfer.ops import Tunable
from tuning.sweep.budget import Budget, clock
from tuning.sweep.configuration import Configuration
from tuning.sweep.rows import Trial
from tuning.sweep.search import PRUNERS, SAMPLERS, Search
from tuning.sweep.space import Space

pytest.importorskip("optuna")

SPACE = Space([SPLIT, PLAIN, FLASH])  # 14 configurations
WIDE = Space(
    [
        made("split", {f"t{i}": Tunable(2, (0, 1, 2, 3, 4)) for i in range(5)}),
        made("ring", {f"t{i}": Tunable(4, (0, 1, 2, 3, 4)) for i in range(3)}),
    ]
)
DEFAULT = WIDE.defaults[0]
CASES = ("a", "b", "c", "d")


def cost(configuration: Configuration) -> float:
    """Time of a configuration of `WIDE` over the default's: at best where all tunables are 3."""
    far = sum(abs(value - 3) for value in configuration.config.values())
    apart = random.Random(configuration.key).random() / 1000  # no two are equal
    return (1.0 + far / 3 + apart) * (1.3 if configuration.variant == "ring" else 1.0)


def result(configuration: Configuration, status: str = "ok", n_cases: int = 4) -> Trial:
    """The trial of a configuration whose time over the default's is `cost` in each case."""
    ratio = cost(configuration) / cost(DEFAULT)
    seconds = [ratio * (1 + place) for place in range(n_cases)]
    return trial(
        configuration,
        status=status,
        cases=tuple(times(case, t) for case, t in zip(CASES, seconds, strict=False)),
        score=ratio if status in ("ok", "pruned") else None,
    )


def go_on(search: Search, n: int, pruned: bool = False) -> list[Trial]:
    """Ask and tell `n` times, failures among them."""
    done = []
    while len(done) < n and (configuration := search.ask()) is not None:
        status, n_cases = "ok", 4
        if sum(configuration.config.values()) % 7 == 6:
            status, n_cases = "compile-failed", 0
        elif pruned:
            value = result(configuration).score
            for n_cases in range(1, 5):
                if search.should_prune(configuration, n_cases, value):
                    status = "pruned"
                    break
        done.append(result(configuration, status, n_cases))
        search.tell(done[-1])
    return done


def keys(trials: list[Trial]) -> list[str]:
    return [found.configuration.key for found in trials]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_configuration_is_asked_once_the_defaults_first(sampler: str) -> None:
    search = Search(SPACE, sampler)
    asked = []
    while (configuration := search.ask()) is not None:
        asked.append(configuration)
        assert search.left == SPACE.size - len(asked)
        search.tell(trial(configuration, score=random.Random(configuration.key).random()))
    assert tuple(asked[:3]) == SPACE.defaults
    assert sorted(map(SPACE.index, asked)) == list(range(14))
    assert search.ask() is None


def test_grid_goes_by_number() -> None:
    search = Search(SPACE, "grid")
    asked = [SPACE.index(c) for c in iter(search.ask, None)]  # no answer is waited for
    assert asked == [1, 9, 10, 0, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_several_may_be_out_at_once(sampler: str) -> None:
    search = Search(WIDE, sampler)
    out = [search.ask() for _ in range(5)]
    for _ in range(30):
        search.tell(result(out.pop(2)))
        out.append(search.ask())
    done = {c.key for c in out} | {WIDE.at(i).key for i in search._seen}
    assert len(done) == 35 and len({c.key for c in out}) == 5


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("seed", [0, 7])
def test_the_same_seed_asks_the_same(sampler: str, seed: int) -> None:
    first, again, other = (keys(go_on(Search(WIDE, sampler, s), 25)) for s in (seed, seed, 99))
    assert first == again and len(set(first)) == 25
    assert (first == other) == (sampler == "grid")


@pytest.mark.parametrize("pruner", PRUNERS)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_sweep_that_was_stopped_goes_on_as_if_it_had_not(sampler: str, pruner: str) -> None:
    def search(known: list[Trial]) -> Search:
        return Search(WIDE, sampler, 3, known, pruner, DEFAULT)

    whole = go_on(search([]), 30, pruned=True)
    for stop in (1, 20):
        assert whole[stop:] == go_on(search(whole[:stop]), 30 - stop, pruned=True)
    statuses = {found.status for found in whole}
    assert statuses == {"ok", "compile-failed", *(["pruned"] if pruner != "none" else [])}


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_what_is_known_is_never_asked(sampler: str) -> None:
    half = random.Random(5).sample(list(SPACE), 7)
    search = Search(SPACE, sampler, known=[trial(c) for c in half])
    asked = list(iter(search.ask, None))
    assert sorted(map(SPACE.index, [*half, *asked])) == list(range(14))


def test_what_is_known_of_elsewhere_does_no_harm() -> None:
    strangers = [trial(Configuration("ring")), trial(Configuration("split", (("block_n", 9),)))]
    search = Search(SPACE, "tpe", known=strangers)
    assert search.left == 14
    search.tell(strangers[0])
    assert len(list(iter(search.ask, None))) == 14


def test_tpe_finds_what_random_does_not() -> None:
    space = Space([part.variant for part in WIDE.parts[:1]])

    def best(sampler: str) -> list[float]:
        searches = [Search(space, sampler, seed) for seed in range(4)]
        return [min(t.score or 9 for t in go_on(search, 60)) for search in searches]

    assert all(tpe < other for tpe, other in zip(best("tpe"), best("random"), strict=True))


def test_pruners_give_up_what_is_slow_but_no_default() -> None:
    for pruner, wanted in {"none": [], "median": [3.0, 1.4], "threshold": [3.0]}.items():
        search = Search(WIDE, "grid", pruner=pruner)
        for _ in range(9):
            search.ask()
        told = [WIDE.index(c) for c in WIDE.defaults] + [1, 2, 3]
        for place, index in enumerate(told):
            configuration = WIDE.at(index)
            pruned = search.should_prune(configuration, 1, 0.9 + place / 10)
            search.tell(trial(configuration, cases=(times(),), score=0.9 + place / 10))
            assert not pruned
        values = {4: 3.0, 5: 1.4, 6: 0.8}
        given_up = [v for i, v in values.items() if search.should_prune(WIDE.at(i), 1, v)]
        assert given_up == wanted, pruner
    search = Search(WIDE, "grid", pruner="threshold")
    assert search.ask() == DEFAULT and not search.should_prune(DEFAULT, 1, 100.0)


def test_known_trials_teach_the_pruner_case_by_case() -> None:
    def values(search: Search) -> list[dict[int, float]]:
        return [t.intermediate_values for t in search._study.trials]

    default = trial(DEFAULT, cases=(times("a", 1.0), times("b", 2.0)), score=1.0)
    other = trial(WIDE.at(1), cases=(times("a", 4.0), times("b", 2.0)), score=2.0)
    failed = trial(WIDE.at(2), cases=(times("a", 3.0),), status="wrong", score=None)
    instant = trial(WIDE.at(3), cases=(times("a", 0.0),), status="impossible", score=None)
    known = [other, failed, instant, default]
    assert values(Search(WIDE, "grid", known=known, default=DEFAULT)) == [
        {1: pytest.approx(4.0), 2: 2.0},
        {1: pytest.approx(3.0)},
        {},
        {1: 1.0, 2: 1.0},
    ]
    assert values(Search(WIDE, "grid", known=known)) == [{2: 2.0}, {}, {}, {2: 1.0}]


def test_states_that_optuna_is_told() -> None:
    search = Search(WIDE, "grid")
    statuses = ("ok", "pruned", "wrong", "timeout")
    for status in statuses:
        search.tell(result(search.ask(), status))
    found = [(t.state.name, t.value) for t in search._study.trials]
    slower = result(WIDE.defaults[1]).score
    assert found[0] == ("COMPLETE", 1.0)
    assert found[1] == ("PRUNED", pytest.approx(slower))
    assert found[2:] == [("FAIL", None), ("FAIL", None)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampler": "annealing"}, "--search 'annealing' is none of grid, random, tpe"),
        ({"pruner": "hope"}, "--pruner 'hope' is none of none, median, halving, threshold"),
    ],
)
def test_unknown_names_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(Refusal) as caught:
        Search(SPACE, **changes)
    assert caught.value.message == message


def test_optuna_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        go_on(Search(WIDE, "tpe", known=[result(WIDE.at(9))], pruner="halving"), 15, pruned=True)
    assert capfd.readouterr() == ("", "")


def test_optuna_is_imported_by_a_search_only() -> None:
    text = "import sys, tuning.sweep.search; print('optuna' in sys.modules)"
    root = Path(__file__).parent.parent.parent
    done = subprocess.run([sys.executable, "-c", text], cwd=root, capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


@pytest.mark.parametrize(
    ("text", "trials", "seconds"),
    [
        ("200", 200, None),
        ("1", 1, None),
        ("45s", None, 45),
        ("10m", None, 600),
        ("1h30m", None, 5400),
        ("2h", None, 7200),
        ("1h1s", None, 3601),
        ("90m", None, 5400),
    ],
)
def test_budgets(text: str, trials: int | None, seconds: int | None) -> None:
    budget = Budget.parse(text)
    assert budget == Budget(trials, seconds)
    at = (trials or 10**6, seconds or math.inf)
    assert budget.spent(*at) and budget.share(*at) == 1.0
    assert not budget.spent(at[0] - 1, at[1] - 0.5)
    assert Budget.parse(text.replace("90m", "1h30m")) == budget


@pytest.mark.parametrize(
    "text",
    ["", "0", "0s", "-5", "1.5h", "ten", "10 m", "30m1h", "10m10m", "m", "٣", "1e3", "9" * 5000],
)
def test_budgets_that_are_none(text: str) -> None:
    with pytest.raises(Refusal, match=r"is none; give 200 \(trials\), 10m, 1h30m or 45s"):
        Budget.parse(text)


def test_text_of_a_budget() -> None:
    assert Budget.parse("200").text(12, 99.0) == "12 of 200 trials"
    assert Budget.parse("1h30m").text(12, 65.9) == "1m05s of 1h30m"
    assert Budget.parse("200").share(50, 1e9) == 0.25
    assert Budget.parse("10m").share(50, 150.0) == 0.25
    assert [clock(s) for s in (0, 59, 60, 3600, 3605, 36_061)] == [
        *("0s", "59s", "1m", "1h", "1h00m05s", "10h01m01s")
    ]
