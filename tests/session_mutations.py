"""Session files taken apart, changed at random, and put together with a checksum that fits."""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray
from refusals import state

from minfer.errors import Refusal
from minfer.kv.batch import Batch
from minfer.kv.runs import LastRow
from minfer.kv.session.header import HEADER
from minfer.kv.session.tables import DTYPES
from minfer.kv.store import KvStore

FIELDS = (
    *("magic", "version", "flags", "backend", "n_layer", "n_ctx", "n_kv_embd", "n_head_kv"),
    *("cell_words", "model", "numerics", "n_runs", "n_sequences", "n_spans", "n_owners"),
    *("n_rows", "host_bytes"),
)
HEAD_DIM = {"f32": 4, "f16": 3, "q8_0": 32}  # cells of f16 and q8_0 end with two unused bytes
N_LAYER, N_CTX = 2, 24
FREE, NONE = -1, -1
EDGES = (*(0, 1, 2, 3, -1, -2, N_CTX, N_CTX - 1, N_CTX + 1, 2**31 - 1, 2**31, 2**32 - 1),)
WIDE = (*EDGES, 2**62 - 1, 2**62, 2**63 - 1, -(2**63))


def empty_store(fmt: str, **how: Any) -> KvStore:
    """Where the small files fit."""
    return KvStore(N_LAYER, N_CTX, 1, HEAD_DIM[fmt], cache_type=fmt, threads=1, **how)


def write_rows(store: KvStore, seq: int, t: int, n: int, last: LastRow | None = None) -> None:
    """Rows [t, t + n) of `seq`, which depend on these numbers alone."""
    shape = (n, store.n_head_kv, store.head_dim)
    rng = np.random.default_rng([seq, t, n])
    with store.step(Batch([seq] * n, range(t, t + n), "prefill")) as step:
        for layer in range(store.n_layer):
            k, v = (rng.standard_normal(shape, dtype=np.float32) for _ in "kv")
            step.write(layer, k=k, v=v)
        if last is not None:
            step.lasts[seq] = last


def small_store(fmt: str, **how: Any) -> KvStore:
    """What `fill` puts into an empty one."""
    store = empty_store(fmt, **how)
    fill(store)
    return store


def fill(store: KvStore) -> None:
    """A donor, two sharers, an orphan, a sequence without rows, and gaps; two last rows kept."""
    for seq, cap in ((1, 5), (2, 4), (7, 1), (3, 3), (4, 2), (5, 4), (6, 2)):
        store.reserve(seq, cap)
    write_rows(store, 1, 0, 4, LastRow(17, "decode", 2**64 - 3))
    store.share_prefix(1, 2, 3)
    write_rows(store, 2, 3, 2)
    store.share_prefix(1, 3, 2)
    write_rows(store, 5, 0, 3)
    store.share_prefix(5, 6, 2)
    write_rows(store, 6, 2, 1, LastRow(0, "prefill", 0))
    store.release(5)
    store.release(7)


@dataclass
class Parts:
    """A session file by its parts. header: by `FIELDS`; its unused end is `zero`."""

    header: dict[str, Any]
    zero: bytes
    tables: dict[str, NDArray[Any]]
    host: bytes
    rows: bytes

    @classmethod
    def of(cls, data: bytes) -> Parts:
        header = dict(zip(FIELDS, HEADER.unpack(data[: HEADER.size]), strict=True))
        tables, at = {}, HEADER.size
        for name, dtype in DTYPES.items():
            n = header.get(f"n_{name}", 1)
            tables[name] = np.frombuffer(data, dtype, n, at).copy()
            at += n * dtype.itemsize
        end = at + header["host_bytes"]
        zero = data[HEADER.size - 24 : HEADER.size]
        return cls(header, zero, tables, data[at:end], data[end:-16])

    def counted(self) -> None:
        """Let the header count what there is."""
        for name, table in self.tables.items():
            if name != "counters":
                self.header[f"n_{name}"] = len(table)
        self.header["host_bytes"] = len(self.host)

    def packed(self) -> bytes:
        """The file, with the checksum of its bytes."""
        values = [self.header[name] for name in FIELDS]
        head = HEADER.pack(*values)[: HEADER.size - len(self.zero)] + self.zero
        tables = b"".join(table.tobytes() for table in self.tables.values())
        return checksummed(head + tables + self.host + self.rows)


def checksummed(data: bytes) -> bytes:
    return data + xxhash.xxh3_128_digest(data)


def settle(parts: Parts) -> None:
    """Derive from runs and sequences whatever follows from them, and make the rows fit."""
    runs, sequences = (parts.tables[name].tolist() for name in ("runs", "sequences"))
    by_id, rows, spans = {run[0]: run for run in runs}, {run[0]: 0 for run in runs}, []
    for seq, written, run, root, shared, *_ in sequences:
        base = 0 if root == NONE else shared
        if root in by_id:
            spans.append((seq, 0, by_id[root][1], shared))
            rows[root] = max(rows[root], shared)
        if run in by_id:
            spans.append((seq, base, *by_id[run][1:3]))
            rows[run] = max(rows[run], written - base)
    kept = [(id, start, cap, _int32(rows[id]), zero) for id, start, cap, _, zero in runs]
    parts.tables["runs"] = np.array(kept, DTYPES["runs"])
    spans = [tuple(map(_int32, span)) for span in spans]
    parts.tables["spans"] = np.array(spans, DTYPES["spans"])
    owners, cell = [], 0
    n_ctx = parts.header["n_ctx"]
    for id, start, cap, *_ in sorted(runs, key=lambda run: run[1]):
        owners += [(FREE, cell, _int32(start - cell))] if start > cell else []
        owners.append((id, start, cap))
        cell = _int32(start + cap)
    owners += [(FREE, cell, _int32(n_ctx - cell))] if n_ctx > cell else []
    parts.tables["owners"] = np.array(owners, DTYPES["owners"])
    parts.header["n_rows"] = n = max(0, sum(rows.values())) % (N_CTX + 2)
    size = 2 * N_LAYER * n * 4 * (parts.header["cell_words"] % 64)
    parts.rows = (parts.rows * (size // max(1, len(parts.rows)) + 1))[:size]
    parts.counted()


def _int32(value: int) -> int:
    return (value + 2**31) % 2**32 - 2**31


def mutated(data: bytes, rng: random.Random) -> bytes:
    """A file that differs from `data` in one to three ways, most often with a checksum that fits.

    In most of them counts, sizes and derived tables follow the change, so that later checks see it.
    """
    try:
        parts = Parts.of(data)
    except (struct.error, ValueError):  # what no parts can be made out in
        return _raw(data, rng)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        rng.choice(MUTATIONS)(parts, rng)
    how = rng.random()
    if how < 0.5:
        settle(parts)
    elif how < 0.9:
        parts.counted()
    whole = parts.packed()
    if rng.random() < 0.1:
        whole = _raw(whole, rng)
    return whole


def _header(parts: Parts, rng: random.Random) -> None:
    name = rng.choice((*FIELDS, "zero"))
    if name == "zero":
        parts.zero = rng.randbytes(24)
    elif name in ("magic", "model", "numerics"):
        parts.header[name] = rng.randbytes(len(parts.header[name]))
    else:
        bits = 64 if name in ("n_rows", "host_bytes") else 32
        parts.header[name] = _other(parts.header[name], rng) % 2**bits


def _field(parts: Parts, rng: random.Random, names: tuple[str, ...] = tuple(DTYPES)) -> None:
    table = parts.tables[rng.choice(names)]
    if len(table):
        record, field = table[rng.randrange(len(table))], rng.choice(table.dtype.names)
        near = int(rng.choice(table[field]))
        value = near if rng.random() < 0.2 else _other(int(record[field]), rng)
        low = 0 if table.dtype[field].kind == "u" else -(2 ** (8 * table.dtype[field].itemsize - 1))
        record[field] = (value - low) % 2 ** (8 * table.dtype[field].itemsize) + low


def _other(value: int, rng: random.Random) -> int:
    near = value + rng.choice((-2, -1, 1, 2))
    return rng.choice((near, near, near, *WIDE, rng.randrange(N_CTX), rng.getrandbits(63)))


def _tables(parts: Parts, rng: random.Random) -> None:
    """What decides: runs and sequences."""
    _field(parts, rng, ("runs", "sequences"))


def _records(parts: Parts, rng: random.Random) -> None:
    """Records swapped, doubled or left out."""
    name = rng.choice(tuple(DTYPES))
    table = parts.tables[name]
    if len(table):
        i, j = (rng.randrange(len(table)) for _ in range(2))
        order = list(range(len(table)))
        order[i], order[j] = order[j], order[i]
        changed = (table[order], np.insert(table, i, table[j]), np.delete(table, i))
        parts.tables[name] = rng.choice(changed)


def _move_run(parts: Parts, rng: random.Random) -> None:
    """A run elsewhere: often over another, sometimes where it fits."""
    runs = parts.tables["runs"]
    if len(runs):
        run = runs[rng.randrange(len(runs))]
        run["start"] = rng.randrange(N_CTX)
        if rng.random() < 0.3:
            run["cap"] = rng.randrange(1, N_CTX)


def _share(parts: Parts, rng: random.Random) -> None:
    """A sequence that reads other rows of another run."""
    sequences, runs = parts.tables["sequences"], parts.tables["runs"]
    if len(sequences) and len(runs):
        entry = sequences[rng.randrange(len(sequences))]
        entry["share_run"] = rng.choice((NONE, *runs["id"].tolist(), 10**6))
        entry["share_rows"] = 0 if entry["share_run"] == NONE else rng.randrange(6)
        entry["written"] = entry["share_rows"] + rng.randrange(4)
        if rng.random() < 0.5:
            entry["kind"] = entry["token"] = entry["logits"] = 0


def _last(parts: Parts, rng: random.Random) -> None:
    sequences = parts.tables["sequences"]
    if len(sequences):
        entry = sequences[rng.randrange(len(sequences))]
        entry["kind"], entry["token"] = rng.randrange(4), rng.choice((-1, 0, 5, 2**31 - 1))
        entry["logits"] = rng.getrandbits(64)


def _counters(parts: Parts, rng: random.Random) -> None:
    _field(parts, rng, ("counters",))


def _renumber(parts: Parts, rng: random.Random) -> None:
    """Other ids, in the same order: the file stays sound while the next run is above them."""
    by = rng.choice((1, 5, 2**40, 2**62 - 50, 2**63 - 50))
    for name, field in (("runs", "id"), ("sequences", "run"), ("owners", "run")):
        parts.tables[name][field] += np.where(parts.tables[name][field] < 0, 0, by)
    shares = parts.tables["sequences"]["share_run"]
    shares += np.where(shares == NONE, 0, by)
    parts.tables["counters"]["next_run"] += by


def _host(parts: Parts, rng: random.Random) -> None:
    json = (b"{}", b"[]", b"null", b'{"minfer_host": 1, "model": 5, "numerics": 3}', b"[" * 3000)
    parts.host = rng.choice((*json, rng.randbytes(rng.randrange(40))))


def _rows(parts: Parts, rng: random.Random) -> None:
    """Other cells, or other bytes behind the elements of a cell."""
    if parts.rows:
        rows, width = bytearray(parts.rows), 4 * parts.header["cell_words"]
        at = rng.randrange(len(rows))
        if rng.random() < 0.3:
            at += (width - 1 - at) % max(1, width)
        rows[min(at, len(rows) - 1)] ^= rng.randrange(1, 256)
        parts.rows = bytes(rows)


def _row_sizes(parts: Parts, rng: random.Random) -> None:
    width = 4 * parts.header["cell_words"] % 256
    more = rng.choice((1, width, 2 * width * N_LAYER))
    parts.rows = parts.rows[:-more] if rng.random() < 0.5 else parts.rows + bytes(more)


def _raw(data: bytes, rng: random.Random) -> bytes:
    """Bytes changed, put in, or left out, wherever they are."""
    at, some = rng.randrange(len(data) + 1), rng.randbytes(rng.choice((1, 4, 16)))
    end = at + rng.choice((0, 1, len(some)))
    changed = data[:at] + some + data[end:]
    return checksummed(changed[:-16]) if rng.random() < 0.5 else changed


Mutation = Callable[[Parts, random.Random], None]
MUTATIONS: tuple[Mutation, ...] = (
    *(_header, _field, _tables, _tables, _tables, _records, _move_run, _move_run, _share, _share),
    *(_last, _counters, _renumber, _host, _rows, _row_sizes),
)


# --- what may become of them ----------------------------------------------------------------------

NUMERICS = slice(56, 72)  # the bytes of a file that no load is refused for
MOST_BYTES = 1 << 20  # that a load of a file of 8 KiB or less may allocate


@contextmanager
def _little_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
    finally:
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert most < MOST_BYTES, f"{most} bytes were allocated"


class Target:
    """A store that files are loaded into, over and over, and what must hold each time.

    folder: for its files. counts_memory: look at it too, which takes longer.
    """

    counts_memory = False

    def __init__(self, fmt: str, folder: Path) -> None:
        self.store = small_store(fmt, sanitize=True)
        self._identity = self.store.identity()
        self.folder = folder
        self._file, self._again = folder / f"{fmt}.kv", folder / f"{fmt}-again.kv"
        self.store.save(self._file, b'{"host": "of the small store"}')
        self.base = self._file.read_bytes()

    def loads(self, data: bytes) -> bool:
        """Whether the store takes `data`: a refusal changes nothing, and what is taken is sound."""
        self._file.write_bytes(data)
        numerics = data[NUMERICS] if len(data) >= NUMERICS.stop else self._identity.numerics
        self.store.identity = lambda: replace(self._identity, numerics=numerics)
        before = state(self.store)
        try:
            with _little_memory() if self.counts_memory else nullcontext():
                loaded = self.store.load(self._file)
        except Refusal as refusal:
            assert state(self.store) == before, refusal
            return False
        self._use(data, loaded.host)
        self._file.write_bytes(self.base)
        self.store.load(self._file)
        return True

    def _use(self, data: bytes, host: bytes) -> None:
        """What was loaded is what `data` says, and can be gone on with."""
        store = self.store
        store.check()
        store.save(self._again, host)
        again = self._again.read_bytes()
        assert again == data, "saved again it is another file"
        for seq in store.sequences():
            self._write(seq)
        store.reserve_with_defrag(2**31 - 1, 1) if store.stats().free_cells else None
        store.check()
        store.save(self._again, host)
        for seq in store.sequences():
            store.release(seq)
        store.check()
        assert store.stats().free_cells == store.n_ctx

    def _write(self, seq: int) -> None:
        """One more row; the last one again where there is no room for more."""
        written = self.store.written(seq)
        t = written if written < self.store.tables.cap(seq) else written - 1
        try:
            write_rows(self.store, seq, t, 1)
        except Refusal as refusal:  # who parts from readers may lack the room
            assert refusal.rule == "5.5" and "needs" in refusal.message, refusal
