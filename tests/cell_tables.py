"""What many tests do with the tables of the cell store."""

from __future__ import annotations

from minfer.kv.batch import Batch
from minfer.kv.cells import CellTables


def feed(tables: CellTables, seq: int, n: int, t: int | None = None) -> None:
    """A step that ends well: positions [t, t + n) of `seq`."""
    t = tables.written(seq) if t is None else t
    plan = tables.plan(Batch([seq] * n, range(t, t + n), "prefill"))
    tables.apply(plan)
    tables.commit(plan)
