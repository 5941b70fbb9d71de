"""Finding variants and choosing one (contract 6.6).

A choice happens when a graph is built and is part of its identity: an explicit name, or a refusal
with the reasons; else the last variant of the op's home file that takes the shape. Variants of
other files, and of a user's own module given to `add`, are reachable by name only.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from minfer import settings
from minfer.device import Device
from minfer.errors import Refusal
from minfer.format import KvFormat, refuse_odd_blocks
from minfer.ops import ACTIVATIONS, CELLS, F32, OPS, Kernel, Shape, Tunable, Variant
from minfer.receipt import Receipt, receipt_of

ATTENTION = ("attn_window", "attn_map")
SHARED = {"threads": Tunable(1, ()), "activations": Tunable(F32, ACTIVATIONS)}  # if they concern
UNFUSED = "MINFER_NO_FUSED_Q8_KV"  # asks for the variant `scratch` over q8_0 (contract 4.6)

_added: dict[str, list[tuple[Variant, str]]] = {}


@dataclass(frozen=True)
class Choice:
    """A variant with its configuration, ready to launch: `launch(*tensors, **scalars, config=)`."""

    variant: Variant
    config: Mapping[str, Any]
    receipt: Receipt

    @property
    def launch(self) -> Kernel:
        return self.variant.launch

    @property
    def block_m(self) -> int:
        """Queries of a tile; a variant without tiles takes one."""
        return int(self.config.get("block_m", 1))


def variants_of(module: ModuleType) -> Iterator[Variant]:
    """The variants a module defines itself, in the order of its text."""
    found = [
        value.__minfer_variant__
        for value in vars(module).values()
        if hasattr(value, "__minfer_variant__") and value.__module__ == module.__name__
    ]
    yield from sorted(found, key=lambda v: v.source[1])


@cache
def home_file(source: str) -> bool:
    """Whether a file may hold defaults: an experiment's file `<op>__<idea>.py` may not."""
    return "__" not in Path(source).stem


@cache
def collect(package: str) -> Mapping[str, tuple[Variant, ...]]:
    """Every variant of a kernel package by op; a name given twice raises."""
    root = importlib.import_module(package)
    table: dict[str, list[Variant]] = {}
    for info in sorted(pkgutil.iter_modules(root.__path__), key=lambda m: ("__" in m.name, m.name)):
        for found in variants_of(importlib.import_module(f"{package}.{info.name}")):
            rows = table.setdefault(found.op, [])
            _refuse_duplicate(found, rows)
            rows.append(found)
    return {op: tuple(rows) for op, rows in table.items()}


def _refuse_duplicate(new: Variant, rows: list[Variant]) -> None:
    for old in rows:
        if old.name == new.name:
            raise Refusal(
                "6.6",
                f"{new.op}_{new.name} is defined twice: {_where(old)} and {_where(new)}",
                {"op": new.op, "variant": new.name},
            )


def _where(variant: Variant) -> str:
    file, line = variant.source
    return f"{file}:{line}"


def add(module: ModuleType, device: str = "cpu") -> list[str]:
    """Make the variants of a user's module reachable by name on `device`; returns their names."""
    package = Device.parse(device).backend.package
    found = list(variants_of(module))
    if not found:
        raise Refusal("6.6", f"module {module.__name__} holds no @variant function")
    rows = _added.setdefault(package, [])
    known = collect(package)
    others = [old for old, owner in rows if owner != module.__name__]
    for new in found:
        _refuse_duplicate(new, [*known.get(new.op, ()), *(v for v in others if v.op == new.op)])
    rows[:] = [row for row in rows if row[1] != module.__name__]
    rows.extend((new, module.__name__) for new in found)
    return [f"{v.op}_{v.name}" for v in found]


def variants(op: str, device: str | Device = "cpu") -> list[Variant]:
    """All variants of `op` on `device`: the package's own in order, then added ones."""
    if op not in OPS:
        raise Refusal("0.3", f"op {op!r} is none of {', '.join(OPS)}", {"op": op})
    package = Device.parse(device).package().__name__
    added = [v for v, _ in _added.get(package, []) if v.op == op]
    return [*collect(package).get(op, ()), *added]


def _is_added(variant: Variant, package: str) -> bool:
    return any(variant is v for v, _ in _added.get(package, []))


def select(
    op: str,
    *,
    device: str | Device = "cpu",
    fmt: str | KvFormat = KvFormat.F32,
    shape: Shape | None = None,
    variant: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> Choice:
    """Choose a variant of `op`: the named one, or the last of the home file that takes `shape`.

    config: overrides of tunables; one the variant lacks is refused, but for those in `SHARED`.
    """
    parsed, shape, fmt = Device.parse(device), shape or Shape(), KvFormat.parse(fmt)
    candidates = tuple(variants(op, parsed))
    if OPS[op].formats == CELLS:
        refuse_odd_blocks(fmt, shape.head_dim, shape.n_head_kv * shape.head_dim)
    if variant is None and op in ATTENTION and fmt is KvFormat.Q8_0 and settings.flag(UNFUSED):
        variant = "scratch"
    named = tuple((config or {}).items())
    hashable = all(isinstance(value, Hashable) for _, value in named)
    choose = _select if hashable else _select.__wrapped__  # no tunable takes what is not
    return choose(op, parsed, fmt, shape, variant, candidates, named)


@lru_cache(maxsize=512)
def _select(
    op: str,
    parsed: Device,
    fmt: KvFormat,
    shape: Shape,
    variant: str | None,
    candidates: tuple[Variant, ...],
    config: tuple[tuple[str, Any], ...],
) -> Choice:
    """`select` with everything settled; equal questions share one answer."""
    package = parsed.backend.package
    reasons: list[tuple[str, str]] = []
    accepted: list[Variant] = []
    for candidate in candidates:
        why = _why_not(candidate, parsed, fmt, shape)
        by_name_only = (
            not candidate.default
            or _is_added(candidate, package)
            or not home_file(candidate.source[0])
        )
        if why is None and variant is None and by_name_only:
            why = "is taken by name only"
        if why is None and variant not in (None, candidate.name):
            why = f"{variant} was asked for by name"
        if why is None:
            accepted.append(candidate)
        else:
            reasons.append((candidate.name, why))
    if not accepted:
        raise _nothing_fits(op, parsed, fmt, variant, candidates, reasons)
    *earlier, chosen = accepted
    reasons += [(v.name, f"{chosen.name} comes later and takes it too") for v in earlier]
    full = MappingProxyType(_configure(chosen, dict(config)))
    return Choice(chosen, full, receipt_of(chosen, parsed, fmt, shape, full, variant, reasons))


def _why_not(candidate: Variant, device: Device, fmt: KvFormat, shape: Shape) -> str | None:
    if OPS[candidate.op].formats and fmt not in candidate.formats:
        return f"does not read {fmt}"
    return candidate.limits.why_not(shape, device.package().compute_capability(), fmt)


def _nothing_fits(
    op: str,
    device: Device,
    fmt: KvFormat,
    asked: str | None,
    candidates: Sequence[Variant],
    reasons: list[tuple[str, str]],
) -> Refusal:
    names = [v.name for v in candidates]
    if asked is not None and asked not in names:
        message = f"{op} has no variant {asked!r} on {device}; there are {', '.join(names)}"
        if asked == "scratch" and settings.flag(UNFUSED):
            message += f"; {UNFUSED}=1 asks for it, unset it"
    elif asked is not None:
        message = f"{op}_{asked} on {device} with {fmt}: {dict(reasons)[asked]}"
        message += "; name no variant to get the default"
    else:
        tried = "; ".join(f"{name} {why}" for name, why in reasons) or "it has none"
        message = f"no variant of {op} on {device} takes this {fmt} shape: {tried}"
    return Refusal("6.6", message, {"op": op, "device": device.name, "fmt": fmt.value})


def _configure(chosen: Variant, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of `chosen` with `overrides`, each checked against its tunable."""
    unknown = [k for k in overrides if k not in chosen.space and k not in SHARED]
    if unknown:
        raise Refusal(
            "6.4",
            f"{chosen.op}_{chosen.name} has no tunable {', '.join(unknown)}; "
            f"it has {', '.join(chosen.space) or 'none'}",
            {"unknown": unknown},
        )
    for name, value in overrides.items():
        _check_value(chosen, name, value, chosen.space.get(name) or SHARED[name])
    return {**chosen.config(), **{k: v for k, v in overrides.items() if k in chosen.space}}


def _check_value(chosen: Variant, name: str, value: object, tunable: Tunable) -> None:
    """Refuse another type than the default's, a number below 1 and a word that is none of these."""
    default = tunable.default
    if type(value) is not type(default):
        problem = f"is a {type(value).__name__}, not a {type(default).__name__}"
    elif isinstance(value, int) and value < 1:
        problem = "is below 1"
    elif isinstance(value, str) and value not in tunable.values:
        problem = f"is none of {', '.join(tunable.values)}"
    else:
        return
    raise Refusal(
        "6.4",
        f"{name} {value!r} of {chosen.op}_{chosen.name} {problem}; the default is {default!r}",
        {"name": name, "value": value, "default": default},
    )


def explain(op: str, **how: Any) -> Receipt:
    """The receipt of `select(op, **how)`: what would run, and why."""
    return select(op, **how).receipt
