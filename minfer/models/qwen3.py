"""Qwen3: Llama with a norm on each head of q and k (Qwen3 report, arXiv 2505.09388)."""

from __future__ import annotations

from minfer.graph.nodes import Value
from minfer.models.architecture import Architecture, Shapes
from minfer.models.blocks import (
    Model,
    attention_tensors,
    feed_forward_tensors,
    head_norm_tensors,
)
from minfer.models.hyperparameters import Hyperparameters
from minfer.ops import HALF


def layer_tensors(hp: Hyperparameters) -> Shapes:
    return {**attention_tensors(hp), **head_norm_tensors(hp), **feed_forward_tensors(hp)}


def forward(m: Model) -> Value:
    b = m.builder
    x = m.embeddings()
    for layer in m.layers():
        q, k, v = layer.qkv(layer.norm(x, "attn_norm"))
        q, k = layer.head_norm(q, "attn_q_norm"), layer.head_norm(k, "attn_k_norm")
        x = b.add(x, layer.attention(q, k, v))
        x = b.add(x, layer.feed_forward(layer.norm(x, "ffn_norm"), b.silu_mul))
    return m.logits(x)


ARCHITECTURE = Architecture("qwen3", HALF, layer_tensors, forward)
