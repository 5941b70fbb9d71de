"""The configurations of a question: numbered, and picked by Optuna."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minfer import registry
from minfer.errors import Refusal
from minfer.ops import Tunable, Variant
from tuning.sweep.configuration import Configuration
from tuning.sweep.space import Space


def made(name: str, space: Mapping[str, Tunable]) -> Variant:
    """A variant that is never launched."""
    like = registry.variants("attn_window", "cpu")[0]
    return replace(like, name=name, space=dict(space))


SPLIT = made(
    "split",
    {
        "block_n": Tunable(0, (16, 32), numeric=True),
        "threads": Tunable(1, (1, 2, 4), searched=False),
        "stages": Tunable(3, (2, 3, 4)),
    },
)
FLASH = made("flash", {"exact": Tunable(True, (True, False)), "mode": Tunable("a", ("a", None))})
PLAIN = made("plain", {"threads": Tunable(1, (), searched=False)})


def test_grid_has_defaults_and_values_in_a_fixed_order() -> None:
    space = Space([SPLIT, PLAIN, FLASH])
    split = [(("block_n", n), ("stages", s)) for n in (0, 16, 32) for s in (2, 3, 4)]
    flash = [(("exact", e), ("mode", m)) for e in (True, False) for m in ("a", None)]
    assert [(c.variant, c.values) for c in space] == [
        *(("split", values) for values in split),
        ("plain", ()),
        *(("flash", values) for values in flash),
    ]
    assert space.size == 14
    assert space.defaults == (
        Configuration("split", (("block_n", 0), ("stages", 3))),
        Configuration("plain"),
        Configuration("flash", (("exact", True), ("mode", "a"))),
    )


def test_what_is_not_in_the_space() -> None:
    space = Space([SPLIT, FLASH])
    for stranger in (
        Configuration("ring"),
        Configuration("split", (("block_n", 64), ("stages", 3))),
        Configuration("split", (("stages", 3), ("block_n", 16))),
        Configuration("split", (("block_n", 16),)),
    ):
        assert stranger not in space
        with pytest.raises(ValueError):
            space.index(stranger)
    for index in (-1, space.size):
        with pytest.raises(IndexError, match=f"{index} is not in a space of 13"):
            space.at(index)


def test_values_given_twice_count_once() -> None:
    space = Space([made("split", {"block_n": Tunable(16, (16, 32, 16))})])
    assert [c.key for c in space] == ["split block_n=16", "split block_n=32"]


def test_an_empty_space_is_refused() -> None:
    with pytest.raises(Refusal, match="no variant is given"):
        Space([])
    with pytest.raises(Refusal, match=r"attn_window_none\.block_n has no values"):
        Space([SPLIT, made("none", {"block_n": Tunable(0, ())})])


@pytest.mark.parametrize("value", [(1, 2), math.nan, b"x"], ids=repr)
def test_values_that_a_row_cannot_hold_are_refused(value: Any) -> None:
    with pytest.raises(Refusal, match=r"attn_window_odd\.block_n is no number") as caught:
        Space([made("odd", {"block_n": Tunable(0, (16, value))})])
    assert caught.value.facts == {"variant": "odd", "tunable": "block_n"}


def test_what_the_caller_decides_is_not_searched() -> None:
    with pytest.raises(Refusal, match=r"the caller decides attn_window_own\.threads"):
        Space([made("own", {"threads": Tunable(1, (1, 2))})])


def test_variants_of_the_package_have_a_space() -> None:
    found = registry.variants("attn_window", "cpu")
    space = Space(found)
    assert [c.variant for c in space.defaults] == [v.name for v in found]
    assert all(name != "threads" for c in space for name, _ in c.values)


values = st.one_of(st.integers(-9, 99), st.booleans(), st.sampled_from(["a", "b"]), st.none())
tunables = st.builds(
    Tunable,
    values,
    st.lists(values, min_size=1, max_size=4).map(tuple),
    searched=st.booleans(),
)
spaces = st.lists(
    st.dictionaries(st.sampled_from(["block_n", "warps", "stages", "waves"]), tunables),
    min_size=1,
    max_size=3,
).map(lambda found: Space([made(f"v{i}", space) for i, space in enumerate(found)]))


@given(spaces)
def test_numbers_and_configurations_are_one_to_one(space: Space) -> None:
    found = list(space)
    assert len(found) == space.size == len({c.key for c in found})
    assert [space.index(c) for c in found] == list(range(space.size))
    assert set(space.defaults) <= set(found)


def test_millions_are_numbered_without_a_list() -> None:
    wide = {f"t{i}": Tunable(0, tuple(range(10))) for i in range(12)}
    space = Space([PLAIN, made("wide", wide)])
    assert space.size == 10**12 + 1
    last = Configuration("wide", tuple((f"t{i}", 9) for i in range(12)))
    assert space.at(10**12) == last and space.index(last) == 10**12
    assert space.at(1 + 123).config == dict(zip(wide, [0] * 9 + [1, 2, 3], strict=True))


class Picks:
    """A trial of Optuna whose sampler is `data`; keeps what it was asked for."""

    def __init__(self, data: st.DataObject) -> None:
        self.data, self.asked = data, {}

    def suggest_categorical(self, name: str, choices: tuple[int, ...]) -> int:
        assert name not in self.asked
        self.asked[name] = self.data.draw(st.sampled_from(choices))
        return self.asked[name]


@given(spaces, st.data())
def test_suggestions_stay_in_the_space(space: Space, data: st.DataObject) -> None:
    trial = Picks(data)
    found = space.suggest(trial)
    assert found in space
    assert trial.asked == space.params(found)
    assert ("variant" in trial.asked) == (len(space.parts) > 1)
    tunables = {name for name in trial.asked if name != "variant"}
    assert tunables == {f"{found.variant}.{name}" for name in found.config}


@given(spaces, st.randoms(use_true_random=False))
def test_what_is_near_is_in_the_space(space: Space, draw: random.Random) -> None:
    here = space.at(draw.randrange(space.size))
    near = [space.near(here, draw) for _ in range(9)]
    assert all(found in space for found in near)


def test_what_is_near_differs_in_one_tunable_or_in_all() -> None:
    space, draw = Space([SPLIT, FLASH]), random.Random(1)
    here = space.at(4)
    near = {space.near(here, draw) for _ in range(300)}
    assert near == set(space)
    alike = [
        sum(a == b for a, b in zip(space.near(here, draw).values, here.values, strict=True))
        for _ in range(300)
    ]
    assert alike.count(0) < 90 and alike.count(1) > 60
