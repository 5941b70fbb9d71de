"""What a user installs: a wheel that works in a clean environment, and a quick import."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def output(*argv: object, cwd: Path) -> str:
    done = subprocess.run(
        [str(a) for a in argv], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


EXAMPLE = """
import numpy as np, minfer
store = minfer.KvStore(n_layer=1, n_ctx=8, n_head_kv=1, head_dim=32, cache_type="q8_0")
store.reserve(seq=1, cap=4)
rows = np.ones((2, 1, 32), np.float32)
with store.step(minfer.Batch(seq_ids=[1, 1], positions=[0, 1], kind="prefill")) as step:
    step.write(0, k=rows, v=rows)
    print(step.attend(0, q=rows).round(2).min())
"""


@pytest.mark.package
def test_a_built_wheel_works_in_a_clean_environment(tmp_path: Path) -> None:
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    output(*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, ROOT, cwd=tmp_path)
    (wheel,) = tmp_path.glob("minfer-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "minfer/py.typed" in names
    assert not [n for n in names if n.startswith(("tests", "tuning", "docs"))]
    output(sys.executable, "-m", "venv", tmp_path / "env", cwd=tmp_path)
    python = tmp_path / "env" / "bin" / "python"
    constraints = ("--constraint", ROOT / "constraints.txt")
    output(
        *(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
        *(f"{wheel}[cpu,models]", *constraints),
        cwd=tmp_path,
    )
    assert output(python, "-c", EXAMPLE, cwd=tmp_path).strip() == "1.0"
    report = json.loads(output(tmp_path / "env/bin/minfer", "devices", "--json", cwd=tmp_path))
    assert report["devices"]["cpu"]["unavailable"] is None
    assert report["libraries"]["torch"] is None


def test_import_loads_nothing_heavy() -> None:
    code = "import sys, minfer; print(*sorted({m.split('.')[0] for m in sys.modules}))"
    loaded = set(output(sys.executable, "-c", code, cwd=ROOT).split())
    assert "minfer" in loaded
    assert not loaded & {"numpy", "numba", "torch", "gguf", "tokenizers", "jinja2", "tqdm"}
