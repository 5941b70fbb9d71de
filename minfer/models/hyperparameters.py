"""The hyperparameters of a model: read from its file, checked, never guessed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from minfer.errors import Refusal
from minfer.models.architecture import Architecture, find_architecture
from minfer.models.gguf import GgufFile
from minfer.models.keys import Keys, architecture_of, check_shape
from minfer.models.rope_scaling import FACTORS, ROPE_KEYS, read_rope
from minfer.rope import Divided, Rope

COMMON_KEYS = (  # what every architecture has; others are understood by its module or refused
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
    *(f"rope.{key}" for key in ROPE_KEYS),
)


@dataclass(frozen=True, slots=True)
class Sliding:
    """Layers that see the last `width` positions only: all but every `period`-th."""

    width: int
    period: int
    rope: Rope


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """What the metadata says about a model.

    rope: of the layers that see the whole context. sliding: the others, where there are such.
    logit_softcap: 0 for none.
    """

    architecture: Architecture
    n_layer: int
    n_ctx_train: int
    n_embd: int
    n_ff: int
    n_head: int
    n_head_kv: int
    head_dim: int
    rms_eps: float
    n_vocab: int
    tied_embeddings: bool
    rope: Rope
    sliding: Sliding | None = None
    logit_softcap: float = 0.0

    @classmethod
    def from_gguf(cls, file: GgufFile) -> Hyperparameters:
        """Read, and check against each other and against every tensor of `file`.

        Refuses an architecture, a key or a tensor that would be left out of the computation;
        raises Damaged for a missing or mistyped key and a missing or misshapen tensor.
        """
        architecture = find_architecture(architecture_of(file), file.path)
        keys = Keys(file, architecture.name, {*COMMON_KEYS, *architecture.keys})
        n_embd, n_head = keys.count("embedding_length"), keys.count("attention.head_count")
        head_dim = keys.count("attention.key_length", n_embd // n_head)
        tokens = file.metadata.get("tokenizer.ggml.tokens")
        common = cls(
            architecture=architecture,
            n_layer=keys.count("block_count"),
            n_ctx_train=keys.count("context_length"),
            n_embd=n_embd,
            n_ff=keys.count("feed_forward_length"),
            n_head=n_head,
            n_head_kv=keys.count("attention.head_count_kv", n_head),
            head_dim=head_dim,
            rms_eps=keys.positive("attention.layer_norm_rms_epsilon"),
            n_vocab=keys.count("vocab_size", len(tokens) if isinstance(tokens, list) else None),
            tied_embeddings="output.weight" not in file.tensor_names,
            rope=read_rope(keys, head_dim),
        )
        hp = architecture.read(keys, common)
        hp._check_values(file, keys.count("attention.value_length", head_dim), tokens)
        hp._check_tensors(file)
        return hp

    @property
    def n_q(self) -> int:
        """Width of a row of queries."""
        return self.n_head * self.head_dim

    @property
    def n_kv(self) -> int:
        """Width of a row of keys or values."""
        return self.n_head_kv * self.head_dim

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """Every rope that a layer has, once."""
        return tuple(dict.fromkeys([self.rope, *([self.sliding.rope] if self.sliding else [])]))

    def sliding_of(self, layer: int) -> Sliding | None:
        """How a layer slides; None if it sees the whole context."""
        local = self.sliding is not None and (layer + 1) % self.sliding.period
        return self.sliding if local else None

    def rope_of(self, layer: int) -> Rope:
        """How a layer turns its queries and keys."""
        sliding = self.sliding_of(layer)
        return sliding.rope if sliding else self.rope

    def tensor_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and row-major shape of every tensor of the model."""
        yield "token_embd.weight", (self.n_vocab, self.n_embd)
        for i in range(self.n_layer):
            for name, shape in self.architecture.layer_tensors(self).items():
                yield f"blk.{i}.{name}", shape
        yield "output_norm.weight", (self.n_embd,)
        if not self.tied_embeddings:
            yield "output.weight", (self.n_vocab, self.n_embd)
        if isinstance(self.rope.scaling, Divided):
            yield FACTORS, (self.rope.n_rot // 2,)

    def _check_values(self, file: GgufFile, value_dim: int, tokens: object) -> None:
        wrong = None
        if self.n_head % self.n_head_kv:
            wrong = f"{self.n_head} heads are no multiple of {self.n_head_kv} K/V heads"
        elif value_dim != self.head_dim:
            wrong = f"keys have {self.head_dim} dimensions a head and values {value_dim}"
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
            check_shape(file, name, shape)
            wanted.add(name)
        extra = [name for name in file.tensor_names if name not in wanted]
        if extra:
            raise Refusal(
                "0.3",
                f"{file.path} has {len(extra)} tensors that the {self.architecture.name} "
                f"architecture would leave out, first {extra[0]!r}; use a model without them",
                {"tensors": extra},
            )
