"""The cell store: the K and V cells of every layer, and the tables that say whose they are.

Contract 5. Tables are `cells.CellTables`; bytes live in regions of the device's kernel package.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np

from minfer import memory, settings
from minfer.device import Device
from minfer.errors import Refusal
from minfer.format import Bytes, Floats, Int32, KvFormat, Region, cell_bytes, resolve
from minfer.kv.batch import Batch
from minfer.kv.cells import CellTables
from minfer.kv.checks import checked_rows, refuse_window, thread_count, whole_number
from minfer.kv.inputs import joined
from minfer.kv.runs import Slot, Stats
from minfer.kv.step import Step
from minfer.ops import PREFILL
from minfer.window import CellSpan

TABLE_BYTES = 32  # a cell, of the free list


class KvStore:
    """`n_ctx` cells of K and of V in each of `n_layer` layers, shared out to sequences.

    A cell holds one row of n_head_kv * head_dim elements. cache_type: `f32`, `f16`, `q8_0`, or
    None for MINFER_CACHE_TYPE and then the device's default (contract 3). threads: workers of
    every kernel call, None for the variant's own. sanitize: see `sanitizer`; None for
    MINFER_SANITIZE_CELLS.
    """

    def __init__(
        self,
        n_layer: int,
        n_ctx: int,
        n_head_kv: int,
        head_dim: int,
        *,
        cache_type: str | KvFormat | None = None,
        device: str | Device = "cpu",
        threads: int | None = None,
        sanitize: bool | None = None,
    ) -> None:
        self.n_layer = whole_number(n_layer, "n_layer", "10", low=1)
        self.n_head_kv = whole_number(n_head_kv, "n_head_kv", "10", low=1)
        self.head_dim = whole_number(head_dim, "head_dim", "10", low=1)
        self.threads = None if threads is None else thread_count(threads)
        self.n_ctx = whole_number(n_ctx, "n_ctx", "10", low=1)
        self.device = Device.parse(device)
        self._kernels: Any = self.device.package()
        self.fmt = resolve(
            settings.cache_type() if cache_type is None else cache_type,
            device_kind=self.device.name,
            n_layer=self.n_layer,
            n_head_kv=self.n_head_kv,
            head_dim=self.head_dim,
            reads_packed_kv=self._kernels.READS_PACKED_KV,
        )
        cells = self.memory_bytes(
            n_layer=self.n_layer,
            n_ctx=self.n_ctx,
            n_head_kv=self.n_head_kv,
            head_dim=self.head_dim,
            fmt=self.fmt,
        )
        memory.require({f"{self.fmt} cells": cells, "tables": TABLE_BYTES * self.n_ctx})
        self._tables = CellTables(self.n_ctx)
        shape = (self.fmt, self.n_ctx, self.n_head_kv, self.head_dim)
        self.sanitize = settings.flag("MINFER_SANITIZE_CELLS") if sanitize is None else sanitize
        fill = math.nan if self.sanitize else 0.0
        regions: list[Region] = self._kernels.empty_regions(2 * self.n_layer, *shape, fill)
        self._regions = list(zip(regions[::2], regions[1::2], strict=True))

    @staticmethod
    def memory_bytes(
        *, n_layer: int, n_ctx: int, n_head_kv: int, head_dim: int, fmt: KvFormat
    ) -> int:
        """Bytes of all regions of such a store (contract 3.5), before one is made."""
        return 2 * n_layer * n_ctx * cell_bytes(fmt, n_head_kv * head_dim)

    @property
    def layout(self) -> str:
        """How the backend arranges cells inside its regions (contract 3.6)."""
        return cast(str, self._kernels.LAYOUT)

    @property
    def generation(self) -> int:
        """Rises with every change of the tables."""
        return self._tables.generation

    def reserve(self, seq: int, cap: int) -> Slot:
        """Cells for `cap` positions of `seq`: the lowest free run that holds them (5.2)."""
        return self._tables.reserve(seq, cap)

    def release(self, seq: int) -> None:
        """Forget `seq` and free its run (5.2)."""
        self._tables.release(seq)

    def truncate(self, seq: int, rows: int) -> None:
        """Keep the first `rows` positions of `seq` (5.11)."""
        self._tables.truncate(seq, rows)

    def has(self, seq: int) -> bool:
        """Whether `seq` holds a run."""
        return self._tables.has(seq)

    def sequences(self) -> list[int]:
        """Ids of all sequences that hold a run, ascending."""
        return sorted(self._tables._entries)

    def cap(self, seq: int) -> int:
        """Number of positions `seq` has cells for."""
        return self._tables.cap(seq)

    def written(self, seq: int) -> int:
        """Number of readable rows of `seq`."""
        return self._tables.written(seq)

    def spans(self, seq: int) -> list[CellSpan]:
        """Where the positions of `seq` lie, its own run in full (contract 1)."""
        return self._tables.spans(seq)

    def owners(self) -> list[int]:
        """The run id of every cell, -1 where it is free."""
        return self._tables.owners()

    def stats(self) -> Stats:
        """Counts of the whole store (5.9)."""
        return self._tables.stats()

    def digest(self) -> str:
        """A hash of the tables; equal tables, equal digest."""
        return self._tables.digest()

    def check(self) -> None:
        """Raise AssertionError if the tables contradict themselves."""
        self._tables.check()

    @contextmanager
    def step(self, batch: Batch) -> Iterator[Step]:
        """Open the step of `batch`: write every layer, attend, and leave (5.5).

        Its rows become readable when the block ends well. If the block raises, every sequence of
        the batch is truncated to its first position in the batch.
        """
        plan = self._tables.plan(batch)
        refuse_window(plan.mode, self._kernels, self.device.name)
        step = Step(self, plan)
        try:
            self._tables.apply(plan)
            yield step
            step.finish()
            self._tables.commit(plan)
        finally:
            # An interrupt may come between any two lines: whatever is still open is undone.
            self._tables.rollback(plan)
            step.close()

    def export(self, seq: int, layer: int, which: str = "k") -> Floats:
        """The readable K or V rows of `seq`, decoded: float32 [rows, n_head_kv, head_dim]."""
        region, cells = self._read_plan(seq, layer, which)
        return cast(Floats, self._kernels.to_host(self._kernels.decode_cells(region, cells)))

    def export_cells(self, seq: int, layer: int, which: str = "k") -> Bytes:
        """The readable K or V cells of `seq` as stored, canonical: uint8 [rows, cell_bytes]."""
        region, cells = self._read_plan(seq, layer, which)
        return cast(Bytes, self._kernels.read_cells(region, cells))

    def import_rows(self, seq: int, k: Floats, v: Floats) -> None:
        """Append rows to `seq` in all layers at once, as a prefill would have written them.

        k, v: float32 [n_layer, n, n_head_kv, head_dim]; they become positions
        [written, written + n).
        """
        n = np.shape(k)[1] if np.ndim(k) == 4 else 1
        shape = (self.n_layer, n, self.n_head_kv, self.head_dim)
        k, v = checked_rows("k", k, shape), checked_rows("v", v, shape)
        t = self.written(seq)
        with self.step(Batch([seq] * n, range(t, t + n), PREFILL)) as step:
            for layer in range(self.n_layer):
                step.write(layer, k=k[layer], v=v[layer])

    def region(self, layer: int) -> tuple[Region, Region]:
        """The K and the V cells of `layer`."""
        return self._regions[self.checked_layer(layer)]

    def rebind(self, layer: int, k: Region, v: Region) -> None:
        """Keep the regions that a storing op returned for `layer`."""
        self._regions[layer] = (k, v)

    def checked_layer(self, layer: int) -> int:
        """`layer` as an index in [0, n_layer), refused outside."""
        return whole_number(layer, "layer", "5.5", high=self.n_layer - 1)

    def _read_plan(self, seq: int, layer: int, which: str) -> tuple[Region, Int32]:
        """The region and the cells that hold the readable rows of `seq`."""
        if which not in ("k", "v"):
            raise Refusal("10", f"which is {which!r}; give k or v", {"which": which})
        region = self.region(layer)["kv".index(which)]
        return region, joined((range(0), *self._tables.written_cells(seq)))
