"""What happens to a store of two layers in its life, and the bytes it holds after each step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from stores import HEAD_DIM, N_HEAD_KV, batch_rows, tokens

from minfer import Batch, KvStore, Rope

N_LAYER = 2


def write(store: KvStore, batch: Batch) -> None:
    with store.step(batch) as step:
        for layer in range(N_LAYER):
            _, k, v = batch_rows(batch, 10 * layer)
            step.write(layer, k=k, v=v)


def cells(store: KvStore) -> list[Any]:
    """Every cell of every region, canonical, and what every sequence exports."""
    everything = np.arange(store.n_ctx, dtype=np.int32)
    found = [
        store.stretch_of(layer).kernels.read_cells(region, everything)
        for layer in range(N_LAYER)
        for region in store.region(layer)
    ]
    for seq in store.sequences():
        for which in "kv":
            found += [store.export_cells(seq, 1, which), store.export(seq, 1, which)]
    return found


def steps(cache_type: str) -> list[tuple[str, Callable[[KvStore], object]]]:
    """What happens to a store, in order."""
    rows = np.random.default_rng(5).standard_normal((2, N_LAYER, 3, N_HEAD_KV, HEAD_DIM))
    k, v = rows.astype(np.float32)
    rope = Rope(HEAD_DIM, 1e4)
    done: list[tuple[str, Callable[[KvStore], object]]] = [
        ("reserve", lambda s: [s.reserve(seq, cap) for seq, cap in ((3, 5), (7, 4), (1, 12))]),
        ("prompt", lambda s: write(s, tokens((3, 0, 5), (1, 0, 7)))),
        ("release", lambda s: s.release(7)),
        ("decode", lambda s: write(s, tokens((1, 7, 1), kind="decode"))),
        ("share", lambda s: (s.reserve(2, 11), s.share_prefix(1, 2, 4))),
        ("copy on write", lambda s: write(s, tokens((1, 2, 3), (2, 4, 2)))),
        ("import", lambda s: s.import_rows(2, k, v)),
        ("defrag", lambda s: s.defrag()),
        ("copy", lambda s: (s.reserve(9, 6), s.copy_prefix(2, 9, 6))),
        ("truncate", lambda s: s.truncate(9, 2)),
        ("over", lambda s: write(s, tokens((9, 1, 3)))),
    ]
    if cache_type != "f16":
        done.append(("remove", lambda s: s.remove(2, 5, 2, rope=rope)))
    return done
