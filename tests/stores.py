"""Small stores with rows that depend on sequence and position, and what they must answer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from errors_allowed import CAP, assert_within_budget
from numpy.typing import NDArray

from minfer import reference, registry
from minfer.format import KvFormat, Region
from minfer.kv.batch import Batch
from minfer.kv.store import KvStore
from minfer.receipt import Receipt

N_HEAD, N_HEAD_KV, HEAD_DIM = 6, 2, 32
FORMATS = ("f32", "f16", "q8_0")
Rows = NDArray[np.float32]


def make_store(cache_type: str = "f32", n_ctx: int = 40, n_layer: int = 1) -> KvStore:
    return KvStore(n_layer, n_ctx, N_HEAD_KV, HEAD_DIM, cache_type=cache_type, threads=1)


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


def forward(store: KvStore, batch: Batch, *, salt: int = 0, variant: str | None = None) -> Rows:
    """A whole step of one layer; attention of every row."""
    q, k, v = batch_rows(batch, salt)
    with store.step(batch) as step:
        step.write(0, k=k, v=v)
        return step.attend(0, q=q, variant=variant)


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


BATCH = tokens((1, 0, 2))  # the two first rows of sequence 1


def scattered(cache_type: str) -> KvStore:
    """Sequences 1, 3, 2 at cells 9, 0 and 17 with 5, 4 and 6 rows; cells 4 to 9 are free."""
    store = make_store(cache_type)
    for seq, cap in ((3, 4), (7, 5), (1, 8), (2, 9)):
        store.reserve(seq, cap)
    store.release(7)
    forward(store, tokens((1, 0, 5), (2, 0, 6), (3, 0, 4)))
    return store
