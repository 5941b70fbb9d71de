"""Small tokenizers of both kinds, for tests."""

from __future__ import annotations

from typing import Any

from tiny_models import Tiny, tiny_metadata

from minfer.models.tokenizer import Tokenizer
from minfer.models.vocabulary import SPACE


def tiny(**changes: Any) -> Tokenizer:
    """The tokenizer of a tiny model; `changes` by the last part of the key, None leaves it out."""
    metadata = tiny_metadata(Tiny())
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return Tokenizer.from_gguf({k: v for k, v in metadata.items() if v is not None})


def spm(**changes: Any) -> Tokenizer:
    """A small SentencePiece vocabulary: unknown, two controls, 256 bytes, pieces by score."""
    words = ["he", "ll", "llo", "hello", SPACE + "hello", SPACE + "h", SPACE + SPACE, "hel"]
    letters = [SPACE, *"helo wr"[:4], "w", "r"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [*words, *letters]
    metadata: dict[str, Any] = {
        "model": "llama",
        "tokens": tokens,
        "scores": [0.0] * 259 + [-float(i) for i in range(len(words))] + [-1e9] * len(letters),
        "token_type": [2, 3, 3] + [6] * 256 + [1] * (len(words) + len(letters)),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    } | changes
    return Tokenizer.from_gguf({f"tokenizer.ggml.{k}": v for k, v in metadata.items()})
