"""Finding variants and choosing one (contract 6.6).

A choice happens when a graph is built and is part of its identity: an explicit name, or a refusal
with the reasons; else the last variant of the op's home file that takes the shape. Variants of
other files, and of a user's own module given to `add`, are reachable by name only.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from minfer.device import Device
from minfer.errors import Refusal
from minfer.format import KvFormat
from minfer.ops import OPS, Kernel, Shape, Variant

_added: dict[str, list[tuple[Variant, str]]] = {}


@dataclass(frozen=True)
class Receipt:
    """Which variant an op got, with what configuration, and why not another."""

    op: str
    variant: str
    device: str
    fmt: str
    shape: Shape
    reason: str
    file: str
    line: int
    config: Mapping[str, Any]
    numerics: str
    refused: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        config = ", ".join(f"{k}={v}" for k, v in self.config.items()) or "none"
        lines = [
            f"{self.op}_{self.variant} on {self.device}, {self.fmt}: {self.reason}",
            f"  source    {self.file}:{self.line}",
            f"  config    {config}",
            f"  numerics  {self.numerics}",
        ]
        lines += [f"  not {name}: {why}" for name, why in self.refused]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """The receipt for machines."""
        return {
            "op": self.op,
            "variant": self.variant,
            "device": self.device,
            "fmt": self.fmt,
            "shape": vars(self.shape),
            "reason": self.reason,
            "file": self.file,
            "line": self.line,
            "config": dict(self.config),
            "numerics": self.numerics,
            "refused": dict(self.refused),
        }


@dataclass(frozen=True)
class Choice:
    """A variant with its configuration, ready to launch: `launch(*tensors, **scalars, config=)`."""

    variant: Variant
    config: Mapping[str, Any]
    receipt: Receipt

    @property
    def launch(self) -> Kernel:
        return self.variant.launch


def variants_of(module: ModuleType) -> Iterator[Variant]:
    """The variants a module defines itself, in the order of its text."""
    found = [
        value.__minfer_variant__
        for value in vars(module).values()
        if hasattr(value, "__minfer_variant__") and value.__module__ == module.__name__
    ]
    yield from sorted(found, key=lambda v: v.source[1])


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
        raise Refusal("6.6", f"module {module.__name__} holds no @variant function", {})
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
    parsed = Device.parse(device)
    parsed.package()
    package = parsed.backend.package
    added = [v for v, _ in _added.get(package, []) if v.op == op]
    return [*collect(package).get(op, ()), *added]


def _is_added(variant: Variant, package: str) -> bool:
    return any(variant is v for v, _ in _added.get(package, []))


def select(
    op: str,
    *,
    device: str | Device = "cpu",
    fmt: KvFormat = KvFormat.F32,
    shape: Shape | None = None,
    variant: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> Choice:
    """Choose a variant of `op`: the named one, or the last of the home file that takes `shape`.

    config: overrides of tunables; one the variant does not have is refused, except `threads`,
    which an op without workers has no use for.
    """
    parsed, shape = Device.parse(device), shape or Shape()
    candidates = variants(op, parsed)
    package = parsed.backend.package
    reasons: list[tuple[str, str]] = []
    accepted: list[Variant] = []
    for candidate in candidates:
        why = _refusal(candidate, fmt, shape)
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
    chosen = accepted[-1] if accepted else None
    if chosen is None:
        _refuse(op, parsed, fmt, variant, candidates, reasons)
    assert chosen is not None
    reasons += [(v.name, f"{chosen.name} comes later and takes it too") for v in accepted[:-1]]
    full = _configure(chosen, config or {})
    return Choice(chosen, full, _receipt(chosen, parsed, fmt, shape, full, variant, reasons))


def _refusal(candidate: Variant, fmt: KvFormat, shape: Shape) -> str | None:
    if OPS[candidate.op].formats and fmt not in candidate.formats:
        return f"does not read {fmt}"
    return candidate.limits.refusal(shape)


def _refuse(
    op: str,
    device: Device,
    fmt: KvFormat,
    asked: str | None,
    candidates: list[Variant],
    reasons: list[tuple[str, str]],
) -> None:
    names = [v.name for v in candidates]
    if asked is not None and asked not in names:
        message = f"{op} has no variant {asked!r} on {device}; there are {', '.join(names)}"
    elif asked is not None:
        message = f"{op}_{asked} on {device} with {fmt}: {dict(reasons)[asked]}"
    else:
        tried = "; ".join(f"{name} {why}" for name, why in reasons) or "it has none"
        message = f"no variant of {op} on {device} takes this {fmt} shape: {tried}"
    raise Refusal("6.6", message, {"op": op, "device": device.name, "fmt": fmt.value})


def _configure(chosen: Variant, overrides: Mapping[str, Any]) -> dict[str, Any]:
    unknown = [k for k in overrides if k not in chosen.space and k != "threads"]
    if unknown:
        raise Refusal(
            "6.4",
            f"{chosen.op}_{chosen.name} has no tunable {', '.join(unknown)}; "
            f"it has {', '.join(chosen.space) or 'none'}",
            {"unknown": unknown},
        )
    return {**chosen.config(), **{k: v for k, v in overrides.items() if k in chosen.space}}


def _receipt(
    chosen: Variant,
    device: Device,
    fmt: KvFormat,
    shape: Shape,
    config: Mapping[str, Any],
    asked: str | None,
    reasons: list[tuple[str, str]],
) -> Receipt:
    file, line = chosen.source
    n = chosen.numerics(fmt)
    numerics = f"query {n.query}, key {n.key}, prob {n.prob}, value {n.value}, acc {n.acc}"
    if not OPS[chosen.op].formats:
        numerics = "f32"
    reason = "asked for by name" if asked else "the default for this shape"
    return Receipt(
        op=chosen.op,
        variant=chosen.name,
        device=device.name,
        fmt=fmt.value if OPS[chosen.op].formats else "any format",
        shape=shape,
        reason=reason,
        file=short_path(file),
        line=line,
        config=config,
        numerics=numerics + ("" if chosen.invariant else "; not invariant"),
        refused=tuple(reasons),
    )


def short_path(file: str) -> str:
    """The path below the folder that holds the package, so receipts are equal on every machine."""
    root = Path(__file__).parent.parent
    path = Path(file)
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path)


def explain(op: str, **how: Any) -> Receipt:
    """The receipt of `select(op, **how)`: what would run, and why."""
    return select(op, **how).receipt
