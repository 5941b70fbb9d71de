"""The variants of one graph, one an op, device and format, and their receipts (contract 6.6)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from minfer import registry
from minfer.device import Device
from minfer.format import KvFormat
from minfer.graph.nodes import Heads
from minfer.graph.params import GraphParams
from minfer.ops import F32, Shape
from minfer.receipt import Receipt
from minfer.registry import Choice

Key = tuple[str, Device, KvFormat]


@dataclass
class Choices:
    """Asks the registry once a key. threads: workers of every node, None for its own default."""

    params: GraphParams
    heads: Heads
    threads: int | None
    _made: dict[Key, Choice] = field(default_factory=dict)
    _origins: dict[Key, dict[str, None]] = field(default_factory=dict)

    def choose(
        self, op: str, stretch: int = 0, fmt: KvFormat | None = None, origin: str = ""
    ) -> Choice:
        """The variant of `op` on the device of a stretch, by its number.

        fmt: of the matrix it reads, None for that of the cache. origin: of that matrix.
        """
        key = (op, self.params.stretches[stretch].device, fmt or self.params.kv_format)
        if key not in self._made:
            self._made[key] = self._ask(*key)
        if origin:
            self._origins.setdefault(key, {})[origin] = None
        return self._made[key]

    def receipts(self) -> Iterator[Receipt]:
        """One a choice, with the origins of the weights it reads."""
        for key, choice in self._made.items():
            yield replace(choice.receipt, weights=tuple(self._origins.get(key, ())))

    def _ask(self, op: str, device: Device, fmt: KvFormat) -> Choice:
        shape = Shape(
            kind=self.params.kind,
            n_q=self.params.n_tokens,
            n_head=self.heads.n_head,
            n_head_kv=self.heads.n_head_kv,
            head_dim=self.heads.head_dim,
        )
        return registry.select(
            op,
            device=device,
            fmt=fmt,
            shape=shape,
            variant=dict(self.params.variants).get(op),
            config=self._config,
        )

    @property
    def _config(self) -> dict[str, Any]:
        """What every variant is asked to take that has a use for it."""
        wanted = {"threads": self.threads, "activations": self.params.activations}
        plain = {"threads": None, "activations": F32}
        return {name: value for name, value in wanted.items() if value != plain[name]}
