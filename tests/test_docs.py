"""The pages say what is so: links lead somewhere, files are named, examples run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def examples(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_link_leads_to_a_file(page: Path) -> None:
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#\s]+)", prose):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_architecture_page_names_every_module() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    inner = [p for name in ("kernels_*", "graph") for p in (ROOT / "minfer").glob(f"{name}/*.py")]
    tops = [p for p in (ROOT / "minfer").iterdir() if p.name not in ("py.typed", "__pycache__")]
    for path in [*tops, *inner]:
        assert path.name in text, f"architecture.md does not mention {path.name}"


@pytest.mark.parametrize("call", ["store.truncate(7", "minfer.attention(q"])
def test_the_library_examples_run(call: str, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = [text for text in examples("docs/library.md") if call in text]
    exec(compile(example, "library.md", "exec"), {})
    printed = capsys.readouterr().out
    if "truncate" in call:
        assert printed.startswith("7 [CellSpan(position=0, cell=0, length=32)] 32\n")
        assert "layers [1] of 2 unwritten" in printed
    else:
        assert 0 < float(printed) < 1e-5


@pytest.mark.model
@pytest.mark.parametrize("page", ["README.md", "docs/library.md", "docs/chat.md"])
def test_the_model_examples_run(
    page: str, smollm2: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (example,) = [text for text in examples(page) if "Engine.load" in text]
    exec(compile(example, page, "exec"), {})
    assert "Paris" in capsys.readouterr().out
