"""Each architecture: logits of transformers, and the same bits however a batch is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import ARCHITECTURES, write_tiny_gguf
from transformers_models import logits_in_transformers, write_tiny_model

from minfer import Batch, Engine
from minfer.errors import Refusal
from minfer.format import Floats, KvFormat
from minfer.models import gemma3
from minfer.models.architecture import MODULES, find_architecture
from minfer.models.gguf import open_gguf
from minfer.models.hyperparameters import Hyperparameters

PROMPT, LENGTH = 70, 100  # the rest is decoded; a window is 16 wide
TOKENS = [int(t) for t in np.random.default_rng(5).integers(3, 289, LENGTH)]


def load(path: Path, cache_type: str = "f32", **how: Any) -> Engine:
    return Engine.load(path, cache_type=cache_type, **{"n_ctx": 256, "threads": 2, **how})


def feed(engine: Engine, tokens: list[int], chunk: int = 33, seq: int = 0) -> Floats:
    """Logits of every token: `PROMPT` of them as a prompt in chunks, the others one by one."""
    if not engine.store.has(seq):
        engine.store.reserve(seq, LENGTH)
    rows, at = [], 0
    while at < len(tokens):
        kind = "prefill" if at < PROMPT else "decode"
        n = min(chunk, PROMPT - at) if kind == "prefill" else 1
        batch = Batch([seq] * n, list(range(at, at + n)), kind, tokens[at : at + n])
        rows.append(engine.forward(batch, n_out=n))
        at += n
    return np.concatenate(rows)


def assert_agree(ours: Floats, theirs: Floats, bound: float = 1e-4) -> None:
    # f32 sums in another order, and float64 rope tables here.
    assert np.abs(ours - theirs).max() / np.abs(theirs).max() < bound
    assert (ours.argmax(axis=1) == theirs.argmax(axis=1)).all()


SIZES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"n_head": 6, "n_embd": 96},
    "qwen3": {"head_dim": 16},
    "gemma3": {"n_layer": 7, "n_head_kv": 1},  # the sixth layer has no window
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_are_those_of_transformers(tmp_path: Path, architecture: str, tied: bool) -> None:
    path = tmp_path / "m.gguf"
    model = write_tiny_model(path, architecture=architecture, tied=tied, **SIZES[architecture])
    ours = feed(load(path), TOKENS)
    assert_agree(ours, logits_in_transformers(model, TOKENS))
    assert len(set(ours.argmax(axis=1))) > 50
