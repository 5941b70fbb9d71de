"""Finding variants and choosing one (contract 6.6).

A choice happens when a graph is built and is part of its identity: an explicit name, or a refusal
with the reasons; else what a promoted row says (`minfer.tuned`); else the last variant of the op's
home file that takes the shape. Variants of other files, and of a user's own module given to `add`,
are reachable by name and by such a row only.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from minfer import settings, tuned
from minfer.device import Device
from minfer.errors import Refusal
from minfer.format import KvFormat, refuse_odd_blocks
from minfer.ops import CELLS, OPS, Kernel, Shape, Variant
from minfer.ops.overrides import configure
from minfer.receipt import Receipt, receipt_of

ATTENTION = ("attn_window", "attn_map")
UNTUNED = "MINFER_NO_TUNED"
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
    return "{}:{}".format(*variant.source)


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
    return declared(op, Device.parse(device).package().__name__)


def declared(op: str, package: str) -> list[Variant]:
    """`variants` of a kernel package, whether or not its device is here."""
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
    promoted: bool = True,
) -> Choice:
    """Choose a variant of `op`: the named one, a promoted one, or the last that takes `shape`.

    config: overrides of tunables; one the variant lacks is refused, but for threads and
    activations. promoted: False leaves promoted rows out.
    """
    parsed, shape, fmt = Device.parse(device), shape or Shape(), KvFormat.parse(fmt)
    candidates = tuple(variants(op, parsed))
    if OPS[op].formats == CELLS:
        refuse_odd_blocks(fmt, shape.head_dim, shape.n_head_kv * shape.head_dim)
    if variant is None and op in ATTENTION and fmt is KvFormat.Q8_0 and settings.flag(UNFUSED):
        variant = "scratch"
    named = tuple((config or {}).items())
    plain = all(type(value) in (int, str) for _, value in named)
    choose = _select if plain else _select.__wrapped__  # True and 1.0 would pass for 1
    untuned = variant is not None or not promoted or settings.flag(UNTUNED)
    rows = tuned.NOTHING if untuned else tuned.found(op, parsed, fmt, shape)
    ops = tuned.family(op) if rows.rows else ()
    of_family = tuple((name, tuple(variants(name, parsed))) for name in ops)
    return choose(op, parsed, fmt, shape, variant, candidates, named, rows, of_family)


@lru_cache(maxsize=512)
def _select(
    op: str,
    parsed: Device,
    fmt: KvFormat,
    shape: Shape,
    variant: str | None,
    candidates: tuple[Variant, ...],
    config: tuple[tuple[str, Any], ...],
    rows: tuned.Found,
    of_family: tuple[tuple[str, tuple[Variant, ...]], ...],
) -> Choice:
    """`select` with everything settled; equal questions share one answer."""
    by_op = {name: {v.name: v for v in known} for name, known in of_family}
    why_not = partial(_why_not, device=parsed, fmt=fmt, shape=shape)
    asked = tuned.Asked(op, parsed, fmt, shape.n_q, by_op, why_not, dict(config))
    promoted = tuned.answer(rows, asked)
    reasons, accepted = _sorted_out(candidates, parsed, why_not, variant)
    chosen, full = promoted.variant, MappingProxyType(promoted.config)
    if chosen is not None:
        others = [(v.name, f"the promoted row names {chosen.name}") for v in accepted]
        reasons = [row for row in [*reasons, *others] if row[0] != chosen.name]
        reason = f"the promoted row for {rows.device_kind}"
    elif accepted:
        *earlier, chosen = accepted
        reasons += [(v.name, f"{chosen.name} comes later and takes it too") for v in earlier]
        full = MappingProxyType(configure(chosen, dict(config)))
        reason = "the default for this shape" if variant is None else "asked for by name"
    else:
        raise _nothing_fits(op, parsed, fmt, variant, candidates, reasons)
    receipt = receipt_of(chosen, parsed, fmt, shape, full, reason, reasons, promoted.lines)
    return Choice(chosen, full, receipt)


def _sorted_out(
    candidates: Sequence[Variant],
    device: Device,
    why_not: Callable[[Variant], str | None],
    asked: str | None,
) -> tuple[list[tuple[str, str]], list[Variant]]:
    """The variants that cannot be meant, each with the reason, and those that can."""
    reasons, accepted = [], []
    for candidate in candidates:
        why = why_not(candidate)
        by_name_only = (
            not candidate.default
            or _is_added(candidate, device.backend.package)
            or not home_file(candidate.source[0])
        )
        if why is None and asked is None and by_name_only:
            why = "is taken by name only"
        if why is None and asked not in (None, candidate.name):
            why = f"{asked} was asked for by name"
        if why is None:
            accepted.append(candidate)
        else:
            reasons.append((candidate.name, why))
    return reasons, accepted


def _why_not(candidate: Variant, *, device: Device, fmt: KvFormat, shape: Shape) -> str | None:
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


def explain(op: str, **how: Any) -> Receipt:
    """The receipt of `select(op, **how)`: what would run, and why."""
    return select(op, **how).receipt
