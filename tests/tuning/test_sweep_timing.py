"""Samples until an interval is narrow, and paired rounds, on a machine with known times."""

from __future__ import annotations

import math

import numpy as np
import pytest
from synthetic_clock import Machine, draw

from tuning.bench.statistics import rotated
from tuning.sweep.timing import Lost, Measured, NotATime, measure, race, widest

TIME = 0.01


def machine(kind: str, contestants: int, rounds: int, first: float = 1.0, seed: int = 0) -> Machine:
    rng = np.random.default_rng(seed)
    times = {f"c{k}": TIME for k in range(contestants)}
    logs = draw(kind, rng, np.ones(contestants), 1, rounds)[0]
    return Machine(times, logs + math.log(TIME), first)


def constant(seconds: float) -> Machine:
    return Machine({"c0": seconds}, np.full((1, 100), math.log(seconds)))


def run(played: Machine, **options: float) -> dict[str, list[float]]:
    settings = {"target": TIME, "width": 0.01, "least": 8, "most": 60, "seconds": math.inf}
    return race(played.samples, **{**settings, **options}, now=played.now)


def test_interval_of_a_median_is_made_of_order_statistics() -> None:
    """Tables of the sign test: of 6 samples all, of 20 the 6th to the 15th, of 60 22nd to 39th."""
    for n, low, high in ((5, 1, 5), (6, 1, 6), (8, 1, 8), (9, 2, 8), (20, 6, 15), (60, 22, 39)):
        found = Measured.of([float(x) for x in range(n, 0, -1)], 3)
        assert (found.low, found.median, found.high) == (low, (n + 1) / 2, high), n
        assert found.width == pytest.approx((high - low) / ((n + 1) / 2))


@pytest.mark.parametrize("kind", ["gaussian", "lognormal", "bimodal", "outliers"])
def test_interval_holds_the_median(kind: str) -> None:
    rng = np.random.default_rng(3)
    median = np.median(draw(kind, rng, np.ones(1), 1, 200_000))
    times = draw(kind, rng, np.ones(1), 600, 20)[:, 0]
    found = [Measured.of(row.tolist(), 1) for row in np.exp(times)]
    held = sum(m.low <= math.exp(median) <= m.high for m in found)
    assert held >= 0.93 * 600  # 95.9 % are expected, with a standard error of 0.8 %


def test_measure_stops_when_narrow_and_says_what_it_reached() -> None:
    played = machine("gaussian", 1, 100)
    found = measure(played.sample("c0"), target=0.1, seconds=math.inf, now=played.now)
    assert found.calls == 10 and played.calls["c0"] == [1] + [10] * len(found.samples)
    assert 6 <= len(found.samples) < 60 and found.width < 0.01
    assert Measured.of(found.samples[:-1], 10).width >= 0.01
    assert found.low <= found.median <= found.high


def test_measure_stops_at_most() -> None:
    played = machine("gaussian", 1, 100)
    found = measure(played.sample("c0"), target=TIME, width=1e-4, most=17, seconds=1e9)
    assert len(found.samples) == 17 and found.width > 1e-4


@pytest.mark.parametrize(("seconds", "samples"), [(0.0, 5), (0.1, 9), (0.12, 11)])
def test_measure_stops_when_time_is_up_but_not_before_least(seconds: float, samples: int) -> None:
    played = machine("drift", 1, 100)
    found = measure(played.sample("c0"), target=TIME, width=1e-9, seconds=seconds, now=played.now)
    assert len(found.samples) == samples


def test_five_samples_are_never_narrow() -> None:
    """There is no 95 % interval of five."""
    played = constant(TIME)
    assert len(measure(played.sample("c0"), target=TIME, least=2, now=played.now).samples) == 6
    assert len(measure(constant(TIME).sample("c0"), target=TIME, most=3).samples) == 3


@pytest.mark.parametrize(
    ("seconds", "calls"), [(1e-3, 20), (0.5, 1), (0.0131, 2), (1e-12, 100_000)]
)
def test_calls_fill_a_sample(seconds: float, calls: int) -> None:
    assert measure(constant(seconds).sample("c0"), target=0.02).calls == calls


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("before", [0, 3])
def test_no_time_is_refused(seconds: float, before: int) -> None:
    played = iter([TIME] * before + [seconds])
    with pytest.raises(NotATime, match=f"{seconds} seconds is no time"):
        measure(lambda calls: next(played), target=TIME)


def test_everyone_runs_once_a_round_in_rotated_order() -> None:
    order: list[str] = []
    played = machine("gaussian", 3, 4)

    def noted(key: str):
        once = played.sample(key)
        return lambda calls: order.append(key) or once(calls)

    found = race(
        {key: noted(key) for key in played.samples},
        **{"target": TIME, "width": 0.0, "least": 2, "most": 4, "seconds": math.inf},
    )
    assert {key: len(rounds) for key, rounds in found.items()} == {"c0": 4, "c1": 4, "c2": 4}
    wanted = [f"c{i}" for turn in range(4) for i in rotated(3, turn)]
    assert order == ["c0", "c1", "c2", *wanted]


def test_first_calls_choose_calls_and_are_no_rounds() -> None:
    played = machine("gaussian", 2, 60, first=5.0)
    found = run(played, target=1.0)
    assert played.calls["c0"][:3] == [1, 20, 20]
    assert max(found["c0"]) < 1.1 * TIME


@pytest.mark.parametrize("kind", ["gaussian", "drift"])
def test_race_stops_when_every_ratio_is_narrow(kind: str) -> None:
    found = run(machine(kind, 4, 60))
    assert 8 < len(found["c0"]) < 60 and widest(list(found.values())) < 0.01
    assert widest([rounds[:-1] for rounds in found.values()]) >= 0.01


def test_race_does_not_stop_by_who_leads() -> None:
    counts = []
    for lead in (0.9, 0.98, 0.5):
        samples = machine("gaussian", 4, 60).samples
        for key, part in (("c0", lead), ("c2", 1.05), ("c3", 1.2)):
            samples[key] = lambda calls, once=samples[key], part=part: part * once(calls)
        settings = {"target": TIME, "width": 0.012, "least": 8, "most": 60, "seconds": math.inf}
        counts.append(len(race(samples, **settings)["c0"]))
    assert 8 < counts[0] < 60 and len(set(counts)) == 1


def test_race_stops_at_most_or_when_time_is_up() -> None:
    assert len(run(machine("gaussian", 3, 60), width=1e-6, most=11)["c1"]) == 11
    assert len(run(machine("gaussian", 3, 60), width=1e-6, seconds=0.0)["c1"]) == 8
    assert len(run(machine("gaussian", 1, 60))["c0"]) == 8  # nobody to compare with


def test_a_lost_contestant_leaves_with_its_rounds() -> None:
    played = machine("gaussian", 4, 60)
    why: dict[str, str] = {}
    rounds: list[int] = []

    def fails(key: str, after: int, error: float | Lost):
        once = played.sample(key)

        def sample(calls: int) -> float:
            seconds = once(calls)
            if len(played.calls[key]) <= after:
                return seconds
            if isinstance(error, Lost):
                raise error
            return error

        return sample

    samples = {
        **played.samples,
        "c1": fails("c1", 5, Lost("the worker has died")),
        "c2": fails("c2", 0, 0.0),
    }
    found = race(
        samples,
        **{"target": TIME, "width": 0.01, "least": 9, "most": 9, "seconds": math.inf},
        on_round=rounds.append,
        on_lost=lambda key, lost: why.update({key: lost.reason}),
    )
    assert {key: len(times) for key, times in found.items()} == {"c0": 9, "c3": 9}
    assert why == {"c1": "the worker has died", "c2": "a sample of 0.0 seconds is no time"}
    assert rounds == list(range(1, 10))


def test_a_race_that_everyone_lost_is_empty() -> None:
    def lost(calls: int) -> float:
        raise Lost("no device")

    assert race({"a": lost, "b": lost}, target=1, width=1, least=2, most=5, seconds=1) == {}


def test_other_exceptions_are_not_swallowed() -> None:
    def broken(calls: int) -> float:
        raise KeyError("ours")

    with pytest.raises(KeyError, match="ours"):
        race({"a": broken}, target=1, width=1, least=2, most=5, seconds=1)
