"""What the tables of a cell store cost, bytes left out, for the column of this project."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict

import numpy as np

from minfer.kv import removal
from minfer.kv.batch import Batch
from minfer.kv.cells import CellTables
from minfer.kv.change import Change
from minfer.kv.plan import make_plan
from minfer.kv.runs import Run, Stats
from minfer.kv.sequences import Sequences
from minfer.ops import DECODE, PREFILL
from minfer.uninterrupted import Uninterrupted
from tuning.bench.cases import Case
from tuning.bench.protocol import Message
from tuning.bench.store_cases import Tables
from tuning.columns.subjects import Call, Measure, Subject

GUESTS = 32  # sequences that one operation is done to, at most, before all is as it was
CAP, ROWS, SHARED = 16, 8, 4


class Bookkeeping(Sequences):
    """A store without cells: what `KvStore` does, and guards, apart from bytes."""

    def __init__(self, n_ctx: int) -> None:
        super().__init__(CellTables(n_ctx))

    @property
    def tables(self) -> CellTables:
        return self._tables

    def _carry_out(self, change: Change) -> None:
        with Uninterrupted():
            self._tables.install(change)

    def step(self, batch: Batch) -> None:
        """A step that ends well."""
        plan = make_plan(self._tables, batch)
        with Uninterrupted():
            self._tables.install(plan.begin)
            self._tables.open(plan)
        with Uninterrupted():
            self._tables.commit(plan)

    def remove(self, seq: int, start: int, length: int) -> None:
        """Drop positions (5.7)."""
        self._carry_out(removal.remove(self._tables, seq, start, length))


class Scene:
    """A fragmented store of `n` sequences of 8 to 32 cells, half of them written, and guests.

    sources, targets: disjoint samples of the n. empty, donors, readers, new: ids of guests.
    """

    def __init__(self, n: int) -> None:
        draw = random.Random(n)
        caps = [draw.randint(8, 32) for _ in range(2 * n)]
        k = min(n // 2, GUESTS)
        store = self.store = Bookkeeping(sum(caps) + 6 * k * CAP)
        for seq, cap in enumerate(caps):
            store.reserve(seq, cap)
        stays = sorted(draw.sample(range(2 * n), n))
        for seq in set(range(2 * n)) - set(stays):
            store.release(seq)
        self.feed({seq: (0, caps[seq] // 2) for seq in stays})
        chosen = draw.sample(stays, 2 * k)
        self.sources, self.targets = chosen[:k], chosen[k:]
        ids = [range(2 * n + i * k, 2 * n + (i + 1) * k) for i in range(4)]
        self.empty, self.donors, self.readers, self.new = ids
        for seq in self.empty:
            store.reserve(seq, CAP)
        self._runs: dict[int, Run] = {}

    def feed(self, groups: dict[int, tuple[int, int]]) -> None:
        """One prompt step: positions [t, end) of each sequence."""
        seqs = [seq for seq, (t, end) in groups.items() for _ in range(t, end)]
        if seqs:
            positions = [at for span in groups.values() for at in range(*span)]
            self.store.step(Batch(seqs, positions, PREFILL))

    def drop(self, seqs: Sequence[int]) -> None:
        """Release those that are there."""
        for seq in seqs:
            if self.store.has(seq):
                self.store.release(seq)

    def restore_new(self, there: bool) -> None:
        """The new guests hold cells, or none of them does."""
        self.drop(self.new)
        if there:
            for seq in self.new:
                self.store.reserve(seq, CAP)

    def restore_empty(self, shared: bool) -> None:
        """The empty guests hold no row, or share SHARED of one source each."""
        for src, dst in zip(self.sources, self.empty, strict=True):
            self.store.truncate(dst, 0)
            if shared:
                self.store.share_prefix(src, dst, SHARED)

    def restore_donors(self) -> None:
        """Every donor has ROWS rows in a run of CAP cells, and a reader of all of them."""
        self.drop([*self.readers, *self.donors])
        for donor in self.donors:
            self.store.reserve(donor, CAP)
        self.feed(dict.fromkeys(self.donors, (0, ROWS)))
        for donor, reader in zip(self.donors, self.readers, strict=True):
            self.store.reserve(reader, 1)
            self.store.share_prefix(donor, reader, ROWS)

    def restore_targets(self) -> None:
        """Every target has half its cells written."""
        store, groups = self.store, {}
        for seq in self.targets:
            rows, written = store.cap(seq) // 2, store.written(seq)
            if written > rows:
                store.truncate(seq, rows)
            elif written < rows:
                groups[seq] = (written, rows)
        self.feed(groups)

    def keep_runs(self) -> None:
        """Remember where all runs lie, before a compaction."""
        self._runs = dict(self.store.tables.runs)

    def restore_runs(self) -> None:
        """After a check, all runs lie where they lay before the compaction."""
        tables = self.store.tables
        tables.check()
        tables.install(Change(tables.generation, tables.counts, self._runs, {}))


def measures(scene: Scene) -> dict[str, Measure]:
    """Every operation over the guests it is done to, and what restores them."""
    store, k = scene.store, len(scene.new)

    def each(seqs: Sequence[int], call: Callable[[int], object]) -> list[Call]:
        return [lambda seq=seq: call(seq) for seq in seqs]  # type: ignore[misc]

    def one(seq: int, position: int) -> None:
        store.step(Batch([seq], [position], DECODE))

    caps = {seq: store.cap(seq) for seq in scene.targets}
    source_of = dict(zip(scene.empty, scene.sources, strict=True))

    def shrink() -> None:
        for seq, cap in caps.items():
            store.resize(seq, cap - 1)

    done: dict[str, tuple[list[Call], Call]] = {
        "reserve": (each(scene.new, lambda s: store.reserve(s, CAP)),
                    lambda: scene.restore_new(False)),
        "release": (each(scene.new, store.release), lambda: scene.restore_new(True)),
        "append": (each(scene.targets, lambda s: one(s, store.written(s))), scene.restore_targets),
        "truncate": (each(scene.targets, lambda s: store.truncate(s, 1)), scene.restore_targets),
        "remove": (each(scene.targets, lambda s: store.remove(s, 0, 1)), scene.restore_targets),
        "resize": (each(scene.targets, lambda s: store.resize(s, caps[s])), shrink),
        "share": (each(scene.empty, lambda s: store.share_prefix(source_of[s], s, SHARED)),
                  lambda: scene.restore_empty(False)),
        "copy": (each(scene.empty, lambda s: store.copy_prefix(source_of[s], s, SHARED)),
                 lambda: scene.restore_empty(False)),
        "sharer writes": (each(scene.empty, lambda s: one(s, SHARED - 2)),
                          lambda: scene.restore_empty(True)),
        "donor writes": (each(scene.donors, lambda s: one(s, ROWS // 2)), scene.restore_donors),
        "stats": ([store.stats] * k, lambda: None),
    }  # fmt: skip
    made = {
        name: Measure(calls, reset, most=k - 1, after=store.check)
        for name, (calls, reset) in done.items()
    }
    made["defrag"] = Measure([store.defrag], scene.keep_runs, most=1, after=scene.restore_runs)
    return made


def claims(scene: Scene, before: Stats, name: str) -> dict[str, int]:
    """By how much counts differ after the operation `name` was done to all its guests."""
    k = len(scene.new)
    cut = sum(scene.store.cap(seq) // 2 - 1 for seq in scene.targets)
    found: dict[str, dict[str, int]] = {
        "reserve": {"sequences": k, "reserved": k * CAP},
        "release": {"sequences": -k, "reserved": -k * CAP},
        "append": {"written": k},
        "truncate": {"written": -cut},
        "remove": {"written": -k},
        "resize": {"reserved": k},
        "share": {"shared": k * SHARED, "written": 0, "free_cells": 0},
        "copy": {"written": k * SHARED, "rows_copied": k * SHARED},
        "sharer writes": {"copy_on_writes": k, "rows_copied": k, "written": 2 * k},
        "donor writes": {"copy_on_writes": k, "rows_copied": 3 * k, "orphaned": k * ROWS},
        "stats": {"written": 0},
        "defrag": {"defrags": 1, "free_runs": 1 - before.free_runs, "written": 0},
    }
    return found[name]


def tables(case: Case, how: Message) -> Subject:
    """Operations on tables alone, each once through all its guests before any is timed.

    values: by how much counts of the store then differed, and by how much they must.
    """
    assert isinstance(case, Tables)
    scene = Scene(case.sequences)
    made, store = measures(scene), scene.store
    found: list[int] = []
    must: list[int] = []
    for name in case.measures:
        measure = made[name]
        if measure.reset is not None:
            measure.reset()
        before = asdict(store.stats())
        for call in measure.calls:
            call()
        after = asdict(store.stats())
        assert measure.after is not None
        measure.after()
        for count, more in claims(scene, Stats(**before), name).items():
            found.append(after[count] - before[count])
            must.append(more)
    return Subject(made, np.array([found, must], np.float32), note="CellTables")
