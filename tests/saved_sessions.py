"""Session files of small stores and tiny models, for the tests of tools."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray
from stores import Told, seed_rows

from minfer import Engine, reference
from minfer.format import KvFormat
from minfer.kv.session.header import CHECKSUM_BYTES, HEADER, parse

LAYERS, CELLS = 2, 40
PROMPT = "the cat hat"


def told_store(cache_type: str = "f32", n_layer: int = LAYERS) -> Told:
    """Sequences 2 and 3 read rows of run 0, whose owner is gone; 9 has no rows.

    Runs by cell: 0 [0, 5) orphan, 3 [5, 8) of 9, 1 [10, 18) of 2, 2 [18, 24) of 3.
    """
    told = Told(cache_type, CELLS, n_layer)
    told.reserve(1, 10, rows=8)
    told.reserve(2, 8)
    told.share(1, 2, 5)
    told.write((2, 5, 3))
    told.reserve(3, 6)
    told.share(1, 3, 4)
    told.write((3, 4, 1))
    told.release(1)
    told.reserve(9, 3)
    return told


def kept_rows(told: Told, seq: int, layer: int, which: str) -> NDArray[np.float32]:
    """The decoded rows that a sequence must have, by the oracle: [n, n_head_kv, head_dim]."""
    rows = seed_rows(told.seeds[seq], layer)["kv".index(which)]
    return through(rows, told.store.fmt)


def through(rows: NDArray[np.float32], fmt: KvFormat | str) -> NDArray[np.float32]:
    """Rows stored as `fmt` and decoded, by the oracle."""
    fmt, flat = KvFormat.parse(fmt), rows.reshape(len(rows), -1)
    cells = reference.encode_rows(flat, fmt)
    return reference.decode_rows(cells, fmt, flat.shape[1]).reshape(rows.shape)


def engine_session(model: Path, path: Path, **how: Any) -> Engine:
    """Save a conversation in three sequences, and the engine that did.

    0: a prompt and 5 generated tokens, whose last row 2 reads, too; 1: shares 3 rows, then 2 of a
    prompt; 2: shares all rows of 0 and was fed nothing itself.
    """
    engine = Engine.load(model, n_ctx=48, **how)
    ids = engine.encode(PROMPT)
    engine.store.reserve(0, 24)
    made = list(engine.generate(ids, 6))
    engine.store.reserve(1, 6)
    engine.store.share_prefix(0, 1, 3)
    engine.prefill(ids[:2], 1)
    engine.store.reserve(2, 4)
    engine.store.share_prefix(0, 2, engine.store.written(0))
    engine.save(path, {"stream_tokens": [*ids, *made[:-1]]})
    return engine


def resealed(path: Path, data: bytes) -> None:
    """Write `data` with a checksum that fits it."""
    body = data[:-CHECKSUM_BYTES]
    path.write_bytes(body + xxhash.xxh3_128_digest(body))


def header_changed(path: Path, **values: Any) -> None:
    """Give a file's header other values."""
    data = path.read_bytes()
    header = replace(parse(data[: HEADER.size], len(data), str(path)), **values)
    resealed(path, header.packed() + data[HEADER.size :])


def row_changed(path: Path, layer: int, which: int, row: int, byte: int, by: int = 1) -> None:
    """Flip bits in one written row of a file, and make the checksum fit."""
    data = bytearray(path.read_bytes())
    header = parse(bytes(data[: HEADER.size]), len(data), str(path))
    first = header.offsets["rows"]
    place = first + ((2 * layer + which) * header.n_rows + row) * header.cell_bytes + byte
    assert place < header.offsets["checksum"]
    data[place] ^= by
    resealed(path, bytes(data))
