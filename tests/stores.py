"""Small stores with rows that depend on sequence and position, and what they must answer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from errors_allowed import CAP, assert_within_budget
from numpy.typing import NDArray

from minfer import reference, registry
from minfer.format import KvFormat, Region
from minfer.kv.batch import Batch, Group
from minfer.kv.runs import FREE
from minfer.kv.step import Step
from minfer.kv.store import KvStore
from minfer.ops import HALF
from minfer.receipt import Receipt
from minfer.rope import Rope

N_HEAD, N_HEAD_KV, HEAD_DIM = 6, 2, 32
FORMATS = ("f32", "f16", "q8_0")
Rows = NDArray[np.float32]


def make_store(cache_type: str = "f32", n_ctx: int = 40, n_layer: int = 1, **how: Any) -> KvStore:
    """how: further arguments of the store, such as device and sanitize."""
    shape = (n_layer, n_ctx, N_HEAD_KV, HEAD_DIM)
    return KvStore(*shape, cache_type=cache_type, threads=1, **how)


def token_rows(seq: int, positions: Sequence[int], n_head: int, what: int) -> Rows:
    """Rows that depend on sequence and position alone, [n, n_head, head_dim]."""
    made = [
        np.random.default_rng([seq, pos, what]).standard_normal(
            (n_head, HEAD_DIM), dtype=np.float32
        )
        for pos in positions
    ]
    return np.stack(made)


def batch_rows(batch: Batch, salt: int = 0) -> tuple[Rows, Rows, Rows]:
    """q, k and v of a batch."""
    parts = [
        [token_rows(g.seq, range(g.t, g.t + g.n), n, what + salt) for g in batch.groups]
        for n, what in ((N_HEAD, 0), (N_HEAD_KV, 1), (N_HEAD_KV, 2))
    ]
    q, k, v = (np.concatenate(part) for part in parts)
    return q, k, v


def forward(
    store: KvStore, batch: Batch, *, salt: int = 0, q: Rows | None = None, **how: Any
) -> Rows:
    """A whole step of one layer; attention of every row. how: further arguments of `attend`."""
    own, k, v = batch_rows(batch, salt)
    with store.step(batch) as step:
        step.write(0, k=k, v=v)
        return step.attend(0, q=own if q is None else q, **how)


def tokens(*groups: tuple[int, int, int], kind: str = "prefill") -> Batch:
    """A batch of (sequence, first position, rows)."""
    seqs = [seq for seq, _, n in groups for _ in range(n)]
    positions = [pos for _, t, n in groups for pos in range(t, t + n)]
    return Batch(seqs, positions, kind)


def oracle(
    store: KvStore, seq: int, t: int, q: Rows, width: int = 0, dtype: type = np.float64
) -> NDArray[np.floating]:
    """softmax(q k / sqrt(d)) v of the queries at t, t + 1, … over the exported rows of `seq`.

    The rows are laid out afresh from cell 0 on, so where the store keeps them plays no part.
    """
    rows = [store.export(seq, 0, which).reshape(store.written(seq), -1) for which in "kv"]
    k, v = (
        Region(KvFormat.F32, "canonical", N_HEAD_KV, HEAD_DIM, (r.view(np.uint8),)) for r in rows
    )
    positions = np.arange(t, t + len(q), dtype=np.int32)
    return reference.attention(
        q,
        k,
        v,
        positions,
        reference.runs_of(positions, None),
        fmt=KvFormat.F32,
        scale=1 / np.sqrt(HEAD_DIM),
        width=width,
        dtype=dtype,
    )


def assert_attends(
    store: KvStore, receipt: Receipt, seq: int, t: int, q: Rows, out: Rows, width: int = 0
) -> None:
    """Within the cap of the format, and within the budget where the variant rounds."""
    largest = float(np.abs(store.export(seq, 0, "v")).max())
    exact = oracle(store, seq, t, q, width)
    assert np.abs(out - exact).max() <= CAP[store.fmt] * largest
    (used,) = (v for v in registry.variants(receipt.op) if v.name == receipt.variant)
    rounded = reference.round_query(q, used.numerics(store.fmt).query)
    wide, narrow = (oracle(store, seq, t, rounded, width, f) for f in (np.float64, np.float32))
    assert_within_budget(out, wide, narrow)


def turned(rows: Rows, rope: Rope, by: int, pairing: str) -> NDArray[np.float64]:
    """In float64: each pair of each head row turned by `by` positions; the rest of a row stays."""
    n, wide = rope.n_rot, rows.astype(np.float64)
    angle = by * rope.frequencies()
    pairs = (
        (slice(0, n // 2), slice(n // 2, n))
        if pairing == HALF
        else (slice(0, n, 2), slice(1, n, 2))
    )
    a, b = (wide[..., dims] for dims in pairs)
    out = wide.copy()
    out[..., pairs[0]] = a * np.cos(angle) - b * np.sin(angle)
    out[..., pairs[1]] = a * np.sin(angle) + b * np.cos(angle)
    return out


BATCH = tokens((1, 0, 2))  # the two first rows of sequence 1


def scattered(cache_type: str) -> KvStore:
    """Sequences 1, 3, 2 at cells 9, 0 and 17 with 5, 4 and 6 rows; cells 4 to 9 are free."""
    store = make_store(cache_type)
    for seq, cap in ((3, 4), (7, 5), (1, 8), (2, 9)):
        store.reserve(seq, cap)
    store.release(7)
    forward(store, tokens((1, 0, 5), (2, 0, 6), (3, 0, 4)))
    return store


# --- stores beside what they must read ------------------------------------------------------------

A, B, C, D = 1, 2, 3, 4  # sequences


class Seed(NamedTuple):
    """What a row is made of; equal seeds, equal rows."""

    seq: int
    pos: int
    step: int


class Told:
    """A store, and beside it what every sequence must read: the seed of each of its rows.

    Methods do the same to both, and then compare them.
    """

    def __init__(
        self,
        cache_type: str = "f32",
        n_ctx: int = 16,
        n_layer: int = 1,
        **how: Any,
    ) -> None:
        self.store = make_store(cache_type, n_ctx, n_layer, **how)
        self.seeds: dict[int, list[Seed]] = {}
        self.steps = 0

    def reserve(self, seq: int, cap: int, rows: int = 0) -> None:
        """Cells for `cap` positions, the first `rows` of them written."""
        self.store.reserve(seq, cap)
        self.seeds.setdefault(seq, [])
        if rows:
            self.write((seq, 0, rows))

    def release(self, seq: int) -> None:
        self.store.release(seq)
        del self.seeds[seq]
        self.check()

    def truncate(self, seq: int, rows: int) -> None:
        self.store.truncate(seq, rows)
        del self.seeds[seq][rows:]
        self.check()

    def share(self, src: int, dst: int, rows: int) -> None:
        self.store.share_prefix(src, dst, rows)
        self.seeds[dst] = self.seeds[src][:rows]
        self.check()

    def copy(self, src: int, dst: int, rows: int) -> None:
        self.store.copy_prefix(src, dst, rows)
        self.seeds[dst] = self.seeds[src][:rows]
        self.check()

    def remove(self, seq: int, start: int, length: int) -> None:
        """Removal of rows that are not rotated."""
        self.store.remove(seq, start, length, rope=None)
        del self.seeds[seq][start : start + length]
        self.check()

    def write(self, *groups: tuple[int, int, int], kind: str = "prefill") -> Step:
        """A step over groups of (sequence, first position, rows)."""
        batch, fresh = self._fresh(groups, kind)
        with self.store.step(batch) as step:
            self._write(step, fresh)
        self._keep(batch, fresh)
        return step

    def attend(self, *groups: tuple[int, int, int], kind: str = "prefill", width: int = 0) -> Step:
        """A step whose answers are near the oracle's, and in bits those of a sequence alone."""
        batch, fresh = self._fresh(groups, kind)
        q = np.stack([seed_row(seed, N_HEAD, 0) for seed in fresh])
        with self.store.step(batch) as step:
            self._write(step, fresh)
            out = step.attend(0, q=q, width=width)
        self._keep(batch, fresh)
        for group in batch.groups:
            rows = slice(group.row, group.row + group.n)
            assert_attends(
                self.store, step.receipts[0], group.seq, group.t, q[rows], out[rows], width
            )
            np.testing.assert_array_equal(out[rows], self.alone(group, q[rows], kind, width))
        return step

    def alone(self, group: Group, q: Rows, kind: str, width: int) -> Rows:
        """The answer of a store that holds the rows of one sequence and nothing else."""
        end = group.t + group.n
        k, v = seed_rows(self.seeds[group.seq][:end], 0)
        store = make_store(str(self.store.fmt), n_ctx=end)
        store.reserve(0, end)
        if group.t:
            store.import_rows(0, k[None, : group.t], v[None, : group.t])
        with store.step(tokens((0, group.t, group.n), kind=kind)) as step:
            step.write(0, k=k[group.t :], v=v[group.t :])
            return step.attend(0, q=q, width=width)

    def _fresh(self, groups: Sequence[tuple[int, int, int]], kind: str) -> tuple[Batch, list[Seed]]:
        self.steps += 1
        batch = tokens(*groups, kind=kind)
        named = zip(batch.seq_ids, batch.positions, strict=True)
        return batch, [Seed(seq, pos, self.steps) for seq, pos in named]

    def _write(self, step: Step, fresh: list[Seed]) -> None:
        for layer in range(self.store.n_layer):
            k, v = seed_rows(fresh, layer)
            step.write(layer, k=k, v=v)

    def _keep(self, batch: Batch, fresh: list[Seed]) -> None:
        for group in batch.groups:
            rows = fresh[group.row : group.row + group.n]
            self.seeds[group.seq][group.t : group.t + group.n] = rows
        self.check()

    def check(self) -> None:
        """The tables are sound, and every row of every sequence reads back."""
        self.store.check()
        assert_clear(self.store)
        for seq, seeds in self.seeds.items():
            assert self.store.written(seq) == len(seeds), f"rows of sequence {seq}"
            for layer in range(self.store.n_layer if seeds else 0):
                for which, rows in zip("kv", seed_rows(seeds, layer), strict=True):
                    wanted = reference.encode_rows(rows.reshape(len(seeds), -1), self.store.fmt)
                    found = self.store.export_cells(seq, layer, which)
                    np.testing.assert_array_equal(found, wanted, f"{which} of sequence {seq}")


@cache
def seed_row(seed: Seed, n_head: int, what: int) -> Rows:
    """[n_head, head_dim]; what: 0 for q, then K and V of every layer."""
    return np.random.default_rng([*seed, what]).standard_normal(
        (n_head, HEAD_DIM), dtype=np.float32
    )


def seed_rows(seeds: Sequence[Seed], layer: int) -> tuple[Rows, Rows]:
    """K and V of one layer, [n, n_head_kv, head_dim] each."""
    k, v = (
        np.stack([seed_row(seed, N_HEAD_KV, 1 + 2 * layer + i) for seed in seeds]) for i in (0, 1)
    )
    return k, v


def read_cells(store: KvStore) -> set[int]:
    """The cells that hold a row which some sequence may read."""
    cells: set[int] = set()
    for seq in store.sequences():
        for span in store.spans(seq):
            rows = min(span.length, store.written(seq) - span.position)
            cells.update(range(span.cell, span.cell + max(0, rows)))
    return cells


def assert_clear(store: KvStore) -> None:
    """Under the sanitizer every cell that nobody reads holds NaN (contract 5.10)."""
    if not store.sanitize:
        return
    unread = np.array(sorted(set(range(store.n_ctx)) - read_cells(store)), np.int32)
    for layer in range(store.n_layer):
        kernels = store.stretch_of(layer).kernels
        for region in store.region(layer):
            rows = kernels.to_host(kernels.decode_cells(region, unread))
            assert np.isnan(rows).all(), f"layer {layer}: a cell of {unread.tolist()} is not NaN"


def layout(store: KvStore) -> list[tuple[int, int, int]]:
    """(run id, first cell, cells) over the whole arena in cell order; FREE where there is none."""
    found, cell = [], 0
    for run, cells in groupby(store.owners()):
        n = len(list(cells))
        found.append((run, cell, n))
        cell += n
    return found


def free_runs(store: KvStore) -> list[tuple[int, int]]:
    """(first cell, end) of every free run."""
    return [(cell, cell + n) for run, cell, n in layout(store) if run == FREE]
