"""Sampling: exact distributions against a plain reference, one draw a token, strict options."""

from __future__ import annotations

import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minfer import Sampler, Sampling
from minfer.errors import Refusal
from minfer.models import ranking

LOGITS = np.array([1.5, -0.5, 3.0, 0.25, -2.0, 2.5, 0.0, 1.0], np.float32)
SEEN = [5, 5, 1, 7]


def reference(options: Sampling, logits: np.ndarray, seen: list[int]) -> dict[int, float]:
    """Probabilities by id, step by step as docs/sampling.md has them, in Python's own floats."""
    scores = {i: float(x) for i, x in enumerate(logits)}
    for token, bias in dict(options.logit_bias).items():
        scores[token] += bias
    for token in set(seen[-options.repeat_last_n :]):
        times, x = seen[-options.repeat_last_n :].count(token), scores[token]
        x = x / options.repeat_penalty if x > 0 else x * options.repeat_penalty
        scores[token] = x - options.presence_penalty - options.frequency_penalty * times
    order = sorted((i for i in scores if scores[i] > -math.inf), key=lambda i: (-scores[i], i))
    if options.temperature == 0:
        return {order[0]: 1.0}
    order = order[: options.top_k or None]
    weights = [math.exp(scores[i] - scores[order[0]]) for i in order]
    if options.top_p < 1:
        wanted = options.top_p * sum(weights)
        enough = [running >= wanted for running in itertools.accumulate(weights)]
        order = order[: enough.index(True) + 1]
    order = [i for i, w in zip(order, weights, strict=False) if w >= options.min_p]
    weights = [math.exp((scores[i] - scores[order[0]]) / options.temperature) for i in order]
    total = sum(weights)
    return {i: w / total for i, w in zip(order, weights, strict=True)}


def sampler(n_vocab: int = len(LOGITS), seen: list[int] = SEEN, **options: Any) -> Sampler:
    made = Sampler(Sampling(**{"temperature": 1.0, "seed": 7} | options), n_vocab)
    made.see(seen)
    return made


def distribution(made: Sampler, logits: np.ndarray = LOGITS) -> dict[int, float]:
    ids, probabilities = made.distribution(logits, position=0)
    assert probabilities.dtype == np.float64
    return {int(i): float(p) for i, p in zip(ids, probabilities, strict=True)}


def assert_same(got: dict[int, float], wanted: dict[int, float]) -> None:
    assert list(got) == list(wanted)
    assert list(got.values()) == pytest.approx(list(wanted.values()), rel=1e-12)


OPTIONS: dict[str, list[Any]] = {
    "temperature": [0.0, 0.5, 2.0],
    "top_k": [1, 3, 100],
    "top_p": [0.0, 0.6, 0.95],
    "min_p": [0.1, 1.0],
    "repeat_penalty": [0.8, 1.3],
    "presence_penalty": [-0.5, 1.0],
    "frequency_penalty": [-0.2, 0.7],
    "repeat_last_n": [1, 3],
    "logit_bias": [{2: -math.inf}, {4: 5.0, 2: -1.0}],
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, vs in OPTIONS.items() for v in vs])
def test_each_option_alone(name: str, value: Any) -> None:
    options = {name: value}
    if name == "repeat_last_n":
        options["frequency_penalty"] = 0.7
    made = sampler(**options)
    assert_same(distribution(made), reference(made.sampling, LOGITS, SEEN))


def test_all_options_together() -> None:
    rng = np.random.default_rng(1)
    for _ in range(300):
        chosen = {n: vs[rng.integers(len(vs))] for n, vs in OPTIONS.items() if rng.random() < 0.6}
        made = sampler(**chosen)
        # Quarters, so that ties are common.
        logits = (np.round(8 * rng.standard_normal(8)) / 4).astype(np.float32)
        assert_same(distribution(made, logits), reference(made.sampling, logits, SEEN))


def test_by_hand() -> None:
    """Logits that are logarithms of 4, 3, 2, 1: probabilities .4, .3, .2, .1."""
    logits = np.log(np.array([1, 4, 2, 3], np.float32))

    def of(**options: Any) -> dict[int, float]:
        return {i: round(p, 6) for i, p in distribution(sampler(4, [], **options), logits).items()}

    assert of() == {1: 0.4, 3: 0.3, 2: 0.2, 0: 0.1}
    assert of(top_k=2) == {1: round(4 / 7, 6), 3: round(3 / 7, 6)}
    assert list(of(top_p=0.65)) == [1, 3]
    assert list(of(top_p=0.75)) == [1, 3, 2]
    assert list(of(top_k=3, top_p=0.75)) == [1, 3]  # of what top_k leaves, 4/9 + 3/9
    assert list(of(min_p=0.4)) == [1, 3, 2]
    assert of(temperature=0.5, top_k=2) == {1: 16 / 25, 3: 9 / 25}
    assert of(logit_bias={1: -math.inf}, top_k=1) == {3: 1.0}


def test_draws_follow_the_distribution() -> None:
    made = sampler(seen=[], temperature=1.5, top_k=6)
    wanted = distribution(made)
    n = 20_000
    counts = np.bincount([made.pick(LOGITS, position=0) for _ in range(n)], minlength=8)
    assert counts[[i for i in range(8) if i not in wanted]].sum() == 0
    chi2 = sum((counts[i] - n * p) ** 2 / (n * p) for i, p in wanted.items())
    assert chi2 < 20.5  # 5 degrees of freedom: one seed in a thousand is above


def test_a_draw_is_where_the_running_sum_passes_the_point() -> None:
    scores = np.log(np.array([1.0, 4.0, 2.0, 3.0]))
    points = [(0.0, 1), (0.39, 1), (0.41, 3), (0.69, 3), (0.71, 2), (0.89, 2), (0.91, 0)]
    for point, token in points:
        assert ranking.draw(scores, 4, 1.0, point) == token
    assert ranking.draw(scores, 2, 1.0, 0.99) == 3
    assert ranking.draw(np.zeros(4), 4, 1.0, 0.5) == 2  # the sums are 1, 2, 3, 4


def test_what_has_no_probability_is_never_drawn() -> None:
    far = np.array([0.0, -1e6, 0.0, -2e6, -np.inf], np.float64)
    almost_one = 1 - 2**-53
    for size in range(2, 6):
        assert ranking.draw(far, size, 1.0, almost_one) == 2
        assert ranking.draw(far, size, 1e-300, almost_one) == 2
    many = np.full(5000, -1e6)
    many[4321] = 0.0
    assert ranking.draw(many, 5000, 1.0, almost_one) == 4321
    for seed in range(10):  # some of whose running sums end below the sum at once
        rows = np.random.default_rng(seed).standard_normal(3000)
        rows[2000:] = -1e6
        assert ranking.draw(rows, 3000, 1.0, almost_one) < 2000


@pytest.mark.parametrize("size", [1, 2, 63, 64, 65, 500, 4000, 5000])
def test_ranking_equals_a_full_sort(size: int) -> None:
    rng = np.random.default_rng(size)
    for n in (size, 5000, 5003):
        scores = np.round(rng.standard_normal(max(n, size)) * 30) / 10  # many ties
        scores[rng.random(len(scores)) < 0.1] = -np.inf
        wanted = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:size]
        assert ranking.highest(scores, size).tolist() == wanted


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"top_p": 0.999}, {"top_k": 2000}])
@pytest.mark.parametrize("spread", [0.01, 1.0, 5.0])
def test_a_large_vocabulary_is_ranked_as_far_as_needed(
    options: dict[str, Any], spread: float
) -> None:
    rng = np.random.default_rng(3)
    logits = (spread * rng.standard_normal(20_000)).astype(np.float32)
    made = sampler(20_000, [], **options)
    wanted = reference(made.sampling, logits, [])
    assert_same(distribution(made, logits), wanted)
    running = np.cumsum(list(wanted.values()))
    for seed in range(10):
        point = np.random.Generator(np.random.PCG64(seed)).random()
        token = list(wanted)[int(np.searchsorted(running, point, side="right"))]
        assert sampler(20_000, [], seed=seed, **options).pick(logits, position=0) == token


def test_top_k_1_is_greedy_at_any_seed_and_the_lowest_id_of_a_tie() -> None:
    ties = np.array([1.0, 7.0, 7.0, 7.0], np.float32)
    for seed in range(20):
        assert sampler(4, [], top_k=1, seed=seed).pick(ties, position=0) == 1
        assert sampler(4, [], top_p=0.0, seed=seed).pick(ties, position=0) == 1
    assert distribution(sampler(4, [], min_p=1.0), ties) == {1: 1 / 3, 2: 1 / 3, 3: 1 / 3}
    greedy = sampler(4, [], temperature=0.0)
    assert [greedy.pick(ties, position=0) for _ in range(3)] == [1, 1, 1]
    zeros = np.array([-0.0, 0.0], np.float32)
    assert sampler(2, [], temperature=0.0).pick(zeros, position=0) == 0


def test_off_is_off() -> None:
    off = sampler(top_k=0, top_p=1.0, min_p=0.0, repeat_penalty=1.0, logit_bias={3: 0.0})
    plain = sampler()
    assert distribution(off) == distribution(plain) == distribution(sampler(top_k=8))
    picks = [[s.pick(LOGITS, position=0) for _ in range(50)] for s in (off, plain)]
    assert picks[0] == picks[1] and len(set(picks[0])) > 3


def test_permuted_tokens_permute_the_outcome() -> None:
    order = np.random.default_rng(5).permutation(8)
    place = np.argsort(order)  # token i of the plain logits is token place[i] of the permuted
    options: dict[str, Any] = {"top_p": 0.95, "repeat_penalty": 1.2, "frequency_penalty": 0.1}
    plain = sampler(**options, logit_bias={4: 2.0})
    moved = sampler(seen=[int(place[t]) for t in SEEN], **options, logit_bias={int(place[4]): 2.0})
    for _ in range(50):
        token = plain.pick(LOGITS, position=0)
        assert moved.pick(LOGITS[order], position=0) == place[token]


def test_the_same_seed_gives_the_same_tokens_and_a_drawn_one_is_told() -> None:
    def picks(made: Sampler) -> list[int]:
        return [made.pick(LOGITS, position=0) for _ in range(40)]

    assert picks(sampler(seed=3)) == picks(sampler(seed=3)) != picks(sampler(seed=4))
    drawn = sampler(seed=None)
    assert 0 <= drawn.sampling.seed < 2**32
    assert picks(drawn) == picks(sampler(seed=drawn.sampling.seed))
    assert sampler(seed=None).sampling.seed != drawn.sampling.seed
    assert sampler(temperature=0.0, seed=None).sampling.seed is None
    # PCG64 as numpy seeds it: the first number of seed 7 is 0.625095...
    assert np.random.Generator(np.random.PCG64(7)).random() == pytest.approx(0.6250954)
    wanted = list(np.searchsorted(np.cumsum(list(distribution(sampler()).values())), [0.6250954]))
    assert [list(distribution(sampler())).index(sampler().pick(LOGITS, position=0))] == wanted


def test_the_window_moves_with_the_tokens() -> None:
    made = sampler(4, [0, 1], temperature=0.0, presence_penalty=9.0, repeat_last_n=2)
    logits = np.array([4, 3, 2, 1], np.float32)
    assert [made.pick(logits, position=i) for i in range(6)] == [2, 0, 1, 2, 0, 1]


def test_a_state_is_json_and_goes_on_where_it_was() -> None:
    made = sampler(frequency_penalty=0.5)
    for _ in range(5):
        made.pick(LOGITS, position=0)
    state = json.loads(json.dumps(made.state()))
    rest = [made.pick(LOGITS, position=0) for _ in range(30)]
    other = sampler(seen=[0, 0, 6], frequency_penalty=0.5, seed=99)
    other.restore(state)
    assert [other.pick(LOGITS, position=0) for _ in range(30)] == rest


@pytest.mark.parametrize(
    "change",
    [
        {"random": None},
        {"random": {"bit_generator": "MT19937"}},
        {"last": None},
        {"last": ["a"]},
        {"last": [-1]},
        {"last": [8]},  # of a larger vocabulary
    ],
)
def test_what_is_no_state_is_refused_and_changes_nothing(change: dict[str, Any]) -> None:
    made = sampler()
    before = made.state()
    other = sampler(seed=99, seen=[1]).state() | change
    for state in (other, {k: v for k, v in other.items() if k not in change}):
        with pytest.raises(Refusal):
            made.restore(state)
        assert made.state() == before


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"logit_bias": {3: -math.inf}}])
def test_logits_that_are_not_finite_stop(bad: float, options: dict[str, Any]) -> None:
    logits = np.zeros(8, np.float32)
    logits[3] = bad
    made = sampler(**options)
    for call in (made.pick, made.distribution):
        with pytest.raises(Refusal, match="1 of 8 logits at position 41 are not finite") as caught:
            call(logits, position=41)
        assert caught.value.rule == "4.2" and caught.value.facts == {"position": 41, "bad": 1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, r"temperature -0\.1 is outside 0 \.\. 100"),
        ({"temperature": math.nan}, "temperature nan is outside"),
        ({"temperature": "1"}, "temperature '1' is outside"),
        ({"temperature": True}, "temperature True is outside"),
        ({"temperature": 10**400}, "temperature 10+ is outside"),
        ({"logit_bias": {0: -(10**400)}}, "of token 0 -10+ is outside"),
        ({"top_k": -1}, "top_k -1 is below 0"),
        ({"top_k": 1.0}, "top_k 1.0 is no whole number"),
        ({"top_p": 1.01}, r"top_p 1\.01 is outside 0 \.\. 1;"),
        ({"min_p": -1}, "min_p -1 is outside 0 .. 1"),
        ({"repeat_penalty": 0}, r"repeat_penalty 0 is outside 0\.01 \.\. 100"),
        ({"presence_penalty": math.inf}, "presence_penalty inf is outside -100 .. 100"),
        ({"frequency_penalty": None}, "frequency_penalty None is outside"),
        ({"repeat_last_n": 0}, "repeat_last_n 0 is below 1"),
        ({"seed": -1}, "seed -1 is below 0"),
        ({"seed": 2**64}, f"seed {2**64} is above {2**64 - 1}"),
        ({"logit_bias": {0: math.inf}}, r"of token 0 inf is outside -1000 \.\. 1000 or -inf"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias of token -1 is below 0"),
        ({"logit_bias": {"a": 1.0}}, "logit_bias of token 'a' is no whole number"),
        ({"logit_bias": 5}, "logit_bias 5 is no mapping"),
        ({"logit_bias": [1, 2]}, r"logit_bias \[1, 2\] is no mapping"),
        ({"logit_bias": {8: 1.0}}, "logit_bias of token 8 is above 7"),
        ({"logit_bias": dict.fromkeys(range(8), -math.inf)}, "logit_bias bans all 8 tokens"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(Refusal, match=message) as caught:
        Sampler(Sampling(**options), 8)
    assert caught.value.rule == "10"


@pytest.mark.parametrize("token", [-1, 8, 0.5])
def test_tokens_of_another_vocabulary_are_refused_before_any_counts(token: Any) -> None:
    made = sampler()
    with pytest.raises(Refusal, match=f"token {token} is"):
        made.see([3, token])
    assert made.state()["last"] == SEEN


def test_logits_of_another_vocabulary_are_refused() -> None:
    with pytest.raises(Refusal, match=r"logits have shape \[7\]; wanted is \[8\]"):
        sampler().pick(LOGITS[:7], position=0)


@pytest.mark.parametrize("token", [-1, 8, 2**70, "a", 1.0])
def test_what_is_no_token_is_not_seen(token: Any) -> None:
    made = sampler(repeat_penalty=2.0)
    before = made.state()
    with pytest.raises(Refusal, match="token"):
        made.see([1, token])
    assert made.state() == before


@pytest.mark.parametrize("again", [5, np.int64(5)])
def test_a_token_has_one_bias(again: Any) -> None:
    pairs = ((5, 1.0), (2, 1.0), (again, -math.inf))
    with pytest.raises(Refusal, match="gives token 5 twice, 1 and -inf; give it one") as caught:
        Sampling(logit_bias=pairs)
    assert caught.value.rule == "0.3"
    assert caught.value.facts == {"token": 5, "biases": (1.0, -math.inf)}


def test_options_are_a_value() -> None:
    options = Sampling(temperature=1, logit_bias={5: -math.inf, np.int64(2): 1})
    assert options == Sampling(temperature=1.0, logit_bias=((2, 1.0), (5, -math.inf)))
    assert len({options, Sampling()}) == 2
    assert json.loads(json.dumps(options.as_dict()))["logit_bias"] == {"2": 1.0, "5": "-inf"}


def test_the_example_of_the_library_page_runs() -> None:
    page = (Path(__file__).parent.parent / "docs" / "library.md").read_text()
    (example,) = re.findall(r"```python\n([^`]*minfer\.Sampler[^`]*)```", page)
    names: dict[str, Any] = {}
    exec(compile(example, "library.md", "exec"), names)
    ids, probabilities = names["ids"], names["probabilities"]
    assert names["token"] in ids and probabilities.sum() == pytest.approx(1.0)
    assert len(ids) < 40 and (np.diff(probabilities) <= 0).all()
    assert names["saved"]["last"] == [5, 7, 7, names["token"]]
