"""What a chat pays to the cell store, for the column of this project."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from minfer import Batch, KvStore, registry
from minfer.ops import DECODE
from tuning.bench.cases import Case
from tuning.bench.protocol import Message
from tuning.bench.store_cases import Session
from tuning.columns.subjects import Measure, Subject

SEQ, COPY = 1, 2


def session(case: Case, how: Message) -> Subject:
    """Steps, copies out and in, and moves over a sequence of `rows` rows; a plain copy beside.

    values: rows that were imported and exported once more, and the same as they were given.
    """
    assert isinstance(case, Session)
    store = KvStore(
        case.n_layer, 2 * case.rows + 64, case.n_head_kv, case.head_dim,
        cache_type=how["fmt"], threads=how["threads"],
    )  # fmt: skip
    store.reserve(SEQ, case.rows + 32)
    store.reserve(COPY, case.rows)
    rng = np.random.default_rng(0)
    shape = (case.n_layer, case.rows, case.n_head_kv, case.head_dim)
    k, v = rng.standard_normal((2, *shape), dtype=np.float32)
    store.import_rows(SEQ, k, v)
    row = np.ascontiguousarray(k[0, :1])
    layers, mover = range(case.n_layer), registry.select("move_cells")

    def step(write: bool) -> None:
        with store.step(Batch([SEQ], [case.rows], DECODE)) as opened:
            for layer in layers:
                if write:
                    opened.write(layer, k=row, v=row)
                else:
                    opened.stored(layer, *opened.region(layer))

    def export(rows_of: Callable[[int, int, str], object]) -> None:
        for layer in layers:
            rows_of(SEQ, layer, "k")
            rows_of(SEQ, layer, "v")

    def move() -> None:
        moves = np.array([[case.rows + 32, 0, case.rows]], np.int32)
        for layer in layers:
            for region in store.region(layer):
                mover.launch(region, moves, config=mover.config)

    source = np.ones((2 * case.n_layer, case.rows * store.region(0)[0].row_bytes), np.uint8)
    target = source.copy()

    def copy() -> None:
        for into, out_of in zip(target, source, strict=True):
            into[:] = out_of

    def forget() -> None:
        store.truncate(COPY, 0)

    measures = {
        "step": Measure([lambda: step(False)], lambda: store.truncate(SEQ, case.rows)),
        "step and write": Measure([lambda: step(True)], lambda: store.truncate(SEQ, case.rows)),
        "export": Measure([lambda: export(store.export)]),
        "export cells": Measure([lambda: export(store.export_cells)]),
        "import": Measure([lambda: store.import_rows(COPY, k, v)], forget, most=1),
        "move": Measure([move]),
        "copy": Measure([copy]),
    }
    given, kept = k[-1], store.export(SEQ, case.n_layer - 1, "k")
    return Subject(measures, np.stack([kept, given]), note="KvStore")
