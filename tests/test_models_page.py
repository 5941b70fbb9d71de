"""The architecture that docs/models.md shows is added as printed there, and gives right logits."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from tiny_models import write_tiny_gguf
from transformers_models import logits_in_transformers, write_tiny_model

from minfer import Batch, Engine
from minfer.errors import Refusal
from minfer.models.architecture import MODULES, find_architecture
from minfer.models.hyperparameters import COMMON_KEYS
from minfer.models.rope_scaling import SCALING_KEYS, TYPES

PAGE = (Path(__file__).parent.parent / "docs" / "models.md").read_text()
(MODULE,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
((NAME, PLACE),) = re.findall(r'^\+ +"(\w+)": "([\w.]+)",$', PAGE, re.MULTILINE)


def test_the_example_gives_the_logits_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.gguf"
    model = write_tiny_model(path, architecture="gemma")
    with pytest.raises(Refusal, match="has the architecture 'gemma'; supported: llama, qwen2"):
        Engine.load(path)
    module = ModuleType("minfer.models.gemma")
    exec(compile(MODULE, "gemma.py", "exec"), vars(module))
    monkeypatch.setitem(sys.modules, "minfer.models.gemma", module)
    monkeypatch.setitem(MODULES, NAME, PLACE)
    engine = Engine.load(path, cache_type="f32", n_ctx=64)
    tokens = [5, 90, 41, 7, 201, 33, 33, 12, 150, 6, 77]
    engine.store.reserve(0, len(tokens))
    batch = Batch([0] * len(tokens), list(range(len(tokens))), "prefill", tokens)
    ours, theirs = engine.forward(batch, n_out=len(tokens)), logits_in_transformers(model, tokens)
    assert np.abs(ours - theirs).max() / np.abs(theirs).max() < 1e-4
    assert (ours.argmax(axis=1) == theirs.argmax(axis=1)).all()
    write_tiny_gguf(path, architecture="gemma", tensors={"blk.0.attn_q.bias": np.zeros(64, "f4")})
    with pytest.raises(Refusal, match=r"the gemma architecture would leave out.*attn_q\.bias"):
        Engine.load(path)


def test_the_page_names_every_architecture_and_key() -> None:
    for name in MODULES:
        keys = find_architecture(name, Path("m.gguf")).keys
        assert f"| `{name}` |" in PAGE and all(f"`{key}`" in PAGE for key in keys)
    plain = [key for key in COMMON_KEYS if "rope.scaling" not in key]
    assert all(f"`{key}`" in PAGE for key in [*plain, *SCALING_KEYS, *TYPES])
