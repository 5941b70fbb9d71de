"""The model of a GGUF file in transformers, to compare with: metadata is read here again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from tiny_models import halve, write_tiny_gguf

from minfer.format import Floats
from minfer.models.gguf import GgufFile, open_gguf

MODELS = {  # general.architecture -> configuration and model of transformers
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
    "gemma": ("GemmaConfig", "GemmaForCausalLM"),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
}
PARTS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GEMMA3_PARTS = PARTS | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def write_tiny_model(path: Path, config: dict[str, Any] | None = None, **written: Any) -> Any:
    """Write a tiny model by `write_tiny_gguf` and read it in transformers."""
    write_tiny_gguf(path, **written)
    return read_in_transformers(open_gguf(path), **(config or {}))


def read_in_transformers(file: GgufFile, **config: Any) -> Any:
    """The transformers model of a GGUF file, with its weights decoded to float32.

    config: more of the configuration, such as `rope_parameters`.
    """
    import torch
    import transformers
    from transformers.initialization import no_init_weights

    config_name, model_name = MODELS[str(file.metadata["general.architecture"])]
    read = getattr(transformers, config_name)(**(_config(file) | config))
    with no_init_weights():  # drawing 270 million of them takes seconds
        model = getattr(transformers, model_name)(read)
    state = {
        _name(name, file): torch.from_numpy(_weight(name, file))
        for name in file.tensor_names
        if name != "rope_freqs.weight"
    }
    state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
    model.load_state_dict(state, assign=True)
    model.train(False)
    return model


def logits_in_transformers(model: Any, tokens: list[int]) -> Floats:
    """float32 [len(tokens), n_vocab]."""
    import torch

    with torch.no_grad():
        logits: Floats = model(torch.tensor([tokens])).logits[0].numpy()
    return logits


def log_probabilities_in_transformers(model: Any, tokens: list[int]) -> Any:
    """float64 [len(tokens), n_vocab] of the next token."""
    import torch

    logits = torch.from_numpy(logits_in_transformers(model, tokens))
    return torch.log_softmax(logits.double(), dim=-1).numpy()


def _config(file: GgufFile) -> dict[str, Any]:
    architecture = file.metadata["general.architecture"]

    def value(key: str, default: Any = None) -> Any:
        return file.metadata.get(f"{architecture}.{key}", default)

    head_dim = value("embedding_length") // value("attention.head_count")
    rope = {"rope_type": "default", "rope_theta": value("rope.freq_base")}
    config = {
        "vocab_size": len(file.metadata["tokenizer.ggml.tokens"]),
        "hidden_size": value("embedding_length"),
        "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": value("attention.head_count"),
        "num_key_value_heads": value("attention.head_count_kv"),
        "head_dim": value("attention.key_length", head_dim),
        "max_position_embeddings": value("context_length"),
        "rope_parameters": rope,
        "rms_norm_eps": value("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensor_names,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if architecture == "gemma3":
        local = {"rope_type": "default", "rope_theta": 10000.0}
        config["rope_parameters"] = {"full_attention": rope, "sliding_attention": local}
        config["sliding_window"] = value("attention.sliding_window")
        config["query_pre_attn_scalar"] = value("attention.key_length")
    return config


def _name(name: str, file: GgufFile) -> str:
    """`blk.0.attn_q.weight` -> `model.layers.0.self_attn.q_proj.weight`."""
    parts = GEMMA3_PARTS if file.metadata["general.architecture"] == "gemma3" else PARTS
    *layer, part, kind = name.split(".")
    prefix = f"model.layers.{layer[1]}." if layer else ""
    return f"{prefix}{parts[part]}.{kind}"


def _weight(name: str, file: GgufFile) -> Floats:
    """As transformers keeps it: what converters do is undone."""
    architecture = str(file.metadata["general.architecture"])
    weight = np.array(file.tensor(name))
    if architecture == "llama" and name.endswith("attn_q.weight"):
        return halve(weight, file.metadata["llama.attention.head_count"])
    if architecture == "llama" and name.endswith("attn_k.weight"):
        return halve(weight, file.metadata["llama.attention.head_count_kv"])
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return weight - 1
    return weight
