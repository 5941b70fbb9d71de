"""The cell store without bytes: tables over a list, which holds what cells would."""

from __future__ import annotations

from minfer.kv.batch import Batch
from minfer.kv.cells import CellTables
from minfer.kv.change import Change
from minfer.kv.plan import Plan, make_plan
from minfer.kv.sequences import Sequences


class Tables(Sequences):
    """What `KvStore` does with its tables; `row[cell]` is (sequence, position) as last written."""

    def __init__(self, n_ctx: int) -> None:
        super().__init__(CellTables(n_ctx))
        self.tables = self._tables
        self.row: list[tuple[int, int] | None] = [None] * self.tables.n_ctx

    def _carry_out(self, change: Change) -> None:
        self.tables.refuse_stale(change)
        for move in change.moves:
            self.row[move.dst : move.dst + move.rows] = self.row[move.src : move.src + move.rows]
        self.tables.install(change)

    def plan(self, batch: Batch) -> Plan:
        return make_plan(self.tables, batch)

    def begin(self, plan: Plan) -> None:
        self.tables.refuse_while_open("a second step")
        self._carry_out(plan.begin)
        self.tables.open(plan)
        for group, cells in zip(plan.groups, plan.cells, strict=True):
            self.row[cells.start : cells.stop] = [
                (group.seq, pos) for pos in range(group.t, group.t + group.n)
            ]

    def rows(self, seq: int) -> list[tuple[int, int] | None]:
        """What the readable cells of a sequence hold."""
        return [self.row[cell] for some in self.tables.written_cells(seq) for cell in some]


def feed(tables: Tables, seq: int, n: int, t: int | None = None) -> Plan:
    """A step that ends well: positions [t, t + n) of `seq`."""
    t = tables.written(seq) if t is None else t
    plan = tables.plan(Batch([seq] * n, range(t, t + n), "prefill"))
    tables.begin(plan)
    tables.tables.commit(plan)
    return plan
