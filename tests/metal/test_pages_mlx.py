"""What docs/variants.md shows of Metal runs as printed there."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import under_test

pytest.importorskip("mlx.core")

from minfer import registry

pytestmark = pytest.mark.skipif(under_test.device != "metal", reason="by --on metal")
PAGE = Path(__file__).parents[2] / "docs" / "variants.md"


def test_the_variant_is_found_by_name_and_attends_as_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    part = PAGE.read_text().split("\n## On Metal\n")[1].split("\n## ")[0]
    module, use = re.findall(r"```python\n(.*?)```", part, re.DOTALL)
    (tmp_path / "my_attention_metal.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_added", {})
    importlib.invalidate_caches()
    with under_test.checked(True):
        exec(compile(use, "variants.md", "exec"), {})
    receipt = capsys.readouterr().out
    assert receipt.startswith("attn_window_mine on metal, f32: asked for by name\n")
    assert 0 < float(receipt.splitlines()[-1]) < 1e-5
