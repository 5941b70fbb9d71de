"""The README's Python example runs as printed, and gives the right answer."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from minfer import reference
from minfer.format import KvFormat

README = Path(__file__).parent.parent / "README.md"


def examples() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def test_the_library_example_runs_and_is_right() -> None:
    (example,) = [text for text in examples() if "store.step" in text]
    names: dict[str, object] = {}
    exec(compile(example, str(README), "exec"), names)
    q, k, v, out = (np.asarray(names[name]) for name in ("q", "k", "v", "out"))
    assert out.shape == (5, 6, 64)
    stored_k, stored_v = (rounded(rows) for rows in (k, v))
    for rows in (slice(0, 3), slice(3, 5)):
        for row in range(rows.start, rows.stop):
            for head in range(6):
                seen = slice(rows.start, row + 1)
                query = rounded(q[row : row + 1, head : head + 1])[0, 0]
                score = stored_k[seen, head // 3] @ query / 8.0
                p = np.exp(score - score.max())
                expected = p @ stored_v[seen, head // 3] / p.sum()
                assert np.abs(out[row, head] - expected).max() < 1e-5


def rounded(rows: np.ndarray) -> np.ndarray:
    """What a q8_0 cell keeps of [n, heads, d] rows, in float64."""
    flat = np.ascontiguousarray(rows, dtype=np.float32).reshape(len(rows), -1)
    cells = reference.quantize_q8_0(flat, config={})
    back = reference.dequantize_q8_0(cells, n=flat.shape[1], config={})
    return back.astype(np.float64).reshape(rows.shape)


def test_the_figures_of_the_readme_are_those_of_the_code() -> None:
    from minfer.format import cell_words

    ratio = cell_words(KvFormat.F32, 192) / cell_words(KvFormat.Q8_0, 192)
    assert f"{ratio:.2f} times" in README.read_text()


def test_the_readme_names_its_two_commands() -> None:
    text = README.read_text()
    assert "make run" in text and "make test" in text
    makefile = (README.parent / "Makefile").read_text()
    assert re.search(r"^run:", makefile, re.MULTILINE) and re.search(
        r"^test:", makefile, re.MULTILINE
    )
