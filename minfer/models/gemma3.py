"""Gemma 3: which nodes, in which order (Gemma 3 report, arXiv 2503.19786).

Norms before and after attention and feed-forward and on each head of q and k, GELU gates, scaled
embeddings. Five layers of a sliding window follow each other, with a rope base of their own, then
one that sees the whole context; only that one's rope is scaled. A file holds the norms' weights
with their 1 added already, and no scale of the scores.
"""

from __future__ import annotations

from dataclasses import replace

from minfer.graph.nodes import Value
from minfer.models.architecture import Architecture, Shapes
from minfer.models.blocks import (
    Model,
    attention_tensors,
    feed_forward_tensors,
    head_norm_tensors,
)
from minfer.models.hyperparameters import Hyperparameters, Sliding
from minfer.models.keys import Keys
from minfer.models.rope_scaling import read_base
from minfer.ops import HALF
from minfer.rope import Rope

LAYERS_OF_27B = 62


def read(keys: Keys, hp: Hyperparameters) -> Hyperparameters:
    if keys.has("final_logit_softcapping"):
        hp = replace(hp, logit_softcap=keys.positive("final_logit_softcapping"))
    if not keys.has("attention.sliding_window"):
        return hp
    sliding = Sliding(
        width=keys.count("attention.sliding_window"),
        period=keys.count("attention.sliding_window_pattern", 6),
        rope=Rope(hp.rope.n_rot, read_base(keys, "rope.freq_base_swa")),
    )
    return replace(hp, sliding=sliding)


def layer_tensors(hp: Hyperparameters) -> Shapes:
    after = {"post_attention_norm.weight": (hp.n_embd,), "post_ffw_norm.weight": (hp.n_embd,)}
    return {**attention_tensors(hp), **head_norm_tensors(hp), **feed_forward_tensors(hp), **after}


def attention_scale(hp: Hyperparameters) -> float:
    """Files do not hold it. 1 / sqrt(head_dim), but in the 27B size 1 / sqrt(n_embd / n_head).

    So in gemma_pytorch's config.py (`query_pre_attn_scalar`) and llama.cpp's loader of `gemma3`,
    which tells the size by the number of layers, too.
    """
    wide = hp.n_layer == LAYERS_OF_27B
    return float((hp.n_embd // hp.n_head if wide else hp.head_dim) ** -0.5)


def forward(m: Model) -> Value:
    b, scale = m.builder, attention_scale(m.hp)
    x = b.scale(m.embeddings(), m.hp.n_embd**0.5)
    for layer in m.layers():
        q, k, v = layer.qkv(layer.norm(x, "attn_norm"))
        q, k = layer.head_norm(q, "attn_q_norm"), layer.head_norm(k, "attn_k_norm")
        h = layer.attention(q, k, v, scale)
        x = b.add(x, layer.norm(h, "post_attention_norm"))
        h = layer.feed_forward(layer.norm(x, "ffn_norm"), b.gelu_mul)
        x = b.add(x, layer.norm(h, "post_ffw_norm"))
    logits = m.logits(x)
    return b.softcap(logits, m.hp.logit_softcap) if m.hp.logit_softcap else logits


ARCHITECTURE = Architecture(
    name="gemma3",
    rope_pairing=HALF,
    layer_tensors=layer_tensors,
    forward=forward,
    keys=(
        "attention.sliding_window",
        "attention.sliding_window_pattern",
        "rope.freq_base_swa",
        "final_logit_softcapping",
    ),
    read=read,
)
