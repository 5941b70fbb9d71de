"""Files of promoted rows: merged with new rows, shown as differences, written whole."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from minfer import atomic, tuned
from minfer.errors import Refusal
from minfer.receipt import short_path
from minfer.tuned import Row
from tuning.promote.decisions import Candidate, NotPromoted, asked_of, source_now

NO_NEWLINE = "\n\\ No newline at end of file\n"


@dataclass(frozen=True)
class Change:
    """One file as it is and as it will be. old: None where there is none yet."""

    path: Path
    old: str | None
    new: str

    @property
    def difference(self) -> str:
        """A unified diff, "" where nothing changes."""
        name = short_path(str(self.path))
        lines = difflib.unified_diff(
            _lines(self.old or ""),
            _lines(self.new),
            "/dev/null" if self.old is None else f"a/{name}",
            f"b/{name}",
        )
        return "".join(line if line.endswith("\n") else line + NO_NEWLINE for line in lines)

    def write(self) -> None:
        """The file, replaced whole; a Refusal leaves the old one.

        Refuses a file that is another by now: its rows are not in `new`.
        """
        if _text(self.path) != self.old:
            why = f"{self.path} was changed meanwhile; it is not written, start again"
            raise Refusal("8.3", why, {"path": str(self.path)})
        text = self.new.encode()
        try:
            with atomic.replacing(self.path, len(text)) as part:
                part.write(text)
        except OSError as error:
            why = f"{self.path} cannot be written: {error.strerror or error}; it is as it was"
            raise Refusal("8.3", why, {"path": str(self.path)}) from error


def change_of(
    folder: Path, kind: str, found: Sequence[Candidate]
) -> tuple[Change, list[Candidate]]:
    """The file of a kind of device with the candidates' rows, and each candidate's fate."""
    path = folder / f"{kind}.json"
    old, rows = _as_it_is(path, kind)
    new = [(c.row, c.question.device) for c in found if c.row is not None]
    kept = [row for row in rows if not any(_replaces(*one, row) for one in new)]
    fates = [_fate(candidate, kept, path) for candidate in found]
    if any(fate.row is not one.row for fate, one in zip(fates, found, strict=True)):
        return change_of(folder, kind, fates)
    return Change(path, old, tuned.dumped(kind, [*kept, *(row for row, _ in new)])), fates


def _as_it_is(path: Path, kind: str) -> tuple[str | None, list[Row]]:
    try:
        text = _text(path)
        return text, [] if text is None else tuned.loaded(path, kind)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        message = f"{path} cannot be read: {why}; mend it or remove it"
        raise Refusal("8.3", message, {"path": str(path)}) from None


def _text(path: Path) -> str | None:
    """What a file holds, with its own ends of lines; None where there is none."""
    try:
        return path.read_bytes().decode()
    except FileNotFoundError:
        return None


def _lines(text: str) -> list[str]:
    """Lines with their ends, as `git apply` counts them."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def _replaces(new: Row, device: str, old: Row) -> bool:
    """Whether an old row goes: the new one is of the same make, or its own text is gone."""
    if (new.op, new.key) != (old.op, old.key):
        return False
    return dict(new.made_with) == dict(old.made_with) or not _is_current(old, device)


def _is_current(row: Row, device: str) -> bool:
    """Whether the code of its variant is what it was; a module that is not here may be so."""
    asked = asked_of(row, device)
    variant = asked.variants[row.op].get(row.variant)
    if variant is None or tuned.module_of(variant, asked.device) != row.module:
        return bool(row.module)
    return source_now(variant) == row.source


def _fate(candidate: Candidate, kept: Sequence[Row], path: Path) -> Candidate:
    """The candidate, or without its row where a row that stays would disagree with it."""
    row = candidate.row
    for other in kept if row is not None else ():
        assert row is not None
        if other.op == row.op or other.key != row.key or other.made_with != row.made_with:
            continue
        device = candidate.question.device
        if _is_current(other, device) and _settled(other, device) != _settled(row, device):
            why = f"the row of {other.op} in {path.name} names {_named(other)}, this one"
            why += f" {_named(row)}, and their bits must be equal (contract 6.1): sweep both"
            return Candidate(candidate.decided, None, why)
    return candidate


def _settled(row: Row, device: str) -> object:
    try:
        return tuned.settled(row, asked_of(row, device))
    except (NotPromoted, KeyError):  # of a module that is not here
        return row.variant, row.module, tuple(row.numeric.items())


def _named(row: Row) -> str:
    return " ".join([row.variant, *(f"{name}={value}" for name, value in row.numeric.items())])
