"""The hyperparameters of the Llama family: read from a model file, checked, never guessed."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

from minfer.errors import Refusal
from minfer.models.gguf import GgufFile
from minfer.models.gguf_guard import damaged
from minfer.ops import INTERLEAVED

Number = TypeVar("Number", int, float)

ARCHITECTURES = {"llama": INTERLEAVED}  # how rope pairs the dimensions of a head
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
                {"path": str(file.path), "problem": wrong},
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
