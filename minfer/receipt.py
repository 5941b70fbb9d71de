"""Receipts: which variant an op got, how configured, and why not another (contract 6.6)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from minfer.device import Device
from minfer.format import KvFormat
from minfer.ops import CELLS, OPS, WEIGHT, Shape, Variant


@dataclass(frozen=True)
class Receipt:
    """Which variant an op got, and why; `refused` holds (variant, reason) of every other one.

    weights: how the weights it reads came to their format, each way once. tuned: what the promoted
    row rests on, and why others were not taken.
    """

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
    weights: tuple[str, ...] = ()
    tuned: tuple[str, ...] = ()

    def __str__(self) -> str:
        config = ", ".join(f"{k}={v}" for k, v in self.config.items())
        origins = "; ".join(self.weights)
        if not self.refused and not self.tuned:
            return (
                f"{self.op}_{self.variant} on {self.device}: the only variant "
                f"({self.file}:{self.line}{config and '; ' + config})"
            ) + (f"; weights {self.fmt} {origins}" if origins else "")
        lines = [
            f"{self.op}_{self.variant} on {self.device}, {self.fmt}: {self.reason}",
            f"  source    {self.file}:{self.line}",
            *([f"  config    {config}"] if config else []),
            f"  numerics  {self.numerics}",
        ]
        if origins:
            lines.append(f"  weights   {self.fmt} {origins}")
        lines += [f"  tuned     {line}" for line in self.tuned]
        lines += [f"  not {name}: {why}" for name, why in self.refused]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """The receipt for machines."""
        plain = replace(self, config=dict(self.config))
        told = {"weights": list(self.weights), "tuned": list(self.tuned)}
        return {**asdict(plain), "refused": dict(self.refused), **told}


def receipt_of(
    chosen: Variant,
    device: Device,
    fmt: KvFormat,
    shape: Shape,
    config: Mapping[str, Any],
    reason: str,
    refused: Sequence[tuple[str, str]],
    tuned: Sequence[str] = (),
) -> Receipt:
    """The receipt of a choice."""
    file, line = chosen.source
    n = chosen.numerics(fmt)
    numerics = {
        "": "f32",
        CELLS: f"query {n.query}, key {n.key}, prob {n.prob}, value {n.value}, acc {n.acc}",
        WEIGHT: f"x {n.query}, weight {fmt}, acc {n.acc}",
    }[OPS[chosen.op].formats]
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
        refused=tuple(refused),
        tuned=tuple(tuned),
    )


@cache
def short_path(file: str) -> str:
    """The path below the folder that holds the package, so receipts are equal on every machine."""
    root = Path(__file__).parent.parent
    path = Path(file)
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path)
