"""The programs in docs/examples, and the store's examples on a page, print what is so."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent.parent / "docs" / "examples"


def program(name: str) -> dict[str, Any]:
    return runpy.run_path(str(FOLDER / f"{name}.py"))


def as_json(name: str, argv: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What it prints as JSON; what people see instead is printed after it."""
    names = program(name)
    assert names["main"]([*argv, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    names["show"](found)
    return found


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_every_example_says_how_it_is_called(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        program(path.stem)["main"](["--help"])
    assert left.value.code == 0 and "--json" in capsys.readouterr().out
    assert f"python docs/examples/{path.name}\n" in path.read_text()
    assert path.name in (FOLDER.parent / "library.md").read_text()


@pytest.mark.parametrize("fmt", ["f32", "f16", "q8_0"])
def test_many_sequences(fmt: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json("many_sequences", ["--sequences", "60", "--cache-type", fmt], capsys)
    counts = {name: one["n"] for name, one in found["operations"].items()}
    assert counts == {
        "reserve": 60,
        "share_prefix": 60,
        "append, one a step": 60,
        "append, 64 a step": 60,
        "fork (reserve, share, copy)": 12,
        "copy-on-write step": 6,
        "release": 30,
        "defrag": 1,
    }
    assert all(one["per_second"] > 0 for one in found["operations"].values())
    before, after = found["before"], found["after"]
    assert before["sequences"] == after["sequences"] == 60 + 12 - 30
    assert before["orphaned"] == before["shared"] == 32 and before["reserved"] == after["reserved"]
    assert before["free_runs"] > 1 and after["free_runs"] == 1
    assert after["largest_free_run"] == after["free_cells"] == before["free_cells"]
    assert (after["defrags"], after["copy_on_writes"]) == (1, 6)
    assert after["cells_moved"] > 0 and found["runs_moved"] > 0
    assert found["rows_checked"] == (60 + 12 - 30) * (32 + 2)
    assert f"{found['rows_checked']:,} rows read back right" in capsys.readouterr().out


@pytest.mark.model
def test_fork(smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json("fork", ["--forks", "3", "-n", "6"], capsys)
    n = found["prompt_tokens"]
    assert found["same_tokens"] is True
    assert found["cells"] == {"together": n + 3 * 6, "copies": 3 * (n + 6)}
    assert len(found["texts"]) == len(set(found["texts"])) == 3 and all(found["texts"])
    assert "the same tokens both ways: yes" in capsys.readouterr().out


@pytest.mark.model
@pytest.mark.parametrize("turn", ["2", "3"])
def test_edit_chat(turn: str, smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json("edit_chat", ["-n", "8", "--drop", turn], capsys)
    edited, rendered = found["edited"], found["rendered"]
    assert edited["cached"] - edited["removed"] + edited["fed"] == rendered["fed"]
    assert edited["fed"] < 30 < edited["removed"] < rendered["fed"]
    assert edited["text"] and rendered["text"]
    shown = capsys.readouterr().out
    assert f"{edited['removed']} of {edited['cached']} rows removed" in shown
    assert ("The answers differ" in shown) == (edited["text"] != rendered["text"])


@pytest.mark.model
def test_a_refusal_is_an_exit_code(smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert program("edit_chat")["main"](["--cache-type", "f16", "-n", "2"]) == 2
    assert "contract 5.7" in capsys.readouterr().err
    assert program("fork")["main"](["--model", "no such model"]) == 2
    assert "neither a file nor" in capsys.readouterr().err


def on_the_page(call: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What the one example of library.md with `call` prints."""
    page = (FOLDER.parent / "library.md").read_text()
    (example,) = [t for t in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if call in t]
    exec(compile(example, "library.md", "exec"), {})
    return capsys.readouterr().out


def test_the_page_shares_a_prefix(capsys: pytest.CaptureFixture[str]) -> None:
    spans, reader, owner, counts = on_the_page("share_prefix(src=", capsys).splitlines()
    own = "CellSpan(position=6, cell=8, length=4)"
    assert spans == f"7 10 [CellSpan(position=0, cell=0, length=6), {own}]"
    assert reader == "(Move(run=2, src=5, dst=13, rows=1),)"
    assert owner == "(Move(run=3, src=3, dst=17, rows=3),)"
    assert counts == "6 2"


def test_the_page_compacts(capsys: pytest.CaptureFixture[str]) -> None:
    refusal, moved = on_the_page("reserve_with_defrag(9", capsys).splitlines()
    assert "12 are free, the largest run 4" in refusal
    moves = "Move(run=1, src=4, dst=0, rows=3), Move(run=3, src=12, dst=4, rows=3)"
    assert moved == f"8 [{moves}]"


def test_the_page_removes_positions(capsys: pytest.CaptureFixture[str]) -> None:
    f32, q8_0, refusal = on_the_page("store.remove(1", capsys).splitlines()
    assert (f32, q8_0) == ("f32 8", "q8_0 8")
    assert "f16" in refusal and "truncate" in refusal
