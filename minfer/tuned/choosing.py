"""What promoted rows say about one choice."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from minfer.device import Device
from minfer.errors import Refusal
from minfer.format import KvFormat
from minfer.ops import Tunable, Variant
from minfer.ops.overrides import configure
from minfer.tuned.machine import made_with
from minfer.tuned.rows import Row
from minfer.tuned.saying import say
from minfer.tuned.sources import source_of
from minfer.tuned.table import Found


@dataclass(frozen=True)
class Answer:
    """A variant with its whole configuration, or None. lines: for the receipt, and why not."""

    variant: Variant | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class Asked:
    """One choice. variants: of every op of the family, by op and name, in their order.

    why_not: why a variant does not take the shape, None if it does. overrides: of the caller.
    """

    op: str
    device: Device
    fmt: KvFormat
    n_q: int
    variants: Mapping[str, Mapping[str, Variant]]
    why_not: Callable[[Variant], str | None]
    overrides: Mapping[str, Any]


def answer(found: Found, asked: Asked) -> Answer:
    """The first row that holds here; whatever is wrong with a row, it is only not taken."""
    if found.problem:
        return Answer(lines=(found.problem,))
    fresh, wrong, moot = [], [], []
    for row in found.rows:
        name = f"the tuned row of {row.name} ({found.device_kind})"
        if row.module and not _is_known(row, asked):
            moot.append(f"{name} is for {row.module}; minfer.registry.add makes it known")
        elif problem := unfit(row, asked):
            wrong.append(f"{name} names {problem}")
        elif changes := _changes(row, asked):
            moot.append(f"{name} is stale: {changes}; run `{_sweep(row, asked)}`")
        elif problem := odd(row, asked):
            wrong.append(f"{name} names {problem}")
        else:
            fresh.append(row)
    if len({settled(row, asked) for row in fresh}) > 1:
        names = ", ".join(row.name for row in fresh)
        wrong.append(f"the tuned rows of {names} disagree, and their bits must not (contract 6.1)")
        fresh = []
    told = (*wrong, *([] if fresh else moot))  # where a row is taken, older ones are no news
    for line in told:
        say(line)
    return _taken(fresh, asked, told) if fresh else Answer(lines=told)


def _sweep(row: Row, asked: Asked) -> str:
    of_format = f" --fmt {row.fmt}" if row.fmt else ""
    added = f" --add {row.module}.py" if row.module else ""
    return f"python -m tuning sweep --op {row.op} --device {asked.device}{of_format}{added}"


def _is_known(row: Row, asked: Asked) -> bool:
    """Whether its variant is there, and from the module that it was."""
    variant = asked.variants[row.op].get(row.variant)
    return variant is not None and module_of(variant, asked.device) == row.module


def module_of(variant: Variant, device: Device) -> str:
    """The module of a user's variant, "" for one of the device's own kernel package."""
    module: str = variant.launch.__module__
    return "" if module.startswith(f"{device.backend.package}.") else module


def unfit(row: Row, asked: Asked) -> str:
    """A variant that no row may choose, "" where it may."""
    if not _is_known(row, asked):
        return f"a variant {row.variant}, and there is none"
    chosen = asked.variants[row.op][row.variant]
    if not chosen.invariant:
        return f"{row.variant}, which is not invariant and taken by name only (contract 6.6)"
    for op, known in asked.variants.items():
        other = known.get(row.variant)
        if other is None or _numerics(other, asked.fmt) != _numerics(chosen, asked.fmt):
            return f"{row.variant}, and {op} has none with equal bits (contract 6.1)"
    return ""


def _numerics(variant: Variant, fmt: KvFormat) -> object:
    return variant.invariant, variant.numerics(fmt), _numeric_defaults(variant)


def _numeric_defaults(variant: Variant) -> dict[str, Any]:
    return {name: t.default for name, t in variant.space.items() if t.numeric}


def _changes(row: Row, asked: Asked) -> str:
    """What is another than when the row was made, "" for nothing."""
    try:
        if source_of(asked.variants[row.op][row.variant]) != row.source:
            return "the code of its kernels was another"
    except (OSError, ValueError, SyntaxError):
        return "the code of its kernels cannot be read"
    then, now = row.made_with, made_with(asked.device)
    return ", ".join(
        f"{name} {then.get(name, 'absent')} then, {now.get(name, 'absent')} now"
        for name in {**then, **now}
        if then.get(name) != now.get(name)
    )


def odd(row: Row, asked: Asked) -> str:
    """A tunable or value that is not in the space, "" where all are."""
    space = asked.variants[row.op][row.variant].space
    groups = [(True, row.numeric), *((False, values) for _, values in row.free)]
    for numeric, values in groups:
        for name, value in values.items():
            tunable = space.get(name)
            if tunable is None or tunable.numeric is not numeric or not tunable.searched:
                return f"a {'numeric' if numeric else 'free'} tunable {name}, and there is none"
            if not _is_of(value, tunable):
                return f"{name}={value!r}, which is no value of that tunable"
    return ""


def _is_of(value: object, tunable: Tunable) -> bool:
    known = (tunable.default, *tunable.values)
    return type(value) is type(tunable.default) and value in known


def settled(row: Row, asked: Asked) -> tuple[Any, ...]:
    """What all rows of a family must agree on."""
    variant = asked.variants[row.op][row.variant]
    values = {**_numeric_defaults(variant), **row.numeric}
    return row.variant, row.module, tuple(values.items())


def _taken(fresh: Sequence[Row], asked: Asked, told: tuple[str, ...]) -> Answer:
    own = next((row for row in fresh if row.op == asked.op), None)
    row = own or fresh[0]
    for known in asked.variants.values():  # all of a family, or none
        if why := asked.why_not(known[row.variant]):
            return Answer(lines=(*told, f"not the promoted {row.variant}: {why}"))
    chosen = asked.variants[asked.op][row.variant]
    free = own.free_at(asked.n_q) if own else {}
    try:
        config = configure(chosen, {**row.numeric, **free, **asked.overrides})
    except Refusal as refusal:  # an override that is for another variant
        return Answer(lines=(*told, f"not the promoted {row.variant}: {refusal.message}"))
    return Answer(chosen, config, (row.proof, *told))
