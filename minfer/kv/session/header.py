"""The first bytes of a session file: what it holds, for which run, and how much of it (8.1).

Every offset of the file follows from the header.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import accumulate

from minfer.device import DeviceKind
from minfer.errors import Damaged, Refusal
from minfer.format import KvFormat, cell_words, refuse_odd_blocks

MAGIC, VERSION = b"MINFERPY", 2
FLAGS = {KvFormat.F32: 0, KvFormat.Q8_0: 1, KvFormat.F16: 2}
ZEROS = 24  # bytes at the end of the header
HEADER = struct.Struct(f"<8s8I16s16s4I2Q{ZEROS}x")
ANY = bytes(16)  # the fingerprint of no model
CHECKSUM_BYTES = 16
INT32_MAX = 2**31 - 1
# Bytes of a record of each table, in the order of the file.
RECORDS = {"runs": 24, "sequences": 48, "spans": 16, "owners": 16, "counters": 40}


@dataclass(frozen=True)
class Header:
    """What a session file says of itself.

    n_kv_embd: elements of a K or V row, in n_head_kv heads. model, numerics: fingerprints of 16
    bytes. n_rows: written cells, of which each layer has a K and a V row. host_bytes: of the host's
    own part.
    """

    fmt: KvFormat
    backend: int
    n_layer: int
    n_ctx: int
    n_kv_embd: int
    n_head_kv: int
    model: bytes
    numerics: bytes
    n_runs: int
    n_sequences: int
    n_spans: int
    n_owners: int
    n_rows: int
    host_bytes: int

    @property
    def cell_words(self) -> int:
        return cell_words(self.fmt, self.n_kv_embd)

    @property
    def cell_bytes(self) -> int:
        return 4 * self.cell_words

    @property
    def head_dim(self) -> int:
        return self.n_kv_embd // self.n_head_kv

    @property
    def backend_name(self) -> str:
        """Its name, or the bare number where this version knows none."""
        names = {kind.value: kind.label for kind in DeviceKind}
        return names.get(self.backend, str(self.backend))

    @property
    def counts(self) -> dict[str, int]:
        """Records of each table."""
        counted = (self.n_runs, self.n_sequences, self.n_spans, self.n_owners, 1)
        return dict(zip(RECORDS, counted, strict=True))

    @property
    def offsets(self) -> dict[str, int]:
        """Where each part begins: the tables, `host`, `rows`, `checksum`, and `end`."""
        tables = (RECORDS[name] * n for name, n in self.counts.items())
        rows = 2 * self.n_layer * self.n_rows * self.cell_bytes
        sizes = (HEADER.size, *tables, self.host_bytes, rows, CHECKSUM_BYTES)
        names = (*RECORDS, "host", "rows", "checksum", "end")
        return dict(zip(names, accumulate(sizes), strict=True))

    def packed(self) -> bytes:
        """The header as it stands in the file."""
        return HEADER.pack(
            *(MAGIC, VERSION, FLAGS[self.fmt], self.backend),
            *(self.n_layer, self.n_ctx, self.n_kv_embd, self.n_head_kv, self.cell_words),
            *(self.model, self.numerics),
            *(self.n_runs, self.n_sequences, self.n_spans, self.n_owners),
            *(self.n_rows, self.host_bytes),
        )


def parse(data: bytes, size: int, where: str) -> Header:
    """The header of a file of `size` bytes, of which `data` are the first.

    where: the file, for messages. Refuses another version; raises Damaged for bytes that are no
    session, and for a size that is not the one that follows from the header.
    """
    if data[: len(MAGIC)] != MAGIC:
        raise damaged(where, "it is no session file: it does not begin with MINFERPY")
    version = int.from_bytes(data[8:12], "little")
    if version != VERSION and len(data) >= 12:
        raise Refusal(
            "8.1",
            f"{where} is a session of version {version} and this minfer reads version {VERSION}; "
            "open it with the minfer that wrote it",
            {"version": version, "reads": VERSION},
        )
    if len(data) < HEADER.size:
        raise damaged(where, f"it ends after {size} bytes, within the header", size=size)
    _, _, flags, *fields = HEADER.unpack(data[: HEADER.size])
    formats = {flag: fmt for fmt, flag in FLAGS.items()}
    if flags not in formats:
        raise Refusal(
            "8.1",
            f"{where} has flags {flags:#x}; known are 0 (f32), 1 (q8_0) and 2 (f16), and a newer "
            "minfer may know more",
            {"flags": flags},
        )
    backend, n_layer, n_ctx, n_kv_embd, n_head_kv, words, *rest = fields
    header = Header(formats[flags], backend, n_layer, n_ctx, n_kv_embd, n_head_kv, *rest)
    _check(header, words, where)
    if any(data[HEADER.size - ZEROS : HEADER.size]):
        raise damaged(where, f"the last {ZEROS} bytes of the header are not zero")
    _check_size(header, size, where)
    return header


def _check(header: Header, words: int, where: str) -> None:
    """Refuse sizes that no store has, and counts that no tables have."""
    h = header
    sizes = {"n_layer": h.n_layer, "n_ctx": h.n_ctx, "n_kv_embd": h.n_kv_embd}
    for name, value in {**sizes, "n_head_kv": h.n_head_kv}.items():
        if not 1 <= value <= INT32_MAX:
            raise damaged(where, f"{name} is {value}", **{name: value})
    if h.n_kv_embd % h.n_head_kv:
        raise damaged(where, f"{h.n_kv_embd} elements of a row are not {h.n_head_kv} equal heads")
    try:
        refuse_odd_blocks(h.fmt, h.head_dim, h.n_kv_embd)
    except Refusal as refusal:
        raise damaged(where, refusal.message) from None
    if words != h.cell_words:
        raise damaged(where, f"cells of {words} words; {h.n_kv_embd} elements take {h.cell_words}")
    most = {  # of each count, by the others
        "n_runs": h.n_ctx,
        "n_sequences": h.n_runs,
        "n_spans": 2 * h.n_sequences,
        "n_owners": 2 * h.n_runs + 1,
        "n_rows": h.n_ctx,
    }
    for name, limit in most.items():
        value = getattr(h, name)
        if value > limit:
            raise damaged(where, f"{name} is {value}, above {limit}", **{name: value})


def _check_size(header: Header, size: int, where: str) -> None:
    wanted = header.offsets["end"]
    if size != wanted:
        what = "cut short" if size < wanted else "too long"
        raise damaged(
            where,
            f"it is {what}: {size} bytes, and its header says {wanted}",
            size=size,
            wanted=wanted,
        )


def damaged(where: str, what: str, **facts: object) -> Damaged:
    """The error of a file whose bytes cannot be right."""
    return Damaged("8.2", f"{where} is damaged: {what}; nothing was loaded", facts)
