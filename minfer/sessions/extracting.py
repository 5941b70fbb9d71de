"""One sequence out of a session file: its rows as arrays, or a session of its own."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from minfer import atomic
from minfer.format import Bytes
from minfer.kv.runs import Counts, Entry, Run, Share
from minfer.kv.session.header import Header
from minfer.kv.session.pieces import WHICH
from minfer.kv.session.reading import SessionFile
from minfer.kv.session.tables import Tables
from minfer.kv.session.writing import write
from minfer.sessions.description import header_facts
from minfer.sessions.progress import Update, bar
from minfer.sessions.rows import Codec, at_once, cells_at, cut, refuse_unknown, written

FLOAT, INT = np.dtype("<f4"), np.dtype("<i4")
Plane = tuple[int, int]  # layer, and which of `WHICH`


def write_arrays(
    file: SessionFile,
    seq: int,
    path: str | Path,
    layers: Sequence[int],
    which: str,
    *,
    progress: bool = False,
) -> list[str]:
    """An .npz of decoded rows, float32 [rows, n_head_kv, head_dim] by `k_0`, `v_0`, ...

    Beside them `positions`, int32 [rows], and `metadata`, a text in JSON. Returns all names.
    """
    refuse_unknown(file, seq)
    n, header = written(file, seq), file.header
    planes = [(layer, WHICH.index(w)) for layer in layers for w in WHICH if w in which]
    size = len(planes) * n * header.n_kv_embd * FLOAT.itemsize
    facts = {"file": file.where, "seq": seq, "rows": n, **header_facts(header)}
    del facts["n_rows"]
    positions = np.arange(n, dtype=INT)
    text = np.array(json.dumps(facts))
    with (
        atomic.replacing(path, size) as part,
        zipfile.ZipFile(cast("IO[bytes]", _Sink(part)), "w") as archive,
        bar(len(planes) * n, "extracting", " rows", show=progress) as update,
    ):
        for name, array in (("positions", positions), ("metadata", text)):
            with _member(archive, name) as out:
                np.lib.format.write_array(out, array, allow_pickle=False)
        for layer, w in planes:
            with _member(archive, f"{WHICH[w]}_{layer}") as out:
                _write_plane(out, file, seq, (layer, w), update)
        file.refuse_changed()
    return ["positions", "metadata", *(f"{WHICH[w]}_{layer}" for layer, w in planes)]


class _Sink:
    """A file that can only be appended to, as `zipfile` wants one."""

    def __init__(self, part: atomic.Part) -> None:
        self._part = part

    def write(self, data: Any) -> int:
        self._part.write(data)
        return memoryview(data).nbytes

    def flush(self) -> None:
        """Nothing is held back."""


def _member(archive: zipfile.ZipFile, name: str) -> IO[bytes]:
    return archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True)


def _write_plane(out: IO[bytes], file: SessionFile, seq: int, plane: Plane, update: Update) -> None:
    """The rows of one layer's K or V, in pieces."""
    header, n, codec = file.header, written(file, seq), Codec.of(file.header)
    shape = (n, header.n_head_kv, header.head_dim)
    described = {"descr": FLOAT.str, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(out, described)
    for positions in cut(n, at_once(header)):
        out.write(codec.decode(cells_at(file, seq, *plane, positions)).data)
        update(len(positions))


def write_session(
    file: SessionFile,
    seq: int,
    path: str | Path,
    *,
    keep_share: bool = False,
    progress: bool = False,
) -> Header:
    """A session of that sequence alone, from cell 0 on; n_ctx and all it belongs to stay.

    keep_share: a shared prefix stays a run of its own, without an owner; else one run holds all
    rows. The host's state goes along if the file has no other sequence.
    """
    refuse_unknown(file, seq)
    tables = alone(file.tables, seq, keep_share)
    kept = file.host
    if len(file.tables.entries) > 1:
        part = file.host_part
        kept = b"" if part.version is None else part.packed(state=None)
    counts: dict[str, Any] = tables.sizes()
    header = replace(file.header, host_bytes=len(kept), **counts)
    n = 2 * header.n_layer * header.n_rows
    with bar(n, "extracting", " rows", show=progress) as update:
        write(path, header, tables, kept, _cells(file, seq, update))
    return header


def alone(tables: Tables, seq: int, keep_share: bool) -> Tables:
    """The tables of a store that holds `seq` and nothing else."""
    entry = tables.entries[seq]
    own, rows = tables.runs[entry.run].cap, entry.base
    if keep_share and entry.share is not None:
        runs = {0: Run(0, 0, rows, None), 1: Run(1, rows, own, seq)}
        kept = Entry(1, entry.written, Share(0, rows), entry.last)
    else:
        runs = {0: Run(0, 0, rows + own, seq)}
        kept = Entry(0, entry.written, None, entry.last)
    return Tables(tables.n_ctx, runs, {seq: kept}, Counts(), len(runs))


def _cells(file: SessionFile, seq: int, update: Update) -> Iterator[Bytes]:
    for layer in range(file.header.n_layer):
        for which in range(len(WHICH)):
            for positions in cut(written(file, seq), at_once(file.header)):
                yield cells_at(file, seq, layer, which, positions)
                update(len(positions))
    file.refuse_changed()
