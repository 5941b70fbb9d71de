"""Planted faults of the cell store, and who finds them (contract 5); see faults/README.md."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fault_patches
import pytest
from fault_patches import FOLDER, ROOT, Fault, PatchError, plant, read_patch

FAULTS = {fault.name: fault for fault in fault_patches.faults()}
RULES = [f"5.{n}" for n in range(1, 12)]

# Tests of the store by example. Those over a model's file see none of what these do not.
EXAMPLES = (
    *("batch", "cells", "compaction", "copy_on_write", "copy_prefix", "free", "plans", "removal"),
    *("removal_models", "resize", "sanitizer", "shares", "sharing", "step", "step_attention"),
    *("step_refusals", "store", "store_attention", "store_refusals", "uninterrupted"),
)

# One of every rule, found after few examples.
QUICK = (
    "5.1-orphans-look-free",
    "5.2-best-fit",
    "5.3-grows-where-it-was",
    "5.4-share-of-the-middle-run",
    "5.5-a-clear-group-clears-all",
    "5.6-values-stay-behind",
    "5.7-one-row-too-few-moves-down",
    "5.8-a-share-of-another-run",
    "5.9-reserved-with-orphans",
    "5.10-wiped-before-the-change",
    "5.11-readers-forbid-it",
)


def machine(folder: Path, *options: str) -> dict[str, Any]:
    """What faults/machine.py says of the copy of minfer in `folder`."""
    command = [sys.executable, str(FOLDER / "machine.py"), *options]
    env = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    assert Path(said["minfer"]).parent == folder / "minfer", "another minfer was imported"
    return said


def assert_found(fault: Fault, folder: Path) -> None:
    """The machine contradicts the faulted copy in one of its calls, within 500 examples."""
    folder.mkdir()
    plant(fault, folder)
    said = machine(folder, "--examples", "500", *fault.options)
    assert said["found"] is not None, f"{fault.name}: 500 examples and no contradiction"
    assert "after these calls:" in said["message"], f"{fault.name}: {said['message']}"


def examples(folder: Path, fault: Fault) -> subprocess.CompletedProcess[str]:
    """The example tests over a faulted copy of minfer, which they lie beside."""
    plant(fault, folder)
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    names = [f"tests/test_{name}.py" for name in EXAMPLES]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if "--sanitize" in fault.options:
        env["MINFER_SANITIZE_CELLS"] = "1"
    command = [sys.executable, "-m", "pytest", "-xq", "-p", "no:cacheprovider", *names]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


# --- patches --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAULTS)
def test_a_patch_fits_and_the_copy_compiles(name: str, tmp_path: Path) -> None:
    fault = FAULTS[name]
    assert fault.rule in RULES and name.startswith(f"{fault.rule}-")
    assert fault.heads["Seen-by"] in ("examples and machine", "machine", "examples")
    plant(fault, tmp_path)
    for file in {hunk.file for hunk in fault.hunks}:
        text = (tmp_path / file).read_text()
        compile(text, file, "exec")
        assert text != (ROOT / file).read_text()


def test_every_rule_has_a_fault_that_the_machine_finds() -> None:
    found = {fault.rule for fault in FAULTS.values() if fault.heads["Seen-by"] != "examples"}
    assert found == set(RULES)
    assert [FAULTS[name].rule for name in QUICK] == RULES


def test_the_readme_lists_every_fault() -> None:
    rows = re.findall(r"^\| (5\.\d+) \| `(.+?)` \|", (FOLDER / "README.md").read_text(), re.M)
    assert rows == [(fault.rule, name.split("-", 1)[1]) for name, fault in FAULTS.items()]


HEAD = "Rule: 5.1\nFault: a\nSeen-by: machine\n\n"
FILES = "--- a/minfer/kv/free.py\n+++ b/minfer/kv/free.py\n"
OLD = "         self.cells = 0\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (FILES + "@@ @@\n-         self.cells = 0\n", "has heads []"),
        (HEAD + "Other: 1\n" + FILES, "has heads ['Fault', 'Other'"),
        (HEAD, "has no hunk"),
        (HEAD + FILES, "has no hunk"),
        (HEAD + "--- a/tests/arrays.py\n+++ b/tests/arrays.py\n@@ @@\n-a\n", "not a line"),
        (HEAD + "--- a/minfer/kv/free.py\n+++ b/minfer/kv/plan.py\n@@ @@\n-a\n", "not a line"),
        (HEAD + FILES + "-a\n", "not a line of a unified diff of minfer/: '-a'"),
        (HEAD + FILES + "@@ @@\n" + OLD, "kv/free.py: @@ @@: changes nothing"),
        (HEAD + FILES + "@@ @@\n+a\n", "kv/free.py: @@ @@: changes nothing, or says not where"),
        (HEAD + FILES + "@@ @@\n-a\nb\n", "neither kept, added nor removed: 'b'"),
        (HEAD + FILES + "@@ -1 +1 @@\n-a\n+b\n", "free.py: @@ -1 +1 @@: its old lines are there 0"),
        (HEAD + FILES + "@@ @@\n-    @property\n", "its old lines are there 2 times, not once"),
        (HEAD + FILES.replace("free", "none") + "@@ @@\n-a\n", "kv/none.py: @@ @@: there is no su"),
        (HEAD + FILES + "@@ @@\n" + OLD + "+a\n@@ @@\n-b\n", "its old lines are there 0 times"),
    ],
)
def test_a_patch_that_cannot_be_read_or_does_not_fit(
    text: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "5.1-a.patch"
    path.write_text(text)
    with pytest.raises(PatchError, match=re.escape(message)) as caught:
        plant(read_patch(path), tmp_path)
    assert "5.1-a" in str(caught.value)


def test_a_patch_changes_the_lines_it_names_and_no_others(tmp_path: Path) -> None:
    path = tmp_path / "5.1-a.patch"
    hunk = "@@ -900,2 +900,3 @@ line numbers play no part\n" + OLD
    path.write_text(HEAD + FILES + hunk + "+        # more\n")
    plant(read_patch(path), tmp_path)
    found, kept = ((at / "minfer/kv/free.py").read_text() for at in (tmp_path, ROOT))
    line = "        self.cells = 0\n"
    assert found == kept.replace(line, line + "        # more\n")
    assert (tmp_path / "minfer/kv/plan.py").read_bytes() == (
        ROOT / "minfer/kv/plan.py"
    ).read_bytes()
    assert (tmp_path / "minfer/py.typed").is_file()


# --- who finds them -------------------------------------------------------------------------------


def test_the_machine_finds_a_fault_of_every_rule(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    shutil.copytree(ROOT / "minfer", plain / "minfer")
    with ThreadPoolExecutor(2) as pool:
        sound = pool.submit(machine, plain, "--examples", "20", "--sanitize")
        found = [pool.submit(assert_found, FAULTS[name], tmp_path / name) for name in QUICK]
    for one in found:
        one.result()
    assert sound.result()["found"] is None, sound.result()["message"]


def seen_by(*whom: str) -> list[str]:
    return [name for name, fault in FAULTS.items() if fault.heads["Seen-by"] in whom]


@pytest.mark.deep
@pytest.mark.parametrize("name", seen_by("examples and machine", "machine"))
def test_the_machine_finds(name: str, tmp_path: Path) -> None:
    assert_found(FAULTS[name], tmp_path / name)


@pytest.mark.deep
@pytest.mark.parametrize("name", seen_by("machine"))
def test_no_example_sees(name: str, tmp_path: Path) -> None:
    done = examples(tmp_path, FAULTS[name])
    assert done.returncode == 0, done.stdout[-3000:]
    assert re.search(r"\b\d\d\d passed", done.stdout)


@pytest.mark.deep
@pytest.mark.parametrize("name", seen_by("examples"))
def test_an_example_sees(name: str, tmp_path: Path) -> None:
    """Also shows that the example tests run over the faulted copy."""
    done = examples(tmp_path, FAULTS[name])
    assert done.returncode == 1 and "1 failed" in done.stdout, done.stdout[-3000:]
