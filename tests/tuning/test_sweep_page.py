"""docs/variants.md, from an idea to a promoted variant, in a file of one's own and in the tree."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
PART = (ROOT / "docs" / "variants.md").read_text().split("\n## From an idea")[1].split("\n## ")[0]
MODULE, USE = re.findall(r"```python\n(.*?)```", PART, re.DOTALL)
COMMANDS = [
    shlex.split(line.removeprefix("$ python "), comments=True)
    for line in PART.splitlines()
    if line.startswith("$ python")
]
SHORT = (  # the shape in which the idea wins by far, on any machine
    *("--case", "r1-w576", "--finals", "2", "--sittings", "2", "--seconds", "1", "--threads", "1"),
)


def run(folder: Path, *args: str, **more: str) -> str:
    """What a Python in `folder` prints with the minfer that lies there."""
    environment = {**os.environ, "PYTHONPATH": str(folder), **more}
    done = subprocess.run(
        [sys.executable, *args],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def copied(folder: Path) -> Path:
    """A copy of the packages, to be changed."""
    for name in ("minfer", "tuning"):
        shutil.copytree(
            ROOT / name,
            folder / name,
            ignore=shutil.ignore_patterns("__pycache__", "*.json", "*.jsonl"),
        )
    return folder


def swept(folder: Path, args: Sequence[str]) -> None:
    """Sweep; on a machine that is too noisy to tell anything, once more, as a person would."""
    for _ in range(4):
        said = run(folder, *args, *SHORT)
        if "next: python -m tuning promote" in said:
            break
    assert "add cpu" in said and ": direct, " in said


def row_of(folder: Path) -> dict[str, Any]:
    (path,) = (folder / "minfer" / "tuned").glob("*.json")
    (row,) = json.loads(path.read_text())["rows"]
    return dict(row)


def test_an_idea_in_a_file_of_ones_own_is_promoted_and_chosen(tmp_path: Path) -> None:
    tree = copied(tmp_path)
    (tree / "my_add.py").write_text(MODULE)
    sweep, show, write = COMMANDS
    swept(tree, sweep)
    assert '+      "variant": "direct"' in run(tree, *show)
    assert "wrote" in run(tree, *write)
    row = row_of(tree)
    assert (row["op"], row["kind"], row["variant"]) == ("add", "decode", "direct")
    assert row["module"] == "my_add" and row["free"][0]["config"]["most"] in (
        1024,
        4096,
        16384,
        65536,
    )
    said = run(tree, "-c", USE)
    assert said.startswith("add_direct on cpu, any format: the promoted row for ")
    assert "times as fast as the default" in said


def test_an_idea_in_the_tree_is_promoted_chosen_and_stale_after_an_edit(tmp_path: Path) -> None:
    tree = copied(tmp_path)
    home = tree / "minfer" / "kernels_numba" / "dense__direct.py"
    home.write_text(MODULE)
    sweep, _, write = ([a for a in args if a not in ("--add", "my_add.py")] for args in COMMANDS)
    swept(tree, sweep)
    run(tree, *write)
    assert "module" not in row_of(tree)
    explain = ("-m", "minfer", "explain", "add", "--n-q", "1")
    assert run(tree, *explain).startswith("add_direct on cpu, any format: the promoted row for ")
    more = run(tree, *explain[:-1], "4096")
    assert more.startswith("add_rows on cpu, any format: the default for this shape")
    home.write_text(MODULE + "\n# said better\n")
    assert run(tree, *explain).startswith("add_direct on cpu, any format: the promoted row for ")
    home.write_text(MODULE.replace("np.add(x, y)", "x + y"))
    stale = run(tree, *explain)
    assert stale.startswith("add_rows on cpu, any format: the default for this shape")
    assert "is stale: the code of its kernels was another" in stale
    off = run(tree, *explain, MINFER_NO_TUNED="1")
    assert "stale" not in off
