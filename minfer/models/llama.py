"""The Llama family (SmolLM2, Mistral, ...): which nodes, in which order.

RMSNorm before attention and feed-forward, grouped-query attention with rotary positions, SwiGLU,
residual sums (Touvron et al., arXiv 2302.13971; Ainslie et al., arXiv 2305.13245). Converters
permute the rows of q and k, so that neighbouring dimensions turn together.
"""

from __future__ import annotations

from minfer.graph.nodes import Value
from minfer.models.architecture import Architecture, Shapes
from minfer.models.blocks import Model, attention_tensors, feed_forward_tensors
from minfer.models.hyperparameters import Hyperparameters
from minfer.ops import INTERLEAVED


def layer_tensors(hp: Hyperparameters) -> Shapes:
    return {**attention_tensors(hp), **feed_forward_tensors(hp)}


def forward(m: Model) -> Value:
    b = m.builder
    x = m.embeddings()
    for layer in m.layers():
        q, k, v = layer.qkv(layer.norm(x, "attn_norm"))
        x = b.add(x, layer.attention(q, k, v))
        x = b.add(x, layer.feed_forward(layer.norm(x, "ffn_norm"), b.silu_mul))
    return m.logits(x)


ARCHITECTURE = Architecture("llama", INTERLEAVED, layer_tensors, forward)
