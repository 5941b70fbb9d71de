"""Whole models on an accelerator: near the CPU's answers, and the same text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import under_test
from device_models import Model
from shorter_models import write_first_layers
from tiny_models import write_tiny_gguf
from under_test import compiled_only

from minfer import Engine
from minfer.format import KvFormat

pytest.importorskip("numba")
pytestmark = pytest.mark.skipif(under_test.device == "cpu", reason="compares with the CPU")
FORMATS = [fmt.value for fmt in KvFormat]
PROMPT = [5, 90, 41, 7, 201, 33, 12]
N_LAYER = 1 if under_test.interpreted() else 2
# What rounded cells may make of the largest logit: they are rounded from rows that differ in f32.
BOUNDS = {"f32": 2e-6, "f16": 4 * 2**-11, "q8_0": 4 / 254}


@pytest.mark.parametrize("cache_type", FORMATS)
def test_logits_are_near_those_of_the_cpu(cache_type: str) -> None:
    rows: dict[str, list[Any]] = {}
    for device in ("cpu", under_test.device):
        model = Model(device, cache_type, n_layer=N_LAYER)
        model.store.reserve(0, 20)
        rows[device] = [model.feed(0, PROMPT, "prefill"), model.feed(0, [10])]
    ours, theirs = (np.concatenate(found) for found in rows.values())
    assert np.abs(ours - theirs).max() <= BOUNDS[cache_type] * np.abs(theirs).max()


@pytest.mark.parametrize("cache_type", FORMATS[-1:] if under_test.interpreted() else FORMATS)
def test_the_sanitizer_passes_over_nan_in_free_cells(cache_type: str) -> None:
    rows = []
    for sanitize in (False, True):
        model = Model(under_test.device, cache_type, n_layer=N_LAYER, sanitize=sanitize)
        model.store.reserve(0, 12)
        model.feed(0, PROMPT[:3], "prefill")
        rows.append(model.feed(0, [9]))
    assert np.array_equal(*rows)


def test_a_file_runs_end_to_end(tmp_path: Path, call: Any) -> None:
    pytest.importorskip("gguf")
    write_tiny_gguf(tmp_path / "m.gguf", n_layer=N_LAYER)
    devices = ("cpu", under_test.device)
    engines = [Engine.load(tmp_path / "m.gguf", device=device, n_ctx=24) for device in devices]
    made = [list(engine.generate(PROMPT[:4], 4)) for engine in engines]
    assert made[0] == made[1]
    words = ("run", tmp_path / "m.gguf", "-p", "cat", "-n", 2, "--n-ctx", 16)
    texts = [call(*words, "--device", device).out for device in devices]
    assert texts[0] == texts[1] != ""


@pytest.fixture(scope="module")
def two_layers(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first two layers of SmolLM2, with its embedding."""
    path = tmp_path_factory.mktemp("two") / "two.gguf"
    write_first_layers(smollm2, path, 2)
    return path


@compiled_only()
@pytest.mark.model
@pytest.mark.parametrize("cache_type", FORMATS)
def test_two_layers_of_smollm2_agree_with_the_cpu(two_layers: Path, cache_type: str) -> None:
    # in f32: a code of a q8_0 weight's rows that flips would hide what attention does
    how: dict[str, Any] = {"n_ctx": 300, "cache_type": cache_type, "weights": "f32"}
    cpu, ours = (
        Engine.load(two_layers, device=device, **how) for device in ("cpu", under_test.device)
    )
    ids = cpu.encode("The history of the city begins with a harbour, a bridge and a market.")
    for engine in (cpu, ours):
        engine.store.reserve(0, 40)
    wanted, found = (engine.prefill(ids) for engine in (cpu, ours))
    for token in (*ids[:3], None):
        assert np.abs(found - wanted).max() <= BOUNDS[cache_type] * np.abs(wanted).max()
        assert np.argmax(found) == np.argmax(wanted)
        if token is not None:
            wanted, found = (engine.decode(token) for engine in (cpu, ours))
