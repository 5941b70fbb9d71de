"""What a sweep asks, and what it tries: a question, and configurations of variants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minfer.format import KvFormat
from minfer.ops import Variant


@dataclass(frozen=True)
class Question:
    """What one decision is about: the numeric tunables of an op are fixed for it (contract 6.4).

    device_kind: of `minfer.tuned.device_kind`. fmt: "" where the op has no formats. kind: prefill
    or decode. head_dim: 0 where there are no heads.
    """

    op: str
    device: str
    device_kind: str
    fmt: str
    kind: str
    head_dim: int

    @property
    def stored(self) -> KvFormat:
        """The format as a value; f32 where the op has none."""
        return KvFormat(self.fmt or "f32")

    @property
    def key(self) -> str:
        """One line that names it."""
        of_heads = f"d{self.head_dim}" if self.head_dim else ""
        parts = (self.op, self.device, self.device_kind, self.fmt, self.kind, of_heads)
        return " ".join(part for part in parts if part)


@dataclass(frozen=True)
class Configuration:
    """A variant and a value of each of its searched tunables, in the order of its space."""

    variant: str
    values: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, variant: Variant, values: Mapping[str, Any]) -> Configuration:
        """Values by name; those of the default where none is given."""
        searched = ((n, t) for n, t in variant.space.items() if t.searched)
        return cls(variant.name, tuple((n, values.get(n, t.default)) for n, t in searched))

    @classmethod
    def default(cls, variant: Variant) -> Configuration:
        return cls.of(variant, {})

    @property
    def config(self) -> dict[str, Any]:
        """What `registry.select` takes as overrides."""
        return dict(self.values)

    @property
    def key(self) -> str:
        """One line that names it."""
        return _line(self.variant, self.values)

    def numeric_key(self, variant: Variant) -> str:
        """What configurations with equal bits have in common."""
        space = variant.space
        return _line(self.variant, tuple(v for v in self.values if space[v[0]].numeric))


def _line(name: str, values: tuple[tuple[str, Any], ...]) -> str:
    return " ".join([name, *(f"{key}={value}" for key, value in values)])
