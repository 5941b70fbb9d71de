"""The pieces that architectures share: an architecture says which of them, in which order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minfer.format import Floats
from minfer.graph.builder import GraphBuilder
from minfer.graph.nodes import Value
from minfer.models.architecture import Shapes
from minfer.models.hyperparameters import Hyperparameters
from minfer.rope import Rope

Tables = Mapping[Rope, tuple[Floats, Floats]]


def attention_tensors(hp: Hyperparameters) -> Shapes:
    """Norm and matrices of a layer's attention."""
    return {
        "attn_norm.weight": (hp.n_embd,),
        "attn_q.weight": (hp.n_q, hp.n_embd),
        "attn_k.weight": (hp.n_kv, hp.n_embd),
        "attn_v.weight": (hp.n_kv, hp.n_embd),
        "attn_output.weight": (hp.n_embd, hp.n_q),
    }


def head_norm_tensors(hp: Hyperparameters) -> Shapes:
    """Norms of each head of q and k."""
    return {"attn_q_norm.weight": (hp.head_dim,), "attn_k_norm.weight": (hp.head_dim,)}


def feed_forward_tensors(hp: Hyperparameters) -> Shapes:
    """Norm and matrices of a layer's gated feed-forward."""
    return {
        "ffn_norm.weight": (hp.n_embd,),
        "ffn_gate.weight": (hp.n_ff, hp.n_embd),
        "ffn_up.weight": (hp.n_ff, hp.n_embd),
        "ffn_down.weight": (hp.n_embd, hp.n_ff),
    }


@dataclass(frozen=True)
class Model:
    """What `Architecture.forward` works with.

    weights: what `models.weights.load_weights` gives. tables: cos and sin of the ropes of each
    stretch of layers.
    """

    builder: GraphBuilder
    hp: Hyperparameters
    weights: Mapping[str, Any]
    tables: Sequence[Tables]

    def embeddings(self) -> Value:
        """One row a token."""
        table = self.builder.constant(self.weights["token_embd.weight"])
        return self.builder.rows(table, self.builder.input("tokens"))

    def layers(self) -> Iterator[Layer]:
        """The layers from the first to the last."""
        b = self.builder
        for at, (stretch, tables) in enumerate(zip(b.params.stretches, self.tables, strict=True)):
            b.enter(at)
            ropes = {r: (b.constant(cos), b.constant(sin)) for r, (cos, sin) in tables.items()}
            for index in stretch.layers:
                yield Layer(self, index, *ropes[self.hp.rope_of(index)])

    def logits(self, x: Value) -> Value:
        """[n_out, n_vocab] of the rows in `out_rows`, after the last norm."""
        b = self.builder
        x = b.rows(x, b.input("out_rows"))
        x = b.rms_norm(x, b.constant(self.weights["output_norm.weight"]), self.hp.rms_eps)
        tied = self.weights["token_embd.weight"]
        return b.linear(self.weights.get("output.weight", tied), x)


@dataclass(frozen=True)
class Layer:
    """Nodes of one layer; cos and sin are the tables of its rope."""

    model: Model
    index: int
    cos: Value
    sin: Value

    def norm(self, x: Value, name: str) -> Value:
        """RMSNorm of each row."""
        b = self.model.builder
        return b.rms_norm(x, b.constant(self._weight(f"{name}.weight")), self.model.hp.rms_eps)

    def head_norm(self, x: Value, name: str) -> Value:
        """RMSNorm of each head of each row of q or k."""
        b = self.model.builder
        return b.head_norm(x, b.constant(self._weight(f"{name}.weight")), self.model.hp.rms_eps)

    def qkv(self, h: Value, *, bias: bool = False) -> tuple[Value, Value, Value]:
        """Queries, keys and values of each row."""
        b, hp = self.model.builder, self.model.hp
        sizes = (hp.n_q, hp.n_kv, hp.n_kv)
        q, k, v = b.linears(self._weight("attn_qkv.weight"), sizes, h)
        if bias:
            rows = self._weight("attn_qkv.bias")
            q = b.add(q, b.constant(rows[: hp.n_q]))
            k = b.add(k, b.constant(rows[hp.n_q : hp.n_q + hp.n_kv]))
            v = b.add(v, b.constant(rows[hp.n_q + hp.n_kv :]))
        return q, k, v

    def attention(self, q: Value, k: Value, v: Value, scale: float | None = None) -> Value:
        """Rotate and store, attend, project. scale: of the scores, 1 / sqrt(head_dim) if None."""
        b, hp = self.model.builder, self.model.hp
        pairing = hp.architecture.rope_pairing
        q = b.qkv_rope_store(self.index, q, k, v, cos=self.cos, sin=self.sin, pairing=pairing)
        out = b.attention(self.index, q, hp.head_dim**-0.5 if scale is None else scale)
        return b.linear(self._weight("attn_output.weight"), out)

    def feed_forward(self, h: Value, gated: Callable[[Value, Value], Value]) -> Value:
        """down(gated(gate(h), up(h)))."""
        b, n_ff = self.model.builder, self.model.hp.n_ff
        gate, up = b.linears(self._weight("ffn_gate_up.weight"), (n_ff, n_ff), h)
        return b.linear(self._weight("ffn_down.weight"), gated(gate, up))

    def _weight(self, name: str) -> Any:
        return self.model.weights[f"blk.{self.index}.{name}"]
