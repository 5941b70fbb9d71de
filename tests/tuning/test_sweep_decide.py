"""Decisions from finals on a machine whose true times are known: rates of being right and wrong.

How often something happens among many simulated finals is held against the stated rate and what
chance adds to it, reckoned with the binomial distribution.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from synthetic_clock import KINDS, Machine, draw

from tuning.sweep import ties
from tuning.sweep.decide import Contender, Decision, decide
from tuning.sweep.evidence import Evidence
from tuning.sweep.ties import Layout, Verdicts
from tuning.sweep.timing import race

RATE = 0.05
FINALS = 1000
ROUNDS = 40


def at_most(finals: int, rate: float = RATE) -> int:
    """A count that so many finals exceed once in a thousand times at that rate."""
    chance, count = (1 - rate) ** finals, 0
    while chance < 0.999:
        count += 1
        chance += math.comb(finals, count) * rate**count * (1 - rate) ** (finals - count)
    return count


def judged(kind: str, times: list[float], rounds: int = ROUNDS, seed: int = 0) -> Verdicts:
    """Of FINALS finals of one case: contenders with these times, the default first."""
    rng = np.random.default_rng(seed)
    played = np.array([*times, times[0]])
    evidence = Evidence.of([draw(kind, rng, played, FINALS, rounds)])
    layout = Layout(tuple(range(len(times))), (0,))
    return evidence.judge(layout, ties.critical(layout, evidence.rounds, (1.0,), RATE))


def contenders(rounds: dict[str, np.ndarray], **free: str) -> list[Contender]:
    """rounds: by key, (cases, rounds). free: class of keys that are not their own class."""
    return [
        Contender(key, free.get(key, key), (1.0,), {f"case{c}": tuple(r) for c, r in enumerate(x)})
        for key, x in rounds.items()
    ]


def finals(seed: int, rounds: int = 30, cases: int = 1, **times: float) -> dict[str, np.ndarray]:
    """Gaussian rounds of a default that takes 1, of its control and of others, by key."""
    rng = np.random.default_rng(seed)
    every = {"default": 1.0, **times, "control": 1.0}
    return {
        key: t * np.exp(0.01 * rng.standard_normal((cases, rounds))) for key, t in every.items()
    }


def decided(found: list[Contender], **buckets: int) -> Decision:
    return decide(found, default="default", control="control", buckets=buckets or {"case0": 1})


# Rates


@pytest.mark.parametrize("contestants", [2, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_have_no_winner(kind: str, contestants: int) -> None:
    verdicts = judged(kind, [1.0] * contestants)
    assert (~verdicts.tied.all(axis=-1)).sum() <= at_most(FINALS)
    assert verdicts.chosen.any(axis=-1).sum() <= at_most(FINALS)


@pytest.mark.parametrize("rounds", [8, 12, 20, 60])
def test_equals_have_no_winner_in_any_number_of_rounds(rounds: int) -> None:
    for kind in ("gaussian", "lognormal", "outliers", "quantized", "steps"):
        for contestants in (2, 5):
            apart = ~judged(kind, [1.0] * contestants, rounds).tied.all(axis=-1)
            assert apart.sum() <= at_most(FINALS), (kind, contestants)


@pytest.mark.parametrize("kind", KINDS)
def test_a_winner_of_3_percent_is_found(kind: str) -> None:
    verdicts = judged(kind, [1.0] * 7 + [0.97])
    assert (verdicts.chosen == 7).sum() >= 0.95 * FINALS


@pytest.mark.parametrize("kind", KINDS)
def test_the_best_is_in_its_tie_set(kind: str) -> None:
    for best in (0.999, 0.99, 0.98):
        verdicts = judged(kind, [1.0] * 4 + [best, 1.02])
        assert (~verdicts.tied[:, 4]).sum() <= at_most(FINALS)


def test_the_twin_of_the_default_is_not_promoted() -> None:
    """Also where another contender is just fast enough to set the default apart."""
    promoted = 0
    for best in (0.995, 0.99, 0.985):
        promoted = max(promoted, (judged("gaussian", [1.0, 1.0, best]).chosen == 1).sum())
    assert promoted <= at_most(FINALS)


def test_free_choices_do_not_make_a_class_better() -> None:
    """Best of five equal ones is no better than a single one."""
    rng = np.random.default_rng(0)
    for classes in ((0, 1, 1, 1, 1, 1), (0, 0, 0, 0, 0, 1)):
        layout = Layout(classes, (0, 1, 1))
        logs = [draw("gaussian", rng, np.ones(7), FINALS, 20) for _ in range(3)]
        evidence = Evidence.of(logs)
        verdicts = evidence.judge(layout, ties.critical(layout, (20,) * 3, (1.0,) * 3, RATE))
        apart = ~verdicts.tied.all(axis=-1) | ~verdicts.free_tied.all(axis=(-1, -2))
        assert apart.sum() <= at_most(FINALS)
        assert verdicts.chosen.any(axis=-1).sum() <= at_most(FINALS)


def test_a_noisy_case_among_quiet_ones_makes_no_winners() -> None:
    rng = np.random.default_rng(1)
    layout = Layout((0, 1, 2, 3), (0,) * 4)
    scales = (4.0, 0.2, 0.2, 0.2)
    evidence = Evidence.of([s * draw("gaussian", rng, np.ones(5), FINALS, 8) for s in scales])
    assert evidence.scales == (1, 1 / 16, 1 / 16, 1 / 16)
    bound = ties.critical(layout, evidence.rounds, evidence.scales, RATE)
    assert (~evidence.judge(layout, bound).tied.all(axis=-1)).sum() <= at_most(FINALS)


def raced(kind: str, times: dict[str, float], seed: int) -> Decision:
    """From samples on a clock to the decision."""
    rng = np.random.default_rng(seed)
    every = {"default": 1.0, **times, "control": 1.0}
    played = Machine(every, draw(kind, rng, np.array(list(every.values())), 1, 60)[0])
    settings = {"target": 1.0, "width": 0.01, "least": 8, "most": 60, "seconds": 1e9}
    rounds = race(played.samples, **settings, now=played.now)
    return decided(contenders({key: np.array([x]) for key, x in rounds.items()}))


@pytest.mark.parametrize("kind", ["gaussian", "drift", "outliers"])
def test_races_find_what_is_there(kind: str) -> None:
    """A true tie and a true 3 %, in as many rounds as the race takes for an interval of 1 %."""
    count = 40
    for seed in range(count):
        found = raced(kind, {"a": 0.97, "b": 1.0, "c": 1.0}, seed)
        assert found.numeric == "a" and found.ties == ("a",) and not found.default_ties
    equal = [raced(kind, {"a": 1.0, "b": 1.0}, seed) for seed in range(count)]
    assert sum(found.ties != ("default", "a", "b") for found in equal) <= at_most(count)


def test_rerun_differs_as_often_as_reruns_do() -> None:
    """Over effects from none to plain ones; a run at the very edge cannot know that it is."""
    said, seen, off = [], [], []
    for effect in (0, 0.003, 0.006, 0.009, 0.012, 0.015, 0.02, 0.03):
        runs = [decided(contenders(finals(s, 20, a=1 - effect, b=1.0))) for s in range(40)]
        chosen = np.array([run.numeric for run in runs])
        other = (chosen[:, None] != chosen).sum(axis=1) / (len(runs) - 1)
        guess = np.array([run.rerun_differs for run in runs])
        said.append(guess.mean())
        seen.append(other.mean())
        off.append(np.abs(guess - other).mean())
    assert np.mean(off) < 0.15
    assert abs(np.mean(said) - np.mean(seen)) < 0.05
    assert max(seen) > 0.3 and seen[-1] == 0 and said[-1] < 0.05


# The rule


def exact(**times: float | list[float]) -> dict[str, np.ndarray]:
    """Rounds without noise worth speaking of, by key; a list has one time a case.

    Of a draw in which equals tie, as they do in 95 of 100.
    """
    rng = np.random.default_rng(1)
    every = {"default": 1.0, **times}
    every.setdefault("control", every["default"])
    cases = max(len(np.atleast_1d(t)) for t in every.values())
    return {
        key: np.broadcast_to(t, (cases,))[:, None] * np.exp(1e-5 * rng.standard_normal((cases, 9)))
        for key, t in every.items()
    }


def test_default_first_in_a_tie() -> None:
    found = decided(contenders(exact(a=1.0)))
    assert (found.numeric, found.ties, found.default_ties) == ("default", ("default", "a"), True)
    assert found.free == {1: "default"} and found.free_ties == {1: ("default",)}
    assert (found.speedup.low, found.speedup.mid, found.speedup.high) == (1, 1, 1)
    assert found.rate == RATE


def test_fewest_resources_then_name() -> None:
    rounds = exact(c=0.9, a=0.9, b=0.9)
    found = contenders(rounds)
    assert decided(found).numeric == "a" and decided(found).ties == ("a", "b", "c")
    more = {"a": (2.0, 0.0), "b": (1.0, 5.0), "c": (1.0, 4.0)}
    heavy = [replace(c, resources=more.get(c.key, (9.0, 9.0))) for c in found]
    assert decided(heavy).numeric == "c"
    assert decided(heavy[::-1]) == decided(heavy)
    assert not decided(heavy).default_ties


def test_speedup_is_the_geometric_mean_over_cases() -> None:
    found = decided(contenders(exact(a=[0.5, 0.8], control=[1.0, 1.02])), case0=1, case1=1)
    assert found.speedups["case0"].mid == pytest.approx(2, rel=1e-4)
    assert found.speedups["case1"].mid == pytest.approx(1.25, rel=1e-4)
    assert found.speedup.mid == pytest.approx(math.sqrt(2.5), rel=1e-4)
    assert found.speedup.low < found.speedup.mid < found.speedup.high
    assert found.noise == pytest.approx(math.exp(math.log(1.02) / math.sqrt(2)) - 1, rel=1e-2)


def test_a_winner_within_the_noise_is_a_tie_with_the_default() -> None:
    found = decided(contenders(exact(a=0.98, control=1.03)))
    assert found.default_ties and found.ties == ("default", "a")
    assert found.noise == pytest.approx(0.03, rel=1e-2)
    assert decided(contenders(exact(a=0.98, control=1.01))).numeric == "a"
    assert decided(contenders(exact(a=0.98, control=0.97))).default_ties


def test_numeric_classes_once_and_free_ones_by_bucket() -> None:
    """x wins by x1 where few rows are, x2 where many are; y is best nowhere but good everywhere."""
    buckets = {"case0": 1, "case1": 512, "case2": 512}
    rounds = exact(x1=[0.5, 1.2, 1.2], x2=[1.2, 0.8, 0.5], x3=[1.2, 0.5, 0.79], y=[0.6, 0.7, 0.7])
    found = decided(contenders(rounds, x1="x", x2="x", x3="x"), **buckets)
    assert found.numeric == "x" and found.ties == ("x",)
    assert found.free == {1: "x1", 512: "x3"}
    assert found.free_ties == {1: ("x1",), 512: ("x3",)}
    assert found.speedup.mid == pytest.approx((2 * 2 / 0.79) ** (1 / 3), rel=1e-3)
    alone = decided(contenders(rounds), **buckets)
    assert alone.numeric == "y" and alone.free == {1: "y", 512: "y"}


def test_a_free_choice_is_promoted_in_the_class_of_the_default() -> None:
    rounds = exact(f=[1.0, 0.97])
    found = decided(contenders(rounds, f="default"), case0=1, case1=64)
    assert found.numeric == "default" and found.free == {1: "default", 64: "f"}
    assert found.free_ties == {1: ("default", "f"), 64: ("f",)} and not found.default_ties


def test_times_of_one_step_of_the_clock_are_not_apart() -> None:
    """Readings of 100 and 101 steps may be half a step apart, or nearly nothing."""
    rng = np.random.default_rng(0)
    steps = {"default": 101, "a": 100, "b": 97, "control": 101}
    rounds = {k: (s + (rng.random((1, 30)) < 0.1)) / 100 for k, s in steps.items()}
    assert decided(contenders({k: rounds[k] for k in ("default", "a", "control")})).default_ties
    assert decided(contenders(rounds)).ties == ("b",)


def test_only_the_default() -> None:
    found = decided(contenders(exact()))
    assert found.default_ties and found.ties == ("default",) and found.rerun_differs == 0


def test_the_same_rounds_decide_the_same() -> None:
    found = contenders(finals(7, a=0.991, b=0.995))
    once, other = (
        decide(found, default="default", control="control", buckets={"case0": 1}, seed=seed)
        for seed in (0, 1)
    )
    assert decided(found) == once
    assert once.rerun_differs != other.rerun_differs
    assert replace(once, rerun_differs=0) == replace(other, rerun_differs=0)


def test_the_order_of_contenders_and_cases_does_not_matter() -> None:
    rounds, buckets = (
        finals(5, cases=3, a=0.98, b=0.985, c=0.98),
        {"case0": 1, "case1": 8, "case2": 1},
    )
    found = contenders(rounds, b="a")
    once = decided(found, **buckets)
    assert 0 < once.rerun_differs < 1
    assert decided(found[::-1], **buckets) == once
    assert decided(found, **dict(reversed(buckets.items()))) == once


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda found: found[1:], "default is not among"),
        (lambda found: found[:-1], "control is not among"),
        (lambda found: [*found, found[1]], "same key"),
        (lambda found: [*found[:-1], replace(found[-1], rounds={})], "case0: contenders need"),
        (lambda found: [replace(c, rounds={"case0": (1.0,)}) for c in found], "two at least"),
        (
            lambda found: [replace(c, rounds={"case0": (1.0, math.nan)}) for c in found],
            "not a positive number",
        ),
    ],
)
def test_finals_that_cannot_be_decided(change, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        decided(change(contenders(finals(0, a=1.0))))
