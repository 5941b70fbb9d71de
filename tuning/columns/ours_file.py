"""Saving and loading session files, for the column of this project."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from minfer import KvStore
from tuning.bench.cases import Case
from tuning.bench.file_cases import File
from tuning.bench.protocol import Message
from tuning.columns.files import folder, forget
from tuning.columns.subjects import Measure, Subject

SEQ, CHECKED = 1, 97


def file(case: Case, how: Message) -> Subject:
    """A store that is saved, and another that loads the file.

    values: some of the rows that were loaded, and the same as they were saved.
    """
    assert isinstance(case, File)
    shape = (case.n_layer, case.rows, case.n_head_kv, case.head_dim)
    saved, loaded = (
        KvStore(*shape, cache_type=how["fmt"], threads=how["threads"]) for _ in range(2)
    )
    rng = np.random.default_rng(0)
    saved.reserve(SEQ, case.rows)
    for _ in range(0, case.rows, CHECKED):
        n = min(CHECKED, case.rows - saved.written(SEQ))
        k, v = rng.standard_normal((2, case.n_layer, n, *shape[2:]), dtype=np.float32)
        saved.import_rows(SEQ, k, v)
    kept = folder()
    path = Path(kept.name) / "session.kv"
    saved.save(path)
    loaded.load(path)
    rows = [store.export(SEQ, case.n_layer - 1, "v")[::CHECKED] for store in (loaded, saved)]

    def load() -> None:
        assert kept  # the folder lives as long as what is measured
        loaded.load(path)

    measures = {
        "save": Measure([lambda: saved.save(path)], most=1),
        "load": Measure([load]),
        "load cold": Measure([load], lambda: forget(path), most=1),
    }
    return Subject(measures, np.stack(rows), note="KvStore")
