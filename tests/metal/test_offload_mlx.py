"""Every architecture with its layers on Metal and the CPU by turns (contract 9.6)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import under_test
from tiny_models import ARCHITECTURES, write_tiny_gguf

from minfer import Batch, Engine

pytest.importorskip("mlx.core")
pytest.importorskip("gguf")
pytestmark = pytest.mark.skipif(under_test.device != "metal", reason="by --on metal")
BOUND = 2e-6  # of the largest logit, as for a model on Metal alone


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("device", ["cpu:1,metal:1", "metal:1,cpu:1", "metal:1,metal:1"])
def test_logits_are_near_those_of_the_cpu(tmp_path: Path, architecture: str, device: str) -> None:
    """Of a prompt, and of a forked sequence beside its donor in one batch."""
    path, rows = tmp_path / "m.gguf", []
    write_tiny_gguf(path, architecture=architecture)
    for where in ("cpu", device):
        engine = Engine.load(path, device=where, cache_type="f32", n_ctx=32)
        for seq in (1, 2):
            engine.store.reserve(seq, 12)
        prompt = engine.prefill([5, 90, 41, 7, 201, 33, 12], 1)
        engine.store.share_prefix(1, 2, 4)
        forked = engine.forward(Batch([2, 1], [4, 7], "decode", [17, 18]))
        rows.append(np.stack([prompt, *forked]))
    ours, theirs = rows[1], rows[0]
    assert np.abs(ours - theirs).max() <= BOUND * np.abs(theirs).max()
