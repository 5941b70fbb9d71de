"""Every configuration of the variants that a question has, by number, without a list of them."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from minfer.errors import Refusal
from minfer.ops import Tunable, Variant
from minfer.ops.overrides import SHARED
from tuning.sweep.configuration import Configuration

if TYPE_CHECKING:
    from optuna.trial import Trial as OptunaTrial

VARIANT = "variant"  # what Optuna calls the choice between variants


@dataclass(frozen=True)
class Choices:
    """What a sweep tries for each searched tunable of one variant."""

    variant: Variant
    values: Mapping[str, tuple[Any, ...]]

    @property
    def size(self) -> int:
        return math.prod(map(len, self.values.values()))

    def places(self, configuration: Configuration) -> list[int]:
        """The place of each value among its choices; ValueError for one that is no choice."""
        if tuple(name for name, _ in configuration.values) != tuple(self.values):
            raise ValueError(f"{configuration.key} has other tunables than {self.variant.name}")
        return [_place(self.values[name], value) for name, value in configuration.values]

    def number(self, places: Sequence[int]) -> int:
        """Places as one number, the last running fastest."""
        number = 0
        for place, choices in zip(places, self.values.values(), strict=True):
            number = number * len(choices) + place
        return number

    def places_of(self, number: int) -> list[int]:
        """What `number` makes that number of."""
        places = []
        for choices in reversed(list(self.values.values())):
            number, place = divmod(number, len(choices))
            places.append(place)
        return places[::-1]

    def at(self, places: Sequence[int]) -> Configuration:
        """The configuration with the values at these places."""
        chosen = zip(self.values.items(), places, strict=True)
        values = tuple((name, choices[place]) for (name, choices), place in chosen)
        return Configuration(self.variant.name, values)


class Space:
    """The configurations of `variants`, numbered from 0: variant by variant, the last tunable of
    each running fastest.

    A tunable may be any of its values, or its default where that is none of them. Refuses no
    variants, and a searched tunable without values or with one that JSON does not hold.
    """

    def __init__(self, variants: Sequence[Variant]) -> None:
        if not variants:
            raise Refusal("6.4", "no variant is given, so there is nothing to search; name one")
        self.parts = tuple(Choices(v, _choices(v)) for v in variants)

    @property
    def variants(self) -> list[Variant]:
        return [part.variant for part in self.parts]

    @cached_property
    def size(self) -> int:
        return sum(part.size for part in self.parts)

    @cached_property
    def defaults(self) -> tuple[Configuration, ...]:
        """The default configuration of each variant."""
        return tuple(Configuration.default(part.variant) for part in self.parts)

    def __iter__(self) -> Iterator[Configuration]:
        return map(self.at, range(self.size))

    def __contains__(self, configuration: Configuration) -> bool:
        try:
            self.index(configuration)
        except ValueError:
            return False
        return True

    def at(self, index: int) -> Configuration:
        """The configuration of that number; IndexError outside 0 ... size - 1."""
        if not 0 <= index < self.size:
            raise IndexError(f"{index} is not in a space of {self.size} configurations")
        for part in self.parts:
            if index < part.size:
                break
            index -= part.size
        return part.at(part.places_of(index))

    def index(self, configuration: Configuration) -> int:
        """The number of a configuration; ValueError for one that is not in the space."""
        before = 0
        for part in self.parts:
            if part.variant.name == configuration.variant:
                return before + part.number(part.places(configuration))
            before += part.size
        raise ValueError(f"{configuration.variant} is none of the variants here")

    def suggest(self, trial: OptunaTrial) -> Configuration:
        """The configuration that Optuna's sampler picks for `trial`.

        Tunables are named `split.block_n` and asked for the chosen variant only. All are
        categorical, by place: a default of 0 often stands for what was measured and has no place
        in an order, and on simulated kernels TPE found as good configurations as with ordered
        places, in half the time.
        """
        part = self.parts[0]
        if len(self.parts) > 1:
            part = self.parts[trial.suggest_categorical(VARIANT, tuple(range(len(self.parts))))]
        places = [
            trial.suggest_categorical(name, tuple(range(len(choices))))
            for name, choices in _named(part).items()
        ]
        return part.at(places)

    def near(self, configuration: Configuration, draw: random.Random) -> Configuration:
        """The same with one tunable drawn anew; now and then any configuration."""
        part = next(p for p in self.parts if p.variant.name == configuration.variant)
        changed = draw.randrange(len(part.values) + 1)
        if changed == len(part.values):
            return self.at(draw.randrange(self.size))
        places = part.places(configuration)
        places[changed] = draw.randrange(len(list(part.values.values())[changed]))
        return part.at(places)

    def params(self, configuration: Configuration) -> dict[str, int]:
        """What `suggest` has asked for when it returns `configuration`."""
        number = [part.variant.name for part in self.parts].index(configuration.variant)
        part = self.parts[number]
        chosen = {VARIANT: number} if len(self.parts) > 1 else {}
        return chosen | dict(zip(_named(part), part.places(configuration), strict=True))


def _named(part: Choices) -> dict[str, tuple[Any, ...]]:
    return {f"{part.variant.name}.{name}": choices for name, choices in part.values.items()}


def _choices(variant: Variant) -> dict[str, tuple[Any, ...]]:
    """Choices of each searched tunable: its values, the default before them if it is another."""
    made = {}
    for name, tunable in variant.space.items():
        if not tunable.searched:
            continue
        what = f"{variant.op}_{variant.name}.{name}"
        if name in SHARED:
            why = f"the caller decides {what}: a sweep cannot; declare it with searched=False"
            raise Refusal("6.4", why, {"variant": variant.name, "tunable": name})
        if not tunable.values:
            why = f"the tunable {what} has no values, so its space is empty; give it some"
            raise Refusal("6.4", why, {"variant": variant.name, "tunable": name})
        for value in (tunable.default, *tunable.values):
            if not _in_json(value):
                why = f"{value!r} of {what} is no number, text, bool or None; give one of these"
                raise Refusal("6.4", why, {"variant": variant.name, "tunable": name})
        made[name] = _distinct(tunable)
    return made


def _in_json(value: Any) -> bool:
    kinds = (bool, int, float, str, type(None))
    return type(value) in kinds and (type(value) is not float or math.isfinite(value))


def _distinct(tunable: Tunable) -> tuple[Any, ...]:
    """Told apart by their text, as the keys of configurations tell them apart."""
    by_text = {str(value): value for value in tunable.values}
    if str(tunable.default) in by_text:
        return tuple(by_text.values())
    return (tunable.default, *by_text.values())


def _place(choices: tuple[Any, ...], value: Any) -> int:
    return [str(choice) for choice in choices].index(str(value))
