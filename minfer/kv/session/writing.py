"""Saving a store as a session file (contract 8.1, 8.3, 8.4)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from minfer import atomic
from minfer.kv.session.header import CHECKSUM_BYTES, Header
from minfer.kv.session.tables import Tables


def write(
    path: str | Path, header: Header, tables: Tables, host: bytes, rows: Iterable[Any]
) -> None:
    """Make the file `path` of these parts, or leave it as it was.

    rows: arrays of bytes that are together `header.n_rows` canonical cells of K and of V a layer,
    in the order of `pieces.pieces`.
    """
    import xxhash

    checksum = xxhash.xxh3_128()
    size, announced = 0, header.offsets["end"]
    with atomic.replacing(path, announced) as part:
        for data in _parts(header, tables, host, rows):
            checksum.update(data)
            part.write(data)
            size += len(data)
        part.write(checksum.digest())
        if size + CHECKSUM_BYTES != announced:
            raise AssertionError(f"{size + CHECKSUM_BYTES} bytes written, {announced} announced")


def _parts(
    header: Header, tables: Tables, host: bytes, rows: Iterable[Any]
) -> Iterator[memoryview]:
    yield memoryview(header.packed())
    for records in tables.records().values():
        yield memoryview(records.tobytes())
    yield memoryview(host)
    for some in rows:
        yield memoryview(some).cast("B")
