"""`python -m tuning compare`: what rows choose beside the defaults."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tuned_rows import Folder, row

from minfer import registry
from minfer.ops import DECODE
from tuning.__main__ import main
from tuning.sweep.decide import beside_default
from tuning.sweep.decision import Contender

MY_ADD = """
import time
import numpy as np
from minfer import variant
from minfer.ops import Tunable

@variant(space={"pause": Tunable(0, (0, 1))})
def add_pausing(x, y, *, config):
    time.sleep(config["pause"] * 1e-3)
    return np.add(x, y)

@variant()
def add_less(x, y, *, config):
    return np.subtract(x, y)
"""
CASE = ("--op", "add", "--case", "r3-w96", "--seconds", "0.3", "--threads", "1", "--sittings", "1")


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(registry, "_added", {})
    monkeypatch.delitem(__import__("sys").modules, "my_pausing", raising=False)
    path = tmp_path / "my_pausing.py"
    path.write_text(MY_ADD)
    return str(path)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    return Folder(tmp_path, monkeypatch)


def promoted(name: str, **config: int) -> dict[str, object]:
    free = {3: config}
    return row(name, free, op="add", format="", head_dim=0, kind=DECODE, module="my_pausing")


def added(mine: str) -> None:
    from tuning.sweep.own_files import add

    add([mine], "cpu")


def test_a_row_that_loses_is_an_answer_of_no(
    folder: Folder, mine: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    added(mine)
    folder.write(promoted("pausing", pause=1))
    monkeypatch.setattr("tuning.sweep.own_files.add", lambda files, device: [])
    assert main(["compare", *CASE, "--add", mine, "--json"]) == 1
    (found,) = json.loads(capsys.readouterr().out)
    assert found["default"] == "rows" and found["tuned"] == {"r3-w96": "pausing pause=1"}
    assert found["beside"]["speedups"]["r3-w96"]["high"] < 0.1
    folder.write(promoted("less"))
    assert main(["compare", *CASE, "--add", mine]) == 70
    assert "less of r3-w96 is wrong: error" in capsys.readouterr().err


def test_no_row_and_no_shape(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *CASE]) == 0
    assert capsys.readouterr().out.startswith("no promoted row changes what these cases get on ")
    assert main(["compare", "--op", "softcap"]) == 2
    assert "no shapes of softcap are held out; name one by --case" in capsys.readouterr().err


def test_intervals_are_of_the_contender_and_hold_together() -> None:
    def rounds(*seconds: float) -> dict[str, tuple[float, ...]]:
        return {"a": seconds, "b": tuple(2 * s for s in seconds)}

    base = (1.0, 1.01, 0.99, 1.02, 0.98, 1.0, 1.01, 0.99, 1.0, 1.005)
    default, control = (
        Contender("d", "d", (), rounds(*base)),
        Contender("c", "c", (), rounds(*base)),
    )
    faster = Contender(
        "f", "f", (), rounds(*(s / 1.25 * (1 + 1e-3 * (i % 3)) for i, s in enumerate(base)))
    )
    found = beside_default(faster, default, control)
    assert found.noise == 0
    for ratio in (found.speedup, *found.speedups.values()):
        assert 1.24 < ratio.low < ratio.mid < ratio.high < 1.26
