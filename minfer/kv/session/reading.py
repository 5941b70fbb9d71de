"""Reading a session file: verified as a whole before anything of it is used (contract 8.2)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from io import FileIO
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from minfer.errors import Damaged, Refusal
from minfer.format import BLOCK, BLOCK_BYTES, Bytes, KvFormat
from minfer.kv.session.header import CHECKSUM_BYTES, HEADER, Header, damaged, parse
from minfer.kv.session.host import HostPart
from minfer.kv.session.pieces import PIECE_BYTES, Piece, pieces
from minfer.kv.session.tables import DTYPES, Records, Tables
from minfer.kv.session.tables import parse as parse_tables

Target = Callable[[Piece], "Bytes | None"]


class SessionFile:
    """One open file. `header` is looked at when it is opened, the rest by `verify`.

    host: the host's bytes. checksum: of a verified file. Refuses a file that is missing or cannot
    be read, and what `header.parse` refuses. Use it as a context manager.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.where = str(path)
        self._file = _opened(self.path)
        try:
            self.size = self._file.seek(0, 2)
            self._file.seek(0)
            self.header: Header = parse(self._file.read(HEADER.size), self.size, self.where)
        except BaseException:
            self._file.close()
            raise
        self.host = b""
        self._records: Records = {}
        self.checksum = b""
        self._tables: Tables | None = None

    def __enter__(self) -> SessionFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def verify(self, update: Callable[[int], object] = lambda done: None) -> None:
        """Read the whole file and compare its checksum; raises Damaged if it is another one.

        update: is told how many bytes of rows were read, piece by piece.
        """
        try:
            self._verify(update)
        except EOFError:
            raise self._changed() from None

    def _verify(self, update: Callable[[int], object]) -> None:
        hashed = Hashed(self._file)
        if parse(hashed.take(HEADER.size), self.size, self.where) != self.header:
            raise self._changed()
        counts = self.header.counts
        self._records = {
            name: np.frombuffer(hashed.take(dtype.itemsize * counts[name]), dtype)
            for name, dtype in DTYPES.items()
        }
        self.host = hashed.take(self.header.host_bytes)
        padded = False
        for rows in self._all_rows(hashed):
            padded |= self._is_padded(rows)
            update(rows.nbytes)
        digest = hashed.digest()
        if self._file.read(CHECKSUM_BYTES) != digest:
            raise damaged(self.where, "its checksum is not that of its bytes")
        if padded:
            raise damaged(self.where, "bytes of cells that hold no element are not zero")
        self.checksum = digest

    @cached_property
    def host_part(self) -> HostPart:
        """What an engine says in the host's bytes of a verified file."""
        return HostPart.parse(self.host)

    @property
    def tables(self) -> Tables:
        """The tables of a verified file; raises Damaged where they contradict themselves."""
        if self._tables is None:
            self._tables = parse_tables(self.header, self._records, self.where)
        return self._tables

    def pieces(self) -> Iterator[Piece]:
        """The pieces that the rows are read in."""
        header = self.header
        return pieces(header.n_layer, self.tables.written(), header.cell_bytes)

    def rows(self, target: Target = lambda piece: None) -> Iterator[tuple[Piece, Bytes]]:
        """Every piece with its cells, uint8 [n, cell_bytes], by a second pass over a verified file.

        target: where to put a piece, None for an array that the next piece overwrites. Raises
        Damaged, after the last piece at the latest, if the file is not the one that was verified.
        """
        width, scratch, hashed = self.header.cell_bytes, self._scratch(), Hashed(self._file)
        try:
            hashed.skip(self.header.offsets["rows"])
            for piece in self.pieces():
                size = piece.n_rows * width
                rows = target(piece)
                rows = scratch[:size].reshape(-1, width) if rows is None else rows
                hashed.into(rows.reshape(-1))
                yield piece, rows
            same = hashed.digest() == self.checksum
        except EOFError:
            same = False
        if not same:
            raise self._changed()

    def cells(self, layer: int, which: int, cells: Sequence[range]) -> Bytes:
        """Some K (`which` 0) or V cells of a verified file, uint8 [n, cell_bytes].

        cells: written ones, each range of one run. What came is what was verified if
        `refuse_changed` says so afterwards.
        """
        width, (starts, rows) = self.header.cell_bytes, self._rows_before
        plane = (2 * layer + which) * self.header.n_rows
        found = np.empty((sum(map(len, cells)), width), np.uint8)
        done = 0
        for some in cells:
            at = bisect_right(starts, some.start) - 1
            row = plane + rows[at] + some.start - starts[at]
            self._file.seek(self.header.offsets["rows"] + row * width)
            if not filled(self._file, found[done : done + len(some)].reshape(-1)):
                raise self._changed()
            done += len(some)
        return found

    def refuse_changed(self) -> None:
        """Read the whole file again; raises Damaged if it is not the one that was verified."""
        hashed = Hashed(self._file)
        try:
            hashed.skip(self.header.offsets["checksum"])
        except EOFError:
            raise self._changed() from None
        if hashed.digest() != self.checksum:
            raise self._changed()

    @cached_property
    def _rows_before(self) -> tuple[list[int], list[int]]:
        """The first cell of every stretch of written ones, and how many rows stand before it."""
        written = self.tables.written()
        before = accumulate((len(cells) for cells in written), initial=0)
        return [cells.start for cells in written], list(before)

    def _all_rows(self, hashed: Hashed) -> Iterator[Bytes]:
        """The cells of all layers, uint8 [n, cell_bytes] each, wherever they belong."""
        width, scratch = self.header.cell_bytes, self._scratch()
        left = self.header.offsets["checksum"] - self.header.offsets["rows"]
        while left:
            n = min(left, len(scratch) // width * width)
            yield hashed.into(scratch[:n]).reshape(-1, width)
            left -= n

    def _scratch(self) -> Bytes:
        """Room for a piece; no more than the file has rows."""
        rows = self.header.offsets["checksum"] - self.header.offsets["rows"]
        return np.empty(min(rows, max(PIECE_BYTES, self.header.cell_bytes)), np.uint8)

    def _is_padded(self, rows: Bytes) -> bool:
        """Whether bytes that hold no element are something else than zero."""
        return bool(rows[:, used_bytes(self.header) :].any())

    def _changed(self) -> Damaged:
        return Damaged("8.2", f"{self.where} was changed while it was read; read it again")


def _opened(path: Path) -> FileIO:
    try:
        if path.is_file():
            return path.open("rb", buffering=0)
        state = "is no regular file" if path.exists() else "does not exist"
    except OSError as error:
        state = f"cannot be read: {error.strerror or error}"
    raise Refusal("8.2", f"{path} {state}; name a session file", {"path": str(path)})


class Hashed:
    """Reads a file from its start, hashing what it reads. Raises EOFError where it ends early."""

    def __init__(self, file: Any) -> None:
        import xxhash

        self._file, self._hash = file, xxhash.xxh3_128()
        file.seek(0)

    def into(self, buffer: Bytes) -> Bytes:
        """Fill a contiguous `buffer`; returns it."""
        if not filled(self._file, buffer):
            raise EOFError
        self._hash.update(buffer.data)
        return buffer

    def take(self, n: int) -> bytes:
        """The next `n` bytes; the caller has checked `n` against the size of the file."""
        return self.into(np.empty(n, np.uint8)).tobytes()

    def skip(self, n: int) -> None:
        """Hash the next `n` bytes."""
        scratch = np.empty(min(n, PIECE_BYTES), np.uint8)
        while n:
            n -= len(self.into(scratch[: min(n, len(scratch))]))

    def digest(self) -> bytes:
        """xxh3-128 of what was read."""
        return self._hash.digest()


def filled(file: Any, buffer: Bytes) -> bool:
    """Whether a contiguous `buffer` could be filled from where `file` stands."""
    left = memoryview(buffer.data)
    while left:
        n = file.readinto(left)
        if not n:
            return False
        left = left[n:]
    return True


def used_bytes(header: Header) -> int:
    """Bytes of a cell that hold elements; those after them are zero."""
    n = header.n_kv_embd
    per_element = {
        KvFormat.F32: 4 * n,
        KvFormat.F16: 2 * n,
        KvFormat.Q8_0: n // BLOCK * BLOCK_BYTES,
    }
    return per_element[header.fmt]
