"""What many tests do with the tables of the cell store."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from minfer.errors import Refusal
from minfer.kv.batch import Batch
from minfer.kv.cells import CellTables


def refused(tables: CellTables, rule: str, call: Callable[[], object]) -> Refusal:
    """The refusal of `call`, which cites `rule` and changed nothing."""
    digest, generation = tables.digest(), tables.generation
    with pytest.raises(Refusal) as caught:
        call()
    assert caught.value.rule == rule, caught.value
    assert (tables.digest(), tables.generation) == (digest, generation)
    tables.check()
    return caught.value


def feed(tables: CellTables, seq: int, n: int, t: int | None = None) -> None:
    """A step that ends well: positions [t, t + n) of `seq`."""
    t = tables.written(seq) if t is None else t
    plan = tables.plan(Batch([seq] * n, range(t, t + n), "prefill"))
    tables.apply(plan)
    tables.commit(plan)
