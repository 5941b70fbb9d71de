"""Saving what a store holds (contract 8.1, 8.4)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from minfer.errors import Refusal
from minfer.kv.session.header import Header
from minfer.kv.session.identity import Identity, identified
from minfer.kv.session.pieces import pieces, taken
from minfer.kv.session.tables import Tables
from minfer.kv.session.writing import write

if TYPE_CHECKING:
    from minfer.kv.store import KvStore


def save(store: KvStore, path: str | Path, host: bytes) -> None:
    """Write the file; `KvStore.save` says when it refuses."""
    store.tables.refuse_while_open("save")
    if not isinstance(host, bytes):
        raise Refusal(
            "8.1", f"host is {type(host).__name__}; give bytes", {"host": type(host).__name__}
        )
    tables = Tables.of(store.tables)
    header = _header(store, tables, identified(store), len(host))
    rows = (
        taken(store.arena, piece)
        for piece in pieces(store.n_layer, tables.written(), header.cell_bytes)
    )
    write(path, header, tables, host, rows)


def _header(store: KvStore, tables: Tables, identity: Identity, host_bytes: int) -> Header:
    return Header(
        fmt=store.fmt,
        backend=store.device.kind.value,
        n_layer=store.n_layer,
        n_ctx=store.n_ctx,
        n_kv_embd=store.n_head_kv * store.head_dim,
        n_head_kv=store.n_head_kv,
        model=identity.model,
        numerics=identity.numerics,
        host_bytes=host_bytes,
        **tables.sizes(),
    )
