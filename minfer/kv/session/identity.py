"""Who a session belongs to, and what its numbers depend on (contract 6.4, 8.8)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from minfer import numerics
from minfer.kv.session.header import ANY
from minfer.uninterrupted import Uninterrupted

if TYPE_CHECKING:
    from minfer.kv.cell_rows import CellRows


@dataclass(frozen=True)
class Identity:
    """The two fingerprints of a run, 16 bytes each, and in words what they stand for.

    model: `ANY` for a store without a model, whose name is "". numerics: of `facts`.
    """

    numerics: bytes
    facts: Mapping[str, str] = field(default_factory=dict)
    model: bytes = ANY
    name: str = ""


def identified(store: CellRows) -> Identity:
    """What a store belongs to. Interrupts wait: libraries that are asked free memory by hand."""
    with Uninterrupted():
        return store.identity()


def without_model(store: CellRows) -> Identity:
    """That of a store that no model uses."""
    n, head_dim = store.n_head_kv, store.head_dim
    facts = numerics.facts(store.device, store.fmt, n_head=n, n_head_kv=n, head_dim=head_dim)
    return Identity(numerics.fingerprint(facts), facts)
