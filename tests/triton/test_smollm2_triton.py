"""SmolLM2-135M on a GPU: the CPU's greedy text over tests/prompts.txt, and its logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")
for _library in ("numba", "gguf", "tokenizers"):
    pytest.importorskip(_library)

from minfer import Engine  # noqa: E402
from minfer.kernels_triton._arguments import interpreted  # noqa: E402

GPU = torch.cuda.is_available() and not interpreted()
pytestmark = [pytest.mark.model, pytest.mark.skipif(not GPU, reason="needs a GPU")]
PROMPTS = (Path(__file__).parent.parent / "prompts.txt").read_text().splitlines()
N_TOKENS = 64
MARGIN = 1e-3  # below it the two likeliest tokens of the CPU may change places
LOGITS = 2e-3  # of the largest one


@pytest.fixture(scope="module")
def engines(smollm2: Path) -> tuple[Engine, Engine]:
    """On the CPU and on the GPU, everything in f32."""
    how: dict[str, Any] = {"cache_type": "f32", "weights": "f32", "n_ctx": 512}
    return Engine.load(smollm2, **how), Engine.load(smollm2, device="cuda", **how)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_text_is_that_of_the_cpu(engines: tuple[Engine, Engine], prompt: str) -> None:
    cpu, cuda = engines
    ids = cpu.encode(prompt)
    for engine in engines:
        if engine.store.has(0):
            engine.store.release(0)
        engine.store.reserve(0, 512)
    wanted, ours = (engine.prefill(ids) for engine in engines)
    for step in range(N_TOKENS):
        assert np.abs(ours - wanted).max() <= LOGITS * np.abs(wanted).max(), step
        second, first = np.sort(np.partition(wanted, -2)[-2:])
        if first - second < MARGIN:
            print(f"{prompt!r} is compared up to step {step}, where the margin is {first - second}")
            break
        token = int(np.argmax(wanted))
        assert int(np.argmax(ours)) == token, step
        wanted, ours = cpu.decode(token), cuda.decode(token)
