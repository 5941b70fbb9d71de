"""The cell store: the K and V cells of every layer, and the tables that say whose they are.

Contract 5, 8. What a store does with tables alone is `sequences.Sequences`, with bytes
`cell_rows.CellRows`; here are steps and files. A store is used by one thread at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from minfer.errors import Refusal
from minfer.kv.batch import Batch
from minfer.kv.cell_rows import CellRows
from minfer.kv.checks import refuse_rows, refuse_window
from minfer.kv.plan import Plan, make_plan
from minfer.kv.step import Step
from minfer.ops import PREFILL
from minfer.uninterrupted import Uninterrupted

if TYPE_CHECKING:
    from minfer.kv.session.loading import Accept, Loaded


class KvStore(CellRows):
    """`n_ctx` cells of K and of V in each of `n_layer` layers, shared out to sequences.

    A cell holds one row of n_head_kv * head_dim elements. cache_type: `f32`, `f16`, `q8_0`, or
    None for MINFER_CACHE_TYPE and then the device's default (contract 3). device: `cpu`, or a plan
    such as `cpu:10,cuda:20` (9.6). threads: workers of every kernel call, None for the variant's
    own. sanitize: keep NaN in every cell that nobody may read, and trace outputs that are not
    finite (5.10); None asks MINFER_SANITIZE_CELLS.

    stretches: which layers lie on which device. device, kernels: those of the first layer.
    """

    def save(self, path: str | Path, host: bytes = b"") -> None:
        """Write a session file: tables, written cells and `host`, bytes of the caller's own (8).

        Atomic: `path` is the old file or the new one whole, after an error of the system too.
        Refused while a step is open, with layers on several devices (9.6), and where the file
        cannot be put.
        """
        from minfer.kv.session.saving import save

        self.refuse_several_stretches("save")
        save(self, path, host)

    def load(self, path: str | Path, accept: Accept | None = None) -> Loaded:
        """Replace all this store holds by what a session file holds.

        accept: is shown the host's bytes of a sound file, and may refuse it by raising.
        Refused, with nothing changed: a file of another version, format, backend, n_layer, n_ctx,
        width or model, saying what differs and what to do, and a load while a step is open.
        Raises Damaged, with nothing changed, for bytes that cannot be right. Should the file change
        while it is read, or reading fail, the store is empty afterwards, and the error says so.
        """
        from minfer.kv.session.loading import load

        self.refuse_several_stretches("load")
        self._tables.refuse_while_open("load")
        return load(self, path, accept)

    def refuse_several_stretches(self, what: str) -> None:
        """Refuse to save or load where layers lie on several devices (8.4, 9.6)."""
        if len(self.stretches) > 1:
            plan = ", ".join(f"{len(s.layers)} on {s.device}" for s in self.stretches)
            raise Refusal(
                "9.6",
                f"a session file holds the cells of one device, and layers of this store lie in "
                f"{len(self.stretches)} stretches ({plan}); {what} it with all layers on one",
                {"stretches": len(self.stretches)},
            )

    @contextmanager
    def step(self, batch: Batch) -> Iterator[Step]:
        """Open the step of `batch`: write every layer, attend, and leave (5.5).

        Its rows become readable when the block ends well. If the block raises, every sequence of
        the batch is truncated to its first position in the batch.
        """
        plan = make_plan(self._tables, batch)
        for stretch in self.stretches:
            refuse_window(plan.mode, stretch.kernels, stretch.device.name)
        step = Step(self, plan)
        try:
            self._begin(plan)
            yield step
            step.finish()
            with Uninterrupted():
                self._tables.commit(plan, step.lasts)
        except Exception as error:
            if not isinstance(error, Refusal) and not self._arena.answers():
                self._tables.lose(error, "the device answers no more; start another process")
            raise
        finally:
            # An interrupt may come between any two lines, another while the first is answered:
            # whatever is still open is undone.
            try:
                self._abort(plan)
            finally:
                step.close()
                self._abort(plan)

    def import_rows(self, seq: int, k: Any, v: Any) -> None:
        """Append rows to `seq` in all layers at once, as a prefill would have written them.

        k, v: float32 [n_layer, n, n_head_kv, head_dim], on the host, or on the device if there is
        one; they become positions [written, written + n).
        """
        n = np.shape(k)[1] if np.ndim(k) == 4 else 1
        shape = (self.n_layer, n, self.n_head_kv, self.head_dim)
        for stretch in self.stretches:
            refuse_rows("k", k, shape, stretch.kernels)
            refuse_rows("v", v, shape, stretch.kernels)
        t = self.written(seq)
        with self.step(Batch([seq] * n, range(t, t + n), PREFILL)) as step:
            for layer in range(self.n_layer):
                step.write(layer, k=k[layer], v=v[layer])

    def _begin(self, plan: Plan) -> None:
        with Uninterrupted():
            self._apply(plan.begin, kept=plan.kept if self.sanitize else frozenset())
            self._tables.open(plan)

    def _abort(self, plan: Plan) -> None:
        if not self._tables.is_open(plan):
            return
        with Uninterrupted():
            self._tables.abort(plan)
            if self.sanitize:
                written = {cell for cells in plan.cells for cell in cells}
                with self._tables.lost_by_errors():
                    self._arena.clear((plan.kept | written) - self._tables.read_cells())
