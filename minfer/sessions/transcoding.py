"""A session file for another cache type, backend or number of cells; a new file, never the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from minfer.device import Device
from minfer.errors import Refusal
from minfer.format import Bytes, KvFormat, refuse_odd_blocks
from minfer.kv.checks import whole_number
from minfer.kv.packing import packed
from minfer.kv.runs import Run
from minfer.kv.session.header import ANY, Header
from minfer.kv.session.pieces import WHICH
from minfer.kv.session.reading import SessionFile
from minfer.kv.session.tables import Tables, without_logits
from minfer.kv.session.writing import write
from minfer.sessions.deviation import Deviation, Planes
from minfer.sessions.progress import Update, bar
from minfer.sessions.rows import Codec


@dataclass(frozen=True)
class Transcoded:
    """A new file beside the one it was made from.

    planes: by layer and "k" or "v", how far decoded rows lie from the old ones; empty where cells
    were taken over byte for byte. moved: runs that begin elsewhere. bitwise: whether the new file
    resumes as exactly as the old one.
    """

    old: Header
    new: Header
    planes: Planes
    moved: int
    bitwise: bool


def transcode(
    file: SessionFile,
    path: str | Path,
    *,
    cache_type: str | KvFormat | None = None,
    device: str | None = None,
    n_ctx: int | None = None,
    progress: bool = False,
) -> Transcoded:
    """Write `path` from a verified file; what is None stays as it is. progress: a bar on stderr.

    Refused: an unknown format or device, q8_0 where heads are no whole blocks, fewer cells than
    all runs have together, and a request that changes nothing.
    """
    old = file.header
    fmt = old.fmt if cache_type is None else KvFormat.parse(cache_type)
    backend = old.backend if device is None else Device.parse(device).kind.value
    cells = old.n_ctx if n_ctx is None else whole_number(n_ctx, "n_ctx", "10", low=1)
    refuse_odd_blocks(fmt, old.head_dim, old.n_kv_embd)
    bitwise = (fmt, backend) == (old.fmt, old.backend)
    if bitwise and cells == old.n_ctx:
        raise Refusal(
            "0.3",
            f"{file.where} is {fmt} on {old.backend_name} with n_ctx {cells} as it is; give "
            "another cache type, device or n_ctx",
            {"cache_type": fmt.value, "backend": old.backend_name, "n_ctx": cells},
        )
    tables = resized(file.tables, cells, file.where)
    kept, numbers = file.host, old.numerics
    if not bitwise:
        tables = without_logits(tables)
        numbers = ANY
        if file.host_part.version is not None:
            kept = file.host_part.packed(numerics={})
    new = replace(
        old, fmt=fmt, backend=backend, n_ctx=cells, numerics=numbers, host_bytes=len(kept)
    )
    counts: dict[str, Any] = tables.sizes()
    new = replace(new, **counts)
    planes: Planes = {}
    with bar(2 * old.n_layer * old.n_rows, "transcoding", " rows", show=progress) as update:
        write(path, new, tables, kept, _converted(file, fmt, planes, update))
    moved = sum(tables.runs[id].start != run.start for id, run in file.tables.runs.items())
    return Transcoded(old, new, planes, moved, bitwise)


def _converted(file: SessionFile, fmt: KvFormat, planes: Planes, update: Update) -> Iterator[Bytes]:
    """The rows of the file as cells of `fmt`; `planes` is filled where that is another format."""
    header = file.header
    source, target = Codec.of(header), Codec(fmt, header.n_head_kv, header.head_dim)
    for piece, cells in file.rows():
        if fmt is header.fmt:
            yield cells
        else:
            rows = source.decode(cells)
            made = target.encode(rows)
            of = planes.setdefault((piece.layer, WHICH[piece.which]), Deviation(header.n_head_kv))
            of.add(rows, target.decode(made))
            yield made
        update(piece.n_rows)


def resized(tables: Tables, n_ctx: int, where: str) -> Tables:
    """The same runs in an arena of `n_ctx` cells, packed where they would reach past its end.

    A run that is the whole arena becomes the whole new one.
    """
    runs = dict(tables.runs)
    if len(runs) == 1 and next(iter(runs.values())).cap == tables.n_ctx:
        (run,) = runs.values()
        rows = max(1, sum(map(len, tables.written())))
        _refuse_small(where, n_ctx, rows, "rows are written")
        runs = {run.id: replace(run, cap=n_ctx)}
    elif max((run.end for run in runs.values()), default=0) > n_ctx:
        _refuse_small(where, n_ctx, sum(run.cap for run in runs.values()), "cells are reserved")
        runs = _at(runs, packed(runs.values()))
    return replace(tables, n_ctx=n_ctx, runs=runs)


def _at(runs: Mapping[int, Run], starts: Mapping[int, int]) -> dict[int, Run]:
    return {id: replace(run, start=starts.get(id, run.start)) for id, run in runs.items()}


def _refuse_small(where: str, n_ctx: int, needed: int, what: str) -> None:
    if needed > n_ctx:
        raise Refusal(
            "5.3",
            f"{where} does not fit in {n_ctx} cells: {needed} {what}; give {needed} or more",
            {"n_ctx": n_ctx, "needed": needed},
        )
