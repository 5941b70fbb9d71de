"""Planted faults: unified diffs against minfer/, and a copy of the package with one of them in it.

By hand: `python tests/fault_patches.py tests/faults/NAME.patch FOLDER`.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDER = Path(__file__).parent / "faults"
HEADS = {"Rule", "Fault", "Seen-by", "Run-with"}


class PatchError(Exception):
    """A patch that cannot be read, or that does not fit the package."""


@dataclass(frozen=True)
class Hunk:
    """Lines of one file, before and after."""

    file: str
    title: str
    old: tuple[str, ...]
    new: tuple[str, ...]


@dataclass(frozen=True)
class Fault:
    """A patch: its name, `Key: value` lines from its head, and what it changes."""

    name: str
    heads: dict[str, str]
    hunks: tuple[Hunk, ...]

    @property
    def rule(self) -> str:
        return self.heads["Rule"]

    @property
    def by_machine_only(self) -> bool:
        """Whether no example test sees the fault."""
        return self.heads["Seen-by"] == "machine"

    @property
    def options(self) -> list[str]:
        """Options with which the machine runs."""
        return self.heads.get("Run-with", "").split()


def faults() -> list[Fault]:
    """Every patch of the folder, in order of rules."""
    read = [read_patch(path) for path in FOLDER.glob("*.patch")]
    return sorted(read, key=lambda fault: ([int(n) for n in fault.rule.split(".")], fault.name))


def read_patch(path: Path) -> Fault:
    """The fault that a file describes; whatever is not understood is an error."""
    lines = path.read_text().splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith("--- ")), len(lines))
    heads = dict(line.split(": ", 1) for line in lines[:start] if ": " in line)
    if not {"Rule", "Fault", "Seen-by"} <= set(heads) <= HEADS:
        raise PatchError(f"{path.name}: has heads {sorted(heads)}; known are {sorted(HEADS)}")
    hunks = read_hunks(path.name, lines[start:])
    if not hunks:
        raise PatchError(f"{path.name}: has no hunk")
    return Fault(path.stem, heads, tuple(hunks))


def read_hunks(name: str, lines: list[str]) -> list[Hunk]:
    hunks: list[Hunk] = []
    file, place = "", 0
    while place < len(lines):
        line = lines[place]
        if line.startswith("--- a/minfer/") and lines[place + 1 : place + 2] == [
            "+++ b/" + line.removeprefix("--- a/")
        ]:
            file, place = line.removeprefix("--- a/"), place + 2
        elif line.startswith("@@ ") and file:
            end = place + 1
            while end < len(lines) and not lines[end].startswith(("@@ ", "--- a/")):
                end += 1
            hunks.append(read_hunk(name, file, line, lines[place + 1 : end]))
            place = end
        else:
            raise PatchError(f"{name}: not a line of a unified diff of minfer/: {line!r}")
    return hunks


def read_hunk(name: str, file: str, title: str, lines: list[str]) -> Hunk:
    wrong = [line for line in lines if line[:1] not in ("", " ", "+", "-")]
    if wrong:
        raise PatchError(f"{name}: {file}: {title}: neither kept, added nor removed: {wrong[0]!r}")
    old = tuple(line[1:] for line in lines if line[:1] != "+")
    new = tuple(line[1:] for line in lines if line[:1] != "-")
    if old == new or not any(old):
        raise PatchError(f"{name}: {file}: {title}: changes nothing, or says not where")
    return Hunk(file, title, old, new)


def plant(fault: Fault, folder: Path) -> Path:
    """A copy of minfer/ in `folder` that has the fault; returns the copy."""
    copy = folder / "minfer"
    shutil.copytree(ROOT / "minfer", copy, ignore=shutil.ignore_patterns("__pycache__"))
    for hunk in fault.hunks:
        path = folder / hunk.file
        where = f"{fault.name}: {hunk.file}: {hunk.title}"
        if not path.is_file():
            raise PatchError(f"{where}: there is no such file")
        path.write_text("\n".join(replaced(path.read_text().split("\n"), hunk, where)))
    return copy


def replaced(lines: list[str], hunk: Hunk, where: str) -> list[str]:
    """`lines` with the old ones of a hunk, which must be there once, made new."""
    n = len(hunk.old)
    found = [i for i in range(len(lines) - n + 1) if tuple(lines[i : i + n]) == hunk.old]
    if len(found) != 1:
        raise PatchError(f"{where}: its old lines are there {len(found)} times, not once")
    return [*lines[: found[0]], *hunk.new, *lines[found[0] + n :]]


if __name__ == "__main__":
    patch, folder = map(Path, sys.argv[1:])
    planted = read_patch(patch)
    print(f"{plant(planted, folder)}: rule {planted.rule}, {planted.heads['Fault']}")
