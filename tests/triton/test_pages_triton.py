"""What docs/variants.md and docs/library.md show of a GPU runs as printed there."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from minfer import registry  # noqa: E402
from minfer.kernels_triton._arguments import home, interpreted  # noqa: E402

GPU = torch.cuda.is_available() and not interpreted()
pytestmark = pytest.mark.skipif(not (GPU or interpreted()), reason="needs a GPU")
DOCS = Path(__file__).parents[2] / "docs"


def examples(page: str) -> list[str]:
    """The Python examples of the part of a page that is about GPUs."""
    part = (DOCS / page).read_text().split("\n## On a GPU\n")[1].split("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", part, re.DOTALL)


def test_the_variant_is_found_by_name_and_attends_as_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module, use = examples("variants.md")
    (tmp_path / "my_attention_cuda.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_added", {})
    importlib.invalidate_caches()
    exec(compile(use, "variants.md", "exec"), {})
    receipt = capsys.readouterr().out
    assert receipt.startswith("attn_window_mine on cuda, f32: asked for by name\n")
    device, difference = receipt.splitlines()[-1].split()
    assert device == str(home()) and 0 < float(difference) < 1e-5


def test_tensors_go_in_and_come_out() -> None:
    (example,) = examples("library.md")
    if not GPU:  # the interpreter's tensors lie on the CPU
        example = example.replace('2, 64, device="cuda")', "2, 64)")
    found: dict[str, Any] = {}
    exec(compile(example, "library.md", "exec"), found)
    assert found["out"].device == home() and found["out"].shape == (5, 2, 64)
    assert abs(found["rows"] - found["k"].cpu().numpy()).max() < 2**-11 * 8
