"""The Llama family: which nodes, in which order.

RMSNorm before attention and feed-forward, grouped-query attention with rotary positions, SwiGLU,
residual sums (Touvron et al., arXiv 2302.13971; Ainslie et al., arXiv 2305.13245).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minfer.graph.builder import GraphBuilder
from minfer.graph.nodes import Value
from minfer.models.hyperparameters import Hyperparameters

PARTS = (  # weights of a layer
    "attn_norm",
    "attn_qkv",
    "attn_output",
    "ffn_norm",
    "ffn_gate_up",
    "ffn_down",
)


def forward(
    b: GraphBuilder,
    hp: Hyperparameters,
    weights: Mapping[str, Any],
    rope: tuple[Any, Any],
) -> Value:
    """Logits [n_out, n_vocab] of the rows in `out_rows`.

    weights: what `models.weights.load_weights` gives. rope: cos and sin of `rope.tables`.
    """
    cos, sin = b.constant(rope[0]), b.constant(rope[1])
    n_q, n_kv = hp.n_head * hp.head_dim, hp.n_head_kv * hp.head_dim
    scale = hp.head_dim**-0.5
    embeddings = weights["token_embd.weight"]
    x = b.rows(b.constant(embeddings), b.input("tokens"))
    for layer in range(hp.n_layer):
        w = {part: weights[f"blk.{layer}.{part}.weight"] for part in PARTS}
        h = b.rms_norm(x, b.constant(w["attn_norm"]), hp.rms_eps)
        q, k, v = b.linears(w["attn_qkv"], (n_q, n_kv, n_kv), h)
        q = b.qkv_rope_store(layer, q, k, v, cos=cos, sin=sin, pairing=hp.rope_pairing)
        x = b.add(x, b.linear(w["attn_output"], b.attention(layer, q, scale)))
        h = b.rms_norm(x, b.constant(w["ffn_norm"]), hp.rms_eps)
        gate, up = b.linears(w["ffn_gate_up"], (hp.n_ff, hp.n_ff), h)
        x = b.add(x, b.linear(w["ffn_down"], b.silu_mul(gate, up)))
    x = b.rows(x, b.input("out_rows"))
    x = b.rms_norm(x, b.constant(weights["output_norm.weight"]), hp.rms_eps)
    return b.linear(weights.get("output.weight", embeddings), x)
