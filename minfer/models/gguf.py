"""A model file: metadata, and weights by name."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from minfer.errors import Refusal
from minfer.format import Floats
from minfer.models.gguf_guard import Header, Value, damaged, read_header

if TYPE_CHECKING:
    from gguf.gguf_reader import GGUFReader, ReaderTensor


class TensorInfo(NamedTuple):
    """ggml type name and row-major shape."""

    type: str
    shape: tuple[int, ...]


class GgufFile:
    """A mapped GGUF file. Arrays it hands out may be views of the map: read-only, and they keep
    the map open."""

    def __init__(self, path: Path, metadata: dict[str, Value], reader: GGUFReader) -> None:
        self.path, self.metadata = path, metadata
        self._tensors: dict[str, ReaderTensor] = {t.name: t for t in reader.tensors}
        self._state = self._state_now()

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """In the order of the file."""
        return tuple(self._tensors)

    def tensor_info(self, name: str) -> TensorInfo:
        """Type and row-major shape; Damaged if the file has no such tensor."""
        found = self._find(name)
        return TensorInfo(found.tensor_type.name, tuple(int(n) for n in reversed(found.shape)))

    def stored(self, name: str) -> NDArray[Any]:
        """The tensor as it lies in the file, a view of the map: F32 and F16 are [*shape], of
        quantized types uint8, each row its blocks."""
        return np.asarray(self._find(name).data)

    def extent(self, name: str) -> tuple[int, int]:
        """Where the bytes of a tensor begin in the file, and how many they are."""
        found = self._find(name)
        return int(found.data_offset), int(found.n_bytes)

    def refuse_changed(self) -> None:
        """Refuse a file at `path` that is another, or another state, than the one opened."""
        if self._state_now() != self._state:
            message = f"{self.path} was changed since it was loaded; load it again"
            raise Refusal("8.8", message, {"path": str(self.path)})

    def _state_now(self) -> tuple[int, int, int] | None:
        try:
            state = self.path.stat()
        except OSError:
            return None
        return state.st_ino, state.st_size, state.st_mtime_ns

    def tensor(self, name: str, rows: slice = slice(None)) -> Floats:
        """The tensor, or rows of it, as float32: F32 as a view of the file, other types decoded.

        Refuses a type that the `gguf` package cannot decode.
        """
        from gguf.quants import dequantize

        found = self._find(name)
        kind, shape = self.tensor_info(name)
        if kind == "F32":
            return self.stored(name)[rows]
        try:
            values = dequantize(self.stored(name)[rows], found.tensor_type)
        except NotImplementedError:
            message = f"tensor {name!r} of {self.path} has type {kind}, which cannot be decoded"
            facts = {"tensor": name, "type": kind}
            raise Refusal("0.3", f"{message}; convert the model to f16 or q8_0", facts) from None
        return np.ascontiguousarray(values, dtype=np.float32).reshape(-1, *shape[1:])

    def _find(self, name: str) -> ReaderTensor:
        if name not in self._tensors:
            raise damaged(self.path, f"it has no tensor {name!r}", tensor=name)
        return self._tensors[name]


def open_gguf(path: str | Path) -> GgufFile:
    """Map a GGUF file and read its header.

    Refuses a path that is missing, no file, or unreadable, a big-endian file, and metadata of
    arrays of arrays; raises Damaged for bytes that are no GGUF file or are cut short. Tensor data
    is not read here.
    """
    path = Path(path)
    try:
        if not path.is_file():
            state = "is no regular file" if path.exists() else "does not exist"
            raise Refusal("0.2", f"{path} {state}; name a .gguf file", {"path": str(path)})
        with path.open("rb") as file:
            if path.stat().st_size == 0:
                raise damaged(path, "it is empty")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                header = read_header(data, path)
        return GgufFile(path, header.metadata, _read_table(path, header))
    except OSError as error:
        message = f"{path} cannot be read: {error.strerror}"
        raise Refusal("0.2", message, {"path": str(path)}) from None


def _read_table(path: Path, header: Header) -> GGUFReader:
    """The package's reader, led past the metadata: reading it again takes seconds."""
    from gguf.gguf_reader import GGUFReader

    class TableReader(GGUFReader):
        def _build_fields(self, offs: int, count: int) -> int:
            self.alignment = header.alignment
            return header.table

    return TableReader(path)
