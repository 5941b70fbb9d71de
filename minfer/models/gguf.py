"""A model file: metadata, weights by name, and the hyperparameters of the Llama family."""

from __future__ import annotations

import math
import mmap
import reprlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import numpy as np

from minfer.errors import Refusal
from minfer.models.gguf_guard import check_gguf, damaged

if TYPE_CHECKING:
    from gguf.gguf_reader import GGUFReader, ReaderField, ReaderTensor

Number = TypeVar("Number", int, float)
Value = bool | int | float | str | list[Any]

ARCHITECTURES = {"llama": "interleaved"}  # how rope pairs the dimensions of a head
NUMERIC_KEYS = (  # what is understood below; any other key of the architecture is refused
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "vocab_size",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.dimension_count",
    "rope.freq_base",
)


class TensorInfo(NamedTuple):
    """ggml type name and row-major shape."""

    type: str
    shape: tuple[int, ...]


class GgufFile:
    """A mapped GGUF file. Arrays it hands out may be views of the map: read-only, and they keep
    the map open."""

    def __init__(self, path: Path, reader: GGUFReader) -> None:
        self.path = path
        self.metadata: dict[str, Value] = {
            name: _contents(field, path)
            for name, field in reader.fields.items()
            if not name.startswith("GGUF.")  # what the reader adds: version and counts
        }
        self._tensors: dict[str, ReaderTensor] = {t.name: t for t in reader.tensors}

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """In the order of the file."""
        return tuple(self._tensors)

    def tensor_info(self, name: str) -> TensorInfo:
        """Type and row-major shape; Damaged if the file has no such tensor."""
        found = self._find(name)
        return TensorInfo(found.tensor_type.name, tuple(int(n) for n in reversed(found.shape)))

    def stored(self, name: str) -> np.ndarray[Any, Any]:
        """The bytes of a tensor as they lie in the file: uint8 [*shape[:-1], bytes of a row]."""
        return np.asarray(self._find(name).data).view(np.uint8)

    def tensor(self, name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
        """The tensor as float32 [*shape]: F32 as a view of the file, other types decoded.

        Refuses a type that the `gguf` package cannot decode.
        """
        from gguf.quants import dequantize

        found = self._find(name)
        kind, shape = self.tensor_info(name)
        if kind == "F32":
            return np.asarray(found.data)
        try:
            values = dequantize(np.asarray(found.data), found.tensor_type)
        except NotImplementedError:
            message = f"tensor {name!r} of {self.path} has type {kind}, which cannot be decoded"
            facts = {"tensor": name, "type": kind}
            raise Refusal("0.3", f"{message}; convert the model to f16 or q8_0", facts) from None
        return np.ascontiguousarray(values, dtype=np.float32).reshape(shape)

    def _find(self, name: str) -> ReaderTensor:
        if name not in self._tensors:
            raise damaged(self.path, f"it has no tensor {name!r}", tensor=name)
        return self._tensors[name]


def _contents(field: ReaderField, path: Path) -> Value:
    try:
        return cast(Value, field.contents())
    except UnicodeDecodeError as error:
        # The parts of a field lie one behind the other; the first of these bytes is the culprit.
        at = next(i for i in field.data if field.parts[i].tobytes() == error.object)
        offset = field.offset + sum(part.nbytes for part in field.parts[:at])
        message = f"the value of {field.name!r} at byte {offset} is no UTF-8"
        raise damaged(path, message, offset=offset) from None


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
                check_gguf(data, path)
        return GgufFile(path, _read(path))
    except OSError as error:
        message = f"{path} cannot be read: {error.strerror}"
        raise Refusal("0.2", message, {"path": str(path)}) from None


def _read(path: Path) -> GGUFReader:
    from gguf.gguf_reader import GGUFReader

    try:
        return GGUFReader(path)
    except UnicodeDecodeError:
        raise damaged(path, "a metadata key or tensor name is no UTF-8") from None
    except (ValueError, KeyError, IndexError, OverflowError) as error:
        raise damaged(path, f"the gguf package cannot read it ({error!r})") from error


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """What the metadata says about a model of the Llama family.

    n_rot dimensions of each head are rotated, paired as `rope_pairing` says: `interleaved` pairs
    dimension 2i with 2i + 1. Converters permute the rows of q and k to suit.
    """

    architecture: str
    n_layer: int
    n_ctx_train: int
    n_embd: int
    n_ff: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_rot: int
    rope_base: float
    rope_pairing: str
    rms_eps: float
    n_vocab: int
    tied_embeddings: bool

    @classmethod
    def from_gguf(cls, file: GgufFile) -> Hyperparameters:
        """Read, and check against each other and against every tensor of `file`.

        Refuses an architecture, a key or a tensor that would be left out of the computation;
        raises Damaged for a missing or mistyped key and a missing or misshapen tensor.
        """
        keys = _Keys(file)
        architecture = keys.architecture
        n_embd, n_head = keys.count("embedding_length"), keys.count("attention.head_count")
        head_dim = keys.count("attention.key_length", n_embd // n_head)
        tokens = file.metadata.get("tokenizer.ggml.tokens")
        read = cls(
            architecture=architecture,
            n_layer=keys.count("block_count"),
            n_ctx_train=keys.count("context_length"),
            n_embd=n_embd,
            n_ff=keys.count("feed_forward_length"),
            n_head=n_head,
            n_head_kv=keys.count("attention.head_count_kv", n_head),
            head_dim=head_dim,
            n_rot=keys.count("rope.dimension_count", head_dim),
            rope_base=keys.positive("rope.freq_base", 10000.0),
            rope_pairing=ARCHITECTURES[architecture],
            rms_eps=keys.positive("attention.layer_norm_rms_epsilon"),
            n_vocab=keys.count("vocab_size", len(tokens) if isinstance(tokens, list) else None),
            tied_embeddings="output.weight" not in file.tensor_names,
        )
        read._check_values(file, keys.count("attention.value_length", head_dim), tokens)
        read._check_tensors(file)
        return read

    def tensor_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and row-major shape of every tensor of the model."""
        n_q, n_kv = self.n_head * self.head_dim, self.n_head_kv * self.head_dim
        yield "token_embd.weight", (self.n_vocab, self.n_embd)
        for i in range(self.n_layer):
            yield f"blk.{i}.attn_norm.weight", (self.n_embd,)
            yield f"blk.{i}.attn_q.weight", (n_q, self.n_embd)
            yield f"blk.{i}.attn_k.weight", (n_kv, self.n_embd)
            yield f"blk.{i}.attn_v.weight", (n_kv, self.n_embd)
            yield f"blk.{i}.attn_output.weight", (self.n_embd, n_q)
            yield f"blk.{i}.ffn_norm.weight", (self.n_embd,)
            yield f"blk.{i}.ffn_gate.weight", (self.n_ff, self.n_embd)
            yield f"blk.{i}.ffn_up.weight", (self.n_ff, self.n_embd)
            yield f"blk.{i}.ffn_down.weight", (self.n_embd, self.n_ff)
        yield "output_norm.weight", (self.n_embd,)
        if not self.tied_embeddings:
            yield "output.weight", (self.n_vocab, self.n_embd)

    def _check_values(self, file: GgufFile, value_dim: int, tokens: object) -> None:
        wrong = None
        if self.n_head % self.n_head_kv:
            wrong = f"{self.n_head} heads are no multiple of {self.n_head_kv} K/V heads"
        elif value_dim != self.head_dim:
            wrong = f"keys have {self.head_dim} dimensions a head and values {value_dim}"
        elif self.n_rot % 2 or self.n_rot > self.head_dim:
            wrong = f"rope turns {self.n_rot} dimensions of a head of {self.head_dim}"
        elif isinstance(tokens, list) and len(tokens) != self.n_vocab:
            wrong = f"vocab_size is {self.n_vocab} and the tokenizer has {len(tokens)} tokens"
        if wrong:
            raise Refusal(
                "0.3",
                f"{file.path} contradicts itself or is unsupported: {wrong}; use another model",
            )

    def _check_tensors(self, file: GgufFile) -> None:
        wanted = set()
        for name, shape in self.tensor_shapes():
            found = file.tensor_info(name).shape
            if found != shape:
                raise damaged(
                    file.path,
                    f"tensor {name!r} has shape {list(found)}, its metadata asks for {list(shape)}",
                    tensor=name,
                    wanted=shape,
                    found=found,
                )
            wanted.add(name)
        extra = [name for name in file.tensor_names if name not in wanted]
        if extra:
            raise Refusal(
                "0.3",
                f"{file.path} has {len(extra)} tensors that the {self.architecture} architecture "
                f"would leave out, first {extra[0]!r}; use a model without them",
                {"tensors": extra},
            )


class _Keys:
    """The keys `<architecture>.*` of a file, read strictly."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        name = file.metadata.get("general.architecture")
        if not isinstance(name, str):
            raise damaged(file.path, "it lacks the metadata key 'general.architecture'")
        if name not in ARCHITECTURES:
            raise Refusal(
                "0.3",
                f"{file.path} has the architecture {name!r}; supported: {', '.join(ARCHITECTURES)}",
                {"architecture": name, "supported": tuple(ARCHITECTURES)},
            )
        self.architecture = name
        for key in file.metadata:
            if key.startswith(f"{name}.") and key[len(name) + 1 :] not in NUMERIC_KEYS:
                raise Refusal(
                    "0.3",
                    f"{file.path} sets {key!r} to {reprlib.repr(file.metadata[key])}, which is not "
                    "supported and could change answers; use a model without it",
                    {"key": key},
                )

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number of at least 1."""
        return self._get(key, int, default)

    def positive(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        return self._get(key, float, default)

    def _get(self, key: str, kind: type[Number], default: Number | None) -> Number:
        name = f"{self.architecture}.{key}"
        value = self.file.metadata.get(name, default)
        if value is None:
            raise damaged(self.file.path, f"it lacks the metadata key {name!r}", key=name)
        if isinstance(value, kind) and not isinstance(value, bool) and 0 < value < math.inf:
            return value
        raise damaged(
            self.file.path,
            f"metadata key {name!r} is {reprlib.repr(value)} instead of a positive {kind.__name__}",
            key=name,
        )
