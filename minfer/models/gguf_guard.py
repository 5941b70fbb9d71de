"""The header of a GGUF file: every part checked, and the metadata read.

GGUFReader trusts every count and length, so a damaged one can make it run or allocate without end,
and it makes arrays of every element, which takes seconds for a vocabulary. One walk over the file
holds counts and lengths against the bytes that are there and reads the metadata; the package is
left the tensor table.

Layout (GGUF specification, versions 2 and 3, little-endian): magic, version, number of tensors,
number of metadata pairs; the pairs (key, type, value); the tensor table (name, dimensions with the
fastest first, type, offset into the data); padding; the data.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Container
from pathlib import Path
from typing import Any, NamedTuple

from minfer.errors import Damaged, Refusal

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMS = 4
MAX_ELEMENTS = 1 << 21  # over all arrays; one takes some 100 bytes and 1 us
CODES = {  # value types of one size, as `struct` names them
    **{"UINT8": "B", "INT8": "b", "UINT16": "H", "INT16": "h", "UINT32": "I", "INT32": "i"},
    **{"UINT64": "Q", "INT64": "q", "FLOAT32": "f", "FLOAT64": "d", "BOOL": "?"},
}
Value = bool | int | float | str | list[Any]


class Header(NamedTuple):
    """What a file says before its data. table: the byte where the tensor table starts."""

    metadata: dict[str, Value]
    alignment: int
    table: int


def damaged(path: Path, what: str, **facts: object) -> Damaged:
    """The error for a file whose bytes cannot be what they claim to be."""
    return Damaged(
        "0.2", f"{path} is damaged: {what}; fetch the file again", {"path": str(path), **facts}
    )


def read_header(data: mmap.mmap, path: Path) -> Header:
    """Walk through the header of the mapped file `data`, up to the extents of the tensors.

    Raises Damaged for bytes that are no GGUF header or do not fit the file, and Refusal for a
    big-endian file and for arrays of arrays.
    """
    walk = _Walk(data, path)
    _check_version(walk)
    n_tensors = walk.count(32, "tensors")  # name length, dimensions, one dimension, type, offset
    n_pairs = walk.count(13, "metadata pairs")  # key length, type, one byte of value
    metadata = _metadata(walk, n_pairs)
    header = Header(metadata, _alignment(walk, metadata), walk.offset)
    _check_tensors(walk, n_tensors, header.alignment)
    return header


class _Walk:
    """A position that never leaves the file."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.size = data, path, len(data)
        self.offset = 0

    def damaged(self, what: str, **facts: object) -> Damaged:
        return damaged(self.path, what, **facts)

    def skip(self, n_bytes: int, what: str) -> int:
        """Step over `n_bytes` and return where they start."""
        start = self.offset
        if start + n_bytes > self.size:
            needs = f"{what} at byte {start} needs {n_bytes} bytes"
            raise self.damaged(f"{needs}, but the file ends at byte {self.size}", offset=start)
        self.offset += n_bytes
        return start

    def integer(self, code: str, what: str) -> int:
        """An unsigned integer: `I` of 4 bytes or `Q` of 8."""
        start = self.skip(struct.calcsize(code), what)
        return int(struct.unpack_from(f"<{code}", self.data, start)[0])

    def text(self, what: str) -> str:
        """A string: its length, then UTF-8."""
        start = self.skip(self.integer("Q", f"the length of {what}"), what)
        try:
            return str(self.data[start : self.offset], "utf-8")
        except UnicodeDecodeError:
            raise self.damaged(f"{what} at byte {start} is no UTF-8", offset=start) from None

    def name(self, what: str, taken: Container[str]) -> str:
        """A string that is not in `taken`."""
        name = self.text(f"a {what}")
        if name in taken:
            raise self.damaged(f"{what} {name!r} appears twice", name=name)
        return name

    def count(self, item_bytes: int, what: str) -> int:
        """A number of items of at least `item_bytes` each, which the rest of the file can hold."""
        n = self.integer("Q", f"the number of {what}")
        rest = self.size - self.offset
        if n * item_bytes > rest:
            raise self.damaged(f"it claims {n} {what}, but only {rest} bytes follow", count=n)
        return n


def _check_version(walk: _Walk) -> None:
    if walk.data[: len(MAGIC)] != MAGIC[: len(walk.data)]:
        raise Damaged(
            "0.2",
            f"{walk.path} is no GGUF file: it starts with {bytes(walk.data[:4])!r} instead of "
            f"{MAGIC!r}; name a .gguf file",
            {"path": str(walk.path)},
        )
    walk.skip(len(MAGIC), "the magic")
    version = walk.integer("I", "the version")
    if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
        raise Refusal(
            "0.2",
            f"{walk.path} is a big-endian GGUF file and only little-endian ones are read; "
            "convert the model again as little-endian",
            {"path": str(walk.path)},
        )
    if version not in VERSIONS:
        raise walk.damaged(f"GGUF version {version} is none of {list(VERSIONS)}")


def _metadata(walk: _Walk, n_pairs: int) -> dict[str, Value]:
    metadata: dict[str, Value] = {}
    n_items = 0
    for _ in range(n_pairs):
        key = walk.name("metadata key", metadata)
        kind = _value_type(walk, key)
        if kind != "ARRAY":
            metadata[key] = _values(walk, key, kind, 1)[0]
            continue
        kind = _value_type(walk, key)
        if kind == "ARRAY":
            raise Refusal(
                "0.3",
                f"{walk.path} sets {key!r} to an array of arrays, which is not supported; "
                "use a model without it",
                {"path": str(walk.path), "key": key},
            )
        n = walk.count(_width(kind), f"items of {key!r}")
        n_items += n
        if n_items > MAX_ELEMENTS:
            brings = f"{key!r} brings the metadata to {n_items} array items"
            raise walk.damaged(f"{brings}, more than {MAX_ELEMENTS}", key=key)
        metadata[key] = _values(walk, key, kind, n)
    return metadata


def _value_type(walk: _Walk, key: str) -> str:
    from gguf.constants import GGUFValueType

    raw = walk.integer("I", f"the type of {key!r}")
    if raw not in list(GGUFValueType):
        raise walk.damaged(f"{key!r} has the unknown value type {raw}", key=key)
    return GGUFValueType(raw).name


def _width(kind: str) -> int:
    """Bytes of a value, for a string the least."""
    return 8 if kind == "STRING" else struct.calcsize(f"<{CODES[kind]}")


def _values(walk: _Walk, key: str, kind: str, n: int) -> list[Any]:
    what = f"the value of {key!r}"
    if kind == "STRING":
        return [walk.text(what) for _ in range(n)]
    start = walk.skip(n * _width(kind), what)
    return list(struct.unpack_from(f"<{n}{CODES[kind]}", walk.data, start))


def _alignment(walk: _Walk, metadata: dict[str, Value]) -> int:
    """Of the tensors: the specification's default is 32."""
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 8 or alignment & (alignment - 1):
        raise walk.damaged(f"general.alignment {alignment!r} is no power of two from 8 on")
    return alignment


def _check_tensors(walk: _Walk, n_tensors: int, alignment: int) -> None:
    """Every row of the table is sound, every tensor inside the file, and no two overlap."""
    extents: dict[str, tuple[int, int]] = {}
    for _ in range(n_tensors):
        name = walk.name("tensor name", extents)
        extents[name] = _tensor_row(walk, name, alignment)
    data_start = -(-walk.offset // alignment) * alignment
    end, last = 0, ""
    for name, (offset, n_bytes) in sorted(extents.items(), key=lambda item: item[1]):
        start = data_start + offset
        if start < end:
            raise walk.damaged(f"tensors {last!r} and {name!r} overlap", tensor=name)
        end, last = start + n_bytes, name
        if end > walk.size:
            ends = f"tensor {name!r} ends at byte {end}, but the file ends at byte {walk.size}"
            raise walk.damaged(ends, tensor=name)


def _tensor_row(walk: _Walk, name: str, alignment: int) -> tuple[int, int]:
    """Offset into the data, and bytes."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    what = f"the table entry of tensor {name!r}"
    n_dims = walk.integer("I", what)
    if not 1 <= n_dims <= MAX_DIMS:
        raise walk.damaged(f"tensor {name!r} has {n_dims} dimensions", tensor=name)
    shape = [walk.integer("Q", what) for _ in range(n_dims)][::-1]
    raw_type, offset = walk.integer("I", what), walk.integer("Q", what)
    if raw_type not in list(GGMLQuantizationType):
        raise walk.damaged(f"tensor {name!r} has the unknown type {raw_type}", tensor=name)
    kind = GGMLQuantizationType(raw_type)
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if 0 in shape or shape[-1] % block:
        wrong = f"tensor {name!r} of type {kind.name} cannot have the shape {shape}"
        raise walk.damaged(f"{wrong}: rows come in blocks of {block}", tensor=name)
    if offset % alignment:
        raise walk.damaged(f"tensor {name!r} lies at offset {offset}, no multiple of {alignment}")
    return offset, math.prod(shape) // block * block_bytes
