"""A `minfer.KvStore` as a cache to be tested: integers to K and V rows of every layer, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from minfer.errors import Refusal
from minfer.format import BLOCK, Floats, KvFormat
from minfer.kv.batch import Batch
from minfer.kv.runs import Move, Slot, Stats
from minfer.kv.store import KvStore
from minfer.ops import DECODE, PREFILL
from minfer.testing.contents import Group
from minfer.window import CellSpan

DIGIT = 126  # values are written in two digits; 127 itself marks the largest of a block


class BrokenStepError(Exception):
    """What the block of a failing step raises."""


class KvStoreCache:
    """The cache under test is `store`, of any format, with heads of 3 elements or more.

    An element of a row is a whole number up to 127, and the first of every 32 is 127, so that
    f32, f16 and q8_0 keep it exactly. Removal is asked for without rope, which moves K as it is;
    f16 never does it (contract 5.7). Inside every step one more operation is tried, and must be
    refused. With the store's sanitizer on, every free or unwritten cell must hold NaN.
    """

    def __init__(self, store: KvStore) -> None:
        self.store = store
        self.never = ("remove", "shift") if store.fmt is KvFormat.F16 else ()
        self._tries = 0
        element = np.arange(store.n_head_kv * store.head_dim)
        digit = np.where(element % BLOCK == 0, 0, element % 3)
        self._places = np.array([digit == 1, digit == 2], np.float32)
        first, others = 127 * (element % BLOCK == 0), (element % BLOCK != 0) & (digit == 0)
        self._fixed = [
            (first + others * (layer + element // BLOCK)).astype(np.float32)
            for layer in range(store.n_layer)
        ]

    def reserve(self, seq: int, cap: int) -> Slot:
        return self.store.reserve(seq, cap)

    def release(self, seq: int) -> None:
        self.store.release(seq)

    def truncate(self, seq: int, rows: int) -> None:
        self.store.truncate(seq, rows)

    def resize(self, seq: int, cap: int) -> Slot:
        return self.store.resize(seq, cap)

    def reserve_with_defrag(self, seq: int, cap: int) -> tuple[Slot, list[Move]]:
        return self.store.reserve_with_defrag(seq, cap)

    def resize_with_defrag(self, seq: int, cap: int) -> tuple[Slot, list[Move]]:
        return self.store.resize_with_defrag(seq, cap)

    def defrag(self, need: int | None) -> list[Move]:
        return self.store.defrag(need)

    def share_prefix(self, src: int, dst: int, rows: int) -> None:
        self.store.share_prefix(src, dst, rows)

    def copy_prefix(self, src: int, dst: int, rows: int) -> None:
        self.store.copy_prefix(src, dst, rows)

    def remove(self, seq: int, start: int, length: int) -> None:
        self.store.remove(seq, start, length, rope=None)

    def shift(self, seq: int, drop: int) -> None:
        self.store.shift(seq, drop, rope=None)

    def write(self, seq: int, position: int, values: Sequence[int]) -> None:
        self.step([(seq, position, values)])

    def append(self, seq: int, values: Sequence[int]) -> None:
        k, v = (np.stack([self._rows(values, *at) for at in self._regions(w)]) for w in "kv")
        self.store.import_rows(seq, k, v)

    def step(self, groups: Sequence[Group]) -> tuple[Move, ...]:
        return self._step(groups, self.store.n_layer)

    def failing_step(self, groups: Sequence[Group], layers: int) -> None:
        try:
            self._step(groups, layers, fails=True)
        except BrokenStepError:
            return
        raise AssertionError("the error of a step's block does not come out of it")

    def read(self, seq: int) -> list[int]:
        read: list[list[int]] = []
        for which in "kv":
            for at in self._regions(which):
                layer = at[0]
                rows = self.store.export(seq, layer, which)
                values = self._values(rows)
                wanted = self._rows(values, *at)
                wrong = np.flatnonzero((rows != wanted).any((1, 2)))
                assert not len(wrong), (
                    f"row {wrong[0]} of sequence {seq} in layer {layer}, {which}, is no row that "
                    f"was ever written: {rows[wrong[0]].ravel()[:8]} ..."
                )
                read.append(values)
        for values in read[1:]:
            assert values == read[0], f"layers of sequence {seq} differ: {read[0]} and {values}"
        return read[0]

    def sequences(self) -> list[int]:
        return self.store.sequences()

    def owners(self) -> list[int]:
        return self.store.owners()

    def spans(self, seq: int) -> list[CellSpan]:
        return self.store.spans(seq)

    def cap(self, seq: int) -> int:
        return self.store.cap(seq)

    def written(self, seq: int) -> int:
        return self.store.written(seq)

    def stats(self) -> Stats:
        return self.store.stats()

    def state(self) -> object:
        """Tables, generation and every byte."""
        arrays = [
            self.store.stretch_of(layer).kernels.to_host(array).tobytes()
            for layer in range(self.store.n_layer)
            for region in self.store.region(layer)
            for array in region.arrays
        ]
        return self.store.digest(), self.store.generation, arrays

    def check(self) -> None:
        self.store.check()
        if self.store.sanitize:
            self._check_nans()

    def _step(self, groups: Sequence[Group], layers: int, fails: bool = False) -> tuple[Move, ...]:
        seqs = [seq for seq, _, values in groups for _ in values]
        positions = [t + i for _, t, values in groups for i in range(len(values))]
        fresh = [value for _, _, values in groups for value in values]
        kind = DECODE if len(seqs) == len(groups) else PREFILL
        with self.store.step(Batch(seqs, positions, kind)) as step:
            self._refuses_while_open(seqs[0])
            for layer in range(min(layers, self.store.n_layer)):
                step.write(layer, k=self._rows(fresh, layer, 1), v=self._rows(fresh, layer, -1))
            if fails:
                raise BrokenStepError
        return tuple(step.moves)

    def _refuses_while_open(self, seq: int) -> None:
        """Another operation a step, in turn (contract 5.5)."""
        store = self.store
        operations: tuple[Callable[[], object], ...] = (
            lambda: store.reserve(seq, 1),
            lambda: store.release(seq),
            lambda: store.truncate(seq, 0),
            lambda: store.resize(seq, store.cap(seq)),
            lambda: store.defrag(),
            lambda: store.reserve_with_defrag(seq + 1, 1),
            lambda: store.resize_with_defrag(seq, 1),
            lambda: store.share_prefix(seq, seq + 1, 1),
            lambda: store.copy_prefix(seq, seq + 1, 1),
            lambda: store.remove(seq, 0, 1, rope=None),
            lambda: store.shift(seq, 1, rope=None),
            lambda: store.step(Batch([seq], [0], DECODE)).__enter__(),
        )
        which = self._tries % len(operations)
        self._tries += 1
        before = self.state()
        try:
            operations[which]()
        except Refusal:
            assert self.state() == before, f"operation {which} in an open step changed something"
        else:
            raise AssertionError(f"operation {which} is not refused in an open step")

    def _check_nans(self) -> None:
        store = self.store
        readable = np.zeros(store.n_ctx, bool)
        for seq in store.sequences():
            for position, cell, length in store.spans(seq):
                readable[cell : cell + max(0, min(length, store.written(seq) - position))] = True
        cells = np.flatnonzero(~readable).astype(np.int32)
        for layer in range(store.n_layer):
            kernels = store.stretch_of(layer).kernels
            for which, region in zip("kv", store.region(layer), strict=True):
                rows = kernels.to_host(kernels.decode_cells(region, cells))
                clean = cells[~np.isnan(rows).all((1, 2))]
                assert not len(clean), (
                    f"cells {clean.tolist()} of layer {layer}, {which}, are free or unwritten "
                    "and hold no NaN"
                )

    def _regions(self, which: str) -> list[tuple[int, int]]:
        """(layer, sign of its rows): V rows are the K rows with another sign."""
        return [(layer, 1 if which == "k" else -1) for layer in range(self.store.n_layer)]

    def _rows(self, values: Sequence[int], layer: int, sign: int) -> Floats:
        """One row a value: 127 at the head of a block, the two digits of the value, the layer."""
        digits = np.array([(v % DIGIT, v // DIGIT) for v in values], np.float32).reshape(-1, 2)
        rows: Floats = np.float32(sign) * (self._fixed[layer] + digits @ self._places)
        return rows.reshape(len(values), self.store.n_head_kv, self.store.head_dim)

    def _values(self, rows: Floats) -> list[int]:
        """The values that rows say they hold; NaN says 0."""
        digits = np.abs(rows[:, 0, 1:3])
        whole = np.where(np.isfinite(digits), digits, 0).astype(int).tolist()
        return [low + DIGIT * high for low, high in whole]
