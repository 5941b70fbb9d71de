"""The variant that docs/variants.md shows is added as printed there, and attends as it should."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minfer import cases, reference, registry
from minfer.errors import Refusal
from minfer.format import KvFormat

PAGE = Path(__file__).parent.parent / "docs" / "variants.md"
PART = PAGE.read_text().split("\n## In your own module\n")[1].split("\n## ")[0]
MODULE, USE = re.findall(r"```python\n(.*?)```", PART, re.DOTALL)


@pytest.fixture
def receipt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    """What the page's second example prints, its first one being a module on the path."""
    (tmp_path / "my_attention.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_added", {})
    importlib.invalidate_caches()
    exec(compile(USE, str(PAGE), "exec"), {})
    return capsys.readouterr().out


def test_the_example_is_found_by_name_and_only_by_name(receipt: str) -> None:
    assert receipt.startswith("attn_window_mine on cpu, f32: asked for by name\n")
    assert "my_attention.py" in receipt and "not invariant" in receipt
    assert 0 < float(receipt.splitlines()[-1]) < 1e-5
    assert registry.select("attn_window").variant.name != "mine"
    with pytest.raises(Refusal, match="does not read q8_0"):
        registry.select("attn_window", fmt=KvFormat.Q8_0, variant="mine")


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("name", ["prompt", "one-cell", "partition", "prompt-sliding"])
def test_the_example_attends_as_the_oracle_does(receipt: str, name: str, threads: int) -> None:
    case = next(case for case in cases.CASES if case.name == name)
    inputs = cases.make(case, KvFormat.F32)
    choice = registry.select("attn_window", variant="mine", config={"threads": threads})
    tensors: tuple[Any, ...] = inputs.tensors(32)
    out = choice.launch(*tensors, **inputs.scalars, config=choice.config)
    exact = reference.attn_window(*tensors, **inputs.scalars)
    assert out.dtype == np.float32 and np.abs(out - exact).max() <= 1e-5


def test_the_example_refuses_what_it_does_not_read(receipt: str) -> None:
    case = next(case for case in cases.CASES if case.name == "batch-span")
    inputs = cases.make(case, KvFormat.F32)
    choice = registry.select("attn_window", variant="mine")
    with pytest.raises(Refusal, match="mine reads causal windows"):
        choice.launch(*inputs.tensors(32), **inputs.scalars, config=choice.config)


def test_the_example_is_about_25_lines_of_kernel() -> None:
    body = MODULE[MODULE.index("@Worker") : MODULE.index("@minfer.variant")]
    assert len(body.strip().splitlines()) <= 25
