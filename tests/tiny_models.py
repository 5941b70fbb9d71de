"""Tiny random Llama models in GGUF files, for tests.

The weights are random but for one thing: the last feed-forward layer prefers one successor for each
token, so that greedy text wanders and has clear margins, while the rest of the context moves the
logits. Only the functions that return a model need torch and transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from minfer.format import Floats
from minfer.models.gguf import open_gguf
from minfer.models.hyperparameters import Hyperparameters
from minfer.models.vocabulary import byte_alphabet

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# fmt: off
MERGES = [
    "t h", "th e", "Ġ t", "Ġt h", "Ġth e", "i n", "a n", "an d", "Ġ a", "o n", "e r", "r e",
    "Ġ s", "Ġ w", "o r", "l l", "h e", "Ġ i", "Ġ c", "Ġ o", "Ġc a", "a t", "Ġca t", "l o",
    "he ll", "hell o", "Ġ Ġ", "ĠĠ ĠĠ", "â Ģ", "1 2",
]
# fmt: on
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + "
    "message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CONTEXT, SUCCESSOR = 0.35, 3.0  # what earlier tokens, and the last one, say about the next
ROPE_BASE, RMS_EPS, N_CTX = 10000.0, 1e-5, 512


@dataclass(frozen=True)
class Tiny:
    """Sizes of a tiny model; hidden size and head dimensions are independent, as in real ones."""

    n_embd: int = 64
    n_layer: int = 2
    n_head: int = 4
    n_head_kv: int = 2
    head_dim: int = 32
    n_ff: int = 96
    tied: bool = True
    seed: int = 2


def tiny_tokens() -> list[str]:
    """Control tokens, the 256 bytes, then one token a merge."""
    merged = [merge.replace(" ", "") for merge in MERGES]
    return [*CONTROL_TOKENS, *byte_alphabet().values(), *merged]


def tiny_weights(tiny: Tiny) -> dict[str, Floats]:
    """Weights by GGUF name, row-major float32, q and k in the half-split order of transformers."""
    rng = np.random.default_rng(tiny.seed)
    n_vocab, n_code = len(tiny_tokens()), (tiny.n_embd - 1) // 2

    def draw(n_out: int, n_in: int, gain: float) -> Floats:
        drawn: Floats = rng.standard_normal((n_out, n_in), dtype=np.float32)
        return drawn * np.float32(gain / np.sqrt(n_in))

    def norm(gain: float = 1.0) -> Floats:
        return (gain * rng.uniform(0.5, 1.5, tiny.n_embd)).astype(np.float32)

    n_q, n_kv = tiny.n_head * tiny.head_dim, tiny.n_head_kv * tiny.head_dim
    weights = {"token_embd.weight": _embedding(rng, n_vocab, tiny.n_embd)}
    for i in range(tiny.n_layer):
        weights |= {
            f"blk.{i}.attn_norm.weight": norm(),
            f"blk.{i}.attn_q.weight": draw(n_q, tiny.n_embd, 1.5),
            f"blk.{i}.attn_k.weight": draw(n_kv, tiny.n_embd, 1.5),
            f"blk.{i}.attn_v.weight": draw(n_kv, tiny.n_embd, 1.0),
            f"blk.{i}.attn_output.weight": draw(tiny.n_embd, n_q, CONTEXT),
            f"blk.{i}.ffn_norm.weight": norm(),
            f"blk.{i}.ffn_gate.weight": draw(tiny.n_ff, tiny.n_embd, 1.0),
            f"blk.{i}.ffn_up.weight": draw(tiny.n_ff, tiny.n_embd, 1.0),
            f"blk.{i}.ffn_down.weight": draw(tiny.n_embd, tiny.n_ff, CONTEXT),
        }
    _write_successor(weights, f"blk.{tiny.n_layer - 1}", n_code)
    weights["output_norm.weight"] = norm()
    weights["output_norm.weight"][: 1 + n_code] *= 0.1
    if not tiny.tied:
        weights["output.weight"] = weights["token_embd.weight"] + draw(n_vocab, tiny.n_embd, 1.0)
    return weights


def _embedding(rng: np.random.Generator, n_vocab: int, n_embd: int) -> Floats:
    """[n_vocab, n_embd]: a constant, the code of the token, the code of the token it follows."""
    n_code = (n_embd - 1) // 2
    codes = rng.standard_normal((n_vocab, n_code), dtype=np.float32)
    codes /= np.sqrt((codes * codes).mean(axis=1, keepdims=True))
    order = rng.permutation(n_vocab)
    before = np.empty(n_vocab, dtype=np.int64)
    before[order] = np.roll(order, 1)
    rows = np.ones((n_vocab, n_embd), dtype=np.float32)
    rows[:, 1 : 1 + n_code] = codes
    rows[:, 1 + n_code : 1 + 2 * n_code] = codes[before]
    return rows


def _write_successor(weights: dict[str, Floats], block: str, n_code: int) -> None:
    """Make feed-forward units copy the token's code to where its successor is looked up.

    The constant opens their gates, so that they are linear.
    """
    gate, up = weights[f"{block}.ffn_gate.weight"], weights[f"{block}.ffn_up.weight"]
    down = weights[f"{block}.ffn_down.weight"]
    gate[:n_code], up[:n_code], down[:, :n_code] = 0.0, 0.0, 0.0
    for unit in range(n_code):
        gate[unit, 0] = 2.0
        up[unit, 1 + unit] = SUCCESSOR
        down[1 + n_code + unit, unit] = 1.0


def interleave(weight: Floats, n_head: int) -> Floats:
    """Rows of q or k from half-split (i, i + d/2) to interleaved (2i, 2i + 1) pairs, per head."""
    halves = weight.reshape(n_head, 2, -1, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def halve(weight: Floats, n_head: int) -> Floats:
    """The inverse of `interleave`."""
    pairs = weight.reshape(n_head, -1, 2, weight.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(weight.shape))


def write_tiny_gguf(path: Path, *, metadata: dict[str, Any] | None = None, **sizes: Any) -> Tiny:
    """Write a tiny model and return its sizes.

    sizes: fields of `Tiny`. metadata: overrides by key; the value None leaves a key out.
    """
    from gguf import GGUFWriter

    tiny = Tiny(**sizes)
    writer = GGUFWriter(path, "llama")
    for key, value in (tiny_metadata(tiny) | (metadata or {})).items():
        if value is not None:
            _add(writer, key, value)
    for name, weight in tiny_weights(tiny).items():
        if name.endswith("attn_q.weight"):
            weight = interleave(weight, tiny.n_head)
        elif name.endswith("attn_k.weight"):
            weight = interleave(weight, tiny.n_head_kv)
        writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tiny


def tiny_metadata(tiny: Tiny) -> dict[str, Any]:
    """Metadata by key, without general.architecture."""
    tokens = tiny_tokens()
    return {
        "llama.block_count": tiny.n_layer,
        "llama.context_length": N_CTX,
        "llama.embedding_length": tiny.n_embd,
        "llama.feed_forward_length": tiny.n_ff,
        "llama.attention.head_count": tiny.n_head,
        "llama.attention.head_count_kv": tiny.n_head_kv,
        "llama.attention.key_length": tiny.head_dim,
        "llama.attention.value_length": tiny.head_dim,
        "llama.attention.layer_norm_rms_epsilon": RMS_EPS,
        "llama.rope.dimension_count": tiny.head_dim,
        "llama.rope.freq_base": ROPE_BASE,
        "llama.vocab_size": len(tokens),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(CONTROL_TOKENS)
        + [1] * (len(tokens) - len(CONTROL_TOKENS)),
        "tokenizer.ggml.merges": list(MERGES),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def _add(writer: Any, key: str, value: Any) -> None:
    """Integers as uint32 and floats as float32, as converters write them."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def write_tiny_llama(path: Path, **sizes: Any) -> Any:
    """Write a tiny model and return the transformers LlamaForCausalLM of the same weights."""
    weights = tiny_weights(write_tiny_gguf(path, **sizes))
    return transformers_llama(Hyperparameters.from_gguf(open_gguf(path)), weights)


def read_in_transformers(path: Path) -> Any:
    """The transformers LlamaForCausalLM of a GGUF file, with its weights decoded to float32."""
    file = open_gguf(path)
    hp = Hyperparameters.from_gguf(file)
    weights = {name: np.array(file.tensor(name)) for name in file.tensor_names}
    for name in weights:
        if name.endswith("attn_q.weight"):
            weights[name] = halve(weights[name], hp.n_head)
        elif name.endswith("attn_k.weight"):
            weights[name] = halve(weights[name], hp.n_head_kv)
    return transformers_llama(hp, weights)


def transformers_llama(hp: Hyperparameters, weights: dict[str, Floats]) -> Any:
    """A LlamaForCausalLM; `weights` by GGUF name, with q and k in half-split order."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=hp.n_vocab,
        hidden_size=hp.n_embd,
        intermediate_size=hp.n_ff,
        num_hidden_layers=hp.n_layer,
        num_attention_heads=hp.n_head,
        num_key_value_heads=hp.n_head_kv,
        head_dim=hp.head_dim,
        max_position_embeddings=hp.n_ctx_train,
        rope_parameters={"rope_type": "default", "rope_theta": hp.rope_base},
        rms_norm_eps=hp.rms_eps,
        tie_word_embeddings=hp.tied_embeddings,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config)
    state = {transformers_name(name): torch.from_numpy(w) for name, w in weights.items()}
    state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
    model.load_state_dict(state)
    model.train(False)
    return model


def transformers_name(name: str) -> str:
    """`blk.0.attn_q.weight` -> `model.layers.0.self_attn.q_proj.weight`."""
    parts = {
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "output": "lm_head",
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    *layer, part, kind = name.split(".")
    prefix = f"model.layers.{layer[1]}." if layer else ""
    return f"{prefix}{parts[part]}.{kind}"
