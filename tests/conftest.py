"""Fixtures: model files."""

from __future__ import annotations

from pathlib import Path

import pytest

from minfer import settings
from minfer.pull import model_path
from tiny_models import write_tiny_gguf


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama, tied, head_dim 32. Tests do not write to it."""
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    write_tiny_gguf(path)
    return path


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The pulled SmolLM2 file; tests that ask for it carry the marker `model`."""
    path = model_path("smollm2", settings.cache_dir())
    if not path.is_file():
        pytest.skip(f"{path} is missing; run: minfer pull smollm2")
    return path
