"""What a session file says, as plain values for people and programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from minfer.kv.runs import FREE, Entry, rows_read, span_list
from minfer.kv.session.header import ANY, VERSION, Header
from minfer.kv.session.host import line
from minfer.kv.session.reading import SessionFile
from minfer.kv.session.tables import Tables, owners

Facts = dict[str, Any]


def describe(file: SessionFile) -> Facts:
    """All a verified file says of itself, but for the rows and the state in the host part.

    Sizes are bytes, fingerprints hexadecimal or None for none. Everything can be written as JSON.
    """
    header, tables = file.header, file.tables
    part = file.host_part
    facts = {line(name): line(fact) for name, fact in part.facts.items()}
    return {
        "file": file.where,
        "bytes": file.size,
        "version": VERSION,
        **header_facts(header),
        "model": {
            "name": line(part.model),
            "fingerprint": printed(header.model),
            "hash": part.model_hash,
        },
        "numerics": {"fingerprint": printed(header.numerics), "facts": facts},
        "sizes": sizes(header),
        "host": {"bytes": header.host_bytes, "version": part.version},
        "runs": runs(tables),
        "sequences": [_sequence(seq, entry, tables) for seq, entry in tables.entries.items()],
        "counters": {**asdict(tables.counts), "next_run": tables.next_run},
        "cells": cells(tables),
    }


def header_facts(header: Header) -> Facts:
    """What the rows are and for which run."""
    return {
        "cache_type": header.fmt.value,
        "backend": header.backend_name,
        "n_layer": header.n_layer,
        "n_ctx": header.n_ctx,
        "n_kv_embd": header.n_kv_embd,
        "n_head_kv": header.n_head_kv,
        "head_dim": header.head_dim,
        "cell_bytes": header.cell_bytes,
        "n_rows": header.n_rows,
    }


def printed(fingerprint: bytes) -> str | None:
    """In hexadecimal; None for that of no model, or of unknown numbers."""
    return None if fingerprint == ANY else fingerprint.hex()


def sizes(header: Header) -> dict[str, int]:
    """Bytes of every part of the file."""
    ends = header.offsets
    starts = {"header": 0, **ends}
    del starts["end"]
    pairs = zip(starts.items(), ends.values(), strict=True)
    return {name: end - start for (name, start), end in pairs}


def runs(tables: Tables) -> list[Facts]:
    """In the order of the arena. rows: somebody reads. readers: sequences that share rows of it."""
    rows, readers = rows_read(tables.entries.values()), _readers(tables)
    return [
        {
            **{"id": run.id, "start": run.start, "cap": run.cap, "rows": rows.get(run.id, 0)},
            "owner": run.owner,
            "readers": readers.get(run.id, []),
        }
        for run in sorted(tables.runs.values(), key=lambda run: run.start)
    ]


def _readers(tables: Tables) -> dict[int, list[int]]:
    """The sequences that share rows of a run, by run."""
    found: dict[int, list[int]] = {}
    for seq, entry in tables.entries.items():
        if entry.share is not None:
            found.setdefault(entry.share.run, []).append(seq)
    return found


def _sequence(seq: int, entry: Entry, tables: Tables) -> Facts:
    """cap: positions it has cells for. spans: [first position, first cell, length] each."""
    share, last = entry.share, entry.last
    return {
        "id": seq,
        "rows": entry.written,
        "cap": entry.base + tables.runs[entry.run].cap,
        "run": entry.run,
        "share": None if share is None else {"run": share.run, "rows": share.rows},
        "spans": [list(span) for span in span_list(entry, tables.runs)],
        "last": None
        if last is None
        else {
            "token": last.token,
            "kind": last.kind,
            "logits": f"{last.logits:016x}" if last.logits else None,
        },
    }


def cells(tables: Tables) -> dict[str, int]:
    """Counts of cells; free_runs: of stretches of free ones."""
    free = [n for run, _, n in owners(tables.runs.values(), tables.n_ctx) if run == FREE]
    owned = {True: 0, False: 0}
    for run in tables.runs.values():
        owned[run.owner is not None] += run.cap
    return {
        "reserved": owned[True],
        "orphaned": owned[False],
        "written": sum(map(len, tables.written())),
        "free": sum(free),
        "free_runs": len(free),
        "largest_free_run": max(free, default=0),
    }
