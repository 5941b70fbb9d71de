"""Dataclasses to and from JSON, strictly by the types of their fields.

A reader is made once for a type and is called with what `json.loads` gave. Pairs with a name, as
in `tuple[tuple[str, Any], ...]`, are an object, in order; keys that are whole numbers are text.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping
from functools import cache
from math import inf, isfinite
from typing import Any

Reader = Callable[[Any], Any]
NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


class BadField(ValueError):
    """A value that cannot be that of its field: `path` names the field, `problem` says why."""

    def __init__(self, problem: str, path: str = "") -> None:
        super().__init__(problem, path)
        self.problem, self.path = problem, path

    def within(self, name: str) -> BadField:
        """The same, seen from one level up."""
        inner = self.path if not self.path or self.path.startswith("[") else f".{self.path}"
        return BadField(self.problem, name + inner)

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}" if self.path else self.problem


def to_json(value: Any) -> Any:
    """What `json.dumps` takes for a dataclass, and for all that its fields may hold."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        made = _plan(type(value))
        return {name: made[name].write(getattr(value, name)) for name in made}
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    return [to_json(item) for item in value] if isinstance(value, list | tuple) else value


@cache
def reader(kind: Any) -> Reader:
    """What makes a value of type `kind`; raises BadField."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return _any
    if kind is float:
        return _float
    if kind in NAMES:
        return _plain(kind)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _dataclass(kind)
    if origin is types.UnionType and len(inner) == 2 and inner[1] is types.NoneType:
        return _optional(reader(inner[0]))
    if _is_pairs(kind):
        named = _mapping(str, reader(typing.get_args(inner[0])[1]))
        return lambda value: tuple(named(value).items())
    if kind == tuple[float, ...]:
        return _floats
    if origin is tuple and inner[1:] == (...,):
        return _sequence(reader(inner[0]))
    if origin is Mapping and inner[0] in (str, int):
        return _mapping(inner[0], reader(inner[1]))
    raise TypeError(f"a row has no fields of type {kind}")


def _is_pairs(kind: Any) -> bool:
    inner = typing.get_args(kind)
    pair = typing.get_args(inner[0]) if typing.get_origin(kind) is tuple else ()
    return len(pair) == 2 and pair[0] is str and inner[1:] == (...,)


@dataclasses.dataclass(frozen=True)
class _Field:
    read: Reader
    write: Callable[[Any], Any]


@cache
def _plan(kind: type) -> dict[str, _Field]:
    """The fields of a dataclass, by name."""
    hints = typing.get_type_hints(kind)
    made = {}
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        write = (lambda value: to_json(dict(value))) if _is_pairs(hint) else to_json
        made[field.name] = _Field(reader(hint), write)
    return made


def _dataclass(kind: type) -> Reader:
    plan = _plan(kind)
    readers = [(name, field.read) for name, field in plan.items()]

    def read(value: Any) -> Any:
        if type(value) is not dict:
            raise _not("an object", value)
        if value.keys() != plan.keys():
            for name in plan:
                if name not in value:
                    raise BadField("missing", name)
            raise BadField("unknown", next(name for name in value if name not in plan))
        try:
            made = [read_field(value[name]) for name, read_field in readers]
        except BadField:
            raise _first(readers, value) from None
        return kind(*made)

    return read


def _sequence(read_item: Reader) -> Reader:
    def read(value: Any) -> tuple[Any, ...]:
        if type(value) is not list:
            raise _not("a list", value)
        try:
            return tuple([read_item(item) for item in value])
        except BadField:
            places = [(place, read_item) for place in range(len(value))]
            raise _first(places, value) from None

    return read


def _first(readers: list[tuple[Any, Reader]], value: Any) -> BadField:
    """What is wrong with the first part of `value` that cannot be read, and where it is."""
    for place, read in readers:
        try:
            read(value[place])
        except BadField as error:
            return error.within(place if isinstance(place, str) else f"[{place}]")
    raise AssertionError("every part can be read")


def _mapping(key_kind: type, read_item: Reader) -> Reader:
    def read(value: Any) -> dict[Any, Any]:
        if type(value) is not dict:
            raise _not("an object", value)
        made: dict[Any, Any] = {}
        for key, item in value.items():
            try:
                made[key if key_kind is str else _whole(key)] = read_item(item)
            except BadField as error:
                raise error.within(f"[{key!r}]") from None
        return made

    return read


def _whole(key: str) -> int:
    try:
        if str(number := int(key)) == key:
            return number
    except ValueError:
        pass
    raise BadField("its name is no whole number")


def _optional(read_item: Reader) -> Reader:
    return lambda value: None if value is None else read_item(value)


def _plain(kind: type) -> Reader:
    def read(value: Any) -> Any:
        if type(value) is not kind:
            raise _not(NAMES[kind], value)
        return value

    return read


def _float(value: Any) -> float:
    if type(value) is int:
        value = float(value) if abs(value) < 2**1023 else inf
    if type(value) is not float:
        raise _not("a number", value)
    if not isfinite(value):
        raise BadField(f"{value} is not finite")
    return value


def _floats(value: Any) -> tuple[float, ...]:
    """Most of what there is to read, so checked at once where it can be."""
    if type(value) is list and set(map(type, value)) == {float} and isfinite(sum(value)):
        return tuple(value)
    return _EACH_FLOAT(value)  # type: ignore[no-any-return]


def _any(value: Any) -> Any:
    """Any JSON value, numbers finite."""
    if type(value) is float:
        return _float(value)
    if type(value) is list:
        return list(_ANY_LIST(value))
    if type(value) is dict:
        return _ANY_DICT(value)
    if value is None or type(value) in NAMES:
        return value
    raise _not("a JSON value", value)


_EACH_FLOAT = _sequence(_float)
_ANY_LIST, _ANY_DICT = _sequence(_any), _mapping(str, _any)


def _not(wanted: str, value: Any) -> BadField:
    text = repr(value)
    shown = text if len(text) <= 40 else text[:37] + "..."
    return BadField(f"{shown} is not {wanted}")
