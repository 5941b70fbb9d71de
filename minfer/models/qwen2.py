"""Qwen2 and Qwen2.5: Llama with biases on q, k and v (Qwen2 report, arXiv 2407.10671)."""

from __future__ import annotations

from minfer.graph.nodes import Value
from minfer.models.architecture import Architecture, Shapes
from minfer.models.blocks import Model, attention_tensors, feed_forward_tensors
from minfer.models.hyperparameters import Hyperparameters
from minfer.ops import HALF


def layer_tensors(hp: Hyperparameters) -> Shapes:
    biases = {"attn_q.bias": (hp.n_q,), "attn_k.bias": (hp.n_kv,), "attn_v.bias": (hp.n_kv,)}
    return {**attention_tensors(hp), **biases, **feed_forward_tensors(hp)}


def forward(m: Model) -> Value:
    b = m.builder
    x = m.embeddings()
    for layer in m.layers():
        q, k, v = layer.qkv(layer.norm(x, "attn_norm"), bias=True)
        x = b.add(x, layer.attention(q, k, v))
        x = b.add(x, layer.feed_forward(layer.norm(x, "ffn_norm"), b.silu_mul))
    return m.logits(x)


ARCHITECTURE = Architecture("qwen2", HALF, layer_tensors, forward)
