"""What a graph's topology depends on, and nothing else (contract 7.1)."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

from minfer.format import KvFormat
from minfer.offload import Stretch
from minfer.ops import F32
from minfer.window import WindowMode


@dataclass(frozen=True)
class GraphParams:
    """Identity of a graph: equal params reuse it.

    Positions, past lengths, sequence ids and their number are data and have no place here.
    `stretches` says which layers lie on which device; `windows` holds mode and sliding width (0:
    none) of every attention node; `variants` the (op, variant) pairs asked for by name;
    `activations` the type that operands of products are rounded to; `revision` the name of the
    model file.
    """

    n_tokens: int
    n_out: int
    kind: str
    stretches: tuple[Stretch, ...]
    kv_format: KvFormat
    layout: str
    windows: tuple[tuple[WindowMode, int], ...]
    variants: tuple[tuple[str, str], ...] = ()
    activations: str = F32
    revision: str = ""

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    @cached_property
    def modes(self) -> frozenset[WindowMode]:
        """The window modes of all attention nodes."""
        return frozenset(mode for mode, _ in self.windows)
