"""Tiny random models in GGUF files, for tests.

The weights are random but for one thing: the last feed-forward layer prefers one successor for each
token, so that greedy text wanders and has clear margins, while the rest of the context moves the
logits. `transformers_models` reads them in transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from minfer.format import Floats
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
RMS_EPS, N_CTX = 1e-5, 512
ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")  # and "gemma", the example of a page


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
    architecture: str = "llama"
    window: int = 16

    @property
    def rope_base(self) -> float:
        """Of the layers without a window, unlike the base of those with one."""
        return 1e6 if self.architecture == "gemma3" else 1e4


def tiny_tokens() -> list[str]:
    """Control tokens, the 256 bytes, then one token a merge."""
    merged = [merge.replace(" ", "") for merge in MERGES]
    return [*CONTROL_TOKENS, *byte_alphabet().values(), *merged]


def tiny_weights(tiny: Tiny) -> dict[str, Floats]:
    """Weights by GGUF name, row-major float32, q and k in the half-split order of transformers."""
    rng = np.random.default_rng(tiny.seed)
    n_vocab, n_code = len(tiny_tokens()), (tiny.n_embd - 1) // 2
    gemma3 = tiny.architecture == "gemma3"

    def draw(n_out: int, n_in: int, gain: float) -> Floats:
        drawn: Floats = rng.standard_normal((n_out, n_in), dtype=np.float32)
        return drawn * np.float32(gain / np.sqrt(n_in))

    def norm(gain: float = 1.0, width: int = tiny.n_embd) -> Floats:
        return (gain * rng.uniform(0.5, 1.5, width)).astype(np.float32)

    n_q, n_kv = tiny.n_head * tiny.head_dim, tiny.n_head_kv * tiny.head_dim
    weights = {"token_embd.weight": _embedding(rng, n_vocab, tiny.n_embd)}
    if tiny.architecture.startswith("gemma"):  # it multiplies rows by the root of their width
        weights["token_embd.weight"] /= np.float32(np.sqrt(tiny.n_embd))
    for i in range(tiny.n_layer):
        layer = {
            "attn_norm.weight": norm(),
            "attn_q.weight": draw(n_q, tiny.n_embd, 1.5),
            "attn_k.weight": draw(n_kv, tiny.n_embd, 1.5),
            "attn_v.weight": draw(n_kv, tiny.n_embd, 1.0),
            "attn_output.weight": draw(tiny.n_embd, n_q, CONTEXT),
            "ffn_norm.weight": norm(),
            "ffn_gate.weight": draw(tiny.n_ff, tiny.n_embd, 1.0),
            "ffn_up.weight": draw(tiny.n_ff, tiny.n_embd, 1.0),
            "ffn_down.weight": draw(tiny.n_embd, tiny.n_ff, CONTEXT),
        }
        if tiny.architecture == "qwen2":
            widths = {"q": n_q, "k": n_kv, "v": n_kv}
            layer |= {f"attn_{x}.bias": draw(n, 1, 0.5)[:, 0] for x, n in widths.items()}
        if tiny.architecture in ("qwen3", "gemma3"):
            layer |= {f"attn_{x}_norm.weight": norm(width=tiny.head_dim) for x in "qk"}
        if gemma3:
            layer |= {f"post_{x}_norm.weight": norm(CONTEXT) for x in ("attention", "ffw")}
        weights |= {f"blk.{i}.{name}": value for name, value in layer.items()}
    last = f"blk.{tiny.n_layer - 1}"
    _write_successor(weights, last, n_code)
    if gemma3:
        weights[f"{last}.post_ffw_norm.weight"] *= np.float32(SUCCESSOR / CONTEXT)
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


def write_tiny_gguf(
    path: Path,
    *,
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, Floats] | None = None,
    **sizes: Any,
) -> Tiny:
    """Write a tiny model and return its sizes.

    sizes: fields of `Tiny`. metadata: overrides by key; the value None leaves a key out. tensors:
    more of them.
    """
    from gguf import GGUFWriter

    tiny = Tiny(**sizes)
    writer = GGUFWriter(path, tiny.architecture)
    for key, value in (tiny_metadata(tiny) | (metadata or {})).items():
        if value is not None:
            _add(writer, key, value)
    for name, weight in (tiny_weights(tiny) | (tensors or {})).items():
        if tiny.architecture == "llama" and name.endswith("attn_q.weight"):
            weight = interleave(weight, tiny.n_head)
        elif tiny.architecture == "llama" and name.endswith("attn_k.weight"):
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
    numbers = {
        "block_count": tiny.n_layer,
        "context_length": N_CTX,
        "embedding_length": tiny.n_embd,
        "feed_forward_length": tiny.n_ff,
        "attention.head_count": tiny.n_head,
        "attention.head_count_kv": tiny.n_head_kv,
        "attention.key_length": tiny.head_dim,
        "attention.value_length": tiny.head_dim,
        "attention.layer_norm_rms_epsilon": RMS_EPS,
        "rope.dimension_count": tiny.head_dim,
        "rope.freq_base": tiny.rope_base,
        "vocab_size": len(tokens),
    }
    if tiny.architecture == "gemma3":
        numbers["attention.sliding_window"] = tiny.window
    return {f"{tiny.architecture}.{key}": value for key, value in numbers.items()} | {
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
