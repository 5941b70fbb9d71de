"""The header of a GGUF file, read with every length checked against the file before it is used.

Layout (GGUF specification, versions 2 and 3, little-endian): magic, version, number of tensors,
number of metadata pairs; the pairs (key, type, value); the tensor table (name, dimensions with the
fastest first, type, offset into the data); padding; the data. Types and block sizes come from the
`gguf` package. Its GGUFReader is not used here: it trusts lengths, so that a damaged one can make
it allocate without end, and it takes seconds for a vocabulary.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from minfer.errors import Damaged, Refusal

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
MAX_NESTING = 4
MAX_ELEMENTS = 1 << 22  # over all arrays; the largest vocabularies need some 1.5 million
SCALARS = {  # struct and numpy agree on these codes
    "UINT8": "B",
    "INT8": "b",
    "UINT16": "H",
    "INT16": "h",
    "UINT32": "I",
    "INT32": "i",
    "FLOAT32": "f",
    "BOOL": "?",
    "UINT64": "Q",
    "INT64": "q",
    "FLOAT64": "d",
}

Value = bool | int | float | str | list["Value"]


@dataclass(frozen=True, slots=True)
class TensorExtent:
    """One row of the tensor table: row-major shape, and where in the file the bytes lie."""

    type: str
    shape: tuple[int, ...]
    start: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Header:
    metadata: dict[str, Value]
    tensors: dict[str, TensorExtent]


def damaged(path: Path, what: str, **facts: object) -> Damaged:
    """The error for a file whose bytes cannot be what they claim to be."""
    return Damaged(
        "0.2", f"{path} is damaged: {what}; fetch the file again", {"path": str(path), **facts}
    )


class _Cursor:
    """A reading position that never leaves the file."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path = data, path
        self.offset = 0
        self.elements = 0

    def advance(self, n_bytes: int, what: str) -> int:
        """Step over `n_bytes` and return where they start."""
        start, end = self.offset, self.offset + n_bytes
        if end > len(self.data):
            raise damaged(
                self.path,
                f"{what} at byte {start} needs {n_bytes} bytes, "
                f"but the file ends at byte {len(self.data)}",
                offset=start,
                size=len(self.data),
            )
        self.offset = end
        return start

    def scalar(self, code: str, what: str) -> int | float | bool:
        start = self.advance(struct.calcsize("<" + code), what)
        value: int | float | bool = struct.unpack_from("<" + code, self.data, start)[0]
        return value

    def integer(self, code: str, what: str) -> int:
        return int(self.scalar(code, what))

    def string(self, what: str) -> str:
        n_bytes = self.integer("Q", f"the length of {what}")
        start = self.advance(n_bytes, what)
        try:
            return self.data[start : start + n_bytes].decode("utf-8")
        except UnicodeDecodeError:
            raise damaged(self.path, f"{what} at byte {start} is no UTF-8", offset=start) from None

    def strings(self, n: int, what: str) -> list[Value]:
        """`n` strings. A vocabulary has hundreds of thousands, hence the short loop; what it
        trips over is read again by `string`, which names it."""
        data, size, offset = self.data, len(self.data), self.offset
        length = struct.Struct("<Q").unpack_from
        items: list[Value] = []
        with contextlib.suppress(struct.error, UnicodeDecodeError):
            while len(items) < n:
                end = offset + 8 + length(data, offset)[0]
                if end > size:
                    break
                items.append(data[offset + 8 : end].decode("utf-8"))
                offset = end
        self.offset = offset
        while len(items) < n:
            items.append(self.string(what))
        return items

    def count(self, item_bytes: int, what: str) -> int:
        """A number of items of at least `item_bytes` each, which the rest of the file can hold."""
        n = self.integer("Q", f"the number of {what}")
        rest = len(self.data) - self.offset
        if n * item_bytes > rest:
            raise damaged(
                self.path,
                f"it claims {n} {what}, but only {rest} bytes follow",
                count=n,
                rest=rest,
            )
        return n


def read_header(data: mmap.mmap, path: Path) -> Header:
    """The metadata and the tensor table of the mapped file `data`.

    Raises Damaged for bytes that are no GGUF header or do not fit the file, and Refusal for a
    big-endian file.
    """
    cursor = _Cursor(data, path)
    _check_version(cursor)
    n_tensors = cursor.count(32, "tensors")  # name length, dimensions, one dimension, type, offset
    n_pairs = cursor.count(13, "metadata pairs")  # key length, type, one byte of value
    metadata: dict[str, Value] = {}
    for _ in range(n_pairs):
        key = cursor.string("a metadata key")
        if key in metadata:
            raise damaged(path, f"metadata key {key!r} appears twice", key=key)
        metadata[key] = _value(cursor, cursor.integer("I", f"the type of {key!r}"), key)
    return Header(metadata, _tensor_table(cursor, n_tensors, _alignment(metadata, path)))


def _check_version(cursor: _Cursor) -> None:
    if cursor.data[: len(MAGIC)] != MAGIC[: len(cursor.data)]:
        raise Damaged(
            "0.2",
            f"{cursor.path} is no GGUF file: it starts with {bytes(cursor.data[:4])!r} instead of "
            f"{MAGIC!r}; name a .gguf file",
            {"path": str(cursor.path)},
        )
    cursor.advance(len(MAGIC), "the magic")
    version = cursor.integer("I", "the version")
    if version in VERSIONS:
        return
    if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
        raise Refusal(
            "0.2",
            f"{cursor.path} is a big-endian GGUF file and only little-endian ones are read; "
            "convert the model again as little-endian",
            {"path": str(cursor.path)},
        )
    raise damaged(
        cursor.path, f"GGUF version {version} is none of {list(VERSIONS)}", version=version
    )


def _value(cursor: _Cursor, raw_type: int, key: str, depth: int = 0) -> Value:
    from gguf.constants import GGUFValueType

    try:
        kind = GGUFValueType(raw_type).name
    except ValueError:
        raise damaged(
            cursor.path, f"{key!r} has the unknown value type {raw_type}", key=key
        ) from None
    what = f"the value of {key!r}"
    if kind == "STRING":
        return cursor.string(what)
    if kind in SCALARS:
        return cursor.scalar(SCALARS[kind], what)
    if depth == MAX_NESTING:
        raise damaged(cursor.path, f"{key!r} nests arrays {depth} deep", key=key)
    return _array(cursor, key, depth)


def _array(cursor: _Cursor, key: str, depth: int) -> list[Value]:
    from gguf.constants import GGUFValueType

    raw_item = cursor.integer("I", f"the item type of {key!r}")
    code = SCALARS.get(GGUFValueType(raw_item).name) if raw_item in list(GGUFValueType) else None
    least = 8 if code is None else struct.calcsize("<" + code)
    n = cursor.count(least, f"items of {key!r}")
    cursor.elements += n
    if cursor.elements > MAX_ELEMENTS:
        raise damaged(
            cursor.path,
            f"{key!r} brings the metadata to {cursor.elements} array items, "
            f"more than {MAX_ELEMENTS}",
            key=key,
        )
    if code is not None:
        start = cursor.advance(n * least, f"the value of {key!r}")
        items: list[Value] = np.frombuffer(cursor.data, "<" + code, n, start).tolist()
        return items
    if raw_item == GGUFValueType.STRING:
        return cursor.strings(n, f"the value of {key!r}")
    return [_value(cursor, raw_item, key, depth + 1) for _ in range(n)]


def _alignment(metadata: dict[str, Value], path: Path) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    good = isinstance(alignment, int) and alignment >= 8 and alignment & (alignment - 1) == 0
    if not good:
        raise damaged(path, f"general.alignment {alignment!r} is no power of two from 8 on")
    assert isinstance(alignment, int)
    return alignment


def _tensor_table(cursor: _Cursor, n_tensors: int, alignment: int) -> dict[str, TensorExtent]:
    rows: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
    for _ in range(n_tensors):
        name = cursor.string("a tensor name")
        if name in rows:
            raise damaged(cursor.path, f"tensor {name!r} appears twice", tensor=name)
        rows[name] = _tensor_row(cursor, name, alignment)
    data_start = -(-cursor.offset // alignment) * alignment
    tensors = {
        name: TensorExtent(kind, shape, data_start + offset, n_bytes)
        for name, (kind, shape, offset, n_bytes) in rows.items()
    }
    _check_extents(cursor, tensors)
    return tensors


def _tensor_row(
    cursor: _Cursor, name: str, alignment: int
) -> tuple[str, tuple[int, ...], int, int]:
    """Type name, row-major shape, offset into the data, bytes."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    what = f"the table entry of tensor {name!r}"
    n_dims = cursor.integer("I", what)
    if not 1 <= n_dims <= MAX_DIMS:
        raise damaged(cursor.path, f"tensor {name!r} has {n_dims} dimensions", tensor=name)
    shape = tuple(reversed([cursor.integer("Q", what) for _ in range(n_dims)]))
    raw_type, offset = cursor.integer("I", what), cursor.integer("Q", what)
    try:
        kind = GGMLQuantizationType(raw_type)
    except ValueError:
        raise damaged(
            cursor.path, f"tensor {name!r} has the unknown type {raw_type}", tensor=name
        ) from None
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if 0 in shape or shape[-1] % block:
        raise damaged(
            cursor.path,
            f"tensor {name!r} of type {kind.name} cannot have the shape {list(shape)}: "
            f"rows come in blocks of {block}",
            tensor=name,
        )
    if offset % alignment:
        raise damaged(
            cursor.path, f"tensor {name!r} lies at offset {offset}, no multiple of {alignment}"
        )
    return kind.name, shape, offset, math.prod(shape) // block * block_bytes


def _check_extents(cursor: _Cursor, tensors: dict[str, TensorExtent]) -> None:
    """Every tensor lies inside the file, and no two overlap."""
    size, end, last = len(cursor.data), 0, ""
    for name, extent in sorted(tensors.items(), key=lambda item: item[1].start):
        if extent.start < end:
            raise damaged(cursor.path, f"tensors {last!r} and {name!r} overlap", tensor=name)
        end, last = extent.start + extent.n_bytes, name
        if end > size:
            raise damaged(
                cursor.path,
                f"tensor {name!r} ends at byte {end}, but the file ends at byte {size}",
                tensor=name,
                end=end,
                size=size,
            )
