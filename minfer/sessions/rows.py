"""Rows of a session file: by sequence and position, decoded, and encoded anew."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from minfer import registry
from minfer.device import Device, DeviceKind
from minfer.errors import Refusal
from minfer.format import Bytes, Floats, KvFormat, Region
from minfer.kv.runs import written_cells
from minfer.kv.session.header import Header
from minfer.kv.session.pieces import PIECE_BYTES
from minfer.kv.session.reading import SessionFile

CPU = Device(DeviceKind.CPU)


class Codec:
    """Canonical cells of one format to float32 rows and back, by the CPU's kernels."""

    def __init__(self, fmt: KvFormat, n_head_kv: int, head_dim: int) -> None:
        self.head_dim, self._shape = head_dim, (n_head_kv, head_dim)
        self._fmt, self._kernels = fmt, CPU.package()
        self._store = registry.select("store_cells", device=CPU, fmt=fmt)

    @classmethod
    def of(cls, header: Header) -> Codec:
        """That of the cells of a file."""
        return cls(header.fmt, header.n_head_kv, header.head_dim)

    def decode(self, cells: Bytes) -> Floats:
        """uint8 [n, cell_bytes] as float32 [n, n_head_kv, head_dim], exactly."""
        region = Region(self._fmt, self._kernels.LAYOUT, *self._shape, (cells,))
        rows: Floats = self._kernels.decode_cells(region, np.arange(len(cells), dtype=np.int32))
        return rows

    def encode(self, rows: Floats) -> Bytes:
        """float32 [n, n_head_kv, head_dim] as uint8 [n, cell_bytes], as a store would keep them."""
        region = self._kernels.empty_region(self._fmt, len(rows), *self._shape)
        cells = np.arange(len(rows), dtype=np.int32)
        config = self._store.config
        kept: Region = self._store.launch(region, rows, cells, fmt=self._fmt, config=config)
        made: Bytes = kept.arrays[0]
        return made


def refuse_unknown(file: SessionFile, seq: int) -> None:
    """Refuse a sequence that the file does not hold."""
    known = list(file.tables.entries)
    if seq not in known:
        held = ", ".join(map(str, known[:20])) or "none"
        raise Refusal(
            "2.5",
            f"{file.where} holds no sequence {seq}; it has {held}",
            {"seq": seq, "sequences": len(known)},
        )


def written(file: SessionFile, seq: int) -> int:
    """Rows of a sequence."""
    return file.tables.entries[seq].written


def at_once(*headers: Header) -> int:
    """How many rows of these files are read at a time."""
    return max(1, PIECE_BYTES // max(header.cell_bytes for header in headers))


def cut(n: int, most: int) -> Iterator[range]:
    """[0, n) in ranges of at most `most`."""
    return (range(first, min(n, first + most)) for first in range(0, n, most))


def cells_at(file: SessionFile, seq: int, layer: int, which: int, positions: range) -> Bytes:
    """K (`which` 0) or V cells of some positions of a sequence, uint8 [n, cell_bytes]."""
    entry = file.tables.entries[seq]
    places = places_of(written_cells(entry, file.tables.runs), positions)
    return file.cells(layer, which, places)


def places_of(cells: Sequence[range], positions: range) -> list[range]:
    """The part of `cells`, which hold positions 0, 1, ... in order, that holds `positions`."""
    found, first = [], 0
    for some in cells:
        part = some[max(0, positions.start - first) : max(0, positions.stop - first)]
        if part:
            found.append(part)
        first += len(some)
    return found
